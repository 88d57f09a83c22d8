"""GPU kernels on their way to the driver: side by side, kept on disk, launched. A driver of ours stands in
for NVIDIA's and writes down what it is asked."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from minicompile.codegen.plan import CodeLine, KernelSource
from minicompile.codegen.triton import print_triton
from minicompile.codegen.triton_rules import LARGEST_BLOCK
from minicompile.compat import triton_api
from minicompile.debug import gpu_assembly as debug
from minicompile.errors import BackendError
from minicompile.ops.build import load_extension
from minicompile.options import Options, child_environment
from minicompile.plugins.fast_launcher import launch as fast
from minicompile.plugins.fast_launcher.launch import (
    CUDA_LAUNCH,
    CudaKernel,
    LaunchedKernel,
    launched_kernel,
    launched_kernels,
    launcher_text,
    load_fast,
    start_kernels,
)
from minicompile.runtime.gpu_kernel import Tiles, needs_int64, planned_tiles
from tests.codegen.fusing import Program, softmax
from tests.codegen.test_triton_compiling import copy, follow_stream_and_alignment
from tests.codegen.test_varying_sizes import S0, scaled, scaled_by_float
from tests.codegen.triton_running import source_of

DRIVER = r"""
#include <stdio.h>
#include <stdint.h>
static void* current;
int cuGetErrorString(int code, const char** text) { *text = "a reason"; return 0; }
int cuCtxGetCurrent(void** context) { *context = current; return 0; }
int cuCtxSetCurrent(void* context) { current = context; return 0; }
int cuDevicePrimaryCtxRetain(void** made, int device) { *made = (void*)(intptr_t)(device + 1); return 0; }
int cuModuleLoadData(void** module, const void* code) { return *(const char*)code == '!' ? 200 : 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) { *function = (void*)7; return 0; }
int cuFuncGetAttribute(int* value, int which, void* function) { *value = which == 0 ? 256 : 0; return 0; }
int cuFuncSetAttribute(void* f, int which, int value) { printf("set %d %d\n", which, value); return 0; }
int cuFuncSetCacheConfig(void* function, int config) { return 0; }
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                   unsigned shared, void* stream, void** arguments, void** extra) {
    printf("launch %p %u %u %u, %u %u %u, ", function, x, y, z, tx, ty, tz);
    printf("%u, %p, %p:", shared, stream, current);
    printf(" %llx %d %g", *(unsigned long long*)arguments[0], *(int*)arguments[1], *(double*)arguments[2]);
    printf(" %p %p\n", *(void**)arguments[3], *(void**)arguments[4]);
    fflush(stdout);
    return x == 13 ? 700 : 0;
}
"""

PROGRAM = """
import sys
import threading
import time
from minicompile.ops.build import load_extension
from minicompile.plugins.fast_launcher.launch import CUDA_LAUNCH
extension = load_extension(CUDA_LAUNCH)
extension.open(sys.argv[1])
launch = extension.bind(b"code", "kernel", 1, 128, 50000, 1, 1, 1, False)
launch(5, 99, 0x7F0000001000, -3, 0.5)
launch(0, 99, 1, 2, 0.5)
def complain(fn, *arguments):
    try: fn(*arguments)
    except Exception as error: print(type(error).__name__, error, flush=True)
complain(launch, 1, 99, 1, 2**31, 0.5)
complain(launch, 2**31, 99, 1, 2, 0.5)
complain(launch, 1, 99, 1, 2)
complain(launch, 1, 99, None, 2, 0.5)
complain(launch, 13, 99, 1, 2, 0.5)
complain(extension.bind, b"!", "kernel", 1, 128, 0, 1, 1, 1, False)
complain(extension.bind, b"code", "kernel", 1, 512, 0, 1, 1, 1, False)
extension.bind(b"code", "kernel", 1, 128, 0, 1, 1, 1, True)(1, 99, 1, 2**31, 0.5)
complain(extension.open, "no.such.so")
"""

needs_extension = pytest.mark.skipif(
    load_extension(CUDA_LAUNCH) is None, reason="no C compiler, or no headers of Python"
)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


@pytest.mark.long
@needs_extension
def test_a_launch_passes_grid_stream_and_arguments_to_the_driver(tmp_path: Path) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    command = [sys.executable, "-c", PROGRAM, str(library)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=child_environment()
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == [
        "set 8 50000",
        "launch 0x7 5 1 1, 128 1 1, 50000, 0x63, 0x2: 7f0000001000 -3 0.5 (nil) (nil)",
    ]
    assert lines[2:6] == [
        "OverflowError size 2147483648 of a kernel with 32-bit sizes",
        "OverflowError 2147483648 programs",
        "TypeError the kernel takes 3 arguments, not 2",
        "TypeError 'NoneType' object cannot be interpreted as an integer",
    ]
    assert lines[7:] == [
        "RuntimeError CUDA error 700: a reason",
        "RuntimeError CUDA error 200: a reason",
        "RuntimeError 512 threads, and registers for 256",
        "launch 0x7 1 1 1, 128 1 1, 0, 0x63, 0x2: 1 -2147483648 0.5 (nil) (nil)",
        "OSError no.such.so: cannot open shared object file: No such file or directory",
    ]


class Gpu:
    """A GPU of which only the driver is missing: kernels compile for real and launches are written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for thread in threading.enumerate():
            if thread.name.startswith("minicompile triton"):
                thread.join()  # an earlier test's, which would bind its kernel here
        self.launches: list[tuple[Any, ...]] = []
        self.bound: list[tuple[Any, ...]] = []
        self.compiled: list[LaunchedKernel] = []
        self.current = 0
        compile_kernel = fast.compile_kernel

        def compile_and_tell(kernel: LaunchedKernel, *facts: Any) -> Any:
            self.compiled.append(kernel)
            return compile_kernel(kernel, *facts)

        monkeypatch.setattr(fast, "compile_kernel", compile_and_tell)
        monkeypatch.setattr(fast, "cuda_driver", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", self.on_device)
        state = (lambda: self.current, lambda device: 99)
        monkeypatch.setattr(triton_api, "cuda_launch_state", lambda: state)
        for name, result in (
            ("get_device_capability", (9, 0)),
            ("current_device", 0),
            ("set_device", None),
            ("get_device_name", "a GPU"),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda *args, result=result: result)

    def bind(self, *facts: Any) -> Any:
        if facts[0] == b"broken":
            raise RuntimeError("CUDA error 200: invalid image")
        self.bound.append(facts)
        version = f"version{len(self.bound)}"
        return lambda *args: self.launches.append((version, *args))

    def kernels(self) -> list[LaunchedKernel]:
        """What each launch was compiled from."""
        return [
            self.compiled[int(launch[0].removeprefix("version")) - 1] for launch in self.launches
        ]

    def sass(self, number: int) -> str:
        return debug._tool_output(self.bound[number][0], "nvdisasm", "-c")

    @contextlib.contextmanager
    def on_device(self, index: int) -> Any:
        before, self.current = self.current, index
        yield
        self.current = before


def added(number: float, n: int = 4096, position: int = 0) -> KernelSource:
    p = Program()
    p.input("x", (n,))
    p.pointwise("y", (n,), lambda o, i: o.add(o.load("x", i[0]), o.constant(number, torch.float32)))
    plan = p.plan((), "triton", position=position)
    plan.device = torch.device("cuda", 0)
    return print_triton(plan)


@needs_triton
def test_equal_kernels_compile_once_and_all_come_back(monkeypatch, tmp_path) -> None:
    gpu = Gpu(monkeypatch)
    sources = [added(number, position=i) for i, number in enumerate((1.0, 2.0, 1.0))]
    options = Options(cache_dir=str(tmp_path), disk_cache=False)
    found = start_kernels(launched_kernels(sources), options)()
    assert list(found) == [source.name for source in sources]
    assert found[sources[0].name] is found[sources[2].name] is not found[sources[1].name]
    assert len(gpu.compiled) == len(gpu.bound) == 2
    assert not list(tmp_path.rglob("*.cubin"))


@needs_triton
def test_kernels_are_parsed_one_after_the_other(monkeypatch, tmp_path) -> None:
    """Before Python 3.13 a parser that runs beside another may fail."""
    Gpu(monkeypatch)
    monkeypatch.setattr(fast.os, "cpu_count", lambda: 4)
    parse, at_work, most = ast.parse, [], []

    def slowly(*args: Any, **kwargs: Any) -> ast.AST:
        at_work.append(None)
        most.append(len(at_work))
        time.sleep(0.005)
        try:
            return parse(*args, **kwargs)
        finally:
            at_work.pop()

    monkeypatch.setattr(ast, "parse", slowly)
    start_kernels(
        launched_kernels([added(float(n), position=n) for n in range(4)]), Options(disk_cache=False)
    )()
    assert len(most) >= 4
    assert max(most) == 1


@needs_triton
def test_a_kernel_on_disk_is_loaded_and_a_damaged_one_compiled_again(monkeypatch, tmp_path) -> None:
    gpu, options = Gpu(monkeypatch), Options(cache_dir=str(tmp_path))

    def load(source: KernelSource) -> int:
        """How often it was compiled."""
        before = len(gpu.compiled)
        start_kernels(launched_kernels([source]), options)()
        return len(gpu.compiled) - before

    assert load(added(1.0)) == 1
    assert load(added(1.0, position=4)) == 0
    assert gpu.bound[0] == gpu.bound[1]
    assert load(added(2.0)) == 1
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert load(added(1.0)) == 1
    kept = sorted((tmp_path / "triton").glob("*.cubin"))
    assert len(kept) == 3
    for file in kept:
        content = bytearray(file.read_bytes())
        content[40] ^= 1
        file.write_bytes(content)
    assert load(added(1.0)) == load(added(2.0)) == 1
    assert load(added(1.0)) == 0


@needs_extension
def test_without_a_driver_one_sentence_says_so(monkeypatch) -> None:
    class Extension:
        def open(self, name: str) -> None:
            raise OSError(f"{name}: no such file")

    monkeypatch.setattr(fast, "load_extension", lambda source: Extension())
    with pytest.raises(BackendError, match=r"driver.*libcuda"):
        fast._cuda_driver.__wrapped__()
    monkeypatch.setattr(fast, "load_extension", lambda source: None)
    with pytest.raises(BackendError, match=r"C compiler.*headers"):
        fast._cuda_driver.__wrapped__()


def cuda_kernel(source: KernelSource) -> CudaKernel:
    return CudaKernel(
        launched_kernel(source, planned_tiles(source.plan)), Options(disk_cache=False)
    )


def test_the_launcher_passes_pointers_grid_and_stream(monkeypatch):
    gpu = Gpu(monkeypatch)
    source = copy(5000, "cuda")
    kernel = cuda_kernel(source)
    a, y = torch.empty(5000), torch.empty(5000)
    kernel.launch(a, y)
    block, warps = source.plan.tiles["x"], source.plan.num_warps
    assert gpu.launches == [("version1", -(-5000 // block), 99, a.data_ptr(), y.data_ptr())]
    assert [facts[2:] for facts in gpu.bound] == [(0, 32 * warps, 0, 2, 0, 0, False)]


def test_an_unaligned_pointer_gets_a_version_that_assumes_nothing(monkeypatch):
    gpu = Gpu(monkeypatch)
    kernel = cuda_kernel(copy(2**20, "cuda"))
    a, y = torch.empty(2**20 + 1), torch.empty(2**20)
    kernel.launch(a[:-1], y)
    kernel.launch(a[1:], y)
    kernel.launch(a[1:], y)
    assert [launch[0] for launch in gpu.launches] == ["version1", "version2", "version2"]
    assert ["LDG.E.128" in gpu.sass(number) for number in range(2)] == [True, False]


def test_a_kernel_of_another_device_runs_there(monkeypatch):
    gpu = Gpu(monkeypatch)
    kernel = cuda_kernel(copy(device="cuda"))
    gpu.current = 1
    x = torch.empty(4096)
    kernel.launch(x, x)
    assert len(gpu.launches) == 1
    assert gpu.current == 1


def test_nothing_is_launched_for_tensors_without_elements():
    assert "run(" not in launcher_text(copy(0).plan, Tiles(256), 0)


def test_a_launch_picks_the_tile_of_its_row(monkeypatch) -> None:
    gpu = Gpu(monkeypatch)
    kernel = cuda_kernel(source_of(softmax(640, S0, hints={S0: 1024}), ("amax", "total"), "cuda"))
    x = torch.empty(640, 1024)
    for n in (1024, 1000, 513, 512, 40):
        kernel.launch(x, x, n)
    constants = (kernel.constants.values() for kernel in gpu.kernels())
    x_block, r_block = zip(*constants, strict=True)
    assert r_block == (1024, 1024, 1024, 512, 64)
    assert [launch[1] for launch in gpu.launches] == [math.ceil(640 / n) for n in x_block]
    assert x_block[0] * 1024 == x_block[3] * 512
    versions = [launch[0] for launch in gpu.launches]
    assert versions[1] == versions[2]
    assert len(set(versions)) == 4


def test_a_launch_has_int64_indices_from_where_int32_end(monkeypatch) -> None:
    gpu = Gpu(monkeypatch)
    source = source_of(scaled(), device="cuda")
    kernel = cuda_kernel(source)
    assert source.plan.index_dtype is torch.int32
    x = torch.empty(1)
    last = (2**31 - LARGEST_BLOCK - 1) // 100
    for n in (32, last, last + 1, 2**40):
        assert needs_int64(source.plan, {S0: n}) == (n > last)
        kernel.launch(x, x, n)
    types = [kernel.types["s0"] for kernel in gpu.kernels()]
    assert types == ["i32", "i32", "i64", "i64"]
    assert [facts[-1] for facts in gpu.bound] == [
        kernel.types["s0"] == "i64" for kernel in gpu.compiled
    ]


def test_floats_follow_sizes(monkeypatch) -> None:
    gpu = Gpu(monkeypatch)
    kernel = cuda_kernel(source_of(scaled_by_float(), device="cuda"))
    x = torch.empty(64)
    for n in (64, 40, 41):
        kernel.launch(x, x, n, 0.25)
    assert [launch[5:] for launch in gpu.launches] == [(64, 0.25), (40, 0.25), (41, 0.25)]
    assert [facts[5:] for facts in gpu.bound] == [(2, 1, 1, False)] * 2
    types = ["*fp32", "*fp32", "i32", "fp64"]
    assert all(list(found.types.values()) == types for found in gpu.compiled)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_kernels_follow_stream_and_alignment():
    follow_stream_and_alignment(load_fast)


@needs_triton
def test_what_goes_wrong_in_one_kernel_is_raised_and_the_rest_is_let_be(
    monkeypatch, tmp_path
) -> None:
    gpu, options = Gpu(monkeypatch), Options(cache_dir=str(tmp_path))
    monkeypatch.setattr(fast.os, "cpu_count", lambda: 1)
    broken = added(1.0)
    broken.lines[-1] = CodeLine("    no_such_function()")
    finish = start_kernels(
        launched_kernels([broken, *(added(float(n), position=n) for n in range(2, 9))]), options
    )
    with pytest.raises(Exception, match="no_such_function"):
        finish()
    assert len(gpu.compiled) < 8
    monkeypatch.setattr(fast, "kernel_binary", lambda *a: fast.Binary("k", 4, 999999, b"broken"))
    with pytest.raises(BackendError, match=r"a GPU.* 999999 bytes .*invalid image"):
        start_kernels(launched_kernels([added(1.0)]), options)()
