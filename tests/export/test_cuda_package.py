"""Packages for a GPU, on a fake one (fake_cuda.c): test_on_gpu.py has what takes a real one."""

from __future__ import annotations

import ctypes
import json
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import minicompile as mc
from minicompile import compat
from minicompile.__main__ import main
from minicompile.errors import OptionError
from minicompile.exporting.load import CTensor, Package
from minicompile.lessons.model import GPT, GPTConfig
from tests.export.damage import build_program
from tests.export.fake_gpu import FakeGpu
from tests.export.test_package import Counter as Counting
from tests.export.test_package import copied, run_program, signed

pytest.importorskip("triton")
SM90 = ("cuda", 90)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGpu]:
    with pytest.MonkeyPatch.context() as patch:
        yield FakeGpu(tmp_path_factory.mktemp("driver"), patch)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 5), nn.Softmax(-1)).eval()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def products(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """A factor that is repeated, a vector, one term."""
    return torch.bmm(x.expand(2, 3, 4), y) @ z


def all_pairs(x: Tensor, y: Tensor) -> Tensor:
    scores = torch.relu(x @ y.mT)
    return scores.mT @ scores


BATCH, LENGTH = mc.Dim("batch"), mc.Dim("length", max=60)


def tokens(*shape: int) -> Tensor:
    return torch.randint(90, shape)


def heads(length: int) -> list[Tensor]:
    return [torch.randn(2, 2, length, 16) for _ in range(3)]


CASES: dict[str, Any] = {
    "mlp": (mlp, [{0: BATCH}], [[torch.randn(n, 20)] for n in (4, 2, 37)]),
    "lesson model": (
        lambda: GPT(GPTConfig(n_layer=1, n_embd=32, n_head=2)).eval(),
        [{0: BATCH, 1: LENGTH}],
        [[tokens(2, 8)], [tokens(3, 19)]],
    ),
    "attention": (lambda: attention, None, [heads(24)]),
    "attention, varying": (lambda: attention, [{2: LENGTH}] * 3, [heads(24), heads(41)]),
    "attention, masked": (
        lambda: masked, None, [[*heads(8), torch.ones(8, 8).tril(-1) > 0]],
    ),
    "products": (
        lambda: products, None, [[torch.randn(1, 3, 4), torch.randn(2, 4, 1), torch.randn(1, 6)]],
    ),
    "products, varying": (
        lambda: all_pairs,
        [{0: BATCH, 1: mc.Dim("rows")}, {0: BATCH, 1: mc.Dim("columns")}],
        [[torch.randn(n, r, 4), torch.randn(n, c, 4)] for n, r, c in ((5, 3, 8), (3, 17, 70))],
    ),
    "sums": (lambda: lambda x: (x.sum(0), x.t(), x.sum(1, True)), [{0: BATCH}],
        [[torch.randn(n, 9)] for n in (6, 300)]),
}  # fmt: skip


def exported(name: str, **move: Any) -> tuple[Any, Any, Any]:
    return exported_case(*CASES[name], **move)


def exported_case(build: Any, dims: Any, given: Any, **move: Any) -> tuple[Any, Any, Any]:
    fn = build()
    if move and isinstance(fn, nn.Module):
        fn.to(**move)
    given = [[x.to(**move) for x in call] for call in given]
    return fn, mc.export(fn, tuple(given[0]), dynamic_shapes=dims), given


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_eager(name: str, gpu: FakeGpu, tmp_path: Path) -> None:
    fn, program, calls = exported(name)
    folder = mc.aot_package(program, tmp_path / "package", target=SM90)
    package = gpu.load(folder)
    for given in calls:
        with torch.no_grad():
            expected = fn(*given)
        found = package(*given)
        gpu.check()
        assert_close(found, expected)


def test_rows_of_any_length_have_one_kernel(gpu: FakeGpu, tmp_path: Path) -> None:
    def rows(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x, -1), x.sum()

    program = mc.export(rows, (torch.ones(2, 40),), dynamic_shapes=[{1: mc.Dim("n")}])
    package = gpu.load(mc.aot_package(program, tmp_path / "rows", target=SM90))
    for n in (3, 40, 3000):
        x = torch.randn(2, n)
        assert_close(package(x), rows(x))


@pytest.fixture(scope="module")
def small(gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLP whose batch varies."""
    _, program, _ = exported("mlp")
    return mc.aot_package(program, tmp_path_factory.mktemp("small") / "mlp", target=SM90)


def test_the_driver_is_called_in_order(small: Path, gpu: FakeGpu) -> None:
    package = gpu.load(small)
    cubins = [f"cuModuleLoadData 1 cuModuleGetFunction {f.name[5:-6]}" for f in cubins_of(small)]
    weights = [64 * 20 * 4, 64 * 4, 5 * 64 * 4, 5 * 4]
    opening = [
        "cuInit 0", "cuDeviceGetCount -", "cuCtxGetCurrent -", "cuDeviceGet 0",
        "cuDeviceGetAttribute 75 0", "cuDeviceGetAttribute 76 0", "cuDevicePrimaryCtxRetain 0",
        "cuCtxPushCurrent_v2 1", "cuStreamCreate 0", "cuMemAlloc_v2 6913",
        *(f"cuMemcpyHtoD_v2 {n}" for n in weights), *cubins, "cuCtxPopCurrent_v2 1",
    ]  # fmt: skip
    assert " ".join(gpu.calls()) == " ".join(opening)
    gpu.log.write_text("")
    package(torch.randn(40, 20))
    first, arena, copied, *launches, given, waited, last = gpu.calls()
    assert (first, last) == ("cuCtxPushCurrent_v2 1", "cuCtxPopCurrent_v2 1")
    assert arena.startswith("cuMemAlloc_v2 ") and copied == "cuMemcpyHtoDAsync_v2 3200 1"
    assert (given, waited) == ("cuMemcpyDtoHAsync_v2 800 1", "cuStreamSynchronize 1")
    assert [call.split()[1] for call in launches] == [f.name[5:-6] for f in cubins_of(small)]
    assert all(call.startswith("cuLaunchKernel") and call.endswith(" 1") for call in launches)
    gpu.log.write_text("")
    package(torch.randn(3, 20))
    assert not any("Alloc" in call for call in gpu.calls()), "memory serves later calls"
    gpu.log.write_text("")
    closed(package)
    names = [call.split()[0] for call in gpu.calls()]
    closing = ["cuMemFree_v2", "cuMemFree_v2", "cuStreamDestroy_v2", "cuCtxPopCurrent_v2"]
    unloaded = ["cuModuleUnload"] * len(cubins)
    assert names == ["cuCtxPushCurrent_v2", *unloaded, *closing, "cuDevicePrimaryCtxRelease_v2"]


def closed(package: Package) -> None:
    """As when it dies."""
    if package.library.model:
        package.library.close(package.library.model)
        package.library.model = None


def cubins_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.cubin"))


def test_every_failing_call_of_the_driver_is_named_and_all_memory_given_back(
    small: Path, gpu: FakeGpu
) -> None:
    package = gpu.load(small)
    package(torch.randn(4, 20))
    calls = [call.split()[0] for call in gpu.calls()]
    closed(package)
    for place, name in enumerate(calls):
        if name == "cuCtxPopCurrent_v2":
            continue  # of which nothing depends
        says = rf"^{name.removesuffix('_v2')}( of .*)? failed: CUDA error 2: out of memory"
        with pytest.raises(mc.ExportError, match=says):
            package = gpu.load(small, fail=f"{name} {calls[: place + 1].count(name)}")
            package(torch.randn(4, 20))
        closed(package)
        assert balanced(gpu.calls(), name), name
    assert gpu.load(small)(torch.randn(4, 20)).shape == (4, 5)


def balanced(calls: list[str], failed: str) -> bool:
    """What was allocated, loaded, retained and pushed was given back."""
    found = Counter(call.split()[0] for call in calls)
    pairs = ("cuMemAlloc_v2", "cuMemFree_v2"), ("cuModuleLoadData", "cuModuleUnload")
    pairs += ("cuStreamCreate", "cuStreamDestroy_v2"), ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
    pairs += (("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"),)
    return all(found[a] - (a == failed) == found[b] for a, b in pairs)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"capability": "80"}, "for GPUs of compute capability 9.0, this one has 8.0"),
        ({"devices": "0"}, "needs an NVIDIA GPU: the driver sees none"),
    ],
)
def test_other_machines_are_refused(
    variables: dict[str, str], says: str, small: Path, gpu: FakeGpu
) -> None:
    with pytest.raises(mc.ExportError, match=says):
        gpu.load(small, **variables)
    done = subprocess.run(
        [build_program(small), small, "float32:4,20:none"], capture_output=True, text=True
    )
    assert done.returncode == 1 and says in done.stderr
    assert not any("Alloc" in call or "Module" in call for call in gpu.calls())


def test_without_a_driver_one_sentence_says_so(
    small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, library = copied(small, tmp_path), tmp_path / "libcuda.so.1"
    monkeypatch.setenv("MINICOMPILE_CUDA_DRIVER", str(library))
    with pytest.raises(mc.ExportError, match=r"NVIDIA's driver, which can't be loaded: .*libcuda"):
        mc.load_package(folder)
    source = tmp_path / "old.c"
    source.write_text("int cuInit(unsigned flags) { return flags; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.raises(mc.ExportError, match="needs a newer driver: this one has no cu"):
        mc.load_package(folder)


def test_damaged_machine_code_is_refused(small: Path, gpu: FakeGpu, tmp_path: Path) -> None:
    folder = copied(small, tmp_path)
    cubin = cubins_of(folder)[1]
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"?")
    with pytest.raises(mc.ExportError, match=f"{cubin.name} is missing, truncated or damaged"):
        gpu.load(folder)
    assert gpu.calls() == []
    signed(folder)  # metadata of the file as it is now: the library has its own checksum
    with pytest.raises(mc.ExportError, match=f"{cubin.name} is missing or damaged"):
        gpu.load(folder)
    assert balanced(gpu.calls(), "")


def test_tensors_on_the_gpu_stay_there(small: Path, gpu: FakeGpu) -> None:
    package, x = gpu.load(small), torch.randn(4, 20)
    expected, library = package(x), package.library
    held = device_memory(gpu, x.nbytes + 4)
    for shift in (0, 4):  # what 16 doesn't divide is copied
        ctypes.memmove(held + shift, x.data_ptr(), x.nbytes)
        given, made = (CTensor * 1)(), (CTensor * 1)()
        given[0].data, given[0].dtype, given[0].ndim = held + shift, 8, 2
        given[0].shape[:2] = 4, 20
        gpu.log.write_text("")
        assert library.call_on_gpu(library.model, given, 1, made, 1, None) == 0, library.error()
        gpu.check()
        names = [call.split()[0] for call in gpu.calls()]
        assert names.count("cuMemcpyDtoDAsync_v2") == 1 + (shift > 0)
        assert not {"cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"} & {*names}
        assert all(
            call.endswith(" 0") for call in gpu.calls() if "Launch" in call or "Sync" in call
        )
        found = gpu.memory(made[0].data, torch.float32)[:20].reshape(4, 5).clone()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        library.free_on_gpu(library.model, made, 1)
        assert gpu.calls()[-2] == "cuMemFree_v2 81"
    gpu.patch.setenv("FAKE_CUDA_ORDINAL", "1")
    assert library.call_on_gpu(library.model, given, 1, made, 1, None) == 1
    assert library.error() == "input 0 lies on GPU 1, the model on GPU 0"
    gpu.driver.cuMemFree_v2(ctypes.c_uint64(held))


def device_memory(gpu: FakeGpu, count: int) -> int:
    place = ctypes.c_uint64()
    assert gpu.driver.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(count)) == 0
    return place.value


def test_state_and_inputs_change_as_in_eager(gpu: FakeGpu, tmp_path: Path) -> None:
    model = Counting()
    program = mc.export(model, (torch.ones(3), torch.zeros(3)))
    package = gpu.load(mc.aot_package(program, tmp_path / "counter", target=SM90))
    for step in range(3):
        x, logs = torch.full((3,), float(step)), [torch.zeros(3), torch.zeros(6)[::2]]
        expected, found = model(x, logs[0]), package(x, logs[1])
        gpu.check()
        assert found.keys() == expected.keys() and found["k"] == 7
        torch.testing.assert_close([*found.values()], [*expected.values()], rtol=0, atol=0)
        assert logs[0].equal(logs[1])


def test_the_c_program_runs_it_and_links_no_cuda(small: Path, gpu: FakeGpu) -> None:
    gpu.expect(small)
    (found,) = run_program(build_program(small), small, [torch.randn(4, 20)])
    assert found.shape == (4, 5)
    assert balanced(gpu.calls(), "") and sum("Launch" in call for call in gpu.calls()) == 3
    linked = subprocess.run(["ldd", *small.glob("*.so")], capture_output=True, text=True).stdout
    assert "libc" in linked and not any(name in linked for name in ("cuda", "torch", "python"))


def test_the_command_runs_a_zip(
    gpu: FakeGpu, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = pytest.importorskip("safetensors.torch")
    gpu.expect(small)
    packed, given, out = (tmp_path / n for n in ("mlp.zip", "in.safetensors", "out.safetensors"))
    with zipfile.ZipFile(packed, "w") as archive:
        for file in small.iterdir():
            archive.write(file, file.name)
    x = torch.randn(4, 20)
    files.save_file({"input": x}, given)
    assert main(["run", str(packed), str(given), "--output", str(out)]) == 0
    gpu.check()
    assert "result[0]: f32[4, 5]" in capsys.readouterr().out
    assert files.load_file(out)["result[0]"].equal(gpu.load(small)(x))


def test_a_program_exported_on_a_gpu_needs_none_to_be_compiled(
    gpu: FakeGpu, tmp_path: Path
) -> None:
    def made(x: Tensor) -> Tensor:
        return x + torch.arange(5, device=x.device)

    program = mc.export(made, (torch.zeros(3, 5),))
    there = torch.device("cuda", 0)
    for node in program.graph.nodes:
        node.kwargs = {k: there if k == "device" else v for k, v in node.kwargs.items()}
        x = node.meta.get("val")
        if isinstance(x, Tensor):
            node.meta["val"] = compat.new_fake(x.fake_mode, x.shape, x.stride(), x.dtype, there)
    assert "cuda" in str(program.graph)
    package = gpu.load(mc.aot_package(program, tmp_path / "made", target=SM90))
    x = torch.randn(3, 5)
    assert package(x).equal(made(x))


def test_what_no_kernel_does_is_refused_by_name(tmp_path: Path) -> None:
    def convolved(x: Tensor) -> Tensor:
        return F.conv2d(x, torch.ones(2, 3, 2, 2))

    cases: list[tuple[Any, Tensor, str]] = [
        (convolved, torch.ones(1, 3, 4, 4), "no aten.convolution.default: library convolution"),
        (lambda x: torch.sort(x).values, torch.ones(4), "no aten.sort"),
        (lambda x: x @ x, torch.ones(4, 4, dtype=torch.float64), "no aten.mm.default"),
    ]
    for fn, given, says in cases:
        program = mc.export(fn, (given,))
        with pytest.raises(mc.Unsupported, match=says) as caught:
            mc.aot_package(program, tmp_path / "package", target=SM90)
        assert "test_cuda_package.py" in str(caught.value)
    with pytest.raises(OptionError, match=r"no target \('hip', 90\)"):
        mc.aot_package(mc.export(mlp(), (torch.ones(2, 20),)), tmp_path / "p", target=("hip", 90))
    assert not (tmp_path / "package").exists()


def test_other_devices_are_refused(small: Path, gpu: FakeGpu) -> None:
    with pytest.raises(mc.ExportError, match="takes no tensor on device meta"):
        gpu.load(small)(torch.zeros(4, 20, device="meta"))
    assert json.loads((small / "metadata.json").read_text())["cuda"] == "9.0"
