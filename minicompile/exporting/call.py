"""An example call: the function that is captured, its arguments, which sizes are dynamic."""

from __future__ import annotations

import functools
import inspect
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from minicompile import compat
from minicompile.dynamo.result import Source, describe
from minicompile.dynamo.sizes import MARK
from minicompile.errors import ExportError
from minicompile.exporting.conditions import CONTAINERS, NAMES, plain, walk
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
        if not SMALLEST_SIZE <= self.min <= (self.min if self.max is None else self.max):
            why = "at least 2, since sizes 0 and 1 are exported apart, and at most max"
            raise ExportError(f"Dim {self.name!r}: min is {self.min}; it is {why}")


Dim.AUTO = Dim("")
TENSORS = (torch.Tensor, torch.nn.Parameter)
CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""Arguments that are specialised, and what results may hold beside tensors and sizes."""
RESERVED = {
    "result", "torch", "inf", "nan", "type", "len", "list", "tuple", "dict", "repr", "str", "min",
    "max", "float",
}  # fmt: skip
"""Names that conditions and the expression of the results use."""
FILE = "<minicompile export>"
"""The file of the functions that are captured."""


def without_objects(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter without its annotation, and without a default that is no constant."""
    parts = walk({"": parameter.default})
    constant = all(type(x) in (*CONTAINERS, *CONSTANTS) for _, x in parts)
    default = parameter.default if constant else parameter.empty
    return parameter.replace(annotation=parameter.empty, default=default)


@dataclass
class Call:
    """An example call, ready to be captured. `arguments`: what the user gave, by the parameters' names;
    tensors as copies without gradients and gaps, which carry marks. `dims`: by the wish of their symbols."""

    target: Any
    name: str
    signature: inspect.Signature
    arguments: dict[str, Any]
    dims: dict[str, Dim] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: Any) -> Call:
        """Bind and check. Raises ExportError."""
        module = isinstance(target, torch.nn.Module)
        name = getattr(target, "__name__", type(target).__name__)
        name = re.sub(r"\W+", "_", name).strip("_") or "exported"
        name += "_" * keyword.iskeyword(name)
        if not isinstance(args, list | tuple):
            raise ExportError(f"args is a {type(args).__name__}: give a tuple of the arguments")
        try:
            signature = inspect.signature(target.forward if module else target)
            bound = signature.bind(*args, **kwargs)
        except (TypeError, ValueError) as error:  # C functions may have no signature
            raise ExportError(f"{name}: {error}") from None
        bound.apply_defaults()
        if taken := sorted(signature.parameters.keys() & RESERVED):
            raise ExportError(f"{name}: conditions name {taken[0]!r}: rename the parameter")
        for path, value in walk(bound.arguments):
            dense = type(value) in TENSORS and value.layout is torch.strided
            if not dense and type(value) not in (*CONTAINERS, *CONSTANTS):
                cure = "give its tensors and numbers in dicts, lists and tuples, or close over it"
                raise ExportError(
                    f"{name}: {path} is {describe(value)}, which no file can hold: {cure}"
                )
        tensors = {id(x): x for _, x in walk(bound.arguments) if isinstance(x, torch.Tensor)}
        copies = {key: plain(tensor) for key, tensor in tensors.items()}
        arguments = compat.tree_map(lambda x: copies.get(id(x), x), dict(bound.arguments))
        parameters = [without_objects(p) for p in signature.parameters.values()]
        call = cls(target, name, inspect.Signature(parameters), arguments)
        if isinstance(dynamic, list | tuple):
            dynamic = dict(zip(arguments, dynamic))
        for name, spec in (dynamic or {}).items():
            try:
                call.mark(name, arguments[name], spec)
            except (LookupError, TypeError) as error:
                what = f"no tensor for {name!r} ({error!r}) among {', '.join(arguments)}"
                raise ExportError(f"dynamic_shapes: {what}") from None
        return call

    @functools.cached_property
    def function(self) -> Any:
        """The function that is captured: it has the target's parameters, and calls the target with them."""
        owner = "self" if isinstance(self.target, torch.nn.Module) else self.name
        while owner in self.signature.parameters:
            owner += "_"
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
        passed = (
            f"{n}={n}" if p.kind is p.KEYWORD_ONLY else stars.get(p.kind.name, "") + n
            for n, p in self.signature.parameters.items()
        )
        text = f"def {self.name}{self.signature}: return {owner}({', '.join(passed)})"
        names: dict[str, Any] = dict(NAMES)
        exec(compile(text, FILE, "exec"), names)
        names[owner], function = self.target, names[self.name]
        return function

    def is_argument(self, source: Source) -> bool:
        """Whether a source lies in the arguments."""
        while source.base is not None:
            source = source.base
        return source.kind == "local"

    def mark(self, path: str, value: Any, spec: Any) -> None:
        """Mark the dynamic axes of a tensor, or of those in a container. Raises ExportError."""
        if spec is None:
            return
        specs = spec if isinstance(spec, dict) else dict(enumerate(spec))
        if not isinstance(value, torch.Tensor):
            for key, inner in specs.items():
                self.mark(f"{path}[{key!r}]", value[key], inner)
            return
        marks = {}
        for axis, dim in specs.items():
            if dim is None:
                continue
            if not -value.dim() <= axis < value.dim():
                raise ExportError(f"dynamic_shapes: {path} has no axis {axis}")
            axis %= value.dim()
            size, where = value.shape[axis], f"{path}.size({axis}) is {value.shape[axis]}"
            if not isinstance(dim, Dim):
                raise ExportError(f"dynamic_shapes: {where}; {dim!r} is no mc.Dim")
            if not dim.min <= size <= (size if dim.max is None else dim.max):
                raise ExportError(f"{where}, not in {dim}; sizes 0 and 1 are exported apart")
            marks[axis] = (dim.min, dim.max, dim.name) if dim.name else (0, None)
            if dim.name and self.dims.setdefault(f"dimension {dim.name!r}", dim) != dim:
                raise ExportError(f"there are two Dims {dim.name!r} with other limits")
        setattr(value, MARK, marks)
