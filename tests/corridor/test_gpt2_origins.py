"""Every line of GPT-2's training that computes, loads or stores leads back to source; so do PTX and SASS."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
import torch

import minicompile as mc
from minicompile.codegen.plan import CodeLine, KernelSource
from minicompile.debug.gpu_assembly import Assembly, cross_compile
from minicompile.pipeline_result import Trace

pytestmark = pytest.mark.long

pytest.importorskip("transformers")


INSTRUCTION = {"ptx": r"\t(@?%?\w+ )?[a-z][\w.]*[ ;]", "sass": r"\s*/\*[0-9a-f]{4,}\*/"}
PROLOGUE = r"\tld\.param"


def training(language: str) -> Trace:
    """A training step of transformers' GPT-2, of one layer, small."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tokens = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0, "n_positions": 64}
    size = {"n_embd": 64, "n_layer": 1, "n_head": 4, "use_cache": False}
    ids = torch.randint(0, 128, (2, 64))
    compiled = mc.compile(
        GPT2LMHeadModel(GPT2Config(**tokens, **size, **drop)),
        options={"device_codegen": language},
    )
    return mc.trace(compiled, input_ids=ids, labels=ids)


def kinds(lines: Iterable[CodeLine]) -> Counter[str]:
    """How many lines are scaffold, and how many others have origins or none."""
    found = Counter[str]()
    for line in lines:
        if line.text.strip():
            own = "with origins" if line.origins else "without"
            found["scaffold" if line.scaffold else own] += 1
    return found


def instructions(assembly: Assembly, level: str) -> Counter[str]:
    """How many instructions of a level come from which kind of kernel line."""
    found, located, table = Counter[str](), False, ""
    places = assembly.kernel_lines(level)
    for text, place in zip(assembly.levels[level].splitlines(), places, strict=True):
        table = next(iter(re.findall(r"\.loc\s+\d+ (\d+)", text)), table)
        if not re.match(INSTRUCTION[level], text):
            continue
        located |= place is not None
        if place is not None:
            found["scaffold" if assembly.source.lines[place].scaffold else "with origins"] += 1
        else:
            early = level == "ptx" and (not located or re.match(PROLOGUE, text))
            found["prologue" if early else "line 0" if table == "0" else "without"] += 1
    return found


def kernels(trace: Trace) -> list[KernelSource]:
    return [kernel for stages in trace.graphs.values() for kernel in stages.kernels]


def assemblies(sources: Iterable[KernelSource]) -> Iterator[Assembly]:
    """Each distinct kernel, compiled."""
    distinct = {kernel.text.replace(kernel.name, ""): kernel for kernel in sources}
    yield from map(cross_compile, distinct.values())


@pytest.fixture(scope="module", params=["cpp", "triton"])
def trace(request) -> Trace:
    return training(request.param)


def test_every_line_of_gpt2s_training_that_computes_has_origins(trace):
    found = kinds(line for kernel in kernels(trace) for line in kernel.lines)
    assert found["with origins"] > 300 and found["without"] == 0
    for stages in trace.graphs.values():
        assert kinds(stages.wrapper.lines)["without"] == 0


def test_few_instructions_have_no_kernel_line(trace):
    sources = [kernel for kernel in kernels(trace) if kernel.language == "triton"]
    if not sources:
        pytest.skip("C++ kernels")
    pytest.importorskip("triton")
    totals = {"ptx": Counter[str](), "sass": Counter[str]()}
    for assembly in assemblies(sources[::6]):
        for level in totals.keys() & assembly.levels.keys():
            totals[level] += instructions(assembly, level)
    for level, found in totals.items():
        if found or level == "ptx":
            named = found["with origins"] + found["scaffold"]
            assert named >= 0.95 * (named + found["without"]), (level, found)
            assert found["line 0"] <= 0.1 * named  # where the line table has none
