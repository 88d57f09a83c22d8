"""Guards as generated Python: one check function per cache entry, and the reason when one fails.

    guard_rules   registry: guard kind -> the condition, as Python text
    SourceCode    turns sources into lines that fetch them, and constants into names
    failures      evaluates guards one by one and gives those that fail, with what was found

Sources are fetched without running user code: `__dict__` items, C-level slots, built-in containers' own
methods.
The real compiler: torch/_dynamo/guards.py (GuardBuilder), torch/csrc/dynamo/guards.cpp.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from minicompile import compat
from minicompile.compat import settings
from minicompile.dynamo.result import (
    GUARD_KINDS,
    SOURCE_KINDS,
    Description,
    Guard,
    GuardFailure,
    Source,
    describe,
)
from minicompile.dynamo.sizes import free_dims
from minicompile.dynamo.variables import (
    CONTAINERS,
    HOOKS,
    IDENTITY_TYPES,
    READERS,
    class_facts,
    find,
    is_constant,
    lookup,
    plain_dict,
    raw_base,
    same_constant,
    same_items,
)
from minicompile.ops.generated import define
from minicompile.ops.registry import Registry

CONTAINER_IDS = frozenset(map(id, CONTAINERS))

GuardRule = Callable[["SourceCode", Guard, list[str]], str]
"""(names, guard, expressions of its sources) -> a Python condition."""

guard_rules: Registry[GuardRule] = Registry("guard", "guard kind -> Python text of its condition")
quick_checks: Registry[Callable[..., Any]] = Registry(
    "quick_check", "held or global_state -> checks all guards of that kind at once"
)
"""What makes a quicker check of guards: on the settings of torch (`global_state`: takes the settings, gives a
function that says whether they hold), or on objects that an entry holds (`held`: takes the SourceCode, the
guards, the sources of the tensors found there, and a list of one number: how many calls the entry answered).
The latter gives an object with `unchanged()`, whether everything is as when its `tensors` were found, and
`check()`, which evaluates the guards and finds the tensors anew."""

FETCH_ERRORS = (LookupError, AttributeError, TypeError, ValueError, RuntimeError, ArithmeticError)
"""What fetching a source may raise when the program has changed; the guard has failed then."""


# -- helpers of generated code


def member(namespace: dict[str, Any], table: str, name: str) -> Any:
    """A parameter, buffer or submodule, if no instance attribute hides it."""
    if name in namespace:
        raise KeyError(name)
    return namespace[table][name]


def entry(container: dict[Any, Any], key: Any) -> Any:
    """An item that a dict holds. `container[key]` would call `__missing__`, which may store another."""
    if not dict.__contains__(container, key):
        raise KeyError(key)
    return dict.__getitem__(container, key)


def closure_cell(function: types.FunctionType, name: str) -> types.CellType:
    return (function.__closure__ or ())[function.__code__.co_freevars.index(name)]


def base_length(value: Any) -> int:
    return int(raw_base(value).__len__(value))


def items_of(value: Any) -> tuple[Any, ...]:
    """What a container holds (of a dict, its keys), in order."""
    return tuple(raw_base(value).__iter__(value))


def all_different(*values: Any) -> bool:
    return len(set(map(id, values))) == len(values)


def same_class(cls: type, expected: tuple[tuple[Any, ...], ...]) -> bool:
    found = class_facts(cls)
    return list(map(len, found)) == list(map(len, expected)) and all(
        map(operator.is_, itertools.chain(*found), itertools.chain(*expected))
    )


def hook_free(module: Any) -> bool:
    return not any(module.__dict__[name] for name in HOOKS)


def apart(mutated: int, *tensors: torch.Tensor) -> bool:
    """Whether the first tensors, which the graph changes, share memory with no other."""
    memory = list(map(compat.storage_id, tensors))
    changed = set(memory[:mutated])
    return len(changed) == mutated and changed.isdisjoint(memory[mutated:])


HELPERS: dict[str, Any] = {"math": math} | {
    helper.__name__: helper
    for helper in (
        *(member, entry, closure_cell, plain_dict, base_length, items_of, same_items),
        *(hook_free, same_class, all_different, apart, lookup, same_constant, operator.is_),
    )
}
PLAIN_GETTERS = (object.__getattribute__, types.ModuleType.__getattribute__)


def has_plain_attributes(cls: type) -> bool:
    """Whether `value.__dict__` runs no code of the class."""
    return find(cls, "__getattribute__") in PLAIN_GETTERS and type(find(cls, "__dict__")) in READERS


class SourceCode:
    """Python lines that fetch sources, each once, and the names that they use.

    `held`: objects that are reached without a path; `types_of`: what guards say about the classes of others.
    """

    def __init__(self, held: dict[Source, Any], types_of: dict[Source, type]) -> None:
        self.held, self.types_of = held, types_of
        self.names: dict[str, Any] = dict(HELPERS)
        self.by_id: dict[int, str] = {}
        self.prefix = "s"
        self.lines: list[str] = []
        self.variables: dict[Source, str] = {}
        """Sources that the lines have fetched."""

    def part(self, prefix: str = "s") -> SourceCode:
        """Lines of another function, or of another section of one, which share the names."""
        made = copy.copy(self)
        made.prefix, made.lines, made.variables = prefix, [], {}
        return made

    def holds(self, source: Source | None) -> bool:
        """Whether a path starts at an object that is held."""
        while source is not None and source not in self.held:
            source = source.base
        return source is not None

    def constant(self, value: Any) -> str:
        """A name for an object that the generated code refers to."""
        name = self.by_id.get(id(value))
        if name is None:
            name = self.by_id[id(value)] = f"c{len(self.by_id)}"
            self.names[name] = value
        return name

    def literal(self, value: Any) -> str:
        return repr(value) if type(value) in (int, str) else self.constant(value)

    def expression(self, source: Source) -> str:
        """The variable that holds a source; fetched by a new line if it isn't yet."""
        known = self.variables.get(source)
        if known is not None:
            return known
        text = self.fetch(source)
        if source.kind in ("local", "held", "literal"):
            return text
        name = self.variables[source] = f"{self.prefix}{len(self.variables)}"
        self.lines.append(f"{name} = {text}")
        return name

    def fetch(self, source: Source) -> str:
        """How to fetch a source from its base."""
        if source.kind == "held":
            return self.constant(self.held[source])
        if source.kind == "computed":
            form, function, parts = source.key
            given = [self.expression(part) for part in parts]
            if function is None:
                return str(form.format(*given))
            return f"{self.constant(function)}({', '.join(given)})"
        if source.kind == "size":  # its shape, taken once, is quicker than a call for each size
            return f"{self.expression(Source('slot', 'shape', source.base))}[{source.key}]"
        base, cls = "", None
        if source.base is not None:
            base, cls = self.expression(source.base), self.types_of.get(source.base)
        if source.kind == "item":
            return self.item(base, cls, source.key)
        plain = cls is not None and has_plain_attributes(cls)
        namespace = f"{base}.__dict__" if plain else f"plain_dict({base})"
        form = SOURCE_KINDS[source.kind][1]
        return form.format(base=base, namespace=namespace, key=source.key)

    def item(self, base: str, cls: type | None, key: Any) -> str:
        if cls is not None and issubclass(cls, dict) and cls is not dict:
            return f"entry({base}, {self.literal(key)})"
        if cls is not None and id(cls) not in CONTAINER_IDS:
            for builtin in (list, tuple):
                if issubclass(cls, builtin):
                    return f"{builtin.__name__}.__getitem__({base}, {self.literal(key)})"
        return f"{base}[{self.literal(key)}]"

    def require(self, guard: Guard) -> None:
        """A line that gives up if the guard does not hold."""
        text = condition(self, guard)
        if text is not None:
            self.lines.append(f"if not ({text}): return MISS")


# -- kinds


def compare_settings(facts: dict[str, Any]) -> Callable[[], bool]:
    """Return a check whether the settings of torch are these."""
    return lambda: settings.global_facts() == facts


@guard_rules("equals")
def equals_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    expected, cls = guard.expected, type(guard.expected)
    if expected is None or cls in (bool, torch.dtype) or (cls is tuple and not expected):
        return f"{values[0]} is {code.constant(expected)}"
    if cls in (int, str) or (cls is float and expected != 0 and math.isfinite(expected)):
        return f"type({values[0]}) is {cls.__name__} and {values[0]} == {expected!r}"
    return f"same_constant({values[0]}, {code.constant(expected)})"


@guard_rules("length")
def length_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    exact = id(code.types_of.get(guard.sources[0])) in CONTAINER_IDS
    return f"{'len' if exact else 'base_length'}({values[0]}) == {guard.expected}"


def form_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    """The condition as the row of GUARD_KINDS has it."""
    about = GUARD_KINDS[guard.kind]
    return guard.written(about.condition or about.text, values, code.literal)


guard_rules(*(GUARD_KINDS.keys() - guard_rules.keys()))(form_rule)


def condition(code: SourceCode, guard: Guard) -> str | None:
    """The guard's condition; None if its kind has no rule."""
    rule = guard_rules.get(guard.kind)
    return rule and rule(code, guard, [code.expression(source) for source in guard.sources])


def types_from(guards: Iterable[Guard]) -> dict[Source, type]:
    """Exact types that guards establish, so that fetching below them may rely on it."""
    found: dict[Source, type] = {}
    for guard in guards:
        if guard.kind == "type":
            found[guard.sources[0]] = guard.expected
        elif guard.kind == "identity" and isinstance(guard.expected, IDENTITY_TYPES):
            found[guard.sources[0]] = type(guard.expected)
    return found


def generate(head: str, lines: list[str], names: dict[str, Any]) -> Any:
    """Compile a function from its head and lines; its text can be shown, and appears in tracebacks."""
    name = head.partition("(")[0]
    text = f"def {head}:\n" + "".join(f"    {line}\n" for line in lines)
    return define(name, text, names)


# -- failures


def failures(
    guards: Iterable[Guard], code: SourceCode, values: dict[str, Any]
) -> Iterator[tuple[GuardFailure, dict[Source, str]]]:
    """The guards that do not hold for a frame's arguments, with what was found instead, and the sizes and
    numbers that may become symbolic, with how they varied."""
    code = code.part()
    scope = {f"L_{name}": value for name, value in values.items()}
    for guard in guards:
        try:
            holds, found = evaluate(guard, code, scope)
            varied = {} if holds else varied_by(guard, *fetched(guard.sources[:1], code, scope))
        except FETCH_ERRORS as error:
            yield GuardFailure(guard, Description(f"nothing ({type(error).__name__})")), {}
            continue
        if not holds:
            keep = is_constant(found) or isinstance(found, type)
            yield GuardFailure(guard, found if keep else Description(describe(found))), varied


def varied_by(guard: Guard, found: Any = None) -> dict[Source, str]:
    """The sizes and numbers that a failed guard is about and that symbols could stand for."""
    expected, pairs = guard.expected, dict[Source, tuple[Any, Any]]()
    if guard.kind == "equals":
        pairs[guard.sources[0]] = expected, found
    elif guard.kind == "tensor" and type(found) in (torch.Tensor, torch.nn.Parameter):
        sizes = zip(expected.shape, found.shape) if expected.dim() == found.dim() else ()
        pairs = {Source("size", i, guard.sources[0]): pair for i, pair in enumerate(sizes)}
    return {
        place: f"was {old}, then {new}"
        for place, (old, new) in pairs.items()
        if type(old) is type(new) and type(old) in (int, float) and old != new
    }


def evaluate(guard: Guard, code: SourceCode, scope: dict[str, Any]) -> tuple[bool, Any]:
    """Whether a guard holds, and the fact that it is about. Raises one of FETCH_ERRORS."""
    if guard.kind == "global_state":
        changed = changes(guard.expected, settings.global_facts())
        return not changed, changed
    text = condition(code, guard)
    if text is None:
        return True, None
    found, *_ = fetched(guard.sources, code, scope)
    if guard.kind == "tensor":
        if not isinstance(found, torch.Tensor):
            return False, found
        free = free_dims(guard.expected)
        facts = [compat.tensor_facts(tensor, free) for tensor in (guard.expected, found)]
        changed = changes(*(dict(zip(compat.TENSOR_FACTS, each, strict=True)) for each in facts))
        return not changed, changed
    holds, shown = bool(eval(text, code.names, scope)), GUARD_KINDS[guard.kind].found
    if "{0}" not in shown:
        return holds, Description(shown)
    return holds, eval(shown.format("found"), code.names, {"found": found})


def fetched(sources: Iterable[Source], code: SourceCode, scope: dict[str, Any]) -> list[Any]:
    """The objects at sources."""
    texts = [code.expression(source) for source in sources]
    exec("\n".join(code.lines), code.names, scope)
    code.lines.clear()
    return [eval(text, code.names, scope) for text in texts]


def changes(before: dict[str, Any], now: dict[str, Any]) -> Description:
    """`dtype f64 (was f32), ...`: the facts that differ; empty if none does."""
    differ = [name for name, value in now.items() if value != before[name]]
    return Description(
        ", ".join(f"{name} {describe(now[name])} (was {describe(before[name])})" for name in differ)
    )
