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
import types
from typing import Any

import torch

from minicompile import compat
from minicompile.dynamo.interpreter import UNBOUND
from minicompile.dynamo.outside import MODULE_TABLES, Outside
from minicompile.dynamo.result import Source
from minicompile.dynamo.variables import (
    MISSING,
    VariableTracker,
    is_constant,
    is_fixed,
    lookup,
    owner_of,
    plain_dict,
)

C_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)
CACHED = type(functools.lru_cache(len))
TUPLE_FIELD = type(vars(collections.namedtuple("Field", "x"))["x"])
C_VALUES = (types.MemberDescriptorType, types.GetSetDescriptorType)

TENSOR_FACTS = frozenset(
    {
        *(
            "shape",
            "dtype",
            "device",
            "ndim",
            "layout",
            "requires_grad",
            "itemsize",
            "nbytes",
            "names",
        ),
        *(
            "is_cuda",
            "is_cpu",
            "is_sparse",
            "is_quantized",
            "is_meta",
            "is_nested",
            "is_mkldnn",
            "is_mps",
            "is_xpu",
        ),
        *("is_sparse_csr", "is_mtia", "is_ipu", "is_vulkan", "is_maia", "is_xla"),
    }
)
"""Attributes that follow from guarded metadata."""
TENSOR_VALUES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes that are tensors computed from it."""
TENSOR_REFUSED = {
    "item": "`.item()` needs the tensor's data",
    "tolist": "`.tolist()` needs the tensor's data",
    "numpy": "`.numpy()` needs the tensor's data",
    "__array__": "numpy needs the tensor's data",
    "data_ptr": "a tensor being captured has no address",
    "untyped_storage": "a tensor being captured has no storage",
    "storage": "a tensor being captured has no storage",
    "backward": "`.backward()` runs inside the captured function",
    "storage_offset": "where a tensor begins in its storage is no part of the guards",
    "is_shared": "whether memory is shared is no part of the guards",
    "is_pinned": "whether memory is pinned is no part of the guards",
    "__dlpack__": "the tensor's memory is exported",
    "register_hook": "a hook on a tensor",
    "grad_fn": "autograd's graph is inspected",
    "grad": "`.grad` is read inside the captured function",
    "requires_grad_": "`.requires_grad_()` changes how autograd treats a tensor",
    "retain_grad": "`.retain_grad()` changes how autograd treats a tensor",
    "detach_": "`.detach_()` changes how autograd treats a tensor",
    "set_": "`.set_()` replaces a tensor's storage",
    "resize_": "`.resize_()` changes a tensor's storage",
    "_version": "a tensor's version counter is read",
    "share_memory_": "`.share_memory_()` moves a tensor's storage",
    "apply_": "`.apply_()` needs the tensor's data",
    "map_": "`.map_()` needs the tensor's data",
}
HINTS = {
    "item": "keep it a tensor, or compute it outside of the compiled function",
    "tolist": "keep it a tensor, or compute it outside of the compiled function",
    "numpy": "use torch functions, or call numpy outside of the compiled function",
    "backward": "compile the forward function and call backward outside",
}


class Attributes(Outside):
    """Loads, stores and deletes attributes."""

    def load_attr(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor_attribute(value, name)
        if isinstance(value, types.ModuleType):
            return self.module_attribute(value, name)
        if isinstance(value, type):
            return self.class_attribute(value, name)
        if type(value) is super:
            return self.super_attribute(value, name)
        cls = type(value)
        getter = lookup(cls, "__getattribute__")
        if isinstance(getter, types.FunctionType):
            try:
                return self.call(
                    self.wrap_class_attribute(cls, "__getattribute__", getter), (value, name), {}
                )
            except AttributeError:
                return self.missing_attribute(value, name)
        return self.generic_attribute(value, name, fallback=True)

    def generic_attribute(self, value: Any, name: str, fallback: bool = False) -> Any:
        """What `object.__getattribute__` does; with `fallback`, `__getattr__` after it."""
        cls = type(value)
        try:
            definition = lookup(cls, name)
        except KeyError:
            definition = MISSING
        if definition is not MISSING and self.is_data_descriptor(definition):
            return self.bind_attribute(value, cls, name, definition)
        found = self.instance_attribute(value, name)
        if found is not MISSING:
            return found
        if definition is not MISSING:
            return self.bind_attribute(value, cls, name, definition)
        if fallback:
            return self.missing_attribute(value, name)
        raise AttributeError(
            f"{cls.__name__!r} object has no attribute {name!r}", name=name, obj=value
        )

    @staticmethod
    def is_data_descriptor(definition: Any) -> bool:
        kind = type(definition)
        return (
            kind is property
            or kind in C_VALUES
            or hasattr(kind, "__set__")
            or hasattr(kind, "__delete__")
        )

    def instance_attribute(self, value: Any, name: str) -> Any:
        owner = self.tracker(value)
        if owner is None:
            namespace = plain_dict(value)
            return MISSING if namespace is None else self.realize(namespace.get(name, MISSING))
        namespace_tracker = self.namespace_tracker(owner)
        if namespace_tracker is None:
            return MISSING
        if isinstance(value, torch.nn.Module) and self.in_module_table(value, name):
            return MISSING  # fetching from the table checks that nothing shadows it
        return self.dict_get(namespace_tracker, name)

    @staticmethod
    def in_module_table(module: torch.nn.Module, name: str) -> bool:
        namespace = module.__dict__
        return name not in namespace and any(
            name in namespace.get(table, ()) for table in MODULE_TABLES
        )

    def missing_attribute(self, value: Any, name: str) -> Any:
        """`__getattr__`, or AttributeError."""
        cls = type(value)
        owner = self.tracker(value)
        getter = owner_of(cls, "__getattr__")
        if getter is not None:
            function = getter.__dict__["__getattr__"]
            if function is compat.module_getattr():
                found = self.module_table_attribute(value, name)
                if found is not MISSING:
                    return found
            else:
                return self.call(
                    self.wrap_class_attribute(cls, "__getattr__", function), (value, name), {}
                )
        if owner is not None and not is_fixed(cls):
            self.guard(
                "class_absent",
                self.class_tracker(cls).source,
                name,
                "looked up and not found",
                name,
            )
        raise AttributeError(
            f"{cls.__name__!r} object has no attribute {name!r}", name=name, obj=value
        )

    def module_table_attribute(self, module: torch.nn.Module, name: str) -> Any:
        """A parameter, buffer or submodule."""
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
        owner = self.tracker(module)
        if owner is not None:
            for table_name in MODULE_TABLES:
                table = self.tracker(module.__dict__.get(table_name))
                if table is not None:
                    self.guard("absent", table.source, name, "looked up and not found", name)
        return MISSING

    # -- class attributes and descriptors

    def wrap_class_attribute(self, cls: type, name: str, definition: Any) -> Any:
        """A class attribute's raw value, guarded unless the class is torch's or the standard library's."""
        owner = owner_of(cls, name)
        if owner is not None and self.is_made(owner):
            return definition
        if is_constant(definition):
            if not is_fixed(cls):
                self.guard(
                    "equals",
                    Source("class_attribute", name, self.class_tracker(cls).source),
                    definition,
                    "read",
                )
            return definition
        if id(definition) in self.trackers and (owner is None or is_fixed(owner)):
            return self.trackers[id(definition)].value
        source = Source("class_attribute", name, self.class_tracker(cls).source)
        return self.wrap(definition, source, fixed=owner is not None and is_fixed(owner))

    def bind_attribute(self, value: Any, cls: type, name: str, definition: Any) -> Any:
        """A class attribute seen through an instance."""
        kind = type(definition)
        if kind is types.FunctionType:
            return types.MethodType(self.wrap_class_attribute(cls, name, definition), value)
        if kind is CACHED:
            return types.MethodType(self.wrap_class_attribute(cls, name, definition), value)
        if kind in C_METHODS:
            return types.MethodType(definition, value)
        if kind is property:
            if definition.fget is None:
                raise AttributeError(f"property {name!r} of {cls.__name__!r} object has no getter")
            return self.call(self.wrap_part(cls, name, definition, "fget"), (value,), {})
        if kind in C_VALUES:
            return self.slot_attribute(value, name, definition)
        if kind is TUPLE_FIELD:
            return self.tuple_field(value, definition.__reduce__()[1][0])
        if kind is classmethod:
            return types.MethodType(self.wrap_part(cls, name, definition, "__func__"), cls)
        if kind is staticmethod:
            return self.wrap_part(cls, name, definition, "__func__")
        if isinstance(value, enum.Enum):
            return self.native_value(value, name)
        if kind is functools.cached_property:
            computed = self.call(self.wrap_part(cls, name, definition, "func"), (value,), {})
            self.store_instance(value, name, computed)
            return computed
        if kind is types.ClassMethodDescriptorType or kind is types.BuiltinFunctionType:
            return definition.__get__(value, cls) if hasattr(definition, "__get__") else definition
        getter_owner = owner_of(kind, "__get__")
        if getter_owner is not None:
            descriptor = self.wrap_class_attribute(cls, name, definition)
            getter = getter_owner.__dict__["__get__"]
            if not isinstance(getter, types.FunctionType):
                self.unsupported(f"the attribute {name!r} is a {kind.__name__}")
            return self.call(
                self.wrap_class_attribute(kind, "__get__", getter), (descriptor, value, cls), {}
            )
        return self.wrap_class_attribute(cls, name, definition)

    def tuple_field(self, value: Any, index: int) -> Any:
        """A field of a named tuple."""
        owner = self.tracker(value)
        if owner is None:
            return tuple.__getitem__(value, index)
        return self.wrap(tuple.__getitem__(value, index), Source("item", index, owner.source))

    def wrap_part(self, cls: type, name: str, definition: Any, part: str) -> Any:
        """The function inside a classmethod, staticmethod, property or cached_property."""
        wrapped = self.wrap_class_attribute(cls, name, definition)
        owner = owner_of(cls, name)
        if owner is not None and self.is_made(owner):
            return getattr(wrapped, part)
        source = Source(
            "slot", part, Source("class_attribute", name, self.class_tracker(cls).source)
        )
        return self.wrap(
            getattr(wrapped, part), source, fixed=owner is not None and is_fixed(owner)
        )

    def slot_attribute(self, value: Any, name: str, definition: Any) -> Any:
        """An attribute stored by C code: `__slots__`, `method.__func__`, `__dict__`, `__class__`."""
        if name == "__class__":
            return self.type_of(value)
        owner = self.tracker(value)
        if owner is None:
            return self.realize(definition.__get__(value, type(value)))
        if name == "__dict__":
            namespace = self.namespace_tracker(owner)
            if namespace is not None:
                return namespace.value
        if name in owner.writes and type(definition) is types.MemberDescriptorType:
            return owner.writes[name]
        return self.wrap(definition.__get__(value, type(value)), Source("slot", name, owner.source))

    def native_value(self, value: Any, name: str) -> Any:
        """An attribute that Python itself may read: of enum members and classes."""
        found = getattr(value, name)
        if is_constant(found) or self.tracker(found) is not None:
            return found
        owner = self.tracker(value)
        if owner is None:
            return found
        return self.wrap(found, Source("slot", name, owner.source), fixed=True)

    def class_attribute(self, cls: type, name: str) -> Any:
        try:
            definition = lookup(cls, name)
        except KeyError:
            definition = MISSING
        if (
            isinstance(cls, enum.EnumType)
            or definition is MISSING
            or name in ("__dict__", "__doc__", "__module__")
        ):
            return self.metaclass_attribute(cls, name)
        kind = type(definition)
        if kind is classmethod:
            return types.MethodType(self.wrap_part(cls, name, definition, "__func__"), cls)
        if kind is staticmethod:
            return self.wrap_part(cls, name, definition, "__func__")
        if kind in C_VALUES and name.startswith("__") and hasattr(type, name):
            return self.metaclass_attribute(cls, name)  # __name__, __bases__: the metaclass's own
        if kind is types.ClassMethodDescriptorType:
            return definition.__get__(None, cls)
        getter_owner = owner_of(kind, "__get__")
        if getter_owner is not None and isinstance(
            getter_owner.__dict__["__get__"], types.FunctionType
        ):
            descriptor = self.wrap_class_attribute(cls, name, definition)
            getter = getter_owner.__dict__["__get__"]
            return self.call(
                self.wrap_class_attribute(kind, "__get__", getter), (descriptor, None, cls), {}
            )
        return self.wrap_class_attribute(cls, name, definition)

    def metaclass_attribute(self, cls: type, name: str) -> Any:
        meta = type(cls)
        try:
            definition = lookup(meta, name)
        except KeyError:
            definition = MISSING
        if isinstance(definition, types.FunctionType):
            return types.MethodType(self.wrap_class_attribute(meta, name, definition), cls)
        if isinstance(definition, property) and isinstance(definition.fget, types.FunctionType):
            return self.call(self.wrap_part(meta, name, definition, "fget"), (cls,), {})
        if definition is MISSING and not isinstance(cls, enum.EnumType):
            if not is_fixed(cls):
                self.guard(
                    "class_absent",
                    self.class_tracker(cls).source,
                    name,
                    "looked up and not found",
                    name,
                )
            raise AttributeError(
                f"type object {cls.__name__!r} has no attribute {name!r}", name=name, obj=cls
            )
        self.class_tracker(cls)
        return self.native_value(cls, name)

    def super_attribute(self, parent: Any, name: str) -> Any:
        """An attribute of `super()`: looked up after the current class, bound to the instance."""
        if name in ("__self__", "__thisclass__", "__self_class__"):
            return getattr(parent, name)
        instance, start = parent.__self_class__, parent.__thisclass__
        mro = instance.__mro__
        target = parent.__self__
        for cls in mro[mro.index(start) + 1 :]:
            if name in cls.__dict__:
                definition = cls.__dict__[name]
                if isinstance(target, type) and type(definition) is types.FunctionType:
                    return self.wrap_class_attribute(cls, name, definition)
                if isinstance(target, type) and type(definition) is classmethod:
                    return types.MethodType(
                        self.wrap_part(cls, name, definition, "__func__"), target
                    )
                return self.bind_attribute(target, cls, name, definition)
        raise AttributeError(f"'super' object has no attribute {name!r}", name=name, obj=parent)

    def module_attribute(self, module: types.ModuleType, name: str) -> Any:
        owner = self.hold(module, module.__name__)
        namespace = self.namespace_tracker(owner)
        assert namespace is not None
        if name in namespace.value or name in namespace.writes:
            found = self.dict_get(namespace, name, fixed=is_fixed(module))
            if found is not MISSING:
                return found
        definition = owner_of(type(module), name)
        if definition is not None:
            if isinstance(
                definition.__dict__[name], types.FunctionType | property
            ) or self.is_python_descriptor(definition.__dict__[name]):
                return self.bind_attribute(module, type(module), name, definition.__dict__[name])
            return self.native_value(module, name)
        getter = namespace.value.get("__getattr__") or getattr(type(module), "__getattr__", None)
        if (
            getter is not None
        ):  # a module that loads its names on demand: the same object every time
            found = getattr(module, name)
            return self.wrap(found, Source("slot", name, owner.source), fixed=is_fixed(module))
        raise AttributeError(
            f"module {module.__name__!r} has no attribute {name!r}", name=name, obj=module
        )

    @staticmethod
    def is_python_descriptor(definition: Any) -> bool:
        owner = owner_of(type(definition), "__get__")
        return owner is not None and isinstance(owner.__dict__["__get__"], types.FunctionType)

    def special(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return UNBOUND
        cls = type(value)
        try:
            definition = lookup(cls, name)
        except KeyError:
            return UNBOUND
        return self.bind_attribute(value, cls, name, definition)

    def type_of(self, value: Any) -> Any:
        """`type(value)`: the real class behind a fake tensor."""
        if isinstance(value, torch.Tensor):
            owner = self.tracker(value)
            if owner is not None and owner.real is not None:
                return type(owner.real)
            return torch.Tensor
        if isinstance(value, torch.SymInt):
            return int
        return type(value)

    # -- tensors

    def tensor_attribute(self, fake: torch.Tensor, name: str) -> Any:
        if name in TENSOR_FACTS:
            return getattr(fake, name)
        if name in TENSOR_VALUES:
            return self.recorder.record("call_function", getattr, (fake, name), {})
        if name == "is_leaf" and not fake.requires_grad:
            return True
        if name == "data":
            return self.recorder.record("call_method", "detach", (fake,), {})
        if name == "__class__":
            return self.type_of(fake)
        if name in TENSOR_REFUSED:
            self.unsupported(TENSOR_REFUSED[name], HINTS.get(name, ""))
        if hasattr(torch.Tensor, name):
            if callable(getattr(torch.Tensor, name)):
                return types.MethodType(getattr(torch.Tensor, name), fake)
            self.unsupported(f"the tensor attribute {name!r}")
        owner = self.tracker(fake)
        if owner is not None and owner.real is not None:
            namespace = plain_dict(owner.real)
            if namespace and name in namespace:
                return self.wrap(namespace[name], Source("attribute", name, owner.source))
            if namespace is not None:
                self.guard(
                    "absent",
                    Source("namespace", None, owner.source),
                    name,
                    "looked up and not found",
                    name,
                )
        raise AttributeError(f"'Tensor' object has no attribute {name!r}", name=name)

    # -- writing

    def store_attr(self, value: Any, name: str, new: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.unsupported(f"the attribute {name!r} of a tensor is set")
        if isinstance(value, type):
            if not self.is_made(value):
                self.unsupported(f"the class attribute {value.__name__}.{name} is set")
            setattr(value, name, new)
            return
        cls = type(value)
        setter = lookup(cls, "__setattr__")
        if setter is torch.nn.Module.__setattr__ and self.plain_module_store(value, name, new):
            self.store_instance(value, name, new)
        elif isinstance(setter, types.FunctionType):
            self.call(self.wrap_class_attribute(cls, "__setattr__", setter), (value, name, new), {})
        else:
            self.generic_store(value, name, new)

    def plain_module_store(self, module: torch.nn.Module, name: str, new: Any) -> bool:
        """Whether nn.Module would just put the value into the instance's `__dict__`."""
        if isinstance(new, torch.nn.Module | torch.nn.Parameter):
            return False
        tables = [module.__dict__.get(table) or {} for table in MODULE_TABLES]
        return not any(name in table for table in tables) and self.tracker(module) is not None

    def generic_store(self, value: Any, name: str, new: Any) -> None:
        """What `object.__setattr__` does."""
        cls = type(value)
        try:
            definition = lookup(cls, name)
        except KeyError:
            definition = MISSING
        if isinstance(definition, property):
            if definition.fset is None:
                raise AttributeError(f"property {name!r} of {cls.__name__!r} object has no setter")
            self.call(self.wrap_part(cls, name, definition, "fset"), (value, new), {})
        elif isinstance(definition, types.MemberDescriptorType):
            self.store_slot(value, name, new)
        elif definition is not MISSING and self.is_data_descriptor(definition):
            if self.tracker(value) is not None or self.is_python_descriptor(definition):
                self.unsupported(
                    f"the attribute {name!r} is set through a {type(definition).__name__}"
                )
            object.__setattr__(value, name, new)
        else:
            self.store_instance(value, name, new)

    def store_slot(self, value: Any, name: str, new: Any) -> None:
        owner = self.tracker(value)
        if owner is None:
            object.__setattr__(value, name, new)
        else:
            self.mark_written(owner)
            owner.writes[name] = new

    def store_instance(self, value: Any, name: str, new: Any) -> None:
        owner = self.tracker(value)
        if owner is None:
            namespace = plain_dict(value)
            if namespace is None:
                object.__setattr__(value, name, new)  # raises as Python would
            else:
                namespace[name] = new
            return
        namespace_tracker = self.namespace_tracker(owner)
        if namespace_tracker is None:
            self.unsupported(f"an attribute of {owner.source} (a {type(value).__name__}) is set")
        else:
            self.dict_set(namespace_tracker, name, new)

    def delete_attr(self, value: Any, name: str) -> None:
        deleter = lookup(type(value), "__delattr__")
        if isinstance(value, torch.Tensor | type):
            self.unsupported(f"the attribute {name!r} is deleted")
        if isinstance(deleter, types.FunctionType):
            self.call(
                self.wrap_class_attribute(type(value), "__delattr__", deleter), (value, name), {}
            )
        else:
            self.generic_delete(value, name)

    def generic_delete(self, value: Any, name: str) -> None:
        owner = self.tracker(value)
        if owner is None:
            object.__delattr__(value, name)
            return
        namespace = self.namespace_tracker(owner)
        if namespace is None:
            self.unsupported(f"an attribute of {owner.source} is deleted")
            return
        try:
            self.dict_delete(namespace, name)
        except KeyError:
            raise AttributeError(
                f"{type(value).__name__!r} object has no attribute {name!r}"
            ) from None

    def parts(self, owner: VariableTracker, name: str) -> Any:
        """An attribute stored by C code in an outside object, such as `partial.func`."""
        return self.wrap(getattr(owner.value, name), Source("slot", name, owner.source))
