"""docs/operators.md: what becomes of each ATen operator. `python -m tests.lowering.operators` writes it.

An operator has a row if a rule or a reason is registered for it, or if torch counts it among its core
operators. A cell names the module of the rule: a family of `minicompile/aot/decompositions`, of
`minicompile/lowering/rules`, or a plug-in.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import torch
import torchgen
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.decompositions import decomposition
from minicompile.custom.vjps import vjp
from minicompile.lowering import rules as _rules  # noqa: F401  registers the reasons
from minicompile.lowering.context import extern_reasons, lowering
from minicompile.ops import plugins
from minicompile.ops.registry import Registry

aten = torch.ops.aten
FILE = Path(__file__).parents[2] / "docs" / "operators.md"
TORCH = torch.__version__.partition("+")[0]

HEAD = f"""# Operators

What becomes of each ATen operator of torch {TORCH}, written by `python -m tests.lowering.operators`.

- **taken apart**: the rule that writes it in simpler operators (`minicompile/aot/decompositions`): *torch's*
  own, a family of ours, or a plug-in's. Some rules leave a call as it is: a half type that would round
  elsewhere, say.
- **loops**: the rule that makes a loop of it (`minicompile/lowering/rules`, or a plug-in).
- **called**: why a library runs it (*extern*) where neither rule is there, or takes the call.
- **gradient**: the operators that torch's formula calls in the backward pass, which have rows of their own;
  *formula*: only operators that the forward pass has too; nothing: torch has no formula for it.

An operator that isn't listed, and your own, is called as it is. What only calls other operators when it is
traced (`linear`, `reshape`, `einsum`) needs no row.

| operator | taken apart | loops | called | gradient |
| --- | --- | --- | --- | --- |
"""


def source(registry: Registry[object], op: OpOverload) -> str:
    """The family or the plug-in whose rule is in force for an operator; "" without one."""
    if op not in registry:
        return ""
    package, _, family = registry.records[op][-1][0].rpartition(".")
    return "torch's" if family == "from_torch" else package.partition("plugins.")[2] or family


def reason(op: OpOverload) -> str:
    """Why the operator is called where no rule takes it; "" for one that has a rule and no reason."""
    known = extern_reasons.get(op) or extern_reasons.get(op.overloadpacket)
    return known or ("" if op in decomposition or op in lowering else "no rule")


@cache
def torch_formulas() -> dict[str, str]:
    """`relu` -> torch's gradient formulas, as text."""
    path = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    entries = path.read_text(encoding="utf-8").split("\n- name: ")[1:]
    parts = (entry.partition("(") for entry in entries)
    return {name: text.partition("\n")[2] for name, _, text in parts}


def gradient(op: OpOverload) -> str:
    """How torch, or a rule of ours, differentiates an operator."""
    if op in vjp:
        return "ours"
    text = torch_formulas().get(short(op), "")
    formulas = re.findall(
        r"^  (?!output_diff|result|dispatch)[\w, ]+: (?!no[nt]_diff)(.*)", text, re.M
    )
    called = {name for name in re.findall(r"\w+_backward", text) if hasattr(aten, name)}
    if not formulas or "output_differentiability: [False]" in text:
        return ""
    return " ".join(sorted(called - {short(op)})) or "formula"


def short(op: OpOverload) -> str:
    return str(op).removeprefix("aten.").removesuffix(".default")


def is_listed(op: OpOverload) -> bool:
    """Is it functional, and known to a registry, or a core operator that computes a tensor itself?"""
    known = op in decomposition or op in lowering or reason(op) != "no rule"
    core = torch.Tag.core in op.tags and not compat.is_composite(op)
    computes = any("Tensor" in str(result.type) for result in op._schema.returns)
    return (known or (core and computes)) and not op._schema.is_mutable


def operators() -> list[OpOverload]:
    """All ATen operators that the page lists."""
    for name in plugins.available():
        plugins.load(name)
    names = torch._C._dispatch_get_all_op_names()
    parts = (name[6:].partition(".") for name in names if name.startswith("aten::"))
    every = [getattr(getattr(aten, name), overload or "default") for name, _, overload in parts]
    return sorted(filter(is_listed, every), key=str)


def page() -> str:
    """The page as it should be."""
    rows = [
        (short(op), source(decomposition, op), source(lowering, op), reason(op), gradient(op))
        for op in operators()
    ]
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
