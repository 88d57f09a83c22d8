"""How stage objects show themselves: text in a terminal, a picture in a notebook.

Rooms know nothing of HTML. A stage object inherits `Shown` and defines `__str__`; `minicompile/show/`
registers an HTML renderer for its type here (`minicompile/__init__.py` names that package, and it is
imported when the first object is shown). Without a renderer a notebook gets the text.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from minicompile.ops.registry import Registry

T = TypeVar("T")

renderer: Registry[Callable[[Any], str]] = Registry(
    "renderer", "type, or its full name -> function that gives its HTML"
)


def to_html(obj: object) -> str:
    """The object's HTML: the renderer of its nearest type (or of that type's full name), or its text."""
    for cls in type(obj).__mro__:
        rule = renderer.get(cls) or renderer.get(f"{cls.__module__}.{cls.__qualname__}")
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
