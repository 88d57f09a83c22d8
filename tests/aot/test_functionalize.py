"""Functionalization keeps values, mutations of inputs, strides and the alias pattern of eager."""

from __future__ import annotations

import pytest
import torch

import minicompile as mc
from minicompile.aot.layout import overlaps
from minicompile.errors import Unsupported
from minicompile.extension import inverse
from tests.aot.helpers import compile_aot
from tests.comparing import alias_pattern, assert_same, fresh

aten = torch.ops.aten


def assert_like_eager(fn, inputs):
    """Run fn both ways on copies of the inputs; compare outputs, inputs, and who shares memory."""
    mine, theirs = fresh(inputs), fresh(inputs)
    call, result = compile_aot(fn, mine)
    assert not [
        n
        for n in result.level("full").nodes
        if getattr(n.target, "_schema", None) and n.target._schema.is_mutable
    ]
    got, expected = call(list(mine)), fn(*theirs)
    expected = list(expected) if isinstance(expected, tuple | list) else [expected]
    assert_same([*got, *mine], [*expected, *theirs], rtol=0, atol=1e-6)
    assert alias_pattern([*got, *mine]) == alias_pattern([*expected, *theirs])
    # a write through each output must reach the same tensors
    for a, b in zip(got, expected):
        if not overlaps(a) and not overlaps(b):
            a.fill_(7)
            b.fill_(7)
    assert_same([*got, *mine], [*expected, *theirs], rtol=0, atol=1e-6)
    return result


def diagonal_write(x):
    y = x[:, :4].clone()
    y.diagonal().fill_(9)
    return y


def transposed_in_place(x):
    y = x.clone()
    y.t_()
    y[0].zero_()
    y.unsqueeze_(1)
    return y, y.sum()


def cast_on_write(x, i):
    i.copy_(x * 3)
    i[0] += 2
    x.copy_(i)
    return i.clone()


def fills(x):
    x[0].fill_(2)
    x[1].zero_()
    x.clamp_(max=1).relu_()
    return x.masked_fill_(x == 1, 4.0)


def index_writes(x):
    x[torch.tensor([0, 2])] = 1.5
    x[x > 1.2] = 0.0
    x.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 6))
    return x.scatter_(1, torch.zeros(4, 1, dtype=torch.long), 3.0)


LAYOUTS = {
    "contiguous": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "gaps": lambda: torch.randn(4, 3, 6)[:, 1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", [diagonal_write, transposed_in_place, fills, index_writes])
def test_program_of_views_and_writes_equals_eager(program, layout):
    """More of them, at random, are in tests/fuzz/test_views.py."""
    assert_like_eager(program, [LAYOUTS[layout]()])


def test_a_write_of_another_dtype_casts():
    assert_like_eager(cast_on_write, [torch.randn(4, 6), torch.ones(4, 6, dtype=torch.int64)])


def test_writes_through_unfold_and_to_one_row_of_an_expanded_tensor():
    def fn(x, y):
        x.unfold(1, 2, 3)[0].mul_(2)
        y.expand(3, 6)[1].add_(1)
        x[:, ::2].unfold(0, 2, 2).zero_()
        return x

    assert_like_eager(fn, [torch.randn(4, 6), torch.randn(1, 6)])
    with pytest.raises(Unsupported, match="memory with gaps"):
        compile_aot(fn, [torch.randn(4, 12)[:, ::2], torch.randn(1, 6)])


def test_a_write_whose_elements_share_memory_is_refused():
    with pytest.raises(Unsupported, match="elements share memory"):
        compile_aot(lambda x: x.as_strided((3, 2), (1, 1)).zero_(), [torch.randn(4)])


def test_a_write_through_as_strided_to_all_of_its_memory():
    """As the backward of channels-last pooling makes it."""

    def strided_write(x):
        y = x.clone()
        y.as_strided((6, 1, 4), (1, 6, 6)).mul_(torch.arange(4.0))
        x.as_strided((24,), (1,)).add_(torch.arange(24.0))
        return y

    assert_like_eager(strided_write, [torch.randn(4, 6)])


def test_as_strided_on_something_that_is_a_view_itself():
    def fn(x):
        a = torch.zeros(2, 3)
        a.copy_(x[1:3, :3])
        return a.as_strided((2, 2), (3, 1), 1) * 2, a.as_strided((3,), (2,)) + 1

    assert_like_eager(fn, [torch.randn(4, 6)])


def test_an_in_place_operators_default_arguments_are_kept():
    call, _ = compile_aot(lambda x: torch.zeros_like(x).bernoulli_(), [torch.zeros(1000)])
    assert 400 < call([torch.zeros(1000)])[0].sum() < 600


def test_a_write_into_several_tensors():
    def fn(x, y):
        torch._foreach_add_([x, y], 2)
        return x * y

    assert_like_eager(fn, [torch.randn(3, 2), torch.randn(2)])

    def twice(x):
        torch._foreach_add_([x, x[0]], 2)

    with pytest.raises(Unsupported, match="several times into one memory"):
        compile_aot(twice, [torch.randn(3, 2)])


def test_views_of_a_users_operator_are_followed_by_their_place_in_memory():
    with torch.library._scoped_library("mini_views", "DEF") as library:
        library.define("halves(Tensor(a) x) -> (Tensor(a), Tensor(a))")
        for key in ("CompositeExplicitAutograd", "Meta"):
            library.impl("halves", lambda x: (x[:2], x[2:]), key)

        def fn(x):
            y = x * 2
            upper, lower = torch.ops.mini_views.halves(y)
            y.add_(1)
            lower.mul_(3)
            return upper + 1, lower.sin(), y.cos()

        assert_like_eager(fn, [torch.randn(4, 3)])


@pytest.mark.parametrize("write", [lambda x: x.div_(2), lambda x: torch.mean(x + 0.5, out=x[0])])
def test_a_result_that_eager_does_not_cast_to_what_is_written_is_refused(write):
    x = torch.arange(4)
    with pytest.raises(RuntimeError):
        mc.compile(write, backend="aot_eager")(x)
    assert x.equal(torch.arange(4))


def double_the_diagonal(x):
    x.diagonal(1).mul_(2)
    return x + 0


def functional_operators(fn, *inputs):
    return [str(op) for _, op in mc.trace(fn, *inputs).aot.level("full").calls]


def test_a_view_without_inverse_is_written_by_its_place_in_memory():
    with mc.without("inverse:aten.diagonal"):
        found = functional_operators(double_the_diagonal, torch.randn(3, 4))
        assert_like_eager(double_the_diagonal, [torch.randn(3, 4)])
    assert "aten.as_strided_scatter.default" in found
    assert "aten.diagonal_scatter.default" not in found


def test_a_registered_inverse_carries_the_writes():
    def on_a_mask(base, new, offset):
        rows = torch.arange(base.shape[0]).unsqueeze(1)
        columns = torch.arange(base.shape[1])
        return torch.where(columns - rows == offset, new.unsqueeze(1), base)

    with mc.scoped():
        inverse(aten.diagonal.default)(on_a_mask)
        found = functional_operators(double_the_diagonal, torch.randn(3, 4))
        assert_like_eager(double_the_diagonal, [torch.randn(3, 4)])
    assert "aten.where.self" in found and "aten.diagonal_scatter.default" not in found


def test_a_write_by_place_reaches_an_input_that_starts_inside_its_memory():
    def fn(x):
        x.expand(2, *x.shape)[0][::2] *= 2
        return x + 1

    assert_like_eager(fn, [torch.randn(4, 4)])
    for backend in ("aot_eager", "inductor"):
        x = torch.randn(4, 4)
        expected = x[1:] * torch.tensor([[2], [1], [2]])
        mc.compile(fn, backend=backend)(x[1:])
        torch.testing.assert_close(x[1:], expected)
