"""Exported programs and packages: the conditions of a call, the graph, the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minicompile.ops.dtypes import value_text
from minicompile.show.graph_pictures import graph_parts
from minicompile.show.html import box, code, details, facts, shows, table, text
from minicompile.show.listing import headline

if TYPE_CHECKING:
    from minicompile.exporting.exported import Exported


def conditions(constraints: Sequence[Any]) -> str:
    rows = ([code(c.condition, wrap=True), text(c.reason), text(c.line)] for c in constraints)
    return table(("constraint", "why", "line"), rows)


@shows("minicompile.exporting.exported.Exported")
def exported(program: Exported) -> str:
    state = facts((name, value_text(value)) for name, value in program.state.items())
    parts = [conditions(program.constraints), graph_parts(program.graph)]
    parts.append(details("state", "", state) if program.state else "")
    return box(*headline(program), *parts, facts([("returns", program.structure)]))


@shows("minicompile.exporting.load.Package")
def package(loaded: Any) -> str:
    return box(str(loaded).split("\n")[0], "", conditions(loaded.constraints))
