"""Small programs, compiled and not: twice, with other values, after a change of globals, with more rows."""

from __future__ import annotations

from typing import Any

import pytest

import minicompile as mc
from tests.dynamo.helpers import explained
from tests.dynamo.program_table import STEPS, names, run

PROGRAMS = names()
FLOOR = 77
"""Percent of the programs that run without a whole frame in eager."""

WRONG = {
    # what is interpreted differently from CPython
    "deleted_cell": "a cell that was deleted still reads as its last value",
    "missing_argument": "the TypeError of a missing argument has another text",
    "exception_context": "an exception raised in a handler has no __context__",
    "property_set_and_deleted": "deleting through a property raises AttributeError",
    "init_subclass_and_class_getitem": "the write of __init_subclass__ is done once, at capture",
    "list_grows_while_iterated": "a list from outside that grows is iterated as it was",
    "dict_changes_size_while_iterated": "a dict that grows while iterated raises nothing",
    "default_device_context": "`with torch.device(...)` has no effect on factories",
    # what no guard watches
    "changed_bases": "`__bases__` of a class",
    "getattr_of_a_module": "`__getattr__` appears in a module",
    "alias_of_a_library": "an attribute appears in a module (getattr with a default)",
    "attribute_of_sys": "an attribute appears in a module (hasattr)",
    "getattribute_is_added": "`__getattribute__` appears in a class",
    "getattr_is_added": "`__getattr__` appears in a class",
    "class_renamed": "`__name__` of a class",
    "truth_of_an_object": "`__len__` appears in a class whose object was tested for truth",
    "bool_is_added": "`__bool__` appears in a class whose object was tested for truth",
    "equality_is_added": "`__eq__` appears in a class whose objects were compared",
    "call_is_added": "`__call__` appears in a class (callable)",
    "instance_check_of_a_metaclass": "what `__instancecheck__` reads",
    "attribute_through_the_metaclass": "an attribute appears in a metaclass (getattr with a default)",
    "order_of_an_ordered_dict": "the order of an OrderedDict",
}
"""Programs that are wrong today, and what is wrong. One that became right must leave this table."""


def compile_eager(function: Any) -> Any:
    return mc.compile(function, backend="eager")


@pytest.mark.parametrize(("table", "name"), PROGRAMS, ids=[name for _, name in PROGRAMS])
def test_program_gives_what_python_gives(
    table: str, name: str, request: pytest.FixtureRequest
) -> None:
    if name in WRONG:
        request.applymarker(pytest.mark.xfail(reason=WRONG[name], strict=True))
    theirs, _ = run(table, name, lambda function: function)
    ours, _ = run(table, name, compile_eager)
    assert theirs.keys() == ours.keys()
    for step, shown in theirs.items():
        assert ours[step] == shown, step


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


def test_there_are_enough_programs() -> None:
    assert len({name for _, name in PROGRAMS}) == len(PROGRAMS) >= 220
    assert WRONG.keys() <= {name for _, name in PROGRAMS}


def test_most_programs_run_without_a_whole_frame_in_eager() -> None:
    """Graphs were made and nothing broke: twice as listed, with other values, after the change."""
    in_eager: dict[str, list[str]] = {}
    for table, name in PROGRAMS:
        _, compiled = run(table, name, compile_eager, STEPS[:4])
        found = explained(compiled)
        if found.graph_count == 0 or found.breaks:
            in_eager[name] = [stop.reason for stop in found.breaks]
    share = 100 * (1 - len(in_eager) / len(PROGRAMS))
    for name, reasons in in_eager.items():
        print(f"{name}: {'; '.join(reasons) or 'no graph'}")
    print(f"{len(PROGRAMS)} programs, {share:.1f}% without a whole frame in eager")
    assert share >= FLOOR
