"""The grammar at the head of lowering/ir.py is its classes."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, get_args

import pytest
import torch

from minicompile.lowering import ir

GRAMMAR = str(ir.__doc__)
CLASSES = dict(re.findall(r"([A-Z]\w+)\(([\w, ]+)\)", GRAMMAR))
NOTES = {"origins", "made_by", "why", "reads", "size_hints", "written_back", "index"}
"""Fields that say where something is from, or help to choose: results don't depend on them."""


def names_of(rule: str) -> set[str]:
    """The alternatives of a rule `Rule := A(...) | B(...)`."""
    text = GRAMMAR.partition(f"    {rule} ")[2].partition(":=")[2]
    lines = re.split(r"\n    (?=\w)", text)
    return {name.strip() for name in re.sub(r"\(.*?\)", "", lines[0]).split("|")}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_the_fields_of_the_grammar(name: str) -> None:
    fields = [field.name for field in dataclasses.fields(getattr(ir, name))]
    assert CLASSES[name].split(", ") == [field for field in fields if field not in NOTES]


@pytest.mark.parametrize("rule", ["Operation", "Loops"])
def test_a_rule_has_the_classes_of_its_union(rule: str) -> None:
    union = get_args(getattr(ir, rule))
    members = {*union, *(c for cls in union for c in cls.__subclasses__())}
    assert names_of(rule) == {cls.__name__ for cls in members}


def test_no_class_is_left_out() -> None:
    classes = {name for name, cls in vars(ir).items() if dataclasses.is_dataclass(cls)}
    own = {name for name in classes if vars(ir)[name].__module__ == ir.__name__}
    assert own - set(CLASSES) == {"Buffer", "ExternOutput"}, (
        "what others share, and what a call fills"
    )


def test_what_a_buffer_is_the_result_of_is_where_it_is_from_unless_said() -> None:
    layout = ir.Layout(torch.device("cpu"), torch.float32, (2,), (1,))
    of: Any = ("relu",)
    assert ir.ComputedBuffer("a", layout, of).made_by == of
    assert ir.ComputedBuffer("a", layout, of, made_by=("add",)).made_by == ("add",)
