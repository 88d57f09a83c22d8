"""Exported programs and packages: the conditions of a call, the graph, the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minicompile.ops.display import count_text
from minicompile.ops.dtypes import value_text
from minicompile.show.graphs import graph_parts
from minicompile.show.html import box, code, details, facts, shows, shows_many, table, text
from minicompile.show.listing import headline

if TYPE_CHECKING:
    from minicompile.exporting.exported import Constraint, Exported, Signature

EXPORTED = "minicompile.exporting.exported"
"""Named, not imported: the package may be without it."""


def conditions(constraints: Sequence[Constraint]) -> str:
    rows = ([code(c.condition, wrap=True), text(c.reason), text(c.line)] for c in constraints)
    return table(("constraint", "why", "line"), rows)


shows_many(conditions, "constraint", f"{EXPORTED}.Constraint")


def signature(found: Signature) -> str:
    specs: list[Any] = [*found.inputs, *found.outputs]
    rows = [[code(spec.name), text(spec.kind), code(spec.target)] for spec in specs]
    return table(("in the graph", "what it is", "where it is"), rows)


shows(f"{EXPORTED}.Signature")(signature)


@shows(f"{EXPORTED}.Exported")
def exported(program: Exported) -> str:
    state = facts((name, value_text(value)) for name, value in program.state.items())
    parts = [conditions(program.constraints), graph_parts(program.graph)]
    if program.state:
        parts.append(details("state", count_text(len(program.state), "tensor"), state))
    parts.append(details("signature", "", signature(program.signature)))
    return box(*headline(program), *parts, facts([("returns", program.structure)]))


@shows("minicompile.exporting.load.Package")
def package(loaded: object) -> str:
    title = str(loaded).split("\n")[0]
    return box(title, "", conditions(getattr(loaded, "constraints", ())))
