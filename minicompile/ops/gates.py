"""Gates: functions that may forbid one application of a rule, as bisection does to find the wrong one.

    @gate("no memory is used twice")
    def strict(what: Application) -> bool:
        return what.subsystem != "memory"

Rooms ask with `allowed` before each application. One that is refused leaves the program slower, never wrong:

| subsystem | an application | refused |
| --- | --- | --- |
| capture | a frame | runs in eager |
| pre_grad, joint, prims, post_grad pass | a pass over a graph, a match of a pattern | not done |
| vjp | a registered gradient of an ATen operator | torch's formula |
| decomposition | a call of an operator | stays that operator |
| partitioner | a joint graph | saves all that the backward reads |
| lowering | a call of an operator | a library call |
| fusion | two groups that become one kernel | two kernels |
| memory | a result in another's memory | memory of its own |
| plan rule | a decision about a kernel | the plain plan |
| code generator | a kernel | the reference interpreter runs its loops (debug/reference.py) |

They ask in an order that is the same in every run: applications can be counted. The real compiler:
CompilerBisector.disable_subsystem in torch/_inductor/compiler_bisector.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minicompile.ops.origin import NO_ORIGINS, Origins
from minicompile.ops.registry import Registry

REFUSED = "refused by a gate"
"""The reason where a decision keeps one."""


@dataclass(frozen=True)
class Application:
    """One use of a rule. `before` is for at once, `after` and `origins` for when all is compiled."""

    subsystem: str
    name: str
    """The rule's, as `mc.without` and options know it; of a decision, what it is about."""
    before: Callable[[], object]
    after: Callable[[], object]
    origins: Callable[[], Origins]


gate: Registry[Callable[[Application], bool]] = Registry(
    "gate", "name -> whether an application of a rule may be done"
)


def allowed(
    subsystem: str,
    name: object,
    before: Callable[[], object] = str,
    after: Callable[[], object] = str,
    origins: Callable[[], Origins] = lambda: NO_ORIGINS,
) -> bool:
    """Do all gates let this application pass? With no gate, asking costs a look at an empty table."""
    if not gate:
        return True
    what = Application(subsystem, str(name), before, after, origins)
    answers = [ask(what) for ask in gate.values()]
    return all(answers)
