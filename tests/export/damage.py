"""Damaged packages: what becomes of them in Python and in a C program."""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

import minicompile as mc
from minicompile.lessons.model import GPT, GPTConfig


def small_package(path: Path) -> Path:
    """The lesson model with one block."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1)).eval()
    return mc.aot_package(mc.export(model, (torch.zeros(1, 4, dtype=torch.int64),)), path)


def build_program(package: Path) -> Path:
    """The package's example program, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="minicompile_program_", dir=package.parent))
    command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-o", folder / "main"]
    subprocess.run([*command, package / "main.c", "-ldl"], check=True)
    return folder / "main"


def damage(content: bytes, chance: random.Random) -> tuple[str, bytes | None]:
    """What happened to a file, and what is left of it; None: nothing."""
    place = chance.randrange(len(content))
    match chance.randrange(4):
        case 0:
            return f"cut at {place}", content[:place]
        case 1:
            return "gone", None
        case 2:
            bit = content[place] ^ 1 << chance.randrange(8)
            return f"a bit of byte {place}", content[:place] + bytes([bit]) + content[place + 1 :]
        case _:
            return "longer", content + chance.randbytes(chance.randrange(1, 5000))


def refused(package: Path, program: Path, count: int, seed: int = 0) -> Iterator[str]:
    """Damages a copy `count` times, file by file; yields what was not refused with a clean error."""
    chance = random.Random(seed)
    copy = package.parent / "damaged"
    shutil.copytree(package, copy, dirs_exist_ok=True)
    (package.parent / "tokens.bin").write_bytes(bytes(4 * 8))
    names = sorted(file.name for file in package.iterdir())
    for number in range(count):
        name = names[number % len(names)]
        content = (package / name).read_bytes()
        what, left = damage(content, chance)
        if left is None:
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(left)
        try:
            mc.load_package(copy)
            yield f"{name}, {what}: Python loads it"
        except mc.ExportError:
            pass
        command = [program, "damaged", "int64:1,4:tokens.bin"]
        done = subprocess.run(command, cwd=package.parent, capture_output=True, text=True)
        if done.returncode != 1 or not done.stderr.startswith("error: "):
            yield f"{name}, {what}: the program ends with {done.returncode} {done.stderr}"
        (copy / name).write_bytes(content)
    shutil.rmtree(copy)
