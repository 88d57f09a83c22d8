"""The wrapper: readable Python whose call gives the graph's outputs and frees what it can."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from minicompile.codegen.wrapper import generate_wrapper, solved
from minicompile.errors import Unsupported
from minicompile.options import Options
from minicompile.runtime.load import load_wrapper
from minicompile.scheduling.schedule import schedule
from minicompile.shapes.expr import size_symbol
from tests.fuzz.loops import generate
from tests.scheduling.building import (
    F64,
    GraphBuilder,
    check,
    compiled,
    example_inputs,
    python_kernels,
)

S0 = size_symbol("s0")
OPTIONS = Options(verify=True)
aten = torch.ops.aten
Build = Callable[[GraphBuilder], Any]


def text_of(graph: Any, options: Options = Options(fusion=False)) -> str:  # noqa: B008
    result = schedule(graph, options)
    return generate_wrapper(result, python_kernels(result)[0]).text


ROWS: dict[str, tuple[Build, tuple[str, ...], dict[Any, int]]] = {}
"""Programs by the names of the functions that build them, what their wrappers say, and the size s0."""


def says(*texts: str, s0: int | None = None) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        ROWS[build.__name__] = build, texts, {} if s0 is None else {S0: s0}
        return build

    return add


@pytest.mark.parametrize("row", ROWS)
def test_wrappers_say_what_their_rows_have_and_are_right(row: str) -> None:
    build, texts, sizes = ROWS[row]
    b = GraphBuilder(sizes)
    outputs = build(b)
    graph = b.finish(*(outputs if isinstance(outputs, tuple) else (outputs,)))
    written = text_of(graph)
    for text in texts:
        assert text in written, written
    check(graph)
    if sizes:
        check(graph, sizes={S0: 9})


@says(
    "buf0 = empty_strided_cpu((8, 8), (8, 1), torch.float64)",
    "torch.mm(buf0, reinterpret(buf0, (8, 8), (1, 8), 0), out=buf1)",
)
def a_buffer_is_allocated_the_way_a_library_looks_at_it(b: GraphBuilder) -> Any:
    u = b.double(b.input((2, 4, 8)))
    return b.double(b.mm(u.reshape(8, 8), u.reshape(8, 8).t()))


@says("no elements")
def kernels_without_elements_are_not_called(b: GraphBuilder) -> Any:
    return b.double(b.input((0, 4))), b.reduce(b.input((3, 0)), (1,), "sum")


@says()
def names_that_python_or_the_wrapper_needs_are_changed(b: GraphBuilder) -> Any:
    x, y = b.input((4,)), b.input((4,))
    x.buffer.name, y.buffer.name = "args", "lambda"
    return b.add(x, y)


def test_a_wrapper_knows_whether_it_gives_views() -> None:
    found = {True: 0, False: 0}
    for seed in range(1100, 1160):
        graph = generate(seed, 4 + seed % 12).build()
        result = schedule(graph, OPTIONS)
        kernels, namespace = python_kernels(result)
        wrapper = generate_wrapper(result, kernels)
        with suppress(IndexError):  # as eager has it, with these inputs
            results = load_wrapper(wrapper, namespace)(list(example_inputs(graph)))
            views = any(isinstance(r, torch.Tensor) and r._is_view() for r in results)
            assert not (wrapper.owned and views)
            found[wrapper.owned] += 1
    assert min(found.values()) > 2


def test_a_symbolic_size_is_solved_from_a_multiple() -> None:
    b = GraphBuilder({S0: 3})
    graph = b.finish(b.double(b.input((2 * S0,)).reshape(S0, 2)))
    assert "s0 = in0.shape[0] // 2" in text_of(graph)


def test_a_size_that_no_input_tells_is_refused() -> None:
    b = GraphBuilder({S0: 3})
    x = b.input((4,))
    graph = b.finish(b.double(x), S0)
    with pytest.raises(Unsupported, match="no input tells what s0 is"):
        text_of(graph)
    assert solved(S0**2, S0, "n") is None


def test_inputs_and_intermediates_die_at_their_last_use() -> None:
    b = GraphBuilder()
    x, y = b.input((4, 4)), b.input((4, 4))
    seen = b.extern(aten.relu.default, (b.double(x),), (4, 4))
    graph = b.finish(b.pointwise(lambda ops, u, v: ops.add(u, v), seen, y))
    result = schedule(graph, OPTIONS)
    kernels, namespace = python_kernels(result)
    alive: list[bool] = []
    last = f"kernel_{max(kernels)}"
    inner = namespace[last]

    def spy(*args: Any) -> None:
        alive.append(watched() is not None)
        inner(*args)

    namespace[last] = spy
    call = load_wrapper(generate_wrapper(result, kernels), namespace)
    first = torch.randn(4, 4, dtype=F64)
    watched = weakref.ref(first)
    args = [first, torch.randn(4, 4, dtype=F64)]
    del first
    gc.collect()
    call(args)
    assert alive == [False]


def test_an_expanded_input_is_seen_as_it_is() -> None:
    b = GraphBuilder()
    x = b.input((4, 8), stride=(0, 1))
    graph = b.finish(b.extern(aten.mul.Tensor, (x, x), (4, 8)), x)
    call = compiled(schedule(graph, OPTIONS))
    row = torch.randn(1, 8, dtype=F64)
    square, same = call([row.expand(4, 8)])
    assert torch.equal(square, row.expand(4, 8) ** 2) and same.stride() == (0, 1)
    assert "reinterpret" not in text_of(graph)


def test_a_view_of_an_input_that_begins_inside_its_storage() -> None:
    b = GraphBuilder()
    x = b.input((4, 8))
    graph = b.finish(x.viewed((4,), (8,), 3), b.double(x))
    call = compiled(schedule(graph, OPTIONS))
    base = torch.randn(6, 8, dtype=F64)
    view, doubled = call([base[1:5]])
    assert torch.equal(view, base[1:5, 3]) and torch.equal(doubled, base[1:5] * 2)


def test_a_result_with_other_strides_than_expected_is_copied() -> None:
    b = GraphBuilder()
    x = b.input((4, 8))
    turned = b.extern(aten.t_copy.default, (x,), (8, 4))
    other = b.extern(aten.add.Tensor, (x.t(), x.t()), (8, 4))  # eager keeps the order of x.t()
    graph = b.finish(b.pointwise(lambda ops, u, v: ops.sub(u, v), other, turned), other)
    result = schedule(graph, OPTIONS)
    have = compiled(result)([(given := torch.randn(4, 8, dtype=F64))])
    assert torch.equal(have[0], given.t()) and have[1].stride() == (4, 1)
