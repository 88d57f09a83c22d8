"""More programs whose outside changes: tensors, global state, modules, other ways to reach a value."""

from __future__ import annotations

import abc
import contextvars
import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import minicompile as mc
from tests.dynamo.guard_programs import PROGRAMS as PROGRAMS
from tests.dynamo.guard_programs import program, same_x, x

TENSOR = torch.ones(4)


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
def a_tensor_that_needs_a_gradient_or_not_under_no_grad() -> Any:
    def run(a: torch.Tensor) -> Any:
        return a * 2 if a.requires_grad else a * 3

    for flag in (False, True, False):
        with torch.no_grad():
            yield run, lambda flag=flag: (x.clone().requires_grad_(flag),)


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
def the_memory_below_a_tensor() -> Any:
    base = torch.arange(6.0)

    def run(a: torch.Tensor) -> Any:
        return torch.as_strided(a, (2, 2), (1, 1), 1) * 2

    yield run, lambda: (torch.arange(4.0),)
    yield run, lambda: (base[2:],)
    yield run, lambda: (base[:4],)


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


@program("tensor")
def a_tensor_replaced_by_another() -> Any:
    global TENSOR

    def run(a: torch.Tensor) -> Any:
        return a + TENSOR, TENSOR.shape

    before = TENSOR
    yield run, same_x
    TENSOR.add_(1)
    yield run, same_x
    TENSOR = torch.zeros(4)
    yield run, same_x
    TENSOR = torch.zeros(1)
    yield run, same_x
    TENSOR = 5  # type: ignore[assignment]
    yield run, same_x
    TENSOR = before


# -- global state


def with_setting(set_it: Any, value: Any, before: Any, run: Any) -> Iterator[Any]:
    yield run, same_x
    set_it(value)
    try:
        yield run, same_x
    finally:
        set_it(before)
    yield run, same_x


def read_back(reader: Any) -> Any:
    return lambda a: (a * 2 if reader() else a * 3, str(reader()))


@program("global_state")
def the_default_dtype() -> Any:
    def run(a: torch.Tensor) -> Any:
        return a.sum(), torch.zeros(2), str(torch.get_default_dtype())

    yield from with_setting(torch.set_default_dtype, torch.float64, torch.float32, run)


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
    with torch.autocast("cpu", torch.bfloat16):
        yield run, same_x
    with torch.autocast("cpu", torch.float16):
        yield run, same_x
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        yield run, same_x
    yield run, same_x


@program("global_state")
def deterministic_algorithms() -> Any:
    reader = torch.are_deterministic_algorithms_enabled
    yield from with_setting(
        torch.use_deterministic_algorithms, True, False, lambda a: (a, reader())
    )


@program()
def deterministic_algorithms_that_only_warn() -> Any:
    reader = torch.is_deterministic_algorithms_warn_only_enabled
    yield from with_setting(
        lambda on: torch.use_deterministic_algorithms(on, warn_only=on),
        *(True, False, lambda a: (a, reader())),
    )


@program()
def matmul_precision() -> Any:
    set_it = torch.set_float32_matmul_precision
    reader = torch.get_float32_matmul_precision

    def run(a: torch.Tensor) -> Any:
        return a * 2, reader()

    for value in ("high", "medium"):
        yield from with_setting(set_it, value, "highest", run)


@program()
def the_newer_settings_of_precision() -> Any:
    owner = torch.backends.mkldnn.matmul
    before = owner.fp32_precision

    def run(a: torch.Tensor) -> Any:
        return a @ a.t(), owner.fp32_precision

    yield from with_setting(
        lambda value: setattr(owner, "fp32_precision", value), "bf16", before, run
    )


def backend_flag(owner: Any, name: str) -> Iterator[Any]:
    before = getattr(owner, name)

    def run(a: torch.Tensor) -> Any:
        return a * 2, getattr(owner, name)

    yield from with_setting(lambda value: setattr(owner, name, value), not before, before, run)


@program("equals")
def flags_of_torch_backends() -> Any:
    yield from backend_flag(torch.backends.cudnn, "enabled")


@program()
def other_flags_of_torch_backends() -> Any:
    yield from backend_flag(torch.backends.cudnn, "deterministic")


@program()
def tf32() -> Any:
    yield from backend_flag(torch.backends.cuda.matmul, "allow_tf32")


@program()
def attention_kernels_that_are_allowed() -> Any:
    yield from with_setting(
        torch.backends.cuda.enable_math_sdp,
        *(False, True, read_back(torch.backends.cuda.math_sdp_enabled)),
    )


@program()
def anomaly_mode() -> Any:
    yield from with_setting(
        torch.autograd.set_detect_anomaly, True, False, read_back(torch.is_anomaly_enabled)
    )


@program()
def the_default_device() -> Any:
    def run(a: torch.Tensor) -> Any:
        return str(torch.zeros(2).device), a.device

    yield run, same_x
    torch.set_default_device("meta")
    try:
        yield run, same_x
    finally:
        torch.set_default_device(None)
    with torch.device("meta"):
        yield run, same_x
    yield run, same_x


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


@program("length")
def hooks_of_all_modules() -> Any:
    m = linear()
    yield lambda a: m(a), same_x
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out + 1)
    try:
        yield lambda a: m(a), same_x
    finally:
        handle.remove()
    yield lambda a: m(a), same_x


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
def everything_in_a_module() -> Any:
    m = nn.Sequential(linear(), nn.Dropout(0.0), nn.Sigmoid())

    class Doubled(nn.Linear):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return super().forward(a) * 2

    def run(a: torch.Tensor) -> Any:
        return m(a)

    changes: list[Callable[[], Any]] = [
        *(m.eval, m.train, lambda: setattr(m[0], "bias", None)),
        *(lambda: setattr(m[0], "__class__", Doubled), lambda: setattr(m[0], "forward", abs)),
        *(lambda: delattr(m[0], "forward"), lambda: m.__setitem__(0, linear())),
        *(lambda: m.append(nn.Tanh()), lambda: m.requires_grad_(False)),
        *(lambda: setattr(m[0], "weight", nn.Parameter(torch.zeros(4, 4))), m.half, m.double),
        *(lambda: setattr(m[0], "bias", nn.Parameter(torch.ones(4))), m.float),
        *(lambda: delattr(m, "3"), lambda: m[0]._parameters.pop("weight")),
        lambda: setattr(m[0], "weight", torch.eye(4)),
    ]
    yield run, same_x
    for change in changes:
        change()
        yield run, lambda: (x.to(getattr(m[0], "weight", x).dtype),)


@program("identity")
def methods_of_torch_that_are_replaced() -> Any:
    m = linear()
    before = nn.Linear.forward
    yield lambda a: m(a), same_x
    nn.Linear.forward = lambda self, a: a * 7  # type: ignore[assignment,method-assign]
    try:
        yield lambda a: m(a), same_x
    finally:
        nn.Linear.forward = before  # type: ignore[method-assign]
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


@program("equals")
def references_context_variables_and_partials() -> Any:
    class Thing:
        k = 1

        def __init__(self, k: int) -> None:
            self.k = k

    one, variable = Thing(2), contextvars.ContextVar("variable", default=0)
    reference = weakref.ref(one)
    variable.set(4)
    partial = functools.partial(lambda a, b: a * b, b=3)

    def run(a: torch.Tensor) -> Any:
        return partial(a) * reference().k + variable.get()  # type: ignore[union-attr]

    yield run, same_x
    one.k = 5
    yield run, same_x
    variable.set(7)
    yield run, same_x
    partial.keywords["b"] = 9
    yield run, same_x


@program()
def properties_slots_and_descriptors() -> Any:
    class Ten:
        value = 10

        def __get__(self, owner: Any, cls: Any) -> int:
            return self.value

    class Thing:
        __slots__ = ("k",)
        ten = Ten()

        def __init__(self) -> None:
            self.k = 2

        @property
        def double(self) -> int:
            return self.k * 2

    thing = Thing()

    def run(a: torch.Tensor) -> Any:
        return a * thing.k + thing.double + thing.ten

    yield run, same_x
    thing.k = 5
    yield run, same_x
    Ten.value = 11
    yield run, same_x
    Thing.double = property(lambda self: 1)  # type: ignore[assignment,method-assign]
    yield run, same_x


@program()
def parameters_that_are_tied() -> Any:
    first, second = linear(), linear()
    second.weight.data.fill_(0.25)

    def run(a: torch.Tensor) -> Any:
        return first(a) + second(a) * 2

    yield run, same_x
    second.weight = first.weight
    yield run, same_x
    second.weight = nn.Parameter(torch.full((4, 4), 0.75))
    yield run, same_x
    second.weight.data = first.weight.data
    yield run, same_x


@program("memory", backend="aot_eager")
def statistics_that_share_memory() -> Any:
    # a half is exact in every order of operations
    first, second = nn.BatchNorm1d(4, momentum=0.5), nn.BatchNorm1d(4, momentum=0.5)

    def run(a: torch.Tensor) -> Any:
        first(a)
        second(a * 2 + 1)
        return first.running_mean * 1, second.running_mean * 1  # type: ignore[operator]

    def fresh() -> Any:
        first.reset_running_stats()
        second.reset_running_stats()
        return (torch.arange(8.0).view(2, 4),)

    yield run, fresh
    second.running_mean = first.running_mean.view(4)  # type: ignore[operator]
    yield run, fresh


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


@program()
def base_classes_of_super() -> Any:
    class Base:
        def scale(self, a: torch.Tensor) -> torch.Tensor:
            return a * 2

    class Thing(Base):
        def scale(self, a: torch.Tensor) -> torch.Tensor:
            return super().scale(a) + 1

    thing = Thing()

    def run(a: torch.Tensor) -> Any:
        return thing.scale(a), isinstance(thing, Base), [Base, Thing][0].scale(thing, a)

    yield run, same_x
    Base.scale = lambda self, a: a * 9  # type: ignore[assignment,method-assign]
    yield run, same_x


@program("equals")
def the_environment() -> Any:
    name = "GUARD_PROGRAMS"

    def run(a: torch.Tensor) -> Any:
        return a * int(os.environ.get(name, "7")), os.getenv(name), name in os.environ

    for value in ("1", "2"):
        os.environ[name] = value
        yield run, same_x
    del os.environ[name]
    yield run, same_x


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
