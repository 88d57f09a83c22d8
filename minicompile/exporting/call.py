"""An example call: the function that is captured, its arguments, which sizes are dynamic."""

from __future__ import annotations

import collections
import functools
import inspect
import keyword
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from minicompile.aot.layout import is_dense
from minicompile.dynamo.arguments import signature_of
from minicompile.dynamo.result import Source
from minicompile.dynamo.sizes import MARK
from minicompile.errors import ExportError
from minicompile.exporting.conditions import class_name
from minicompile.shapes.env import SMALLEST_SIZE


@dataclass(frozen=True)
class Dim:
    """A size that may differ between calls: `Dim("batch", max=64)`. One Dim in several places: equal sizes.

    Sizes 0 and 1 broadcast and are laid out differently: they are exported apart, so `min` is at least 2.
    """

    name: str
    min: int = SMALLEST_SIZE
    max: int | None = None

    AUTO: ClassVar[Dim]
    """A size that varies as far as the program lets it; what it relies on becomes a constraint."""

    def __post_init__(self) -> None:
        if self.min < SMALLEST_SIZE:
            why = "sizes 0 and 1 broadcast and are laid out differently: export a program for them apart"
            raise ExportError(f"Dim {self.name!r}: min is {self.min}, at least 2; {why}")
        if self.max is not None and self.max < self.min:
            raise ExportError(f"Dim {self.name!r}: max is {self.max}, less than its min")


Dim.AUTO = Dim("")
TENSORS = (torch.Tensor, torch.nn.Parameter)
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""What is no tensor and no container among arguments: specialised."""


def parts(value: Any) -> list[tuple[Any, Any]] | None:
    """A container's items with their keys; None if it is none."""
    if type(value) in (dict, collections.OrderedDict):
        return list(value.items())
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    return list(enumerate(value)) if type(value) in (list, tuple) or named else None


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same containers with other leaves."""
    items = parts(value)
    if items is None:
        return leaf(value)
    made = [mapped(item, leaf) for _, item in items]
    if isinstance(value, dict):
        return type(value)(zip(value, made, strict=True))
    return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)


ANY = inspect.signature(lambda *args, **kwargs: None)


def signature_called(target: Any) -> inspect.Signature:
    """The signature of a callable; C functions without one take anything."""
    if isinstance(target, types.FunctionType):
        return signature_of(target)
    try:
        return inspect.signature(target)
    except ValueError:
        return ANY


def parameters(signature: inspect.Signature, defaults: bool = True) -> inspect.Signature:
    """A signature without annotations, which may be objects; with or without defaults."""
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return inspect.Signature(plain if defaults else [p.replace(default=p.empty) for p in plain])


FILE = "<minicompile export>"
"""The file of the functions that are captured."""


@dataclass
class Call:
    """An example call, ready to be captured. `arguments`: what the user gave, by the parameters' names;
    tensors as copies that carry marks."""

    target: Any
    name: str
    signature: inspect.Signature
    arguments: dict[str, Any]
    dims: dict[str, Dim] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: Any) -> Call:
        """Binds and checks. Raises ExportError."""
        if not isinstance(args, list | tuple):
            raise ExportError(f"args is a {type(args).__name__}: give a tuple of the arguments")
        module = isinstance(target, torch.nn.Module)
        signature = signature_called(target.forward if module else target)
        name = (
            type(target).__name__ if module else getattr(target, "__name__", type(target).__name__)
        )
        name = re.sub(r"\W+", "_", name).strip("_") or "exported"
        name += "_" * keyword.iskeyword(name)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ExportError(f"{name}: {error}") from None
        bound.apply_defaults()
        if "result" in signature.parameters:
            raise ExportError(
                f"{name}: an export's results are called `result`: rename the parameter"
            )
        copies: dict[int, Any] = {}
        given = mapped(dict(bound.arguments), lambda x: copies.setdefault(id(x), example(x)))
        call = cls(target, name, signature, given)
        call.check(bound.arguments)
        call.declare(dynamic)
        return call

    @property
    def owner(self) -> str:
        """The name under which the captured function finds the target: `self` for a module."""
        name = "self" if isinstance(self.target, torch.nn.Module) else self.name
        while name in self.signature.parameters:
            name += "_"
        return name

    @functools.cached_property
    def function(self) -> Any:
        """The function that is captured: it has the target's parameters, and calls the target with them."""
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
        given = (
            f"{n}={n}" if p.kind is p.KEYWORD_ONLY else stars.get(p.kind.name, "") + n
            for n, p in self.signature.parameters.items()
        )
        text = f"def {self.name}{parameters(self.signature, defaults=False)}:\n"
        text += f"    return {self.owner}({', '.join(given)})"
        names: dict[str, Any] = {}
        exec(compile(text, FILE, "exec"), names)
        names[self.owner], function = self.target, names[self.name]
        return function

    def bound(self, arguments: dict[str, Any]) -> inspect.BoundArguments:
        return inspect.BoundArguments(self.signature, collections.OrderedDict(arguments))

    def is_argument(self, source: Source) -> bool:
        """Whether a source lies in the arguments."""
        while source.base is not None:
            source = source.base
        return source.kind == "local"

    def declared(self, env: Any) -> dict[Any, tuple[int, int | None]]:
        """The sizes that each symbol was declared to take, whatever the program narrowed them to."""
        found = {}
        for symbol in env.symbols:
            dim = self.dims.get(env.wishes[symbol].removeprefix("dimension ").strip("'"), Dim.AUTO)
            found[symbol] = dim.min, dim.max
        return found

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises ExportError for an argument that is neither a tensor nor plain data."""
        for path, value in leaves(arguments):
            if type(value) in TENSORS and value.layout is torch.strided:
                continue
            if type(value) not in PLAIN:
                cure = "give its tensors and numbers as arguments, or close over it"
                kind = class_name(type(value))
                raise ExportError(
                    f"{self.name}: {path} is a {kind}, which no file can hold: {cure}"
                )

    def declare(self, dynamic: Any) -> None:
        """Mark the sizes that are to be dynamic. Raises ExportError."""
        names = list(self.arguments)
        if isinstance(dynamic, list | tuple):
            if len(dynamic) > len(names):
                raise ExportError(f"dynamic_shapes has {len(dynamic)} entries, not {len(names)}")
            dynamic = dict(zip(names, dynamic))
        examples: dict[str, int] = {}
        for name, spec in (dynamic or {}).items():
            if name not in names:
                raise ExportError(f"dynamic_shapes: no argument {name!r}: {', '.join(names)}")
            self.mark(name, self.arguments[name], spec, examples)

    def mark(self, path: str, value: Any, spec: Any, examples: dict[str, int]) -> None:
        """Mark the axes of a tensor, or of those in a container. `examples`: by Dim, the size seen so far."""
        if spec is None:
            return
        specs = spec if isinstance(spec, dict) else dict(enumerate(spec))
        if (items := parts(value)) is not None:
            known = dict(items)
            for key, inner in specs.items():
                if key not in known:
                    raise ExportError(f"dynamic_shapes: {path} has no item {key!r}")
                self.mark(f"{path}[{key!r}]", known[key], inner, examples)
            return
        if not isinstance(value, torch.Tensor):
            raise ExportError(f"dynamic_shapes: {path} is no tensor, it has no sizes")
        marks = {}
        for axis, dim in specs.items():
            if dim is None:
                continue
            if not -value.dim() <= axis < value.dim():
                raise ExportError(f"dynamic_shapes: {path} has no axis {axis}")
            axis %= value.dim()
            where = f"{path}.size({axis}) is {value.shape[axis]}"
            if not isinstance(dim, Dim):
                raise ExportError(f"dynamic_shapes: {where}; {dim!r} is no mc.Dim")
            self.check_example(where, value.shape[axis], dim, examples)
            marks[axis] = (dim.min, dim.max, dim.name) if dim.name else (0, None)
        setattr(value, MARK, marks)

    def check_example(self, where: str, size: int, dim: Dim, examples: dict[str, int]) -> None:
        """Raises ExportError for an example's size that the Dim excludes, or that differs from another's."""
        low, high = dim.min, dim.max
        if size < SMALLEST_SIZE:
            why = "sizes 0 and 1 are exported apart: give an example with at least 2"
            raise ExportError(f"{where} and declared dynamic; {why}")
        if size < low or (high is not None and size > high):
            span = f"{low} to {'any' if high is None else high}"
            raise ExportError(f"{where}, not in Dim {dim.name!r}, {span}")
        if not dim.name:
            return
        if (other := examples.setdefault(dim.name, size)) != size:
            why = f"another size with Dim {dim.name!r} is {other}: one Dim means equal sizes"
            raise ExportError(f"{where}, {why}")
        if self.dims.setdefault(dim.name, dim) != dim:
            raise ExportError(f"there are two Dims {dim.name!r} with other limits")


def example(leaf: Any) -> Any:
    """A tensor of the call as capture sees it: without gradient, without gaps in memory."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    seen = leaf.detach()
    if seen.is_conj() or seen.is_neg() or not is_dense(seen):
        seen = seen.resolve_conj().resolve_neg().contiguous()
    return seen


def leaves(arguments: Mapping[str, Any], containers: bool = False) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers among arguments by path, or the containers that aren't empty."""
    waiting = list(arguments.items())
    while waiting:
        path, value = waiting.pop(0)
        items = parts(value)
        if items if containers else items is None:
            yield path, value
        waiting[:0] = [(f"{path}[{key!r}]", item) for key, item in items or ()]
