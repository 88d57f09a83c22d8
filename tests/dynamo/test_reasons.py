"""Every reason for a break has an id, an explanation and a usual fix; what refuses names one of them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch

import minicompile as mc
from minicompile import compat
from minicompile.dynamo.reasons import REASONS
from minicompile.dynamo.refusals import FUNCTIONS, OF_TENSORS
from minicompile.errors import BackendError
from tests.dynamo.helpers import explained

ROOM = Path(mc.__file__).parent / "dynamo"
REFUSING = {"unsupported", "unsupported_kind", "refusal", "refuse"}
TABLES: tuple[tuple[Any, ...], ...] = (FUNCTIONS, OF_TENSORS)
"""What refuses by name: rows that begin with an id."""


def names_in(node: ast.AST) -> list[str]:
    """The texts that an expression can be: those of `"a"`, `"a" if c else "b"`, `*("a", b)`."""
    if isinstance(node, ast.Starred):
        return names_in(node.value)
    if isinstance(node, ast.Tuple):
        return names_in(node.elts[0])
    if isinstance(node, ast.IfExp):
        return [*names_in(node.body), *names_in(node.orelse)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def used_ids() -> set[str]:
    """First arguments of everything that refuses, also where a local name `id` stands for it."""
    found = {id for table in TABLES for id, *_ in table}
    found |= {compat.PART_GONE, compat.PYTHON_UNKNOWN, BackendError.reason}
    for path in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "id":
                found.update(names_in(node.value))
            if isinstance(node, ast.Call) and node.args:
                called = node.func
                name = (
                    called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                )
                found.update(names_in(node.args[0]) if name in REFUSING else ())
                raw = name in ("Unsupported", "UserError")
                assert not raw, f"{path.name}:{node.lineno} refuses without an id: use refusal()"
    return found


def test_every_id_in_use_is_explained_and_every_explanation_is_in_use() -> None:
    assert used_ids() == set(REASONS)


def test_what_a_later_room_refuses_has_an_id_too() -> None:
    def refuses(a: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(a.to_sparse(), a)

    run = mc.compile(refuses, backend="aot_eager")
    a = torch.ones(2, 2)
    assert torch.equal(run(a), refuses(a))
    assert {stop.id for stop in explained(run).breaks} <= set(REASONS)
