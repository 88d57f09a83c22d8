"""`mc.bisect` and `minicompile bisect`: planted bugs are found, in their subsystem and at the user's line."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.__main__ import main
from minicompile.codegen import cpp
from minicompile.codegen.generate import code_generator
from minicompile.codegen.plan import KernelModule
from minicompile.debug.bisect import bisect_script
from minicompile.extension import call_rules, graph_pass
from minicompile.lessons.bugs import planted
from minicompile.ops.display import to_html
from minicompile.scheduling import in_place
from minicompile.scheduling.fusion import Fuser
from tests.show.test_views import parsed

aten = torch.ops.aten
Plant = Callable[[pytest.MonkeyPatch], object]
BUGS: dict[str, Plant] = {}


def bug(name: str) -> Callable[[Plant], Plant]:
    """Adds what plants a bug."""
    return lambda plant: BUGS.setdefault(name, plant)


INPUT = torch.linspace(-3, 3, 36).reshape(4, 9)
WITH_NAN = torch.where(INPUT[1, 1] == INPUT, torch.nan, INPUT)


def layered(x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.silu(x)
    y = torch.tanh(y * -1)
    y = torch.erf(y + 1)
    y = torch.softmax(y, -1)
    return torch.relu(y + x).neg().neg() * torch.sin(x)


def turned(x: torch.Tensor) -> torch.Tensor:
    y = x @ x.t()
    return y.exp() + y.t()


def interrupted(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    z = torch.sort(y).values
    return z + y


@bug("a captured call")
def wrong_call(patch: pytest.MonkeyPatch) -> None:
    call_rules(torch.erf)(lambda tracer, args, kwargs: args[0])


@bug("a pass that crashes")
def crash(patch: pytest.MonkeyPatch) -> None:
    @graph_pass("explode", stage="post_grad")
    def explode(gm: Any, mode: Any) -> int:
        raise IndexError("out of nodes")


@bug("a pattern")
def wrong_pattern(patch: pytest.MonkeyPatch) -> None:
    mc.register_pattern("keep", search=lambda x: torch.tanh(x), examples=[torch.empty(2)])(
        torch.sin
    )


@bug("a fusion")
def wrong_fusion(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fuser, "_cycle", lambda self, a, b: None)


@bug("a place in memory")
def wrong_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(in_place, "refusal", lambda node, old, new: None)


@bug("a printer")
def wrong_printer(patch: pytest.MonkeyPatch) -> None:
    def misprint(plans: Any) -> KernelModule:
        module = cpp.kernel_module(plans)
        changed = [text.replace("sin", "cos") for text in module.units]
        for kernel in module.kernels:
            kernel.lines = [replace(k, text=k.text.replace("sin", "cos")) for k in kernel.lines]
        return replace(module, text=module.text.replace("sin", "cos"), units=tuple(changed))

    code_generator("cpp")(misprint)


CASES = [
    ("same sign", layered, INPUT, "prims pass", "prims.tidy_products", "tanh"),
    ("half rotation", layered, INPUT, "decomposition", "aten.silu.default", "silu"),
    ("lost nan", layered, WITH_NAN, "lowering", "aten.relu.default", "relu"),
    ("wrong base", layered, INPUT, "plan rule", "any:bases", "softmax"),
    ("a pass that crashes", layered, INPUT, "post_grad pass", "post_grad.explode", ""),
    ("a pattern", layered, INPUT, "joint pass", "pattern:keep", "tanh"),
    ("a fusion", interrupted, INPUT, "fusion", "buf0 and buf2", "z + y"),
    ("a place in memory", turned, INPUT, "memory", "buf1 in place of buf0", "y.t()"),
    ("a printer", layered, INPUT, "code generator", None, "sin"),
]


@pytest.mark.long
@pytest.mark.parametrize(
    "bug, function, x, subsystem, name, source", CASES, ids=lambda v: str(v)[:20]
)
def test_a_planted_bug_is_found(
    bug: str,
    function: Any,
    x: torch.Tensor,
    subsystem: str,
    name: str | None,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with mc.scoped():
        if bug in BUGS:
            BUGS[bug](monkeypatch)
            found = mc.bisect(function, [x])
        else:
            with planted(bug):
                found = mc.bisect(function, [x])
    assert found.subsystem == subsystem, str(found)
    assert found.culprit is not None and found.culprit.name == (name or found.culprit.name)
    assert any(source in line for line in found.culprit.lines) or not source, str(found)
    assert found.tries[-1].failure == ""
    assert bug != "wrong base" or ("ops.exp(" in str(found) and "ops.exp2(" in str(found))
    parsed(to_html(found))


def test_a_bug_before_aot_is_in_the_captured_frame() -> None:
    with mc.scoped():
        wrong_call(pytest.MonkeyPatch())
        found = mc.bisect(layered, [INPUT])
    assert (found.backend, found.subsystem) == ("eager", "capture")
    assert found.culprit is not None and "def layered" in found.culprit.lines[0]


@pytest.mark.long
def test_a_wrong_gradient_and_a_written_argument_count() -> None:
    x = INPUT.clone().requires_grad_()
    with planted("wrong slope"):
        found = mc.bisect(torch.tanh, [x])
    assert (found.subsystem, x.grad) == ("vjp", None)

    def write(x: torch.Tensor) -> None:
        x.copy_(torch.relu(x))

    given = WITH_NAN.clone()
    with planted("lost nan"):
        assert mc.bisect(write, [given]).subsystem == "lowering"
    assert torch.equal(given.nan_to_num(), WITH_NAN.nan_to_num())


def test_a_check_of_ones_own() -> None:
    with planted("half rotation"):
        found = mc.bisect(
            layered, [INPUT], check=lambda y: bool((y - layered(INPUT)).abs().max() < 1e-5)
        )
    assert (found.subsystem, found.backend) == ("decomposition", "aot_eager")


@pytest.mark.parametrize(
    "function, check, verdict",
    [
        (layered, lambda y: True, "it never fails"),
        (layered, lambda y: False, "it fails in eager already: the compiler has no part in it"),
        (lambda x: x.view(7), None, "it fails in eager"),
    ],
)
def test_nothing_to_find(function: Any, check: Any, verdict: str) -> None:
    found = mc.bisect(function, [INPUT], check)
    assert found.verdict.startswith(verdict) and found.culprit is None


def test_what_is_flaky_is_told() -> None:
    answers = itertools.chain([True, True, False], itertools.cycle([True]))
    found = mc.bisect(layered, [INPUT], lambda y: next(answers))
    assert found.verdict == "two runs of the same setting differ (inductor): it is flaky"


SCRIPT = """
import sys
import torch
import minicompile as mc
from minicompile.lessons.bugs import planted

def f(x):
    return torch.erf(x) - x

x = torch.ones(3)
with planted(*sys.argv[1:]):
    y = mc.compile(f)(x)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(SCRIPT + "sys.exit(0 if torch.allclose(y, f(x)) else 3)\n")
    return file


@pytest.mark.long
def test_a_script_is_bisected(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", str(script), "no table"]) == 0
    told = capsys.readouterr().out
    assert "bisection of program.py: lowering, aten.erf.default\n" in told
    assert "fails: internal error of minicompile: RuntimeError: erf: the table is empty" in told
    assert "source: program.py:8 in f: return torch.erf(x) - x" in told


@pytest.mark.long
def test_a_script_that_never_fails_or_always(script: Path) -> None:
    with warnings.catch_warnings():
        found = bisect_script([str(script)])
    assert (found.verdict, found.culprit) == ("it never fails", None)
    script.write_text("import sys; sys.exit('no data')")
    found = bisect_script([str(script)])
    assert found.verdict.startswith("it fails in eager") and "exit code 1: no data" in str(found)
    script.write_text("import time; time.sleep(60)")
    assert "took over 0.5 s" in str(bisect_script([str(script)], timeout=0.5))


def test_a_script_must_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "nowhere.py"]) == 1
    assert capsys.readouterr().err == "minicompile bisect: there is no script nowhere.py\n"
