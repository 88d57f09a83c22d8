"""What every kernel promises, whatever its language: eager's values, all of them, and no element beyond.

Each case is a loop program beside eager's results. It runs in C; by Triton's interpreter, with rows held at
once and swept in tiles that leave lanes over; and on a GPU if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

import minicompile as mc
from minicompile.runtime.gpu_kernel import Tiles
from minicompile.shapes.expr import FloorDiv, ModularIndexing, float_symbol, size_symbol
from tests.codegen.fusing import Program, softmax
from tests.codegen.kernels import REFERENCE, Case, Kernel, cpp_kernels, run_cpp
from tests.codegen.kernels import special as random
from tests.codegen.triton_running import DEVICES

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
I64, I32, U8, BOOL = torch.int64, torch.int32, torch.uint8, torch.bool

MAKERS: dict[str, Callable[[], Case]] = {}


def case(*rows: Any) -> Callable[[Callable[..., Case]], Callable[..., Case]]:
    """Add a case for each row of arguments, or one without arguments."""

    def add(make: Callable[..., Case]) -> Callable[..., Case]:
        for row in rows or ((),):
            arguments = row if isinstance(row, tuple) else (row,)
            name = " ".join([make.__name__, *map(str, arguments)]).replace("torch.", "")
            MAKERS[name] = lambda arguments=arguments: make(*arguments)
        return make

    return add


# Loops -------------------------------------------------------------------------------------------


@case(1, 7, 1000, 1025)
def plus_one(n: int) -> Case:
    p = Program()
    p.input("x", (n,))
    p.pointwise("y", (n,), lambda o, i: o.add(o.load("x", i[0]), o.constant(1.0, F32)))
    return Case(p, {"x": (x := random(n))}, {"y": x + 1}, tiles=Tiles(64))


@case()
def a_number() -> Case:
    p = Program()
    p.input("x", ())
    p.pointwise("y", (), lambda o, i: o.add(o.load("x", sympy.Integer(0)), o.constant(1.5, F32)))
    return Case(p, {"x": torch.tensor(2.0)}, {"y": torch.tensor(3.5)})


@case((F32, 64, 128), (F64, 70, 45), (BF16, 16, 200), (torch.int8, 70, 45))
def read_across(dtype: torch.dtype, rows: int, columns: int) -> Case:
    """Loads that jump along the inner loop are read in squares."""
    p = Program()
    p.input("x", (columns, rows), dtype)
    p.input("y", (rows, columns), dtype)
    p.input("b", (columns,), dtype)

    def fn(o: Any, i: Any) -> Any:
        both = o.add(o.load("x", rows * i[1] + i[0]), o.load("y", columns * i[0] + i[1]))
        return o.sub(both, o.load("b", i[1]))

    p.pointwise("z", (rows, columns), fn, dtype)
    x, y, b = ((random(*s) * 9).to(dtype) for s in ((columns, rows), (rows, columns), (columns,)))
    wide = torch.float32 if dtype is BF16 else dtype
    z = (x.t().to(wide) + y.to(wide) - b.to(wide)).to(dtype)
    return Case(p, {"x": x, "y": y, "b": b}, {"z": z}, tiles=Tiles(8, y=16))


@case()
def backwards() -> Case:
    p = Program()
    p.input("x", (6, 5, 7))
    p.input("b", (5,))

    def fn(o: Any, i: Any) -> Any:
        place = 209 - i[0] * 35 - i[1] * 7 - i[2]
        return o.mul(o.load("x", place), o.load("b", i[1]))

    p.pointwise("y", (6, 5, 7), fn)
    x, b = random(6, 5, 7), random(5)
    return Case(p, {"x": x, "b": b}, {"y": x.flip(0, 1, 2) * b[:, None]})


@case()
def bools() -> Case:
    p = Program()
    p.input("x", (9,))
    p.input("m", (9,), BOOL)

    def fn(o: Any, i: Any) -> Any:
        return o.logical_xor(o.to_dtype(o.load("x", i[0]), BOOL), o.load("m", i[0]))

    p.pointwise("y", (9,), fn, BOOL)
    x = torch.tensor([0.0, 1, -0.0, 2, math.nan, 0, 0, 5, 1e-40])
    m = torch.arange(9) % 2 == 0
    return Case(p, {"x": x, "m": m}, {"y": x.bool() ^ m})


@case()
def without_elements() -> Case:
    p = Program()
    p.input("x", (0, 4))
    p.pointwise("y", (0, 4), lambda o, i: o.load("x", i[0] * 4 + i[1]))
    return Case(p, {"x": torch.empty(0, 4)}, {"y": torch.empty(0, 4)})


# Indices -----------------------------------------------------------------------------------------


@case()
def a_view_with_division_and_remainder() -> Case:
    p = Program()
    p.input("x", (6, 10))

    def fn(o: Any, i: Any) -> Any:
        place = 10 * ModularIndexing(i[0], 1, 6) + FloorDiv(i[0], sympy.Integer(6))
        return o.load("x", place)

    p.pointwise("y", (60,), fn)
    return Case(p, {"x": (x := random(6, 10))}, {"y": x.t().reshape(60)})


@case()
def divisions_round_down() -> Case:
    p, whole = Program(), sympy.Integer
    quotient = lambda o, i: o.index_expr(FloorDiv(i[0] - 20, whole(7)), I64)  # noqa: E731
    p.pointwise("q", (40,), quotient, I64)

    def digit(o: Any, i: Any) -> Any:
        return o.index_expr(ModularIndexing(i[0] - 20, whole(3), whole(5)), I32)

    p.pointwise("m", (40,), digit, I32)
    n = torch.arange(40) - 20
    return Case(p, {}, {"q": n // 7, "m": (n // 3 % 5).int()})


@case()
def large_index_values() -> Case:
    p = Program()
    p.pointwise("y", (11,), lambda o, i: o.index_expr(i[0] * 1_000_000_000, I64), I64)
    return Case(p, {}, {"y": torch.arange(11) * 1_000_000_000})


@case()
def comparisons_at_every_threshold() -> Case:
    """`16*x0 + x1 >= 32` may be compared as `x0 >= 2`; 31 and 33 must not be."""
    p, results, index = Program(), dict[str, Tensor](), torch.arange(96).view(6, 16)
    for op in ("ge", "gt", "lt", "le"):
        for threshold in (-16, -1, 0, 15, 16, 17, 32, 95, 96):

            def fn(o: Any, i: Any, op: str = op, t: int = threshold) -> Any:
                return o.pointwise(op, o.index_expr(16 * i[0] + i[1], I64), o.constant(t, I64))

            name = p.pointwise(f"{op}_{threshold}".replace("-", "m"), (6, 16), fn, BOOL)
            results[name] = getattr(torch, op)(index, threshold)
    return Case(p, {}, results)


@case()
def padded() -> Case:
    """Masked-off lanes would read before the buffer and behind it."""
    p = Program()
    p.input("x", (6,))

    def pad(o: Any, i: Any) -> Any:
        at = o.index_expr(i[0] - 2, I32)
        inside = o.logical_and(o.ge(at, o.constant(0, I32)), o.lt(at, o.constant(6, I32)))
        return o.masked(inside, lambda ops: ops.load("x", i[0] - 2), -1.0)

    p.pointwise("y", (10,), pad)
    x = random(6)
    return Case(p, {"x": x}, {"y": torch.nn.functional.pad(x, (2, 2), value=-1.0)})


def gather(rows: int, index: list[int]) -> Case:
    p, count = Program(), len(index)
    p.input("table", (rows, 33))
    p.input("index", (count,), I64)

    def fn(o: Any, i: Any) -> Any:
        return o.load("table", o.indirect_indexing(o.load("index", i[0]), rows) * 33 + i[1])

    p.pointwise("y", (count, 33), fn)
    table, places = random(rows, 33), torch.tensor(index)
    legal = [n for n in index if -rows <= n < rows]
    return Case(p, {"table": table, "index": places}, {"y": table[legal]})


@case()
def indices_count_from_the_end() -> Case:
    return gather(7, [0, 6, -1, -7, 3, 3])


@case()
def an_index_outside_its_mask() -> Case:
    p = Program()
    p.input("table", (5,))
    p.input("index", (4,), I64)

    def pick(o: Any, i: Any) -> Any:
        index = o.load("index", i[0])

        def inside(ops: Any) -> Any:
            return ops.load("table", ops.indirect_indexing(index, 5, wrap_negative=False))

        return o.masked(o.ge(index, o.constant(0, I64)), inside, 0.0)

    p.pointwise("y", (4,), pick)
    table, index = random(5), torch.tensor([2, -100, 4, -1])
    y = torch.where(index >= 0, table[index.clamp(min=0)], 0.0)
    return Case(p, {"table": table, "index": index}, {"y": y})


@case(F32, F64, I64, I32)
def scattered_additions(dtype: torch.dtype) -> Case:
    p = Program()
    p.input("index", (50,), I64)
    p.input("x", (50, 3), dtype)
    p.input("target", (6, 3), dtype)

    def where(o: Any, i: Any) -> Any:
        return [o.indirect_indexing(o.load("index", i[0]), 6), i[1]]

    source = lambda o, i: o.load("x", 3 * i[0] + i[1])  # noqa: E731
    p.scatter("y", (6, 3), (50, 3), "target", where, source, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(-6, 6, (50,), generator=generator)
    x = torch.randint(-9, 9, (50, 3), generator=generator).to(dtype)
    memory = torch.arange(18).view(6, 3).to(dtype)
    y = memory.clone().index_put_((index,), x, accumulate=True)
    inputs = {"index": index, "x": x, "target": memory}
    return Case(p, inputs, {"y": y}, tiles=Tiles(16), before={"y": memory})


# Sizes and numbers that are known at a call --------------------------------------------------------


@case(16, 1, 7, 100)
def any_size(n: int) -> Case:
    s0 = size_symbol("s0")
    p = Program(hints={s0: 16})
    p.input("x", (s0, 3))

    def fn(o: Any, i: Any) -> Any:
        place = o.to_dtype(o.index_expr(i[1] * s0 + i[0], I64), F32)
        return o.add(o.load("x", i[1] * 3 + i[0]), place)

    p.pointwise("y", (3, s0), fn)
    x, place = random(n, 3), torch.arange(n) * n + torch.arange(3)[:, None]
    return Case(p, {"x": x}, {"y": x.t() + place.float()}, sizes={"s0": n}, tiles=Tiles(64))


@case((F32, 0.1), (F64, 1 / 3), (F64, -1e-30))
def a_float(dtype: torch.dtype, number: float) -> Case:
    """It arrives in double precision, behind the sizes."""
    s0, f0 = size_symbol("s0"), float_symbol("f0")
    p = Program(hints={s0: 16, f0: 0.25})
    p.input("x", (s0,), dtype)
    p.pointwise("y", (s0,), lambda o, i: o.mul(o.load("x", i[0]), o.index_expr(-f0, dtype)), dtype)
    x = random(16, dtype=dtype)
    return Case(p, {"x": x}, {"y": x * -number}, sizes={"s0": 16, "f0": number}, tiles=Tiles(64))


# Rows --------------------------------------------------------------------------------------------


@case(*((r, c, d) for r, c in ((9, 1), (9, 7), (9, 300), (5, 37)) for d in (F32, BF16, F16)))
def softmax_rows(rows: int, columns: int, dtype: torch.dtype) -> Case:
    x = random(rows, columns, dtype=dtype) * 5
    x[2, 0], x[1, 1 % columns] = -math.inf, math.nan
    p = softmax(rows, columns, dtype)
    out = {"softmax": x.softmax(1)}
    return Case(p, {"x": x}, out, ("amax", "total"), close={}, tiles=Tiles(4, 64))


@case()
def what_lacks_an_axis_counts_for_every_element() -> Case:
    p = Program()
    p.input("b", (7,))
    p.input("x", (3,))
    p.reduce("same_rows", (3,), (7,), "sum", lambda o, i, r: o.load("b", r[0]))
    p.reduce("same_columns", (3,), (7,), "sum", lambda o, i, r: o.load("x", i[0]))
    p.reduce("ones", (3,), (7,), "sum", lambda o, i, r: o.constant(1.0, F32))
    b, x = random(7), random(3)
    results = {"same_rows": b.sum().expand(3), "same_columns": x * 7, "ones": torch.full((3,), 7.0)}
    return Case(p, {"b": b, "x": x}, results, close={}, tiles=Tiles(2, 4))


@case()
def a_second_sum_over_what_the_first_made() -> Case:
    p = Program()
    p.input("x", (4, 300))
    p.reduce("s", (4,), (300,), "sum", lambda o, i, r: o.load("x", i[0] * 300 + r[0]))

    def fn(o: Any, i: Any) -> Any:
        return o.add(o.load("x", i[0] * 300 + i[1]), o.load("s", i[0]))

    p.pointwise("y", (4, 300), fn)
    p.reduce("t", (4,), (300,), "sum", lambda o, i, r: o.load("y", i[0] * 300 + r[0]))
    x = random(4, 300)
    y = x + x.sum(1, keepdim=True)
    close = {"rtol": 1e-4, "atol": 1e-3}
    return Case(p, {"x": x}, {"y": y, "t": y.sum(1)}, ("s",), close=close, tiles=Tiles(4, 64))


@case("sum", "prod")
def nothing_gives_the_identity(kind: str) -> Case:
    p = Program()
    p.input("x", (4, 0))
    p.reduce("y", (4,), (0,), kind, lambda o, i, r: o.load("x", r[0]))
    return Case(p, {"x": torch.empty(4, 0)}, {"y": torch.full((4,), float(kind == "prod"))})


@case("middle", "all", "outer two")
def over(dims: str) -> Case:
    x, p = random(3, 40, 5), Program()
    p.input("x", (3, 40, 5))
    load = lambda o, a, b, c: o.load("x", a * 200 + b * 5 + c)  # noqa: E731
    if dims == "middle":
        p.reduce("y", (3, 5), (40,), "sum", lambda o, i, r: load(o, i[0], r[0], i[1]))
        return Case(p, {"x": x}, {"y": x.sum(1)}, close={}, tiles=Tiles(1, 32))
    if dims == "all":
        p.reduce("y", (), (3, 40, 5), "sum", lambda o, i, r: load(o, *r))
        return Case(p, {"x": x}, {"y": x.sum()}, close={}, tiles=Tiles(1, 32))
    p.reduce("y", (40,), (3, 5), "argmax", lambda o, i, r: load(o, r[0], i[0], r[1]), I64)
    expected = x.transpose(0, 1).reshape(40, 15).argmax(1)
    return Case(p, {"x": x}, {"y": expected}, tiles=Tiles(1, 32))


@case(*((d, n) for d in (F32, F64, I64, U8) for n in (2, 7, 64, 300)))
def scans(dtype: torch.dtype, length: int) -> Case:
    """Running sums and products of rows."""
    p, x = Program(), rows_with_edges(dtype, length)
    p.input("x", (7, length), dtype)
    results = {"sum": x.cumsum(1).to(dtype), "prod": x.cumprod(1).to(dtype)}
    for kind in results:
        p.scan(kind, (7, length), 1, kind, lambda o, i: o.load("x", i[0] * length + i[1]), dtype)
    signed = ("sum",) if dtype.is_floating_point else ()
    return Case(p, {"x": x}, results, close={}, tiles=Tiles(4, 64), signed=signed)


@case((4, 1), (4, 100), (3, 1000))
def softmax_of_any_size(rows: int, columns: int) -> Case:
    s0, s1 = size_symbol("s0"), size_symbol("s1")
    p, x = softmax(s0, s1, hints={s0: 8, s1: 64}), random(rows, columns)
    sizes = {"s0": rows, "s1": columns}
    return Case(p, {"x": x}, {"softmax": x.softmax(1)}, ("amax", "total"), sizes, close={})


# Every reduction of every dtype --------------------------------------------------------------------


def rows_with_edges(dtype: torch.dtype, length: int) -> Tensor:
    """Rows with ties, NaN, infinities, and extremes of the dtype."""
    generator = torch.Generator().manual_seed(length)
    if dtype.is_floating_point:
        x = torch.randint(-9, 9, (7, length), generator=generator).to(dtype) / 8
        x[1], x[4], x[5] = -math.inf, 0.0, -0.0
        x[2, length // 2], x[3, length // 3 :: 2], x[6, length * 2 // 3 :] = (
            math.nan,
            math.inf,
            math.nan,
        )
        x[5, 3::2] = 0.0
        return x
    x = torch.randint(0, 4, (7, length), generator=generator).to(dtype)
    info = None if dtype is BOOL else torch.iinfo(dtype)
    x[1], x[2] = (False, True) if info is None else (info.min, info.max)
    return x


def kinds_of(dtype: torch.dtype) -> Iterator[str]:
    """Eager's product on the CPU rounds to half types after every factor: not ours."""
    for kind in REFERENCE:
        if (dtype is BOOL) == (kind in ("any", "all")) and (dtype, kind) != (BF16, "prod"):
            yield kind


LENGTHS = (1, 7, 64, 300, 1100, 9000)


@case(
    *(
        (d, n, a)
        for d in (F32, F64, BF16, I64, I32, U8, BOOL)
        for n in LENGTHS
        for a in (False, True)
    )
)
def reductions(dtype: torch.dtype, length: int, across: bool) -> Case:
    """Along rows, or `across` them; what is reduced is read as it is, and computed: doubled."""
    p, x = Program(), rows_with_edges(dtype, length)
    p.input("x", (length, 7) if across else (7, length), dtype)
    results = {}
    for kind in kinds_of(dtype):
        results[kind] = REFERENCE[kind](x)

        def fn(o: Any, i: Any, r: Any) -> Any:
            return o.load("x", r[0] * 7 + i[0] if across else i[0] * length + r[0])

        p.reduce(kind, (7,), (length,), kind, fn, results[kind].dtype)
        if dtype in (F32, F64) and kind != "prod":
            results[f"{kind}2"] = REFERENCE[kind](x + x)
            doubled = lambda o, i, r, fn=fn: o.add(fn(o, i, r), fn(o, i, r))  # noqa: E731
            p.reduce(f"{kind}2", (7,), (length,), kind, doubled, results[kind].dtype)
    rough = 1e-2 if dtype is BF16 else 1e-5
    inputs = {"x": x.t().contiguous() if across else x}
    return Case(p, inputs, results, close={"rtol": rough, "atol": rough}, tiles=Tiles(4, 64))


# The table is run ----------------------------------------------------------------------------------


def is_long(name: str) -> bool:
    """Every reduction of every dtype; others are always run."""
    return name.startswith("reductions") and "float32 300" not in name


def named(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=[pytest.mark.long] * is_long(n), id=n) for n in names]


@pytest.fixture(scope="module")
def in_c(request: pytest.FixtureRequest) -> dict[str, Kernel]:
    """The kernels of all selected cases, built together."""
    items = [i for i in request.session.items if getattr(i, "originalname", "") == "test_in_c"]
    return cpp_kernels({(n := i.callspec.params["name"]): MAKERS[n]() for i in items})


@pytest.mark.parametrize("name", named(MAKERS))
def test_in_c(name: str, in_c: dict[str, Kernel]) -> None:
    MAKERS[name]().check(in_c[name])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", named(MAKERS))
def test_in_triton(name: str, device: str) -> None:
    found = MAKERS[name]()
    for way in ("persistent", "looped") if found.program.fused().reduction_ranges else ("",):
        found.check(found.triton(way, device), device)


@pytest.mark.parametrize("bad", [[7], [0, -8], [1, 2**40]], ids=str)
@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_an_index_out_of_range_is_an_error_with_a_line(language: str, bad: list[int]) -> None:
    found = gather(7, bad)
    with pytest.raises(IndexError, match=r"out of range in a dimension of size 7.*user.py"):
        memory = {**found.inputs, "y": torch.empty(len(bad), 33)}
        found.triton()(memory) if language == "triton" else run_cpp(found.program.plan(), memory)


def test_an_index_into_nothing_is_left_to_eager() -> None:
    fn = lambda x, i: x[i] + 1  # noqa: E731
    call, x, none = mc.compile(fn), torch.randn(0, 3), torch.zeros(0, dtype=torch.int64)
    assert call(x, none).shape == (0, 3)
    with pytest.raises(IndexError):
        call(x, torch.zeros(1, dtype=torch.int64))
