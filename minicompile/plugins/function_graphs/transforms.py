"""`torch.func.grad(f)(...)` and its like: f as a graph, which a node of the graph transforms as torch does.

`grad`, `grad_and_value`, `jacrev`, `jacfwd`, `hessian` and `jvp` apply torch's own transform to the
captured graph of f, so that tracing to ATen operators sees the derivative's operators. No derivative is
written here. `functional_call` calls the module with the values in place of its parameters.
`vjp` and `linearize` end the graph.
The real compiler: torch/_dynamo/variables/higher_order_ops.py, torch/_dynamo/variables/functions.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from minicompile import compat
from minicompile.dynamo.builtins import means
from minicompile.dynamo.variables import is_constant
from minicompile.dynamo.world import World
from minicompile.plugins.function_graphs.called import Called, without_effects
from minicompile.plugins.function_graphs.subgraph import subgraph


class Transformed(Called):
    """A transform of torch.func, applied to the graph of a function. Gives the tensors of the result."""

    transform: Callable[[Callable[..., Any]], Callable[..., Any]]
    rebuild: Callable[[tuple[torch.Tensor, ...]], tuple[tuple[Any, ...], dict[str, Any]]]
    """From the call's tensors to its arguments."""
    results: Callable[[Any], Any]
    """From the tensors of the graph to the function's result."""
    structure: Any
    """Of the transform's result."""
    constants: dict[int, Any]
    """Leaves of the transform's result that are no tensors."""

    def __call__(self, closure: tuple[torch.Tensor, ...], *arguments: torch.Tensor) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            leaves = compat.tree_leaves((args, kwargs))
            tensors = (*closure, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
            return self.results(self.graph.function(*(tensors[i] for i in self.feeds)))

        args, kwargs = self.rebuild(arguments)
        result = self.transform(function)(*args, **kwargs)
        leaves, self.structure = compat.tree_flatten(result)
        tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self.constants = {i: leaf for i, leaf in enumerate(leaves) if not tensors[i]}
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def filled(leaves: list[Any], structure: Any, places: list[int], tensors: Any) -> Any:
    """A container whose leaves at `places` are replaced by tensors."""
    leaves = list(leaves)
    for i, tensor in zip(places, tensors):
        leaves[i] = tensor
    return compat.tree_unflatten(leaves, structure)


def refuse(world: World, what: str) -> NoReturn:
    world.unsupported("function-transform", what)


def differentiable(args: Any, places: list[int], fakes: list[Any], argnums: Any) -> list[Any]:
    """The fakes of the arguments that a gradient is taken for."""
    numbers = (argnums,) if isinstance(argnums, int) else argnums or ()
    numbers = [number % len(args) for number in numbers] if args else []
    owners = [i for i, arg in enumerate(args) for _ in compat.tree_leaves(arg)]
    owned = zip(places, fakes)
    return [fake for i, fake in owned if i < len(owners) and owners[i] in numbers]


def transformed(
    world: World,
    name: str,
    transform: Any,
    function: Any,
    args: Any,
    kwargs: Any,
    argnums: Any = None,
) -> Any:
    """Record the node that calls `transform(function)(*args, **kwargs)`."""
    recorder = world.recorder
    args, kwargs = tuple(map(world.deep, args)), {k: world.deep(v) for k, v in kwargs.items()}
    leaves, structure = compat.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not all(i in places or is_constant(leaf) for i, leaf in enumerate(leaves)):
        refuse(world, f"torch.func.{name} is given something other than tensors and numbers")
    what = f"a function under torch.func.{name}"
    with subgraph(world) as inner, without_effects(world, what), torch.enable_grad():
        fakes = []
        for i in places:
            leaf = leaves[i]
            with recorder.mode:
                fakes.append(leaf.new_empty_strided(leaf.shape, leaf.stride()))
            inner.argument(fakes[-1], "argument")
        for fake in differentiable(args, places, fakes, argnums):
            fake.requires_grad_(fake.is_floating_point() or fake.is_complex())
        inner_args, inner_kwargs = filled(leaves, structure, places, fakes)
        result = world.deep(world.call(function, inner_args, inner_kwargs))
        outputs, shape = compat.tree_flatten(result)
        kept = [i for i, leaf in enumerate(outputs) if isinstance(leaf, torch.Tensor)]
        if not all(i in kept or is_constant(leaf) for i, leaf in enumerate(outputs)):
            refuse(world, f"{what} gives something other than tensors and numbers")
        if not inner.written.keys().isdisjoint(map(compat.storage_id, fakes)):
            refuse(world, f"{what} changes its argument in place")
        graph = inner.completed([inner.lift(outputs[i]) for i in kept], name)
    node = Transformed(f"torch.func.{name}", inner, graph, fakes)
    node.transform = transform
    node.rebuild = functools.partial(filled, leaves, structure, places)
    node.results = functools.partial(filled, outputs, shape, kept)
    tensors = tuple(leaves[i] for i in places)
    values = recorder.record("call_function", node, (tuple(node.closure), *tensors), {})
    remaining = iter(values)
    total = len(values) + len(node.constants)
    merged = [node.constants[i] if i in node.constants else next(remaining) for i in range(total)]
    return compat.tree_unflatten(merged, node.structure)


def run_transform(name: str, function: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(torch.func, name)(function, **dict(options))(*args, **kwargs)


@means(run_transform)
def capture_transform(
    world: World, name: str, function: Any, options: Any, *args: Any, **kwargs: Any
) -> Any:
    transform = functools.partial(getattr(torch.func, name), **dict(options))
    argnums = None if name == "jacfwd" else dict(options)["argnums"]
    return transformed(world, name, transform, function, args, kwargs, argnums)


def wrapping(name: str) -> Callable[..., Any]:
    def rule(world: World, func: Any, argnums: Any = 0, **options: Any) -> Any:
        if not options.keys() <= {"has_aux", "chunk_size", "randomness"}:
            refuse(world, f"torch.func.{name} with unusual options")
        settings = (("argnums", world.deep(argnums)), *options.items())
        return functools.partial(run_transform, name, func, settings)

    return rule


for _name in ("grad", "grad_and_value", "jacrev", "jacfwd", "hessian"):
    means(getattr(torch.func, _name))(wrapping(_name))


def run_impl(name: str) -> Callable[..., Any]:
    def rule(world: World, func: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
        transform = functools.partial(getattr(torch.func, name), argnums=argnums, has_aux=has_aux)
        kwargs = dict(world.inside(kwargs))
        return transformed(world, name, transform, func, tuple(world.inside(args)), kwargs, argnums)

    return rule


means(compat.grad_impl)(run_impl("grad"))
means(compat.grad_and_value_impl)(run_impl("grad_and_value"))


@means(torch.func.jvp)
def jvp(world: World, func: Any, primals: Any, tangents: Any, *, has_aux: bool = False) -> Any:
    primals, tangents = world.deep(primals), world.deep(tangents)
    if not (type(primals) is tuple and type(tangents) is tuple and len(primals) == len(tangents)):
        refuse(world, "torch.func.jvp with other arguments than two tuples of one length")
    count = len(primals)

    def transform(function: Any) -> Any:
        def run(*both: Any) -> Any:
            first = lambda *args: function(*args, *both[count:])  # noqa: E731
            return torch.func.jvp(first, both[:count], both[count:], has_aux=has_aux)

        return run

    call = functools.partial(run_first, func, count)
    return transformed(world, "jvp", transform, call, (*primals, *tangents), {})


def run_first(function: Any, count: int, *args: Any) -> Any:
    return function(*args[:count])


@means(torch.func.functional_call)
def functional_call(
    world: World, module: Any, parameter_and_buffer_dicts: Any, args: Any = None, kwargs: Any = None
) -> Any:
    """Call a module whose parameters and buffers read as other tensors until it returns."""
    values = world.deep(parameter_and_buffer_dicts)
    several = isinstance(values, list | tuple)
    values = [item for part in (values if several else [values]) for item in part.items()]
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    tied = len(names) != len(list(module.named_parameters()))
    if tied or len(dict(values)) != len(values) or world.tracker(module) is None:
        refuse(world, "torch.func.functional_call with tied, repeated or new parameters")
    before: list[Any] = []
    try:
        for name, value in values:
            path, _, last = name.rpartition(".")
            owner = module
            for part in path.split(".") if path else ():
                owner = world.load_attr(owner, part)
            tables = [world.load_attr(owner, table) for table in ("_parameters", "_buffers")]
            table = next((world.tracker(t) for t in tables if last in world.inside(t)), None)
            if table is None or not isinstance(value, torch.Tensor):
                refuse(world, f"torch.func.functional_call with {name}, which the module lacks")
            before.append((table, table.contents, table.writes.copy()))
            table.contents = None
            table.writes[last] = value
        args = () if args is None else args
        args = args if isinstance(world.inside(args), tuple) else (args,)
        with without_effects(world, "a module under torch.func.functional_call"):
            return world.call(module, tuple(world.inside(args)), dict(world.inside(kwargs or {})))
    finally:
        for changed, contents, writes in reversed(before):
            changed.contents = contents
            changed.writes.clear()
            changed.writes.update(writes)
