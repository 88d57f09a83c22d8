"""minicompile beside torch.compile: the 2 x 2, the counts, and each stage in two columns."""

from __future__ import annotations

import re

from minicompile.debug.torch_side import OURS, THEIRS, Cell, Code, Comparison, Stage
from minicompile.show.accuracy import judgement
from minicompile.show.html import beside, box, code, details, shows, table, text
from minicompile.show.listing import headline, plain_code


@shows(Code)
def code_view(made: Code) -> str:
    """Inductor writes Python with the kernels' C++ or Triton in raw strings."""
    languages = ["python", "cpp" if "#include" in made.text else "python"]
    pieces = re.split(r"(?<=r''')\n|(?=^'''\))", made.text, flags=re.MULTILINE)
    parts = (plain_code(piece, languages[i % 2], False) for i, piece in enumerate(pieces))
    return box(made.name, "by Inductor", *parts)


def stage_columns(stage: Stage) -> str:
    return beside((OURS, stage.ours), (THEIRS, stage.theirs))


def cell_table(*cells: Cell) -> str:
    rows = []
    for cell in cells:
        row = [*map(code, cell.cells())]
        row[Cell.HEAD.index("verdict")] = judgement(cell.accuracy.verdict)
        rows.append(row)
    return table(Cell.HEAD, rows, numbers=(2, 3, 4, 5, 7, 8, 9, 10))


shows(Stage)(lambda stage: box(stage.name, f"{OURS} and {THEIRS}", stage_columns(stage)))
shows(Cell)(lambda cell: box(f"{cell.capture} with {cell.compiler}", "", cell_table(cell)))


@shows(Comparison)
def comparison_view(found: Comparison) -> str:
    counts = ([text(what), code(ours), code(theirs)] for what, ours, theirs in found.counts())
    folded = (
        details(name, f"{len(stage.ours)} and {len(stage.theirs)}", stage_columns(stage))
        for name, stage in found.stages.items()
    )
    return box(
        *headline(found),
        cell_table(*found.cells),
        f"<small>{text(found.timing)}</small>",
        table(("", OURS, THEIRS), counts, numbers=(1, 2)),
        "".join(f"<div><small>{text(note)}</small></div>" for note in found.notes),
        *folded,
    )
