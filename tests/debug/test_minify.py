"""`mc.minify`, `minicompile minify`, and the report of an internal error: small programs that still fail."""

from __future__ import annotations

import re
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.__main__ import main
from minicompile.debug.minify import reduction
from minicompile.debug.program import GraphCall, TensorSpec
from minicompile.extension import call_rules, graph_pass
from minicompile.lessons.bugs import planted
from minicompile.ops.display import to_html
from tests.debug.test_bisect import INPUT, WITH_NAN, layered
from tests.show.test_views import parsed

LOOPS = {"device_codegen": "reference"}
"""Nothing waits for a C++ compiler."""


def exit_code(script: Path) -> int:
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.long
@pytest.mark.parametrize(
    "bug, x, call",
    [
        ("same sign", INPUT, "operator.mul"),
        ("half rotation", INPUT, "silu"),
        ("lost nan", WITH_NAN, "torch.relu"),
    ],
)
def test_a_bug_is_made_one_operation(bug: str, x: torch.Tensor, call: str, tmp_path: Path) -> None:
    file, before = tmp_path / "small.py", x.clone()
    with planted(bug):
        found = mc.minify(mc.compile(layered, options=LOOPS), [x], script=file)
        assert exit_code(file) == 1
    assert exit_code(file) == 0  # without the bug
    assert torch.equal(x, before) or bug == "lost nan"
    assert found.operations == 1 and f"{call}(" in found.graph, str(found)
    assert "12 operations became 1" in str(found)
    kept = "values=" in found.script
    assert kept == (bug == "lost nan") == ("seed=0" not in found.script)
    parsed(to_html(found))


def test_the_failure_stays_the_same() -> None:
    """Two bugs: what raises must not become what is wrong."""

    def both(x: torch.Tensor) -> torch.Tensor:
        return torch.erf(torch.nn.functional.silu(x)) + 1

    with planted("no table", "half rotation"):
        found = mc.minify(mc.compile(both, options=LOOPS), [INPUT])
    assert "the table is empty" in found.failure and "torch.erf(" in found.graph
    assert found.operations == 1 and "NoneType" not in found.graph


@pytest.mark.long
def test_a_gradient_is_a_failure_and_needs_one() -> None:
    with planted("wrong slope"):
        x = INPUT.clone().requires_grad_()
        found = mc.minify(mc.compile(layered, options=LOOPS), [x])
    assert found.operations == 1 and "requires_grad=True" in found.script and x.grad is None


def test_a_wrong_capture_is_left_to_bisection() -> None:
    with mc.scoped():
        call_rules(torch.erf)(lambda tracer, args, kwargs: args[0])
        found = mc.minify(mc.compile(layered, options=LOOPS), [INPUT])
    assert found.program is None and "mc.bisect finds the rule" in found.verdict


def test_a_reduction_from_outside_takes_part() -> None:
    with mc.scoped(), planted("no table"):

        @reduction("the constant 3")
        def constant(program: GraphCall) -> Iterator[GraphCall | None]:
            args = (TensorSpec.of(torch.full((3,), 3.0)) for _ in program.args)
            yield program.with_graph(program.graph.gm.graph, tuple(args))

        found = mc.minify(mc.compile(torch.erf, options=LOOPS), [INPUT])
    assert found.program is not None and found.program.size[3] == 3


@pytest.mark.parametrize(
    "target, args, verdict",
    [
        (layered, [INPUT], "it never fails"),
        (lambda x: x.view(7), [INPUT], "it fails in eager already"),
    ],
)
def test_nothing_to_make_small(target: Any, args: Any, verdict: str) -> None:
    found = mc.minify(mc.compile(target, options=LOOPS), args)
    assert found.verdict.startswith(verdict) and found.program is None
    assert str(found).startswith("minified ") and parsed(to_html(found))


SCRIPT = """
import sys
import torch
import minicompile as mc

def f(x):
    return torch.erf(x) - x

x = torch.ones(3)
y = mc.compile(f)(x)
sys.exit(0 if torch.allclose(y, f(x)) else 3)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "program.py"
    file.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return file


def test_a_script_is_made_small(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with planted("no table"):
        assert main(["minify", str(script)]) == 0
    told = capsys.readouterr().out
    assert (
        "minified f: 2 operations became 1" in told
        and "erf = torch.erf(x)" in Path("minified.py").read_text()
    )
    with planted("no table"):
        assert exit_code(Path("minified.py")) == 1
    assert exit_code(Path("minified.py")) == 0


def test_a_script_that_is_right(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["minify", str(script)]) == 1
    assert "no graph that it compiles fails" in capsys.readouterr().err
    assert main(["minify", "nowhere.py"]) == 1


@pytest.mark.long
def test_an_internal_error_is_reported_with_the_command(tmp_path: Path) -> None:
    options = {**LOOPS, "debug_dir": str(tmp_path / "mine")}

    def told(fullgraph: bool) -> str:
        with planted("no table"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call = mc.compile(layered, fullgraph=fullgraph, options=options)
            if not fullgraph:
                torch.testing.assert_close(call(INPUT), layered(INPUT))
                return str(caught[0].message)
            with pytest.raises(RuntimeError) as raised:
                call(INPUT)
            return "\n".join(raised.value.__notes__)

    message, notes = told(False), told(True)
    (folder,) = (tmp_path / "mine").iterdir()
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700  # it has the user's code
    command = f"python -m minicompile minify {folder}/repro.py"
    assert command in message and command in notes
    names = {path.name for path in folder.iterdir()}
    assert {"error.txt", "versions.txt", "repro.py", "fx_graph_readable.py"} <= names
    assert "RuntimeError: erf: the table is empty" in (folder / "error.txt").read_text()
    assert f"torch {torch.__version__}" in (folder / "versions.txt").read_text()
    with planted("no table"):
        assert exit_code(folder / "repro.py") == 1
        out = tmp_path / "small.py"
        assert main(["minify", "--out", str(out), str(folder / "repro.py")]) == 0
        assert exit_code(out) == 1 and re.search(r"^        erf = ", out.read_text(), re.M)
    assert exit_code(folder / "repro.py") == 0


def test_an_error_message_cannot_become_code(tmp_path: Path) -> None:
    call = mc.compile(layered, options={**LOOPS, "debug_dir": str(tmp_path)})
    with mc.scoped(), warnings.catch_warnings():
        warnings.simplefilter("ignore")

        @graph_pass("explode", stage="post_grad")
        def explode(gm: Any, mode: Any) -> int:
            raise IndexError('"""\n\rraise SystemExit(7)\n\x0c"""')

        call(INPUT)
        (script,) = tmp_path.glob("*/repro.py")
        assert exit_code(script) == 1


def test_a_user_error_is_not_reported(tmp_path: Path) -> None:
    call = mc.compile(lambda x: x.view(7), options={"debug_dir": str(tmp_path)})
    with pytest.raises(RuntimeError):
        call(INPUT)
    assert not list(tmp_path.iterdir())
