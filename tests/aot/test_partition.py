"""What is kept for the backward and what is computed again: bytes, reasons, budgets, checkpoint regions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import minicompile as mc
from minicompile.ops.display import to_html
from minicompile.ops.nodes import is_random
from minicompile.options import Options
from tests.aot.helpers import compile_aot
from tests.aot.level_models import MODELS as WHOLE
from tests.aot.partition_models import REGIONS, Blocks, capture_of, ours, region, result_of, theirs
from tests.aot.peak_memory import resnet
from tests.comparing import assert_as_eager

aten = torch.ops.aten


def leaf(*size):
    return torch.randn(*size, requires_grad=True)


# The report


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(200))

    def forward(self, x):
        return (self.scale[:100].sigmoid() * x[:100].exp()).sum()


def test_keeping_a_parameter_costs_nothing():
    result = result_of(capture_of(Scaled(), leaf(200)))
    assert [value.name for value in result.partition.saved] == ["self_scale", "exp"]
    fn = lambda scale, x: (scale[:100].sigmoid() * x[:100].exp()).sum()  # noqa: E731
    result = result_of(capture_of(fn, leaf(200), leaf(200)))
    assert [value.name for value in result.partition.saved] == ["sigmoid", "exp"]


def test_of_two_values_about_as_large_the_one_in_memory_is_kept():
    """Normalised rows would be written for the backward alone; the rows are there, means are small."""
    layer_norm = lambda x, scale: nn.functional.layer_norm(x, (512,), scale)  # noqa: E731
    saved = result_of(capture_of(layer_norm, leaf(32, 512), leaf(512))).partition.saved
    assert [value.bytes for value in saved] == [32 * 512 * 4, 512 * 4, 32 * 4, 32 * 4]
    assert [value.name for value in saved][:2] == ["x", "scale"]
    small = lambda x: (x[:8].exp() * 2).sin()  # noqa: E731
    result = result_of(capture_of(small, leaf(32, 64)))
    assert [value.name for value in result.partition.saved] == ["exp"]  # much smaller than x


def test_a_residual_stream_is_kept_where_it_passes_a_product():
    """It is in memory as much as what is added to it: else all of it would be made again at once."""

    def fn(x, a, b, c):
        for w in (a, b, c):
            x = x + nn.functional.layer_norm(x, (64,)) @ w
        return x.sin()

    def block(x, a, b, c):
        for w in (a, b, c):
            x = x + (x.view(-1, 2, 32).cos().view(-1, 64) @ w)
        return x.sin()

    given = [leaf(100, 64), *(leaf(64, 64) for _ in range(3))]
    for stream in (fn, block):
        _, result = compile_aot(stream, given)
        saved = {value.name for value in result.partition.saved}
        again = {value.name for value in result.partition.recomputed}
        added = {node.name for node in result.forward.nodes if node.target is aten.add.Tensor}
        assert len(added) >= 3 and not saved & {"mm", "mm_1"}, saved
        assert len(added & again) <= 1, again  # the last one is read by what follows alone


def test_an_expanded_view_is_no_large_input():
    """A comparison with a broadcast label is recomputed: it reads few elements."""

    def fn(x, label):
        return torch.where(torch.arange(64) == label.unsqueeze(1).expand(8, 64), x, 0.0).sum()

    _, result = compile_aot(fn, [leaf(8, 64), torch.arange(8)])
    assert [value.name for value in result.partition.saved] == ["x1"]


@pytest.mark.parametrize("partitioner", ["default", "min_cut"])
def test_a_size_keeps_no_tensor(partitioner):
    options, dynamic = Options(partitioner=partitioner), {(0, 0): "n"}
    call, result = compile_aot(lambda x: (x * 2).sum(), [leaf(4)], dynamic=dynamic, options=options)
    assert not result.partition.saved
    x = leaf(6)
    (total,) = call([x])
    with torch.no_grad():
        x.zero_()
    total.backward()
    assert x.grad.eq(2).all()


def test_what_is_recomputed_is_made_just_before_it_is_read():
    def fn(x):
        for _ in range(3):
            x = checkpoint(lambda t: t.sin().exp().cos(), x * 2, use_reentrant=False)
        return x

    result = result_of(capture_of(fn, leaf(8)))
    order = [node.name for node in result.backward.nodes]
    by_name = {node.name: node for node in result.backward.nodes}
    for value in result.partition.recomputed:
        first = min(order.index(user.name) for user in by_name[value.name].users)
        between = order[order.index(value.name) + 1 : first]
        gradient = [n for n in between if by_name[n].meta["phase"] == "backward"]
        assert len(gradient) <= 1
    assert order.index("exp") > order.index("exp_2")


# Checkpoint regions


def saved_by_eager(module, x):
    """Bytes that eager's autograd keeps, besides parameters and the input."""
    free = {value.untyped_storage().data_ptr() for value in (x, *module.parameters())}
    found = {}

    def pack(value):
        memory = value.untyped_storage()
        if memory.data_ptr() not in free:
            found[memory.data_ptr()] = memory.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = module(x)
    del loss
    return sum(found.values())


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [Options(), Options(partitioner="default")], ids=["min_cut", "default"]
)
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_a_checkpointed_model_saves_as_little_as_eager(p, options):
    torch.manual_seed(0)
    x, plain, lean = torch.randn(32, 16), Blocks(p, False), Blocks(p, True)
    result = result_of(capture_of(lean, x), options)
    masks = 3 * 32 * 16 if p else 0
    assert ours(result).bytes <= saved_by_eager(lean, x) + masks
    assert saved_by_eager(lean, x) < saved_by_eager(plain, x) / 4
    assert ours(result).bytes < ours(result_of(capture_of(plain, x), options)).bytes / 4
    assert not any(is_random(node) for node in result.backward.nodes)
    assert aten.mm.default in [
        node.target for node in result.backward.nodes if node.meta.get("phase") == "forward"
    ]
    reasons = [value.reason for value in result.partition.recomputed]
    assert all(reason.startswith("checkpoint region") for reason in reasons)
    assert "checkpoint region" in to_html(result.partition)


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_a_checkpointed_model_trains_like_eager(p):
    torch.manual_seed(0)
    module, x = Blocks(p, True), torch.randn(8, 16)
    compiled = mc.compile(module, backend="aot_eager")
    assert_as_eager(compiled, module, x, module=module)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"partitioner": "default"}], ids=str)
@pytest.mark.parametrize("name", REGIONS)
def test_region_has_eagers_gradients(name, options):
    torch.manual_seed(0)
    run = REGIONS[name]
    compiled = mc.compile(run, backend="aot_eager", fullgraph=True, options=options)
    assert_as_eager(compiled, run, leaf(6, 6), leaf(6, 6), rtol=1e-4, atol=1e-4)


def test_equal_work_in_a_region_and_outside_is_not_merged():
    """Else what the region makes would be kept for the rest of the program."""
    for name in ("two equal regions", "the same outside"):
        result = result_of(capture_of(REGIONS[name], leaf(6, 6), leaf(6, 6)))
        again = {v.name for v in result.partition.recomputed if "checkpoint region" in v.reason}
        products = [n for n in result.joint.nodes if n.target is aten.mm.default]
        assert len([n for n in products if n.meta.get("phase") == "forward"]) == 2
        inside = {n.name for n in products if n.meta["region"] is not None}
        assert inside and inside <= again


def test_what_leaves_a_region_is_kept_where_eager_keeps_it():
    def fn(x, w):
        for _ in range(4):
            x = region(lambda t: (t @ w).sin() + t, x)
        return x.sum()

    result = result_of(capture_of(fn, leaf(6, 6), leaf(6, 6)))
    reasons = [value.reason for value in result.partition.saved if not value.is_input]
    assert reasons == ["it leaves a checkpoint region"] * 3


def test_of_dropout_only_the_mask_is_kept():
    """Whatever comes after it is computed again from the same mask."""
    result = result_of(capture_of(REGIONS["several drops"], leaf(6, 6), leaf(6, 6)))
    (first, second, last) = [value for value in result.partition.saved if not value.is_input]
    assert first.bytes == second.bytes == 36
    assert last.name == "exp"


# Against torch.compile


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "bert", "T5", "llama", "vit", "ResNet"])
def test_no_more_bytes_than_torch_compile_on_the_same_graph(name):
    pytest.importorskip("transformers")
    pytest.importorskip("networkx")
    if name == "ResNet":
        model, *given = resnet("cpu", 1)
        capture = capture_of(lambda x, label: F.cross_entropy(model(x), label), *given)
    else:
        model, inputs = WHOLE[name]()
        capture = capture_of(model.train(), **inputs)
    result = result_of(capture)
    mine, other = ours(result), theirs(result.joint, capture.fakes)
    assert mine.bytes <= other.bytes
    assert mine.heavy.total() <= other.heavy.total()
