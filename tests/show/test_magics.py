"""`%load_ext minicompile`: the magics in a real IPython shell, by what they display."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from minicompile.debug.diff import Diff
from minicompile.ops.display import to_html
from minicompile.pipeline_result import Trace

SETUP = """
import torch
seen = []
x = torch.ones(8, 16)
def f(x):
    return torch.relu(x * 2).sum(-1)
"""

FUNCTION = """
seen.append("cell")
def g(x):
    y = torch.relu(x)
    return y * 3
def given():
    seen.append("argument")
    return x
g(given())
"""


@pytest.fixture(scope="module")
def started() -> InteractiveShell:
    quiet = Config()
    quiet.HistoryManager.enabled = False
    shell = InteractiveShell(config=quiet)
    shell.run_line_magic("load_ext", "minicompile")
    return shell


@pytest.fixture
def shell(started: InteractiveShell) -> Iterator[InteractiveShell]:
    started.run_cell(SETUP).raise_error()
    yield started
    started.reset()


def value(shell: InteractiveShell, cell: str) -> Any:
    """What a cell gives; raises what it raised."""
    done = shell.run_cell(cell)
    done.raise_error()
    return done.result


def displayed(shell: InteractiveShell, result: Any) -> tuple[str, str]:
    """The mime bundle that a notebook gets: text and HTML."""
    assert shell.display_formatter is not None
    shell.display_formatter.active_types = ["text/plain", "text/html"]
    bundle, _ = shell.display_formatter.format(result)
    return bundle["text/plain"], bundle["text/html"]


@pytest.mark.long
def test_stages_shows_the_linked_view_of_the_call(shell: InteractiveShell) -> None:
    found = value(shell, "%%stages\n" + FUNCTION)
    assert isinstance(found, Trace) and found.name == "g"
    text, page = displayed(shell, found)
    assert text == str(found) and page == to_html(found)
    lines = {line.text for line in found.source_lines()}
    assert {"y = torch.relu(x)", "return y * 3"} <= lines, "the cell's own lines are known"


@pytest.mark.long
def test_the_cell_runs_once_the_call_not_at_all_and_its_names_stay(shell: InteractiveShell) -> None:
    value(
        shell, "%%stages\ndef counted(x):\n    seen.append('call')\n    return x + 1\n" + FUNCTION
    )
    assert shell.user_ns["seen"] == ["cell", "argument"]
    assert torch.equal(value(shell, "g(x)"), shell.user_ns["x"] * 3)


@pytest.mark.long
def test_named_stages_are_shown_in_that_order(shell: InteractiveShell) -> None:
    loops = value(shell, "%%stages loops\nf(x)")
    assert str(loops).startswith("# forward, by lowering")
    both = value(shell, "%%stages wrapper kernels\nf(x)")
    text, page = displayed(shell, both)
    assert text.index("def call(") < text.index("int64_t cpp_fused") and "<table" not in text
    assert page.index("calls 1 kernel") < page.index("helpers")
    assert [type(stage).__name__ for stage in both] == ["WrapperSource", "Several"]


@pytest.mark.long
def test_options_and_the_backward_graph(shell: InteractiveShell) -> None:
    assert len(value(shell, "%%stages kernels --fusion=False --inline=never\nf(x)")) == 3
    assert "s0" in str(value(shell, "%%stages loops --dynamic=True\nf(x)"))
    value(shell, "w = x.clone().requires_grad_()")
    backward = value(shell, "%%stages loops --backward\nf(w)")
    assert str(backward).startswith("# backward, by lowering")


@pytest.mark.long
def test_compile_diff_of_two_versions(shell: InteractiveShell) -> None:
    cell = "%%compile_diff\nseen.append(1)\ndef h(x):\n    return torch.relu(x) + 1\nh(x)\n# ---\n"
    cell += "seen.append(2)\ndef h(x):\n    return torch.sigmoid(x) + 1\nh(x)"
    found = value(shell, cell)
    assert isinstance(found, Diff) and found.changes and shell.user_ns["seen"] == [1, 2]
    text, page = displayed(shell, found)
    assert "relu" in text and "sigmoid" in text and "sigmoid" in page


@pytest.mark.long
def test_compile_diff_of_two_sets_of_options(shell: InteractiveShell) -> None:
    found = value(shell, "%%compile_diff --inline=never --fusion=False\nseen.append(1)\nf(x)")
    assert ("option fusion", "True", "False") in found.facts
    assert shell.user_ns["seen"] == [1]
    same = value(shell, "%%compile_diff\nf(x)\n# ---\nf(x)")
    assert not same.changes


@pytest.mark.long
@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("%%stages\nz = f(x)", "must end with a call"),
        (
            "%%stages nothing\nseen.append(1)\nf(x)",
            "no stage 'nothing'; known: capture, aot, loops",
        ),
        ("%%stages --backward\nf(x)", "no backward graph: nothing in the call requires grad"),
        ("%%stages --dynamic=7\nf(x)", "dynamic must be one of True, False, None"),
        ("%%stages kernels\nprint(x)", "print is called"),
        ("%%compile_diff\nf(x)", "with a line '# ---' between them"),
        ("%%compile_diff\nseen.append(1)\nf(x)\n# ---\nz = 1", "must end with a call"),
    ],
)
def test_errors_are_one_sentence_and_nothing_has_run(
    shell: InteractiveShell, cell: str, told: str
) -> None:
    with pytest.raises(UsageError, match=told.replace("(", r"\(")):
        value(shell, cell)
    assert shell.user_ns["seen"] == []


@pytest.mark.long
def test_errors_in_the_cell_are_the_cells_own(shell: InteractiveShell) -> None:
    with pytest.raises(ZeroDivisionError):
        value(shell, "%%stages\n1 / 0\nf(x)")
    with pytest.raises(SyntaxError):
        value(shell, "%%stages\ndef (:\nf(x)")
