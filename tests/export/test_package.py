"""Ahead-of-time packages on the CPU: the results of eager through Python and through C, and clean errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minicompile as mc
from minicompile.bench.models import build_cnn
from minicompile.bench.networks import BERT, GPT2, TEXT
from minicompile.exporting import package as packaging
from minicompile.exporting.load import LAST
from minicompile.lessons.model import GPT, GPTConfig
from tests.export.damage import build_program, refused, small_package

SMALL = {**TEXT, "num_hidden_layers": 1}


class Logits(nn.Module):
    """What a model gives, without its own class of results; with random weights."""

    def __init__(self, name: str, **config: Any) -> None:
        transformers = pytest.importorskip("transformers")
        super().__init__()
        kind = getattr(transformers, name)
        self.model = kind(kind.config_class(**config, **SMALL))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits


BATCH, LENGTH = mc.Dim("batch", max=8), mc.Dim("length", max=60)
BYTES = {"float32": torch.float32, "int64": torch.int64}


def tokens(*shape: int) -> Tensor:
    return torch.randint(90, shape)


CASES: dict[str, Any] = {
    "lesson model": (lambda: GPT(GPTConfig(n_layer=1)), tokens, [(2, 16), (3, 7), (8, 60)]),
    "gpt2": (lambda: Logits("GPT2LMHeadModel", **GPT2), tokens, [(2, 16), (3, 7), (8, 60)]),
    "bert": (lambda: Logits("BertForMaskedLM", **BERT), tokens, [(2, 16), (3, 7), (8, 60)]),
    "cnn": (lambda: build_cnn(True)[0], torch.randn, [(2, 3, 16, 16), (5, 3, 16, 16)]),
}


def run_program(program: Path, package: Path, inputs: list[Tensor]) -> list[Tensor]:
    """The results of a package's C program."""
    given = []
    for i, value in enumerate(inputs):
        (program.parent / f"in{i}.bin").write_bytes(value.contiguous().numpy().tobytes())
        shape = ",".join(map(str, value.shape))
        given.append(f"{str(value.dtype).removeprefix('torch.')}:{shape}:in{i}.bin")
    command = [program, package, *given]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = []
    for line in done.stdout.splitlines():
        name, dtype, shape = line.replace(":", "").split(" ", 2)
        flat = torch.frombuffer(bytearray((program.parent / name).read_bytes()), dtype=BYTES[dtype])
        found.append(flat.reshape(json.loads(shape)))
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_eager(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build, make, shapes = CASES[name]
    model = build().eval()
    dims = {0: BATCH} if name == "cnn" else {0: BATCH, 1: LENGTH}
    exported = mc.export(model, (make(*shapes[0]),), dynamic_shapes=[dims])
    folder = mc.aot_package(exported, tmp_path / "package")
    package, program = mc.load_package(folder), build_program(folder)
    for shape in shapes:
        given = make(*shape)
        with torch.no_grad():
            expected = model(given)
        (from_c,) = run_program(program, folder, [given])
        for found in (package(given), from_c):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    libraries = subprocess.run(["ldd", *folder.glob("*.so")], capture_output=True, text=True).stdout
    assert "libc" in libraries and "torch" not in libraries and "python" not in libraries
    rest = [f for f in folder.iterdir() if f.name != "weights.bin"]
    assert sum(f.stat().st_size for f in rest) < 2 << 20


class Convolutions(nn.Module):
    """Many kernel sizes, strides, paddings, dilations and groups, on images and on rows of pixels."""

    OPTIONS = (
        (3, 1, 1, 1, 1), (3, 1, 0, 1, 1), (4, 4, 0, 1, 1), (1, 1, 0, 1, 1), (1, 2, 0, 1, 1), (2, 2, 0, 1, 2),
        (3, 2, 0, 2, 1), (5, 1, 0, 1, 4), (3, 3, 2, 1, 1), (7, 7, 0, 1, 1), ((3, 1), 1, 0, 1, 1),
        (3, (2, 1), (0, 1), 1, 1), (2, 1, 0, 3, 4),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.ModuleList(
            nn.Conv2d(4, 8, kernel, stride, padding, dilation, groups, bias=groups != 2)
            for kernel, stride, padding, dilation, groups in self.OPTIONS
        )
        self.rows = nn.ModuleList(
            nn.Conv1d(4, 8, *(n for n in options if isinstance(n, int)))
            for options in self.OPTIONS
            if all(isinstance(n, int) for n in options)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        rows = x.flatten(2)
        return [layer(x) for layer in self.images] + [layer(rows) for layer in self.rows]


@pytest.mark.long
def test_convolutions_of_every_kind_are_those_of_eager(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Convolutions().eval(), torch.randn(2, 4, 12, 12)
    package = mc.load_package(mc.aot_package(mc.export(model, (x,)), tmp_path / "package"))
    with torch.no_grad():
        torch.testing.assert_close(package(x), model(x), rtol=1e-4, atol=1e-5)


def products(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
    rows, columns = a.mT.contiguous(), a.repeat_interleave(2, 2)[..., ::2]
    return [
        a @ b,
        rows.mT @ b,
        columns @ b,
        a @ b.mT.contiguous().mT,
        torch.baddbmm(c, a, b, beta=0.5, alpha=2),
    ]


@pytest.mark.long
def test_products_of_every_layout_are_those_of_eager(tmp_path: Path) -> None:
    given = torch.randn(2, 290, 20), torch.randn(2, 20, 33), torch.randn(2, 290, 33)
    package = mc.load_package(mc.aot_package(mc.export(products, given), tmp_path / "package"))
    torch.testing.assert_close(package(*given), products(*given), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_package(tmp_path_factory.mktemp("small") / "gpt")


def copied(package: Path, to: Path) -> Path:
    return Path(shutil.copytree(package, to / "copy"))


@pytest.mark.long
def test_damaged_packages_are_refused(small: Path) -> None:
    assert list(refused(small, build_program(small), 200)) == []


def test_another_version_is_refused(small: Path, tmp_path: Path) -> None:
    folder = copied(small, tmp_path)
    text = (folder / "metadata.json").read_text().replace('"version": 4', '"version": 5')
    above = text.rpartition(LAST)[0]
    text = f"{above}{LAST}{zlib.crc32(above.encode())}\n}}\n"
    (folder / "metadata.json").write_text(text)
    with pytest.raises(mc.ExportError, match="has version 5"):
        mc.load_package(folder)
    done = subprocess.run([build_program(small), folder, "x"], capture_output=True, text=True)
    assert done.returncode == 1 and "has version 5" in done.stderr


def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.long
def test_another_processor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not packaging.machine_flags()[0].startswith("-march"):
        pytest.skip("no x86 processor")
    monkeypatch.setattr(packaging, "LEVELS", {"x86-64": ("xop",)})  # of AMD's, gone since 2017
    monkeypatch.setattr(packaging, "processor_features", lambda: "xop")
    folder = mc.aot_package(mc.export(doubled, (torch.ones(3),)), tmp_path / "doubled")
    with pytest.raises(mc.ExportError, match="for processors with xop"):
        mc.load_package(folder)


def test_unfit_inputs_are_refused_by_both_sides(small: Path) -> None:
    package = mc.load_package(small)
    good = torch.zeros(1, 4, dtype=torch.int64)
    for bad, says in (
        (good.float(), "float32, not int64"),
        (good[0], "1 dimensions, not 2"),
        (torch.zeros(1, 5, dtype=torch.int64), "dimension 1 has size 5, not 4"),
        (torch.full_like(good, 96), r"index out of range in a dimension of size 96 .*model.py:\d+"),
    ):
        with pytest.raises(mc.ExportError):
            package(bad)
        with pytest.raises(mc.ExportError, match=says):
            package.library.run([bad])
    with pytest.raises(mc.ExportError, match="takes 1 inputs, not 2"):
        package.library.run([good, good])
    with pytest.raises(mc.ExportError, match="device"):
        package(good.to("meta"))
    with pytest.raises(mc.ExportError, match="missing a required argument"):
        package()


@pytest.mark.long
def test_conditions_on_sizes_are_checked_in_c(tmp_path: Path) -> None:
    def halves(x: Tensor, y: Tensor) -> Tensor:
        return x.view(2, -1) @ y

    given = torch.randn(12), torch.randn(6, 3)
    exported = mc.export(halves, given, dynamic_shapes=[{0: mc.Dim.AUTO}, {0: mc.Dim.AUTO}])
    package = mc.load_package(mc.aot_package(exported, tmp_path / "halves"))
    x, y = torch.randn(20), torch.randn(10, 3)
    torch.testing.assert_close(package(x, y), halves(x, y))
    for bad in ((torch.randn(21), y), (x, torch.randn(9, 3))):
        with pytest.raises(mc.ExportError):
            package(*bad)
        with pytest.raises(mc.ExportError, match=r"does not hold|has size"):
            package.library.run(bad)


class Counter(nn.Module):
    """Keeps a sum, and writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, log: Tensor) -> dict[str, Any]:
        self.total.add_(x)
        self.calls.add_(1)
        log.copy_(self.total)
        return {"total": self.total.clone(), "same": [x, x.t()], "calls": self.calls + 0, "k": 7}


@pytest.mark.long
def test_state_and_inputs_change_as_in_eager(tmp_path: Path) -> None:
    model = Counter()
    exported = mc.export(model, (torch.ones(3), torch.zeros(3)))
    package = mc.load_package(mc.aot_package(exported, tmp_path / "counter"))
    for step in range(3):
        x, logs = torch.full((3,), float(step)), [torch.zeros(3), torch.zeros(6)[::2]]
        expected, found = model(x, logs[0]), package(x, logs[1])
        assert found.keys() == expected.keys() and found["k"] == 7
        torch.testing.assert_close([*found.values()], [*expected.values()], rtol=0, atol=0)
        assert logs[0].equal(logs[1])
    with pytest.raises(mc.ExportError, match="share memory"):
        package(x, x)


def test_threads_share_a_model(small: Path) -> None:
    package = mc.load_package(small)
    given = [torch.randint(90, (1, 4)) for _ in range(64)]
    expected = [package(x) for x in given]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: package(x), given))
    assert all(a.equal(b) for a, b in zip(found, expected))


@pytest.mark.parametrize(
    ("fn", "given", "says"),
    [
        (lambda x: torch.sort(x).values, torch.ones(4), "aten.sort"),
        (lambda x: x @ x, torch.ones(4, 4, dtype=torch.float64), "in float32 only"),
        (lambda x: x.to(torch.complex64).abs(), torch.ones(4), "no tensors like c64"),
    ],
)
def test_what_a_package_can_not_do_names_the_line(
    fn: Any, given: Tensor, says: str, tmp_path: Path
) -> None:
    with pytest.raises(mc.Unsupported, match=says) as caught:
        mc.aot_package(mc.export(fn, (given,)), tmp_path / "package")
    assert "test_package.py" in str(caught.value)
    assert not (tmp_path / "package").exists()
