"""Operator levels: what each may hold, who says so, and what a reader sees of the way between them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import minicompile as mc
from minicompile.aot.levels import LevelGraph, verify
from minicompile.errors import VerifyError
from minicompile.lessons.levels import families, family
from minicompile.options import Options
from minicompile.passes.manager import graph_pass
from tests.aot.helpers import compile_aot
from tests.aot.level_models import MODELS, check

aten = torch.ops.aten


def block(x):
    return F.layer_norm(F.silu(x) + F.silu(x * 2), (4,)).softmax(-1)


@pytest.fixture(scope="module")
def levels():
    return compile_aot(block, [torch.randn(3, 4, requires_grad=True)])[1]


def calls(graph):
    return [op for _, op in graph.calls]


def test_every_operator_has_its_place(levels):
    for graph in levels.levels.values():
        verify(graph)
        assert "extern" not in [family(graph, op) for op in calls(graph)]
    for op in calls(levels.level("core")):
        assert torch.Tag.core in op.tags or family(levels.level("core"), op) != "extern"
    assert aten._softmax.default in calls(levels.level("core"))
    allowed = {"pointwise", "reduction", "view", "creation"}
    assert {family(levels.level("prims"), op) for op in calls(levels.level("prims"))} <= allowed


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "vit", "Mamba", "ConvNext", "T5"])
def test_models_have_no_operator_without_a_family(name):
    pytest.importorskip("transformers")
    externs, wrong = check(MODELS[name])
    assert wrong == [] and externs["aten.mm.default"] > 0


def with_call(op, args_of, level, val=None):
    """A graph at a level that holds one call."""
    graph = fx.Graph()
    x, row = graph.placeholder("x"), graph.placeholder("row")
    x.meta["val"], row.meta["val"] = torch.empty(3, 4), torch.empty(4)
    node = graph.call_function(op, args_of(x, row))
    node.meta["val"] = torch.empty(3, 4) if val is None else val
    graph.output((node,))
    return LevelGraph(fx.GraphModule(torch.nn.Module(), graph), "graph", "hand", level)


REFUSED = {
    "rule": (aten.silu.default, lambda x, row: (x,), "core", "has a rule"),
    "rule_to_prims": (aten._softmax.default, lambda x, row: (x, 1, False), "prims", "has a rule"),
    "mutates": (aten.add_.Tensor, lambda x, row: (x, x), "full", "writes"),
    "composite": (aten.linear.default, lambda x, row: (x, row), "full", "only calls"),
    "shapes": (aten.add.Tensor, lambda x, row: (x, row), "prims", "several shapes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_verifier_names_what_a_level_cannot_hold(name):
    op, args_of, level, reason = REFUSED[name]
    with pytest.raises(VerifyError, match=rf"level {level}: {op} .*{reason}"):
        verify(with_call(op, args_of, level))
    for lower in {"core": ["full"], "prims": ["full", "core"], "full": []}[level]:
        verify(with_call(op, args_of, lower))


def test_a_custom_operator_is_an_extern_and_counted():
    with torch.library._scoped_library("mini_levels", "FRAGMENT"):

        @torch.library.custom_op("mini_levels::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        twice.register_fake(torch.empty_like)
        op = torch.ops.mini_levels.twice.default
        _, result = compile_aot(lambda x: op(op(x) @ x), [torch.randn(3, 3)])
        for graph in result.levels.values():
            kinds = Counter(family(graph, op) for op in calls(graph))
            assert kinds == {"custom": 2, "library": 1} and "2 custom" in families(graph)
            verify(graph)


def test_the_option_verifies_what_passes_leave():
    def spoil(gm, mode):
        node = next(n for n in gm.graph.nodes if n.op == "call_function")
        with gm.graph.inserting_after(node):
            odd = gm.graph.call_function(aten.silu.default, (node,))
            odd.meta.update(node.meta)
        node.replace_all_uses_with(odd, lambda user: user is not odd)
        return 1

    with mc.scoped():
        graph_pass("spoil", stage="prims", order=99)(spoil)
        compile_aot(torch.sin, [torch.randn(3)])
        with pytest.raises(VerifyError, match=r"level prims: aten\.silu\.default .*has a rule"):
            compile_aot(torch.sin, [torch.randn(3)], options=Options(verify=True))
