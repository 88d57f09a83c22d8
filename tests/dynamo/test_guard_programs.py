"""Programs whose outside changes: with all guards, without helpers in C, with each kind of guard deleted."""

from __future__ import annotations

import pytest

from minicompile import compat
from minicompile.compat import settings
from minicompile.dynamo.guards import guard_rules
from minicompile.dynamo.result import GUARD_KINDS
from minicompile.plugins.guard_snapshot import facts
from tests.dynamo.delete_guards import differences, proofs, unnoticed
from tests.dynamo.guard_programs_more import PROGRAMS


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_cached_graph_is_used_only_where_it_is_right(name: str) -> None:
    assert differences(name) == []


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_nor_without_helpers_in_c(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "load_extension", lambda source: None)
    monkeypatch.setattr(settings, "GlobalStateGuard", None)
    monkeypatch.setattr(compat.guards, "TensorGuards", None)
    assert differences(name) == []


def test_every_kind_of_guard_has_a_rule() -> None:
    assert set(guard_rules) == set(GUARD_KINDS)


@pytest.mark.parametrize("kind", sorted(guard_rules))
def test_a_deleted_kind_of_guard_is_noticed(kind: str) -> None:
    assert proofs(kind) and unnoticed(kind) == []
