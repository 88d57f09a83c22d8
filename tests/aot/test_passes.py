"""Each graph pass: where it fires, where it must not, and its numbers against eager's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import minicompile as mc
from minicompile import compat
from minicompile.aot.passes.cleanup import fold_constants
from minicompile.errors import OptionError
from minicompile.ops.display import to_html
from minicompile.options import Options
from minicompile.passes.manager import graph_pass
from tests.aot.helpers import compile_aot, forward_and_gradients

aten = torch.ops.aten
rand = torch.randn


def leaf(*size):
    return rand(*size, requires_grad=True)


def fired(result):
    return {record.name.partition(".")[2] for record in result.passes if record.changed}


def targets(graph):
    return [n.target for n in graph.nodes if n.op == "call_function"]


def run(fn, inputs, dynamic=None, atol=1e-5, **options):
    """The AotResult; values, strides and gradients are eager's, and no result is an input's memory."""
    call, result = compile_aot(fn, inputs, options=Options(**options), dynamic=dynamic)
    eager = forward_and_gradients(fn, inputs)
    compiled = forward_and_gradients(call, inputs)
    for got, want in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, want, atol=atol, rtol=1e-4, equal_nan=True)
    for got, want in zip(compiled[: len(result.metadata.outputs)], eager):
        assert got.stride() == want.stride()
    return result


def checked(name, fires, stays, dynamic=None, **options):
    """The pass fires on one program and not on another; where it is off it does nothing."""
    for given in (dynamic, None) if dynamic else (None,):
        assert name in fired(run(*fires, given, **options)), given
        assert name not in fired(run(*fires, given, **options, disable_passes=(name,)))
    assert name not in fired(run(*stays, **options))
    if options:
        assert name not in fired(run(*fires))


FIRST = {(0, 0): "s0"}


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


def test_random_numbers_are_drawn_apart():
    _, result = compile_aot(lambda x: (torch.rand_like(x), torch.rand_like(x)), [rand(3)])
    assert "cse" not in fired(result)


def test_equal_results_have_memory_of_their_own():
    call, _ = compile_aot(lambda x: (x.sin(), x.sin()), [rand(3)])
    one, other = call([rand(3)])
    assert one.data_ptr() != other.data_ptr()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.sort(0).values,
        lambda x: x.topk(2).indices,
        lambda x: torch.nn.functional.max_pool1d(x[None], 2),
        lambda x: torch.nn.functional.embedding_bag(torch.tensor([[0, 1]]), x),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_equal_results_of_several_have_memory_of_their_own(fn, grad):
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


def test_view_chains():
    checked(
        "merge_views",
        (lambda x: x.view(12).view(4, 3).t().permute(1, 0).exp(), [leaf(3, 4)]),
        (lambda x: x.permute(1, 0).sin().permute(1, 0).exp(), [leaf(3, 4)]),
    )
    run(
        lambda x: x.flatten().view(x.shape[0], 2, 2).permute(2, 0, 1).permute(1, 2, 0).exp(),
        [leaf(3, 4)],
        FIRST,
    )


# Matrix products


def product_and_part(x, a, b):
    inner = x @ a
    return inner @ b, inner


def test_a_bias_goes_back_into_the_product_where_no_kernel_could_add_it():
    inputs = [leaf(5, 3), leaf(4, 3), leaf(4)]
    checked(
        "addmm",
        (F.linear, inputs),
        (lambda x, w, b: F.linear(x, w, b).relu(), inputs),
        FIRST,
    )
    twice = lambda x, w, b: F.linear(x.mm(w.t()), torch.ones(4, 4), b)  # noqa: E731
    assert "addmm" in fired(run(twice, [rand(5, 3), rand(4, 3), rand(4)]))
    shared = lambda x, w, b: (x @ w.t() + b, (x @ w.t()).sin())  # noqa: E731
    assert "addmm" not in fired(run(shared, inputs))
    half = [x.detach().bfloat16() for x in inputs]
    assert "addmm" not in fired(run(lambda x, w, b: x @ w.t() + b, half))


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel"])
def test_large_products_are_onednn_s_on_amd_s_processors(vendor, monkeypatch):
    monkeypatch.setattr("minicompile.aot.passes.linear.processor_vendor", lambda: vendor)
    large = [leaf(512, 256), leaf(600, 256), leaf(600)]
    products = lambda x, w, b: (F.linear(x, w, b), x @ w.t(), x.t() @ x[:, ::2])  # noqa: E731
    chosen = fired(run(products, large, atol=1e-3))
    if vendor == "GenuineIntel":
        assert "onednn" not in chosen
        return
    assert "onednn" in chosen
    small = [x.detach()[:255] for x in large]
    for other in (small, [x.detach().double() for x in large], [x.detach().half() for x in large]):
        assert "onednn" not in fired(run(lambda x, w: x @ w.t(), other[:2], atol=2e-1))
    with torch.backends.mkldnn.flags(enabled=False):
        assert "onednn" not in fired(run(products, large, atol=1e-3))


def test_large_products_for_tensor_cores_have_rows_of_whole_vectors(monkeypatch):
    monkeypatch.setattr("minicompile.aot.passes.linear.runs_on_tensor_cores", lambda value: True)
    monkeypatch.setattr("minicompile.aot.passes.linear.WORTH_PADDING", 2)
    inputs = [leaf(20, 13), leaf(11, 13), leaf(11)]
    products = lambda x, w, b: (F.linear(x, w, b), x @ w.t(), w @ x.t(), F.linear(x, w, b[:1]))  # noqa: E731
    aligned = [leaf(16, 24), leaf(8, 24), leaf(8)]
    checked("pad_products", (products, inputs), (products, aligned), FIRST)
    columns = lambda x, w: x.t() @ w  # noqa: E731
    checked("pad_products", (columns, [rand(24, 13), rand(24, 16)]), (columns, [rand(24, 16)] * 2))
    special = [x.detach().clone() for x in inputs]
    special[0][0, 0], special[1][3, 4] = float("inf"), float("nan")
    assert "pad_products" in fired(run(lambda x, w: x @ w.t(), special[:2]))


def test_products_of_products_are_marked_with_the_bytes_between():
    inputs = [rand(6, 3), rand(3, 5), rand(5, 2)]
    chain = lambda x, a, b: x @ a @ b  # noqa: E731
    checked(
        "back_to_back_gemm", (chain, inputs), (lambda x, a, b: (x @ a).relu() @ b, inputs), FIRST
    )
    result = run(chain, inputs)
    (outer,) = [n.meta["back_to_back"] for n in result.forward.nodes if "back_to_back" in n.meta]
    assert outer == 6 * 5 * 4
    (record,) = [r for r in result.passes if r.rewrites]
    assert "120 bytes between" in str(record)
    assert "back_to_back_gemm" not in fired(run(product_and_part, inputs))


@pytest.mark.parametrize("make", [rand, leaf])
def test_products_are_reassociated_where_that_is_less_arithmetic(make):
    cheap = [make(50, 30), make(30, 40), make(40, 5)]
    dear = [make(2, 30), make(30, 40), make(40, 50)]
    chain = lambda x, a, b: x @ a @ b  # noqa: E731
    name = "pattern:reassociate_gemm"
    checked(name, (chain, cheap), (chain, dear), FIRST, atol=1e-3, reassociate_gemm=True)
    assert name not in fired(run(product_and_part, cheap, atol=1e-3, reassociate_gemm=True))


def test_linears_of_one_input_become_one_product():
    inputs = [leaf(6, 3), leaf(4, 3), leaf(5, 3), leaf(4)]
    checked(
        "batch_linears",
        (lambda x, a, b, c: (F.linear(x, a, c).relu() * 2, F.linear(x, b)), inputs),
        (lambda x, a, b, c: (F.linear(x, a), F.linear(x * 2, b)), inputs),
        FIRST,
        batch_linears=True,
    )
    later = lambda x, a: x @ (x.t() @ x @ a.t()).relu().t()[:3]  # noqa: E731
    assert "batch_linears" not in fired(run(later, [rand(3, 3), rand(3, 3)], batch_linears=True))


# Convolution


def norm_of(conv, training=False):
    def fn(x, w, b, mean, var, gamma, beta):
        return F.batch_norm(conv(x, w, b), mean, var, gamma, beta, training, 0.1, 1e-5).relu()

    return fn


def conv_inputs(make=rand):
    channels = [rand(6) for _ in range(4)]
    channels[2] = channels[2].abs() + 0.5
    b, mean, var, beta = channels
    return [make(2, 4, 7, 7), make(6, 2, 3, 3), b, mean, var, rand(6), beta]


def plain(x, w, b):
    return F.conv2d(x, w, b, stride=2, padding=1, groups=2)


def test_batch_norm_goes_into_the_convolution_before_it():
    def shared(x, w, b, *rest):
        y = plain(x, w, b)
        return norm_of(lambda *_: y)(x, w, b, *rest), y

    checked(
        "fold_batch_norm",
        (norm_of(plain), conv_inputs()),
        (shared, conv_inputs()),
        FIRST,
        fold_batch_norm=True,
    )


@pytest.mark.parametrize(
    "fn",
    [
        norm_of(lambda x, w, b: plain(x, w, None)),
        lambda x, w, b, mean, var, *_: F.batch_norm(plain(x, w, b), mean, var),
    ],
)
def test_batch_norm_without_bias_or_scale_is_folded_too(fn):
    assert "fold_batch_norm" in fired(run(fn, conv_inputs(), fold_batch_norm=True))


@pytest.mark.parametrize(
    "fn, inputs",
    [
        (norm_of(plain), conv_inputs(leaf)),
        (norm_of(plain, training=True), conv_inputs()),
        (norm_of(lambda x, w, b: plain(x, w, b).sin()), conv_inputs()),
        (
            norm_of(
                lambda x, w, b: F.conv_transpose2d(
                    x.repeat(1, 2, 1, 1)[:, :6], w.repeat(1, 3, 1, 1)
                )
            ),
            conv_inputs(),
        ),
    ],
)
def test_batch_norm_is_not_folded_where_that_would_be_wrong(fn, inputs):
    assert "fold_batch_norm" not in fired(run(fn, inputs, fold_batch_norm=True))


def traced(fn, inputs, dynamic=None, **options):
    """The trace of a compiled function, whose values and gradients are eager's."""
    compiled = mc.compile(fn, fullgraph=True, dynamic=dynamic, options=options)
    wanted = [x for x in inputs if x.requires_grad]
    outputs, expected = compiled(*inputs), fn(*inputs)
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-4, equal_nan=True)
    if wanted:
        sums = [
            sum(o.sum() for o in (out if isinstance(out, tuple) else (out,)))
            for out in (outputs, expected)
        ]
        for got, want in zip(*(torch.autograd.grad(total, wanted) for total in sums)):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    return mc.trace(compiled, *inputs)


def test_a_bias_that_only_attention_reads_stays_in_the_product():
    def fn(x, w, b):
        q, k, v = torch.addmm(b, x, w).view(2, 6, 3, 2, 4).unbind(2)
        heads = (part.transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(*heads)

    assert "addmm" in fired(run(fn, [rand(12, 8), rand(8, 24), rand(24)]))


# Patterns from outside

SQUARE = torch.empty(3, 2, requires_grad=True)


def angle(x, y):
    return torch.sin(x) * torch.cos(x) + y


def double_angle(x, y):
    return y + torch.sin(x * 2) * 0.5


def register(name, search, replace, examples=(SQUARE, SQUARE), **given):
    mc.register_pattern(name, search=search, examples=examples, **given)(replace)


@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad"])
@pytest.mark.parametrize("make", [rand, leaf])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_pattern_in_each_stage(stage, make, dynamic):
    with mc.scoped():
        register("angle", angle, double_angle, stage=stage)
        trace = traced(lambda x, y: angle(x, y * 2).exp(), [make(4, 5), make(4, 5)], dynamic)
    assert f"{stage}.pattern:angle" in {r.name for r in trace.aot.passes if r.changed}
    assert "aten.mul.Tensor(mul, 0.5)" not in str(trace.aot.forward)
    assert str(trace.aot.forward).count("sin") and "0.5" in str(trace.aot.forward)


def test_in_training_results_and_gradients_are_matched_together():
    with mc.scoped():
        register("angle", angle, double_angle)
        result = run(lambda x, y: angle(x, y).sum() * 2, [leaf(4, 5), leaf(4, 5)])
        (record,) = [r for r in result.passes if r.rewrites]
        (done,) = record.rewrites
        assert "aten.cos" not in str(result.forward) and "aten.cos" in str(result.backward)
        assert targets(result.backward).count(aten.cos.default) == 1
        assert "backward" in str(result.level("full"))
        # what the backward reads else can't go
        inner = lambda x, y: (angle(x, y), torch.cos(x).exp(), angle(y, y))  # noqa: E731
        run(inner, [leaf(4, 5), leaf(4, 5)])
        run(lambda x, y: angle(x, y.detach()), [leaf(4, 5), rand(4, 5)])
    assert "sin" in done.before and "0.5" in done.after and done.origins


def test_several_results_are_matched_together():
    def both(x, factor):
        return torch.tanh(x) * factor, torch.erf(x)

    with mc.scoped():
        register(
            "both", both, lambda x, f: (f * torch.tanh(x), -torch.erf(-x)), [torch.empty(2), 0.5]
        )
        fires = run(lambda x: torch.erf(x) + torch.tanh(x) * 3, [rand(4)])
        assert "pattern:both" in fired(fires) and aten.neg.default in targets(fires.forward)
        for fn in (
            lambda x: torch.erf(x.sin()) + torch.tanh(x) * 3,
            lambda x: torch.erf(torch.tanh(x) * 3),
            lambda x: torch.tanh(x) * 3,
        ):
            assert "pattern:both" not in fired(run(fn, [rand(4)]))


def test_numbers_are_the_patterns_own_unless_they_are_among_the_examples():
    def power(x, factor):
        return (x.abs() ** 2.0).sin() * factor

    with mc.scoped():
        register("power", power, lambda x, factor: (x * x).sin() * factor, [torch.empty(2), 2.0])
        assert "pattern:power" in fired(run(lambda x: 3 * (x.abs() ** 2.0).sin(), [rand(4)]))
        assert "pattern:power" not in fired(run(lambda x: 3.0 * (x.abs() ** 3.0).sin(), [rand(4)]))


@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad"])
def test_a_number_that_occurs_twice_is_the_same_one(stage):
    def twice(x, number):
        return x * number + number

    ints, negative = torch.arange(4), -torch.rand(4)
    with mc.scoped():
        register("twice", twice, lambda x, n: (x + 1) * n, [torch.empty(2), 0.5], stage=stage)
        assert "pattern:twice" in fired(traced(lambda x: x * 3 + 3, [ints]).aot)
        for fn, x in (
            (lambda x: x * 3 + 3.0, ints),
            (lambda x: x * True + 1, ints > 2),
            (lambda x: x * 0.0 + -0.0, negative),
        ):
            assert "pattern:twice" not in fired(traced(fn, [x]).aot)
            got, want = mc.compile(fn)(x), fn(x)
            assert torch.equal(torch.signbit(got), torch.signbit(want))


@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad"])
def test_functions_of_several_tensors_can_be_searched_for(stage):
    def layer(x, w, b):
        return torch.where(x > 0, F.linear(x, w, b), b)

    def product(x, w, b):
        return torch.where(x > 0, x @ w.t() + b, b)

    with mc.scoped():
        register("layer", layer, product, [torch.empty(2, 2)] * 2 + [torch.empty(2)], stage=stage)
        trace = traced(layer, [leaf(4, 4), rand(4, 4), rand(4)])
        assert stage != "pre_grad" or "pattern:layer" in fired(trace.aot)


def test_a_result_never_takes_the_memory_of_an_argument():
    def fn(x):
        y = x.neg().neg()
        z = y.exp().neg().neg()
        y.add_(1)
        return y, z, x.neg().neg()

    for stage in ("pre_grad", "joint"):
        with mc.scoped():
            register("negated", lambda x: x.neg().neg(), lambda x: x, [SQUARE], stage=stage)
            x = rand(3, 2)
            before = x.clone()
            results = mc.compile(fn)(x)
            for got, want in zip(results, fn(before)):
                torch.testing.assert_close(got, want)
            assert torch.equal(x, before) and len({r.data_ptr() for r in (x, *results)}) == 4


def test_nothing_moves_across_a_write():
    def fn(x):
        x = x.clone()
        y = torch.sin(x)
        x.mul_(2)
        return y * 3

    def between(x):
        x = x.clone()
        y = torch.sin(x)
        z = x.mul(2)
        return y * 3 + z

    with mc.scoped():
        register(
            "wave",
            lambda x: torch.sin(x) * 3,
            lambda x: 3 * torch.sin(x),
            [SQUARE],
            stage="pre_grad",
        )
        assert "pattern:wave" not in fired(traced(fn, [rand(4)]).aot)
        assert "pattern:wave" in fired(traced(between, [rand(4)]).aot)


def writes_through_a_view(x, w, i):
    y = torch.sin(x)
    v = x[0]
    torch.add(v, 1, out=v)
    return y * 3


def writes_an_item(x, w, i):
    y = torch.sin(x)
    x[0] = 5.0
    return y * 3


def adds_in_place(x, w, i):
    y = torch.sin(x)
    x += 1
    return y * 3


def writes_by_a_flag(x, w, i):
    y = torch.sin(x)
    F.relu(x, True)
    return y * 3


def renormalises(x, w, i):
    y = torch.sin(w)
    rows = F.embedding(i, w, max_norm=0.5)
    return y * 3 + rows.sum()


def writes_inside(x, w, i):
    y = torch.sin(x)
    y.mul_(2)
    return y * 3


def leaves_a_mode(x, w, i):
    with torch.no_grad():
        y = torch.sin(x)
    return y * 3


@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad"])
@pytest.mark.parametrize(
    "fn",
    [
        writes_through_a_view,
        writes_an_item,
        adds_in_place,
        writes_by_a_flag,
        renormalises,
        writes_inside,
        leaves_a_mode,
    ],
)
def test_whatever_is_written_on_the_way_results_and_inputs_are_eagers(fn, stage):
    given = [rand(3, 3), rand(3, 3), torch.tensor([0, 1])]
    copies = [value.clone() for value in given]
    with mc.scoped():
        register(
            "wave", lambda x: torch.sin(x) * 3, lambda x: 3 * torch.sin(x), [SQUARE], stage=stage
        )
        torch.testing.assert_close(mc.compile(fn)(*given), fn(*copies))
        torch.testing.assert_close(given, copies)
        assert stage != "pre_grad" or not fired(mc.trace(fn, *given).aot) & {"pattern:wave"}


def test_rewrites_tell_their_lines_and_are_drawn():
    with mc.scoped():
        register("angle", angle, double_angle)
        trace = traced(lambda x, y: angle(x, y), [rand(4, 5), rand(4, 5)])
    (record,) = [r for r in trace.aot.passes if r.rewrites]
    assert "test_passes.py" in record.rewrites[0].title and "- sin" in str(record)
    page = to_html(record)
    assert (
        "angle at" in page
        and "test_passes.py" in page
        and to_html(trace.aot).count("angle at") == 1
    )


def test_passes_and_patterns_go_by_name():
    program = (lambda x: F.relu(F.relu(x)).sin() + F.relu(F.relu(x)).sin(), [rand(3)])
    for names in (("cse", "pattern:relu_of_relu"), ("prims.cse", "joint.pattern:relu_of_relu")):
        assert not fired(run(*program, disable_passes=names))
    with mc.without("pass:prims.cse"), mc.without("pattern:relu_of_relu"):
        assert not fired(run(*program))
    assert fired(run(*program)) == {"cse", "pattern:relu_of_relu"}
    compiled = mc.compile(program[0], options={"disable_passes": ("csee",)})
    with pytest.raises(
        OptionError, match=r"no pass 'csee'; known: addmm, .*cse.*pattern:relu_of_relu"
    ):
        compiled(rand(3))


@pytest.mark.parametrize("names", ["cse", "", None])
def test_names_of_passes_come_in_a_tuple(names):
    with pytest.raises(OptionError, match=r"disable_passes can't be .*: a tuple of names"):
        mc.compile(torch.sin, options={"disable_passes": names})


def returns_its_argument(x):
    return x


def writes(x):
    return x.add_(1) * 2


def fails(x):
    raise ValueError("no")


def ignores(x, y):
    return torch.sin(torch.cos(x))


def wave(x):
    return torch.sin(torch.cos(x))


@pytest.mark.parametrize(
    "search, replace, examples, why",
    [
        (returns_its_argument, wave, [SQUARE], "returns an argument"),
        (writes, wave, [SQUARE], "writes into a tensor"),
        (fails, wave, [SQUARE], "can't be traced: ValueError: no"),
        (wave, wave, [SQUARE, SQUARE], "takes 1 positional argument but 2 were given"),
        (ignores, ignores, [SQUARE, SQUARE], "doesn't use"),
        (wave, lambda x: x.sum(0), [SQUARE], r"gives shape \[2\], not \[3, 2\]"),
        (wave, lambda x: (x, x), [SQUARE], "2 results replace 1"),
        (wave, fails, [SQUARE], "the replacement can't be traced: ValueError: no"),
    ],
)
@pytest.mark.parametrize("stage", ["joint", "post_grad", "pre_grad"])
def test_a_bad_pattern_is_an_error_that_names_it_and_its_line(
    search, replace, examples, why, stage
):
    with mc.scoped():
        register("bad", search, replace, examples, stage=stage)
        with pytest.raises(OptionError, match=rf"pattern 'bad' \(.*test_passes.py:\d+\): .*{why}"):
            mc.compile(lambda x: torch.sin(torch.cos(x)))(rand(3, 2))


def test_an_unknown_stage_is_an_error():
    with pytest.raises(OptionError, match="no stage 'late'; known: pre_grad, joint, post_grad"):
        register("bad", wave, wave, [SQUARE], stage="late")
    with pytest.raises(
        OptionError, match="no stage 'full'; known: pre_grad, joint, prims, post_grad"
    ):
        graph_pass("bad", stage="full")
