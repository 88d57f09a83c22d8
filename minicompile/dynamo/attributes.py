"""Attribute access as Python defines it, one step at a time, so that each step can be guarded or interpreted.

Order: a data descriptor of the class, the instance's `__dict__`, any other class attribute, `__getattr__`.
Properties, Python descriptors and `__getattribute__`/`__getattr__`/`__setattr__` written in Python are
interpreted.
The real compiler: torch/_dynamo/variables/user_defined.py, nn_module.py.
"""

from __future__ import annotations

import collections
import enum
import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from minicompile import compat
from minicompile.dynamo.interpreter import C_METHODS, DELETED, TracedGenerator
from minicompile.dynamo.outside import ABSENT
from minicompile.dynamo.refusals import TENSOR_REFUSED
from minicompile.dynamo.result import Source
from minicompile.dynamo.variables import (
    HEAP_TYPE,
    IDENTITY_TYPES,
    MISSING,
    MODULE_TABLES,
    READERS,
    VariableTracker,
    find,
    flags_of,
    is_constant,
    is_fixed,
    owner_of,
    plain_dict,
    words,
)
from minicompile.dynamo.world import World, operation

CACHED = type(functools.lru_cache(len))
OWN_LOOKUP = (threading.local, weakref.ProxyType, weakref.CallableProxyType)
"""Classes whose attributes C code looks up in a way of its own."""
TUPLE_FIELD = type(vars(collections.namedtuple("Field", "x"))["x"])

STANDS_FOR: dict[type, type] = {
    torch.SymInt: int,
    torch.SymFloat: float,
    TracedGenerator: types.GeneratorType,
}
"""What Python sees in place of classes that only capture uses."""
TENSOR_METADATA = words(
    "shape dtype device ndim layout requires_grad itemsize nbytes names is_cuda is_cpu is_sparse "
    "is_quantized is_meta is_nested is_mkldnn is_mps is_xpu is_sparse_csr is_mtia is_ipu is_vulkan "
    "is_maia is_xla"
)
"""Attributes that follow from guarded metadata."""
TENSOR_VALUES = words("T mT H mH real imag")
"""Attributes that are tensors computed from it."""


def unknown(name: str) -> tuple[str, str]:
    return "tensor-attribute", f"the tensor attribute {name!r}"


@operation
def load_attr(world: World, value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor):
        return world.tensor_attribute(value, name)
    if type(value) is super:
        return super_attribute(world, value, name)
    value = world.pinned(value)
    getter = find(type(value), "__getattribute__")
    try:
        if isinstance(getter, types.FunctionType):
            return world.call_special(value, "__getattribute__", name)
        if isinstance(value, types.ModuleType):
            return module_attribute(world, value, name)
        if isinstance(value, type):
            return world.class_attribute(value, name)
        if isinstance(value, OWN_LOOKUP):
            looks_up_itself(world, value, name)
        return world.generic_attribute(value, name)
    except AttributeError as error:
        if world.frames.abort is not None or isinstance(value, types.ModuleType):
            raise
        return missing_attribute(world, value, name, error)


@operation
def no_attribute(world: World, value: Any, name: str) -> NoReturn:
    kind = world.type_of(value).__name__
    text = f"{kind!r} object has no attribute {name!r}"
    raise AttributeError(text, name=name, obj=value)


@operation
def generic_attribute(world: World, value: Any, name: str) -> Any:
    """Look an attribute up as `object.__getattribute__` does."""
    cls = type(value)
    definition = find(cls, name)
    if definition is MISSING or not is_data_descriptor(definition):
        found = instance_attribute(world, value, name)
        if found is not MISSING:
            return found
    if definition is not MISSING:
        return bind_attribute(world, value, cls, cls, name, definition)
    return world.no_attribute(value, name)


def is_data_descriptor(definition: Any) -> bool:
    return hasattr(type(definition), "__set__") or hasattr(type(definition), "__delete__")


def instance_attribute(world: World, value: Any, name: str) -> Any:
    namespace = world.namespace(value)
    if namespace is None:
        return MISSING
    if (
        isinstance(value, torch.nn.Module)
        and name not in namespace
        and any(name in namespace.get(table, ()) for table in MODULE_TABLES)
    ):
        return MISSING  # fetching from the table checks that nothing shadows it
    return world.dict_get(namespace, name)


def missing_attribute(world: World, value: Any, name: str, error: AttributeError) -> Any:
    """`__getattr__`, or the error of the lookup before it."""
    function = find(type(value), "__getattr__")
    if function is compat.module_getattr:
        found = module_table_attribute(world, value, name)
        if found is not MISSING:
            return found
    elif function is not MISSING:
        return world.call_special(value, "__getattr__", name)
    elif isinstance(value, types.MethodType):
        return world.load_attr(world.part(value, "__func__"), name)
    if may_be_there(value, name):
        looks_up_itself(world, value, name)
    raise error


def looks_up_itself(world: World, value: Any, name: str) -> NoReturn:
    what = f"the attribute {name!r} of a {{}}, which looks attributes up in its own way"
    world.unsupported_kind("attribute-kind", what, value)


def may_be_there(value: Any, name: str) -> bool:
    """Whether C code may find an attribute that Python's usual lookup did not."""
    if isinstance(value, TracedGenerator):
        return hasattr(types.GeneratorType, name)
    owner = owner_of(type(value), "__getattribute__")
    if owner is None or owner is object or isinstance(value, type):
        return False
    by_python = isinstance(find(owner, "__getattribute__"), types.FunctionType)
    if by_python or name in (plain_dict(value) or ()):
        return False
    return not is_fixed(owner) or hasattr(value, name)


def module_table_attribute(world: World, module: torch.nn.Module, name: str) -> Any:
    """A parameter, buffer or submodule."""
    searched = []
    for table_name in MODULE_TABLES:
        table = instance_attribute(world, module, table_name)
        tracker = world.tracker(table)
        if name in table or (tracker is not None and name in tracker.writes):
            return world.dict_get(table, name)
        if tracker is not None:
            searched.append(tracker)
    for tracker in searched:
        world.guard("absent", tracker.source, name, ABSENT)
    return MISSING


# -- class attributes and descriptors


def wrap_class_attribute(world: World, cls: type, name: str, definition: Any) -> Any:
    """A class attribute's raw value, guarded unless the class is written in C."""
    owner = owner_of(cls, name)
    assert owner is not None
    if not flags_of(cls) & HEAP_TYPE:
        return definition
    world.class_tracker(cls)
    return world.below(cls, "class_attribute", name, definition)


@operation
def wrap_part(world: World, cls: type, name: str, definition: Any, part: str) -> Any:
    """The function inside a classmethod, staticmethod, property or cached_property."""
    return world.part(wrap_class_attribute(world, cls, name, definition), part)


def bind_attribute(
    world: World, value: Any, cls: type, where: type, name: str, definition: Any
) -> Any:
    """The descriptor protocol: what the class `where` defines, seen through an instance of `cls`.

    `value` is MISSING where it is seen through `cls` itself.
    """
    kind = type(definition)
    if kind is classmethod:
        return types.MethodType(world.wrap_part(where, name, definition, "__func__"), cls)
    if kind is staticmethod:
        return world.wrap_part(where, name, definition, "__func__")
    if kind is types.ClassMethodDescriptorType:
        return definition.__get__(None, cls)
    if value is not MISSING:
        if cls is TracedGenerator and kind is types.FunctionType:  # a break calls eager's
            return types.MethodType(getattr(types.GeneratorType, name), value)
        if kind is types.FunctionType or kind is CACHED:
            return types.MethodType(wrap_class_attribute(world, where, name, definition), value)
        if kind in C_METHODS:
            return types.MethodType(definition, value)
        if issubclass(kind, property) and find(kind, "__get__") is property.__get__:
            return world.call(world.wrap_part(where, name, definition, "fget"), (value,), {})
        if kind in READERS:
            return slot_attribute(world, value, name, definition)
        if kind is TUPLE_FIELD:
            index = definition.__reduce__()[1][0]  # of a named tuple
            return world.below(value, "item", index, tuple.__getitem__(value, index))
        if isinstance(value, enum.Enum):
            return native_value(world, value, name)
        if kind is functools.cached_property:
            computed = world.call(world.wrap_part(where, name, definition, "func"), (value,), {})
            store_instance(world, value, name, computed)
            return computed
    attribute, getter = (
        wrap_class_attribute(world, where, name, definition),
        find(kind, "__get__"),
    )
    if isinstance(getter, types.FunctionType):
        instance = None if value is MISSING else value
        return world.call_special(attribute, "__get__", instance, cls)
    if getter is MISSING or value is MISSING:
        return attribute
    return world.unsupported("attribute-kind", f"the attribute {name!r} is a {kind.__name__}")


def slot_attribute(world: World, value: Any, name: str, definition: Any) -> Any:
    """An attribute stored by C code: `__slots__`, `method.__func__`, `__dict__`, `__class__`."""
    if name == "__class__":
        return world.type_of(value)
    owner = world.tracker(value)
    read = functools.partial(definition.__get__, value, type(value))
    if owner is None:
        found = read()
        if name == "__dict__":
            world.outside.namespaces[id(found)] = value
        return world.realize(found)
    if name == "__dict__" and (namespace := world.namespace(value)) is not None:
        return namespace
    if name in owner.slots and type(definition) is types.MemberDescriptorType:
        return owner.slots[name]
    try:
        return read_slot(world, owner, name, read)
    except AttributeError:
        return world.unsupported("no-value-yet", f"{owner.source}.{name} has no value yet")


def native_value(world: World, value: Any, name: str) -> Any:
    """An attribute that Python itself may read: of enum members and classes."""
    found, owner = getattr(value, name), world.tracker(value)
    fixed = isinstance(value, enum.Enum) or is_fixed(value)
    if owner is None or (is_constant(found) and fixed) or world.tracker(found) is not None:
        return found
    return read_slot(world, owner, name, functools.partial(getattr, value, name))


def read_slot(world: World, owner: VariableTracker, name: str, read: Callable[[], Any]) -> Any:
    """Read an attribute that C code stores. One whose identity can't be guarded, because each read makes a
    new object, is refused."""
    found = read()
    if found is not read() and isinstance(found, IDENTITY_TYPES):
        world.unsupported("attribute-kind", f"{name!r} is a new object at each read")
    return world.wrap(found, Source("slot", name, owner.source))


@operation
def class_attribute(world: World, cls: type, name: str) -> Any:
    definition, meta, is_enum = find(cls, name), type(cls), isinstance(cls, enum.EnumType)
    of_meta = find(meta, name)  # a data descriptor comes first, such as `__name__` of type
    if definition is not MISSING and not is_enum and not is_data_descriptor(of_meta):
        return bind_attribute(world, MISSING, cls, cls, name, definition)
    if isinstance(of_meta, types.FunctionType | property) and not is_enum:
        return bind_attribute(world, cls, meta, meta, name, of_meta)
    if of_meta is MISSING and not is_enum:
        world.no_attribute(cls, name)
    world.class_tracker(cls)
    if type(of_meta) in C_METHODS:  # `C.mro` is a new object at each read
        return types.MethodType(of_meta, cls)
    return native_value(world, cls, name)


def super_attribute(world: World, parent: Any, name: str) -> Any:
    """An attribute of `super()`: looked up after the current class, bound to the instance."""
    cls, mro = parent.__self_class__, parent.__self_class__.__mro__
    value = MISSING if parent.__self__ is cls else parent.__self__
    for where in mro[mro.index(parent.__thisclass__) + 1 :]:
        if name in where.__dict__:
            return bind_attribute(world, value, cls, where, name, where.__dict__[name])
    return world.no_attribute(parent, name)


def module_attribute(world: World, module: types.ModuleType, name: str) -> Any:
    world.hold(module, module.__name__)
    cls, namespace = type(module), world.namespace(module)
    tracker = world.tracker(namespace)
    if name in namespace or (tracker is not None and name in tracker.writes):
        found = world.dict_get(namespace, name)
        if found is not MISSING:
            return found
    if flags_of(cls) & HEAP_TYPE and find(cls, name) not in (MISSING, find(types.ModuleType, name)):
        world.unsupported("attribute-kind", f"the class of {module.__name__} defines {name!r}")
    if find(cls, name) is not MISSING:
        return native_value(world, module, name)
    if is_fixed(module) or find(cls, "__getattr__") is not MISSING:
        found = getattr(module, name, MISSING)  # a module may load its names on demand
        if name in namespace:
            return world.dict_get(namespace, name)
        if found is not MISSING:
            if not is_constant(found):
                world.hold(found, f"{module.__name__}.{name}")
            return found
    world.dict_get(namespace, name)  # guards that it is missing
    compute = world.dict_get(namespace, "__getattr__")
    if compute is not MISSING and not is_fixed(module):
        return world.call(compute, (name,), {})
    return world.no_attribute(module, name)


@operation
def special(world: World, value: Any, name: str) -> Any:
    cls = type(value)
    definition = MISSING if isinstance(value, torch.Tensor) else find(cls, name)
    if definition is MISSING:
        world.no_attribute(value, name)
    return bind_attribute(world, value, cls, cls, name, definition)


@operation
def type_of(world: World, value: Any) -> Any:
    """`type(value)`: the real class behind a fake tensor, a symbolic number or a generator."""
    if isinstance(value, torch.Tensor):
        owner = world.tracker(value)
        return torch.Tensor if owner is None or owner.real is None else type(owner.real)
    return STANDS_FOR.get(type(value), type(value))


# -- tensors


@operation
def tensor_attribute(world: World, fake: torch.Tensor, name: str) -> Any:
    if name in TENSOR_METADATA:
        return getattr(fake, name)
    if name in TENSOR_VALUES:
        return world.recorder.record("call_function", getattr, (fake, name), {})
    if name == "is_leaf" and (not fake.requires_grad or world.tracker(fake) is None):
        return fake.is_leaf
    if name == "__class__":
        return world.type_of(fake)
    owner = world.tracker(fake)
    if name == "grad" and owner is not None and fake.is_leaf and owner.real.grad is None:
        return world.wrap(None, Source("slot", name, owner.source))
    if hasattr(torch.Tensor, name):
        definition = find(torch.Tensor, name)
        if callable(definition):  # calling it may be refused
            return types.MethodType(
                wrap_class_attribute(world, torch.Tensor, name, definition), fake
            )
        world.unsupported(*TENSOR_REFUSED.get(name, unknown(name)))
    namespace = plain_dict(owner.real) if owner is not None and owner.real is not None else None
    if owner is not None and namespace is not None:
        if name in namespace:
            return world.wrap(namespace[name], Source("attribute", name, owner.source))
        world.guard("absent", Source("namespace", None, owner.source), name, ABSENT)
    return world.no_attribute(fake, name)


# -- writing


@operation
def store_attr(world: World, value: Any, name: str, new: Any) -> None:
    """Set an attribute; delete it where `new` is DELETED."""
    if isinstance(value, torch.Tensor):
        if name != "requires_grad" or new is DELETED:
            world.unsupported("tensor-attribute", f"the attribute {name!r} of a tensor is set")
        world.recorder.switch_gradient(value, new)
        return
    if isinstance(value, type):
        what = f"the class attribute {value.__name__}.{name} is set"
        world.unsupported("class-change", what)
    if new is DELETED:
        done = world.call_special(value, "__delattr__", name)
    else:
        done = world.call_special(value, "__setattr__", name, new)
    if done is NotImplemented:
        world.generic_store(value, name, new)


@operation
def generic_store(world: World, value: Any, name: str, new: Any) -> None:
    """What `object.__setattr__` does, and `object.__delattr__` where `new` is DELETED."""
    if isinstance(value, OWN_LOOKUP):
        looks_up_itself(world, value, name)
    cls, owner = type(value), world.tracker(value)
    definition, deleted = find(cls, name), new is DELETED
    if isinstance(definition, property) and definition.fset is not None and not deleted:
        world.call(world.wrap_part(cls, name, definition, "fset"), (value, new), {})
    elif isinstance(definition, types.MemberDescriptorType) and owner and not deleted:
        world.mark_written(owner)
        owner.slots[name] = new
    elif definition is not MISSING and is_data_descriptor(definition):
        if owner is not None or type(definition) not in READERS:
            what = f"the attribute {name!r} is changed by a {type(definition).__name__}"
            world.unsupported("attribute-kind", what)
        write_now(value, name, new)
    else:
        store_instance(world, value, name, new)


def store_instance(world: World, value: Any, name: str, new: Any) -> None:
    owner = world.tracker(value)
    if owner is None:
        write_now(value, name, new)
        return
    namespace = world.namespace(value)
    if namespace is None:
        kind = type(value).__name__
        world.unsupported("outside-change", f"an attribute of {owner.source} (a {kind}) is set")
    if new is not DELETED:
        world.dict_set(namespace, name, new)
    elif world.dict_get(namespace, name) is MISSING:
        world.no_attribute(value, name)
    else:
        world.dict_delete(namespace, name)


@operation
def part(world: World, value: Any, name: str) -> Any:
    """An attribute stored by C code, such as `partial.func`."""
    return world.below(value, "slot", name, getattr(value, name))


def write_now(value: Any, name: str, new: Any) -> None:
    """Set or delete an attribute of an object that the frame made. Raises as Python would."""
    if new is DELETED:
        object.__delattr__(value, name)
    else:
        object.__setattr__(value, name, new)
