"""What has no loops is an operator call with a reason, on memory that lies as in eager."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import minicompile as mc
from minicompile.errors import Unsupported
from minicompile.lowering.lower import lower
from minicompile.ops.graph import Graph
from minicompile.options import Options
from tests.comparing import assert_same
from tests.lowering.conftest import check, lowered, run

aten = torch.ops.aten


def reasons(graph) -> list[str]:
    return [kernel.reason for kernel in graph.externs]


def test_an_operator_without_a_rule_is_named() -> None:
    graph = check(lambda x: aten._euclidean_dist(x[:, None], x[:, None]), torch.rand(4), externs=1)
    assert reasons(graph) == ["no lowering for aten._euclidean_dist.default"]


def test_results_of_several_tensors_are_taken_apart() -> None:
    x = torch.randn(2, 8, 4, 4)
    check(lambda x: [v * 2 for v in x.kthvalue(2, 1)], x, externs=1)
    check(lambda x: [v + 1 for v in x.topk(2, 1)], x, externs=1)


def test_convolution_backward_leaves_out_what_is_masked() -> None:
    x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)

    def fn(x, w):
        y = torch.conv2d(x, w)
        args = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
        return aten.convolution_backward(y.sin(), x, w, None, *args)[1] * 2

    check(fn, x, w, externs=2, rtol=1e-4, atol=1e-4)


def test_random_numbers_are_eagers_own_and_in_order() -> None:
    def fn(x):
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        return [x * mask * torch.rand_like(x), torch.randn(3)]

    x = torch.randn(5)
    graph = lowered(fn, x)
    assert set(reasons(graph)) == {"random: eager's generator gives the numbers"}
    torch.manual_seed(7)
    found = run(graph, x)
    torch.manual_seed(7)
    for got, want in zip(found, fn(x), strict=True):
        assert_same(got, want)


def test_complex_tensors_pass_through_by_copying_views() -> None:
    x = torch.randn(3, 4, 2)

    def rotate(x):
        z = torch.view_as_complex(x)
        return torch.view_as_real(z * z.conj()[0]) + 1

    graph = check(rotate, x, externs=None)
    assert any("c64" in reason or "complex" in reason for reason in reasons(graph))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_complex_results_lie_as_eagers_do(backend: str) -> None:
    def turned(x):
        z = torch.fft.fft2(x).permute(2, 0, 1)
        return [z.conj().sin(), torch.fft.ifft(z.conj()[:, :1])]

    x = torch.randn(3, 4, 5)
    for found, expected in zip(mc.compile(turned, backend=backend)(x), turned(x)):
        torch.testing.assert_close(found, expected, check_stride=True)


def test_bit_views_are_copied_by_the_library() -> None:
    check(lambda x: x.view(torch.int32) + 1, torch.randn(4), externs=1)


def test_a_mutation_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    out = graph.call_function(aten.add_.Tensor, (x, 1))
    graph.output((out,))
    for node in (x, out):
        node.meta["val"] = torch.randn(3)
    with pytest.raises(Unsupported, match="mutates"):
        lower(Graph(fx.GraphModule({}, graph), "f", "hand"), Options())


def test_constants_of_the_graph_become_buffers_and_numbers() -> None:
    table, number = torch.randn(3), torch.tensor(2.5)
    graph = check(lambda x: x * table + number, torch.randn(3))
    assert [c.name for c in graph.constants] == ["_tensor_constant0"]
    assert "2.5" in str(graph.operations[0])


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.permute(0, 2, 3, 1).sin(),
        lambda x: x[:, :, ::2],
        lambda x: x.mean(1, keepdim=True).expand(2, 3, 4, 5),
    ],
)
def test_operands_lie_as_in_eager_so_that_results_do(read) -> None:
    check(lambda x: read(x).sort(1)[0], torch.randn(2, 3, 4, 5), externs=1)
