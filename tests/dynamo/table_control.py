"""Small programs: control flow."""

# ruff: noqa
# mypy: ignore-errors
import contextlib

import torch

from tests.dynamo.program_table import Table

program = Table()
x = torch.randn(3, 4)


# -- control flow


@program(x)
def for_else(a):
    for n in range(a.shape[0]):
        if n == 3:
            a = a * 2
            break
    else:
        a = a - 1
    return a


@program(x)
def while_with_continue(a):
    n = 0
    while n < 6:
        n += 1
        if n % 2:
            continue
        a = a + n
    return a, n


@program(x, 0, again=(x, 2))
def chained_conditions(a, n):
    if 0 < n < 3 and not n == 1:
        return a + n
    elif n or a.dim() == 1:
        return a * n
    return a if n is None else -a


@program(x)
def try_except_else_finally(a):
    trail = []
    for divisor in (1, 0):
        try:
            n = 4 // divisor
        except ZeroDivisionError as error:
            trail.append(str(error))
        else:
            trail.append(n)
        finally:
            trail.append("finally")
    return a * n, trail


@program(x)
def return_in_finally_wins(a):
    def f():
        try:
            return a
        finally:
            return a * 2

    return f()


@program(x)
def finally_swallows_an_exception(a):
    for n in range(2):
        try:
            raise ValueError(n)
        finally:
            a = a + 1
            continue
    return a


@program(x)
def raise_from(a):
    try:
        try:
            {}["k"]
        except KeyError as error:
            raise ValueError("no k") from error
    except ValueError as error:
        return a, type(error.__cause__).__name__, error.__cause__.args, error.__suppress_context__


@program(x)
def exception_context(a):
    try:
        try:
            int("z")
        except ValueError:
            [][1]
    except IndexError as error:
        return a + 1, type(error.__context__).__name__, str(error)


@program(x)
def reraise(a):
    seen = []
    try:
        try:
            raise KeyError("first")
        except KeyError:
            seen.append("inner")
            raise
    except LookupError as error:
        seen.append(repr(error))
    return a, seen


class Refused(ValueError):
    def __init__(self, code, *, hint=""):
        super().__init__(f"refused {code}")
        self.code, self.hint = code, hint


@program(x)
def own_exception_class(a):
    try:
        raise Refused(7, hint="ask")
    except (OSError, ValueError) as error:
        return a * error.code, error.hint, str(error)


@program(x, 1, again=(x, 5), whole=False)
def raises_to_the_caller(a, n):
    if n == 5:
        raise Refused(n)
    return a * n


@program(x)
def exception_variable_is_deleted(a):
    error = 1
    try:
        raise ValueError
    except ValueError as error:
        pass
    try:
        error
    except NameError:
        return a


@program(x)
def loop_else_with_try(a):
    for n in range(3):
        try:
            if n == 1:
                raise IndexError
            a = a + n
        except IndexError:
            a = a * 10
    else:
        a = -a
    return a


@program(x, whole=False)
def exception_groups(a):
    trail = []
    try:
        raise ExceptionGroup("many", [ValueError(1), KeyError(2)])
    except* ValueError as group:
        trail.append(len(group.exceptions))
    except* KeyError as group:
        trail.append(group.exceptions[0].args)
    return a, trail


@program(x, whole=False)
def shape_error_is_caught(a):
    try:
        return a @ a
    except RuntimeError as error:
        return a.sum(), "shapes" in str(error)


@program(x, whole=False)
def index_error_is_caught(a):
    try:
        return a[a.shape[0] + 2]
    except IndexError as error:
        return a, str(error)


@program(x, whole=False)
def assertion(a):
    assert a.shape[0] == 3, f"got {a.shape[0]} rows"
    return a * 2


@program(x, {"kind": "scale", "by": 3}, again=(x, {"kind": "shift", "by": 3, "also": 1}))
def match_mappings(a, step):
    match step:
        case {"kind": "scale", "by": int(k)}:
            return a * k
        case {"kind": "shift", "by": k, **rest} if rest:
            return a + k, rest
        case _:
            return a


@program(x, (1, [2, 3]), again=(x, "text"))
def match_sequences(a, item):
    match item:
        case str() | bytes():
            return a, "text"
        case (int(n), [first, *others]) if others:
            return a * n + first, others
        case []:
            return "empty"


@program(x, None, again=(x, -1))
def match_values(a, n):
    match n:
        case None:
            return a
        case -1 | 0:
            return -a
        case int() as number if number > 0:
            return a + number


@program(x)
def match_on_shape(a):
    match a.shape:
        case (3, columns):
            return a * columns
        case (rows, _):
            return a - rows


@program(x)
def chained_comparison_and_assignment(a):
    p = q = a.shape[0]
    (r, s), t = (p, q), [a]
    p, q = q + 1, p
    return a * p + q, 1 < p <= 4 != q, r, s, t


@program(x)
def starred_assignment(a):
    first, *middle, last = [a, 1, 2, a + 1]
    (head, *_), *tail = [(1, 2, 3), 4]
    return first + last, middle, head, tail


@program(x)
def augmented_assignment_evaluates_once(a):
    seen = []

    def at():
        seen.append("at")
        return 0

    table = [1, a]
    table[at()] += 5
    table[1] *= 2
    return table, seen


@program(x)
def conditional_imports(a):
    import math as m

    from torch.nn import functional as f

    return f.relu(a) * m.floor(2.7)


@program(x)
def custom_context_manager(a):
    @contextlib.contextmanager
    def logged(name):
        trail.append(f"in {name}")
        try:
            yield name.upper()
        except ValueError as error:
            trail.append(str(error))
        finally:
            trail.append(f"out {name}")

    trail = []
    with logged("p") as p, logged("q"):
        a = a * len(p)
        raise ValueError("swallowed")
    return a, trail


class Suspend:
    def __init__(self, trail, swallow):
        self.trail, self.swallow = trail, swallow

    def __enter__(self):
        self.trail.append("enter")
        return self.trail

    def __exit__(self, kind, value, traceback):
        self.trail.append((kind and kind.__name__, str(value)))
        return self.swallow


@program(x, True, again=(x, False))
def context_manager_and_exception(a, swallow):
    trail = []
    try:
        with Suspend(trail, swallow):
            a = a + 1
            raise KeyError("inside")
        a = a * 2
    except KeyError:
        a = -a
    return a, trail


@program(x)
def return_from_with_in_loop(a):
    trail = []

    def f():
        for n in range(3):
            with Suspend(trail, False):
                if n == 1:
                    return a * n

    return f(), trail


@program(x, whole=False)
def exit_stack(a):
    trail = []
    with contextlib.ExitStack() as stack:
        for n in range(2):
            stack.enter_context(Suspend(trail, False))
        stack.callback(trail.append, "callback")
        a = a + len(trail)
    return a, trail


@program(x)
def suppress(a):
    with contextlib.suppress(KeyError, IndexError):
        a = a + 1
        {}["k"]
        a = a * 100
    return a


TRACE: list[str] = []


@program(x, torch.tensor([0, 1]), again=(x, torch.tensor([0, 9])), whole=False)
def data_raises_in_a_try_block(a, index):
    TRACE.append("begun")
    noise = torch.rand(2)
    try:
        with torch.no_grad():
            chosen = a[index]
    except IndexError as error:
        TRACE.append(f"{error}")
        return noise, a - 1, torch.is_grad_enabled()
    return noise, chosen


@program(x, torch.tensor([0, 1]), again=(x, torch.tensor([0, 9])), whole=False)
def data_raises_out_of_modes(a, index):
    TRACE.append("begun")
    print("break")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        print("in a block")
        chosen = a[index] @ a.T
    TRACE.append("never, if the index is too large")
    return chosen


@program(x, whole=False)
def text_of_a_native_exception(a):
    try:
        raise ValueError(a.sum().item())
    except ValueError as error:
        return a * 2, str(error)


@program(x)
def match_kinds(a):
    r = []
    for o in (1, "s", (1, 2), Refused(3), None):
        match o:
            case int():
                r.append("int")
            case str():
                r.append("str")
            case (p, q):
                r.append(p + q)
            case Refused(code=3):
                r.append("refused")
            case _:
                r.append("none")
    return r, a
