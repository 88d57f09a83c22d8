"""Each graph pass: where it fires, where it must not, and its numbers against eager's."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import minicompile as mc
from minicompile import compat
from minicompile.aot.passes.cleanup import fold_constants
from minicompile.errors import OptionError
from minicompile.passes.manager import graph_pass
from tests.aot.fired_passes import FIRST, checked, fired, leaf, rand, run

aten = torch.ops.aten


def targets(graph):
    return [n.target for n in graph.nodes if n.op == "call_function"]


# Cleaning


def test_no_ops():
    checked(
        "remove_no_ops",
        (lambda x: ((x * 1).exp() / 1 - 0).sin(), [leaf(3, 4)]),
        (lambda x: (x + 0, x * 2, x.clone()), [leaf(3, 4)]),
        FIRST,
    )


@pytest.mark.parametrize(
    "fn, x",
    [
        (lambda x: torch.signbit(x - -0.0), torch.tensor([-0.0, 0.0])),
        (lambda x: torch.signbit(x + 0.0), torch.tensor([-0.0, 0.0])),
        (lambda x: (x * 1).abs(), torch.tensor([complex(float("inf"), 0.0)])),
        (lambda x: torch.view_as_real(x / 1).sum(), torch.tensor([complex(float("inf"), 1.0)])),
        (lambda x: (x * 0.0).signbit() | (x * -0.0).signbit(), torch.tensor([1.0])),
        (lambda x: (x * 1).neg(), torch.tensor([float("nan"), -0.0])),
        (lambda x: (x / 1) * 2, torch.arange(3)),
        (lambda x: (x * True) * 2, torch.tensor([True, False])),
        (lambda x: torch._neg_view(torch.ones(2)) * x, torch.tensor([1.0, 2.0])),
    ],
)
def test_special_values_survive_the_cleaning(fn, x):
    run(fn, [x])


def test_folded_constants():
    checked(
        "fold_constants",
        (lambda x: x * (torch.full((3, 1), 2.0) * 3).exp() + torch.ones(3, 4), [leaf(3, 4)]),
        (lambda x: x * torch.arange(4.0), [leaf(3, 4)]),
    )
    run(lambda x: x * torch.full((x.shape[0], 1), 2.0), [leaf(3, 4)], FIRST)


def test_a_constant_is_made_on_the_device_that_it_goes_to():
    """As `x[:, :3] = -5.0` makes one: else each call would wait for a copy."""
    with compat.fake_mode() as mode:
        x = torch.empty(4, 3, device="cuda")
        graph = make_fx(lambda x: x + torch.full((), -5.0).to(x.device).expand(4, 3).clone())(x)
        for node in graph.graph.nodes:
            node.meta.setdefault("origins", frozenset())
    assert "_to_copy" in graph.code
    assert fold_constants(graph, mode)
    graph.recompile()
    assert "_to_copy" not in graph.code and "-5.0" in graph.code
    assert "device(type='cpu')" not in graph.code


def test_common_subexpressions():
    checked(
        "cse",
        (lambda x: x.sin() * 2 + x.sin() * 3, [leaf(3, 4)]),
        (lambda x: (x.sin(), x.cos()), [rand(3, 4)]),
        FIRST,
    )


@pytest.mark.parametrize(
    "fn",
    [
        torch.sin,
        lambda x: x.sort(0).values,
        lambda x: x.topk(2).indices,
        lambda x: torch.nn.functional.max_pool1d(x[None], 2),
        lambda x: torch.nn.functional.embedding_bag(torch.tensor([[0, 1]]), x),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_equal_results_have_memory_of_their_own(fn, grad):
    first, second = mc.compile(lambda x: (fn(x), fn(x)))(leaf(3, 4).requires_grad_(grad))
    before = second.clone()
    with torch.no_grad():
        first.add_(1)
    assert torch.equal(second, before)


def test_dead_code():
    with mc.scoped():

        @graph_pass("leave_a_node", stage="prims", order=80)
        def leave(gm, mode):
            (sin,) = [n for n in gm.graph.nodes if n.target is aten.sin.default]
            with gm.graph.inserting_after(sin):
                dead = gm.graph.call_function(aten.cos.default, (sin,))
            dead.meta.update(sin.meta)
            return 1

        result = run(lambda x: x.sin() * 2, [leaf(3, 4)], FIRST)
        assert "dead_code" in fired(result) and aten.cos.default not in targets(result.forward)
    assert "dead_code" not in fired(run(lambda x: x.sin() * 2, [leaf(3, 4)]))


def test_passes_go_by_name():
    program = (lambda x: x.relu().sin() + x.relu().sin(), [rand(3)])
    assert fired(run(*program)) == {"cse"}
    for name in ("cse", "prims.cse"):
        assert not fired(run(*program, disable_passes=(name,)))
    with mc.without("pass:prims.cse"):
        assert not fired(run(*program))
    compiled = mc.compile(program[0], options={"disable_passes": ("csee",)})
    with pytest.raises(OptionError, match=r"no pass 'csee'; known: .*cse"):
        compiled(rand(3))
    with pytest.raises(OptionError, match="no stage 'late'; known: pre_grad"):
        graph_pass("mine", stage="late")
