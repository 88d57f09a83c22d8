"""Registries: the extension points of the compiler.

A registry maps keys (operators, opcodes, names) to rules. Built-in rules and a user's own enter through the
same decorator. `without("lowering:aten.erf")` takes a rule away for a while; `scoped()` undoes whatever was
registered inside it, which is how tests and exercises leave no trace. A registry remembers which module
registered each rule, so that the rules of plug-ins can be left out: `registry.without_modules(packages)`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from minicompile.errors import UnknownName, unknown

V = TypeVar("V")

ALL: dict[str, Registry[Any]] = {}

FILLED_BY: dict[str, tuple[str, ...]] = {}
"""For the name of a registry, packages that register rules in it and that may be missing: tools beside the
compiler, which it doesn't know. They are imported when the registry is first read."""


def key_name(key: object) -> str:
    """The printed name of a key: `aten.silu.default` for an operator overload, the name otherwise."""
    if isinstance(key, str):
        return key
    name = getattr(key, "__name__", None)
    text = str(key)
    return name if name is not None and text.startswith("<") else text


def is_missing(module: str, error: ModuleNotFoundError) -> bool:
    """Is it the module itself, or a package around it, that can't be found?"""
    return f"{module}.".startswith(f"{error.name}.")


class Registry(Mapping[Any, V]):
    """A named table of rules. `registry(key, ...)` is the decorator that adds one."""

    def __init__(self, name: str, doc: str) -> None:
        self.name, self.doc = name, doc
        self.records: dict[Any, tuple[tuple[str, V], ...]] = {}
        """For each key (module, rule) as they were registered; the last one is in force."""
        self.modules = list(FILLED_BY.get(name, ()))
        """Modules whose rules are built in: imported before the table is first read."""
        self.loading = False
        """Are they being imported? They replace nothing that was registered before."""
        self.scopes: list[dict[Any, tuple[tuple[str, V], ...]]] = []
        """Records as they were where each `scoped` block that is open began."""
        ALL[name] = self

    def load(self) -> None:
        """Import the modules that hold the built-in rules, once."""
        while self.modules:
            module, before, self.loading = self.modules.pop(0), self.loading, True
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                if module not in FILLED_BY.get(self.name, ()) or not is_missing(module, error):
                    raise
            finally:
                self.loading = before

    def __call__(self, *keys: Any) -> Callable[[V], V]:
        def add(rule: V) -> V:
            record = (registering_module(), rule)
            for key in keys:
                records = self.records.get(key, ())
                self.records[key] = (record, *records) if self.loading else (*records, record)
            return rule

        return add

    def without_modules(self, packages: tuple[str, ...]) -> Mapping[Any, V]:
        """Return the rules that would be in force without the modules whose names begin like `packages`."""
        self.load()
        return {
            key: rule
            for key, records in self.records.items()
            for name, rule in records
            if not packages or not name.startswith(packages)
        }

    def __getitem__(self, key: Any) -> V:
        self.load()
        return self.records[key][-1][1]

    def __iter__(self) -> Iterator[Any]:
        self.load()
        return iter(self.records)

    def __len__(self) -> int:
        self.load()
        return len(self.records)

    def matching(self, name: str) -> list[Any]:
        """Keys called `name`, or overloads of it: "aten.silu" matches aten.silu.default."""
        return [key for key in self if f"{key_name(key)}.".startswith(f"{name}.")]

    @contextlib.contextmanager
    def scoped(self) -> Iterator[None]:
        """Rules registered or removed inside the block are forgotten after it."""
        self.load()
        self.scopes.append(dict(self.records))
        try:
            yield
        finally:
            self.records = self.scopes.pop()

    def keep(self, packages: tuple[str, ...]) -> None:
        """Let rules of modules whose names begin like `packages` outlive the scopes that are open."""
        kept = {k: r for k, r in self.records.items() if r[-1][0].startswith(packages)}
        for scope in self.scopes:
            scope.update(kept)

    def __repr__(self) -> str:
        return f"Registry({self.name!r}, {len(self.records)} rules)"


def registering_module() -> str:
    """Return the name of the module whose body is being executed, and so registers a rule."""
    frame = sys._getframe(1)
    while frame.f_code.co_name != "<module>" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Take built-in rules away inside a `with` block: `without("lowering:aten.erf")`.

    Raises KeyError naming the known registries, or the rule that does not exist.
    """
    with contextlib.ExitStack() as stack:
        for name in names:
            table, _, rule = name.partition(":")
            if table not in ALL:
                raise unknown("registry", table, sorted(ALL))
            registry = ALL[table]
            keys = registry.matching(rule)
            if not keys:
                raise UnknownName(f"registry {table!r} has no rule {rule!r}")
            stack.enter_context(registry.scoped())
            for key in keys:
                del registry.records[key]
        yield


@contextlib.contextmanager
def scoped() -> Iterator[None]:
    """Undo every registration made inside the block, in all registries."""
    with contextlib.ExitStack() as stack:
        for registry in list(ALL.values()):  # which may import modules with registries of their own
            registry.load()
        for registry in list(ALL.values()):
            stack.enter_context(registry.scoped())
        yield
