"""What the tools that run a program in several ways report: accuracies, bisections, minified programs, both
compilers side by side.
"""

from __future__ import annotations

from minicompile.debug.accuracy import Accuracy
from minicompile.debug.bisect import Bisection
from minicompile.debug.minify import Minified
from minicompile.debug.operators import OperatorAccuracy, OperatorRow
from minicompile.debug.torch_side import OURS, THEIRS, Cell, Comparison
from minicompile.debug.variant import StageAccuracy, error_text
from minicompile.show.html import beside, box, code, details, facts, inside, shows, table, text
from minicompile.show.listing import headline
from minicompile.show.palette import BAD, GOOD, NEUTRAL

WARNING = "#f59e0b"
COLOURS = {
    **dict.fromkeys(("same as eager", "as accurate as eager", "close to eager"), GOOD),
    **dict.fromkeys(("far from eager", "wrong", "raised"), BAD),
    **dict.fromkeys(("less accurate than eager", "not compiled"), WARNING),
}


def judgement(verdict: str) -> str:
    return f'<b style="color:{COLOURS.get(verdict, NEUTRAL)}">{text(verdict)}</b>'


def coloured(hue: str, content: object) -> str:
    return f'<span style="color:{hue}">{text(content)}</span>'


def stage_table(*stages: StageAccuracy) -> str:
    rows = []
    for stage in stages:
        name, *errors, verdict, note = stage.cells()
        note = f"<small>{text(note)}</small>"
        rows.append([text(name), *map(code, errors), judgement(verdict), note])
    return table(Accuracy.HEAD, rows, numbers=(1, 2, 3, 4))


shows(StageAccuracy)(lambda stage: box(stage.stage, stage.verdict, stage_table(stage)))
shows(Accuracy)(lambda accuracy: box(*headline(accuracy), stage_table(*accuracy.stages)))


def operator_cells(row: OperatorRow) -> list[str]:
    """The cells of an operator; errors that are too large are marked."""
    operator, allowed, *_ = row.cells()
    errors = (code(error_text(e), BAD if e > row.allowed else None) for e in row.errors.values())
    name = f'<span title="{text(row.line)}">{code(operator)}</span>'
    return [name, text(allowed), *errors]


@shows(OperatorAccuracy)
def operators(accuracy: OperatorAccuracy) -> str:
    numbers = tuple(range(1, len(OperatorAccuracy.HEAD)))
    content = table(OperatorAccuracy.HEAD, map(operator_cells, accuracy.rows), numbers=numbers)
    return box(f"accuracy of {accuracy.name} by operator", accuracy.verdict, content)


@shows(Bisection)
def bisection(search: Bisection) -> str:
    """What was search, what it changed, and every try."""
    hues = {"+": GOOD, "-": BAD}
    changes = "\n".join(
        coloured(hues[line[0]], line) if line[:1] in hues else text(line) for line in search.changes
    )
    tries = ((t, *t.cells) for t in search.tries)
    rows = ([code(name), coloured(BAD if t.failure else GOOD, told)] for t, name, told in tries)
    content = facts(search.facts) + f'<pre class="code">{changes}</pre>' * bool(changes)
    content += table(("allowed", ""), rows)
    return box(f"bisection of {search.name}", search.verdict, content)


@shows(Minified)
def minified(result: Minified) -> str:
    """How it fails, the graph that is left, and what was left away."""
    content = facts(result.facts)
    if result.program is not None:
        content += inside(result.program.graph)
        script = f'<pre class="code">{text(result.script)}</pre>'
        content += details("script", "exit code 1 while it fails", script)
    return box(f"minified {result.name}", result.verdict, content)


def cell_table(*cells: Cell) -> str:
    rows = []
    for cell in cells:
        row = [*map(code, cell.cells())]
        row[Cell.HEAD.index("verdict")] = judgement(cell.accuracy.verdict)
        rows.append(row)
    return table(Cell.HEAD, rows, numbers=(2, 3, 4, 5, 7, 8, 9))


@shows(Comparison)
def comparison_view(comparison: Comparison) -> str:
    """The four ways to join the halves, and each stage in two columns."""
    folded = (
        details(name, f"{len(ours)} and {len(theirs)}", beside((OURS, ours), (THEIRS, theirs)))
        for name, (ours, theirs) in comparison.stages.items()
    )
    return box(
        *headline(comparison),
        cell_table(*comparison.cells),
        "".join(f"<div><small>{text(note)}</small></div>" for note in comparison.notes),
        *folded,
    )
