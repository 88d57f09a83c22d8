"""Launches of users' Triton kernels in the graph.

- A launch is one operator of one graph, with few guards, whatever decorates the kernel; sizes may be symbols.
- It writes what it writes in eager: to inputs and to results; what nobody else has isn't copied. A launch
  that may write to a part of some memory ends the graph: its pointers may reach the rest.
- Autograd doesn't see it, as in eager.
- Which arguments a kernel writes to follows from its TTIR; where that is too hard, all of them.
- Another kernel, constant or grid is another launch. A kernel made in the captured function ends the graph.

Without a GPU kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import minicompile as mc
from minicompile.api import dispatcher_of
from minicompile.compat import triton_api
from minicompile.plugins.triton_kernels.writes import written_parameters
from tests.comparing import assert_as_eager

on_gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


def add_kernel(x_ptr, y_ptr, n, by, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + by, mask=i < n)


def kernel_for(device: str, function: Any) -> Any:
    """The kernel as `@triton.jit` makes it; on the CPU, as it does with TRITON_INTERPRET=1."""
    if device == "cpu":
        return triton_api.interpreter_module().InterpretedFunction(function)
    return triton.jit(function)


def programs(device: str) -> dict[str, Callable[[Tensor], Any]]:
    add = kernel_for(device, add_kernel)
    sized = triton.heuristics({"block": lambda a: triton.next_power_of_2(a["n"])})(
        kernel_for(device, add_kernel)
    )

    def between(x: Tensor) -> Any:
        y, z = x * 2, torch.empty_like(x)
        add[(triton.cdiv(x.numel(), 64),)](y, z, y.numel(), 3, block=64)
        return z.relu(), y

    def chosen_grid(x: Tensor) -> Any:
        z = torch.zeros_like(x)
        add[lambda meta: (triton.cdiv(x.numel(), meta["block"]),)](
            x_ptr=x, y_ptr=z, n=x.numel(), by=1.5, block=32
        )
        return z + 1

    def of_input(x: Tensor) -> Any:
        add[(triton.cdiv(x.numel(), 64),)](x, x, x.numel(), 1, block=64)
        return x * 2

    def twice(x: Tensor) -> Any:
        y, z = x.clone(), x.clone()
        for by in (1, 2):
            add[(triton.cdiv(x.numel(), 64),)](y, z, x.numel(), by, block=64)
            y = z * 1
        return y, z

    def measured(x: Tensor) -> Any:
        y = torch.empty_like(x)
        sized[(1,)](x, y, x.numel(), 2)
        return y + 1

    return {f.__name__: f for f in (between, chosen_grid, of_input, twice, measured)}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", programs("cpu"))
def test_a_launch_does_what_it_does_in_eager(name: str, device: str, dynamic: bool) -> None:
    program = programs(device)[name]
    compiled = mc.compile(program, fullgraph=True, dynamic=dynamic)
    for size in (100, 70):
        assert_as_eager(compiled, program, torch.randn(size, device=device))
    found = dispatcher_of(compiled).explanation()
    assert found.graph_count == (1 if dynamic else 2)
    assert all(len(capture.guards) < 50 for capture in found.captures)


def test_memory_that_nobody_else_has_is_written_without_a_copy() -> None:
    for name, copies in (("between", 0), ("of_input", 1)):
        text = str(mc.trace(programs("cpu")[name], torch.randn(100)).wrapper)
        assert "\n    minicompile_triton_add_kernel" in text
        assert text.count("clone") == copies


def test_a_launch_has_no_gradient() -> None:
    add = kernel_for("cpu", add_kernel)

    def program(x: Tensor, w: Tensor) -> Tensor:
        y, z = x * w, torch.empty_like(x)
        add[(1,)](y, z, y.numel(), 3, block=64)
        return (z * w).sum()

    x, w = torch.randn(50), torch.randn(50, requires_grad=True)
    assert_as_eager(mc.compile(program, fullgraph=True), program, x, w)


def test_a_kernel_made_inside_ends_the_graph() -> None:
    def program(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        kernel_for("cpu", add_kernel)[(1,)](x, y, x.numel(), 1, block=64)
        return y + 1

    compiled = mc.compile(program)
    assert_as_eager(compiled, program, torch.randn(20))
    assert dispatcher_of(compiled).explanation().breaks


def test_a_parameter_may_be_named_grid() -> None:
    def named(x_ptr, y_ptr, grid, block: tl.constexpr):
        i = tl.arange(0, block)
        tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < grid), mask=i < grid)

    kernel = kernel_for("cpu", named)

    def program(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        kernel[(1,)](x, y, x.numel() - 3, block=32)
        return y + 1

    assert_as_eager(mc.compile(program, fullgraph=True, dynamic=True), program, torch.randn(20))


def double_kernel(x_ptr, row, column, rows, columns, block: tl.constexpr):
    i, j = tl.arange(0, block)[:, None], tl.arange(0, block)[None, :]
    pointer, mask = x_ptr + i * row + j * column, (i < rows) & (j < columns)
    tl.store(pointer, tl.load(pointer, mask=mask) * 2, mask=mask)


def add_back_kernel(x_ptr, y_ptr, n, by, block: tl.constexpr):
    i = tl.arange(0, block)
    tl.store(y_ptr - i, tl.load(x_ptr + i, mask=i < n) + by, mask=i < n)


def test_a_launch_that_writes_to_a_part_of_memory_ends_the_graph() -> None:
    double, add_back = kernel_for("cpu", double_kernel), kernel_for("cpu", add_back_kernel)

    def columns(x: Tensor) -> Tensor:
        y = x.sin()
        part = y[:, 1:3]
        double[(1,)](part, *part.stride(), *part.shape, block=16)
        return y

    def backwards(x: Tensor) -> Tensor:
        y = x.sin()
        add_back[(1,)](x, y[3:], 4, 1, block=4)
        return y

    for program, x in ((columns, torch.randn(4, 6)), (backwards, torch.randn(8))):
        compiled = mc.compile(program)
        assert_as_eager(compiled, program, x)
        first, *_ = dispatcher_of(compiled).explanation().breaks
        assert "writes to a view" in first.reason


def test_a_kernel_that_is_only_compiled_does_not_run() -> None:
    add = kernel_for("cpu", add_kernel)

    def program(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        add.run(x, y, x.numel(), 1, grid=(1,), warmup=True, block=64)
        return y + 1

    assert_as_eager(mc.compile(program), program, torch.randn(20))


def by_type_kernel(x_ptr, y_ptr, n, kind: tl.constexpr, block: tl.constexpr):
    i = tl.arange(0, block)
    by = 1 if kind[0] is True else 2 if isinstance(kind[0], float) else 3
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + by, mask=i < n)


def test_constants_that_are_equal_and_of_other_types_are_other_launches() -> None:
    by_type = kernel_for("cpu", by_type_kernel)

    def program(x: Tensor) -> list[Tensor]:
        results = []
        for kind in ((True,), (1,), (1.0,)):
            y = torch.empty_like(x)
            by_type[(1,)](x, y, x.numel(), kind, block=32)
            results.append(y)
        return results

    assert_as_eager(mc.compile(program, fullgraph=True), program, torch.randn(20))


def test_tensors_in_a_tuple_end_the_graph() -> None:
    def in_tuple(pair, n, block: tl.constexpr):
        i = tl.arange(0, block)
        tl.store(pair[1] + i, tl.load(pair[0] + i, mask=i < n) + 1, mask=i < n)

    kernel = kernel_for("cpu", in_tuple)

    def program(pair: tuple[Tensor, Tensor]) -> Tensor:
        kernel[(1,)](pair, pair[0].numel(), block=32)
        return pair[1] * 2

    compiled = mc.compile(program)
    for _ in range(2):
        assert_as_eager(compiled, program, (torch.randn(20), torch.randn(20)))


def both(x_ptr, y_ptr, z_ptr, n, block: tl.constexpr):
    i = tl.arange(0, block)
    at = tl.load(y_ptr + i)
    tl.store(x_ptr + at, tl.load(z_ptr + i, mask=i < n))


def in_loop(x_ptr, y_ptr, z_ptr, n, block: tl.constexpr):
    pointer = x_ptr + tl.arange(0, block)
    other = y_ptr + tl.arange(0, block)
    for _ in range(n):
        tl.store(pointer, tl.load(other) + 1)
        pointer += block
        other += block
    tl.atomic_add(z_ptr, 1)


def by_branch(x_ptr, y_ptr, z_ptr, n, block: tl.constexpr):
    i = tl.arange(0, block)
    if n > 3:
        pointer = x_ptr + i
    else:
        pointer = y_ptr + i
    tl.store(pointer, tl.load(z_ptr + i))


def in_turn(x_ptr, y_ptr, z_ptr, n, block: tl.constexpr):
    pointer, other = x_ptr, y_ptr
    for _ in range(n):
        tl.store(pointer, tl.load(z_ptr))
        pointer, other = other, pointer


def renamed(x_ptr, y_ptr, z_ptr, n, block: tl.constexpr):
    z = x_ptr
    if n > 3:
        z = y_ptr
    tl.store(z, tl.load(z_ptr))


FUNCTIONS = [(both, "x"), (in_loop, "xz"), (by_branch, "xy"), (in_turn, "xy"), (renamed, "xy")]


@pytest.mark.parametrize(("function", "written"), FUNCTIONS)
def test_what_a_kernel_writes_follows_from_its_code(function: Any, written: str) -> None:
    types = (("x_ptr", "*i32"), ("y_ptr", "*i32"), ("z_ptr", "*i32"), ("n", "i32"))
    found = written_parameters(triton.jit(function), types, (("block", "16", 16),))
    assert found == {f"{name}_ptr" for name in written}


def either(x_ptr, y_ptr, first: tl.constexpr):
    tl.store(x_ptr if first else y_ptr, 1.0)


def test_an_autotuned_kernel_writes_what_any_of_its_configurations_writes() -> None:
    configs = [triton.Config({"first": first}) for first in (True, False)]
    kernel = triton.autotune(configs, key=[])(triton.jit(either))

    def program(x: Tensor, y: Tensor) -> None:
        kernel[(1,)](x, y)

    nodes = mc.trace(program, torch.randn(2), torch.randn(2)).capture.graph.gm.graph.nodes
    (operator,) = (node.target for node in nodes if node.op == "call_function")
    assert "Tensor(a0!) x_ptr, Tensor(a1!) y_ptr" in str(operator._schema)


@on_gpu
def test_an_autotuned_kernel_is_tuned_in_the_graph() -> None:
    configs = [triton.Config({"block": 32}), triton.Config({"block": 128}, num_warps=2)]
    tuned = triton.autotune(configs, key=["n"])(triton.jit(add_kernel))

    def program(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        tuned[lambda meta: (triton.cdiv(x.numel(), meta["block"]),)](x.cos(), y, x.numel(), 2)
        return y.exp()

    assert_as_eager(mc.compile(program, fullgraph=True), program, torch.randn(1000, device="cuda"))


@on_gpu
def test_an_operator_made_of_kernels_is_in_the_graph() -> None:
    add = triton.jit(add_kernel)

    @torch.library.triton_op("mc_triton::plus_one", mutates_args={})
    def plus_one(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        torch.library.wrap_triton(add)[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), 1, block=64)
        return y

    def program(x: Tensor) -> Tensor:
        return plus_one(x.cos()).exp()

    assert_as_eager(mc.compile(program, fullgraph=True), program, torch.randn(100, device="cuda"))
