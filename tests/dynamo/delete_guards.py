"""Takes each kind of guard away in turn: programs that prove it must then give wrong answers.

`python -m tests.dynamo.delete_guards` prints a table and exits with 1 if a kind can be deleted unnoticed.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import Any

import minicompile as mc
from minicompile.dynamo.guards import guard_rules
from tests.dynamo.guard_programs_more import PROGRAMS
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


def main() -> int:
    warnings.simplefilter("ignore")
    deletable = []
    for kind in sorted(guard_rules):
        claimed = proofs(kind)
        failed = sorted(set(claimed) - set(unnoticed(kind)))
        print(f"without {kind}: {len(failed)} of {len(claimed)} programs fail: {', '.join(failed)}")
        if not failed:
            deletable.append(kind)
    if deletable:
        print(f"deleted unnoticed: {', '.join(deletable)}")
    return 1 if deletable else 0


if __name__ == "__main__":
    sys.exit(main())
