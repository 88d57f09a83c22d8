"""What the outputs of a captured graph are of its inputs and of each other: an input itself, a view of it, of
memory that the graph makes, another output. Found where memory is still shared as in eager.

Autograd links the tensors that are views of one tensor, their base: a write with history to one of them gives
all of them another history. So outputs with a base in common in eager have one here, be it no output itself.

The real compiler: torch/_functorch/_aot_autograd/collect_metadata_analysis.py, functional_utils.py
(gen_alias_from_base).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from minicompile import compat
from minicompile.aot.admit import admit_base, admit_output, admit_view, refusing
from minicompile.aot.layout import geometry, is_dense
from minicompile.aot.result import OutputSpec
from minicompile.aot.tracer import Tracer
from minicompile.errors import Unsupported
from minicompile.ops.graph import user_line
from minicompile.shapes.symnode import size_expr


def classify(
    outputs: tuple[Any, ...],
    inputs: list[Any],
    of_input: Mapping[fx.Node, int],
    tracer: Tracer,
) -> tuple[list[OutputSpec], list[Any]]:
    """Return each output's `OutputSpec`, and the results that the graph itself must return.

    `of_input`: the nodes of the inputs. Raises Unsupported for an output of another kind.
    """
    input_itself = {id(x): i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    input_memory = {compat.storage_id(x) for x in inputs if isinstance(x, torch.Tensor)}
    distinct = {id(value): value for value in outputs if isinstance(value, torch.Tensor)}
    in_storage: dict[int, list[torch.Tensor]] = {}
    for value in distinct.values():
        in_storage.setdefault(compat.storage_id(value), []).append(value)
    links = Counter(id(compat.autograd_base(value)) for value in distinct.values())
    first_place = {id(value): i for i, value in reversed([*enumerate(outputs)])}
    specs: list[OutputSpec] = []
    results: list[Any] = []
    bases: dict[int, int] = {}
    """Storage -> the number of the result that its views are made of."""
    for position, value in enumerate(outputs):
        if isinstance(value, torch.SymInt | torch.SymFloat):
            specs.append(OutputSpec("result", len(results)))
            results.append(value)
            continue
        if not isinstance(value, torch.Tensor):
            specs.append(OutputSpec("constant", value=value))
            continue
        storage, node = compat.storage_id(value), tracer.argument(value)
        with refusing("an output", user_line(node)):
            if id(value) in input_itself:
                spec = OutputSpec("input", input_itself[id(value)])
            elif first_place[id(value)] != position:
                spec = OutputSpec("output", first_place[id(value)])
            else:
                admit_output(value, storage in input_memory)
                linked = links[id(compat.autograd_base(value))] > 1
                if storage in input_memory:
                    number = viewed_input(node, of_input)
                    spec = view_of(OutputSpec("input", number), value, inputs[number], linked)
                elif len(in_storage[storage]) == 1 and is_dense(value):
                    spec = OutputSpec("result", len(results))
                    results.append(value)
                else:
                    if storage not in bases:
                        base = base_of(in_storage[storage], tracer)
                        admit_base(base)
                        bases[storage] = len(results)
                        results.append(base)
                    spec = OutputSpec("result", bases[storage])
                    if value is not results[spec.base]:
                        spec = view_of(spec, value, results[spec.base], linked)
        specs.append(replace(spec, requires_grad=history(value) is not None))
    return specs, results


def base_of(views: list[torch.Tensor], tracer: Tracer) -> torch.Tensor:
    """Return the tensor of which all outputs in one storage are made as views: their common base, or the
    storage's first tensor."""
    base = compat.autograd_base(views[0])
    common = all(compat.autograd_base(view) is base for view in views) and tracer.knows(base)
    return base if common else tracer.first_in_storage(compat.storage_id(base))


def viewed_input(node: fx.Node, of_input: Mapping[fx.Node, int]) -> int:
    """The input that a view was made of: others may share its memory, but gradients go to this one."""
    while node not in of_input:
        if not node.args or not isinstance(node.args[0], fx.Node):
            raise Unsupported("an output shares memory with an input that it was not made of")
        node = node.args[0]
    return of_input[node]


def view_of(spec: OutputSpec, view: torch.Tensor, base: torch.Tensor, linked: bool) -> OutputSpec:
    """The spec of a view, with its place in its base's memory, in elements."""
    admit_view(view, base, linked)
    known = view._base is not None and compat.autograd_base(view) is compat.autograd_base(base)
    size, stride, _ = geometry(view)
    return replace(
        spec,
        size=size,
        stride=stride,
        offset=size_expr(view.storage_offset() - base.storage_offset()),
        detached=not known and not view.requires_grad,
    )


def history(value: Any) -> Any:
    """The autograd node that made a value; None if there is none, or for a view that autograd refuses to use
    since its base was changed."""
    with contextlib.suppress(RuntimeError):
        return getattr(value, "grad_fn", None)
