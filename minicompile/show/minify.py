"""A minified program: how it fails, the graph that is left, and what was left away."""

from __future__ import annotations

from minicompile.debug.minify import Minified
from minicompile.show.html import box, details, facts, inside, shows, table, text


@shows(Minified)
def minified(found: Minified) -> str:
    content = facts(found.facts)
    if found.program is not None:
        content += inside(found.program.shown())
        script = f'<pre class="code">{text(found.script)}</pre>'
        content += details("script", "exit code 1 while it fails", script)
    rows = [[text(cell) for cell in step.cells()] for step in found.steps]
    head = ("reduction", "operations", "inputs", "elements", "calls")
    if rows:
        content += details("reductions", f"{found.tries} tries", table(head, rows))
    return box(f"minified {found.name}", found.verdict, content)
