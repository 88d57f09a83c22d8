"""Accuracy by operator: a table, what is too far off in red."""

from __future__ import annotations

from minicompile.debug.accuracy import error_text
from minicompile.debug.operators import OperatorAccuracy, OperatorRow
from minicompile.show.html import box, code, shows, table, text
from minicompile.show.palette import BAD


def cells(row: OperatorRow) -> list[str]:
    operator, roundings, allowed, *_ = row.cells()
    return [
        f'<span title="{text(row.line)}">{code(operator)}</span>',
        *map(text, (roundings, allowed)),
        *(
            code(error_text(error), BAD if error > row.allowed else None)
            for error in row.errors.values()
        ),
    ]


@shows(OperatorAccuracy)
def operators(found: OperatorAccuracy) -> str:
    rows = [cells(row) for row in found.rows]
    numbers = tuple(range(1, len(OperatorAccuracy.HEAD)))
    content = table(OperatorAccuracy.HEAD, rows, numbers=numbers)
    return box(f"accuracy of {found.name} by operator", found.verdict, content)
