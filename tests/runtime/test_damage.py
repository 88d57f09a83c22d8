"""2,000 cache entries that are damaged, or lie under another's key: none is loaded."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minicompile.aot.result import RuntimeMetadata
from minicompile.compat import triton_api
from minicompile.ops import build
from minicompile.ops.cache import cache_folder
from minicompile.ops.files import read_private, write_sealed
from minicompile.options import Options
from minicompile.plugins.graph_cache import store as graph_cache
from minicompile.runtime import triton
from minicompile.runtime.gpu_kernel import GpuKernel

ENTRIES, ROUNDS = 5, 700
Load = Callable[[int], bool]
"""Looks for entry number i; whether it was found."""


def libraries(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    options = Options(cache_dir=str(cache))
    sources = [f"int number_{i}(void) {{ return {i}; }}" for i in range(ENTRIES)]
    build.start_build(sources, options).result()
    monkeypatch.setattr(build._Job, "_start", lambda job: setattr(job, "process", job))
    return lambda i: build._Job(sources[i], options).process is None


def graphs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    options = Options(cache_dir=str(cache))
    for i in range(ENTRIES):
        metadata = graph_cache.plain(RuntimeMetadata((), mutated_inputs=(i,)))
        folder = cache_folder(options, "graphs")
        assert folder is not None
        text = json.dumps([metadata, []]).encode()
        assert write_sealed(folder / f"{i:032}.json", f"{i:032}", text)

    def load(i: int) -> bool:
        found = graph_cache.read(f"{i:032}", options)
        assert found is None or found.metadata.mutated_inputs == (i,)
        return found is not None

    return load


class Compiled:
    """What Triton would make of a kernel."""

    def __init__(self, name: str) -> None:
        self.metadata = type("About", (), {"name": name, "num_warps": 4, "shared": 0})
        self.asm = {"cubin": random.Random(name).randbytes(4000)}


def binaries(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    compiled: list[str] = []

    def compile_kernel(kernel: GpuKernel, *_: Any) -> Compiled:
        compiled.append(kernel.name)
        return Compiled(kernel.name)

    monkeypatch.setattr(triton, "compile_kernel", compile_kernel)
    monkeypatch.setattr(triton_api, "triton_identity", lambda: "here")

    def load(i: int) -> bool:
        name, before = f"kernel_{i}", len(compiled)
        kernel = GpuKernel(name, name, {}, [], {}, {}, 0, "", 0, [])
        options = Options(cache_dir=str(cache))
        found = triton.kernel_binary(kernel, [], ("cuda", 90), options)
        assert (found.name, found.code) == (name, Compiled(name).asm["cubin"])
        return len(compiled) == before

    for i in range(ENTRIES):
        load(i)
    return load


def put(path: Path, content: bytes) -> None:
    """A new file in its place: the old one may be mapped into this process."""
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o600)


def flip(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a bit": flip,
    "several bytes": lambda content, draw: flip(flip(flip(content, draw), draw), draw),
    "cut": lambda content, draw: content[: draw.randrange(len(content))],
    "longer": lambda content, draw: content + draw.randbytes(draw.randint(1, 99)),
    "noise": lambda content, draw: draw.randbytes(len(content)),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", [libraries, graphs, binaries])
def test_nothing_damaged_or_swapped_is_loaded(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = kind(tmp_path, monkeypatch)
    assert all(map(load, range(ENTRIES)))
    which = entries(sorted(tmp_path.glob("*/*")), load)
    files = list(which)
    whole = {path: read_private(path) for path in files}
    draw, loaded = random.Random(0), 0
    for _ in range(ROUNDS):
        path = draw.choice(files)
        if draw.random() < 0.3:  # another entry, whole, under this one's key
            other = draw.choice([p for p in files if which[p] != which[path]])
            for own in (p for p in files if which[p] == which[path]):
                put(own, whole[other.with_suffix(own.suffix)])
        else:
            content = draw.choice(list(DAMAGES.values()))(whole[path], draw)
            if content == whole[path]:
                continue
            put(path, content)
        loaded += load(which[path])
        for own in (p for p in files if which[p] == which[path]):
            put(own, whole[own])
    assert loaded == 0
    assert all(map(load, range(ENTRIES)))


def entries(files: list[Path], load: Load) -> dict[Path, int]:
    """The number of the entry that each file belongs to: the one that isn't found without it."""
    found = {}
    for path in files:
        content = path.read_bytes()
        put(path, b"")
        for i in range(ENTRIES):
            if not load(i):
                found[path] = i
        put(path, content)
    assert sorted(set(found.values())) == list(range(ENTRIES))
    return found


def test_nothing_unpickles() -> None:
    """The formats that run code when they are read."""
    package = Path(build.__file__).parents[1]
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
            if isinstance(node, ast.Import | ast.ImportFrom):
                names.append(getattr(node, "module", None) or "")
                assert not {"pickle", "marshal", "shelve", "dill", "joblib"} & set(names), file
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "np.load"), file
