"""Planted faults: each is seen, named by the bisector and, if a graph is compiled wrong, made small."""

from __future__ import annotations

from pathlib import Path

import pytest

import minicompile as mc
from minicompile.debug.bisect import SUBSYSTEMS
from tests.debug.test_minify import exit_code
from tests.faults import back, front  # noqa: F401  they fill the table
from tests.faults.table import FAULTS

MOST_OPERATORS = 5
NOT_NAMED = {"a write through a view is lost", "tensors are not guarded"}
"""Their subsystem has no gate: the bisector names the backend. Functionalization can't be left out, and a
frame whose guards are too weak is right in the backend "eager"."""


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_made_small(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fault, script = FAULTS[name], tmp_path / "small.py"
    target = mc.compile(fault.program, options=fault.options)
    assert mc.bisect(target, fault.args, more=fault.more).verdict == "it never fails"
    with mc.scoped(), monkeypatch.context() as patch:
        fault.plant(patch)
        found = mc.bisect(target, fault.args, more=fault.more)
        small = mc.minify(target, fault.args, more=fault.more, script=script)
        alone = fault.subsystem != "capture" and not fault.more
        if not alone:  # no graph is compiled wrong, or it takes two calls to see that
            assert small.program is None and "mc.bisect finds" in str(small)
        else:
            assert small.program is not None, str(small)
            assert exit_code(script) == 1, small.script
    assert not alone or exit_code(script) == 0, small.script  # the fault is gone
    assert found.subsystem == fault.subsystem, str(found)
    if fault.subsystem:
        assert found.culprit is not None and fault.operation in found.culprit.name, str(found)
    else:
        assert found.backend and "no subsystem cures it" in found.verdict, str(found)
    assert small.program is None or 1 <= small.operations <= MOST_OPERATORS, str(small)


def test_there_are_many_of_all_kinds() -> None:
    assert len(FAULTS) >= 40
    assert {name for name, fault in FAULTS.items() if not fault.subsystem} == NOT_NAMED
    assert {fault.subsystem for fault in FAULTS.values()} >= {*sum(SUBSYSTEMS.values(), ())}
    assert len({issue for fault in FAULTS.values() for issue in fault.issues}) >= 20
