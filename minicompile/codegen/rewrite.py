"""The engine that writes loop bodies anew, and the tables of rules that it follows.

    Rules    := {name: Rule}, a registry, in which the first that fits decides
    Rule     := ops, of, when     which values it is for: their operations, the kind of dtype, a condition
                result, why       what stands for such a value, and the reason
    Firing   := a rule, the value that it was for, the value that stands for it

    FLOORS = Rules("floors", "...")

    @FLOORS.rule("floor ceil", of="int", why="integers have no fraction")
    def the_integer(ops, value):
        "the operand"
        return value.inputs[0]

A `Rewriter` goes through a body in order. It hands a rule each value with operands of the new body. What a
rule computes with `ops` is rewritten by the same rules, so that a rule can build on others.
The idea of such a table: tinygrad's PatternMatcher (tinygrad/uop/ops.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from minicompile.ops.dtypes import HALF_TYPES, is_int, short
from minicompile.ops.registry import Registry
from minicompile.ops.table import result_dtype
from minicompile.scheduling.body import LoopBody, Recorder, Value
from minicompile.shapes.expr import Ranges, index_text

Result = Callable[[Any, Value], Value]
"""`result(rewriter, value)`: what stands for a value. Its docstring says so in words."""

KINDS: Mapping[str, Callable[[torch.dtype], bool]] = {
    "any": lambda dtype: True,
    "float": lambda dtype: dtype.is_floating_point,
    "half": lambda dtype: dtype in HALF_TYPES,
    "int": is_int,
    "int64": lambda dtype: dtype is torch.int64,
    "bool": lambda dtype: dtype is torch.bool,
}
"""Kinds of dtypes that a rule can be for."""


@dataclass(frozen=True, eq=False)
class Rule:
    """Values of some operations become something else, for a reason."""

    ops: tuple[str, ...]
    """The operations."""
    of: str
    """Kind of dtype: the last operand's; the value's own where that is a half type or has no operand."""
    result: Result
    why: str
    when: Callable[[Any, Value], bool] | None = None
    """A condition, which its docstring says in words."""

    def fits(self, ops: Rewriter, value: Value) -> bool:
        own = not value.inputs or value.dtype in HALF_TYPES
        dtype = value.dtype if own else value.inputs[-1].dtype
        return KINDS[self.of](dtype) and (self.when is None or self.when(ops, value))

    def __str__(self) -> str:
        condition = f" if {self.when.__doc__}" if self.when is not None else ""
        kind = f" of {self.of}" if self.of != "any" else ""
        return f"{', '.join(self.ops)}{kind}{condition} -> {self.result.__doc__}: {self.why}"


class Rules(Registry[Rule]):
    """A table of rules in order, after those of the table `first`. Printed, it has a line for each."""

    def __init__(self, name: str, doc: str, first: Rules | None = None) -> None:
        super().__init__(name, doc)
        self.first = first

    def rule(
        self,
        ops: str | Iterable[str],
        *,
        why: str,
        of: str = "any",
        when: Callable[[Any, Value], bool] | None = None,
    ) -> Callable[[Result], Result]:
        """Add a function to the table, as the result of a rule of its name."""
        names = ops.split() if isinstance(ops, str) else sorted(ops)

        def add(result: Result) -> Result:
            self(result.__name__)(Rule(tuple(names), of, result, why, when))
            return result

        return add

    def about(self, op: str) -> list[Rule]:
        """Return the rules for an operation, in order."""
        first = self.first.about(op) if self.first is not None else []
        return first + [rule for rule in self.values() if op in rule.ops]

    def __str__(self) -> str:
        first = [str(self.first)] if self.first is not None else []
        return "\n".join([*first, f"rules {self.name}", *(f"  {rule}" for rule in self.values())])


class Firing(NamedTuple):
    """One use of a rule. Printed, it names the operands a, b, ..."""

    rule: Rule
    before: Value
    after: Value

    def __str__(self) -> str:
        known = dict(zip(dict.fromkeys(v for v in self.before.inputs if v.op != "constant"), "abc"))
        before, after = (expression(value, known) for value in self[1:])
        return f"{before} -> {after}: {self.rule.why}"


def expression(value: Value, known: Mapping[Value, str]) -> str:
    """Return a value as nested calls, down to those that have names."""
    if value in known:
        return known[value]
    if value.op == "constant":
        return repr(value.constant)
    place = [] if value.index is None else [index_text(value.index)]
    parts = [value.buffer, value.kind, *place, *(expression(v, known) for v in value.inputs)]
    if value.op in ("to_dtype", "load", "index_expr"):
        parts.append(short(value.dtype))
    return f"{value.op}({', '.join(filter(None, parts))})"


class Rewriter(Recorder):
    """Writes bodies anew by a table of rules: `body` is the new one. Printed, it tells which rules fired."""

    def __init__(
        self,
        rules: Rules,
        name: str,
        ranges: Ranges,
        reduction_ranges: Ranges,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__(LoopBody(name, dict(ranges), dict(reduction_ranges)), dtypes)
        self.rules = rules
        self.about: dict[str, list[Rule]] = {}
        """The rules for each operation."""
        self.new: dict[Value, Value] = {}
        """The new body's value for each value of the old body."""
        self.fired: list[Firing] = []

    def rewrite(self, body: LoopBody) -> None:
        """Add all of a body."""
        for value in body.values:
            self.new[value] = self.visit(value)

    def visit(self, value: Value) -> Value:
        """Return what stands for a value of the old body."""
        self.origins = value.origins
        return self.apply(self.renewed(value))

    def renewed(self, value: Value) -> Value:
        """Return the same operation on the new operands."""
        return value.copy(self.new)

    def apply(self, value: Value) -> Value:
        """Return what stands for a value whose operands are new: itself where no rule fits."""
        if value.op not in self.about:
            self.about[value.op] = self.rules.about(value.op)
        for rule in self.about[value.op]:
            if rule.fits(self, value):
                result = rule.result(self, value)
                self.fired.append(Firing(rule, value, result))
                return result
        return self.append(value)

    def again(self, value: Value, **changed: Any) -> Value:
        """Record a value as it is, but for what is `changed`, whatever the rules say."""
        return self.append(replace(value, **changed))

    def pointwise(self, name: str, *values: Value) -> Value:
        dtype = result_dtype(name, tuple(v.dtype for v in values))
        origins = self.origins.union(*(v.origins for v in values if v.op == "constant"))
        return self.apply(Value(name, values, dtype, origins))

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.body.name}, by the rules {self.rules.name}:", *map(str, self.fired)]
        )


# -- rules that make a body simpler -----------------------------------------------------------------

SIMPLIFY = Rules("simplify", "name -> rewrite of a loop operation by what is known of its operands")


def first_is_constant(ops: Recorder, value: Value) -> bool:
    "the first operand is a constant"
    return value.inputs[0].op == "constant"


def one_is_constant(ops: Recorder, value: Value) -> bool:
    "an operand is a constant"
    return any(v.op == "constant" for v in value.inputs)


@SIMPLIFY.rule("where", when=first_is_constant, why="the choice is made")
def chosen(ops: Recorder, value: Value) -> Value:
    "the operand that is chosen"
    condition, yes, no = value.inputs
    return yes if condition.constant else no


@SIMPLIFY.rule("logical_not", when=first_is_constant, why="the answer is known")
def opposite(ops: Recorder, value: Value) -> Value:
    "a constant"
    return ops.constant(not value.inputs[0].constant, torch.bool)


@SIMPLIFY.rule("logical_and logical_or", of="bool", when=one_is_constant, why="True and x is x")
def decided(ops: Recorder, value: Value) -> Value:
    "the constant, or the other operand"
    one, other = sorted(value.inputs, key=lambda v: v.op != "constant")
    return one if bool(one.constant) == (value.op == "logical_or") else other
