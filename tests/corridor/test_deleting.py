"""Deleting a source operation changes exactly the kernel lines attributed to it: the law of `deleting.py`."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import minicompile as mc
from minicompile.lessons import model as lesson
from minicompile.pipeline_result import Trace
from tests.corridor.deleting import DECISIONS, Deletion
from tests.corridor.test_provenance import load

LANGUAGES = ["cpp", "triton"]

FUNCTIONS = {
    "softmax": """
        h = torch.sigmoid(x)
        h = h * 2.0  # delete
        h = torch.relu(h)  # delete
        h = h + 1.5  # delete
        return torch.softmax(h, -1)
    """,
    "normalised": """
        h = torch.sin(x)
        h = h * y  # delete
        h = F.layer_norm(h, (32,))  # delete
        h = torch.tanh(h)  # delete
        g = h.sum(0)
        g = g * 3.0  # delete
        return g, h
    """,
    "residual": """
        a = x
        h = F.layer_norm(x, (32,))
        h = F.gelu(h)  # delete
        h = h * y  # delete
        a = a + h
        h = torch.sigmoid(a)
        h = h - 0.5  # delete
        a = a + h
        return a.mean(-1)
    """,
    "transposed": """
        h = x.t()
        h = torch.exp(h)
        h = h.contiguous()  # delete
        h = torch.where(h > 0.5, h, y.t())  # delete
        h = h * 0.25  # delete
        h = h.relu()  # delete
        return h
    """,
    "scanned": """
        h = torch.sin(x)
        h = h * 2.5  # delete
        h = torch.cumsum(h, -1)
        h = h + y  # delete
        return h
    """,
    "half": """
        h = x.half()
        h = h * 2.5  # delete
        h = torch.relu(h)  # delete
        h = h + y.half()  # delete
        h = h.float()
        return h.amax(-1)
    """,
    "indexed": """
        i = (y * 3).long().clamp(0, 7)
        h = x[i[:, 0]]
        h = h * 2.5  # delete
        h = torch.cos(h)  # delete
        h = h.view(4, 2, 32)  # delete
        h = h.transpose(0, 1)  # delete
        h = h * h  # delete
        return h
    """,
    "columns": """
        h = torch.exp(x)
        h = h * y  # delete
        v, m = torch.var_mean(h, 0)
        h = h - m
        h = h * torch.rsqrt(v + 0.1)
        k = torch.where(h > 0, h, y)
        k = torch.abs(k)  # delete
        return h.argmax(0), k.std(1), k.amin(0)
    """,
}
HEAD = "import torch\nimport torch.nn.functional as F\n\n\ndef f(x, y):\n"

WITHOUT_LESSON = {
    "gelu": ("F.gelu(self.widen(x))", "self.widen(x)"),
    "scale": (" * (1.0 / math.sqrt(width // heads))", ""),
    "mask": ('scores = scores.masked_fill(~visible, float("-inf"))', "pass"),
    "softmax": ("torch.softmax(scores, dim=-1)", "scores"),
    "norm1": ("self.norm1(x)", "x"),
    "norm2": ("self.norm2(x)", "x"),
    "last norm": ("self.head(self.norm(x))", "self.head(x)"),
    "residual": ("x = x + self.mlp(self.norm2(x))", "x = self.mlp(self.norm2(x))"),
}
WITHOUT_GPT2 = {
    "activation": ("hidden_states = self.act(hidden_states)", "pass"),
    "scale": (" * scaling", ""),
    "mask": ("attn_weights = attn_weights + attention_mask", "pass"),
    "softmax": ("nn.functional.softmax(attn_weights, dim=-1)", "attn_weights"),
    "norm": ("hidden_states = self.ln_2(hidden_states)", "pass"),
    "residual": ("hidden_states = attn_output + residual", "hidden_states = attn_output"),
}
"""Operations by name: text of the source, and what stands there without them."""

Traced = Callable[[str, str], Trace]
"""Source text and language -> the trace of a training step."""


def without(traced: Traced, text: str, change: tuple[str, str], language: str) -> Deletion:
    assert change[0] in text
    return Deletion.between(traced(text, language), traced(text.replace(*change, 1), language))


def options(language: str) -> dict[str, object]:
    return {"device_codegen": language, "cpp_flags": ("-O0",), **DECISIONS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deleting")


@pytest.fixture
def function(folder: Path) -> Traced:
    def traced(text: str, language: str) -> Trace:
        (path := folder / "function_under_test.py").write_text(text)
        linecache.clearcache()
        torch.manual_seed(0)
        x, y = torch.randn(8, 32, requires_grad=True), torch.rand(8, 32)
        return mc.trace(mc.compile(load(path).f, options=options(language)), x, y)

    return traced


@pytest.fixture(scope="module")
def lesson_model(folder: Path) -> Traced:
    @functools.cache
    def traced(text: str, language: str) -> Trace:
        (path := folder / "gpt_under_test.py").write_text(text)
        linecache.clearcache()
        module = load(path)
        model = module.GPT(module.GPTConfig(n_layer=1, n_embd=16, n_head=2, block_size=8))
        tokens = torch.randint(0, 90, (2, 9))
        inputs = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return mc.trace(mc.compile(model, options=options(language)), *inputs)

    return traced


@pytest.fixture(scope="module")
def gpt2(folder: Path) -> Traced:
    @functools.cache
    def traced(text: str, language: str) -> Trace:
        (path := folder / "modeling_gpt2.py").write_text(text)
        linecache.clearcache()
        module = load(path)
        tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "n_positions": 16}
        size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "use_cache": False}
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = module.GPT2Config(**tokens, **size, **drop, attn_implementation="eager")
        ids = torch.randint(0, 64, (2, 16))
        compiled = mc.compile(module.GPT2LMHeadModel(config), options=options(language))
        return mc.trace(compiled, input_ids=ids, labels=ids)

    return traced


def gpt2_source() -> str:
    """transformers' GPT-2, as a module that stands alone."""
    pytest.importorskip("transformers", minversion="5.24")
    found = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    text = Path(found.__file__).read_text()
    text = text.replace("from ... import", "from transformers import")
    text = text.replace("from ...", "from transformers.")
    return text.replace("from .config", "from transformers.models.gpt2.config")


@pytest.mark.long
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_deleting_an_operation_changes_exactly_its_lines(function, name, language):
    text = HEAD + FUNCTIONS[name].replace("        ", "    ")
    marked = [line for line in text.splitlines() if line.endswith("# delete")]
    assert marked
    for line in marked:
        deletion = without(function, text, (line, "    pass"), language)
        assert not (found := deletion.violations()), (line, found)
        views = {"contiguous", "view", "transpose"} & {target for _, target in deletion.deleted}
        assert deletion.exact or views, f"no line lists {line.strip()} alone"


@pytest.mark.long
@pytest.mark.parametrize("name", WITHOUT_LESSON)
def test_deleting_an_operation_of_the_lesson_model_changes_exactly_its_lines(lesson_model, name):
    text = Path(lesson.__file__).read_text()
    for language in LANGUAGES if name in ("gelu", "residual") else ["triton"]:
        deletion = without(lesson_model, text, WITHOUT_LESSON[name], language)
        assert not deletion.violations()
        assert deletion.exact


@pytest.mark.parametrize("name", WITHOUT_GPT2)
def test_deleting_an_operation_of_gpt2_changes_exactly_its_lines(gpt2, name):
    for language in LANGUAGES if name == "activation" else ["triton"]:
        deletion = without(gpt2, gpt2_source(), WITHOUT_GPT2[name], language)
        assert not deletion.violations()
        assert deletion.exact
