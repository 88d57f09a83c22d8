"""`mc.timeline`: who answered a compiled function's calls, in order, and why others were captured."""

from __future__ import annotations

import re

import pytest
import torch

import minicompile as mc
from minicompile.debug.history import Timeline
from minicompile.errors import OptionError


def grow(x: torch.Tensor, k: float) -> torch.Tensor:
    if k > 2:
        return torch.relu(x) * k
    return x + k


SCRIPT = [
    *((3, 1.0), (3, 1.0), (5, 1.0), (7, 1.0), (3, 1.0)),  # a new size: it becomes symbolic
    *((3, 3.0), (4, 3.0), (4, 4.0)),  # a new number: that, too
    (3, -1.0),  # the other way through the `if`
    (3, 1.0),
]
WRITTEN = """\
timeline of grow: 10 calls, 4 versions, 0 in eager
  call 1: there is no version; made version 1
    calls 1 to 2: 2 by version 1
  call 3: no version fits; made version 2, symbolic: x.size(0)
    version 1: x is f32[3] failed: found shape (5,) (was (3,))
      needed at LINE in grow: return x + k
    calls 3 to 5: 1 by version 1, 2 by version 2
  call 6: no version fits; made version 3, symbolic: k
    version 1: k == 1.0 failed: found 3.0
      needed at LINE in grow: if k > 2:
    version 2: k == 1.0 failed: found 3.0
      needed at LINE in grow: if k > 2:
    calls 6 to 8: 3 by version 3
  call 9: no version fits; made version 4
    version 1: k == 1.0 failed: found -1.0
      needed at LINE in grow: if k > 2:
    version 2: k == 1.0 failed: found -1.0
      needed at LINE in grow: if k > 2:
    version 3: (k > 2) == True failed: found False
      needed at LINE in grow: if k > 2:
    calls 9 to 10: 1 by version 1, 1 by version 4"""


def without_lines(timeline: Timeline) -> str:
    return re.sub(r"\S+\.py:\d+", "LINE", str(timeline))


def test_a_script_of_calls_gives_the_timeline_written_by_hand() -> None:
    run = mc.compile(grow, backend="eager")
    for size, k in SCRIPT:
        run(torch.ones(size), k)
    [timeline] = mc.timeline(run)
    assert without_lines(timeline) == WRITTEN
    assert all(0 < miss.seconds < 60 for miss in timeline.misses)
    assert "\ntimeline of grow: 11 calls" in str(mc.explain(run)(torch.ones(3), 1.0))
    mc.reset()
    assert str(mc.timeline(run)[0]) == "timeline of grow: 0 calls, 0 versions, 0 in eager"


def test_calls_in_eager_say_why_and_the_limit_is_told() -> None:
    run = mc.compile(grow, backend="eager", dynamic=False, options={"recompile_limit": 2})
    with pytest.warns(UserWarning, match="in eager from here on") as said:
        for size in (1, 2, 3, 4, 1):
            run(torch.ones(size), 1.0)
    assert len(said) == 1
    [timeline] = mc.timeline(run)
    assert [(miss.call, miss.made) for miss in timeline.misses] == [(1, 1), (2, 2), (3, 0)]
    last, answered = timeline.stretches[-1]
    assert last.why is not None and last.why.id == "recompile-limit"
    assert [failure.version for failure in last.failures] == [1, 2]
    assert answered == {0: 2, 1: 1, 2: 0}
    assert "calls 3 to 5: 2 in eager, 1 by version 1" in str(timeline)


def test_what_was_not_compiled_has_no_timeline() -> None:
    with pytest.raises(OptionError, match=r"give what mc\.compile returned"):
        mc.timeline(grow)
