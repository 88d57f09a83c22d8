"""Faults of capture, graph passes, decompositions, gradients and the partitioner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

import minicompile as mc
from minicompile.aot import functionalize, partition
from minicompile.extension import call_rules, decompose, graph_pass, guard_rules, register_vjp
from minicompile.lessons.bugs import bugs
from tests.faults.table import NUMBERS, SQUARE, X, fault, leaf

aten = torch.ops.aten
prims = torch.ops.prims


def calls(gm: fx.GraphModule, *targets: Any) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target in targets]


def bypass(node: fx.Node, by: Any) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def wrong_pass(
    name: str, stage: str, targets: Sequence[Any], change: Callable[[fx.Node], Any], order: int = 50
) -> None:
    """A pass that changes the calls of some functions. `change` gives False where it changes nothing."""

    @graph_pass(name, stage=stage, order=order)
    def run(gm: fx.GraphModule, mode: Any) -> int:
        return sum(change(node) is not False for node in calls(gm, *targets))


def inserted(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call before a node, which is recorded as the node is."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    return new


# -- capture


@fault(
    *("capture", "<lambda>", lambda x, limit: torch.clamp(x.exp(), max=limit) + 1, [X, 0.5]),
    more=[[X, 1.5]],
)
def float_argument_is_not_guarded(patch):
    """A stale Python number (#194976)."""
    for kind in ("equals", "number"):
        guard_rules.records.pop(kind, None)


@fault("", "", lambda x: torch.sin(x * 2) + x, [X], more=[[leaf()]])
def tensors_are_not_guarded(patch):
    """A missing guard: the second call needs gradients, and only AOT autograd relies on it."""
    guard_rules.records.pop("tensor")


@fault("capture", "<lambda>", lambda x: torch.erf(x.cos()) * x - 1, [X])
def a_call_is_captured_wrong(patch):
    """erf is taken for the identity."""
    call_rules(torch.erf)(lambda tracer, args, kwargs: args[0])


@fault("capture", "<lambda>", lambda x: (x.sin().add_(1) * x).cos(), [X])
def a_mutation_is_not_captured(patch):
    """A lost mutation: in-place methods of temporaries are taken for views."""
    call_rules(Tensor.add_)(lambda tracer, args, kwargs: args[0])


# -- functionalization: no gate, so the bisector comes as far as the backend


def written(x: Tensor) -> Tensor:
    row = x.sin()
    head, tail = row[0], row[1:]
    head.mul_(2)
    return row.cos() + tail.sum()


@fault("", "", written, [X])
def a_write_through_a_view_is_lost(patch):
    """A view of the same memory keeps its old contents (#93824)."""
    whole = functionalize.Functionalizer.write

    def write(self: Any, node: fx.Node, new: Tensor) -> None:
        if self.storage(node) is not None and node.target is aten.select.int:
            return
        whole(self, node, new)

    patch.setattr(functionalize.Functionalizer, "write", write)


# -- passes over captured graphs


@fault(
    "pre_grad pass", "draw_once", lambda x: torch.rand_like(x) + x.cos() - torch.rand_like(x), [X]
)
def random_numbers_are_drawn_once(patch):
    """Equal calls are merged, random ones too."""

    @graph_pass("draw_once", stage="pre_grad")
    def draw_once(gm: fx.GraphModule, mode: Any) -> int:
        first, *rest = calls(gm, torch.rand_like) or [None]
        for node in rest:
            bypass(node, first)
        return len(rest)


# -- the joint graph


@fault("joint pass", "pattern:keep", lambda x: torch.tanh(x.exp()) + x, [X])
def a_pattern_is_another_function(patch):
    """tanh becomes sin."""
    mc.register_pattern("keep", search=lambda x: torch.tanh(x), examples=[torch.empty(2)])(
        torch.sin
    )


@fault("joint pass", "one_gradient", lambda x: (x.sin() * x.cos()).exp(), [leaf()])
def a_partial_gradient_is_lost(patch):
    """Of two gradients of one value the second is not added (#193061)."""

    def first(node: fx.Node) -> Any:
        return node.meta.get("phase") == "backward" and bypass(node, node.args[0])

    wrong_pass("one_gradient", "joint", [aten.add.Tensor], first)


@fault(
    *("joint pass", "late_cast"),
    lambda x: torch.cumsum(x.sin() * 3, 1, dtype=torch.int64) * 2,
    [X],
)
def a_scan_ignores_its_dtype(patch):
    """cumsum with a dtype is summed in the argument's own (#189518)."""

    def late(node: fx.Node) -> Any:
        if "dtype" not in node.kwargs:
            return False
        narrow = inserted(node, node.target, *node.args)
        narrow.meta["val"] = node.args[0].meta["val"].clone()
        return bypass(node, inserted(node, aten._to_copy.default, narrow, **node.kwargs))

    wrong_pass("late_cast", "joint", [aten.cumsum.default], late)


# -- passes over ATen graphs


@fault("prims pass", "tidy_products", lambda x: torch.tanh(x.cos() * -1) + 1, [X])
def the_sign_is_lost(patch):
    """Products with -1 go with those with 1."""
    bugs["same sign"]()


@fault("prims pass", "one_rounding", lambda x: x.exp().bfloat16().float() * 3 + x, [X])
def a_rounding_is_removed(patch):
    """There and back through bfloat16 is taken for nothing (#159239)."""

    def shortened(node: fx.Node) -> Any:
        inner = node.args[0]
        if inner.target is not node.target:
            return False
        source = inner.args[0]
        same = source.meta["val"].dtype is node.meta["val"].dtype
        return same and bypass(node, source)

    wrong_pass("one_rounding", "prims", [prims.convert_element_type.default], shortened, 35)


def cast_early(op: Any) -> None:
    """A pass that converts the operands rather than the result."""

    def early(node: fx.Node) -> Any:
        inner, dtype = node.args
        if inner.target is not op:
            return False
        wide = [inserted(node, node.target, x, dtype) for x in inner.args]
        return bypass(node, inserted(node, op, *wide))

    wrong_pass("early_cast", "prims", [prims.convert_element_type.default], early, 35)


BYTES = torch.tensor([7, 200, 0, 9], dtype=torch.uint8)


@fault("prims pass", "early_cast", lambda x: torch.neg(x) + torch.ones(4).sin() + 1, [BYTES])
def a_conversion_moves_over_neg(patch):
    """Bytes wrap around before they become floats (#161763)."""
    cast_early(aten.neg.default)


@fault("prims pass", "early_cast", lambda x: (x + x).to(torch.int16) * 2, [BYTES])
def a_conversion_moves_over_a_sum(patch):
    """The sum of two bytes is one (#105264)."""
    cast_early(aten.add.Tensor)


@fault("post_grad pass", "explode", lambda x: torch.erf(x.sin()) * 2, [X])
def a_pass_crashes(patch):
    """An exception inside."""

    def crash(node: fx.Node) -> None:
        raise IndexError("out of nodes")

    wrong_pass("explode", "post_grad", [aten.erf.default], crash)


@fault(
    *("post_grad pass", "only_product"),
    lambda x, w, b: torch.addmm(b, x.sin(), w).cos() + 1,
    [SQUARE, SQUARE.t().contiguous(), SQUARE + 1],
)
def a_product_loses_its_sum(patch):
    """addmm becomes mm."""

    def product(node: fx.Node) -> None:
        node.target, node.args, node.kwargs = aten.mm.default, node.args[1:], {}

    wrong_pass("only_product", "post_grad", [aten.addmm.default], product, 95)


def moved(x: Tensor) -> Tensor:
    old = x.clone()
    x.add_(1)
    return old


@fault("post_grad pass", "no_copies", moved, [X])
def a_copy_of_a_written_input_is_dropped(patch):
    """The result is the input, which is written to at the end (#94693)."""

    copies = [aten.clone.default]
    wrong_pass("no_copies", "post_grad", copies, lambda n: bypass(n, n.args[0]), 95)


# -- decompositions


@fault("decomposition", "aten.silu.default", lambda x: F.silu(x.cos()) * 2 + x, [X])
def half_a_rotation(patch):
    """Another constant."""
    bugs["half rotation"]()


@fault("decomposition", "aten._softmax.default", lambda x: torch.softmax(x.exp() * 20, -1), [X])
def softmax_overflows(patch):
    """The largest value is not subtracted."""
    bugs["hot softmax"]()


@fault("decomposition", "aten.leaky_relu.default", lambda x: F.leaky_relu(x.sin(), 0.2) + 1, [X])
def the_slope_is_forgotten(patch):
    """An activation with a slope becomes relu (#181692)."""

    decompose(aten.leaky_relu.default, to="core")(lambda x, slope=0.01: torch.relu(x))


@fault(
    *("decomposition", "aten.floor_divide", lambda x, y: (x + 1) // y + 2),
    [NUMBERS + 2**40 + 1, torch.tensor(3)],
)
def integers_are_divided_as_floats(patch):
    """floor_divide of int64 by a tensor (#186164)."""

    @decompose(aten.floor_divide.default, to="core")
    def floor_divide(x: Tensor, y: Tensor) -> Tensor:
        return torch.floor(x.float() / y).to(torch.int64)


@fault(
    *("decomposition", "aten.div.Tensor_mode"),
    lambda x, y: torch.div(x * 2, y, rounding_mode="floor") + 1,
    [torch.tensor([1.0, torch.inf, 6.0, -torch.inf]), torch.tensor([3.0, 1.0, 2.0, 2.0])],
)
def floor_of_infinity(patch):
    """Infinities divided down stay infinite, eager gives NaN (#188048)."""

    div = aten.div.Tensor_mode
    decompose(div, to="core")(lambda x, y, rounding_mode=None: torch.floor(x / y))


@fault(
    *("decomposition", "aten.addcmul.default"),
    lambda x, y: torch.addcmul(x.sin(), x, y, value=0.5) + 1,
    [X, X + 1],
)
def a_factor_is_ignored(patch):
    """The scalar of addcmul is that of an earlier call, 1 (#185382)."""

    decompose(aten.addcmul.default, to="core")(lambda x, a, b, value=1: x + a * b)


@fault(
    *("decomposition", "aten.index_add.default"),
    lambda x, i, y: torch.index_add(x.sin(), 0, i, y, alpha=2) / 2,
    [X, torch.tensor([0, 2]), X[:2] + 4],
)
def index_add_ignores_alpha(patch):
    """The terms are not scaled (#108963)."""

    @decompose(aten.index_add.default, to="core")
    def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Any = 1) -> Tensor:
        return torch.index_put(x, [index], source, accumulate=True)


@fault("decomposition", "aten.sinh.default", lambda x: torch.sinh(x * 89) * 0.5, [X[0] / 3])
def sinh_overflows(patch):
    """The difference of two powers is halved too late (#183763)."""

    decompose(aten.sinh.default, to="core")(lambda x: (torch.exp(x) - torch.exp(-x)) / 2)


@fault("decomposition", "aten.asinh.default", lambda x: torch.asinh(x * 1e22) + 1, [X])
def asinh_overflows(patch):
    """The argument is squared (#183767)."""

    @decompose(aten.asinh.default, to="core")
    def asinh(x: Tensor) -> Tensor:
        return torch.log(x.abs() + torch.sqrt(x * x + 1)) * torch.sign(x)


# -- gradients


@fault("vjp", "aten.tanh.default", lambda x: torch.tanh(x.sin()) * 2, [leaf()])
def a_wrong_slope(patch):
    """A missing square."""
    bugs["wrong slope"]()


@fault("vjp", "aten.exp.default", lambda x: torch.exp(x.sin()) * 2, [leaf()])
def the_argument_is_saved_for_the_result(patch):
    """A stale saved tensor."""

    register_vjp(aten.exp.default)(lambda grad, result, x: grad * x)


# -- the partitioner


@fault("partitioner", "joint", lambda x: (x * torch.rand_like(x)).sin() + 1, [leaf()])
def random_numbers_are_drawn_again(patch):
    """The backward recomputes them."""
    whole = partition.why_not_recomputed

    def why(node: fx.Node, *more: Any) -> str:
        found = whole(node, *more)
        return "" if found.startswith("random") else found

    patch.setattr(partition, "why_not_recomputed", why)


@fault("partitioner", "joint", lambda x, y: (x.sin() * y.cos()).exp(), [leaf(), leaf(X + 1)])
def saved_values_are_swapped(patch):
    """The backward gets one for another."""
    whole = partition.min_cut

    def swapped(parts: Any) -> Any:
        saved = whole(parts)
        one, *others = saved
        like = [n for n in others if n.meta["val"].shape == one.meta["val"].shape]
        for other in like[:1]:
            for user in list(one.users):
                if parts.is_backward(user):
                    user.replace_input_with(one, other)
        return saved

    patch.setattr(partition, "min_cut", swapped)


def weighted(x: Tensor, w: Tensor) -> Tensor:
    found = x.sin() * w
    x.add_(1)
    return found


@fault("partitioner", "joint", weighted, [X, leaf(X + 1)])
def old_contents_are_read_anew(patch):
    """The gradient is that of an input after it was written to."""
    whole = partition.why_never_recomputed

    def why(node: fx.Node, parts: partition.JointParts) -> str:
        found = whole(node, parts)
        return "" if found.startswith("the old contents") else found

    patch.setattr(partition, "why_never_recomputed", why)
    patch.setattr(partition, "is_kept_copy", lambda node, results: False)
