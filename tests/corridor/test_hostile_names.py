"""Names and files of the user's are only ever text: no generated code becomes another by them."""

from __future__ import annotations

import io
import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile as mc
from tests.comparing import assert_as_eager

NAMES = [
    *('a"b', "a'b", '"""', "*/ } int x; /*", "// \\", "\\\n", "\\N{DIGIT ONE}", "</script><b>", ""),
    *("a\nraise SystemExit(7)\n", "\r\nimport os", "é中\u2028x", "{0}", "%s", "#"),
    *("self", "forward", "call", "args", "torch", "tl", "buf0", "return", "in_ptr0", "1"),
]
X = torch.linspace(-2, 2, 12).reshape(3, 4)


def module(name: str) -> torch.nn.Module:
    """Its parameters, buffers, children, class and method have the name."""

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._parameters[name] = torch.nn.Parameter(torch.full((4,), 2.0))
            self._buffers[f"{name} "] = torch.ones(4)
            self._modules[f" {name}"] = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale: Any = self._parameters[name]
            shift: Any = self._buffers[f"{name} "]
            layer: Any = self._modules[f" {name}"]
            return torch.softmax(layer(x * scale + shift).sin(), -1)

    Named.__name__ = Named.__qualname__ = name
    Named.forward.__name__ = Named.forward.__qualname__ = name
    return Named()


def function(name: str) -> Callable[..., Any]:
    """The function, its file and a comment in its source have the name."""
    comment = " ".join(name.split())
    text = f"def fn(x):\n    y = x.sin() * 2  # {comment}\n    return torch.softmax(y, -1)  # {comment}\n"
    file = f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(text, file, "exec"), namespace)
    made = namespace["fn"]
    made.__code__ = made.__code__.replace(co_name=name, co_qualname=name)
    made.__name__ = made.__qualname__ = name
    return made


@pytest.mark.long
@pytest.mark.parametrize("language", ["auto", "triton"])
@pytest.mark.parametrize("make", [module, function])
@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_changes_nothing(name: str, make: Any, language: str) -> None:
    if language == "triton":
        pytest.importorskip("triton")
    mc.reset()
    fn, told = make(name), io.StringIO()
    with mc.logs("all", file=told):
        call = mc.compile(fn, fullgraph=True, options={"device_codegen": language})
        assert_as_eager(call, fn, X.clone().requires_grad_(), rtol=1e-5, atol=1e-6)
    assert "_fused_" in told.getvalue()


@pytest.mark.parametrize(
    "names", [("self", "x"), ("x", "self"), ("x", "x_"), ("_x", "x"), ("call", "buf0")]
)
def test_parameters_may_have_the_names_of_generated_code(names: tuple[str, str]) -> None:
    mc.reset()
    namespace: dict[str, Any] = {}
    exec(f"def fn({', '.join(names)}): return {names[0]}.sin() - {names[1]}", namespace)
    call = mc.compile(namespace["fn"], fullgraph=True)
    torch.testing.assert_close(call(X, X * 2), X.sin() - X * 2)
