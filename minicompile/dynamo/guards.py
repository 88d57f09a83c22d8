"""Guards as generated Python: one check function per cache entry, and the reason when one fails.

    guard_rules   registry: guard kind -> the condition, as Python text
    SourceCode    turns sources into expressions and constants into names
    find_failure  evaluates guards one by one and gives the first that fails, with what was found

Sources are fetched without running user code: `__dict__` items, C-level slots, built-in containers' own
methods.
The real compiler: torch/_dynamo/guards.py (GuardBuilder), torch/csrc/dynamo/guards.cpp.
"""

from __future__ import annotations

import collections
import linecache
import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch

from minicompile import compat
from minicompile.dynamo.outside import MODULE_TABLES
from minicompile.dynamo.result import Guard, GuardFailure, Source
from minicompile.dynamo.sizes import python_text
from minicompile.dynamo.torch_rules import HOOKS
from minicompile.dynamo.variables import CONTAINERS, IDENTITY_TYPES, lookup, same_constant
from minicompile.ops.registry import Registry

GuardRule = Callable[["SourceCode", Guard, list[str]], str]
"""(names, guard, expressions of its sources) -> a Python condition."""

guard_rules: Registry[GuardRule] = Registry("guard", "guard kind -> Python text of its condition")

FETCH_ERRORS = (KeyError, AttributeError, IndexError, TypeError, ValueError, LookupError)
"""What fetching a source may raise when the program has changed; the guard has failed then."""


# -- helpers of generated code


def member(namespace: dict[str, Any], table: str, name: str) -> Any:
    """A parameter, buffer or submodule, if no instance attribute hides it."""
    if name in namespace:
        raise KeyError(name)
    return namespace[table][name]


def closure_cell(function: types.FunctionType, name: str) -> types.CellType:
    return (function.__closure__ or ())[function.__code__.co_freevars.index(name)]


def namespace_of(value: Any) -> Any:
    return object.__getattribute__(value, "__dict__")


def base_length(value: Any) -> int:
    for base in CONTAINERS:
        if isinstance(value, base):
            return int(base.__len__(value))  # type: ignore[attr-defined]
    return len(value)


def base_keys(value: Any) -> tuple[Any, ...]:
    return tuple(dict.keys(value))


def same_keys(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    return len(found) == len(expected) and all(
        a is b or same_constant(a, b) for a, b in zip(found, expected, strict=True)
    )


def hook_free(module: Any) -> bool:
    namespace = module.__dict__
    return (
        not any(namespace[name] for name in HOOKS) and namespace.get("_compiled_call_impl") is None
    )


def class_has(cls: type, name: str) -> bool:
    return any(name in owner.__dict__ for owner in cls.__mro__)


def apart(mutated: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether a tensor that the graph changes shares memory with no other input."""
    own = compat.storage_id(mutated)
    return all(other is mutated or compat.storage_id(other) != own for other in others)


HELPERS: dict[str, Any] = {
    **{
        f.__name__: f
        for f in (
            member,
            closure_cell,
            namespace_of,
            base_length,
            base_keys,
            same_keys,
            hook_free,
            class_has,
        )
    },
    **{f.__name__: f for f in (apart, lookup, same_constant)},
    "dict_item": dict.__getitem__,
    "list_item": list.__getitem__,
    "tuple_item": tuple.__getitem__,
    "dict_has": dict.__contains__,
}


class SourceCode:
    """Python text for sources, and the namespace that the text runs in."""

    def __init__(self, held: dict[Source, Any], types_of: dict[Source, type]) -> None:
        self.held, self.types_of = held, types_of
        self.names: dict[str, Any] = dict(HELPERS)
        self.by_id: dict[int, str] = {}
        self.variables: dict[Source, str] = {}
        """Sources that the generated code has already fetched."""

    def constant(self, value: Any) -> str:
        """A name for an object that the generated code refers to."""
        name = self.by_id.get(id(value))
        if name is None:
            name = self.by_id[id(value)] = f"c{len(self.by_id)}"
            self.names[name] = value
        return name

    def literal(self, value: Any) -> str:
        return repr(value) if type(value) in (int, str) else self.constant(value)

    def call(self, helper: str, base: Source, key: Any) -> str:
        return f"{helper}({self.expression(base)}, {self.literal(key)})"

    def expression(self, source: Source) -> str:
        """How to fetch a source; a variable if it was fetched before."""
        known = self.variables.get(source)
        return known if known is not None else self.fetch(source)

    def fetch(self, source: Source) -> str:
        kind, key, base = source.kind, source.key, source.base
        if kind == "local":
            return f"L_{key}"
        if kind == "held":
            return self.constant(self.held[source])
        assert base is not None
        match kind:
            case "global":
                return f"{self.expression(base)}[{key!r}]"
            case "attribute":
                return f"{self.namespace(base)}[{key!r}]"
            case "namespace":
                return self.namespace(base)
            case "item":
                return self.item(base, key)
            case "parameter" | "buffer" | "submodule":
                table = next(table for table, name in MODULE_TABLES.items() if name == kind)
                return f"member({self.namespace(base)}, {table!r}, {key!r})"
            case "class_attribute":
                return f"lookup({self.expression(base)}, {key!r})"
            case "type":
                return f"type({self.expression(base)})"
            case "cell":
                return f"{self.call('closure_cell', base, key)}.cell_contents"
            case "default":
                return f"{self.expression(base)}.__defaults__[{key}]"
            case "keyword_default":
                return f"{self.expression(base)}.__kwdefaults__[{key!r}]"
            case "context":
                return f"{self.expression(base)}.get()"
            case "referent":
                return f"{self.expression(base)}()"
            case "size":
                return f"{self.expression(base)}.shape[{key}]"
            case "slot":
                return f"{self.expression(base)}.{key}"
        raise AssertionError(f"no such source kind: {kind}")

    def namespace(self, base: Source) -> str:
        cls = self.types_of.get(base)
        plain = cls is not None and lookup(cls, "__getattribute__") in PLAIN_GETTERS
        return (
            f"{self.expression(base)}.__dict__"
            if plain
            else f"namespace_of({self.expression(base)})"
        )

    def item(self, base: Source, key: Any) -> str:
        cls = self.types_of.get(base)
        container = self.expression(base)
        if cls in (list, tuple, dict, collections.deque, types.MappingProxyType):
            return f"{container}[{self.literal(key)}]"
        for builtin in (dict, list, tuple):
            if cls is not None and issubclass(cls, builtin):
                return f"{builtin.__name__}_item({container}, {self.literal(key)})"
        return f"{container}[{self.literal(key)}]"


PLAIN_GETTERS = (object.__getattribute__, type.__getattribute__, types.ModuleType.__getattribute__)


# -- kinds


@guard_rules("type")
def type_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    return f"type({values[0]}) is {code.constant(guard.expected)}"


@guard_rules("identity")
def identity_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    return f"{values[0]} is {code.constant(guard.expected)}"


@guard_rules("equals")
def equals_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    expected = guard.expected
    if (
        expected is None
        or expected is True
        or expected is False
        or isinstance(expected, torch.dtype)
    ):
        return f"{values[0]} is {code.constant(expected)}"
    if type(expected) in (int, str):
        return f"type({values[0]}) is {type(expected).__name__} and {values[0]} == {expected!r}"
    if type(expected) is float and expected != 0 and math.isfinite(expected):
        return f"type({values[0]}) is float and {values[0]} == {expected!r}"
    if expected == () and type(expected) is tuple:
        return f"type({values[0]}) is tuple and not {values[0]}"
    return f"same_constant({values[0]}, {code.constant(expected)})"


@guard_rules("length")
def length_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    exact = code.types_of.get(guard.sources[0]) in (list, tuple, dict, set)
    return f"{'len' if exact else 'base_length'}({values[0]}) == {guard.expected}"


@guard_rules("keys")
def keys_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    if guard.sources[0].kind == "local" and code.types_of.get(guard.sources[0]) is dict:
        return f"tuple({values[0]}) == {code.constant(guard.expected)}"  # **kwargs: all keys are strings
    return f"same_keys(base_keys({values[0]}), {code.constant(guard.expected)})"


@guard_rules("members")
def members_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    expected = code.constant(guard.expected)
    return f"base_length({values[0]}) == {len(guard.expected)} and {expected}.issubset({values[0]})"


@guard_rules("absent")
def absent_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    return f"not dict_has({values[0]}, {code.literal(guard.expected)})"


@guard_rules("class_absent")
def class_absent_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    return f"not class_has({values[0]}, {guard.expected!r})"


@guard_rules("code")
def code_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    return f"{values[0]}.__code__ is {code.constant(guard.expected)}"


@guard_rules("defaults")
def defaults_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    return f"len({values[0]}.__defaults__ or ()) == {guard.expected}"


@guard_rules("hooks")
def hooks_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    return f"hook_free({values[0]})"


@guard_rules("same")
def same_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    return f"{values[0]} is {values[1]}"


@guard_rules("distinct")
def distinct_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    if len(values) == 2:
        return f"{values[0]} is not {values[1]}"
    return f"len({{{', '.join(f'id({value})' for value in values)}}}) == {len(values)}"


@guard_rules("no_overlap")
def no_overlap_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    return f"apart({', '.join(values)})"


@guard_rules("shape")
def shape_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    symbols = sorted(guard.expected.free_symbols, key=str)
    return python_text(
        guard.expected, {str(symbol): value for symbol, value in zip(symbols, values, strict=True)}
    )


@guard_rules("same_size")
def same_size_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    return f"{values[0]} == {values[1]}"


@guard_rules("strides")
def strides_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    tensor, *sizes = values
    symbols = sorted(
        {s for stride in guard.expected for s in sympy.sympify(stride).free_symbols}, key=str
    )
    names = {str(symbol): size for symbol, size in zip(symbols, sizes, strict=True)}
    return f"{tensor}.stride() == ({''.join(f'{python_text(stride, names)}, ' for stride in guard.expected)})"


WHOLE = ("tensor", "global_state")
"""Kinds that are checked all at once, in C++ where torch has it: their rules say what a single one means."""


@guard_rules("tensor", "global_state")
def whole_rule(code: SourceCode, guard: Guard, values: list[str]) -> str:
    return "True"


def condition(code: SourceCode, guard: Guard) -> str | None:
    """The guard's condition; None if its kind has no rule."""
    rule = guard_rules.get(guard.kind)
    return (
        rule(code, guard, [code.expression(source) for source in guard.sources])
        if rule is not None
        else None
    )


def types_from(guards: Iterable[Guard]) -> dict[Source, type]:
    """Exact types that guards establish, so that fetching below them may rely on it."""
    found: dict[Source, type] = {}
    for guard in guards:
        if guard.kind == "type":
            found[guard.sources[0]] = guard.expected
        elif guard.kind == "identity" and isinstance(guard.expected, IDENTITY_TYPES):
            found[guard.sources[0]] = type(guard.expected)
    return found


def generate(text: str, names: dict[str, Any], function: str) -> Any:
    """Compile generated code; its text can be shown, and appears in tracebacks."""
    filename = f"<minicompile {function} {len(linecache.cache)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), names)
    return names[function]


def find_failure(
    guards: Iterable[Guard], code: SourceCode, values: dict[str, Any]
) -> GuardFailure | None:
    """The first guard that does not hold for a frame's arguments, with what was found instead."""
    scope = {**code.names, **{f"L_{name}": value for name, value in values.items()}}
    for guard in guards:
        found = evaluate(guard, code, scope)
        if found is not None:
            return found
    return None


def evaluate(guard: Guard, code: SourceCode, scope: dict[str, Any]) -> GuardFailure | None:
    bare = SourceCode(code.held, code.types_of)
    if guard.kind == "global_state":
        now = compat.global_facts()
        changed = {name: value for name, value in now.items() if value != guard.expected[name]}
        return GuardFailure(guard, changed) if changed else None
    try:
        values = [
            eval(bare.expression(source), {**scope, **bare.names}) for source in guard.sources
        ]
        if guard.kind == "tensor":
            holds = isinstance(values[0], torch.Tensor) and tensor_agrees(values[0], guard.expected)
        else:
            text = condition(bare, guard)
            holds = text is None or bool(eval(text, {**scope, **bare.names}))
    except FETCH_ERRORS as error:
        return GuardFailure(guard, f"nothing ({type(error).__name__})")
    return None if holds else GuardFailure(guard, found_value(guard, values[0]))


def found_value(guard: Guard, value: Any) -> Any:
    """What to show as found: the fact that the guard is about."""
    match guard.kind:
        case "type":
            return type(value)
        case "length":
            return base_length(value)
        case "keys":
            return base_keys(value)
        case "code":
            return value.__code__
    return value


def tensor_agrees(found: torch.Tensor, fake: torch.Tensor) -> bool:
    """A real tensor against the fake that stood for it; sizes that are symbolic agree with any."""
    symbolic = any(isinstance(size, torch.SymInt) for size in fake.shape)
    shapes = (
        found.dim() == fake.dim()
        if symbolic
        else found.shape == fake.shape and found.stride() == fake.stride()
    )
    facts = (
        found.dtype,
        found.device,
        found.requires_grad,
        found.layout,
        isinstance(found, torch.nn.Parameter),
    )
    return shapes and facts == (
        fake.dtype, fake.device, fake.requires_grad, fake.layout, isinstance(fake, torch.nn.Parameter)
    )  # fmt: skip
