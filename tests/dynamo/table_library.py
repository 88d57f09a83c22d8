"""Small programs: text, builtins, the standard library, kinds of arguments."""

# ruff: noqa
# mypy: ignore-errors
import copy
import functools
import itertools
import math
import operator
import random
import re
import string

import torch

from tests.dynamo.program_table import Table

program = Table()
x = torch.randn(3, 4)
y = torch.randn(3, 4)


# -- text


@program(x)
def format_strings(a):
    n, name = a.shape[0], "rows"
    return a, f"{n:03d} {name!r:>8} {n / 7:.3f} {n=} {'{'}{a.dtype}", f"{n:{n}}"


@program(x)
def string_methods(a):
    words = "the quick  fox".split()
    return a * len(words), "-".join(w.title() for w in words), "fox" in words, "a=1".partition("=")


@program(x)
def format_method_and_percent(a):
    return a, "{0}{1!r}{k:>4}".format(1, "z", k=2.5), "%s %05.1f %d%%" % ("p", 2.25, 3)


SIZE = re.compile(r"(\d+)x(\d+)")


@program(x, "a3", again=(x, "a1 2x3 4x5"))
def regular_expressions(a, text):
    letter, sizes = re.match(r"(\w)(\d)", text), SIZE.search(text)
    count = int(letter.group(2)) + (0 if sizes is None else int(sizes[1]) * sizes.start())
    count += sum(len(size[0]) for size in SIZE.finditer(text))
    shown = SIZE.sub(lambda size: f"<{size[1]}>", text), re.findall("[a-z]", text)
    return a * count, shown, re.split("x", text), re.escape(text), SIZE


@program(x)
def string_template_and_translation(a):
    table = str.maketrans("abc", "xyz")
    return a, string.Template("$who").substitute(who="me"), "aabbcc".translate(table)


@program(x)
def names_from_strings(a):
    return [getattr(a, name)() for name in ("sum", "mean", "exp")], getattr(a, "nothing", None)


@program(x, whole=False)
def prints_before_and_after(a):
    print("before", a.shape)
    b = a * 2
    print("after", b.shape[0], sep=":", end="!\n")
    return b


@program(x, whole=False)
def prints_then_raises(a):
    print("start")
    c = a + 1
    raise ValueError(f"after {c.shape[0]}")


# -- functools, itertools, builtins


@program(x)
def partials(a):
    power = functools.partial(torch.pow, exponent=2)
    nested = functools.partial(functools.partial(torch.add, a), alpha=3)
    return power(a), nested(a), nested.func is torch.add, nested.keywords


@program(x, whole=False)
def reduce_and_operators(a):
    pick = operator.itemgetter(1, 0)
    rows = operator.attrgetter("shape")(a)
    return (
        functools.reduce(operator.add, [a, a, a], 1),
        pick([a, 2]),
        rows,
        operator.methodcaller("sum", 0)(a),
    )


@functools.lru_cache(maxsize=None)
def cached_square(n):
    return n * n


@program(x)
def lru_cache(a):
    return a * cached_square(4) + cached_square(a.shape[0])


@functools.singledispatch
def doubled(value):
    return "other"


@doubled.register
def _(value: int):
    return value * 2


@doubled.register
def _(value: list):
    return [doubled(v) for v in value]


@program(x, whole=False)
def singledispatch(a):
    return a * doubled(3), doubled([1, "z"])


@program(x, whole=False)
def cmp_to_key(a):
    order = sorted([3, 1, 2], key=functools.cmp_to_key(lambda p, q: q - p))
    return a * order[0], order


@program(x, whole=False)
def stable_sort_in_place(a):
    items = [(2, "p"), (1, "q"), (2, "r"), (1, "s")]
    items.sort(key=operator.itemgetter(0))
    return a, items


@program(x)
def sort_by_length_and_minus(a):
    parts = sorted(a.split([1, a.shape[0] - 1]), key=lambda t: -t.shape[0])
    return parts, max(parts, key=len)


@program(x)
def zip_map_enumerate(a):
    rows = [row * n for n, row in enumerate(a, start=1)]
    return (
        list(map(torch.add, rows, reversed(rows))),
        dict(zip("ab", rows)),
        list(zip(*[(1, 2), (3, 4)])),
    )


@program(x)
def zip_strict(a):
    try:
        return list(zip([1, 2], [3], strict=True))
    except ValueError as error:
        return a, str(error)


@program(x)
def filter_any_all(a):
    shapes = [t.shape[0] for t in (a, a[1:], a[2:])]
    return a, list(filter(None, [0, 1, a.dim()])), any(n == 1 for n in shapes), all(shapes)


@program(x, whole=False)
def itertools_tour(a):
    return (
        [list(g) for _, g in itertools.groupby([1, 1, 2, 3, 3])],
        list(itertools.combinations("abc", 2)),
        list(itertools.permutations([1, 2])),
        list(itertools.starmap(operator.mul, [(a, 2), (3, 4)])),
        list(itertools.takewhile(lambda n: n < 3, itertools.count(1))),
        list(itertools.dropwhile(lambda n: n < 3, range(5))),
        list(itertools.pairwise([1, 2, 3])),
        list(itertools.compress("abc", [1, 0, 1])),
        list(itertools.repeat(1, 2)),
        list(itertools.chain.from_iterable([[a], [1]])),
    )


@program(x)
def itertools_accumulate_tensors(a):
    return list(itertools.accumulate([a, a, a], lambda p, q: p * q, initial=a))


@program(x)
def itertools_cycle_and_tee(a):
    ring = itertools.cycle([1, 2])
    left, right = itertools.tee([a, a + 1])
    return [next(ring) for _ in range(3)], list(left), list(right)


@program(x)
def min_max_sum_of_tensors(a):
    return sum(a), sum([a, a], start=a), max(2, a.dim()), min([3, 1], default=0), max([], default=7)


@program(x)
def slices_and_ranges(a):
    steps = slice(0, None, 2)
    numbers = range(10)[2:8:3]
    return a[steps], list(numbers), 5 in numbers, len(numbers), steps.indices(a.shape[0])


@program(x, whole=False)
def iter_with_sentinel(a):
    items = [1, 2, 0, 3]
    return a, list(iter(lambda: items.pop(0), 0)), items


@program(x, 7, again=(x, -7))
def integer_arithmetic(a, n):
    return (
        a * (n // 2) + n % 3,
        divmod(n, 4),
        n << 2,
        n >> 1,
        n & 5,
        n ^ 1,
        ~n,
        -n // 2,
        abs(n),
        n**2,
    )


@program(x, 2.5, again=(x, float("nan")))
def float_arithmetic(a, f):
    return a * f, f // 1, f % 1, math.isnan(f), f == f, round(2.5), math.floor(-0.5), 1e300 * 1e10


@program(x)
def big_integers(a):
    return a + (2**70 >> 68), 2**100, -(2**65) // 3


@program(x, -0.0, again=(x, 0.0))
def signed_zero_is_a_guard(a, f):
    return a.abs() * math.copysign(1, f), f


@program(x, 1, again=(x, True))
def one_and_true_are_different(a, n):
    return a * n, f"{n}", type(n).__name__


@program(x, 1, again=(x, 1.0))
def int_and_float_are_different(a, n):
    return torch.full((2,), n), a * n


@program(x, whole=False)
def random_module(a):
    return a * random.random(), random.randint(0, 9)


@program(x)
def copies(a):
    shared = [a, {"k": [1]}]
    shallow, deep = copy.copy(shared), copy.deepcopy({"k": [1]})
    shallow[1]["k"].append(2)
    return shared, shallow, deep


@program(x, whole=False)
def eval_of_text(a):
    return eval("a * n", {}, {"a": a, "n": 3})


@program(x, whole=False)
def locals_and_vars(a):
    n = 2
    return a * n, sorted(locals())


@program(x)
def lambdas_in_a_table(a):
    table = {"neg": lambda t: -t, "twice": lambda t, n=2: t * n}
    return [table[k](a) for k in sorted(table)], (lambda *r, **k: (r, k))(1, z=2)


@program(x, x, again=(x, y))
def same_tensor_twice(a, b):
    if a is b:
        return a * 2
    return a + b


@program(x, [1, 2], again=(x, (1, 2)))
def list_or_tuple(a, items):
    return (a + len(items), items) if isinstance(items, list) else (a, items + (3,))


@program(x, None, again=(x, y))
def optional_tensor(a, b):
    return a * 2 if b is None else a + b


@program([x, y], again=([x, y, x],))
def list_of_tensors(items):
    return torch.stack(items).sum(0), len(items)


@program({"p": x, "q": y}, again=({"q": y, "p": x},))
def dict_order_matters(table):
    return torch.cat(list(table.values())), list(table)


@program(x, lambda t: t + 1, again=(x, torch.exp))
def function_as_argument(a, f):
    return f(a) * 2


@program(x, int, again=(x, float))
def type_as_argument(a, kind):
    return a * kind("3"), kind


@program(x)
def builtins_in_one_graph(a):
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
