"""Small programs, compiled and not: twice, with other values, after a change of globals, with more rows.

A program is one graph at every call, unless its listing says `whole=False`.
"""

from __future__ import annotations

from typing import Any

import pytest

import minicompile as mc
from tests.dynamo.helpers import explained
from tests.dynamo.program_table import STEPS, fresh, names, run

PROGRAMS = names()
FLOOR = 93
"""Percent of the programs that run without a whole frame in eager."""


def compile_eager(function: Any, dynamic: bool | None = None) -> Any:
    return mc.compile(function, backend="eager", dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("table", "name"), PROGRAMS, ids=[name for _, name in PROGRAMS])
def test_program_gives_what_python_gives(table: str, name: str, dynamic: bool | None) -> None:
    theirs, _ = run(table, name, lambda function: function)
    ours, compiled = run(table, name, lambda function: compile_eager(function, dynamic))
    assert theirs.keys() == ours.keys()
    for step, shown in theirs.items():
        assert ours[step] == shown, step
    if fresh(table).program.programs[name].whole:
        assert not explained(compiled).breaks


@pytest.mark.parametrize("mistake", [lambda a: a.add_(1), lambda a: print(1), lambda a: a + 1])
def test_a_mistake_would_be_noticed(mistake: Any) -> None:
    def mistaken(function: Any) -> Any:
        def call(a: Any) -> Any:
            made = mistake(a)
            return function(a) if made is None or made is a else made

        return call

    right, _ = run("table_functions", "reads_a_global", lambda function: function)
    wrong, _ = run("table_functions", "reads_a_global", mistaken)
    assert right.keys() == wrong.keys() and right != wrong


@pytest.mark.long
def test_most_programs_run_without_a_whole_frame_in_eager() -> None:
    """Operations are in graphs, no frame nor the rest of one was refused."""
    in_eager: dict[str, list[str]] = {}
    for table, name in PROGRAMS:
        _, compiled = run(table, name, compile_eager, STEPS[:4])
        found = explained(compiled)
        refused = [stop.reason for stop in found.breaks if stop.kind == "frame"]
        if refused or (found.op_count == 0 and found.breaks):
            in_eager[name] = refused
    share = 100 * (1 - len(in_eager) / len(PROGRAMS))
    for name, reasons in in_eager.items():
        print(f"{name}: {'; '.join(reasons) or 'no operation in a graph'}")
    print(f"{len(PROGRAMS)} programs, {share:.1f}% without a whole frame in eager")
    assert share >= FLOOR
