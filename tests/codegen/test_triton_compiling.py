"""Kernels compiled for a GPU, whether or not one is here: every level, its line tables, and the launcher."""

from __future__ import annotations

import contextlib
import importlib.util
import re

import pytest
import torch

from minicompile.codegen.plan import KernelSource
from minicompile.codegen.triton import print_triton
from minicompile.compat import triton_api
from minicompile.debug.gpu_assembly import Assembly, _tool_output, cross_compile
from minicompile.errors import BackendError
from minicompile.ops.table import POINTWISE, result_dtype
from minicompile.options import Options
from minicompile.runtime import triton
from minicompile.runtime.gpu_kernel import (
    GpuKernel,
    Tiles,
    gpu_kernel,
    launcher_text,
    module_text,
    planned_tiles,
)
from minicompile.runtime.triton import CudaKernel, load_kernel
from minicompile.shapes.expr import float_symbol, size_symbol
from tests.codegen.fusing import Program, layer_norm, softmax
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
def normed() -> Assembly:
    return cross_compile(source_of(layer_norm(512, 1024), ("sum1", "sum2", "rstd")))


def test_every_level_is_there_down_to_machine_code(normed):
    assert list(normed.levels) == ["ttir", "ttgir", "llir", "ptx", "sass"]
    assert ".target sm_90" in normed.levels["ptx"]
    assert "LDG" in normed.levels["sass"]
    assert normed.binary.startswith(b"\x7fELF")
    assert normed.registers and normed.spilled_bytes == 0
    assert "registers" in str(normed)
    assert "0x" not in str(normed)


@pytest.mark.parametrize("target", [("cuda", 80), ("cuda", 100), ("hip", "gfx942")], ids=str)
def test_other_gpus_are_targets_too(target):
    assembly = cross_compile(source_of(softmax(64, 256), ("amax", "total")), target)
    assert ("sass" in assembly.levels) == (target[0] == "cuda")
    assert assembly.binary.startswith(b"\x7fELF")


@pytest.mark.parametrize("level", ["ttir", "ttgir", "ptx", "sass"])
def test_instructions_lead_back_to_kernel_lines(normed, level):
    source, numbers = normed.source, normed.kernel_lines(level)
    assert len(numbers) == len(normed.levels[level].splitlines())
    opcodes = {"ttir": r"tt\.(load|store)", "ptx": r"(ld|st)\.global", "sass": "LDG|STG"}
    opcode = opcodes.get(level, opcodes["ttir"])
    lines = zip(normed.levels[level].splitlines(), numbers, strict=True)
    places = [n for text, n in lines if re.search(opcode, text)]
    assert None not in places
    reached = {source.lines[n].text.strip() for n in places if n is not None}
    texts = [line.text.strip() for line in source.lines]
    memory = {text for text in texts if re.search(r"tl\.(load|store)", text)}
    assert len(memory) == 4
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
    """A GPU of which only the driver is missing: kernels compile for real and launches are written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple] = []
        self.bound: list[tuple] = []
        self.compiled: list[GpuKernel] = []
        self.current = 0
        compile_kernel = triton.compile_kernel

        def compile_and_tell(kernel, *facts):
            self.compiled.append(kernel)
            return compile_kernel(kernel, *facts)

        monkeypatch.setattr(triton, "compile_kernel", compile_and_tell)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(triton, "cuda_driver", lambda: self)
        monkeypatch.setattr(
            triton_api, "cuda_launch_state", lambda: (lambda: self.current, lambda device: 99)
        )
        monkeypatch.setattr(torch.cuda, "device", self.on_device)

    def bind(self, *facts):
        self.bound.append(facts)
        version = f"version{len(self.bound)}"
        return lambda *args: self.launches.append((version, *args))

    def kernels(self):
        """What each launch was compiled from."""
        return [
            self.compiled[int(launch[0].removeprefix("version")) - 1] for launch in self.launches
        ]

    def sass(self, number):
        return _tool_output(self.bound[number][0], "nvdisasm", "-c")

    @contextlib.contextmanager
    def on_device(self, index):
        before, self.current = self.current, index
        yield
        self.current = before


def cuda_kernel(source: KernelSource) -> CudaKernel:
    return CudaKernel(gpu_kernel(source, planned_tiles(source.plan)), Options(disk_cache=False))


def test_the_launcher_passes_pointers_grid_and_stream(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    source = copy(5000, "cuda")
    kernel = cuda_kernel(source)
    a, y = torch.empty(5000), torch.empty(5000)
    kernel.launch(a, y)
    block, warps = source.plan.tiles["x"], source.plan.num_warps
    assert gpu.launches == [("version1", -(-5000 // block), 99, a.data_ptr(), y.data_ptr())]
    assert [facts[2:] for facts in gpu.bound] == [(0, 32 * warps, 0, 2, 0, 0, False)]


def test_an_unaligned_pointer_gets_a_version_that_assumes_nothing(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    kernel = cuda_kernel(copy(2**20, "cuda"))
    a, y = torch.empty(2**20 + 1), torch.empty(2**20)
    kernel.launch(a[:-1], y)
    kernel.launch(a[1:], y)
    kernel.launch(a[1:], y)
    assert [launch[0] for launch in gpu.launches] == ["version1", "version2", "version2"]
    assert ["LDG.E.128" in gpu.sass(number) for number in range(2)] == [True, False]


def test_a_symbolic_size_sets_the_grid_and_picks_its_version(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    s0 = size_symbol("s0")
    p = Program(hints={s0: 32})
    p.input("x", (s0, 100))
    p.pointwise("y", (s0, 100), lambda o, i: o.load("x", i[0] * 100 + i[1]))
    source = source_of(p, device="cuda")
    kernel = cuda_kernel(source)
    x = torch.empty(4000, 100)
    for n in (32, 33, 4000):
        kernel.launch(x, x, n)
    block = source.plan.tiles["x"]
    assert [launch[1] for launch in gpu.launches] == [-(-n * 100 // block) for n in (32, 33, 4000)]
    assert [launch[0] for launch in gpu.launches] == ["version1", "version2", "version1"]


def test_a_float_is_passed_as_it_is_and_picks_no_version(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    f0 = float_symbol("f0")
    p = Program(hints={f0: 16.0})
    p.input("x", (4096,))
    p.pointwise("y", (4096,), lambda o, i: o.mul(o.load("x", i[0]), o.index_expr(f0, F32)))
    kernel = cuda_kernel(source_of(p, device="cuda"))
    x = torch.empty(4096)
    for number in (16.0, 0.1):
        kernel.launch(x, x, number)
    assert [launch[-1] for launch in gpu.launches] == [16.0, 0.1]
    assert [launch[0] for launch in gpu.launches] == ["version1", "version1"]
    assert "F2F.F32.F64" in gpu.sass(0)


def test_a_kernel_of_another_device_runs_there(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    kernel = cuda_kernel(copy(device="cuda"))
    gpu.current = 1
    x = torch.empty(4096)
    kernel.launch(x, x)
    assert len(gpu.launches) == 1
    assert gpu.current == 1


def test_nothing_is_launched_for_tensors_without_elements():
    assert "run(" not in launcher_text(copy(0).plan, Tiles(256), 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_kernels_follow_stream_and_alignment():
    source = source_of(
        pointwise(lambda o, i: o.add(o.load("a", i[0]), o.constant(1.0, F32)), inputs=("a",)),
        device="cuda",
    )
    launch = load_kernel(source)
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
    dtype = torch.int32 if name.startswith(("bitwise", "lshift", "rshift")) else F32
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


def test_without_triton_one_sentence_says_what_to_install(monkeypatch):
    source = copy()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for attempt in (lambda: load_kernel(source), lambda: cross_compile(source)):
        with pytest.raises(BackendError, match="pip install triton"):
            attempt()
