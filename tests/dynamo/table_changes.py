"""Small programs: what they rely on changes between two calls, in every place where Python lets it change."""

# ruff: noqa
# mypy: ignore-errors
import collections
import contextlib
import functools
import os
import sys
import types

import torch
from torch import nn
from torch.nn import functional as F

from tests.dynamo.program_table import Table

program = Table()
x = torch.randn(3, 4)
y = torch.randn(3, 4)
lib = types.ModuleType("lib")
lib.step, lib.rate, lib.items, lib.sub = torch.sin, 2, [1], types.SimpleNamespace(k=1)


# -- modules and libraries


@program(x, change="lib.step = torch.cos")
def function_of_a_module(a):
    return lib.step(a)


@program(x, change="lib.rate = 2.0")
def attribute_of_a_module(a):
    return a.to(torch.int64) * lib.rate


@program(x, change="lib = types.SimpleNamespace(step=torch.neg, rate=5)")
def module_replaced(a):
    return lib.step(a) * lib.rate


@program(x, change="lib.sub.k = 9")
def nested_namespaces(a):
    return a * lib.sub.k


@program(x, change="lib.__getattr__ = lambda name: 7")
def getattr_of_a_module(a):
    try:
        return a * lib.missing
    except AttributeError:
        return a


@program(x, change="lib.F = types.SimpleNamespace(relu=torch.tanh)")
def alias_of_a_library(a):
    return getattr(lib, "F", F).relu(a)


@program(x, change="os.environ['MC_TABLE'] = '5'", whole=False)
def environment_variable(a):
    result = a * float(os.environ.get("MC_TABLE", "2"))
    os.environ.pop("MC_TABLE", None)
    return result


@program(x, change="sys.table_flag = 3")
def attribute_of_sys(a):
    result = a * getattr(sys, "table_flag", 1)
    if hasattr(sys, "table_flag"):
        del sys.table_flag
    return result


@program(x, change="torch.set_float32_matmul_precision('high')")
def matmul_precision(a):
    found = torch.get_float32_matmul_precision()
    return a @ a.T, found


@program(x, change="torch.use_deterministic_algorithms(True)")
def deterministic_mode(a):
    return a + 1, torch.are_deterministic_algorithms_enabled()


modes = contextlib.ExitStack()


@program(x, change="modes.enter_context(torch.autocast('cpu', dtype=torch.bfloat16))")
def autocast_around_the_call(a):
    return a @ a.T, torch.is_autocast_enabled("cpu")


@program(x, change="modes.enter_context(torch.device('meta'))", whole=False)
def default_device_around_the_call(a):
    made = torch.zeros(3)
    return a, made.device


@program(x, change="modes.enter_context(torch.inference_mode())")
def inference_mode_around_the_call(a):
    return a * 2, torch.is_inference_mode_enabled()


class Negating(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (
            -func(*args, **(kwargs or {})) if func is torch.exp else func(*args, **(kwargs or {}))
        )


@program(x, change="modes.enter_context(Negating())", whole=False)
def function_mode_around_the_call(a):
    return torch.exp(a)


# -- classes


class Base:
    k, depth = 2, 77

    def run(self, a):
        return self.step(a) * self.k

    def step(self, a):
        return a + 1

    @property
    def size(self):
        return 2

    @staticmethod
    def fixed(a):
        return a * 2

    @classmethod
    def named(cls):
        return cls.__name__


class Child(Base):
    pass


thing, other = Child(), Child()
thing.depth = 1


@program(x, change="Child.step = lambda self, a: a - 1")
def override_is_added(a):
    return thing.run(a)


@program(x, change="thing.step = torch.exp")
def method_hidden_by_an_instance_attribute(a):
    return thing.run(a)


@program(x, change="Child.k = property(lambda self: 10)")
def constant_becomes_a_property(a):
    return a * thing.k


@program(
    x,
    change="Child.__getattribute__ = lambda self, name: 5 if name == 'k' else object.__getattribute__(self, name)",
)
def getattribute_is_added(a):
    return a * thing.k


@program(x, change="Child.__getattr__ = lambda self, name: 5")
def getattr_is_added(a):
    return a * getattr(thing, "unknown", 1)


@program(x, change="Base.fixed = staticmethod(torch.neg)")
def static_method_replaced(a):
    return thing.fixed(a)


@program(x, change="Base.named = classmethod(lambda cls: 'changed')")
def class_method_replaced(a):
    return a, thing.named()


@program(x, change="Child.__name__ = 'Renamed'")
def class_renamed(a):
    return a, type(thing).__name__, thing.named()


@program(x, change="Child.__len__ = lambda self: 0")
def truth_of_an_object(a):
    return a * 2 if thing else a


@program(x, change="Child.__bool__ = lambda self: False")
def bool_is_added(a):
    return a * 2 if thing else a


@program(x, change="Child.__eq__ = lambda self, o: True; Child.__hash__ = object.__hash__")
def equality_is_added(a):
    return a * 2 if thing == other else a


@program(
    x,
    change="Child.__contains__ = lambda self, n: True; Child.__iter__ = lambda self: iter([7])",
    whole=False,
)
def iteration_is_added(a):
    try:
        return a * sum(thing)
    except TypeError:
        return a


@program(x, change="Child.__call__ = lambda self, a: a * 3")
def call_is_added(a):
    return thing(a) if callable(thing) else a


@program(x, change="Child.depth = property(lambda self: 5)")
def property_over_an_instance_attribute(a):
    return a * thing.depth


@program(x, change="Child.runs = 1")
def attribute_of_a_class_appears(a):
    return a * 2 if hasattr(Child, "runs") else a


@program(x, change="other = thing")
def two_objects_become_one(a):
    thing.n, other.n = 1, 2
    return a * thing.n, thing is other


@program(x, change="thing.__dict__ = {'k': 11}")
def whole_dict_replaced(a):
    return a * thing.k


@program(x, change="Child = type('Child', (Base,), {})")
def class_replaced_isinstance(a):
    return a * 2 if isinstance(thing, Child) else a


class Virtual(type):
    def __instancecheck__(cls, instance):
        return cls.answer

    def __subclasscheck__(cls, sub):
        return True


class Answer(metaclass=Virtual):
    answer = True


@program(x, change="Answer.answer = False")
def instance_check_of_a_metaclass(a):
    return a * 2 if isinstance(3, Answer) else a, issubclass(int, Answer)


@program(x, change="Virtual.extra = 4")
def attribute_through_the_metaclass(a):
    return a * getattr(Answer, "extra", 1)


# -- functions


def affine(a, k=1, *, s=1):
    return a * k + s


affine.rate = 2
bound = functools.partial(affine, k=3)


@program(x, change="affine.rate = 3")
def attribute_of_a_function(a):
    return a * affine.rate


@program(x, change="affine.__defaults__ = None")
def defaults_removed(a):
    try:
        return affine(a)
    except TypeError:
        return a


@program(x, change="bound.keywords['k'] = 10")
def keywords_of_a_partial(a):
    return bound(a)


@program(x, change="bound = functools.partial(affine, s=4)")
def partial_replaced(a):
    return bound(a)


@program(x, change="affine = bound")
def function_becomes_a_partial(a):
    return affine(a)


def make():
    box = [1]

    def read(a):
        return a * box[0]

    def write(n):
        box[0] = n

    def rebind(n):
        nonlocal box
        box = [n]

    return read, write, rebind


read, write, rebind = make()


@program(x, change="write(5)")
def list_in_a_cell_is_changed(a):
    return read(a)


@program(x, change="rebind(6)")
def cell_is_rebound(a):
    return read(a)


@program(x, change="read = make()[0]; write = None")
def closure_replaced_by_its_twin(a):
    return read(a)


table = {"f": torch.sin, 1: "one", "list": [1, 2], "t": y}


@program(x, change="table['f'] = torch.cos")
def function_in_a_dict(a):
    return table["f"](a)


@program(x, change="table[True] = 'true'")
def key_equal_to_another(a):
    return a, table[1]


@program(x, change="table['t'] = y[:1]")
def tensor_in_a_dict(a):
    return a[:1] + table["t"]


@program(x, change="table['list'].extend([3] * 5)")
def list_in_a_dict(a):
    return a * len(table["list"]) + sum(table["list"])


@program(x, change="table.pop('list'); table['list'] = [1, 2]")
def order_of_a_dict(a):
    return a, [k for k in table if isinstance(k, str)]


names = {"p", "q"}
queue = collections.deque([1, 2])
order = collections.OrderedDict(p=1, q=2)
counts = collections.Counter("aab")
layers = (torch.sin, torch.cos)


@program(x, change="names.add('r')")
def set_from_the_module(a):
    return a * len(names) if "r" in names else a


@program(x, change="queue.append(8)", whole=False)
def deque_from_the_module(a):
    return a * queue[-1], len(queue)


@program(x, change="order.move_to_end('p')")
def order_of_an_ordered_dict(a):
    return a * next(iter(order.values())), list(order)


@program(x, change="counts['b'] += 5", whole=False)
def counter_from_the_module(a):
    return a * counts["b"], counts.most_common(1), counts["zz"]


@program(x, change="layers = layers[::-1]")
def tuple_of_functions(a):
    for f in layers:
        a = f(a)
    return a


class Text(str):
    pass


class Number(int):
    def __mul__(self, other):
        return 99

    __rmul__ = __mul__


class Couple(tuple):
    @property
    def both(self):
        return self[0] + self[1]


label, number, couple = "relu", 3, Couple((1, 2))


@program(x, change="label = Text('relu')", whole=False)
def text_becomes_a_subclass(a):
    return getattr(torch, label)(a), type(label).__name__


@program(x, change="number = Number(3)")
def number_becomes_a_subclass(a):
    return a + number * 2, 2 * number


@program(x, change="couple = Couple((4, 5))")
def tuple_subclass(a):
    return a * couple.both, len(couple)


# -- tensors and modules that the program reaches by name


@program(x, change="y = y.double()")
def dtype_of_a_global_tensor(a):
    return a + y[0]


@program(x, change="y = x")
def global_tensor_becomes_the_input(a):
    return a[0] + y[0], y is a


@program(x, change="y.resize_(2, 6)")
def shape_of_a_global_tensor(a):
    return a.sum() + y.sum(), y.shape


@program(x, change="y.requires_grad_()")
def requires_grad_of_a_global_tensor(a):
    return (a[0] * y[0]).requires_grad


@program(x, change="y.data = y.T")
def strides_of_a_global_tensor(a):
    return a.sum() + y.sum(), y.stride(), y.is_contiguous()


net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))


@program(x, change="net[0].eval()")
def training_flag_of_one_submodule(a):
    return net[0](a), [m.training for m in net.modules()]


@program(x, change="net.insert(1, nn.Tanh())")
def module_inserted(a):
    return net[:2](a), len(net)


@program(x, change="net[2].weight = net[0].weight")
def weights_become_tied(a):
    return net[2](a), net[0].weight is net[2].weight


@program(x, change="net[0].bias = None")
def bias_removed(a):
    return net[0](a)


@program(x, change="net[0].weight = nn.Parameter(torch.ones(2, 4)); net[0].bias = None")
def weight_of_another_shape(a):
    return net[0](a)


@program(x, change="net[0].register_buffer('mask', torch.zeros(4))")
def buffer_appears(a):
    return net[0](a) * getattr(net[0], "mask", 1)


@program(x, change="del thing.depth")
def class_attribute_shows_through(a):
    return a * thing.depth


@program(x, change="net[0].to(torch.float64)")
def module_in_another_dtype(a):
    return net[0](a.to(net[0].weight.dtype))


@program(x, change="net[0].forward = types.MethodType(lambda self, a: a, net[0])")
def bound_forward_on_the_instance(a):
    return net(a)


@program(
    x,
    change="net[0].__class__ = type('Doubling', (nn.Linear,), {'forward': lambda self, a: a * 2})",
)
def class_of_a_submodule(a):
    return net[0](a)


@program(x, change="net[0].register_full_backward_hook(lambda *_: None)", whole=False)
def backward_hook_appears(a):
    return net[0](a).sum()
