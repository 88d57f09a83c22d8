"""Say what each output of a captured graph is: an input, a view of one, new memory, a view of it.

Found on the fakes that the graph was run on, where memory is still shared as in eager. Autograd links all
tensors that are views of one tensor, their base: a write to one with history gives all of them another.
So an output that is a view has the same base here as in eager; `admit.py` refuses what can't have it.

The real compiler: torch/_functorch/_aot_autograd/collect_metadata_analysis.py, functional_utils.py
(gen_alias_from_base).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from minicompile import compat
from minicompile.aot.admit import admit_output, admit_view, viewed_input
from minicompile.aot.layout import geometry, is_dense
from minicompile.aot.result import Kind, OutputSpec
from minicompile.aot.tracer import Tracer
from minicompile.errors import Unsupported
from minicompile.ops.graph import user_line
from minicompile.shapes.symnode import hint, size_expr


def classify(
    outputs: tuple[Any, ...],
    inputs: list[Any],
    of_input: Mapping[fx.Node, int],
    tracer: Tracer,
) -> tuple[list[OutputSpec], list[Any], list[torch.Tensor]]:
    """Return each output's `OutputSpec`, and what the graph itself must return: fresh results, and bases.

    `of_input`: the nodes of the inputs. Raises Unsupported for an output that is neither fresh nor a view.
    """
    input_itself = {id(x): i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    input_memory = {compat.storage_id(x) for x in inputs if isinstance(x, torch.Tensor)}
    distinct = {id(value): value for value in outputs if isinstance(value, torch.Tensor)}
    in_storage: dict[int, list[torch.Tensor]] = {}
    for value in distinct.values():
        in_storage.setdefault(compat.storage_id(value), []).append(value)
    first_place = {id(value): i for i, value in reversed([*enumerate(outputs)])}
    specs: list[OutputSpec] = []
    results: list[Any] = []
    bases: dict[int, torch.Tensor] = {}
    for position, value in enumerate(outputs):
        if isinstance(value, torch.SymInt | torch.SymFloat):
            results.append(value)
            specs.append(OutputSpec("fresh"))
            continue
        if not isinstance(value, torch.Tensor):
            specs.append(OutputSpec("constant", value=value))
            continue
        storage, node = compat.storage_id(value), tracer.argument(value)
        if id(value) in input_itself:
            spec = OutputSpec("input", input_itself[id(value)])
        elif first_place[id(value)] != position:
            spec = OutputSpec("output", first_place[id(value)])
        elif storage in input_memory:
            with at_line_of(node):
                admit_output(value, of_input=True)
                number = viewed_input(node, of_input)
                spec = view_of("input_view", number, value, inputs[number])
        else:
            with at_line_of(node):
                admit_output(value, of_input=False)
                if len(in_storage[storage]) == 1 and is_dense(value):
                    results.append(value)
                    spec = OutputSpec("fresh")
                else:
                    base = bases.setdefault(storage, base_of(in_storage[storage], tracer))
                    number = list(bases).index(storage)
                    same = OutputSpec("base", number)
                    spec = same if value is base else view_of("view", number, value, base)
        specs.append(replace(spec, requires_grad=history(value) is not None))
    return specs, results, list(bases.values())


@contextlib.contextmanager
def at_line_of(node: fx.Node) -> Iterator[None]:
    """Let a refusal name the user's line that a node comes from."""
    try:
        yield
    except Unsupported as error:
        error.where = error.where or user_line(node)
        raise


def base_of(views: list[torch.Tensor], tracer: Tracer) -> torch.Tensor:
    """Return what the graph returns for all outputs in one piece of memory: the base that they share if it is
    the whole of it; otherwise the memory's first tensor."""
    base = compat.autograd_base(views[0])
    first = tracer.first_in_storage(compat.storage_id(base))
    whole = hint(base.numel()) == hint(first.numel()) and base.dtype is first.dtype
    common = all(compat.autograd_base(view) is base for view in views) and tracer.knows(base)
    return base if whole and common and is_dense(base) else first


def view_of(kind: Kind, index: int, view: torch.Tensor, base: torch.Tensor) -> OutputSpec:
    """Describe a view by its place in its base's memory, in elements."""
    admit_view(view, base, made_here=kind == "view")
    detached = compat.autograd_base(view) is not compat.autograd_base(base)
    size, stride, _ = geometry(view)
    offset = size_expr(view.storage_offset() - base.storage_offset())
    return OutputSpec(kind, index, size=size, stride=stride, offset=offset, detached=detached)


def history(value: Any) -> Any:
    """Return the autograd node that made a value; None if there is none, or for a view that autograd refuses
    to use since its base was changed."""
    with contextlib.suppress(RuntimeError):
        return getattr(value, "grad_fn", None)
