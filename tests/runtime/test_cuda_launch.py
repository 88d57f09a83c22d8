"""GPU kernels on their way to the driver: side by side, kept on disk, launched. A driver of ours stands in
for NVIDIA's and writes down what it is asked."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from minicompile.codegen.plan import CodeLine, KernelModule, KernelSource
from minicompile.codegen.triton import print_triton
from minicompile.compat import triton_api
from minicompile.errors import BackendError
from minicompile.ops.build import load_extension
from minicompile.options import Options, child_environment
from minicompile.runtime import load, triton
from minicompile.runtime.gpu_kernel import GpuKernel, gpu_kernels
from minicompile.runtime.triton import CUDA_LAUNCH, start_kernels
from tests.codegen.fusing import Program

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
from minicompile.runtime.triton import CUDA_LAUNCH
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
    """What of a GPU loading kernels needs: a device that launches nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for thread in threading.enumerate():
            if thread.name.startswith("minicompile triton"):
                thread.join()  # an earlier test's, which would bind its kernel here
        self.bound: list[tuple[Any, ...]] = []
        self.compiled: list[str] = []
        compile_kernel = triton.compile_kernel

        def compile_and_tell(kernel: GpuKernel, *facts: Any) -> Any:
            self.compiled.append(kernel.name)
            return compile_kernel(kernel, *facts)

        monkeypatch.setattr(triton, "compile_kernel", compile_and_tell)
        monkeypatch.setattr(triton, "cuda_driver", lambda: self)
        monkeypatch.setattr(triton_api, "cuda_launch_state", lambda: (int, int))
        for name, result in (
            ("is_available", True),
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
        return lambda *args: None


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
    found = start_kernels(gpu_kernels(sources), options)()
    assert list(found) == [source.name for source in sources]
    assert found[sources[0].name] is found[sources[2].name] is not found[sources[1].name]
    assert len(gpu.compiled) == len(gpu.bound) == 2
    assert not list(tmp_path.rglob("*.cubin"))


@needs_triton
def test_kernels_are_parsed_one_after_the_other(monkeypatch, tmp_path) -> None:
    """Before Python 3.13 a parser that runs beside another may fail."""
    Gpu(monkeypatch)
    monkeypatch.setattr(triton.os, "cpu_count", lambda: 4)
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
        gpu_kernels([added(float(n), position=n) for n in range(4)]), Options(disk_cache=False)
    )()
    assert len(most) >= 4
    assert max(most) == 1


@needs_triton
def test_a_kernel_on_disk_is_loaded_and_a_damaged_one_compiled_again(monkeypatch, tmp_path) -> None:
    gpu, options = Gpu(monkeypatch), Options(cache_dir=str(tmp_path))

    def load(source: KernelSource) -> int:
        """How often it was compiled."""
        before = len(gpu.compiled)
        start_kernels(gpu_kernels([source]), options)()
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


@needs_triton
def test_what_goes_wrong_in_one_kernel_is_raised_and_the_rest_is_let_be(
    monkeypatch, tmp_path
) -> None:
    gpu, options = Gpu(monkeypatch), Options(cache_dir=str(tmp_path))
    monkeypatch.setattr(triton.os, "cpu_count", lambda: 1)
    broken = added(1.0)
    broken.lines[-1] = CodeLine("    no_such_function()")
    finish = start_kernels(
        gpu_kernels([broken, *(added(float(n), position=n) for n in range(2, 9))]), options
    )
    with pytest.raises(Exception, match="no_such_function"):
        finish()
    assert len(gpu.compiled) < 8
    monkeypatch.setattr(
        triton, "kernel_binary", lambda *a: triton.Binary("k", 4, 999999, b"broken")
    )
    with pytest.raises(BackendError, match=r"a GPU.* 999999 bytes .*invalid image"):
        start_kernels(gpu_kernels([added(1.0)]), options)()


@needs_extension
def test_without_a_driver_one_sentence_says_so(monkeypatch) -> None:
    class Extension:
        def open(self, name: str) -> None:
            raise OSError(f"{name}: no such file")

    monkeypatch.setattr(triton, "load_extension", lambda source: Extension())
    with pytest.raises(BackendError, match=r"driver.*libcuda"):
        triton._cuda_driver.__wrapped__()
    monkeypatch.setattr(triton, "load_extension", lambda source: None)
    with pytest.raises(BackendError, match=r"C compiler.*headers"):
        triton._cuda_driver.__wrapped__()


@needs_triton
def test_kernels_on_cpu_tensors_are_interpreted_beside_those_of_a_gpu(monkeypatch) -> None:
    """With `device_codegen="triton"` a module has both; the driver would take a CPU's address."""
    here, there = (added(number, n=4, position=n) for n, number in enumerate((1.0, 2.0)))
    here.plan.device = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(load, "gpu_kernels", lambda sources: {s.name: s for s in sources})
    monkeypatch.setattr(load.triton, "start_kernels", lambda kernels, options: lambda: kernels)
    found = load.load_triton(KernelModule("triton", "", [here, there]), Options())()
    assert set(found) == {here.name, there.name} and found[there.name] is there
    x, y = torch.arange(4.0), torch.empty(4)
    found[here.name](x, y)
    assert y.equal(x + 1)
