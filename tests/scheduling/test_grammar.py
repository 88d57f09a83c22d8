"""The grammars at the heads of files are those of the classes below them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from types import ModuleType
from typing import get_args

import pytest

from minicompile.ops.table import POINTWISE
from minicompile.scheduling import body, nodes


def rules(module: ModuleType) -> dict[str, str]:
    """The right sides of a grammar, without comments, by name."""
    text = re.sub(r"\n {12,}", " ", module.__doc__ or "")
    return dict(re.findall(r"^    (\w+) +:= (.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("module", [nodes, body], ids=["nodes", "body"])
def test_each_class_has_the_fields_that_the_grammar_says(module: ModuleType) -> None:
    grammar = rules(module)
    classes = {
        name
        for name, kind in inspect.getmembers(module, dataclasses.is_dataclass)
        if kind.__module__ == module.__name__
    }
    assert classes <= grammar.keys()
    for name, rule in grammar.items():
        if name in classes:
            parts = re.sub(r"\[[^\]]*\]|\([^)]*\)|\{[^}]*\}", "", rule).partition("   ")[0]
            told = [part.strip().partition(":")[0] for part in parts.split(",")]
            fields = [field.name for field in dataclasses.fields(getattr(module, name))]
            told = [word for word in told if re.fullmatch(r"[a-z_]+", word)]
            assert told == fields, name
        else:
            told = rule.partition("  ")[0].split(" | ")
            assert told == [kind.__name__ for kind in get_args(getattr(module, name))]


def test_each_operation_of_a_body_is_in_its_table() -> None:
    rows = dict(re.findall(r"^        (\w+) {2,}([a-z_, ]+?)(?:  .*)?$", body.__doc__ or "", re.M))
    fields = {field.name for field in dataclasses.fields(body.Value)}
    for names in rows.values():
        assert set(names.split(", ")) <= fields
    calls = ast.walk(ast.parse(inspect.getsource(body.Recorder)))
    emitted = {
        call.args[0].value
        for call in calls
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("emit", "_emit_at")
        and isinstance(call.args[0], ast.Constant)
    }
    assert rows.keys() == emitted
    assert not rows.keys() & POINTWISE.keys()
