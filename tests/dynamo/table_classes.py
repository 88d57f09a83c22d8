"""Small programs: classes, dataclasses, named tuples, enums."""

# ruff: noqa
# mypy: ignore-errors
import abc
import functools
import types
import weakref

import torch

from tests.dynamo.program_table import Table

program = Table()
x = torch.randn(3, 4)
y = torch.randn(3, 4)


# -- classes


class Scale:
    factor = 2.0

    def __init__(self, k=1):
        self.k = k

    def __call__(self, a):
        return a * self.k * self.factor

    def __enter__(self):
        self.k += 1
        return self

    def __exit__(self, *_):
        self.k -= 1


class Shift(Scale):
    factor = 3.0

    def __call__(self, a):
        return super().__call__(a) + self.k


scale, shift = Scale(3), Shift(4)


@program(x, change="Scale.factor = 5.0")
def class_attribute(a):
    return a * Scale.factor, scale(a), shift(a)


@program(x, change="scale.factor = 10.0")
def instance_attribute_hides_the_class(a):
    return scale(a)


@program(x, change="Scale.__call__ = lambda self, a: a - self.k")
def replaced_method(a):
    return scale(a), shift(a)


@program(x, change="scale.__class__ = Shift")
def changed_class_of_an_instance(a):
    return scale(a)


@program(x, change="Shift.__bases__ = (Flip,)")
def changed_bases(a):
    return shift(a)


class Flip(Scale):
    def __call__(self, a):
        return a.flip(0)


@program(x, Scale(2), again=(x, Shift(2)))
def object_of_another_class(a, layer):
    return layer(a)


class Counted:
    made = 0

    def __init__(self):
        type(self).made += 1


@program(x, whole=False)
def counts_instances(a):
    return a * Counted().made, Counted.made


@program(x, whole=False)
def class_attribute_is_written(a):
    Scale.factor = Scale.factor + 1
    return a * Scale.factor


@program(x)
def new_object_is_returned(a):
    made = Shift(5)
    made.kept = a * 2
    made.me = made
    return made


@program(x, change="del scale.k; Scale.k = 8")
def deleted_attribute_falls_back_to_class(a):
    return a * scale.k


@program(x)
def object_as_context_manager(a):
    with scale as s:
        a = s(a)
    return a, scale.k


@program(x, whole=False)
def bound_methods_as_values(a):
    apply = scale.__call__
    return [f(a) for f in (apply, shift.__call__, Scale.__call__.__get__(scale))]


class Celsius:
    def __init__(self, degrees):
        self.degrees = degrees

    @property
    def kelvin(self):
        return self.degrees + 273

    @kelvin.setter
    def kelvin(self, value):
        self.degrees = value - 273

    @kelvin.deleter
    def kelvin(self):
        self.degrees = None


warm = Celsius(20)


@program(x, change="Celsius.kelvin = property(lambda self: 1)")
def property_is_replaced(a):
    return a + warm.kelvin


@program(x, whole=False)
def property_set_and_deleted(a):
    warm.kelvin = 300
    seen = warm.degrees
    try:
        del warm.kelvin
    except AttributeError as error:
        return str(error)
    return a * seen, warm.degrees


class Clamped:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, instance, owner=None):
        return self if instance is None else getattr(instance, self.name, 0)

    def __set__(self, instance, value):
        setattr(instance, self.name, min(value, 5))


class Knob:
    level = Clamped()


knob = Knob()


@program(x, 9, again=(x, 3), change="knob._level = 1", whole=False)
def data_descriptor(a, n):
    before = knob.level
    knob.level = n
    return a * knob.level + before, Knob.level.name


class Lazy:
    def __init__(self, compute):
        self.compute = compute

    def __get__(self, instance, owner):
        value = instance.__dict__["table"] = self.compute(instance)
        return value


class WithLazy:
    n = 2
    table = Lazy(lambda self: [self.n] * 3)


with_lazy = WithLazy()


@program(x, change="with_lazy.table.append(10)")
def non_data_descriptor(a):
    return a * sum(with_lazy.table)


class Fallback:
    known = 1

    def __getattr__(self, name):
        if name.startswith("w"):
            return len(name)
        raise AttributeError(name)


fallback = Fallback()


@program(x, change="fallback.width = 50")
def getattr_of_unknown_names(a):
    return a * fallback.width, fallback.known, hasattr(fallback, "zz"), getattr(fallback, "z", 0)


class Strict:
    def __getattribute__(self, name):
        if name == "secret":
            return 42
        return super().__getattribute__(name)

    def __setattr__(self, name, value):
        super().__setattr__(name, value * 2)

    def __delattr__(self, name):
        super().__setattr__(name, -1)


strict = Strict()


@program(x, 1)
def attribute_protocol(a, n):
    strict.value = n
    seen = strict.value
    del strict.value
    return a * strict.secret, seen, strict.value


class Registry(type):
    entries = {}

    def __new__(meta, name, bases, space, **options):
        cls = super().__new__(meta, name, bases, space)
        cls.options = options
        meta.entries[name.lower()] = cls
        return cls

    def __call__(cls, *args):
        made = super().__call__(*args)
        made.tag = cls.__name__
        return made

    def __len__(cls):
        return 7


class Double(metaclass=Registry, power=2):
    def __init__(self, n):
        self.n = n

    def run(self, a):
        return a * self.n ** self.options["power"]


@program(x, change="Registry.entries['double'] = Scale", whole=False)
def class_made_by_a_metaclass(a):
    return a * Double(3).n, Double.options, sorted(Registry.entries)


@program(x, whole=False)
def instance_made_by_a_metaclass(a):
    made = Registry.entries["double"](3)
    return made.run(a), made.tag, len(Double)


class Base:
    kinds = []

    def __init_subclass__(cls, /, kind=None, **rest):
        super().__init_subclass__(**rest)
        cls.kinds.append(kind)

    def __class_getitem__(cls, item):
        return item


@program(x, whole=False)
def init_subclass_and_class_getitem(a):
    class Local(Base, kind="local"):
        pass

    return a * len(Base.kinds), Base.kinds[-1], Local[3]


class Left(Base, kind="left"):
    def run(self, a):
        return ["left", *super().run(a)]


class Root:
    def run(self, a):
        return [a]


class Right(Root):
    def run(self, a):
        return ["right", *super(Right, self).run(a + 1)]


class Diamond(Left, Right, kind="diamond"):
    def run(self, a):
        return ["diamond", *super().run(a * 2)]


@program(x)
def cooperative_super(a):
    return Diamond().run(a), [c.__name__ for c in Diamond.__mro__]


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...

    def describe(self):
        return f"{type(self).__name__} {self.area()}"


class Square(Shape):
    def __init__(self, side):
        self.side = side

    def area(self):
        return self.side**2


@program(x)
def abstract_classes(a):
    try:
        Shape()
    except TypeError:
        return a * Square(3).area(), Square(2).describe(), isinstance(Square(1), Shape)


class Polynomial:
    def __init__(self, *coefficients):
        self.c = coefficients

    def __add__(self, other):
        if not isinstance(other, Polynomial):
            return NotImplemented
        return Polynomial(*(p + q for p, q in zip(self.c, other.c)))

    def __rmul__(self, n):
        return Polynomial(*(n * p for p in self.c))

    def __matmul__(self, a):
        return sum(p * a**n for n, p in enumerate(self.c))

    def __neg__(self):
        return -1 * self

    def __getitem__(self, n):
        return self.c[n]

    def __contains__(self, n):
        return n in self.c

    def __iter__(self):
        return iter(self.c)

    def __len__(self):
        return len(self.c)

    def __bool__(self):
        return any(self.c)

    def __eq__(self, other):
        return self.c == other.c

    def __lt__(self, other):
        return self.c < other.c

    def __repr__(self):
        return f"P{self.c}"

    def __index__(self):
        return self.c[0]


@program(x, whole=False)
def operators_of_a_class(a):
    p, q = Polynomial(1, 2), Polynomial(0, 1)
    return (
        (p + 2 * q) @ a,
        -p == Polynomial(-1, -2),
        sorted([p, q]),
        2 in p,
        [*q],
        [5, 6, 7][p],
        not q,
    )


@program(x)
def unsupported_operands(a):
    try:
        return Polynomial(1) + 2
    except TypeError as error:
        return a, str(error)


class Point:
    __slots__ = ("u", "v")

    def __init__(self, u, v):
        self.u, self.v = u, v

    def __hash__(self):
        return hash((self.u, self.v))

    def __eq__(self, other):
        return (self.u, self.v) == (other.u, other.v)


point = Point(1, 2)


@program(x, change="point.u = 6")
def slots(a):
    table = {Point(1, 2): "found"}
    return a * point.u, table.get(point, "lost"), hasattr(point, "__dict__")


@program(x, whole=False)
def local_class_with_closure(a):
    k = a.shape[0]

    class Local:
        size = k * 2

        @classmethod
        def make(cls):
            return cls()

        @staticmethod
        def twice(t):
            return t * 2

        def run(self):
            return self.twice(a) + self.size

    return Local.make().run(), Local.__name__


@program(x, whole=False)
def type_called_with_three_arguments(a):
    made = type("Made", (Scale,), {"factor": 7.0})
    return made(2)(a), made.__mro__[1] is Scale


@program(x, whole=False)
def simple_namespace(a):
    space = types.SimpleNamespace(n=2, t=a)
    space.n += 1
    return space.t * space.n, vars(space)["n"]


@program(x, whole=False)
def dunder_dict_and_setattr(a):
    made = Scale(1)
    made.__dict__["extra"] = a
    setattr(made, "k", 5)
    return made.extra * made.k, sorted(vars(made)), getattr(made, "extra") is a


@program(x, whole=False)
def weak_references(a):
    ref = weakref.ref(scale)
    return ref()(a), ref() is scale


class Number:
    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value

    def __float__(self):
        return self.value / 2


@program(x, Number(1), again=(x, Number(2)), whole=False)
def objects_as_numbers(a, number):
    return a * [10, 20, 30][number], (1, 2, 3)[:number], float(number), list(range(number))


class Dying:
    def __del__(self):
        print("dead")


@program(x, whole=False)
def finalizer(a):
    thing = Dying()
    b = a * 2
    print("alive")
    del thing
    return b


class Quantity:
    scale = 2.0

    def __init__(self, k):
        self.k = k

    def go(self, a):
        return a * self.k * self.scale

    @classmethod
    def make(cls, k):
        return cls(k)

    @staticmethod
    def st(a):
        return a + 1

    def __call__(self, a):
        return self.go(a)

    def __getitem__(self, i):
        return self.k + i

    def __len__(self):
        return 3

    def __add__(self, o):
        return Quantity(self.k + (o.k if isinstance(o, Quantity) else o))

    __radd__ = __add__

    def __eq__(self, o):
        return self.k == o.k

    def __hash__(self):
        return 1


class Tripled(Quantity):
    scale = 3.0

    def go(self, a):
        return super().go(a) + Quantity.st(a)

    @property
    def prop(self):
        return self.k

    @prop.setter
    def prop(self, v):
        self.k = v


@program(x)
def methods_of_a_derived_class(a):
    d = Tripled.make(2)
    d.prop = 5
    e = d + Quantity(1) + 3
    return d(a), d[2], len(d), e.k, d == Quantity(5), 4 + Quantity(1) == Quantity(5)


class Remembering:
    def __init__(self, a):
        self.a = a

    @functools.cached_property
    def z(self):
        return self.a * 2


@program(x)
def cached_property(a):
    k = Remembering(a)
    return k.z, k.z is k.z


LIMIT = 4


class Counted:
    def __iter__(self):
        return iter(range(LIMIT))


class Doubling(list):
    def __getitem__(self, i):
        return super().__getitem__(i) * 2


class Elsewhere:
    def __new__(cls, n):
        return n


class Formatted:
    def __format__(self, spec):
        return f"<{spec}>"


@program(x, change="LIMIT = 2")
def found_in_own_iterable(a):
    return a + (3 in Counted()), 3 in (i for i in range(4)), Elsewhere(3)


@program(x)
def items_as_the_class_gives_them(a):
    return a * Doubling([1, 2])[1], hasattr(super(Doubling, Doubling()), "nothing")


@program(x, whole=False)
def texts_that_python_makes(a):
    return a + 1, f"{Formatted():>3}", "%s" % (a * 0), "{}".format([a.shape[0]]), f"{a.shape[0]!a}"  # noqa: UP031, UP032


async def waits():
    return 1


@program(x, whole=False)
def coroutine_made_and_closed(a):
    waiting = waits()
    waiting.close()
    return a + 1


@program(x, whole=False)
def position_in_a_list_from_data(a):
    return a, [1, 2, 3][(a * 0).sum().long()]


@program(x, whole=False)
def imports_late(a):
    import colorsys

    from .helpers import equal

    return a * colorsys.ONE_THIRD, equal(1, 1)
