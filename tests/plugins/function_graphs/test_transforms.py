"""Transforms of torch.func inside and around compiled functions, and compiled regions inside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vmap

import minicompile as mc
from minicompile.compat import tree_leaves
from tests.torch_versions import torch_has

X, Y = torch.tensor([0.3, -1.1, 0.7]), torch.tensor([1.2, 0.4, -0.5])
LINEAR = torch.nn.Linear(3, 3)
STACK = {name: torch.stack([p.detach(), p.detach() * 2]) for name, p in LINEAR.named_parameters()}
WEIGHT = torch.tensor([0.5, 2.0, -1.0], requires_grad=True)
LEAVES = [WEIGHT, *LINEAR.parameters()]


def loss(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() ** 2 * x).sum()


def field(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x.roll(1)


def squared(params: Any, x: torch.Tensor) -> torch.Tensor:
    return functional_call(LINEAR, params, (x,)).pow(2).sum()


def adapted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One inner step of MAML."""
    params = dict(LINEAR.named_parameters())
    slopes = grad(squared)(params, x)
    return squared({name: params[name] - 0.1 * slopes[name] for name in params}, y)


def tangent_kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def jacobian(t: torch.Tensor) -> Any:
        return jacrev(lambda p: functional_call(LINEAR, p, (t,)))(dict(LINEAR.named_parameters()))

    pairs = zip(jacobian(x).values(), jacobian(y).values())
    return sum(a.flatten(1) @ b.flatten(1).T for a, b in pairs)


def without_grad(x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.no_grad():
        return grad(lambda t: (t * y).pow(2).sum() * (2 if torch.is_grad_enabled() else 3))(x)


def rebound(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scale = y * 2
    first = grad(lambda t: (t * scale).sum())(x)
    scale = y * 3
    return first + grad(lambda t: (t * scale).sum())(x)


PROGRAMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "gradient": lambda x, y: grad(loss)(x) * y,
    "value too": lambda x, y: grad_and_value(loss)(x * y),
    "twice": lambda x, y: grad(lambda t: (grad(loss)(t) * y).sum())(x),
    "two arguments": lambda x, y: grad(lambda a, b: (a * b.exp()).sum(), (0, 1))(x, y),
    "last argument": lambda x, y: grad(lambda a, b: (a * b.exp()).sum(), -1)(x, y),
    "keyword": lambda x, y: grad(lambda a, *, b: (a**2 * b).sum())(x, b=y),
    "aux": lambda x, y: grad(lambda t: (loss(t), {"in": t, "y": y}), has_aux=True)(x),
    "containers": lambda x, y: grad(lambda d: (d["a"] * d["b"][0] ** 2).sum())({"a": x, "b": [y]}),
    "captured parameter": lambda x, y: grad(lambda t: (t * WEIGHT).sin().sum())(x) * y,
    "of a parameter": lambda x, y: grad(lambda w: (w * x).sin().sum())(WEIGHT),
    "in no_grad": without_grad,
    "no_grad inside": lambda x, y: grad(lambda t: (t * torch.no_grad()(loss)(t)).sum())(x),
    "rebound closure": rebound,
    "returns its input": lambda x, y: grad(lambda t: t)(x[0]),
    "writes inside": lambda x, y: grad(lambda t: (t * 2).add_(1).pow(2).sum())(x),
    "same tensor twice": lambda x, y: grad(lambda a, b: (a * b).sum())(x, x),
    "asks requires_grad": lambda x, y: jacfwd(lambda t: t * (2 if t.requires_grad else 3))(x),
    "jvp": lambda x, y: jvp(field, (x,), (y,)),
    "jacrev": lambda x, y: jacrev(field)(x),
    "jacrev in chunks": lambda x, y: jacrev(field, chunk_size=2)(x),
    "jacfwd": lambda x, y: jacfwd(field)(x) @ y,
    "hessian": lambda x, y: hessian(lambda a: (a * y).pow(3).sum())(x),
    "Hessian-vector product": lambda x, y: jvp(grad(loss), (x,), (y,))[1],
    "per-sample gradients": lambda x, y: vmap(grad(squared), (None, 0))(
        dict(LINEAR.named_parameters()), torch.stack([x, y])
    ),
    "MAML": adapted,
    "neural tangent kernel": tangent_kernel,
    "physics-informed loss": lambda x, y: vmap(grad(grad(lambda t: (t**3).sin())))(x).pow(2).sum(),
    "ensemble": lambda x, y: vmap(lambda p: functional_call(LINEAR, p, (x,)))(STACK) * y,
}
INNER, MODULE = mc.compile(loss), torch.nn.Sequential(mc.compile(LINEAR), torch.nn.ReLU())
REGION = torch.compiler.nested_compile_region(field)
THEIRS = torch.compile(loss, backend="eager")
if torch_has("jacrev of several results has a fake"):
    PROGRAMS |= {
        "jacrev of two results": lambda x, y: jacrev(lambda t: (field(t), t.sum()))(x),
        "hessian of two arguments": lambda x, y: hessian(lambda a, b: (a * b).pow(3).sum(), (0, 1))(
            x, y
        ),
    }
REGIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "region": lambda x, y: REGION(x) * y,
    "equal regions": lambda x, y: REGION(REGION(REGION(x))) + y,
    "region of a region": lambda x, y: torch.compiler.nested_compile_region(REGION)(x) + y,
    "region that reads a parameter": lambda x, y: REGION(WEIGHT * x) + y,
    "gradient of a region": lambda x, y: grad(lambda t: REGION(t).sum())(x) * y,
    "region over examples": lambda x, y: vmap(REGION)(torch.stack([x, y])),
    "compiled submodule": lambda x, y: MODULE(x) * y,
    "compiled function": lambda x, y: INNER(x) * y,
    "gradient of a compiled one": lambda x, y: grad(INNER)(x) * y,
    "compiled module, twice": lambda x, y: MODULE(MODULE(x)) + y,
}


def outcome(call: Callable[..., Any]) -> Any:
    """What a call gives, and the gradients of all that it read."""
    leaves = [X.clone().requires_grad_(), Y.clone().requires_grad_()]
    result = call(*leaves)
    parts = [t for t in tree_leaves(result) if t.requires_grad]
    total = sum(part.sin().sum() for part in parts)
    tensors = [*leaves, *LEAVES]
    return result, torch.autograd.grad(total, tensors, allow_unused=True) if parts else None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", [*PROGRAMS, *REGIONS])
def test_one_graph_with_eager_values_and_gradients(name: str, backend: str) -> None:
    program = {**PROGRAMS, **REGIONS}[name]
    run = mc.compile(program, backend=backend, fullgraph=True)
    torch.testing.assert_close(outcome(run), outcome(program))


@pytest.mark.parametrize("transform", [grad, grad_and_value, jacrev, hessian])
@pytest.mark.parametrize("function", [loss, INNER])
def test_the_result_of_a_transform_is_compiled(transform: Any, function: Any) -> None:
    """Also that of a compiled function, whose attributes torch copies to the transform's result."""
    run = mc.compile(transform(function), backend="aot_eager")
    torch.testing.assert_close(run(X), transform(loss)(X))


@pytest.mark.parametrize(
    "program", [lambda x, y: THEIRS(x) * y, lambda x, y: grad(lambda t: t * t.item())(x[0]) * y]
)
def test_what_is_not_captured_runs_as_it_is(program: Any) -> None:
    torch.testing.assert_close(mc.compile(program, backend="aot_eager")(X, Y), program(X, Y))
    assert mc.explain(program)(X, Y).breaks
