"""Compiling and caching C sources."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile import pipeline
from minicompile.__main__ import main
from minicompile.errors import BackendError
from minicompile.ops import build, files
from minicompile.ops.build import start_build
from minicompile.ops.toolchain import find_compiler
from minicompile.options import Options, environment
from minicompile.runtime import cpp

SOURCE = "long answer(void) { return 42; }\n"


def options(folder: Path, **kw: Any) -> Options:
    return Options(cache_dir=str(folder), **kw)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The compiler calls that the test makes."""
    calls: list[list[str]] = []
    real = subprocess.Popen

    def counted(command: list[str], *args: Any, **kw: Any) -> Any:
        calls.append(command)
        return real(command, *args, **kw)

    monkeypatch.setattr(build.subprocess, "Popen", counted)
    find_compiler(Options())  # its call of --version is not of interest
    calls.clear()
    return calls


def test_the_same_source_is_compiled_once(tmp_path: Path, compilations: Any) -> None:
    for _ in range(3):
        assert start_build(SOURCE, options(tmp_path)).result().answer() == 42
    assert len(compilations) == 1


def test_source_and_flags_are_part_of_the_key(tmp_path: Path, compilations: Any) -> None:
    start_build(SOURCE, options(tmp_path)).result()
    assert start_build(SOURCE.replace("42", "43"), options(tmp_path)).result().answer() == 43
    start_build(SOURCE, options(tmp_path, cpp_flags=("-DX",))).result()
    assert len(compilations) == 3


# -- what lies in the cache is loaded only if it is whole and ours


def truncate(entry: Path, other: Path) -> None:
    replace(entry, entry.read_bytes()[:100])


def no_seal(entry: Path, other: Path) -> None:
    replace(entry, entry.read_bytes()[:-32])


def renamed_from_another_key(entry: Path, other: Path) -> None:
    replace(entry, other.read_bytes())


def checksum_of_what_lies_there(entry: Path, other: Path) -> None:
    content = other.read_bytes()[:-32]
    replace(entry, content + hashlib.sha256(content).digest())


def link_to_elsewhere(entry: Path, other: Path) -> None:
    entry.rename(other.with_name("elsewhere"))
    entry.symlink_to(other.with_name("elsewhere"))


def writable_by_others(entry: Path, other: Path) -> None:
    entry.chmod(0o666)


def of_another_user(entry: Path, other: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(entry, 12345, -1)


def replace(path: Path, content: bytes) -> None:
    """A new file in its place: the old one may be mapped into this process."""
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o600)


@pytest.mark.parametrize(
    "damage",
    [
        *(truncate, no_seal, renamed_from_another_key),
        *(checksum_of_what_lies_there, link_to_elsewhere, writable_by_others, of_another_user),
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_or_foreign_entry_is_built_again(
    tmp_path: Path, compilations: Any, damage: Callable[[Path, Path], None]
) -> None:
    name = damage.__name__
    source = SOURCE.replace("answer", name)
    start_build(source.replace("42", "-1"), options(tmp_path)).result()
    (other,) = (tmp_path / "cpp").glob("*.so")
    start_build(source, options(tmp_path)).result()
    (entry,) = set((tmp_path / "cpp").glob("*.so")) - {other}
    damage(entry, other)
    for _ in range(2):
        assert getattr(start_build(source, options(tmp_path)).result(), name)() == 42
    assert len(compilations) == 3
    assert stat.S_IMODE(entry.lstat().st_mode) == 0o600


def test_a_library_that_cannot_be_loaded_is_built_again(
    tmp_path: Path, compilations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_build(SOURCE, options(tmp_path)).result()
    real, tried = build.Library, []

    def load(path: Path) -> Any:
        """As where a library that it needs is gone, or where a folder forbids programs."""
        tried.append(path)
        if tmp_path in path.parents:
            raise OSError("failed to map segment")
        return real(path)

    monkeypatch.setattr(build, "Library", load)
    monkeypatch.setattr(build.tempfile, "tempdir", None)
    assert start_build(SOURCE, options(tmp_path)).result().answer() == 42
    assert len(compilations) == 2 and len(tried) == 3


# -- the folder


def test_the_cache_is_private_whatever_the_umask(tmp_path: Path, compilations: Any) -> None:
    before = os.umask(0)
    try:
        for _ in range(2):
            start_build(SOURCE, options(tmp_path / "cache")).result()
    finally:
        os.umask(before)
    assert len(compilations) == 1
    for path in (tmp_path / "cache").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


@pytest.mark.parametrize("which", ["cache", "cache/cpp"])
@pytest.mark.parametrize("danger", ["group", "others", "owner"])
def test_a_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, danger: str, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache" / "cpp").mkdir(parents=True, mode=0o700)
    folder = tmp_path / which
    if danger != "owner":
        folder.chmod(0o770 if danger == "group" else 0o707)
        reason = f"others can write to {folder}"
    elif os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        reason = f"{folder} belongs to another user"
    else:
        pytest.skip("only root can give folders away")
    with pytest.warns(UserWarning, match=f"not kept: {reason}"):
        assert start_build(SOURCE, options(tmp_path / "cache")).result().answer() == 42
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    with environment(MINICOMPILE_CACHE_DIR=str(tmp_path / "cache")):
        assert main(["cache"]) == 0
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize("failing", ["mkstemp", "write", "replace"])
def test_a_full_or_read_only_disk_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(*args: Any, **kw: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def open_full(handle: int, mode: str) -> Any:
        os.close(handle)
        return open("/dev/full", mode, buffering=0)

    if failing == "write" and not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    module = {"mkstemp": files.tempfile, "replace": files.os}.get(failing)
    with monkeypatch.context() as patch:
        if module is None:
            patch.setattr(files, "open", open_full, raising=False)
        else:
            patch.setattr(module, failing, full)
        assert start_build(SOURCE, options(tmp_path)).result().answer() == 42
    assert list((tmp_path / "cpp").iterdir()) == []
    assert start_build(SOURCE, options(tmp_path)).result().answer() == 42


def test_a_cache_folder_that_cannot_be_made_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="can't be made"):
        module = start_build(SOURCE, options(tmp_path / "file" / "cache")).result()
    assert module.answer() == 42


def test_two_sources_compile_side_by_side(tmp_path: Path, compilations: Any) -> None:
    other = SOURCE.replace("answer", "other").replace("42", "7")
    pending = start_build([SOURCE, other], options(tmp_path))
    assert len(compilations) == 2  # both are at work before anyone waits
    module = pending.result()
    assert (module.answer(), module.other()) == (42, 7)


# -- the compiler's version


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


# -- from start to finish


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    """A compiler that works for minutes, with a helper like g++'s own; it notes both processes.

    The extension that calls kernels is built before: its compiler has a folder among temporary files, too.
    """
    build.load_extension(cpp.FAST_CALL)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "tmp"))
    text = f"""#!/bin/sh
case "$*" in --version) echo 20; exit;; esac
sleep 300 &
echo $$ $! > {tmp_path}/ids.part
mv {tmp_path}/ids.part {tmp_path}/ids
wait
"""
    chosen = program(tmp_path / "slow-g++", text)
    return options(tmp_path / "cache", cpp_compiler=chosen)


def started(tmp_path: Path) -> list[int]:
    """The compiler's processes, once there are some."""
    ids = tmp_path / "ids"
    while not ids.exists():
        time.sleep(0.01)
    return [int(number) for number in ids.read_text().split()]


def runs(process: int) -> bool:
    """Neither gone nor a zombie that its new parent hasn't looked at."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True)
    return done.stdout.strip() != "" and not done.stdout.startswith("Z")


def nothing_is_left(tmp_path: Path, processes: list[int]) -> bool:
    """Neither folders nor, soon, processes. An exception may hold a build until Python collects cycles."""
    gc.collect()
    while any(map(runs, processes)):
        time.sleep(0.01)
    return list((tmp_path / "tmp").glob(f"{build.WORK}*")) == []


@pytest.mark.skipif(shutil.which("ps") is None, reason="no ps")
def test_a_build_that_nobody_waits_for_ends(tmp_path: Path, slow: Options) -> None:
    pending = start_build(SOURCE, slow)
    processes = started(tmp_path)
    assert len(processes) == 2 and all(map(runs, processes))
    del pending
    assert nothing_is_left(tmp_path, processes)


@pytest.mark.skipif(shutil.which("ps") is None, reason="no ps")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_exception_while_the_compiler_works_leaves_nothing_behind(
    tmp_path: Path, slow: Options, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    at_work = []

    def failing(*args: Any) -> Any:
        at_work.extend(map(runs, started(tmp_path)))
        raise kind

    monkeypatch.setattr(pipeline, "generate_wrapper", failing)
    function = mc.compile(lambda x: x.sin() + 1, options=dict(vars(slow)))
    if kind is KeyboardInterrupt:
        with pytest.raises(kind):
            function(torch.ones(3))
    else:
        with pytest.warns(UserWarning, match="runs in eager"):
            assert torch.equal(function(torch.zeros(3)), torch.ones(3))
    assert at_work == [True, True]  # the compiler works before there is a wrapper
    assert nothing_is_left(tmp_path, started(tmp_path))


def test_a_program_that_ends_early_takes_its_compiler_along(tmp_path: Path, slow: Options) -> None:
    text = f"""
import tempfile
tempfile.tempdir = {str(tmp_path / "tmp")!r}
from minicompile.ops.build import start_build
from minicompile.options import Options
pending = start_build({SOURCE!r}, Options(cpp_compiler={slow.cpp_compiler!r}, disk_cache=False))
from pathlib import Path
while not Path({str(tmp_path / "ids")!r}).exists():
    pass
"""
    subprocess.run([sys.executable, "-c", text], check=True)
    assert nothing_is_left(tmp_path, started(tmp_path))


def test_a_pipe_in_the_cache_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PermissionError):
        files.read_private(tmp_path / "pipe")


def test_a_compiler_may_be_a_command_with_arguments(tmp_path: Path) -> None:
    """`CXX="ccache g++"`; here `env` stands for the wrapper."""
    name = find_compiler(Options()).command[0]
    chosen = options(tmp_path, cpp_compiler=f"env -u NOTHING {name}")
    assert find_compiler(chosen).command[1:] == ("-u", "NOTHING", name)
    assert start_build(SOURCE, chosen).result().answer() == 42


def test_a_compile_error_shows_the_first_lines_and_keeps_the_source(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="could not compile") as caught:
        start_build("long answer(void) { return oops; }\n", options(tmp_path)).result()
    text = str(caught.value)
    assert "oops" in text
    kept = text.split("source kept in ")[1].split(")")[0]
    assert "return oops" in Path(kept).read_text()
