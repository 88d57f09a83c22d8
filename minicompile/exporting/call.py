"""An example call: whose frame is captured, where the user sees what lies in it, which sizes are dynamic."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import keyword
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch

from minicompile.aot.layout import is_dense
from minicompile.dynamo.arguments import signature_of
from minicompile.dynamo.module import call_module, calling
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


@dataclass
class Call:
    """An example call, ready to be captured. `arguments`: what the user gave, by the parameters' names;
    tensors as copies that carry marks."""

    target: Any
    name: str
    signature: inspect.Signature
    arguments: dict[str, Any]
    function: types.FunctionType
    """The frame that is captured."""
    owner: dict[str, Any]
    """Its locals that are no arguments: the module, or the object of a method."""
    stars: bool
    """Whether it takes `*args, **kwargs` and hands them on."""
    dims: dict[str, Dim] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: Any) -> Call:
        """Binds and checks. Raises ExportError."""
        if not isinstance(args, list | tuple):
            raise ExportError(f"args is a {type(args).__name__}: give a tuple of the arguments")
        owner: dict[str, Any] = {}
        function, stars = target, False
        if isinstance(target, torch.nn.Module):
            name, signature = type(target).__qualname__, inspect.signature(target.forward)
            function, owner, stars = call_module, {"self": target}, True
        elif isinstance(target, types.FunctionType):
            name, signature = target.__qualname__, signature_of(target)
        elif isinstance(getattr(target, "__func__", None), types.FunctionType):
            function, name = target.__func__, target.__qualname__
            first, *rest = signature_of(function).parameters.values()
            owner, signature = {first.name: target.__self__}, inspect.Signature(rest)
        else:
            name, signature = getattr(target, "__name__", type(target).__name__), ANY
            with contextlib.suppress(ValueError):  # of C functions there may be none
                signature = inspect.signature(target)
            function, stars = calling(target), True
        name = re.sub(r"\W+", "_", name.rpartition(".")[2]).strip("_") or "exported"
        name += "_" * keyword.iskeyword(name)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ExportError(f"{name}: {error}") from None
        bound.apply_defaults()
        found = cls(target, name, signature, {}, cast(Any, function), owner, stars)
        if "result" in signature.parameters:
            raise ExportError(
                f"{name}: an export's results are called `result`: rename the parameter"
            )
        found.check(bound.arguments)
        copies: dict[int, Any] = {}
        given = mapped(dict(bound.arguments), lambda x: copies.setdefault(id(x), example(x)))
        found.arguments = given
        found.declare(dynamic)
        return found

    def bound(self, arguments: dict[str, Any]) -> inspect.BoundArguments:
        return inspect.BoundArguments(self.signature, collections.OrderedDict(arguments))

    def frame(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The locals of the frame."""
        if not self.stars:
            return {**self.owner, **arguments}
        bound = self.bound(arguments)
        return {**self.owner, "args": bound.args, "kwargs": bound.kwargs}

    @functools.cached_property
    def moved(self) -> dict[Source, Source]:
        """Where arguments lie in the frame -> where they lie for the user."""
        found: dict[Source, Source] = {}
        args, kwargs = Source("local", "args"), Source("local", "kwargs")
        for name, parameter in self.signature.parameters.items() if self.stars else ():
            here, place = Source("local", name), len(found)
            if parameter.kind is parameter.VAR_POSITIONAL:
                for i in range(len(self.arguments[name])):
                    found[Source("item", place + i, args)] = Source("item", i, here)
            elif parameter.kind is parameter.VAR_KEYWORD:
                for key in self.arguments[name]:
                    found[Source("item", key, kwargs)] = Source("item", key, here)
            elif parameter.kind is parameter.KEYWORD_ONLY:
                found[Source("item", name, kwargs)] = here
            else:
                found[Source("item", place, args)] = here
        return found

    def renamed(self, source: Source) -> Source:
        """Where the user sees what a source names; what is no argument starts at something held."""
        if source in self.moved:
            return self.moved[source]
        if source.kind == "computed":
            form, function, of = source.key
            return replace(source, key=(form, function, tuple(map(self.renamed, of))))
        if source.base is None:
            return (
                replace(source, kind="held") if self.stars or source.key in self.owner else source
            )
        return replace(source, base=self.renamed(source.base))

    def is_argument(self, source: Source) -> bool:
        """Whether a source, renamed, lies in the arguments."""
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

    @property
    def plain_signature(self) -> inspect.Signature:
        """How the export is called: without annotations, which may be objects."""
        given = self.signature.parameters.values()
        return inspect.Signature([p.replace(annotation=p.empty) for p in given])

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
