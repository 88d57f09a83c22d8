"""FX graphs and nested containers: modules that print their code late, boxed calls, pytrees."""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate  # noqa: F401  (used under this name elsewhere)

from minicompile.compat.private import take

tree_flatten = take("torch.utils._pytree.tree_flatten", "capture")
tree_leaves = take("torch.utils._pytree.tree_leaves", "capture")
tree_map = take("torch.utils._pytree.tree_map", "capture")
tree_unflatten = take("torch.utils._pytree.tree_unflatten", "capture")
tree_spread = take("torch.utils._pytree._broadcast_to_and_flatten", "capture")
"""Spread a prefix of a container over its leaves: what `torch.vmap` does with `in_dims`."""

LazyGraphModule = take(
    "torch.fx._lazy_graph_module._LazyGraphModule", "speed", otherwise=fx.GraphModule
)
BoxedCodeGen = take("torch.fx.graph._BoxedCodeGen", "differentiation")


source_loader = take("torch.fx.graph_module._loader", "speed", otherwise=None)
"""Keeps the text of every GraphModule's code, and so would never let it go."""


def releasing_text(module: fx.GraphModule) -> fx.GraphModule:
    """Return a GraphModule, after seeing to it that the text of its code goes when the module does."""
    weakref.finalize(module, forget_text, type(module)).atexit = False
    return module


def forget_text(graph_class: type[fx.GraphModule]) -> None:
    """Drop the text of a GraphModule's code."""
    file = graph_class.forward.__code__.co_filename
    linecache.cache.pop(file, None)
    getattr(source_loader, "eval_cache", {}).pop(file, None)


def graph_module(root: torch.nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    """Return a GraphModule that generates its Python code when first called: most of ours never are."""
    return releasing_text(LazyGraphModule(root, graph, class_name=name))


def graph_function(gm: fx.GraphModule) -> Callable[..., Any]:
    """Return a graph as a function. Calling its module would run the user's hooks on all modules.

    Reading `code` generates it: until then, `forward` of a lazy module is a call of the module.
    """
    assert gm.code
    forward: Callable[..., Any] = gm.forward
    return forward


def boxed_function(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return a graph as a function of one list, which it empties, so that values die after their last use."""
    gm.graph.set_codegen(BoxedCodeGen())
    run: Callable[[list[Any]], Any] = releasing_text(fx.GraphModule(gm, gm.graph)).forward
    return run
