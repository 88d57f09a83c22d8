"""What is left of compiled functions that are dropped, and what happens where no library can be loaded."""

from __future__ import annotations

import gc
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.graph_module import _loader

import minicompile as mc
from minicompile.ops import build
from minicompile.ops.generated import define

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc lists a process's mappings")
X = torch.randn(37)


def numbered(number: int) -> Callable[[Tensor], Tensor]:
    """A function unlike those of other numbers."""
    names: dict[str, Any] = {}
    exec(f"def f(x):\n    return (x * {number}.5).sin() + {number}\n", names)
    found: Callable[[Tensor], Tensor] = names["f"]
    return found


def libraries() -> set[str]:
    """Our files of this process's kernels that are mapped into memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/minicompile_" in line}


def generated_texts() -> list[str]:
    """Files of generated Python that tracebacks could show."""
    gc.collect()
    return [file for file in (*linecache.cache, *_loader.eval_cache) if file.startswith("<")]


@pytest.mark.long
@only_linux
@pytest.mark.parametrize("disk_cache", [True, False])
def test_libraries_and_texts_go_with_the_functions(disk_cache: bool) -> None:
    mc.compile(numbered(0))(X)  # loads our extensions, which stay
    with mc.fresh_cache():
        gc.collect()
        before, texts = libraries(), generated_texts()
        for number in range(1, 9):
            function = numbered(number)
            compiled = mc.compile(function, options={"disk_cache": disk_cache})
            torch.testing.assert_close(compiled(X), function(X))
            if number == 1:
                assert libraries() - before, "kernels come from files that are mapped"
        del compiled, function
        assert generated_texts() == texts
        assert libraries() == before


def test_two_functions_share_a_library_and_one_may_go() -> None:
    first, second = mc.compile(numbered(3)), mc.compile(numbered(3))
    expected = first(X)
    torch.testing.assert_close(second(X), expected)
    del first
    gc.collect()
    torch.testing.assert_close(second(X), expected)


def test_a_graph_of_autograd_outlives_its_function() -> None:
    x = torch.randn(5, requires_grad=True)
    compiled = mc.compile(lambda x: (x.sin() * x).sum())
    loss = compiled(x)
    del compiled
    gc.collect()
    loss.backward()
    torch.testing.assert_close(x.grad, x.cos() * x + x.sin())


def test_a_traceback_shows_generated_text_while_its_function_lives() -> None:
    function = define("broken", "def broken():\n    return 1 / 0\n", {})
    file = function.__code__.co_filename
    assert linecache.getline(file, 2) == "    return 1 / 0\n"
    del function
    gc.collect()
    assert not linecache.getline(file, 2)


def test_without_room_for_a_library_eager_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(3, requires_grad=True)
    first, second = mc.compile(lambda x: (x.sqrt(), x.exp() * 2))(x)
    monkeypatch.setattr(build, "mappings", lambda: build.MOST_MAPPINGS + 1)
    second.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 2.0))
    function = numbered(77)
    with pytest.warns(UserWarning, match="memory mappings"):
        torch.testing.assert_close(mc.compile(function)(X), function(X))


def test_dropped_functions_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([build.MOST_MAPPINGS + 1, 1])
    monkeypatch.setattr(build, "mappings", lambda: next(counts))
    assert build.start_build("long one(void) { return 1; }", mc.Options()).result().one() == 1
