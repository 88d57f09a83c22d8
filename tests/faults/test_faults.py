"""Planted faults: each is seen, named by the bisector and made small by the minifier."""

from __future__ import annotations

import pytest

import minicompile as mc
from tests.faults import back, front  # noqa: F401
from tests.faults.table import FAULTS

MOST_OPERATORS = 5


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_made_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    target = mc.compile(fault.program, options=fault.options)
    assert mc.bisect(target, fault.args, more=fault.more).verdict == "it never fails"
    with mc.scoped(), monkeypatch.context() as patch:
        fault.plant(patch)
        found = mc.bisect(target, fault.args, more=fault.more)
        small = mc.minify(target, fault.args, more=fault.more)
    assert found.subsystem == fault.subsystem, str(found)
    if fault.subsystem:
        assert found.culprit is not None and fault.operation in found.culprit.name, str(found)
    assert small.program is not None, str(small)
    assert 1 <= small.operations <= MOST_OPERATORS, str(small)
