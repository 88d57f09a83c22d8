"""A bisection: what was found, what it changed, and every try."""

from __future__ import annotations

from minicompile.debug.bisect import Bisection
from minicompile.show.html import box, code, facts, shows, table, text
from minicompile.show.palette import BAD, GOOD


def colour(line: str) -> str | None:
    return {"+": GOOD, "-": BAD}.get(line[:1])


@shows(Bisection)
def bisection(found: Bisection) -> str:
    changes = "\n".join(
        f'<span style="color:{c}">{text(line)}</span>' if (c := colour(line)) else text(line)
        for line in found.changes
    )
    tries = [
        [code(setting), f'<span style="color:{BAD if t.failure else GOOD}">{text(told)}</span>']
        for t in found.tries
        for setting, told in [t.cells]
    ]
    content = facts(found.facts) + f"<pre>{changes}</pre>" * bool(changes)
    content += table(("allowed", ""), tries)
    return box(f"bisection of {found.name}", found.verdict, content)
