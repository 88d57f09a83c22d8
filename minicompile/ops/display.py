"""How stage objects show themselves: text in a terminal, a picture in a notebook.

Rooms know nothing of HTML. A stage object inherits `Shown` and defines `__str__`; a tool registers an HTML
renderer for its type here, and methods that a result has for those who look at it:

    @method(Trace, "explore")
    def explore(trace: Trace, panes: Sequence[str] = ()) -> Explorer: ...

`minicompile/__init__.py` names the tools, which are imported when the first object is shown or the first such
method is called. Without a renderer a notebook gets the text.
"""

from __future__ import annotations

import html
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from minicompile.errors import MinicompileError
from minicompile.ops.registry import Registry

T = TypeVar("T")

renderer: Registry[Callable[[Any], str]] = Registry(
    "renderer", "type, or its full name -> function that gives its HTML"
)

methods: Registry[Callable[..., Any]] = Registry(
    "method", "(class, name) -> a method of a result that a tool brings"
)


def method(cls: type, name: str) -> Callable[[T], T]:
    """Decorator for a function that is a method of `cls`, which declares it: `name = Registered()`."""
    return methods((cls, name))  # type: ignore[return-value]


class Registered:
    """A method of a result that a tool registers."""

    def __set_name__(self, cls: type, name: str) -> None:
        self.key = cls, name

    def __get__(self, obj: object, cls: type | None = None) -> Any:
        """Raises MinicompileError where the tool is missing."""
        rule = methods.get(self.key)
        if rule is None:
            owner, name = self.key
            told = "needs a folder of the package which is not there"
            raise MinicompileError(f"{owner.__name__}.{name} {told}")
        return rule if obj is None else types.MethodType(rule, obj)


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def to_html(obj: object) -> str:
    """The object's HTML: the renderer of its nearest type (or of that type's full name), or its text."""
    for cls in type(obj).__mro__:
        rule = renderer.get(cls) or renderer.get(full_name(cls))
        if rule is not None:
            return rule(obj)
    return f"<pre>{html.escape(str(obj))}</pre>"


def bytes_text(count: int) -> str:
    """`512 B`, `1.5 KiB`, `2 MiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def count_text(count: int, one: str) -> str:
    """`1 kernel`, `2 kernels`."""
    return f"{count} {one}" + ("" if count == 1 else "s")


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A line for each row of a table; cells stand to the right in all but the first `left` columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths)]
    return ["  ".join(forms).format(*row).rstrip() for row in rows]


class Shown:
    """Mixin: deterministic `text/plain` and `text/html` for Jupyter; `repr` is the text's first line."""

    def __init_subclass__(cls) -> None:
        cls.__repr__ = Shown.__repr__  # type: ignore[method-assign]  # or a dataclass writes its own

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self).partition(chr(10))[0]}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": to_html(self)}


class Several(list[T], Shown):
    """A list of stage objects, shown one after the other."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "none"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """IPython's own printer of lists would come before ours."""
        printer.text(str(self))


def listed(obj: object, *names: str) -> None:
    """Make these fields, which are sequences of stage objects, show themselves as well."""
    for name in names:
        object.__setattr__(obj, name, Several(getattr(obj, name)))
