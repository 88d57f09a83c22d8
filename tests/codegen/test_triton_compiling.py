"""Kernels compiled for a GPU, whether or not one is here: every level, its line tables, and launches."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch

from minicompile.codegen.plan import KernelModule, KernelSource
from minicompile.codegen.triton import print_triton
from minicompile.debug.gpu_assembly import Assembly, cross_compile
from minicompile.ops.table import POINTWISE, result_dtype
from minicompile.options import Options
from minicompile.runtime import load, triton
from minicompile.runtime.gpu_kernel import GpuKernel, module_text, planned_tiles
from minicompile.runtime.triton import load_kernel
from tests.codegen.fusing import Program, softmax
from tests.codegen.triton_running import source_of

F32 = torch.float32


def pointwise(fn, n=4096, inputs=("a", "b", "c")) -> Program:
    p = Program()
    for name in inputs:
        p.input(name, (n,))
    p.pointwise("y", (n,), fn)
    return p


def copy(n: int = 4096, device: str = "cpu") -> KernelSource:
    return source_of(pointwise(lambda o, i: o.load("a", i[0]), n, ("a",)), device=device)


@pytest.fixture(scope="module")
def rows() -> Assembly:
    return cross_compile(source_of(softmax(512, 1024), ("amax", "total")))


def test_every_level_is_there_down_to_machine_code(rows):
    assert list(rows.levels) == ["ttir", "ttgir", "llir", "ptx", "sass"]
    assert ".target sm_90" in rows.levels["ptx"]
    assert "LDG" in rows.levels["sass"]
    assert rows.binary.startswith(b"\x7fELF")
    assert rows.registers and rows.spilled_bytes == 0
    assert "registers" in str(rows)
    assert "0x" not in str(rows)


@pytest.mark.parametrize("target", [("cuda", 80), ("cuda", 100), ("hip", "gfx942")], ids=str)
def test_other_gpus_are_targets_too(target):
    assembly = cross_compile(source_of(softmax(64, 256), ("amax", "total")), target)
    assert ("sass" in assembly.levels) == (target[0] == "cuda")
    assert assembly.binary.startswith(b"\x7fELF")


@pytest.mark.parametrize("level", ["ttir", "ttgir", "ptx", "sass"])
def test_instructions_lead_back_to_kernel_lines(rows, level):
    source, numbers = rows.source, rows.kernel_lines(level)
    assert len(numbers) == len(rows.levels[level].splitlines())
    opcodes = {"ttir": r"tt\.(load|store)", "ptx": r"(ld|st)\.global", "sass": "LDG|STG"}
    opcode = opcodes.get(level, opcodes["ttir"])
    lines = zip(rows.levels[level].splitlines(), numbers, strict=True)
    places = [n for text, n in lines if re.search(opcode, text)]
    assert None not in places
    reached = {source.lines[n].text.strip() for n in places if n is not None}
    texts = [line.text.strip() for line in source.lines]
    memory = {text for text in texts if re.search(r"tl\.(load|store)", text)}
    assert len(memory) == 2
    assert memory <= reached


def test_division_and_root_are_ieee_and_products_stay_apart_from_sums():
    p = pointwise(
        lambda o, i: o.add(
            o.mul(o.load("a", i[0]), o.load("b", i[0])),
            o.truediv(o.sqrt(o.load("c", i[0])), o.load("b", i[0])),
        )
    )
    ptx = cross_compile(source_of(p)).levels["ptx"]
    assert "div.rn.f32" in ptx
    assert "sqrt.rn.f32" in ptx
    assert "fma" not in ptx
    assert "div.full" not in ptx


def test_aligned_pointers_give_wide_loads_and_others_do_not():
    source = copy(2**20)
    assert "ld.global.v4" in cross_compile(source).levels["ptx"]
    assert "ld.global.v4" not in cross_compile(source, aligned=False).levels["ptx"]


@pytest.mark.long
@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_rows_of_32768_stay_in_registers(dtype, target):
    source = source_of(softmax(4096, 32768, dtype), ("amax", "total"))
    assert source.plan.reduction == "persistent"
    assert cross_compile(source, ("cuda", target)).spilled_bytes == 0
    assert source_of(softmax(4096, 32800, dtype), ("amax", "total")).plan.reduction != "persistent"


def test_index_checks_survive_compilation_and_unchecked_indices_cost_none():
    def ptx(check: bool) -> str:
        p = Program()
        p.input("table", (9,))
        p.input("index", (64,), torch.int64)

        def pick(o, i):
            return o.load("table", o.indirect_indexing(o.load("index", i[0]), 9, check=check))

        p.pointwise("y", (64,), pick)
        return cross_compile(source_of(p)).levels["ptx"]

    assert "__assertfail" in ptx(check=True)
    assert "__assertfail" not in ptx(check=False)


class FakeGpu:
    """A GPU that launches nothing: what is compiled is written down, and by which version each launch is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[tuple[GpuKernel, tuple[str, ...]]] = []
        self.launches: list[tuple] = []
        monkeypatch.setattr(triton, "compile_kernel", self.compile)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)

    def load(self, source):
        return triton.triton_launcher(source, planned_tiles(source.plan))

    def compile(self, kernel, divisible, target):
        self.compiled.append((kernel, divisible))
        number = len(self.compiled)
        return Launches(lambda grid: lambda *given: self.launches.append((number, *grid, *given)))


class Launches:
    def __init__(self, at):
        self.at = at

    def __getitem__(self, grid):
        return self.at(grid)


def test_a_launch_passes_grid_arguments_and_tiles(monkeypatch):
    gpu, source = FakeGpu(monkeypatch), copy(5000, "cuda")
    a, y = torch.empty(5000), torch.empty(5000)
    gpu.load(source)(a, y)
    block = source.plan.tiles["x"]
    assert gpu.launches == [(1, -(-5000 // block), 1, 1, a, y, block)]


def test_an_unaligned_pointer_gets_a_version_that_assumes_nothing(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    launch, a, y = gpu.load(copy(4096, "cuda")), torch.empty(4097), torch.empty(4096)
    for given in (a[:-1], a[1:], a[1:]):
        launch(given, y)
    assert [launch[0] for launch in gpu.launches] == [1, 2, 2]
    assert [facts for _, facts in gpu.compiled] == [("in_ptr0", "out_ptr0"), ("out_ptr0",)]


def test_nothing_is_launched_for_tensors_without_elements(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    gpu.load(copy(0, "cuda"))(torch.empty(0), torch.empty(0))
    assert gpu.launches == []


def test_kernels_on_cpu_tensors_are_interpreted_beside_those_of_a_gpu(monkeypatch):
    """With `device_codegen="triton"` a module has both; the driver would take a CPU's address."""
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    here, there = copy(4), copy(4, "cuda")
    there.name += "0"
    options = Options(plugins=())
    found = load.load_triton(KernelModule("triton", "", [here, there]), options)()
    x, y = torch.arange(4.0), torch.empty(4)
    found[here.name](x, y)
    assert y.equal(x) and gpu.launches == []
    found[there.name](x, y)
    assert len(gpu.launches) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_kernels_follow_stream_and_alignment():
    follow_stream_and_alignment(load_kernel)


def follow_stream_and_alignment(load):
    source = source_of(
        pointwise(lambda o, i: o.add(o.load("a", i[0]), o.constant(1.0, F32)), inputs=("a",)),
        device="cuda",
    )
    launch = load(source)
    memory = torch.randn(4097, device="cuda")
    stream = torch.cuda.Stream()
    for a in (memory[:-1], memory[1:]):
        y = torch.empty(4096, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch(a, y)
        stream.synchronize()
        assert torch.equal(y, a + 1)
    graph, y = torch.cuda.CUDAGraph(), torch.zeros(4096, device="cuda")
    with torch.cuda.graph(graph):
        launch(memory[:-1], y)
    assert (y == 0).all()
    graph.replay()
    assert torch.equal(y, memory[:-1] + 1)


def test_equal_kernels_at_different_places_compile_to_the_same_module():
    first, second = (
        print_triton(softmax(64, 256).plan(("amax", "total"), "triton", position=n))
        for n in (3, 18)
    )
    assert first.name != second.name
    assert module_text(first) == module_text(second)


ONE = [n for n, spec in POINTWISE.items() if spec.arity < 2]
TWO = [n for n, spec in POINTWISE.items() if spec.arity == 2]


@pytest.mark.long
@pytest.mark.parametrize(
    "name, number", [(n, None) for n in ONE] + [(n, place) for place in (0, 1) for n in TWO]
)
def test_every_operation_compiles_for_a_gpu(name, number):
    """The interpreter runs some functions that a GPU's library has under another name, or not at all; and it
    minds less whether an operand is one number. `number`: which is."""
    dtype = torch.int32 if POINTWISE[name].result == "int" else F32
    compile_operation(name, torch.int64 if name.startswith("rand") else dtype, number)
    if name in ("add", "pow", "floordiv", "remainder", "fmod", "truncdiv"):
        compile_operation(name, torch.int64, number)


def compile_operation(name: str, dtype: torch.dtype, number: int | None) -> None:
    p = Program()
    for buffer in ("a", "b"):
        p.input(buffer, (4096,), dtype)
    operands = ("a", "b")[: POINTWISE[name].arity]
    result = result_dtype(name, (dtype,) * len(operands))

    def fn(ops, index):
        values = [ops.load(buffer, index[0]) for buffer in operands]
        if number is not None:
            values[number] = ops.constant(3, dtype)
        return ops.pointwise(name, *values)

    p.pointwise("y", (4096,), fn, result)
    assert "st.global" in cross_compile(source_of(p)).levels["ptx"]
