"""Bytes within a memory budget, and the most work spared for them; gradients are eager's at every budget."""

from __future__ import annotations

import itertools

import pytest
import torch

import minicompile as mc
from minicompile.aot.partition import bytes_of, flops, is_heavy
from minicompile.ops.nodes import is_random
from minicompile.options import Options
from tests.aot.helpers import compile_aot, module_function
from tests.aot.partition_models import REGIONS, Blocks
from tests.comparing import assert_as_eager

aten = torch.ops.aten


def leaf(*size):
    return torch.randn(*size, requires_grad=True)


BUDGETS = (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)


def work_again(result):
    by_name = {node.name: node for node in result.joint.nodes}
    again = [v.name for v in result.partition.recomputed if "a constant" not in v.reason]
    return sum(flops(by_name[name]) for name in again)


@pytest.mark.long
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_bytes_grow_with_the_budget_and_stay_in_it(p):
    """Without a budget only inputs and random numbers are kept."""
    torch.manual_seed(0)
    fn, state = module_function(Blocks(p, False))
    inputs = [*state, torch.randn(6, 16)]
    results = [compile_aot(fn, inputs, options=Options(memory_budget=b))[1] for b in BUDGETS]
    found = [sum(v.bytes for v in each.partition.saved if not v.is_input) for each in results]
    least, most = found[0], found[-1]
    assert found == sorted(found)
    for budget, kept in zip(BUDGETS, found):
        assert kept <= least + budget * (most - least)
    assert work_again(results[0]) > work_again(results[-1]) == 0
    by_name = {node.name: node for node in results[0].joint.nodes}
    for value in results[0].partition.saved:
        assert value.is_input or is_random(by_name[value.name])
    assert not any(is_random(node) for node in results[0].backward.nodes)
    again = results[0].partition.recomputed
    assert any(is_heavy(by_name[value.name]) for value in again)


def test_no_other_choice_in_the_budget_recomputes_less():
    """Values of equal size: every subset that fits is tried."""

    def fn(x, w, v):
        return ((x @ w).sin() + (x @ v).sin() + x.cos().exp() + x.sin().exp()).sum()

    inputs = [leaf(8, 8), leaf(8, 8), leaf(8, 8)]
    everything = compile_aot(fn, inputs, options=Options(memory_budget=1.0))[1]
    nodes = {node.name: node for node in everything.joint.nodes}
    values = [v.name for v in everything.partition.saved if not v.is_input]
    for budget in BUDGETS:
        result = compile_aot(fn, inputs, options=Options(memory_budget=budget))[1]
        kept = [v.name for v in result.partition.saved if not v.is_input]
        size = sum(bytes_of(nodes[name]) for name in values) * budget
        spared = max(
            sum(flops(nodes[name]) for name in subset)
            for count in range(len(values) + 1)
            for subset in itertools.combinations(values, count)
            if sum(bytes_of(nodes[name]) for name in subset) <= size
        )
        assert sum(flops(nodes[name]) for name in kept) == spared


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_a_checkpointed_model_trains_like_eager(p, budget):
    torch.manual_seed(0)
    module, x = Blocks(p, True), torch.randn(8, 16)
    compiled = mc.compile(module, backend="aot_eager", options={"memory_budget": budget})
    assert_as_eager(compiled, module, x, module=module)


@pytest.mark.long
@pytest.mark.parametrize("name", REGIONS)
def test_region_has_eagers_gradients(name):
    torch.manual_seed(0)
    run = REGIONS[name]
    compiled = mc.compile(run, backend="aot_eager", options={"memory_budget": 0.0})
    assert_as_eager(compiled, run, leaf(6, 6), leaf(6, 6), rtol=1e-4, atol=1e-4)
