"""What goes wrong around a compiled call: the answer is eager's or the error is clear, nothing is lost, and
the next call works."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile import compat
from minicompile.ops import build
from minicompile.ops.toolchain import find_compiler
from minicompile.options import Options
from tests.dynamo.helpers import explained

X = torch.linspace(-2, 2, 24).reshape(4, 6)


def fresh(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function whose kernels no other test has."""
    return lambda x: torch.softmax(x * number + x.sin(), -1)


def compiled(function: Any, cache: Path, **options: Any) -> Any:
    mc.reset()
    return mc.compile(function, options={"cache_dir": str(cache), **options})


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    "text",
    [
        "echo out of memory >&2; exit 1",
        "kill -9 $$",
        "exit 0",
        'while [ "$1" != -o ]; do shift; done; echo no > "$2"',
    ],
    ids=["fails", "is killed", "makes nothing", "makes nonsense"],
)
def test_a_compiler_that_fails_leaves_the_function_to_eager(tmp_path: Path, text: str) -> None:
    fn = fresh(1001)
    works = find_compiler(Options()).command[0]
    script = f'case "$*" in *--version*) exec {works} --version;; esac\n' + text
    call = compiled(fn, tmp_path, cpp_compiler=program(tmp_path / "g++", script))
    for _ in range(2):
        torch.testing.assert_close(call(X), fn(X))
    assert "missing-tool" in str(explained(call).breaks)
    torch.testing.assert_close(compiled(fn, tmp_path)(X), fn(X))


def test_memory_that_runs_out_is_an_error_that_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1) @ x.t()
        x.add_(1)
        return y.sin()

    def no_memory(*args: Any, **kw: Any) -> Any:
        if left:
            left.pop()
            raise torch.OutOfMemoryError("out of memory")
        return empty(*args, **kw)

    left, empty = [True], compat.empty_strided_cpu
    with monkeypatch.context() as patch:
        patch.setattr(compat, "empty_strided_cpu", no_memory)
        call = compiled(fn, tmp_path)
        x = X.clone()
        with pytest.raises(torch.OutOfMemoryError):
            call(x)
        assert not left and torch.equal(x, X)
        torch.testing.assert_close(call(x), fn(X.clone()))
    torch.testing.assert_close(x, X + 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_calls_and_compiles_and_the_parent_goes_on(tmp_path: Path) -> None:
    torch.set_num_threads(1)  # OpenMP does not survive a fork
    fn, call = fresh(1005), compiled(fresh(1005), tmp_path)
    call(X)
    pending = build.start_build("int seven(void) { return 7; }", Options())
    child = os.fork()
    if child == 0:
        try:
            right = torch.allclose(call(X), fn(X))
            other = mc.compile(fresh(1006), options={"cache_dir": str(tmp_path)})
            right &= torch.allclose(other(X), fresh(1006)(X))
            del pending  # the parent's compiler works on
            os._exit(0 if right else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert pending.result().seven() == 7
    torch.testing.assert_close(call(-X), fn(-X))


def test_compiling_takes_no_lock_that_a_fork_may_find_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fx shows its progress with tqdm, where there is tqdm, whose watching thread locks now and then."""

    def locked(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a progress bar")

    monkeypatch.setattr("torch.fx.interpreter.tqdm", locked)
    x = X.clone().requires_grad_()
    assert mc.trace(compiled(fresh(1007), tmp_path), x).kernels
