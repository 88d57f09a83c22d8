"""Attribute access as Python defines it, one step at a time, so that each step can be guarded or interpreted.

Order: a data descriptor of the class, the instance's `__dict__`, any other class attribute, `__getattr__`.
Properties, Python descriptors and `__getattribute__`/`__getattr__`/`__setattr__` written in Python are
interpreted.
The real compiler: torch/_dynamo/variables/user_defined.py, nn_module.py.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import threading
import types
import weakref
from typing import Any, NoReturn

import torch

from minicompile import compat
from minicompile.dynamo.interpreter import C_METHODS, DELETED, UNBOUND, TracedGenerator
from minicompile.dynamo.outside import ABSENT, Outside
from minicompile.dynamo.refusals import TENSOR_REFUSED
from minicompile.dynamo.result import Source
from minicompile.dynamo.variables import (
    HEAP_TYPE,
    IDENTITY_TYPES,
    MISSING,
    MODULE_TABLES,
    READERS,
    find,
    flags_of,
    is_constant,
    is_fixed,
    owner_of,
    plain_dict,
    words,
)

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


class Attributes(Outside):
    """Loads, stores and deletes attributes."""

    def load_attr(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor_attribute(value, name)
        if type(value) is super:
            return self.super_attribute(value, name)
        value = self.pinned(value)
        getter = find(type(value), "__getattribute__")
        try:
            if isinstance(getter, types.FunctionType):
                return self.call_defined(value, "__getattribute__", getter, name)
            if isinstance(value, types.ModuleType):
                return self.module_attribute(value, name)
            if isinstance(value, type):
                return self.class_attribute(value, name)
            if isinstance(value, OWN_LOOKUP):
                self.looks_up_itself(value, name)
            return self.generic_attribute(value, name)
        except AttributeError as error:
            if self.abort is not None or isinstance(value, types.ModuleType):
                raise
            return self.missing_attribute(value, name, error)

    def call_defined(
        self, value: Any, method: str, function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method that the value's class defines in Python."""
        wrapped = self.wrap_class_attribute(type(value), method, function)
        return self.call(wrapped, (value, *args), kwargs)

    def no_attribute(self, value: Any, name: str) -> NoReturn:
        kind = self.type_of(value).__name__
        text = f"{kind!r} object has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=value)

    def generic_attribute(self, value: Any, name: str) -> Any:
        """Look an attribute up as `object.__getattribute__` does."""
        cls = type(value)
        definition = find(cls, name)
        if definition is MISSING or not self.is_data_descriptor(definition):
            found = self.instance_attribute(value, name)
            if found is not MISSING:
                return found
        if definition is not MISSING:
            return self.bind_attribute(value, cls, cls, name, definition)
        return self.no_attribute(value, name)

    @staticmethod
    def is_data_descriptor(definition: Any) -> bool:
        return hasattr(type(definition), "__set__") or hasattr(type(definition), "__delete__")

    def instance_attribute(self, value: Any, name: str) -> Any:
        owner = self.tracker(value)
        if owner is None:
            namespace = plain_dict(value)
            return MISSING if namespace is None else self.realize(namespace.get(name, MISSING))
        tracker = self.namespace_tracker(owner)
        if tracker is None:
            return MISSING
        if (
            isinstance(value, torch.nn.Module)
            and name not in tracker.value
            and any(name in tracker.value.get(table, ()) for table in MODULE_TABLES)
        ):
            return MISSING  # fetching from the table checks that nothing shadows it
        return self.dict_get(tracker, name)

    def missing_attribute(self, value: Any, name: str, error: AttributeError) -> Any:
        """`__getattr__`, or the error of the lookup before it."""
        function = find(type(value), "__getattr__")
        if function is compat.module_getattr:
            found = self.module_table_attribute(value, name)
            if found is not MISSING:
                return found
        elif function is not MISSING:
            return self.call_defined(value, "__getattr__", function, name)
        elif isinstance(value, types.MethodType):
            return self.load_attr(self.part(value, "__func__"), name)
        if self.may_be_there(value, name):
            self.looks_up_itself(value, name)
        raise error

    def looks_up_itself(self, value: Any, name: str) -> NoReturn:
        what = f"the attribute {name!r} of a {{}}, which looks attributes up in its own way"
        self.unsupported_kind("attribute-kind", what, value)

    @staticmethod
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

    def module_table_attribute(self, module: torch.nn.Module, name: str) -> Any:
        """A parameter, buffer or submodule."""
        searched = []
        for table_name in MODULE_TABLES:
            table = self.instance_attribute(module, table_name)
            if table is MISSING:
                continue
            tracker = self.tracker(table)
            if tracker is None:
                if name in table:
                    return table[name]
            elif name in table or name in tracker.writes:
                return self.dict_get(tracker, name)
            else:
                searched.append(tracker)
        for tracker in searched:
            self.guard("absent", tracker.source, name, ABSENT)
        return MISSING

    # -- class attributes and descriptors

    def wrap_class_attribute(self, cls: type, name: str, definition: Any) -> Any:
        """A class attribute's raw value, guarded unless the class is written in C."""
        owner = owner_of(cls, name)
        assert owner is not None
        if not flags_of(cls) & HEAP_TYPE:
            return definition
        self.class_tracker(cls)
        return self.below(cls, "class_attribute", name, definition)

    def wrap_part(self, cls: type, name: str, definition: Any, part: str) -> Any:
        """The function inside a classmethod, staticmethod, property or cached_property."""
        return self.part(self.wrap_class_attribute(cls, name, definition), part)

    def bind_attribute(self, value: Any, cls: type, where: type, name: str, definition: Any) -> Any:
        """The descriptor protocol: what the class `where` defines, seen through an instance of `cls`.

        `value` is MISSING where it is seen through `cls` itself.
        """
        kind = type(definition)
        if kind is classmethod:
            return types.MethodType(self.wrap_part(where, name, definition, "__func__"), cls)
        if kind is staticmethod:
            return self.wrap_part(where, name, definition, "__func__")
        if kind is types.ClassMethodDescriptorType:
            return definition.__get__(None, cls)
        if value is not MISSING:
            if cls is TracedGenerator and kind is types.FunctionType:  # a break calls eager's
                return types.MethodType(getattr(types.GeneratorType, name), value)
            if kind is types.FunctionType or kind is CACHED:
                return types.MethodType(self.wrap_class_attribute(where, name, definition), value)
            if kind in C_METHODS:
                return types.MethodType(definition, value)
            if issubclass(kind, property) and find(kind, "__get__") is property.__get__:
                if definition.fget is None:
                    self.no_attribute(value, name)
                return self.call(self.wrap_part(where, name, definition, "fget"), (value,), {})
            if kind in READERS:
                return self.slot_attribute(value, name, definition)
            if kind is TUPLE_FIELD:
                index = definition.__reduce__()[1][0]  # of a named tuple
                return self.below(value, "item", index, tuple.__getitem__(value, index))
            if isinstance(value, enum.Enum):
                return self.native_value(value, name)
            if kind is functools.cached_property:
                computed = self.call(self.wrap_part(where, name, definition, "func"), (value,), {})
                self.store_instance(value, name, computed)
                return computed
        attribute, getter = (
            self.wrap_class_attribute(where, name, definition),
            find(kind, "__get__"),
        )
        if isinstance(getter, types.FunctionType):
            instance = None if value is MISSING else value
            return self.call_defined(attribute, "__get__", getter, instance, cls)
        if getter is MISSING or value is MISSING:
            return attribute
        return self.unsupported("attribute-kind", f"the attribute {name!r} is a {kind.__name__}")

    def slot_attribute(self, value: Any, name: str, definition: Any) -> Any:
        """An attribute stored by C code: `__slots__`, `method.__func__`, `__dict__`, `__class__`."""
        if name == "__class__":
            return self.type_of(value)
        owner = self.tracker(value)
        if type(value) is contextvars.Token:
            self.unsupported("context-variable", "a ContextVar's token is read")
        if owner is None:
            found = definition.__get__(value, type(value))
            if name == "__dict__":
                self.namespaces[id(found)] = value
            return self.realize(found)
        if name == "__dict__":
            namespace = self.namespace_tracker(owner)
            if namespace is not None:
                return namespace.value
        if name in owner.slots and type(definition) is types.MemberDescriptorType:
            return owner.slots[name]
        try:
            found = definition.__get__(value, type(value))
        except AttributeError:
            self.unsupported("no-value-yet", f"{owner.source}.{name} has no value yet")
        self.check_identity(found, definition.__get__(value, type(value)), name)
        return self.wrap(found, Source("slot", name, owner.source))

    def native_value(self, value: Any, name: str) -> Any:
        """An attribute that Python itself may read: of enum members and classes."""
        found, owner = getattr(value, name), self.tracker(value)
        fixed = isinstance(value, enum.Enum) or is_fixed(value)
        if owner is None or (is_constant(found) and fixed) or self.tracker(found) is not None:
            return found
        self.check_identity(found, getattr(value, name), name)
        return self.wrap(found, Source("slot", name, owner.source))

    def check_identity(self, found: Any, again: Any, name: str) -> None:
        """Refuse an attribute whose identity can't be guarded, because each read makes a new object."""
        if found is not again and isinstance(found, IDENTITY_TYPES):
            self.unsupported("attribute-kind", f"{name!r} is a new object at each read")

    def class_attribute(self, cls: type, name: str) -> Any:
        definition = find(cls, name)
        special = name.startswith("__") and type(definition) in READERS and hasattr(type, name)
        if (
            definition is MISSING
            or special  # __name__, __bases__: the metaclass's own
            or isinstance(cls, enum.EnumType)
            or name in ("__dict__", "__doc__", "__module__")
            or self.is_data_descriptor(own_metaclass_attribute(cls, name))
        ):
            return self.metaclass_attribute(cls, name)
        return self.bind_attribute(MISSING, cls, cls, name, definition)

    def metaclass_attribute(self, cls: type, name: str) -> Any:
        meta = type(cls)
        definition = find(meta, name)
        if own_metaclass_attribute(cls, name) is not MISSING:
            return self.bind_attribute(cls, meta, meta, name, definition)
        if definition is MISSING and not isinstance(cls, enum.EnumType):
            self.no_attribute(cls, name)
        self.class_tracker(cls)
        if type(definition) in C_METHODS:  # `C.mro` is a new object at each read
            return types.MethodType(definition, cls)
        return self.native_value(cls, name)

    def super_attribute(self, parent: Any, name: str) -> Any:
        """An attribute of `super()`: looked up after the current class, bound to the instance."""
        if name in ("__self__", "__thisclass__", "__self_class__"):
            return getattr(parent, name)
        cls, mro = parent.__self_class__, parent.__self_class__.__mro__
        value = MISSING if parent.__self__ is cls else parent.__self__
        for where in mro[mro.index(parent.__thisclass__) + 1 :]:
            if name in where.__dict__:
                return self.bind_attribute(value, cls, where, name, where.__dict__[name])
        return self.no_attribute(parent, name)

    def module_attribute(self, module: types.ModuleType, name: str) -> Any:
        owner, cls = self.hold(module, module.__name__), type(module)
        namespace = self.namespace_tracker(owner)
        assert namespace is not None
        if name in namespace.value or name in namespace.writes:
            found = self.dict_get(namespace, name)
            if found is not MISSING:
                return found
        definition = find(cls, name)
        if isinstance(definition, types.FunctionType | property) or self.is_python_descriptor(
            definition
        ):
            return self.bind_attribute(module, cls, cls, name, definition)
        if definition is not MISSING:
            return self.native_value(module, name)
        if is_fixed(module) or find(cls, "__getattr__") is not MISSING:
            found = getattr(module, name, MISSING)  # a module may load its names on demand
            if name in namespace.value:
                return self.dict_get(namespace, name)
            if found is not MISSING:
                if not is_constant(found):
                    self.hold(found, f"{module.__name__}.{name}")
                return found
        self.dict_get(namespace, name)  # guards that it is missing
        compute = self.dict_get(namespace, "__getattr__")
        if compute is not MISSING and not is_fixed(module):
            return self.call(compute, (name,), {})
        return self.no_attribute(module, name)

    @staticmethod
    def is_python_descriptor(definition: Any) -> bool:
        return isinstance(find(type(definition), "__get__"), types.FunctionType)

    def special(self, value: Any, name: str) -> Any:
        cls = type(value)
        definition = MISSING if isinstance(value, torch.Tensor) else find(cls, name)
        if definition is MISSING:
            return UNBOUND
        return self.bind_attribute(value, cls, cls, name, definition)

    def type_of(self, value: Any) -> Any:
        """`type(value)`: the real class behind a fake tensor, a symbolic number or a generator."""
        if isinstance(value, torch.Tensor):
            owner = self.tracker(value)
            return torch.Tensor if owner is None or owner.real is None else type(owner.real)
        return STANDS_FOR.get(type(value), type(value))

    # -- tensors

    def tensor_attribute(self, fake: torch.Tensor, name: str) -> Any:
        if name in TENSOR_METADATA:
            return getattr(fake, name)
        if name in TENSOR_VALUES:
            return self.recorder.record("call_function", getattr, (fake, name), {})
        if name == "is_leaf" and (not fake.requires_grad or self.tracker(fake) is None):
            return fake.is_leaf
        if name == "__class__":
            return self.type_of(fake)
        owner = self.tracker(fake)
        if name == "grad" and owner is not None and fake.is_leaf and owner.real.grad is None:
            return self.wrap(None, Source("slot", name, owner.source))
        if hasattr(torch.Tensor, name):
            definition = find(torch.Tensor, name)
            if callable(definition):  # calling it may be refused
                return types.MethodType(
                    self.wrap_class_attribute(torch.Tensor, name, definition), fake
                )
            self.unsupported(*TENSOR_REFUSED.get(name, unknown(name)))
        namespace = plain_dict(owner.real) if owner is not None and owner.real is not None else None
        if owner is not None and namespace is not None:
            if name in namespace:
                return self.wrap(namespace[name], Source("attribute", name, owner.source))
            self.guard("absent", Source("namespace", None, owner.source), name, ABSENT)
        return self.no_attribute(fake, name)

    # -- writing

    def store_attr(self, value: Any, name: str, new: Any) -> None:
        if isinstance(value, torch.Tensor):
            if name != "requires_grad":
                self.unsupported("tensor-attribute", f"the attribute {name!r} of a tensor is set")
            self.recorder.switch_gradient(value, new)
            return
        if isinstance(value, type):
            what = f"the class attribute {value.__name__}.{name} is set"
            self.unsupported("class-change", what)
        setter = find(type(value), "__setattr__")
        if isinstance(setter, types.FunctionType):
            self.call_defined(value, "__setattr__", setter, name, new)
        else:
            self.generic_store(value, name, new)

    def generic_store(self, value: Any, name: str, new: Any) -> None:
        """What `object.__setattr__` does, and `object.__delattr__` where `new` is DELETED."""
        if isinstance(value, OWN_LOOKUP):
            self.looks_up_itself(value, name)
        cls, owner = type(value), self.tracker(value)
        definition, deleted = find(cls, name), new is DELETED
        if isinstance(definition, property):
            part = "fdel" if deleted else "fset"
            if getattr(definition, part) is None:
                self.no_attribute(value, name)
            setter = self.wrap_part(cls, name, definition, part)
            self.call(setter, (value,) if deleted else (value, new), {})
        elif isinstance(definition, types.MemberDescriptorType) and owner and not deleted:
            self.mark_written(owner)
            owner.slots[name] = new
        elif definition is not MISSING and self.is_data_descriptor(definition):
            if owner is not None or self.is_python_descriptor(definition):
                what = f"the attribute {name!r} is changed by a {type(definition).__name__}"
                self.unsupported("attribute-kind", what)
            write_now(value, name, new)
        else:
            self.store_instance(value, name, new)

    def generic_delete(self, value: Any, name: str) -> None:
        self.generic_store(value, name, DELETED)

    def store_instance(self, value: Any, name: str, new: Any) -> None:
        owner = self.tracker(value)
        if owner is None:
            write_now(value, name, new)
            return
        tracker = self.namespace_tracker(owner)
        if tracker is None:
            kind = type(value).__name__
            self.unsupported("outside-change", f"an attribute of {owner.source} (a {kind}) is set")
        if new is not DELETED:
            self.dict_set(tracker, name, new)
        elif self.dict_get(tracker, name) is MISSING:
            self.no_attribute(value, name)
        else:
            self.dict_delete(tracker, name)

    def delete_attr(self, value: Any, name: str) -> None:
        deleter = find(type(value), "__delattr__")
        if isinstance(value, torch.Tensor | type):
            self.unsupported("class-change", f"the attribute {name!r} is deleted")
        if isinstance(deleter, types.FunctionType):
            self.call_defined(value, "__delattr__", deleter, name)
        else:
            self.generic_delete(value, name)

    def part(self, value: Any, name: str) -> Any:
        """An attribute stored by C code, such as `partial.func`."""
        return self.below(value, "slot", name, getattr(value, name))


def own_metaclass_attribute(cls: type, name: str) -> Any:
    """What the metaclass of a class defines in Python under a name; else MISSING."""
    meta: Any = type(cls)
    owner = owner_of(meta, name)
    if owner in (None, type, object) or isinstance(cls, enum.EnumType):
        return MISSING
    return find(meta, name)


def write_now(value: Any, name: str, new: Any) -> None:
    """Set or delete an attribute of an object that the frame made. Raises as Python would."""
    if new is DELETED:
        object.__delattr__(value, name)
    else:
        object.__setattr__(value, name, new)
