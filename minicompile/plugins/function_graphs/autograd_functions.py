"""`Fn.apply(...)` of a torch.autograd.Function: its forward and its backward as graphs inside the graph.

The real compiler: torch/_dynamo/variables/higher_order_ops.py, torch/_functorch/autograd_function.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from minicompile import compat
from minicompile.dynamo.builtins import means
from minicompile.dynamo.calls import FIXED_TYPES
from minicompile.dynamo.guards import SourceCode, generate, types_from
from minicompile.dynamo.result import Guard
from minicompile.dynamo.variables import is_constant
from minicompile.dynamo.world import World, call_rules
from minicompile.errors import MinicompileError
from minicompile.ops.graph import Graph
from minicompile.plugins.function_graphs.called import Called, without_effects
from minicompile.plugins.function_graphs.subgraph import Subgraph, subgraph

Function: Any = torch.autograd.Function


class Context:
    """Stands for `ctx` while capturing: an ordinary object of the frame's."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: Any = ()
        self.without_gradient: Any = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.without_gradient = tensors

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@means(Context.__getattr__)
def missing_attribute(world: World, context: Context, name: str) -> Any:
    """Refuse the other attributes that torch's own `ctx` has: `mark_dirty`, `input_grad_buffers`, ..."""
    if hasattr(BackwardCFunction, name):
        world.unsupported("autograd-function", f"ctx.{name} of an autograd.Function")
    return world.no_attribute(context, name)


class CustomFunction(Called):
    """Forward and backward of an autograd.Function. Forward's graph gives results, then what is saved."""

    several = False
    """Whether forward gives a tuple."""
    backward: Graph | None = None
    """From the results' gradients and what was saved to the inputs' gradients."""
    unchanged: Callable[[], bool] | None = None
    """Whether what backward read outside of itself is as it was."""
    checked: list[int]
    """Which of the saved tensors went through `ctx.save_for_backward`; the others were attributes of ctx."""
    without_gradient: list[int]
    """Results that no gradient flows through."""
    results: int

    @property
    def graphs(self) -> list[Graph]:
        return [self.graph, *([self.backward] if self.backward is not None else [])]

    def check(self) -> None:
        """Before the backward: raises RuntimeError if it would do something else now."""
        if self.unchanged is not None and not self.unchanged():
            raise RuntimeError(
                f"what backward reads changed since forward was called: {self.way_out}"
            )

    @property
    def way_out(self) -> str:
        return f"keep {self.__qualname__} outside of the compiled function"

    def __call__(self, closure: tuple[torch.Tensor, ...], *given: torch.Tensor) -> Any:
        return Replay.apply(self, closure, *given)


class Replay(torch.autograd.Function):
    """Runs the graphs of a CustomFunction."""

    @staticmethod
    def forward(ctx: Any, function: CustomFunction, closure: Any, *given: torch.Tensor) -> Any:
        tensors = (*closure, *given)
        outputs = function.graph.function(*(tensors[i] for i in function.feeds))
        results, saved = outputs[: function.results], outputs[function.results :]
        ctx.function = function
        ctx.strides = [torch.empty_like(x, device="meta").stride() for x in results]
        ctx.save_for_backward(*(saved[i] for i in function.checked))
        ctx.others = {i: t for i, t in enumerate(saved) if i not in function.checked}
        ctx.mark_non_differentiable(*(results[i] for i in function.without_gradient))
        return results if function.several else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        function = ctx.function
        if torch.is_grad_enabled():
            text = f"second derivatives of a captured autograd.Function: {function.way_out}"
            raise RuntimeError(text)
        function.check()
        saved = dict(zip(function.checked, ctx.saved_tensors)) | ctx.others
        laid_out = map(as_expected, gradients, ctx.strides)
        found = function.backward.function(*laid_out, *(saved[i] for i in range(len(saved))))
        return (None, None, *found)


def as_expected(gradient: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A gradient in the layout that its backward was captured for: that of the result."""
    if gradient.stride() == strides:
        return gradient
    return gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)


@means(compat.function_apply)
def apply_function(world: World, cls: Any, /, *args: Any) -> Any:
    """`Fn.apply(...)`: a CustomFunction's node; without gradients just what its forward does."""
    context = Context(tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args))
    if not torch.is_grad_enabled():
        results, several = run_forward(world, cls, context, args)
        # an input that is given back comes back as another tensor, which requires no grad
        results = [
            world.torch_call(torch.Tensor.detach, (r,), {}) if any(r is a for a in args) else r
            for r in results
        ]
        return tuple(results) if several else results[0]
    return capture_function(world, cls, context, args)


def capture_function(world: World, cls: Any, context: Context, args: Any) -> Any:
    recorder, name = world.recorder, cls.__qualname__
    for arg in args:
        known = is_constant(arg) or isinstance(arg, (*FIXED_TYPES, torch.Tensor))
        if not known and world.tracker(arg) is None:
            kind = type(arg).__name__
            what = f"{name}, an autograd.Function, is called with a {kind} that the frame made"
            world.unsupported("autograd-function", what)
    given = [arg for arg in args if isinstance(arg, torch.Tensor)]
    with subgraph(world) as inner, without_effects(world, name), torch.no_grad():
        results, several = run_forward(world, cls, context, args)
        saved, backward, unchanged = None, None, None
        if any(context.needs_input_grad):
            saved, backward, unchanged = capture_backward(world, cls, context, args, results)
        outputs = [*map(inner.lift, results), *(saved.outer_inputs if saved else ())]
        graph = inner.completed(outputs, cls.__name__)
    made = CustomFunction(f"{name}.apply", inner, graph, given)
    made.results, made.several = len(results), several
    made.without_gradient = positions(results, context.without_gradient)
    made.checked = positions(saved.values if saved else [], context.saved_tensors)
    made.backward, made.unchanged = backward, unchanged
    return recorder.record("call_function", made, (tuple(made.closure), *given), {})


def positions(values: list[Any], chosen: Any) -> list[int]:
    return [i for i, value in enumerate(values) if any(value is other for other in chosen)]


def run_forward(world: World, cls: Any, context: Context, args: Any) -> tuple[list[Any], bool]:
    """The tensors that `forward` gives, and whether it gives a tuple."""
    forward = world.load_attr(cls, "forward")
    if world.load_attr(cls, "setup_context") is Function.setup_context:
        found = world.call(forward, (context, *args), {})
    elif getattr(forward, "__defaults__", None):
        what = f"{cls.__qualname__}.forward, with a setup_context, has default arguments"
        world.unsupported("autograd-function", what)
    else:
        found = world.call(forward, args, {})
        world.call(world.load_attr(cls, "setup_context"), (context, args, found), {})
    results = list(found) if type(found) is tuple else [found]
    if not all(isinstance(result, torch.Tensor) for result in results):
        what = f"{cls.__qualname__}.forward gives something other than tensors"
        world.unsupported("autograd-function", what)
    return results, type(found) is tuple


def capture_backward(
    world: World, cls: Any, context: Context, args: Any, results: list[torch.Tensor]
) -> tuple[Subgraph, Graph, Callable[[], bool]]:
    """The graph of `backward`, inside that of `forward`: what it takes from there is what must be saved.

    Also a check, for when it runs, that what it read outside is as it was.
    """
    recorder, name = world.recorder, f"{cls.__qualname__}.backward"
    inputs = len(recorder.inputs)
    before, world.outside.guards = world.outside.guards, {}
    again, world.outside.read_again = world.outside.read_again, True
    try:
        with subgraph(world) as inner, compat.without_autocast():
            gradients: list[Any] = []
            for result in results:
                with recorder.mode:
                    gradients.append(torch.empty_like(result))
                gradients[-1].stands_for_gradient = True
                inner.argument(gradients[-1], "gradient")
            found = world.call(world.load_attr(cls, "backward"), (context, *gradients), {})
            outputs = list(found) if type(found) is tuple else [found]
            while len(outputs) > len(args) and outputs[-1] is None:
                outputs.pop()
            kinds = [isinstance(arg, torch.Tensor) for arg in args]
            fitting = len(outputs) == len(args) and all(
                output is None or (kind and isinstance(output, torch.Tensor))
                for kind, output in zip(kinds, outputs)
            )
            if not fitting:
                what = f"{name} does not give one gradient for each tensor"
                world.unsupported("autograd-function", what)
            lifted = [inner.lift(output) for kind, output in zip(kinds, outputs) if kind]
            graph = inner.completed(lifted, f"{cls.__name__}_backward")
    except MinicompileError:
        raise
    except Exception as error:
        world.unsupported("exception", f"{name} raises {type(error).__name__}: {error}")
    finally:
        read, world.outside.read_again = world.outside.guards, again
        world.outside.guards = {**before, **{key: read[key] for key in read if key not in before}}
    if len(recorder.inputs) > inputs:
        what = f"{name} reads a tensor outside of it"
        world.unsupported("autograd-function", what, "save it with ctx.save_for_backward")
    return inner, graph, still_as_read(world, name, list(read.values()))


def still_as_read(world: World, name: str, guards: list[Guard]) -> Callable[[], bool]:
    """A check of guards that needs no frame."""
    code = SourceCode(world.outside.held, types_from(guards))
    for source in (source for guard in guards for source in guard.sources):
        if not code.holds(source):
            what = f"{name} reads {source}"
            world.unsupported("autograd-function", what, "make it an attribute of ctx")
    code.names["MISS"] = False
    for guard in guards:
        code.require(guard)
    check: Callable[[], bool] = generate("unchanged()", [*code.lines, "return True"], code.names)
    return check


@call_rules(torch.Tensor.stride)
def stride(world: World, args: Any, kwargs: Any) -> Any:
    """Refuse to tell the strides of a gradient: those that it will have are not known."""
    if getattr(args[0], "stands_for_gradient", False):
        what = "the strides of a gradient are read"
        world.unsupported("tensor-attribute", what, "call contiguous() first")
    return world.torch_call(torch.Tensor.stride, args, kwargs)
