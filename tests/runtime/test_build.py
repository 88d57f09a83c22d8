"""Compiling and caching C sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minicompile.errors import BackendError
from minicompile.ops import build
from minicompile.ops.build import find_compiler, start_build
from minicompile.options import Options

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


def test_a_function_is_compiled_and_loaded(tmp_path: Path) -> None:
    assert start_build(SOURCE, options(tmp_path)).result().answer() == 42


def test_the_same_source_is_compiled_once(tmp_path: Path, compilations: Any) -> None:
    for _ in range(3):
        assert start_build(SOURCE, options(tmp_path)).result().answer() == 42
    assert len(compilations) == 1


def test_source_and_flags_are_part_of_the_key(tmp_path: Path, compilations: Any) -> None:
    start_build(SOURCE, options(tmp_path)).result()
    assert start_build(SOURCE.replace("42", "43"), options(tmp_path)).result().answer() == 43
    start_build(SOURCE, options(tmp_path, cpp_flags=("-DX",))).result()
    assert len(compilations) == 3


@pytest.mark.parametrize("damage", ["truncated", "garbage", "no checksum"])
def test_a_damaged_entry_is_built_again(tmp_path: Path, compilations: Any, damage: str) -> None:
    source = SOURCE.replace("answer", f"answer_{damage.replace(' ', '_')}")
    name = f"answer_{damage.replace(' ', '_')}"
    start_build(source, options(tmp_path)).result()
    (library,) = (tmp_path / "cpp").glob("*.so")
    fresh = library.with_name("copy")
    fresh.write_bytes(
        {"truncated": library.read_bytes()[:100], "garbage": b"x" * 5000}.get(damage, b"")
    )
    if damage == "no checksum":
        library.with_suffix(".sha256").unlink()
    else:
        fresh.replace(library)
    assert getattr(start_build(source, options(tmp_path)).result(), name)() == 42
    assert len(compilations) == 2


def test_without_disk_cache_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    module = start_build(SOURCE, options(tmp_path / "unused", disk_cache=False)).result()
    assert module.answer() == 42
    assert list(tmp_path.iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert start_build(SOURCE, options(tmp_path / "file" / "cache")).result().answer() == 42


def test_two_sources_compile_side_by_side(tmp_path: Path, compilations: Any) -> None:
    other = SOURCE.replace("answer", "other").replace("42", "7")
    pending = start_build([SOURCE, other], options(tmp_path))
    assert len(compilations) == 2  # both are at work before anyone waits
    module = pending.result()
    assert (module.answer(), module.other()) == (42, 7)


def test_an_unknown_function_is_an_attribute_error(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="no C function 'question'"):
        _ = start_build(SOURCE, options(tmp_path)).result().question


def test_a_missing_compiler_is_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match=r"needs a C\+\+ compiler.*install g\+\+.*set CXX"):
        start_build(SOURCE, Options(cpp_compiler=""))


def test_a_chosen_compiler_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="'/no/such/g\\+\\+' was not found"):
        start_build(SOURCE, options(tmp_path, cpp_compiler="/no/such/g++"))


def test_a_compiler_may_be_a_command_with_arguments(tmp_path: Path) -> None:
    """`CXX="ccache g++"`; here `env` stands for the wrapper."""
    name = find_compiler(Options()).command[0]
    chosen = options(tmp_path, cpp_compiler=f"env -u NOTHING {name}")
    assert find_compiler(chosen).command[1:] == ("-u", "NOTHING", name)
    assert start_build(SOURCE, chosen).result().answer() == 42


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("g++ 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.", True),
        ("Apple clang version 15.0.0\nTarget: arm64-apple-darwin", False),
    ],
)
def test_only_gcc_gets_the_flags_that_only_gcc_knows(
    version: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compiler_version", lambda command: version)
    assert set(build.GCC_FLAGS).issubset(find_compiler(Options()).flags) == expected


@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang")
def test_clang_knows_the_flags(tmp_path: Path) -> None:
    source = tmp_path / "answer.c"
    source.write_text(SOURCE)
    flags = [*build.BASE_FLAGS, *build.machine_flags(), "-c", "-o", str(tmp_path / "answer.o")]
    subprocess.run(["clang++", *flags, str(source)], check=True)


def test_a_program_that_is_no_compiler_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="does not run"):
        start_build(SOURCE, options(tmp_path, cpp_compiler="false"))


def test_a_compile_error_shows_the_first_lines_and_keeps_the_source(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="could not compile") as caught:
        start_build("long answer(void) { return oops; }\n", options(tmp_path)).result()
    text = str(caught.value)
    assert "oops" in text
    kept = text.split("source kept in ")[1].split(")")[0]
    assert "return oops" in Path(kept).read_text()


def test_processes_can_share_a_cache(tmp_path: Path) -> None:
    program = (
        "from minicompile.options import Options\n"
        "from minicompile.ops.build import start_build\n"
        f"print(start_build({SOURCE!r}, Options(cache_dir={str(tmp_path)!r})).result().answer())\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate()[0] for process in running] == ["42\n"] * 2
    assert sorted(p.suffix for p in (tmp_path / "cpp").iterdir()) == [".c", ".sha256", ".so"]
