"""Small programs, one for each corner of Python; `test_programs.py` runs each compiled and not."""

# ruff: noqa
# mypy: ignore-errors
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import math
import operator
import typing

import torch

torch.manual_seed(0)
PROGRAMS = []
"""(function, arguments)"""


def prog(*args):
    def d(f):
        PROGRAMS.append((f, args))
        return f

    return d


x = torch.randn(3, 4)
y = torch.randn(3, 4)
v = torch.randn(4)


@prog(x, y)
def add_program(a, b):
    return a + b * 2


@prog(x)
def unpack_program(a):
    p, q, *r = a, a + 1, a + 2, 3
    return p * q, r


@prog(x)
def slices_program(a):
    return a[1:], a[..., ::2], a[:, None], a[0][1], a[[0, 2]], a[a.shape[0] - 1]


@prog(x)
def closure_program(a):
    k = 2

    def inner(t, *, s=3):
        nonlocal k
        k += 1
        return t * k * s

    return inner(a) + inner(a, s=1) + k


@prog(x)
def gen_program(a):
    def g(n):
        for i in range(n):
            got = yield a * i
        return 5

    return sum(g(3)), list(g(2))


@prog(x)
def yieldfrom_program(a):
    def g():
        r = yield from h()
        yield a + r

    def h():
        yield a
        yield a * 2
        return 7

    return [t for t in g()]


@prog(x)
def comp_program(a):
    l = [a * i for i in range(3) if i != 1]
    d = {f"k{i}": t for i, t in enumerate(l)}
    s = {i % 2 for i in range(4)}
    return d, s, [[i * j for j in range(2)] for i in range(2)], (lambda q: q + 1)(a)


@prog(x)
def try_program(a):
    try:
        raise ValueError("boo")
    except (KeyError, ValueError) as e:
        r = a + len(str(e))
    else:
        r = a
    finally:
        r = r * 2
    try:
        {}["x"]
    except KeyError as e:
        r = r + 1
    return r


@prog(x)
def finally_program(a):
    out = []

    def f():
        try:
            return a
        finally:
            out.append(1)

    f()
    for i in range(3):
        try:
            if i == 1:
                continue
            if i == 2:
                break
            out.append(i)
        finally:
            out.append("f")
    return out, a


class CM:
    def __init__(s, l):
        s.l = l

    def __enter__(s):
        s.l.append("in")
        return s

    def __exit__(s, t, v, tb):
        s.l.append(t.__name__ if t else None)
        return t is ValueError


@prog(x)
def with_program(a):
    l = []
    with CM(l) as c, CM(l):
        a = a + 1
    with CM(l):
        raise ValueError
    return l, a


@contextlib.contextmanager
def cmgr(l):
    l.append(1)
    try:
        yield 5
    finally:
        l.append(2)


@prog(x)
def ctxmgr_program(a):
    l = []
    with cmgr(l) as q:
        a = a * q
    with contextlib.nullcontext():
        a = a + 1
    return a, l


@prog(x)
def nograd_program(a):
    with torch.no_grad():
        b = a * 2
        with torch.enable_grad():
            c = a * 3
    with torch.set_grad_enabled(False):
        d = a * 4
    return b, c, d, torch.is_grad_enabled()


@torch.no_grad()
def deco(a):
    return a * 2


@prog(x.clone().requires_grad_())
def nograd_deco_program(a):
    return deco(a), a * 3


@prog(x)
def fstr_program(a):
    return (
        f"{a.shape[0]:>4}|{a.dtype!s}|{1.5:.2f}|{'z'!r}",
        "%d-%s" % (a.ndim, "q"),
        "a{}b{x}".format(1, x=2),
        a,
    )


@prog(x)
def walrus_program(a):
    if (n := a.size(0)) > 2:
        a = a + n
    return a if 1 < n <= 3 < 10 else a - 1


@dataclasses.dataclass
class DC:
    t: torch.Tensor
    n: int = 3
    l: list = dataclasses.field(default_factory=list)

    def scaled(self):
        return self.t * self.n

    @property
    def dbl(self):
        return self.t * 2


@prog(x)
def dc_program(a):
    d = DC(a)
    d.l.append(a)
    d2 = dataclasses.replace(d, n=5)
    return d.scaled() + d2.dbl + d2.scaled(), d


NT = collections.namedtuple("NT", "p q")


class TNT(typing.NamedTuple):
    a: int
    b: torch.Tensor


@prog(x)
def nt_program(a):
    n = NT(a, q=2)
    m = n._replace(q=3)
    t = TNT(1, a)
    return n.p * m.q, m, t, n._asdict(), t.b + 1


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@prog(x, Color.RED)
def enum_program(a, c):
    if c is Color.RED:
        a = a + 1
    if c == Color.BLUE:
        a = a * 7
    return a * Color(2).value, Color["RED"].name, [m.value for m in Color], c


class Base:
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
        return Base(self.k + (o.k if isinstance(o, Base) else o))

    __radd__ = __add__

    def __eq__(self, o):
        return self.k == o.k

    def __hash__(self):
        return 1


class Derived(Base):
    scale = 3.0

    def go(self, a):
        return super().go(a) + Base.st(a)

    @property
    def prop(self):
        return self.k

    @prop.setter
    def prop(self, v):
        self.k = v


@prog(x)
def class_program(a):
    d = Derived.make(2)
    d.prop = 5
    e = d + Base(1) + 3
    return d(a), d[2], len(d), e.k, d == Base(5), 4 + Base(1) == Base(5)


obj = Derived(4)


@prog(x, obj)
def objarg_program(a, o):
    return o(a) * o.k, o.prop, hasattr(o, "zz"), getattr(o, "zz", 9)


@prog(x)
def functools_program(a):
    f = functools.partial(torch.add, a, alpha=2)
    g = functools.partial(lambda q, r, s=1: q * r * s, s=3)
    return (
        f(a),
        g(a, 2),
        functools.reduce(lambda p, q: p + q, [a, a, a]),
        functools.reduce(operator.mul, [1, 2, 3]),
    )


def wrapped(f):
    @functools.wraps(f)
    def w(*args, **kwargs):
        return f(*args, **kwargs) * 2

    return w


@wrapped
def wf(a, b=1, *c, d=2, **e):
    return a * b + d + sum(c) + sum(e.values())


@prog(x)
def args_program(a):
    return wf(a), wf(a, 2, 3, d=4, z=5), wf(*[a, 1], **{"d": 3})


@prog([x, y], {"a": x, "b": [y, 3]}, (x, 2))
def containers_program(l, d, t):
    s = 0
    for e in l:
        s = s + e
    for k, w in d.items():
        s = s + (w if k == "a" else w[0] * w[1])
    u, n = t
    return (
        s + u * n,
        len(l),
        list(d),
        d["b"][1],
        "a" in d,
        d.get("zz", 5),
        [*l, *t],
        {**d, "c": 1},
        l[-1],
        l[0:1],
        sorted(d.keys(), reverse=True),
    )


@prog(x)
def builtins_program(a):
    l = [3, 1, 2]
    return (
        sorted(l, key=lambda q: -q),
        max(l),
        min(l, key=lambda q: -q),
        list(map(lambda q: a * q, l)),
        list(filter(lambda q: q > 1, l)),
        list(reversed(l)),
        any(q > 2 for q in l),
        all(l),
        sum(l, 10),
        abs(-3),
        divmod(7, 2),
        round(2.567, 1),
        isinstance(a, torch.Tensor),
        isinstance(l, (list, tuple)),
        type(a) is torch.Tensor,
        list(enumerate(l, 1)),
        dict(zip("ab", l)),
        dict(a=1),
        tuple(l),
        set(l),
        frozenset(l),
        str(5),
        int("7"),
        float("1.5"),
        bool([]),
        chr(65),
        ord("a"),
        hex(10),
        callable(a.sum),
        pow(2, 3),
        list(range(5))[::2],
        math.sqrt(16),
        math.pi,
        isinstance(1, int),
        issubclass(int, object),
    )


@prog(x)
def max_t_program(a):
    return max(a.shape), torch.stack([a, a]).mean(0), sum([a, a], a)


@prog(x)
def itertools_program(a):
    return (
        list(itertools.chain([1], [2])),
        [i for i in itertools.product(range(2), repeat=2)],
        list(itertools.accumulate([1, 2, 3])),
        list(itertools.islice(itertools.count(), 3)),
        list(itertools.zip_longest([1], [2, 3])),
        a,
    )


@prog(x)
def inplace_program(a):
    b = a.clone()
    b += 1
    b.mul_(2)
    b[0] = 5
    b[:, 1] += a[:, 0]
    return b


@prog(x.clone())
def mutinput_program(a):
    a.add_(1)
    a[0] = 0
    return a


@prog(x)
def strs_program(a):
    return (
        "a,b".split(","),
        "x".join(["1", "2"]),
        "Ab".lower(),
        "abc"[1:],
        "abc".startswith("a"),
        "abc".replace("a", "z"),
        a,
    )


@prog(x)
def tensormeth_program(a):
    return (
        a.T,
        a.mT.shape,
        a.size(),
        a.size(-1),
        a.numel(),
        a.dim(),
        a.is_contiguous(),
        a.stride(),
        a.dtype.is_floating_point,
        a.device.type,
        a.to(torch.float64),
        a.type_as(a),
        a.view(-1),
        a.reshape(2, -1),
        a.permute(1, 0),
        a.chunk(2, 1),
        a.split([1, 2]),
        a.max(dim=1),
        a.max(dim=1).values,
        a.sort(),
        a.unbind(0),
        a.is_floating_point(),
        a.element_size(),
        a.new_zeros(2),
        a.expand(2, 3, 4),
        a.unsqueeze(0).squeeze(0),
        torch.is_tensor(a),
    )


@prog(x)
def create_program(a):
    return (
        torch.arange(5),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.tensor([1.0, 2.0]),
        torch.ones_like(a),
        torch.full((2,), 3.0),
        torch.eye(3),
        torch.linspace(0, 1, 4),
        torch.empty(0),
        torch.tensor(3),
    )


@prog(x)
def iter_t_program(a):
    return [r * 2 for r in a], len(a), [q for q in zip(a, a)]


@prog(x)
def match_program(a):
    d = {"k": [1, 2, 3], "z": a}
    match d:
        case {"k": [p, *q], "z": t}:
            return t * p, q
    return a


@prog(x)
def match2_program(a):
    r = []
    for o in (1, "s", (1, 2), Base(3), None):
        match o:
            case int():
                r.append("int")
            case str():
                r.append("str")
            case (p, q):
                r.append(p + q)
            case Base(k=3):
                r.append("b")
            case _:
                r.append("none")
    return r, a


@prog(x)
def deepcopy_program(a):
    l = [1, [2, 3]]
    m = copy.deepcopy(l)
    m[1].append(4)
    c = copy.copy(l)
    return l, m, c, a


def echo():
    got = None
    while True:
        try:
            got = yield got
        except ValueError as error:
            got = str(error)


@prog(x)
def generator_methods_program(a):
    g = echo()
    next(g)
    seen = g.send(3), g.throw(ValueError("thrown"))
    g.close()
    return a + 1, seen


@contextlib.contextmanager
def logged(log):
    try:
        yield len(log)
    except ValueError as error:
        log.append(str(error))
    finally:
        log.append("out")


@prog(x)
def contextmanager_program(a):
    log = ["in"]
    with logged(log) as n:
        a = a * n
        raise ValueError("handled")
    try:
        with logged(log):
            raise KeyError("passed on")
    except KeyError as error:
        return a, log, type(error.__context__)


@prog(x)
def binding_errors_program(a):
    def f(p, /, q, *, r):
        return p

    log = []
    for args, kwargs in [((), {}), ((1,), {}), ((1, 2, 3), {"r": 1}), ((1,), {"p": 1, "q": 2})]:
        try:
            f(*args, **kwargs)
        except TypeError as error:
            log.append(str(error))
    return a, log


@prog(x)
def views_program(a):
    table = {"a": 1}
    keys, items = table.keys(), table.items()
    table["b"] = 2
    return a, list(keys), list(items), len(keys)


@prog(x)
def while_program(a):
    i = 0
    while True:
        i += 1
        if i > 3:
            break
        a = a + i
    else:
        a = a * 0
    return a, i


@prog(x)
def assert_program(a):
    assert a.shape[0] == 3, "bad"
    return a


@prog(x)
def del_program(a):
    b = a
    c = [1, 2, 3]
    del c[0]
    del b
    d = {"x": 1}
    d.pop("x")
    d.setdefault("y", []).append(a)
    d.update(z=2)
    return c, d


G = 3
GL = [1, 2]
GD = {"w": 2.0}


@prog(x)
def global_program(a):
    return a * G + GL[0] + GD["w"], len(GL)


@prog(x)
def defaultdict_program(a):
    d = collections.defaultdict(list)
    d["k"].append(a)
    d["j"]
    o = collections.OrderedDict(a=1, b=a)
    return dict(d), o


@prog(x)
def setops_program(a):
    return (
        {1, 2} | {3},
        {1, 2} & {2},
        [1] + [2],
        (1,) * 3,
        [0] * 2,
        {1: 2} | {3: 4},
        3 in [1, 3],
        "b" not in "abc",
        [1, 2] == [1, 2],
        (1, 2) < (1, 3),
        a,
    )


@prog(x)
def F_program(a):
    F = torch.nn.functional
    return (
        F.relu(a),
        F.softmax(a, -1),
        F.layer_norm(a, (4,)),
        F.gelu(a),
        F.pad(a, (1, 1)),
        F.linear(a, a),
        F.cross_entropy(a, torch.tensor([0, 1, 2])),
        F.one_hot(torch.tensor([0, 1, 2]), 3),
        torch.einsum("ij,kj->ik", a, a),
        F.dropout(a, 0.5, False),
    )


@prog(x)
def lstcomp_cond_program(a):
    return [a if i else None for i in range(2)], None, ..., True


@prog(x, 2, 1.5, "relu", None, True)
def consts_program(a, n, f, s, no, b):
    a = getattr(torch, s)(a) * n + f
    return a if no is None and b else -a


@prog(x)
def retsame_program(a):
    return a, [a, a], a.contiguous(), a.to(torch.float32)


@prog(x)
def autocast_program(a):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = a @ a.T
    return b, a @ a.T


@prog(x)
def nestedfn_program(a):
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    return a * fib(6)


@prog(x)
def kwonly_program(a, *rest, k=2, **kw):
    return a * k + len(rest) + len(kw)


@prog(x)
def starcall_program(a):
    return torch.cat([*(a, a)], **dict(dim=1)), print.__name__


@prog(x)
def exc_in_callee_program(a):
    def bad():
        raise RuntimeError("x")

    try:
        bad()
    except RuntimeError as e:
        return a + len(e.args), str(e)


class Slotted:
    __slots__ = ("u", "w")

    def __init__(self, u):
        self.u = u


@prog(x)
def slots_program(a):
    s = Slotted(a)
    s.w = 3
    return s.u * s.w


@prog(x)
def lambda_default_program(a):
    return [f(a) for f in [lambda t, i=i: t + i for i in range(3)]]


@prog(x)
def ops_program(a):
    return (
        a @ a.T,
        -a,
        ~torch.tensor([True]),
        a**2,
        a // 2,
        a % 2,
        2 - a,
        2 / a.abs(),
        a > 0,
        a == a,
        (a > 0) & (a < 1),
        1 < a,
        a != a,
        2**a,
        a is None,
        a is not a,
    )


class Remembering:
    def __init__(self, a):
        self.a = a

    @functools.cached_property
    def z(self):
        return self.a * 2


@prog(x)
def cached_prop_program(a):
    k = Remembering(a)
    return k.z, k.z is k.z
