"""Accuracy of every stage as a table, its verdicts coloured."""

from __future__ import annotations

from minicompile.debug.accuracy import Accuracy, StageAccuracy
from minicompile.show.html import box, code, shows, table, text
from minicompile.show.listing import headline
from minicompile.show.palette import BAD, GOOD, NEUTRAL

COLOURS = {
    "same as eager": GOOD,
    "as accurate as eager": GOOD,
    "close to eager": GOOD,
    "far from eager": BAD,
    "less accurate than eager": "#f59e0b",
    "not compiled": "#f59e0b",
    "wrong": BAD,
    "raised": BAD,
}


def judgement(verdict: str) -> str:
    return f'<b style="color:{COLOURS.get(verdict, NEUTRAL)}">{text(verdict)}</b>'


def stage_table(*stages: StageAccuracy) -> str:
    rows = []
    for stage in stages:
        name, *errors, verdict, note = stage.cells()
        rows.append(
            [text(name), *map(code, errors), judgement(verdict), f"<small>{text(note)}</small>"]
        )
    return table(Accuracy.HEAD, rows, numbers=(1, 2, 3, 4))


shows(StageAccuracy)(lambda stage: box(stage.stage, stage.verdict, stage_table(stage)))
shows(Accuracy)(lambda found: box(*headline(found), stage_table(*found.stages)))
