"""Programs whose outside changes: tensors, settings of torch, modules, and what is reached through them."""

from __future__ import annotations

import abc
import functools
import sys
import types
from typing import Any

import torch
from torch import nn

import minicompile as mc
from tests.dynamo.guard_programs import PROGRAMS as PROGRAMS
from tests.dynamo.guard_programs import program, same_x, x

# -- tensors


@program("tensor")
def everything_about_a_tensor() -> Any:
    def run(a: torch.Tensor) -> Any:
        facts = a.shape, a.stride(), str(a.dtype), a.requires_grad, type(a), a.is_contiguous()
        return a.sum(), facts

    others: list[torch.Tensor] = [
        *(x.t(), x.double(), x[:2], x[:, :2], x[1:], x.clone().requires_grad_(), x.bfloat16()),
        *(nn.Parameter(x.clone()), torch.zeros(0, 4), torch.tensor(1.0), x.int(), x > 0, x[None]),
        *(x.expand(2, 3, 4), x.half(), x.clone(memory_format=torch.contiguous_format)),
    ]
    for other in others:
        yield run, lambda other=other: (other,)


@program("tensor")
def gradients_turned_on_inside_no_grad() -> Any:
    def run(a: torch.Tensor) -> Any:
        with torch.enable_grad():
            b = a * 2
        return b.requires_grad, b * 1

    for flag in (False, True, False):
        with torch.no_grad():
            yield run, lambda flag=flag: (x.clone().requires_grad_(flag),)


@program()
def an_attribute_of_a_tensor() -> Any:
    tensor = torch.ones(3)

    def run(a: torch.Tensor) -> Any:
        return a * getattr(tensor, "scale", 1)

    yield run, same_x
    tensor.scale = 3  # type: ignore[attr-defined]
    yield run, same_x
    tensor.scale = 4  # type: ignore[attr-defined]
    yield run, same_x


@program()
def leaves_that_are_changed() -> Any:
    def run(a: torch.Tensor) -> Any:
        a.add_(1)
        return a * 2

    yield run, lambda: (x.clone().requires_grad_() * 1,)
    yield run, lambda: (x.clone().requires_grad_(),)


@program("tensor")
def data_that_is_swapped() -> Any:
    weight = nn.Parameter(torch.ones(4))

    def run(a: torch.Tensor) -> Any:
        return a.to(weight.dtype) * weight, str(weight.dtype)

    yield run, same_x
    weight.data = weight.data * 3
    yield run, same_x
    weight.data = weight.data.double()
    yield run, same_x
    weight.data = torch.full((3, 4), 2.0, dtype=torch.float64)
    yield run, same_x
    weight.requires_grad_(False)
    yield run, same_x


# -- global state


@program("global_state")
def grad_mode() -> Any:
    def run(a: torch.Tensor) -> Any:
        return a * 2, torch.is_grad_enabled()

    needs = lambda: (x.clone().requires_grad_(),)  # noqa: E731
    yield run, needs
    with torch.no_grad():
        yield run, needs
    with torch.inference_mode():
        yield run, needs
        yield run, same_x
    yield run, needs


@program("global_state")
def autocast() -> Any:
    def run(a: torch.Tensor) -> Any:
        settings = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
        return a @ a.t(), settings, str(torch.get_autocast_dtype("cpu"))

    yield run, same_x
    for arguments in ((torch.bfloat16,), (torch.float16,), (torch.bfloat16, True, False)):
        with torch.autocast("cpu", *arguments):
            yield run, same_x
    yield run, same_x


def backend_flag(owner: Any, name: str) -> tuple[Any, Any, Any]:
    return lambda value: setattr(owner, name, value), lambda: getattr(owner, name), None


def warn_only(on: bool) -> None:
    torch.use_deterministic_algorithms(on, warn_only=on)


SETTINGS: dict[str, tuple[Any, Any, Any]] = {
    "deterministic, but only a warning": (
        *(warn_only, torch.is_deterministic_algorithms_warn_only_enabled, None),
    ),
    "precision": (*backend_flag(torch.backends.mkldnn.matmul, "fp32_precision")[:2], "bf16"),
    "cudnn": backend_flag(torch.backends.cudnn, "enabled"),
    "tf32": backend_flag(torch.backends.cuda.matmul, "allow_tf32"),
    "attention": (torch.backends.cuda.enable_math_sdp, torch.backends.cuda.math_sdp_enabled, None),
    "anomalies": (torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled, None),
}
"""How a setting is written and read, and another value; None where that is the opposite."""


def program_of(name: str) -> None:
    set_it, reader, other = SETTINGS[name]

    def make() -> Any:
        def run(a: torch.Tensor) -> Any:
            return a @ a.t(), (a * 2 if reader() else a * 3), str(reader())

        before = reader()
        yield run, same_x
        set_it(not before if other is None else other)
        try:
            yield run, same_x
        finally:
            set_it(before)
        yield run, same_x

    make.__name__ = name
    program(*(["equals"] if name == "cudnn" else []))(make)


for setting in SETTINGS:
    program_of(setting)


@program()
def torch_function_modes() -> Any:
    class Doubles(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            return found * 2 if func is torch.add else found

    def run(a: torch.Tensor) -> Any:
        return torch.add(a, 1)

    yield run, same_x
    with Doubles():
        yield run, same_x
    with torch._C.DisableTorchFunction():
        yield run, same_x
    yield run, same_x


@program()
def transforms_of_torch_func() -> Any:
    def run(a: torch.Tensor) -> Any:
        return (a * a).sum()

    compiled = mc.compile(run, backend="eager")
    yield run, same_x
    compiled(x)
    assert torch.equal(torch.func.grad(compiled)(x), 2 * x)
    assert torch.equal(torch.func.vmap(compiled)(x), torch.func.vmap(run)(x))
    import torch.autograd.forward_ad as ad

    with ad.dual_level():
        dual = compiled(ad.make_dual(x, torch.ones_like(x)))
        assert torch.equal(ad.unpack_dual(dual).tangent, (2 * x).sum())


# -- modules


def linear() -> nn.Linear:
    made = nn.Linear(4, 4)
    nn.init.constant_(made.weight, 0.5)
    nn.init.constant_(made.bias, 1.0)
    return made


@program("hooks")
def hooks_of_a_module() -> Any:
    m = linear()

    def run(a: torch.Tensor) -> Any:
        return m(a)

    yield run, same_x
    for register, hook in [
        (m.register_forward_hook, lambda module, args, out: out * 3),
        (m.register_forward_pre_hook, lambda module, args: (args[0] + 1,)),
    ]:
        handle = register(hook)
        yield run, same_x
        again = register(hook)
        yield run, same_x
        again.remove()
        yield run, same_x
        handle.remove()
        yield run, same_x


@program()
def what_a_hook_is_called_with() -> Any:
    m = linear()
    scale = [2]
    m.register_forward_hook(lambda module, args, out: out * scale[0])
    yield lambda a: m(a), same_x
    scale[0] = 5
    yield lambda a: m(a), same_x
    m.register_forward_hook(lambda module, args, kwargs, out: out - 1, with_kwargs=True)
    yield lambda a: m(a), same_x


@program()
def functions_of_torch_that_are_replaced() -> Any:
    before = nn.functional.relu, torch.sin, torch.Tensor.cos
    m = nn.ReLU()

    def run(a: torch.Tensor) -> Any:
        return m(a), torch.sin(a), a.cos(), nn.functional.relu(a)

    yield run, same_x
    nn.functional.relu = nn.functional.silu  # type: ignore[assignment]
    try:
        yield run, same_x
        nn.functional.relu = before[0]
        torch.sin = torch.cos
        yield run, same_x
        torch.sin = before[1]
        torch.Tensor.cos = torch.Tensor.exp  # type: ignore[method-assign]
        yield run, same_x
    finally:
        nn.functional.relu, torch.sin = before[:2]
        torch.Tensor.cos = before[2]  # type: ignore[method-assign]
    yield run, same_x


@program()
def nn_module_itself_is_patched() -> Any:
    m = linear()
    before = nn.Module.__call__
    yield lambda a: m(a), same_x
    nn.Module.__call__ = lambda self, *args: before(self, *args) * 3  # type: ignore[assignment]
    try:
        yield lambda a: m(a), same_x
    finally:
        nn.Module.__call__ = before  # type: ignore[method-assign]


@program()
def a_module_of_python_that_is_replaced() -> Any:
    name = "guard_programs_made_up"
    first, second = types.ModuleType(name), types.ModuleType(name)
    first.k, second.k = 2, 3  # type: ignore[attr-defined]
    sys.modules[name] = first

    def run(a: torch.Tensor) -> Any:
        import guard_programs_made_up as found  # type: ignore[import-not-found]

        return a * found.k

    try:
        yield run, same_x
        sys.modules[name] = second
        yield run, same_x
        second.k = 9  # type: ignore[attr-defined]
        yield run, same_x
    finally:
        del sys.modules[name]


@program()
def a_module_that_computes_its_attributes() -> Any:
    module = types.ModuleType("computing")
    state = [2]
    module.__getattr__ = lambda name: state[0]  # type: ignore[method-assign]

    def run(a: torch.Tensor) -> Any:
        return a * module.k

    yield run, same_x
    state[0] = 3
    yield run, same_x


@program()
def an_attribute_of_an_enum_member() -> Any:
    import enum

    class Color(enum.Enum):
        RED = 1

    Color.RED.note = 2  # type: ignore[attr-defined]
    yield lambda a: a * Color.RED.note, same_x  # type: ignore[attr-defined]
    Color.RED.note = 3  # type: ignore[attr-defined]
    yield lambda a: a * Color.RED.note, same_x  # type: ignore[attr-defined]


# -- other ways to reach a value


@program()
def classes_registered_with_an_abstract_one() -> Any:
    class Abstract(abc.ABC):  # noqa: B024
        pass

    class Thing:
        pass

    thing = Thing()

    def run(a: torch.Tensor) -> Any:
        return a * 2 if isinstance(thing, Abstract) else a

    yield run, same_x
    Abstract.register(Thing)
    yield run, same_x


@program("code")
def bound_methods_and_partials_as_arguments() -> Any:
    class Thing:
        def __init__(self, k: int) -> None:
            self.k = k

        def times(self, a: torch.Tensor) -> torch.Tensor:
            return a * self.k

        def minus(self, a: torch.Tensor) -> torch.Tensor:
            return a - self.k

    two, three = Thing(2), Thing(3)
    callables: list[Any] = [
        *(two.times, three.times, three.minus, functools.partial(two.times), torch.neg, torch.abs),
        *(functools.partial(torch.mul, other=k) for k in (4, 5)),
        functools.partial(torch.add, other=5),
    ]

    def run(a: torch.Tensor, callee: Any) -> Any:
        return callee(a)

    for callee in callables:
        yield run, lambda callee=callee: (x, callee)
    two.k = 10
    yield run, lambda: (x, callables[0])


@program("identity")
def functions_in_a_list() -> Any:
    functions: list[Any] = [torch.sin, torch.cos]

    def run(a: torch.Tensor) -> Any:
        return [function(a) for function in functions]

    yield run, same_x
    functions[0] = torch.exp
    yield run, same_x
    functions.append(torch.tan)
    yield run, same_x
