"""Plug-ins: optimizations that the compiler can do without, found, selected and loaded.

A plug-in is a package with a `PLUGIN` in its `__init__.py`. Its modules register rules through the decorators
that `extension.py` lists; a registry remembers which module registered a rule, and `rules(registry, names)`
leaves out the rules of plug-ins that a compilation didn't select.

    minicompile/plugins/<name>/                      plug-ins that come with the package
    entry points of the group "minicompile.plugins"  plug-ins that other packages bring
    add_plugin(PLUGIN)                               plug-ins of a script or notebook

`MINICOMPILE_PLUGINS` and `options={"plugins": ...}` select: "default", "all", "none", or names.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from minicompile.errors import OptionError, unknown
from minicompile.ops.registry import ALL, Registry

V = TypeVar("V")

FOLDER = Path(__file__).parents[1] / "plugins"
GROUP = "minicompile.plugins"


@dataclass(frozen=True)
class Plugin:
    """A part of the compiler that can be left out.

    modules   imported when the plug-in is first selected, which registers its rules
    default   whether it is on where nothing is selected
    needs     plug-ins without which this one does nothing
    cases     cases of `minicompile bench`, as "max_pool, cache", that show what it buys
    options   (name, value) pairs that the cases are measured with
    decorators   name -> module of decorators that it gives users: `extension.py` hands them on
    needs_torch   whether what it makes of a program calls torch, which a package can't (exporting/package.py)
    """

    name: str
    purpose: str
    modules: tuple[str, ...]
    default: bool = True
    needs: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    needs_torch: bool = False
    decorators: Mapping[str, str] = field(default_factory=dict)


def available() -> Mapping[str, Plugin]:
    """Return every plug-in by name: those of this package, of installed packages, and those that were added.

    A package elsewhere whose plug-in can't be imported is left out, with a warning."""
    return _available()


def add_plugin(plugin: Plugin) -> None:
    """Make a plug-in known to this process, whose modules must be importable. It replaces one of its name."""
    _available()[plugin.name] = plugin
    load.cache_clear()
    _packages_without.cache_clear()


@cache
def _available() -> dict[str, Plugin]:
    folders = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))
    modules = [importlib.import_module(f"minicompile.plugins.{folder}") for folder in folders]
    plugins: dict[str, Plugin] = {module.PLUGIN.name: module.PLUGIN for module in modules}
    for entry in entry_points(group=GROUP):
        try:
            plugin = entry.load()
        except Exception as error:
            warnings.warn(f"plug-in {entry.name!r} can't be imported: {error!r}", stacklevel=2)
            continue
        plugins.setdefault(plugin.name, plugin)
    return plugins


def select(chosen: str | Iterable[str]) -> tuple[str, ...]:
    """Return the sorted names that "default", "all", "none", "default,a,b" or a list of names stands for.

    A plug-in whose `needs` aren't selected is left out. Raises OptionError for a name that nothing has."""
    plugins = available()
    if isinstance(chosen, str):
        words = {
            "default": [p.name for p in plugins.values() if p.default],
            "all": [*plugins],
            "none": [],
            "": [],
        }
        parts = [part.strip() for part in chosen.split(",")]
        chosen = [name for part in parts for name in words.get(part, [part])]
    elif not isinstance(chosen, Iterable):
        raise OptionError(f"option plugins can't be {chosen!r}: a tuple of names")
    names = sorted(set(chosen))
    for name in names:
        if name not in plugins:
            raise unknown("plug-in", name, ["'default'", "'all'", "'none'", *sorted(plugins)])
    return tuple(name for name in names if set(plugins[name].needs) <= set(names))


@cache
def load(name: str) -> None:
    """Import a plug-in's modules, which registers its rules; they outlive a `scoped` block around."""
    plugin = available()[name]
    for module in plugin.modules:
        importlib.import_module(module)
    for registry in ALL.values():
        registry.keep(_packages([plugin]))


@cache
def _packages_without(selected: tuple[str, ...]) -> tuple[str, ...]:
    """The packages, as prefixes of module names, of plug-ins that aren't selected. Loads those that are."""
    for name in selected:
        load(name)
    return _packages(plugin for plugin in available().values() if plugin.name not in selected)


def _packages(chosen: Iterable[Plugin]) -> tuple[str, ...]:
    return tuple({f"{m.rpartition('.')[0]}." for plugin in chosen for m in plugin.modules})


def rules(registry: Registry[V], selected: tuple[str, ...]) -> Mapping[Any, V]:
    """Return the rules of the core, of the user, and of the selected plug-ins, which are loaded."""
    for name in selected:
        load(name)
    return registry.without_modules(_packages_without(selected))
