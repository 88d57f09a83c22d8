"""Checks of lesson 14. Triton is imported where it is needed: there are machines without it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

import minicompile as mc
from minicompile.codegen.plan import CodeLine, KernelModule, KernelPlan, KernelSource
from minicompile.debug.gpu_assembly import cross_compile
from minicompile.extension import code_generator, kernel_template, plan_rule
from minicompile.lessons.exercise import Lesson, Run
from minicompile.runtime.triton import Tiles, load_kernel

lesson = Lesson("14")

TRITON = {"device_codegen": "triton"}
IMPORTS = """import triton
import triton.language as tl
from triton.language.extra import libdevice
"""
MOST_REGISTERS = 64
BEHIND = 65536
"""Elements behind a tensor that a kernel must neither read nor write."""
UNTOUCHED = -77.0

Function = Callable[..., torch.Tensor]
Rows = Callable[..., None]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def row_max(x: torch.Tensor) -> torch.Tensor:
    return x.amax(-1)


def row_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def normed(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


def triton_kernel(function: Function, *inputs: torch.Tensor) -> KernelSource:
    """The only Triton kernel of a function."""
    mc.reset()
    [kernel] = mc.trace(mc.compile(function, options=TRITON), *inputs).kernels
    return kernel


def kernel_by(plan: KernelPlan, answer: Rows) -> KernelSource:
    """A kernel that calls the answer, made a Triton function by its source."""
    own = textwrap.dedent(inspect.getsource(answer))
    if "raise NotImplementedError" in own:
        raise NotImplementedError
    rows, length = plan.rows, plan.row_length
    text = f"""@triton.jit
def {plan.name}(in_ptr0, out_ptr0, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    {answer.__name__}(in_ptr0, out_ptr0, {rows}, {length}, XBLOCK, RBLOCK)"""
    lines = [CodeLine(line, plan.origins) for line in text.splitlines()]
    prelude = f"{IMPORTS}\n\n@triton.jit\n{own}\n\n"
    return KernelSource(plan.name, "triton", lines, plan, prelude)


def write_kernels_by(answer: Rows) -> None:
    """From now on, inside a check, kernels with a reduction call the answer."""
    from minicompile.codegen.triton import print_triton

    def module(plans: Sequence[KernelPlan]) -> KernelModule:
        made = [kernel_by(p, answer) if p.reduction_ranges else print_triton(p) for p in plans]
        return KernelModule("triton", "\n\n".join(k.prelude + k.text for k in made), made)

    code_generator("triton")(module)


def run_rows(run: Run, answer: Rows, function: Function, x: torch.Tensor, tiles: Tiles) -> int:
    """Run the answer in watched memory, with given tiles and with the compiler's, then in the pipeline.

    Gives the number of elements that it loads. The pipeline runs no answer that touches what lies outside.
    """
    from minicompile.debug.triton_interpreter import interpreter_tiles

    before = triton_kernel(function, x)
    plan, loads = before.plan, list[int]()
    kernel, expected = kernel_by(plan, answer), function(x)
    for chosen in (tiles, interpreter_tiles(plan, {}, plan.rows, plan.row_length)):
        given = f"{answer.__name__} on {list(x.shape)} in tiles of {chosen.x} x {chosen.r}"
        memory = torch.full((x.numel() + BEHIND,), 1e9)
        memory[: x.numel()] = x.flatten()
        result = torch.full((expected.numel() + BEHIND,), UNTOUCHED)
        got = result[: expected.numel()]
        with Watched(memory[: x.numel()], got) as watched:
            load_kernel(kernel, chosen)(memory, result)
        outside = run.seen(watched.outside)
        run.that(
            not outside, given, "programs that stay inside of the rows", ", ".join(outside[:3])
        )
        if outside:
            return 0
        run.close(got.view(expected.shape), expected, given, rtol=1e-5, atol=1e-6)
        loads.append(watched.loaded)
    with mc.scoped():
        write_kernels_by(answer)
        after = triton_kernel(function, x)
        got = mc.compile(function, options=TRITON)(x)
    run.close(got, expected, f"{function.__name__} compiled, {list(x.shape)}", rtol=1e-5, atol=1e-6)
    run.changed(before.prelude + before.text, after.prelude + after.text, "the kernel")
    return loads[0]


class Watched:
    """While kernels are interpreted: elements loaded, and what programs touch outside of two tensors."""

    def __init__(self, source: torch.Tensor, result: torch.Tensor) -> None:
        self.loaded = 0
        self.outside: list[str] = []
        self.source, self.result = source, result

    def note(self, builder: Any, verb: str, tensor: torch.Tensor, lanes: Any) -> None:
        begin = tensor.data_ptr()
        inside = (lanes >= begin) & (lanes < begin + tensor.numel() * tensor.itemsize)
        if count := int((~inside).sum()):
            where = "behind the rows" if (lanes >= begin).all() else "outside of the rows"
            self.outside.append(f"program {builder.grid_idx[0]} {verb} {count} elements {where}")

    def __enter__(self) -> Watched:
        from minicompile.debug import triton_interpreter as interpreter

        watched = self

        class Watching(interpreter.Builder):
            def create_masked_load(self, pointers: Any, mask: Any, *others: Any) -> Any:
                lanes = pointers.data[mask.data]
                watched.loaded += lanes.size
                watched.note(self, "reads", watched.source, lanes)
                return super().create_masked_load(pointers, mask, *others)

            def create_masked_store(
                self, pointers: Any, value: Any, mask: Any, *others: Any
            ) -> Any:
                watched.note(self, "writes", watched.result, pointers.data[mask.data])
                return super().create_masked_store(pointers, value, mask, *others)

        self.patch = mock.patch.object(interpreter, "Builder", Watching)
        self.patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.patch.stop()


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=[(torch.float32, True), (torch.float32, False)],
    hidden=[(torch.float64, True), (torch.bfloat16, True), (torch.int8, False)],
    forbidden=["source", "plan", "cost", "tiles", "kernel_lines"],
)
def loads_are_counted_in_ptx(run: Run, load_bytes: Callable[[Any], list[int]]) -> str:
    """What all loads of all threads read is the block: elements times bytes of each."""
    said = []
    for dtype, aligned in run.cases:
        kernel = triton_kernel(doubled, torch.ones(64, 1000).to(dtype))
        assembly = cross_compile(kernel, tiles=Tiles(1024, 1, 4), aligned=aligned)
        found = run.seen(load_bytes(assembly))
        kind = str(dtype).removeprefix("torch.")
        given = f"load_bytes of a kernel over {kind}, {'' if aligned else 'not '}aligned"
        run.that(isinstance(found, list), given, "a list", type(found).__name__)
        run.same(len(found), assembly.levels["ptx"].count("ld.global"), f"{given}: loads")
        threads = 32 * assembly.tiles.num_warps
        run.same(sum(found) * threads, 1024 * dtype.itemsize, f"{given}: bytes, all threads")
        said.append(f"{len(found)} loads of {found[0]} bytes")
    return ", ".join(said)


@lesson.exercise(
    "ex2",
    points=3,
    level="implement",
    visible=[((8, 6), 4, 8)],
    hidden=[((5, 7), 4, 8), ((3, 33), 2, 64), ((9, 16), 8, 16)],
    forbidden=["print_triton", "max_combine", "row_max"],
)
def tails_are_masked(run: Run, largest_of_rows: Rows) -> str:
    """Rows below zero, and behind them numbers that must neither be read nor written."""
    for shape, x, r in run.cases:
        data = -1 - torch.randn(shape).abs()
        if shape != (8, 6):  # below every number that a masked lane may hold but -inf
            data = 1e30 * data
        run_rows(run, largest_of_rows, row_max, data, Tiles(x, r))
    return "rows and columns end where they should, and amax runs on your kernel"


@lesson.exercise(
    "ex3",
    points=4,
    level="real",
    visible=[((6, 30), 2, 32, 0.0)],
    hidden=[((5, 30), 2, 32, 200.0), ((3, 17), 4, 32, -200.0), ((4, 64), 1, 64, 200.0)],
    forbidden=["print_triton", "softmax"],
)
def softmax_keeps_its_row(run: Run, softmax_rows: Rows) -> str:
    """Large numbers, so that the maximum must be subtracted; each element is loaded once."""
    for shape, x, r, middle in run.cases:
        data = torch.randn(shape) * 5 + middle
        loaded = run_rows(run, softmax_rows, row_softmax, data, Tiles(x, r))
        run.expect(loaded, data.numel(), f"softmax of {list(shape)}: elements loaded")
    return "one load of each element, and softmax runs on your kernel"


@lesson.exercise(
    "ex4",
    points=4,
    level="real",
    visible=[(row_softmax, 8192)],
    hidden=[(row_softmax, 16384), (normed, 4096)],
    forbidden=["choose_tiles", "triton_rules", "clamp"],
)
def tiles_fit_into_registers(run: Run, tiles_for: Callable[..., Any]) -> str:
    """The answer is the rule for tiles; what it gives is compiled for a GPU and run here."""
    said = ""
    for function, length in run.cases:
        x = torch.randn(64, length)
        before = triton_kernel(function, x)
        with mc.scoped():

            @plan_rule("triton:tiles")
            def rule(plan: KernelPlan, options: Any) -> None:
                plan.tiles, plan.num_warps = {"x": 1, "r": 1}, 1
                tiles_for(plan, options)

            kernel = triton_kernel(function, x)
            got = mc.compile(function, options=TRITON)(x)
        plan = kernel.plan
        tiles, warps = run.seen(dict(plan.tiles)), run.seen(plan.num_warps)
        given = f"{function.__name__} of rows of {length} with {tiles}, {warps} warps"
        run.that(warps in (1, 2, 4, 8, 16, 32), given, "1, 2, 4, ... 32 warps", warps)
        for axis, size in tiles.items():
            power = isinstance(size, int) and size > 0 and size & (size - 1) == 0
            run.that(power, f"{given}: tile {axis}", "a power of two", size)
        assembly = cross_compile(kernel)
        registers, spilled = run.seen([assembly.registers, assembly.spilled_bytes])
        run.that(spilled == 0, given, "0 bytes spilled", f"{spilled} bytes spilled")
        run.that(
            registers is not None and registers <= MOST_REGISTERS,
            given,
            f"at most {MOST_REGISTERS} registers",
            f"{registers} registers",
        )
        run.close(got, function(x), given, rtol=1e-4, atol=1e-5)
        built_in = (before.plan.tiles, before.plan.num_warps)
        said = said or f"rows of {length} in at most {MOST_REGISTERS} registers, nothing spilled"
        run.changes.append(f"{built_in} -> {(tiles, warps)}")
    block_runs_with(run, tiles_for)
    return said


def block_runs_with(run: Run, tiles_for: Callable[..., Any]) -> None:
    """The lesson model's block, its plans made with the rule and with tiles of one element."""
    from minicompile.lessons.model import GPT, GPTConfig

    torch.manual_seed(0)
    block = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)).blocks[0].eval()
    h = torch.randn(2, 16, 32)

    def tiles(choose: Callable[..., Any]) -> str:
        mc.reset()
        with torch.no_grad(), mc.scoped():

            @plan_rule("triton:tiles")
            def rule(plan: KernelPlan, options: Any) -> None:
                plan.tiles, plan.num_warps = {"x": 1, "r": 1}, 1
                choose(plan, options)

            plans = mc.trace(mc.compile(block, options=TRITON), h).plans
        return "\n".join(f"{p.name} {p.tiles} {p.num_warps}" for p in plans)

    without = tiles(lambda plan, options: None)
    run.changed(without, tiles(tiles_for), "the tiles of the block's kernels")


@lesson.exercise(
    "ex5",
    points=4,
    level="stretch",
    visible=[((4, 512), 2, 128, 0.0)],
    hidden=[
        ((3, 300), 2, 64, 0.0),
        ((2, 1000), 1, 256, -1000.0),
        ((2, 300), 2, 64, 1000.0),
        ((5, 64), 4, 64, 0.0),
    ],
    forbidden=["print_triton", "associative_scan"],
    without=["plan:triton:reduction"],
)
def softmax_in_two_sweeps(run: Run, online_softmax: Rows) -> str:
    """Rows that don't fit: each element may be loaded twice, not three times."""
    for shape, x, r, middle in run.cases:
        falls = middle > 0  # its largest number comes first, else last
        data = torch.randn(shape).sort(dim=-1, descending=falls).values * 30 + middle
        most = 2 * data.numel()
        loaded = run.seen(run_rows(run, online_softmax, row_softmax, data, Tiles(x, r)))
        what = f"online_softmax of {list(shape)} in tiles of {x} x {r}, elements loaded"
        run.that(loaded <= most, what, f"at most {most}", loaded)
    return "two sweeps over long rows, and softmax runs on your kernel"


LEAST_PROGRAMS, LEAST_PART = 128, 512
"""Of a split reduction: programs, and elements of each."""


def row_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


@lesson.exercise(
    "ex6",
    points=4,
    level="stretch",
    visible=[(row_sum, 1, 2**18)],
    hidden=[
        (row_max, 3, 50_000),
        (row_sum, 150, 40_000),
        (row_sum, 100, 40_000),
        (row_max, 9, 4096),
    ],
    forbidden=["choose_split", "split_reductions"],
    without=["plan:triton:split"],
)
def few_rows_are_shared(run: Run, share: Callable[..., Any]) -> str:
    """Every case has more elements than a row can keep, but the last; many rows need no sharing."""
    said = ""
    for function, rows, length in run.cases:
        x = torch.randn(rows, length)
        [before] = compiled_kernels(function, x)
        with mc.scoped():
            plan_rule("triton:split", before="triton:launches", whole=True)(share)
            after = compiled_kernels(function, x)
            got = mc.compile(function, options=TRITON)(x)
        given = f"{function.__name__} of {rows} x {length}"
        few = before.plan.reduction not in ("none", "persistent") and rows < LEAST_PROGRAMS
        run.expect(len(after), 1 + few, f"{given}: kernels")
        run.close(got, function(x), given, rtol=1e-4, atol=1e-3)
        if few:
            plan = after[0].plan
            programs = run.seen(-(-plan.rows // plan.tiles["x"]))
            for what, least, found in (
                ("programs", LEAST_PROGRAMS, programs),
                ("elements of a part", LEAST_PART, run.seen(plan.row_length)),
            ):
                run.that(found >= least, f"{given}, {what}", f"at least {least}", found)
            run.changed(before.text, after[0].text, "the kernel")
            said = said or f"{programs} programs share {given}"
    return said


def compiled_kernels(function: Function, x: torch.Tensor) -> list[KernelSource]:
    mc.reset()
    return list(mc.trace(mc.compile(function, options=TRITON), x).kernels)


def dense(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu((x + 1) @ w + bias)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.tanh(q @ k.transpose(-1, -2) * 0.5)


@lesson.exercise(
    "ex7",
    points=4,
    level="stretch",
    visible=[(torch.mm, ((32, 32), (32, 32)), (16, 16, 16))],
    hidden=[
        (dense, ((40, 100), (100, 72), (72,)), (32, 16, 64)),
        (scores, ((2, 3, 33, 48), (2, 3, 40, 48)), (16, 32, 16)),
    ],
    forbidden=["ProductPrinter", "matrix_products", "program", "kernel"],
    without=["kernel_template:product"],
)
def products_by_your_template(run: Run, template: Callable[..., Any]) -> str:
    """The answer's kernels in tiles of several steps, then in the lesson model's block."""
    from minicompile.plugins.matrix_products.template import ProductPrinter

    class Answer(ProductPrinter):
        def program(self) -> None:
            template(self, self.names[self.found.total])

    class Nothing(ProductPrinter):
        def program(self) -> None:
            self.line("pass")

    def block_kernels(printer: type[ProductPrinter]) -> list[str]:
        from minicompile.lessons.model import GPT, GPTConfig

        block = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)).blocks[0]
        kernel_template("product")(printer)
        with torch.no_grad():
            made = mc.trace(max_autotuned(block), torch.randn(2, 16, 32)).kernels
        return [kernel.text for kernel in made if kernel.plan.reduction == "product"]

    kernel_template("product")(Answer)
    for function, shapes, (y, x, r) in run.cases:
        given = [torch.randn(shape) for shape in shapes]
        expected = function(*given)
        [kernel] = mc.trace(max_autotuned(function), *given).kernels
        name = f"{function.__name__} of {list(shapes[0])}"
        tensors = [*given, torch.full(expected.shape, UNTOUCHED)]
        load_kernel(kernel, Tiles(x, r, y=y))(*tensors)
        close = {"rtol": 1e-4, "atol": 1e-4}
        run.close(tensors[-1], expected, f"{name}, tiles of {y} x {x} in steps of {r}", **close)
        run.close(max_autotuned(function)(*given), expected, f"{name}, compiled", **close)
    before, after = block_kernels(Nothing), block_kernels(Answer)
    run.changed("\n".join(before), "\n".join(after), "the products of the block")
    return f"{len(after)} products of the model's block run by your template"


def max_autotuned(function: Callable[..., Any]) -> Callable[..., Any]:
    return mc.compile(function, mode="max-autotune", options=TRITON)
