"""Programs whose outside changes: with all guards, without helpers in C, with each kind of guard deleted."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import minicompile as mc
from minicompile.compat import settings
from minicompile.dynamo.guards import guard_rules
from minicompile.dynamo.result import GUARD_KINDS
from minicompile.plugins.guard_snapshot import facts
from tests.dynamo.guard_torch_programs import PROGRAMS
from tests.dynamo.helpers import equal, explained, outcome


def differences(name: str) -> list[str]:
    """What a program does otherwise than in eager, compiled on its first call and then called again."""
    make, _, backend = PROGRAMS[name]
    compiled: Any = None
    found: list[str] = []
    with contextlib.closing(make()) as states:  # a program's own cleanup runs whatever happens here
        for number, (function, arguments) in enumerate(states):
            if compiled is None:
                options = {"recompile_limit": 40}
                compiled = mc.compile(function, backend=backend, options=options)
            right = outcome(function, *arguments())
            for attempt in (1, 2):
                given = outcome(compiled, *arguments())
                if not equal(comparable(given), comparable(right)):
                    found.append(f"state {number}, call {attempt}: {given} instead of {right}")
    assert explained(compiled).graph_count, f"{name} was never captured"
    return found


def comparable(seen: tuple[str, Any]) -> Any:
    """An outcome; of an exception only the class: Python words `f()` without `a` by how it was called."""
    kind, what = seen
    return (kind, what[0]) if kind == "raised" else seen


def proofs(kind: str) -> list[str]:
    """Programs that are said to need a kind of guard."""
    return [name for name, (_, kinds, _) in PROGRAMS.items() if kind in kinds]


def unnoticed(kind: str) -> list[str]:
    """Programs that claim to prove a kind of guard, and still give right answers without it."""
    with mc.without(f"guard:{kind}"):
        return [name for name in proofs(kind) if not differences(name)]


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_cached_graph_is_used_only_where_it_is_right(name: str) -> None:
    assert differences(name) == []


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_nor_without_helpers_in_c(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "load_extension", lambda source: None)
    monkeypatch.setattr(settings, "GlobalStateGuard", None)
    assert differences(name) == []


def test_every_kind_of_guard_has_a_rule() -> None:
    assert set(guard_rules) == set(GUARD_KINDS)


@pytest.mark.parametrize("kind", sorted(guard_rules))
def test_a_deleted_kind_of_guard_is_noticed(kind: str) -> None:
    assert proofs(kind) and unnoticed(kind) == []
