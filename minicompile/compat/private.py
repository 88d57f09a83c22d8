"""Private names of torch and Triton: each is taken here, by its path, and may be gone in a later release.

    take(path, part)                 the object at the path; `Gone` where this release lacks it
    take(path, part, otherwise)      the object at the path; `otherwise` where this release lacks it
    relies_on(paths, part)           attributes that code reads from objects it is handed
    later(path, part)                a function that takes the path when it is called: for slow imports
    require(part)                    raises Unsupported where a name that the part can't do without is gone

A part is what stops working with the name. `Gone` raises Unsupported wherever it is used, so that a release
that lacks a name costs a reason in `mc.explain`, never an ImportError or AttributeError. `NAMES` lists every
name that was asked for; `minicompile doctor` prints what became of them.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from minicompile.errors import Unsupported

PART_GONE = "torch-part-gone"
"""The id of the reason (`dynamo/reasons.py`) why code runs in eager where a name is gone."""

PARTS = {
    "capture": "nothing is captured: every call runs in eager",
    "differentiation": "graphs are captured but not compiled: every call runs in eager",
    "training": "calls whose results need gradients run in eager",
    "speed": "calls are slower; a plain Python equivalent takes its place",
    "recognition": "calls of some torch functions end a graph",
    "gpu": "kernels for a GPU are not launched: such calls run in eager",
    "triton": "Triton kernels are neither compiled nor interpreted",
    "comparison": "`compare_with_torch` refuses",
}
"""By part: what its loss means to a user."""

HIDDEN: set[str] = set()
"""Paths that count as gone, to try what their loss does."""


@dataclass
class PrivateName:
    """One private name, the releases that have it, and whether the running one does."""

    path: str
    part: str
    replaced: bool
    """Whether an equivalent takes its place where it is gone."""
    present: bool | None = None
    """None: not looked up yet."""

    def is_there(self) -> bool:
        """Does the running release have it? Looks it up, which may import much."""
        if self.present is None:
            try:
                lookup(self.path)
            except Exception:  # an import can fail in any way
                return False
        return self.present is not False


NAMES: dict[str, PrivateName] = {}
"""Every private name in use, by path. Filled when the modules of this folder are imported."""


def all_names() -> dict[str, PrivateName]:
    """Import every file of this folder, and return `NAMES`."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"minicompile.compat.{module.name}")
    return NAMES


REFUSE: Any = object()
"""Says that nothing can take the place of a name."""


def lookup(path: str) -> Any:
    """Return the object at a dotted path. Raises AttributeError or ImportError where there is none."""
    if path in HIDDEN:
        raise AttributeError(f"{path} is hidden")
    root, *parts = path.split(".")
    here: Any = importlib.import_module(root)
    for part in parts:
        if isinstance(here, ModuleType) and not hasattr(here, part):
            importlib.import_module(f"{here.__name__}.{part}")
        here = getattr(here, part)
    return here


def take(path: str, part: str, otherwise: Any = REFUSE) -> Any:
    """Return the object at a path, `otherwise` where this release lacks it, or else a `Gone`."""
    name = NAMES.setdefault(path, PrivateName(path, part, otherwise is not REFUSE))
    try:
        value = lookup(path)
    except (AttributeError, ImportError):
        name.present = False
        return Gone(path, part) if otherwise is REFUSE else otherwise
    name.present = True
    return value


def relies_on(paths: str, part: str, replaced: bool = False) -> bool:
    """Note that code reads these attributes from objects like those at the paths. Are all there?"""
    for path in paths.split():
        take(path, part, None if replaced else REFUSE)
    return all(NAMES[path].present for path in paths.split())


def later(path: str, part: str) -> Callable[[], Any]:
    """Return a function that takes a path: what is slow to import is imported when it is first needed."""
    NAMES.setdefault(path, PrivateName(path, part, False))
    return lambda: take(path, part)


@functools.cache
def require(part: str) -> None:
    """Raise Unsupported where a name is gone that a part can't do without."""
    for name in NAMES.values():
        if name.part == part and name.present is False and not name.replaced:
            refuse_gone(name.path, part)


def refuse_gone(path: str, part: str) -> NoReturn:
    """Raise the reason that code runs in eager because a private name is gone."""
    version = importlib.import_module(path.partition(".")[0]).__version__
    library = path.partition(".")[0]
    raise Unsupported(
        f"{library} {version} has no {path}: {PARTS[part]}",
        hint=f"take a {library} that `minicompile doctor` names as tested",
        id=PART_GONE,
    )


class Gone:
    """Stands for a name that this release lacks: it can be imported and compared; each use of it refuses."""

    def __init__(self, path: str, part: str) -> None:
        self.path, self.part = path, part

    def __repr__(self) -> str:
        return f"<{self.path} is gone>"

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise Unsupported, with the name and what its loss means."""
        refuse_gone(self.path, self.part)

    __call__ = __enter__ = __exit__ = __iter__ = refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that look for optional methods
            raise AttributeError(name)
        return Gone(f"{self.path}", self.part)

    def __instancecheck__(self, value: Any) -> bool:
        return False

    def __subclasscheck__(self, value: Any) -> bool:
        return False

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (type("Gone", (), {"__init__": self.refuse}),)
