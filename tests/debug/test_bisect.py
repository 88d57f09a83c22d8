"""`mc.bisect` and `minicompile bisect`: planted bugs are found, in their subsystem and at the user's line."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.__main__ import main
from minicompile.debug.bisect import bisect_script
from minicompile.extension import call_rules
from minicompile.lessons.bugs import planted
from minicompile.ops.display import to_html
from tests.show.test_views import parsed

aten = torch.ops.aten


INPUT = torch.linspace(-3, 3, 36).reshape(4, 9)
WITH_NAN = torch.where(INPUT[1, 1] == INPUT, torch.nan, INPUT)


def layered(x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.silu(x)
    y = torch.tanh(y * -1)
    y = torch.erf(y + 1)
    y = torch.softmax(y, -1)
    return torch.relu(y + x).neg().neg() * torch.sin(x)


CASES = [  # tests/faults has many more
    ("same sign", INPUT, "prims pass", "prims.tidy_products", "tanh"),
    ("half rotation", INPUT, "decomposition", "aten.silu.default", "silu"),
    ("lost nan", WITH_NAN, "lowering", "aten.relu.default", "relu"),
    ("wrong base", INPUT, "plan rule", "any:bases", "softmax"),
]


@pytest.mark.long
@pytest.mark.parametrize("bug, x, subsystem, name, source", CASES, ids=lambda v: str(v)[:20])
def test_a_planted_bug_is_found(
    bug: str,
    x: torch.Tensor,
    subsystem: str,
    name: str,
    source: str,
) -> None:
    with planted(bug):
        found = mc.bisect(layered, [x])
    assert found.subsystem == subsystem, str(found)
    assert found.culprit is not None and found.culprit.name == name
    assert any(source in line for line in found.culprit.lines), str(found)
    assert found.tries[-1].failure == ""
    assert bug != "wrong base" or ("ops.exp(" in str(found) and "ops.exp2(" in str(found))
    parsed(to_html(found))


def test_a_bug_before_aot_is_in_the_captured_frame() -> None:
    with mc.scoped():
        call_rules(torch.erf)(lambda tracer, args, kwargs: args[0])
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
