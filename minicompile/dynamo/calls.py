"""World: what to do with each kind of callable.

    a rule in the registry `call`          runs instead
    Python functions and methods           interpreted (inlined)
    torch functions and tensor methods     recorded in the graph
    classes                                `__new__` and `__init__`, each by the same rules
    pure C functions                       run now, on what is known
    everything else                        refused: a graph break, or the frame runs in eager

The real compiler: torch/_dynamo/variables/functions.py, builtin.py, torch.py, trace_rules.py.
"""

from __future__ import annotations

import collections
import enum
import functools
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from minicompile import compat
from minicompile.dynamo.attributes import CACHED
from minicompile.dynamo.containers import python_method
from minicompile.dynamo.interpreter import (
    C_METHODS,
    Args,
    Kwargs,
    TracedGenerator,
)
from minicompile.dynamo.refusals import TENSOR_REFUSED
from minicompile.dynamo.variables import (
    OBJECT_HASH,
    builtin_base,
    find,
    is_constant,
    is_fixed,
    is_numpy_scalar,
    library_of,
    lookup,
    words,
)
from minicompile.dynamo.world import CallRule, World, operation
from minicompile.shapes.symnode import SYMBOLIC

TORCH_FUNCTION_MODULES = words("torch.functional torch.nn.functional torch._tensor")
"""Python functions defined there are single graph nodes, not inlined."""

PURE_MODULES = words(
    "math cmath _operator itertools _functools builtins _struct numpy "
    "unicodedata _string re _sre _abc fractions numbers string textwrap keyword"
)
"""C functions of these modules have no effects and depend on nothing but their arguments."""
IMPURE = words(
    "print open input exec eval compile breakpoint globals locals vars dir __import__ id hash ascii random "
    "seed getrandbits"
)
KEEPS_ITEMS = words(
    "append insert add setdefault get pop popitem __setitem__ __getitem__ clear copy reverse "
    "move_to_end discard remove __delitem__ keys items values __len__ __iter__ __contains__ index "
    "count fromkeys"
)
"""Container methods that store or look up their arguments as they are, without reading into them."""
MUTATING = words("append insert pop popitem clear reverse add discard remove move_to_end")
"""Methods that change a container, and read no other: `builtins.py` has the rest."""
MAKES_ANOTHER = words("copy __copy__ __or__ __ror__ popitem")
"""Methods of a dict in which C code calls the class of their owner, or methods of that."""
SAFE_OBJECT_METHODS = words("__eq__ __ne__ mro __instancecheck__")
RAW_CLASSES: tuple[type, ...] = (
    *(functools.partial, types.MethodType, types.SimpleNamespace),
    *(property, staticmethod, classmethod),
)
"""C classes that keep their arguments without reading them."""
GETTERS = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
PURE_CLASSES = frozenset(
    {
        *(*RAW_CLASSES, slice, range, complex, bytes, bytearray, memoryview, object, BaseException),
        *(collections.OrderedDict, collections.defaultdict),
        *(types.MappingProxyType, types.CellType, functools.cached_property),
        *(torch.device, torch.Size, torch.finfo, torch.iinfo),
        *GETTERS,
    }
)
DISABLED = "_minicompile_disabled"
"""The attribute of functions under `mc.disable`: the reason."""
FIXED_TYPES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def is_torch_function(function: Any) -> bool:
    """Whether a callable of torch works on tensors and belongs in the graph."""
    module = getattr(function, "__module__", None) or ""
    if isinstance(function, types.FunctionType):
        return module in TORCH_FUNCTION_MODULES and not function.__name__.startswith("_")
    if isinstance(function, types.BuiltinFunctionType):
        return compat.is_operator_binding(function)
    return isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket)


TENSOR_FUNCTIONS = {
    function: name
    for name, function in torch.Tensor.__dict__.items()
    if isinstance(function, types.FunctionType)
}
"""Methods of tensors written in Python, by the name that finds them: `__pow__` calls itself pow."""


def is_tensor_method(function: Any) -> bool:
    if isinstance(function, C_METHODS):
        return issubclass(function.__objclass__, compat.TensorBase)
    return isinstance(function, types.FunctionType) and function in TENSOR_FUNCTIONS


class RecordingMode(TorchFunctionMode):
    """Sends torch calls made by native code (`sum(tensors)`, `max(a, b)`) to the graph."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.world.torch_call(func, args, kwargs or {})


@operation
def call(world: World, function: Any, args: Args, kwargs: Kwargs) -> Any:
    rule = rule_for(world, function)
    if rule is not None:
        made = rule(world, args, kwargs)
        world.note_native(made)
        return made
    handler = CALL_KINDS.get(type(function))
    if handler is not None:
        return handler(world, function, args, kwargs)
    if isinstance(function, type):
        return instantiate(world, function, args, kwargs)
    if is_torch_function(function):
        return world.torch_call(function, args, kwargs)
    if python_method(function, "__call__") is not None:
        return world.call_special(function, "__call__", *args, **kwargs)
    return call_native(world, function, args, kwargs)


def rule_for(world: World, function: Any) -> CallRule | None:
    kind = type(function)
    if kind.__hash__ is None or not (isinstance(function, type) or is_fixed(kind)):
        return None
    try:
        return world.rules.get(function)
    except TypeError:  # a method of something unhashable
        return None


# -- Python functions


def call_python(world: World, function: types.FunctionType, args: Args, kwargs: Kwargs) -> Any:
    original = function.__globals__.get("__mc_original")
    if original is not None:  # a compiled function called while capturing: part of this graph
        world.hold(original, getattr(original, "__qualname__", type(original).__name__))
        return world.call(original, args, kwargs)
    if is_tensor_method(function) or is_torch_function(function):
        return world.torch_call(function, args, kwargs)
    if late := world.rules.get(f"{function.__module__}.{function.__name__}"):
        return late(world, args, kwargs)
    if DISABLED in function.__dict__:
        world.disabled(function.__qualname__, function.__dict__[DISABLED])
    wrapped = compat.wrapped_original(function)
    if wrapped is not None:
        if not is_fixed(wrapped.__module__ or ""):
            what = f"{function.__qualname__} is under torch.compiler.disable"
            world.unsupported("disabled", what)
        return world.call(wrapped, args, kwargs)
    if library_of(function.__module__) == "numpy":
        world.unsupported("numpy", f"a call of numpy's {function.__qualname__}")
    return world.call_function(function, args, kwargs)


@operation
def disabled(world: World, name: str, reason: str) -> NoReturn:
    why = f": {reason}" if reason else ""
    world.unsupported("disabled", f"{name} is under mc.disable{why}")


@operation
def call_function(world: World, function: types.FunctionType, args: Args, kwargs: Kwargs) -> Any:
    world.frames.inlined.setdefault(f"{function.__module__}.{function.__qualname__}")
    found = world.run_function(function, args, kwargs)
    if type(found) is TracedGenerator and not found.started:
        world.note_native(found)
    return found


def call_method(world: World, method: types.MethodType, args: Args, kwargs: Kwargs) -> Any:
    if world.tracker(method) is None:
        return world.call(method.__func__, (method.__self__, *args), kwargs)
    function, value = world.part(method, "__func__"), world.part(method, "__self__")
    return world.call(function, (value, *args), kwargs)


def call_partial(world: World, partial: Any, args: Args, kwargs: Kwargs) -> Any:
    own = world.items(world.part(partial, "args"))
    keywords = world.mapping(world.part(partial, "keywords"))
    return world.call(world.part(partial, "func"), (*own, *args), {**keywords, **kwargs})


def refuse_call(world: World, function: Any, args: Args, kwargs: Kwargs) -> Any:
    world.unsupported_kind("unusual-arguments", "a call of a {}", function)


def call_cached(world: World, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function under functools.lru_cache: called now, once and for all, as its cache promises."""
    cached = world.tracker(function)
    if cached is None or cached.source.base is None:
        what = f"{function.__qualname__}, a cached function of this call alone, is called"
        world.unsupported("cached-function", what)
    world.guard("identity", cached.source, function, "a cached function")
    for value in (*args, *kwargs.values()):
        owner = world.tracker(value)
        if owner is not None and type(value).__hash__ is OBJECT_HASH:
            world.guard("identity", owner.source, value, "argument of a cached function")
        elif not is_constant(value) and not isinstance(value, FIXED_TYPES):
            what = f"{function.__qualname__}, a cached function, is called with a {{}}"
            world.unsupported_kind("cached-function", what, value)
    found = function(*map(world.pinned, args), **kwargs)
    if not is_constant(found):
        world.hold(found, f"{function.__qualname__}(...)")
    return found


# -- torch


@operation
def deep_arguments(world: World, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """A call's arguments for a graph: inside copies, all the way down."""
    return tuple(map(world.deep, args)), {key: world.deep(arg) for key, arg in kwargs.items()}


@operation
def torch_call(world: World, function: Any, args: Args, kwargs: Kwargs) -> Any:
    args, kwargs = world.deep_arguments(args, kwargs)
    if isinstance(function, types.FunctionType) and not is_tensor_method(function):
        leaves = compat.tree_leaves((args, kwargs))
        if not all(isinstance(x, torch.Tensor) or is_constant(x) for x in leaves):
            return world.call_function(function, args, kwargs)  # it is given a callable
    if getattr(function, "__name__", "").startswith("as_strided"):
        world.guard_offset(args[0] if args else kwargs.get("input"))
    if is_tensor_method(function):
        name = TENSOR_FUNCTIONS.get(function) or function.__name__
        return tensor_method(world, name, args, kwargs)
    plain = (int(x) if isinstance(x, enum.Enum) and isinstance(x, int) else x for x in args)
    return world.recorder.record("call_function", function, tuple(plain), kwargs)


def tensor_method(world: World, name: str, args: Args, kwargs: Kwargs) -> Any:
    if name in TENSOR_REFUSED:
        world.unsupported(*TENSOR_REFUSED[name])
    if name == "requires_grad_":
        world.recorder.switch_gradient(*args, **kwargs)
        return args[0]
    return world.recorder.record("call_method", name, args, kwargs)


# -- builtins and C functions


def call_builtin(world: World, function: Any, args: Args, kwargs: Kwargs) -> Any:
    owner, known = function.__self__, world.tracker(function)
    bound = owner is not None and not isinstance(owner, types.ModuleType | type)
    if bound and known is not None:  # a method from outside: so is what it is bound to
        owner = world.part(function, "__self__")
        if isinstance(owner, torch.Tensor):
            return world.call(world.load_attr(owner, function.__name__), args, kwargs)
    if is_torch_function(function):
        return world.torch_call(function, args, kwargs)
    if bound:
        definition = find(type(owner), function.__name__)
        if isinstance(definition, C_METHODS):
            return world.call(definition, (owner, *args), kwargs)
    if isinstance(owner, type) and function.__name__ == "__new__":
        return native_new(world, function, args, kwargs)
    return call_native(world, function, args, kwargs)


def call_native(world: World, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a pure C function now."""
    module = getattr(function, "__module__", None) or getattr(type(function), "__module__", "")
    name = getattr(function, "__qualname__", None) or type(function).__name__
    owner = getattr(function, "__self__", None)
    pure = module in PURE_MODULES
    if isinstance(owner, type):
        pure |= owner in (dict, str, bytes, int, float, collections.OrderedDict)
    if is_numpy_scalar(owner) or type(function).__module__ == "numpy":
        pure = all(map(is_constant, (*args, *kwargs.values())))
    if not pure or name in IMPURE:
        timed = module in ("time", "random", "_random")
        id = "time-or-random" if timed else "unknown-c-function"
        world.unsupported(id, f"a call of {module}.{name}, which capture does not know")
    return world.run_native(function, args, kwargs)


@operation
def run_native(world: World, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call C code now, on what is known; torch calls that it makes are recorded."""
    if any(isinstance(arg, SYMBOLIC) for arg in args):
        numbers = all(isinstance(arg, (int, float, *SYMBOLIC)) for arg in args) and not kwargs
        if numbers and isinstance(function, types.BuiltinFunctionType):
            module = library_of(function.__module__)
            places = ", ".join(f"{{{place}}}" for place in range(len(args)))
            form = f"{module}.{function.__name__}({places})"
            return world.computed(form, *args, function=function)
        args = tuple(map(world.pinned, args))
    with RecordingMode(world):
        prepared = {key: world.native_argument(value) for key, value in kwargs.items()}
        made = function(*map(world.native_argument, args), **prepared)
    world.note_native(made)
    return made


@operation
def native_argument(world: World, value: Any) -> Any:
    """An argument for C code: containers as inside copies, Python functions as callbacks."""
    if isinstance(value, (torch.Tensor, type)) or is_constant(value):
        return value
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return functools.partial(world.callback, value)
    if builtin_base(value) is not None:
        return world.deep(value)
    for name in ("__index__", "__float__", "__int__", "__abs__", "__round__"):
        if python_method(value, name) is not None:
            what = f"C code calls {type(value).__name__}.{name}"
            world.unsupported("unusual-arguments", what)
    tracker = world.tracker(value)
    if tracker is None or isinstance(value, (*FIXED_TYPES, enum.Enum)):
        return value
    what = f"C code reads {tracker.source} (a {type(value).__name__})"
    return world.unsupported("outside-object", what)


@operation
def callback(world: World, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    return world.call(function, args, kwargs)


def call_descriptor(world: World, method: Any, args: Args, kwargs: Kwargs) -> Any:
    """A method that C code defines: of tensors, containers, strings, object."""
    if is_tensor_method(method):
        return world.torch_call(method, args, kwargs)
    owner, rest = args[0], args[1:]
    tracker, name = world.tracker(owner), method.__name__
    if name in MAKES_ANOTHER and isinstance(owner, dict):
        world.check_overrides(owner)
    if tracker is not None and builtin_base(owner) is not None:
        if name in MUTATING:
            done = {"add": True, "discard": False}.get(name) if isinstance(owner, set) else None
            if done is not None and world.holds(owner, *rest) is done:
                return None  # nothing changes: nn.Module does this where a buffer is set
            return method(world.mutable(owner), *rest, **kwargs)
        owner = world.inside(owner)
    elif tracker is not None and name not in SAFE_OBJECT_METHODS:
        where = f"{tracker.source}, which C code defines"
        world.unsupported("outside-object", f"the method {method.__qualname__} of {where}")
    module = method.__objclass__.__module__
    known = module in PURE_MODULES or is_fixed(module)
    if not known and not isinstance(owner, BaseException | enum.Enum):
        where = f"{module}.{method.__qualname__}"
        world.unsupported("unknown-c-function", f"the method {where}")
    if method.__objclass__ is str and name in ("format", "format_map"):
        rest = tuple(map(world.as_text, rest))
        kwargs = {key: world.as_text(value) for key, value in kwargs.items()}
    if name in KEEPS_ITEMS:
        hashed = isinstance(owner, dict | set | frozenset)
        made = method(owner, *(map(world.pinned, rest) if hashed else rest), **kwargs)
        world.note_native(made)
        return made
    return world.run_native(functools.partial(method, owner), rest, kwargs)


# -- classes


def instantiate(world: World, cls: type, args: Args, kwargs: Kwargs) -> Any:
    if issubclass(cls, torch.Tensor):
        what = f"a {cls.__name__} is made inside the captured function"
        world.unsupported("tensor-kind", what, "make it before the call")
    if python_method(cls, "__call__") is not None:
        return world.call_special(cls, "__call__", *args, **kwargs)
    return world.construct(cls, args, kwargs)


@operation
def construct(world: World, cls: type, args: Args, kwargs: Kwargs) -> Any:
    """What `type.__call__` does."""
    if issubclass(cls, BaseException):  # they are turned into text
        args = tuple(map(world.pinned, args))
    if any("__del__" in owner.__dict__ for owner in cls.__mro__):
        what = f"{cls.__name__} objects do something when they die (`__del__`)"
        world.unsupported("class-change", what)
    maker = lookup(cls, "__new__")
    if isinstance(maker, staticmethod):
        function = world.wrap_part(cls, "__new__", maker, "__func__")
        made = world.call(function, (cls, *args), kwargs)
    else:
        made = native_new(world, maker, (cls, *args), kwargs)
    if not isinstance(made, cls):
        return made
    initializer = lookup(type(made), "__init__")
    if isinstance(initializer, types.FunctionType):
        world.call_special(made, "__init__", *args, **kwargs)
    elif isinstance(made, BaseException):
        initializer(made, *args, **kwargs)
    else:
        world.call(initializer, (made, *args), kwargs)
    if isinstance(made, BaseException):
        world.note_native(made)  # a frame that ends with it is cut before it is made
    return made


def native_new(world: World, maker: Any, args: Args, kwargs: Kwargs) -> Any:
    """`cls.__new__` as C code defines it."""
    cls, rest = args[0], args[1:]
    if maker is object.__new__:
        return maker(cls, *rest, **kwargs)
    if maker is type.__new__:
        world.unsupported("class-change", "a class is made")
    if issubclass(cls, BaseException):
        return maker(cls, *rest, **kwargs)
    bases = cls.__mro__[:-1]
    if not any(base in PURE_CLASSES or base.__module__ in PURE_MODULES for base in bases):
        where = f"{cls.__module__}.{cls.__qualname__}"
        what = f"the class {where}, which C code defines, is instantiated"
        world.unsupported("unknown-c-function", what)
    if cls in RAW_CLASSES:
        made = maker(cls, *rest, **kwargs)
        world.note_native(made)
        return made
    return world.run_native(functools.partial(maker, cls), rest, kwargs)


CALL_KINDS: dict[type, Callable[..., Any]] = {
    types.FunctionType: call_python,
    types.MethodType: call_method,
    types.BuiltinFunctionType: call_builtin,
    **dict.fromkeys(C_METHODS, call_descriptor),
    functools.partial: call_partial,
    weakref.ReferenceType: lambda world, ref, *_: world.below(ref, "referent", None, ref()),
    CACHED: call_cached,
    **dict.fromkeys((types.MethodWrapperType, *GETTERS), refuse_call),
}
"""What runs a call of each exact type of callable."""
