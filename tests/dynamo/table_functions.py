"""Small programs: functions, their arguments and closures, generators."""

# ruff: noqa
# mypy: ignore-errors
import collections
import functools
import itertools

import torch

from tests.dynamo.program_table import Table

program = Table()
x = torch.randn(3, 4)
y = torch.randn(3, 4)
SCALE = 3
OFFSETS = [1, 2]
CONFIG = {"act": "relu", "layers": [1, 2], "on": True}
LOG = []
MODE = "sum"
ACTIVATE = torch.sin


# -- closures, globals, cells


def scaled_by(k):
    def changed_cell(a):
        return a * k

    return changed_cell


scaled = program(x, change="scaled.__closure__[0].cell_contents = 7")(scaled_by(2))


@program(x, change="SCALE = 5")
def reads_a_global(a):
    return a * SCALE


@program(x, change="SCALE = torch.ones(4)")
def global_number_becomes_tensor(a):
    return a * SCALE + 1


@program(x, change="OFFSETS.append(9)")
def reads_a_global_list(a):
    return a + sum(OFFSETS) / len(OFFSETS)


@program(x, change="CONFIG['act'] = 'tanh'")
def reads_a_global_dict(a):
    return getattr(torch, CONFIG["act"])(a) if CONFIG["on"] else a


@program(x, change="CONFIG['layers'] = []")
def loops_over_a_global_list(a):
    for width in CONFIG["layers"]:
        a = a * width
    return a


@program(x, change="ACTIVATE = torch.cos")
def calls_a_global_function(a):
    return ACTIVATE(a)


@program(x, change="del SCALE")
def global_that_disappears(a):
    try:
        return a * SCALE
    except NameError as error:
        return str(error)


@program(x, change="LOG = [5]")
def appends_to_a_global(a):
    LOG.append(a.shape[0])
    return a + len(LOG)


@program(x)
def writes_a_global(a):
    global MODE
    MODE = MODE + "!"
    return a, MODE


@program(x, whole=False)
def makes_and_deletes_a_global(a):
    global BRIEF
    BRIEF = a * 2
    result = BRIEF + 1
    del BRIEF
    return result, "BRIEF" in globals()


@program(x, change="sum = lambda items: 100")
def shadowed_builtin(a):
    return a + sum([1, 2])


def counter():
    n = 0

    def counts_its_calls(a):
        nonlocal n
        n += 1
        return a * n

    return counts_its_calls


counting = program(x, change="counting.__closure__[0].cell_contents = 'z'", whole=False)(counter())


@program(x)
def two_closures_share_a_cell(a):
    total = a

    def add(t):
        nonlocal total
        total = total + t

    def read():
        return total * 2

    add(1)
    first = read()
    add(a)
    return first, read()


@program(x)
def late_binding_of_loop_variables(a):
    return [f() for f in [lambda: a * i for i in range(3)]]


@program(x)
def unbound_local(a):
    if a.shape[0] > 100:
        late = 1
    try:
        return late
    except UnboundLocalError as error:
        return str(error)


@program(x, whole=False)
def deleted_cell(a):
    n = 1

    def read():
        return n

    del n
    try:
        return read()
    except NameError as error:
        return a, str(error)


@program(x)
def returns_a_closure(a):
    def later(b):
        return a + b

    later.note = 3
    return later(a), later


@program(x)
def function_attributes(a):
    function_attributes.calls = getattr(function_attributes, "calls", 0) + 1
    return a * function_attributes.calls


def with_default(a, k=2, *, bias=[1]):
    return a * k + bias[0]


@program(x, change="with_default.__defaults__ = (9,)")
def changed_default(a):
    return with_default(a)


@program(x, change="with_default.__kwdefaults__['bias'] = [4]")
def changed_keyword_default(a):
    return with_default(a, 3)


@program(x, change="with_default.__code__ = (lambda a, k=2, *, bias=0: a - k).__code__")
def changed_code_of_a_callee(a):
    return with_default(a)


@program(x)
def mutable_default(a):
    def remember(t, seen=[]):
        seen.append(t.shape)
        return len(seen)

    return remember(a), remember(a), a


# -- arguments


@program(x, 1, 2, again=(x,))
def star_args(a, *rest):
    return a + sum(rest), rest


@program(x)
def keyword_only_with_default(a, *, k=3, **rest):
    return a * k, rest


@program(x)
def positional_only(a, /, b=2):
    def inner(p, /, q, *, r):
        return p - q * r

    return inner(a, b, r=2), inner(a, q=b, r=3)


@program(x)
def unpacking_in_calls(a):
    def show(*args, **kwargs):
        return args, kwargs

    return show(*[a, 1], *(2,), k=3, **{"z": 4}, **dict(w=a + 1))


@program(x)
def order_of_evaluation(a):
    seen = []

    def note(n):
        seen.append(n)
        return n

    {note(1): note(2)}
    a = a + note(3) * note(4)
    [note(5), *(note(6),)]
    dict(k=note(7), **{"j": note(8)})
    return a, seen


@program(x)
def recursion_with_tensors(a):
    def power(t, n):
        return t if n == 0 else t * power(t, n - 1)

    return power(a, 4)


@program(x, whole=False)
def endless_recursion(a):
    def again(t):
        return again(t + 1)

    try:
        again(a)
    except RecursionError:
        return a * 2


# -- decorators


def twice(f):
    @functools.wraps(f)
    def run(*args, **kwargs):
        return f(f(*args, **kwargs))

    return run


def times(n):
    def decorate(f):
        def run(a):
            for _ in range(n):
                a = f(a)
            return a

        return run

    return decorate


@program(x, change="times_two_twice.__wrapped__ = None; SCALE = 4")
def decorated_functions(a):
    return times_two_twice(a) + three_times(a)


@twice
def times_two_twice(a):
    return a * SCALE


@times(3)
def three_times(a):
    return a + 1


class Registering:
    def __init__(self, f):
        self.f, self.calls = f, 0

    def __call__(self, *args):
        self.calls += 1
        return self.f(*args)


@Registering
def registered(a):
    return a * 2


@program(x, change="registered.f = torch.neg")
def class_as_decorator(a):
    return registered(a), registered.calls


@program(x)
def decorator_in_the_frame(a):
    @twice
    @times(2)
    def step(t):
        return t * 0.5

    return step(a), step.__name__


@program(x)
@twice
def decorated_program(a):
    return a.cos()


# -- generators and comprehensions


def windows(items, n):
    window = collections.deque(maxlen=n)
    for item in items:
        window.append(item)
        if len(window) == n:
            yield tuple(window)


@program(x, whole=False)
def generator_from_the_module(a):
    return [p * q for p, q in windows([a, a + 1, a + 2], 2)]


@program(x)
def generator_send(a):
    def average():
        total, n = 0, 0
        while True:
            value = yield total / max(n, 1)
            total, n = total + value, n + 1

    running = average()
    next(running)
    return running.send(a), running.send(a * 3)


@program(x)
def generator_close_runs_finally(a):
    seen = []

    def rows():
        try:
            yield from a
        finally:
            seen.append("closed")

    running = rows()
    first = next(running)
    running.close()
    return first, seen


@program(x, whole=False)
def generator_throw(a):
    def careful():
        while True:
            try:
                yield a
            except ValueError as error:
                yield str(error)

    running = careful()
    return next(running), running.throw(ValueError("stop it")), next(running)


@program(x)
def generator_return_value(a):
    def inner():
        yield a
        return "done"

    def outer():
        result = yield from inner()
        yield result

    return list(outer())


@program(x)
def half_consumed_generator_is_returned(a):
    squares = (a * n for n in range(3))
    next(squares)
    return list(squares), next(squares, "empty")


@program(x)
def infinite_generator(a):
    def powers(t):
        while True:
            yield t
            t = t * a

    return list(itertools.islice(powers(a), 3))


@program(x)
def stop_iteration_by_hand(a):
    rows = iter([a, a * 2])
    total = 0
    while True:
        try:
            total = total + next(rows)
        except StopIteration:
            return total


@program(x)
def nested_comprehensions(a):
    return {i: [a[i] * j for j in range(i)] for i in range(a.shape[0]) if i}, {
        (i, j) for i in range(2) for j in range(3) if i != j
    }


@program(x)
def comprehension_with_walrus(a):
    kept = [last := a * n for n in range(3) if (m := n * 2) > 1]
    return kept, last, m


@program(x)
def comprehension_scopes(a):
    i = "outer"
    squares = [i * i for i in range(3)]
    return a, i, squares


@program(x)
def generator_expression_is_lazy(a):
    seen = []

    def note(n):
        seen.append(n)
        return a * n

    found = next(t for n in range(5) if (t := note(n)) is not None and n == 2)
    return found, seen


@program(x)
def generators_interleaved(a):
    def walk(tag):
        for n in range(2):
            trail.append((tag, n))
            yield a * n

    trail = []
    return list(zip(walk("p"), walk("q"))), trail


@program(x)
def generator_that_raises(a):
    def bad():
        yield a
        raise KeyError("end")

    seen = []
    try:
        for t in bad():
            seen.append(t)
    except KeyError as error:
        return seen, error.args


@program(x)
def tree_walk_with_yield_from(a):
    def walk(tree):
        if isinstance(tree, (list, tuple)):
            for branch in tree:
                yield from walk(branch)
        else:
            yield tree

    return list(walk([a, [1, (a * 2, [3])]]))


def multiplier(k):
    def multiply(a):
        print("multiply")
        return a * k

    return multiply


@program(multiplier(2), x, again=(multiplier(3), x), whole=False)
def break_in_a_function_with_cells(function, a):
    return function(a) + 1


@program(x, whole=False)
def cache_of_the_call(a):
    @functools.lru_cache
    def twice(n):
        print("computed", n)
        return n * 2

    return a * twice(2) + twice(2)


@program(x)
def errors_of_binding_arguments(a):
    def f(p, /, q, *, r):
        return p

    log = []
    for args, kwargs in [((), {}), ((1,), {}), ((1, 2, 3), {"r": 1}), ((1,), {"p": 1, "q": 2})]:
        try:
            f(*args, **kwargs)
        except TypeError as error:
            log.append(str(error))
    return a, log
