"""What `mc.compile` gives: functions and modules that behave like the originals, and say what they did."""

from __future__ import annotations

import functools
import inspect
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import minicompile as mc
from minicompile.dynamo.interpreter import bytecode
from minicompile.errors import OptionError, VerifyError
from tests.dynamo.helpers import compiled, equal, explained, graphs

x = torch.randn(3, 4)


def test_signature_binding_and_its_errors_are_the_functions_own() -> None:
    def function(a: Any, /, b: Any = 2, *rest: Any, c: Any = 3, **named: Any) -> Any:
        """Multiplies."""
        return a * b, rest, c, sorted(named)

    run = compiled(function)
    assert inspect.signature(run) == inspect.signature(function)
    assert (run.__name__, run.__doc__) == ("function", "Multiplies.")
    for args, kwargs in [
        ((x,), {}),
        ((x, 3), {"c": 1}),
        ((x, 3, 4, 5), {"z": 1, "y": 2}),
        ((x,), {"b": 7}),
    ]:
        assert equal(run(*args, **kwargs), function(*args, **kwargs))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        run()


def test_methods_and_other_callables() -> None:
    class Model:
        def __init__(self) -> None:
            self.k = 2

        @mc.compile(backend="eager", fullgraph=True)
        def run(self, a: torch.Tensor) -> torch.Tensor:
            return a * self.k

        def __call__(self, a: torch.Tensor) -> torch.Tensor:
            return a + self.k

    model = Model()
    assert equal(model.run(x), x * 2)
    assert equal(compiled(model)(x), x + 2)
    assert equal(compiled(model.__call__)(x), x + 2)
    assert equal(compiled(functools.partial(torch.mul, other=3))(x), x * 3)
    assert equal(compiled(torch.relu)(x), x.relu())


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(OptionError, match="no backend 'nope'; known: aot_eager, eager, inductor"):
        mc.compile(torch.relu, backend="nope")
    with pytest.raises(OptionError, match="no option 'nope'"):
        mc.compile(torch.relu, options={"nope": 1})
    with pytest.raises(OptionError, match="no mode"):
        mc.compile(torch.relu, mode="nope")
    with pytest.raises(OptionError, match="dynamic must be one of"):
        mc.compile(torch.relu, dynamic="yes")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="can't compile a int"):
        mc.compile(3)
    with pytest.raises(TypeError, match="nope"):
        mc.compile(torch.relu, nope=1)  # type: ignore[call-arg]


def test_a_callable_backend_gets_the_graph_and_example_inputs() -> None:
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen.append((gm.code, [tuple(value.shape) for value in example_inputs]))
        return gm.forward

    assert equal(compiled(lambda a: a + 1, backend=backend)(x), x + 1)
    assert "a + 1" in seen[0][0] and seen[0][1] == [(3, 4)]


def test_a_bytecode_handler_plugged_in_from_outside_changes_the_result() -> None:
    with mc.scoped():

        @bytecode("UNARY_NEGATIVE")
        def identity(frame: Any, ins: Any) -> None:
            pass

        assert equal(compiled(lambda a: -a + 1)(x), x + 1)
    assert equal(compiled(lambda a: -a + 1)(x), -x + 1)


def test_compiled_functions_and_modules_inside_a_captured_function_join_its_graph() -> None:
    inner = compiled(nn.Linear(4, 4))
    double = compiled(lambda a: a * 2)
    outer = compiled(lambda a: double(inner(a)) + 1)
    assert equal(outer(x), double(inner(x)) + 1)
    assert explained(outer).op_count == 3


def test_threads_share_a_compiled_function() -> None:
    model = nn.Linear(4, 4)
    run = compiled(lambda a, k: model(a) * k, dynamic=False)

    def right(k: int) -> bool:
        rows = [torch.ones(n % 3 + 1, 4) for n in range(1, 8)]
        return all(torch.equal(run(a, k), model(a) * k) for a in rows)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, (0, 1, 0, 1)))
    assert graphs(run) == 6


def test_an_internal_error_after_capture_runs_in_eager_and_is_named() -> None:
    def backend(gm: Any, example_inputs: Any) -> Any:
        raise VerifyError("two loops over one index")

    run = mc.compile(lambda a: a + 1, backend=backend)
    with pytest.warns(UserWarning, match="internal error of minicompile: VerifyError: two loops"):
        assert equal(run(x), x + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert equal(run(x), x + 1)  # said once
    explanation = explained(run)
    assert explanation.eager_calls == 2 and "two loops" in explanation.breaks[0].reason
    with pytest.raises(VerifyError, match="two loops"):
        mc.compile(lambda a: a + 1, backend=backend, fullgraph=True)(x)
