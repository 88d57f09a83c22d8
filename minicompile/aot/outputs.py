"""What the outputs of a captured graph are of its inputs and of each other: an input itself, a view of it, of
memory that the graph makes, of another output. Found where memory is still shared as in eager.

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
from torch.autograd.function import BackwardCFunction

from minicompile import compat
from minicompile.aot.layout import geometry, is_dense, overlaps
from minicompile.aot.result import Kind, OutputSpec
from minicompile.aot.tracer import Tracer
from minicompile.errors import Unsupported
from minicompile.shapes.symnode import hint, size_expr


def classify(
    outputs: tuple[Any, ...],
    inputs: list[Any],
    of_input: Mapping[fx.Node, int],
    tracer: Tracer,
) -> tuple[list[OutputSpec], list[Any], list[torch.Tensor]]:
    """Each output's `OutputSpec`, then those of other tensors that they are views of; and what the graph
    itself must return: fresh results and bases. `of_input`: the nodes of the inputs."""
    tensors = [(i, value) for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    input_itself = {id(value): i for i, value in tensors}
    input_memory = {compat.storage_id(value) for _, value in tensors}
    distinct = {id(value): value for value in outputs if isinstance(value, torch.Tensor)}
    sharers = Counter(map(compat.storage_id, distinct.values()))
    bases: dict[int, list[torch.Tensor]] = {}
    for value in distinct.values():
        bases.setdefault(compat.storage_id(value), []).append(compat.autograd_base(value))
    specs: list[OutputSpec] = []
    results: list[Any] = []
    memories: dict[int, torch.Tensor] = {}
    values = list(outputs)
    places = {id(value): i for i, value in reversed([*enumerate(values)])}
    for position, value in enumerate(values):  # which grow by what others are views of
        if not isinstance(value, torch.Tensor):
            symbolic = isinstance(value, torch.SymInt | torch.SymFloat)
            results.extend([value] if symbolic else [])
            specs.append(OutputSpec("fresh") if symbolic else OutputSpec("constant", value=value))
            continue
        storage, base = compat.storage_id(value), compat.autograd_base(value)
        differentiable = value.requires_grad or torch.is_grad_enabled()
        creation = compat.creation_meta(value) if differentiable and compat.is_view(value) else None
        as_usual = creation in (None, compat.VIEW_AS_USUAL)
        usual = as_usual and (value.grad_fn or not value.requires_grad)
        lazy = value.is_conj() or value.is_neg()
        alone = sharers[storage] == 1 and is_dense(value) and not lazy
        if id(value) in input_itself:
            spec = OutputSpec("input", input_itself[id(value)])
        elif places[id(value)] != position:
            spec = OutputSpec("output", places[id(value)])
        elif is_own_leaf(value) or (storage not in input_memory and is_own_leaf(base)):
            raise Unsupported("an output is a leaf that the graph makes: it would get a gradient")
        elif storage not in input_memory and alone and usual:
            results.append(value)
            spec = OutputSpec("fresh")
        else:
            if given := storage in input_memory:
                number = viewed_input(tracer.argument(value), of_input)
                memory = inputs[number]
            else:
                # what a custom Function gives is its own base: its gradient is not a view's
                own = alone and creation == compat.VIEW_OF_FUNCTION
                memory = value if own else memory_behind(bases[storage], tracer)
                number, memory = 0, memories.get(storage, memory)
            if base is not value and base is not compat.autograd_base(memory):
                if id(base) not in places:
                    places[id(base)] = len(values)
                    values.append(base)
                spec = view_of("output_view", places[id(base)], value, base)
            elif given:
                spec = view_of("input_view", number, value, memory)
            else:
                memories[storage] = memory
                number = list(memories).index(storage)
                if not is_dense(memory) or memory.storage_offset() != 0:
                    raise Unsupported("outputs are views of a tensor whose memory has gaps")
                spec = view_of("view", number, value, memory)
                if value is memory and creation is None:
                    spec = OutputSpec("base", number)
        specs.append(replace(spec, requires_grad=history(value) is not None))
    return specs, results, list(memories.values())


def memory_behind(bases: list[torch.Tensor], tracer: Tracer) -> torch.Tensor:
    """What the graph returns for all outputs in a piece of memory: the base that they have in common, if it
    is the whole of it; otherwise its first tensor."""
    base, first = bases[0], tracer.first_in_storage(compat.storage_id(bases[0]))
    whole = (
        hint(base.numel()) == hint(first.numel()) and base.dtype is first.dtype and is_dense(base)
    )
    lazy = base.is_conj() or base.is_neg()
    common = all(other is base for other in bases) and tracer.knows(base)
    return base if whole and common and not lazy else first


def is_own_leaf(value: torch.Tensor) -> bool:
    """Does it require grad, though nothing that it was made of does?"""
    base = value._base
    return value.requires_grad and value.is_leaf and (base is None or not base.requires_grad)


def viewed_input(node: fx.Node, of_input: Mapping[fx.Node, int]) -> int:
    """The input that a view was made of: others may share its memory, but gradients go to this one."""
    while node not in of_input:
        if not node.args or not isinstance(node.args[0], fx.Node):
            raise Unsupported("an output shares memory with an input that it was not made of")
        node = node.args[0]
    return of_input[node]


def refuse_other_history(view: torch.Tensor, base: torch.Tensor) -> None:
    """Raise Unsupported unless a view's gradient goes to its base, as that of the rebuilt view does."""
    bases = (base, compat.autograd_base(base))

    def there(step: Any) -> bool:
        return any(step is x.grad_fn or getattr(step, "variable", None) is x for x in bases)

    step = view.grad_fn
    while step is None or not there(step):
        if step is None:
            raise Unsupported("an output is a view of a view that was made without grad mode")
        if isinstance(step, BackwardCFunction):
            raise Unsupported("an output is a view that a custom autograd.Function gives")
        strided, step = step.name().startswith("AsStrided"), next(iter(step.next_functions))[0]
        if strided and not there(step):
            raise Unsupported("an output is as_strided of a view")


def view_of(kind: Kind, index: int, view: torch.Tensor, base: torch.Tensor) -> OutputSpec:
    """Views are rebuilt from sizes and strides, in elements of their type."""
    ours, theirs = base.element_size(), view.element_size()
    start = base.storage_offset() * ours
    paired = (ours == 2 * theirs and base.is_complex()) or (
        2 * ours == theirs and view.is_complex()
    )
    if (ours != theirs and not paired) or start % theirs != 0:
        raise Unsupported(f"an output views {base.dtype} memory as {view.dtype}")
    known = view._base is not None and compat.autograd_base(view) is compat.autograd_base(base)
    if view.requires_grad and not known and view.grad_fn is not base.grad_fn:
        raise Unsupported("an output shares memory, but not its gradient history, with its base")
    if view.grad_fn is not None:
        refuse_other_history(view, base)
    if view.requires_grad and overlaps(base):  # whose gradients `as_strided` would take the mean of
        raise Unsupported("an output is a view of a tensor whose elements share memory")
    size, stride, _ = geometry(view)
    return OutputSpec(
        kind,
        index,
        size=size,
        stride=stride,
        offset=size_expr(view.storage_offset() - start // theirs),
        detached=not known and not view.requires_grad,
        creation=compat.creation_meta(view) if known else None,
        dtype=None if view.dtype is base.dtype else view.dtype,
        lazy=(view.is_conj() != base.is_conj(), view.is_neg() != base.is_neg()),
    )


def history(value: Any) -> Any:
    """The autograd node that made a value; None if there is none, or for a view that autograd refuses to use
    since its base was changed."""
    with contextlib.suppress(RuntimeError):
        return getattr(value, "grad_fn", None)
