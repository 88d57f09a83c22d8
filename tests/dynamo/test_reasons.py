"""Every reason for a break has an id, an explanation and a usual fix; what refuses names one of them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile import compat
from minicompile.dynamo.reasons import REASONS
from minicompile.dynamo.refusals import FUNCTIONS, OF_TENSORS
from minicompile.errors import BackendError, NoRoom
from tests.dynamo.helpers import explained

ROOM = Path(mc.__file__).parent / "dynamo"
REFUSING = {"unsupported", "refusal", "refuse"}
TABLES: tuple[tuple[Any, ...], ...] = (FUNCTIONS, OF_TENSORS)
"""What refuses by name: rows that begin with an id."""
x = torch.randn(3)


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
    found |= {compat.PART_GONE, compat.PYTHON_UNKNOWN, BackendError.reason, NoRoom.reason}
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


def test_explanations_and_fixes_say_something_of_their_own() -> None:
    explanations = [reason.explanation for reason in REASONS.values()]
    assert len(set(explanations)) == len(explanations)
    for id, reason in REASONS.items():
        assert id == id.lower() and " " not in id
        assert reason.explanation.endswith(".") and len(reason.explanation.split()) >= 6, id
        assert len(reason.fix.split()) >= 3, id


def branches(a: torch.Tensor) -> torch.Tensor:
    if a.sum() > 0:
        return a + 1
    return a - 1


def prints(a: torch.Tensor) -> torch.Tensor:
    b = a + 1
    print("between")
    return b * 2


@pytest.mark.parametrize(
    ("function", "id", "line"),
    [(branches, "branch-on-tensor", "if a.sum() > 0:"), (prints, "print", 'print("between")')],
)
def test_fullgraph_raises_one_error_with_id_line_and_fix(function, id, line) -> None:
    with pytest.raises(mc.Unsupported) as caught:
        mc.compile(function, backend="eager", fullgraph=True)(x)
    error = caught.value
    first, at, fix = str(error).split("\n")
    assert error.id == id and first.endswith(f"[{id}]")
    assert at.startswith("  at ") and at.endswith(line)
    assert fix == f"  usual fix: {REASONS[id].fix}"
    assert error.__cause__ is None


def test_what_a_later_room_refuses_has_an_id_too() -> None:
    def refuses(a: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(a.to_sparse(), a)

    run = mc.compile(refuses, backend="aot_eager")
    a = torch.ones(2, 2)
    assert torch.equal(run(a), refuses(a))
    assert {stop.id for stop in explained(run).breaks} <= set(REASONS)
