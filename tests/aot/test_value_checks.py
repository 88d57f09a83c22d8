"""What eager refuses because of values or arguments stays refused, in kernels and in calls of the library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, tensor

import minicompile as mc
from minicompile import api
from tests.torch_versions import needs

X = torch.arange(12.0).view(3, 4)
HALF, LABELS = torch.full((3, 4), 0.5), tensor([0, 1, 2])
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x + 0.5, HALF),
    "binary_cross_entropy, negative": lambda x: F.binary_cross_entropy(x - 9, HALF),
    "binary_cross_entropy, target": lambda x: F.binary_cross_entropy(HALF, x),
    "binary_cross_entropy, nan": lambda x: F.binary_cross_entropy(x * torch.nan, HALF),
    "huber_loss": lambda x: F.huber_loss(x, HALF, delta=0.0),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, tensor([[0, 9, -1, 0]] * 3)),
    "multilabel_margin_loss, -5": lambda x: F.multilabel_margin_loss(x, tensor([[0, -5, -1, 0]] * 3)),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, LABELS + 2),
    "multi_margin_loss, p": lambda x: F.multi_margin_loss(x, LABELS, p=3),
    "nll_loss": lambda x: F.nll_loss(x, LABELS + 2),
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS + 2, label_smoothing=0.1),
    "native_dropout": lambda x: torch.native_dropout(x, 1.5, True)[0],
    "dropout": lambda x: torch.dropout(x, -0.5, True),
    "celu": lambda x: F.celu(x, 0.0),
    "softshrink": lambda x: F.softshrink(x, -1.0),
    "bernoulli": torch.bernoulli,
    "normal": lambda x: torch.normal(x, -x),
    "one_hot": lambda x: F.one_hot(x[0].long(), 2).float(),
    "embedding": lambda x: F.embedding(LABELS + 1, x),
    "index_add": lambda x: x.index_add(0, LABELS + 1, x),
    "scatter": lambda x: x.scatter(1, LABELS[:, None] + 2, 1.0),
    "gather": lambda x: x.gather(1, LABELS[:, None] + 2),
    "take": lambda x: x.take(LABELS + 10),
    "repeat_interleave": lambda x: x.repeat_interleave(1 - LABELS, 0),
}  # fmt: skip


def error_of(call: Callable[[], object]) -> type[Exception] | None:
    try:
        call()
    except Exception as error:
        return type(error)
    return None


@pytest.mark.long
@pytest.mark.filterwarnings("error:internal error")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs("one_hot is checked where it is traced"))
        if name.startswith("one_hot")
        else name
        for name in REFUSED
    ],
)
def test_values_that_eager_refuses_are_refused(name: str, requires_grad: bool) -> None:
    x = X.clone().requires_grad_(requires_grad)
    expected = error_of(lambda: REFUSED[name](x))
    assert expected is not None
    assert error_of(lambda: mc.compile(REFUSED[name])(x)) is expected


def test_the_checks_of_binary_cross_entropy_stay_in_its_graph() -> None:
    compiled = mc.compile(lambda x, y: F.binary_cross_entropy(x.sigmoid(), y))
    x = torch.randn(3, 4, requires_grad=True)
    torch.testing.assert_close(compiled(x, HALF), F.binary_cross_entropy(x.sigmoid(), HALF))
    explanation = api.dispatcher_of(compiled).explanation()
    assert explanation.graph_count == 1 and not explanation.breaks
    with pytest.raises(RuntimeError, match="all elements of target should be between 0 and 1"):
        compiled(x, HALF + 0.6)


def test_labels_behind_the_end_of_the_list_count_for_nothing() -> None:
    def loss(x: Tensor) -> Tensor:
        return F.multilabel_margin_loss(x, tensor([[0, 2, -1, 1], [-1, 2, 1, 3]]))

    x = torch.randn(2, 4, requires_grad=True)
    ours, theirs = (f(x) for f in (mc.compile(loss, backend="aot_eager"), loss))
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(result, x) for result in (ours, theirs)]
    torch.testing.assert_close(*gradients)
