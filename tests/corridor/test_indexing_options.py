"""Reading and writing at loaded positions: checks that can be left out, and sums that come out alike."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import minicompile as mc
from minicompile.pipeline_result import Trace
from tests.codegen.triton_running import devices
from tests.comparing import assert_as_eager

LANGUAGES = ("cpp", "triton")

READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i),
    "embedding": lambda x, i: F.embedding(i, x),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, 4)),
    "scatter_add": lambda x, i: x.scatter_add(0, i[:, None].expand(-1, 4), x[:1].expand(len(i), 4)),
    "index_put": lambda x, i: x.index_put((i,), x[0], accumulate=True),
}

WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, i, v: x.index_add(0, i, v),
    "scatter_add": lambda x, i, v: x.scatter_add(0, i[:, None].expand_as(v), v),
    "index_put, added": lambda x, i, v: x.index_put((i,), v, accumulate=True),
    "index_put": lambda x, i, v: x.index_put((i,), v),
    "scatter": lambda x, i, v: x.scatter(0, i[:, None].expand_as(v), v),
}
"""Functions whose result depends on the order of the writes to one element."""


def traced(fn: Callable[..., Tensor], *inputs: Tensor, **options: object) -> Trace:
    return mc.trace(mc.compile(fn, options=options), *inputs)


@pytest.mark.long
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_without_checks_the_answers_are_the_same(language: str, name: str) -> None:
    fn, x, i = READS[name], torch.randn(9, 4), torch.tensor([0, 8, 3, 3])
    checked, plain = (
        mc.compile(fn, options={"device_codegen": language, "assert_indirect_indexing": on})
        for on in (True, False)
    )
    torch.testing.assert_close(plain(x, i), fn(x, i))
    if name == "index":
        negative = torch.tensor([-1, -9, 2])
        assert torch.equal(checked(x, negative), x[negative])
        assert torch.equal(plain(x, negative), x[negative])
    for bad in (9, -10):
        with pytest.raises((IndexError, RuntimeError)) as eager:
            fn(x, torch.tensor([0, bad, 3, 3]))
        with pytest.raises(eager.type, match=r"out of (range|bounds)[\w ]* dimension.* size 9"):
            checked(x, torch.tensor([0, bad, 3, 3]))


@pytest.mark.parametrize(
    ("language", "check"), [("cpp", "error |="), ("triton", "tl.device_assert(")]
)
@pytest.mark.parametrize("name", READS)
def test_kernels_look_unless_they_are_told_not_to(name: str, language: str, check: str) -> None:
    x, i = torch.randn(9, 4), torch.tensor([0, 8, 3, 3])

    def looks(**options: object) -> bool:
        kernels = traced(READS[name], x, i, device_codegen=language, **options).kernels
        return any(check in kernel.text for kernel in kernels)

    assert looks()
    assert not looks(assert_indirect_indexing=False)


def test_an_index_out_of_range_names_the_users_line() -> None:
    def lookup(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return F.embedding(index, table) * 2  # this line

    compiled = mc.compile(lookup, fullgraph=True, options={"device_codegen": "triton"})
    with pytest.raises(IndexError, match="# this line"):
        compiled(torch.randn(4, 3), torch.tensor([1, 9]))


def test_the_gradient_of_one_embedded_token() -> None:
    """One row with a mask for all its columns, added atomically."""

    def loss(table: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (F.layer_norm(F.embedding(ids, table), (8,)) * weight).sum()

    table, weight = torch.randn(6, 8, requires_grad=True), torch.randn(8)
    compiled = mc.compile(loss, options={"device_codegen": "triton"})
    for ids in (torch.tensor([[3]]), torch.tensor([[3, 1, 3]])):
        assert_as_eager(compiled, loss, table, ids, weight, atol=1e-5, rtol=1e-5)


@pytest.fixture
def deterministic() -> Iterator[Callable[..., None]]:
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def colliding(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Sums of many numbers, which differ by the order of addition."""
    generator = torch.Generator().manual_seed(0)
    i = torch.randint(3, (4096,), generator=generator)
    x, v = (torch.randn(n, 8, generator=generator) * 100 for n in (3, 4096))
    return x.to(device, dtype), i.to(device), v.to(device, dtype)


@pytest.mark.parametrize("name", WRITES)
def test_deterministic_algorithms_are_eagers(name: str, deterministic) -> None:
    fn, inputs, out = WRITES[name], colliding(), io.StringIO()
    compiled = mc.compile(fn, options={"device_codegen": "triton"})
    deterministic(True)
    expected = fn(*inputs)
    deterministic(False)
    if "add" in name:  # else any of the writes may stay, in eager too
        torch.testing.assert_close(compiled(*inputs), expected, rtol=1e-4, atol=1e-2)
    compiled(*inputs)
    assert not traced(fn, *inputs, device_codegen="triton").loops.externs
    deterministic(True, warn_only=name == "scatter")
    with mc.logs("recompiles", "inductor", file=out):
        torch.testing.assert_close(compiled(*inputs), expected, rtol=0, atol=0)
    assert re.search("recompiles: .*deterministic", out.getvalue())
    assert "(deterministic algorithms are asked for" in out.getvalue()
    trace = traced(fn, *inputs, device_codegen="triton")
    assert not any("atomic" in kernel.text for kernel in trace.kernels)
    assert trace.loops.externs


def test_a_deterministic_backward_adds_in_order_too(deterministic) -> None:
    table, i = torch.randn(5, 8, requires_grad=True), torch.randint(5, (64,))
    for asked in (False, True):
        deterministic(asked)
        trace = traced(lambda w, i: F.embedding(i, w), table, i, device_codegen="triton")
        assert any("atomic" in k.text for k in trace.backward.kernels) is not asked
        assert any(e.op.name() == "aten::index_put" for e in trace.backward.loops.externs) is asked


@pytest.mark.parametrize("name", WRITES)
def test_cpp_loops_keep_the_order_however_many_threads_there_are(name: str, deterministic) -> None:
    fn, inputs, threads = WRITES[name], colliding(), torch.get_num_threads()
    deterministic(True)
    found = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            found.append(mc.compile(fn)(*inputs))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found)
    assert not traced(fn, *inputs).loops.externs


@devices
@pytest.mark.parametrize("name", ["scatter_add", "index_put"])
def test_deterministic_sums_are_the_same_every_time(name: str, device: str, deterministic) -> None:
    deterministic(True)
    inputs = colliding(device)
    compiled = mc.compile(WRITES[name], options={"device_codegen": "triton"})
    first = compiled(*inputs)
    assert all(torch.equal(compiled(*inputs), first) for _ in range(8))
    torch.testing.assert_close(first, WRITES[name](*inputs), rtol=1e-4, atol=1e-2)


def test_a_source_too_small_for_its_mask_is_an_error() -> None:
    def scattered(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return x.masked_scatter(mask, source) * 2

    for call in (scattered, mc.compile(scattered)):
        with pytest.raises(RuntimeError):
            call(torch.zeros(4), torch.ones(4, dtype=torch.bool), torch.ones(2))
