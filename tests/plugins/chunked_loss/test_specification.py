"""Cross-entropy of a linear layer in chunks of rows.

- Losses and gradients are eager's; sums of half types are made in float32.
- Memory is a fraction of eager's.
- What isn't a mean or sum over the rows of one linear layer, or is small, stays whole, and the pass says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import minicompile as mc
from minicompile import compat
from minicompile.bench.timing import peak_bytes
from minicompile.plugins.chunked_loss import cross_entropy
from tests.comparing import assert_near, in_double

ROWS, WIDTH, CLASSES = 10, 6, 40


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 3 rows, the last of one."""
    monkeypatch.setattr(cross_entropy, "LEAST_BYTES", 0)
    monkeypatch.setattr(cross_entropy, "LEAST_ROWS", 3)


@pytest.fixture(params=["40 classes", "48 columns"])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of logits: as many as classes, or whole vectors, as tensor cores like them."""
    if request.param == "48 columns":
        monkeypatch.setattr(cross_entropy, "VECTOR", 16)
        monkeypatch.setattr(cross_entropy, "runs_on_tensor_cores", lambda _: True)


def plain(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), t)


def with_bias(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w, b), t, reduction="sum")


def shifted(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """As language models write it."""
    logits = F.linear(x.view(2, 5, -1), w, b).float()
    known = t.view(2, 5)[..., 1:].contiguous()
    rows = logits[..., :-1, :].contiguous().view(-1, logits.shape[-1])
    return F.cross_entropy(rows, known.view(-1), ignore_index=7) * 3


def sliced(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    logits = F.linear(x.view(2, 5, -1), w, b)
    return F.cross_entropy(logits[:, 1:].flatten(0, 1), t.view(2, 5)[:, 1:].flatten())


def autocast(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.CrossEntropyLoss()(F.linear(x * 1, w, b), t)


def make(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    made = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[4] = 7
    return [*made, target]


def results(fn: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    loss = fn(*given)
    learned = [t for t in given if t.requires_grad]
    found = torch.autograd.grad(loss, learned, torch.full_like(loss, 0.7), allow_unused=True)
    return [loss.detach(), *(g for g in found if g is not None)]


def record(fn: Callable[..., Tensor], given: list[Tensor]) -> Any:
    (found,) = [r for r in mc.trace(fn, *given).aot.passes if r.name == "pre_grad.chunked_loss"]
    return found


def check(fn: Callable[..., Tensor], given: list[Tensor]) -> None:
    assert record(fn, given).changed
    ours = results(mc.compile(fn, fullgraph=True), given)
    assert_near(ours, results(fn, given), results(fn, in_double(given)))
    with torch.no_grad():
        torch.testing.assert_close(mc.compile(fn)(*given), fn(*given), equal_nan=True)


@pytest.mark.long
@pytest.mark.usefixtures("columns")
@pytest.mark.parametrize("fn", [plain, with_bias, shifted, sliced, autocast])
def test_losses_and_gradients_are_eagers(fn: Callable[..., Tensor]) -> None:
    check(fn, make())


@pytest.mark.long
@pytest.mark.parametrize("fn", [plain, with_bias, shifted])
def test_bfloat16_is_summed_in_float32(fn: Callable[..., Tensor]) -> None:
    check(fn, make(torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("fn", [plain, with_bias])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_on_a_gpu_are_float32(fn: Callable[..., Tensor], dtype: torch.dtype) -> None:
    check(fn, [t.detach().cuda().requires_grad_(t.requires_grad) for t in make(dtype)])


def test_a_product_that_is_added_to_float32_is_known_when_compiling() -> None:
    with compat.fake_mode():
        total, a = torch.empty(4, 4), torch.empty(4, 4, dtype=torch.bfloat16)
        found = torch.addmm(total, a, a, out_dtype=torch.float32)  # type: ignore[call-overload]
    assert found.dtype is torch.float32 and found.shape == (4, 4)


@pytest.mark.long
@pytest.mark.usefixtures("columns")
def test_rows_without_a_class_count_for_nothing() -> None:
    given = make()
    given[-1].fill_(-100)
    check(plain, given)
    assert results(mc.compile(plain), given)[0].isnan()
    check(with_bias, given)


@pytest.mark.long
@pytest.mark.usefixtures("columns")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_spread_as_in_eager(value: float) -> None:
    given = make()
    with torch.no_grad():
        given[2][3] = value
    for ignored in (False, True):
        given[-1].fill_(-100 if ignored else 3)
        want, have = results(with_bias, given), results(mc.compile(with_bias), given)
        torch.testing.assert_close(have, want, equal_nan=True)


def test_a_class_that_is_none_raises_as_in_eager() -> None:
    given, compiled = make(), mc.compile(plain)
    compiled(*given)
    given[-1][5] = CLASSES
    with pytest.raises(IndexError) as eager:
        plain(*given)
    with pytest.raises(IndexError, match=re.escape(str(eager.value))):
        compiled(*given)


def refused(fn: Callable[..., Any], given: list[Tensor]) -> str:
    found, want, have = record(fn, given), fn(*given), mc.compile(fn)(*given)
    torch.testing.assert_close(have, want, rtol=1e-2, atol=1e-2)
    assert not found.changed
    return str(found)


def loss(x: Tensor, t: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(x, t, **how)


def both(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, w)
    return logits, loss(logits, t)


def overwritten(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    y = x * 2
    logits = F.linear(y, w)
    y.mul_(3)
    return loss(logits, t)


REFUSED: dict[str, Callable[..., Any]] = {
    "others read linear too": both,
    "may write to what linear reads": overwritten,
    "label smoothing": lambda x, w, b, t: loss(F.linear(x, w), t, label_smoothing=0.1),
    "isn't a linear layer's result": lambda x, w, b, t: loss(F.linear(x, w).relu(), t),
    "wanted one by one": lambda x, w, b, t: loss(F.linear(x, w), t, reduction="none"),
    "rows of logits and their classes": lambda x, w, b, t: loss(
        F.linear(x.view(2, 5, -1), w).transpose(1, 2), t.view(2, 5)
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_leaves_is_told(reason: str) -> None:
    given = make()
    if reason == "may write to what linear reads":
        given = [t.detach() for t in given]
    assert reason in refused(REFUSED[reason], given)


def test_float16_logits_are_left() -> None:
    assert "logits in torch.float16" in refused(plain, make(torch.float16))


@pytest.mark.long
def test_a_number_of_rows_that_varies_keeps_one_product() -> None:
    compiled = mc.compile(plain, dynamic=True)
    for count in (10, 7, 1):
        x, w, b, t = make()
        given = [x.detach()[:count].requires_grad_(), w, b, t[:count]]
        torch.testing.assert_close(results(compiled, given), results(plain, given))


def test_few_logits_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LEAST_BYTES", 2**26)
    assert "all logits are 1600 bytes" in refused(plain, make())
    assert not any(
        r.name == "pre_grad.chunked_loss"
        for r in mc.trace(mc.compile(plain, options={"plugins": "none"}), *make()).aot.passes
    )


@pytest.mark.long
def test_memory_is_a_fraction_of_eagers() -> None:
    """The weight's gradient grows in place: each chunk's product is added where the sum lies."""
    x, w = torch.randn(1024, 16).requires_grad_(), torch.randn(8192, 16).requires_grad_()
    given = [x, w, torch.empty(0), torch.randint(8192, (1024,))]
    compiled = mc.compile(plain)
    results(compiled, given)
    ours, eager = (peak_bytes(lambda fn=fn: results(fn, given)) for fn in (compiled, plain))
    assert ours * 3 < eager
    lines = str(mc.trace(plain, *given).graphs["forward"].wrapper).splitlines()
    sums = [line.split("addmm(")[1] for line in lines if "addmm(" in line]
    assert len(sums) == cross_entropy.CHUNKS
    assert all(line.split(",")[0] == line.split("out=")[1].rstrip(")") for line in sums[1:])
