"""The table of container types by operations: each cell is a small program, run by Python and compiled.

    KINDS       name -> how to make a container
    OPERATIONS  statements about `{c}`, which leave their answer in `r`
    PLACES      where the program finds the container: an argument, a global, an attribute, made inside ...

A cell shows what its caller could notice: the answer or the kind of exception, and the container afterwards.
"""

from __future__ import annotations

import collections
import copy
import functools
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

import minicompile as mc

ONE = torch.ones(2)


class Items(list[Any]):
    pass


class Counted(list[Any]):
    """A list with a method of its own, and an attribute."""

    def __init__(self, items: Any = ()) -> None:
        super().__init__(items)
        self.calls = 0

    def append(self, item: Any) -> None:
        self.calls += 1
        super().append(item)

    def __iadd__(self, other: Any) -> Any:
        self.calls += 1
        return super().__iadd__(other)


class LiarList(list[Any]):
    """Python code decides about length, items and iteration."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter([7])

    def __getitem__(self, index: Any) -> Any:
        return 8


class Pair(tuple[Any, ...]):
    pass


class LiarTuple(tuple[Any, ...]):
    def __iter__(self) -> Any:
        return iter([7])


Point = collections.namedtuple("Point", "a b")


class Table(dict[Any, Any]):
    pass


class Scaled(dict[Any, Any]):
    """A dict whose writes do something else than the built-in ones."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value * 2)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        super().__setitem__("deleted", key)


class Slotted(dict[Any, Any]):
    __slots__ = ("a",)


class Missing(dict[Any, Any]):
    def __missing__(self, key: Any) -> Any:
        return f"no {key}"


class LiarDict(dict[Any, Any]):
    def __getitem__(self, key: Any) -> Any:
        return 42

    def __iter__(self) -> Any:
        return iter(["z"])

    def keys(self) -> Any:
        return ["q"]


class Named(dict[Any, Any]):
    """A dict that says what it is, and whose items are attributes as well."""

    def __repr__(self) -> str:
        return f"Named of {len(self)}"

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Ordered(collections.OrderedDict[Any, Any]):
    pass


class Recent(collections.OrderedDict[Any, Any]):
    """Keeps the two latest."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > 2:
            del self[next(iter(self))]


class Lists(collections.defaultdict[Any, Any]):
    pass


class Tally(collections.Counter[Any]):
    pass


class Tags(set[Any]):
    pass


class LoudSet(set[Any]):
    """A set with methods of its own."""

    calls = 0

    def add(self, item: Any) -> None:
        self.calls += 1
        super().add(item)

    def __ior__(self, other: Any) -> Any:
        self.calls += 1
        return super().__ior__(other)


class LiarSet(set[Any]):
    def __iter__(self) -> Any:
        return iter([99])

    def __contains__(self, item: Any) -> bool:
        return item == 98


class FrozenTags(frozenset[Any]):
    pass


class Queue(collections.deque[Any]):
    pass


ITEMS = 3, 1, 2
PAIRS = ("a", 1), ("b", 2)


def attributed() -> Any:
    made = Table(PAIRS)
    made.extra = 5  # type: ignore[attr-defined]
    return made


KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: [*ITEMS],
    "list of tensors": lambda: [ONE * 2, ONE * 3],
    "nested list": lambda: [[1], (2, [3])],
    "Items": lambda: Items(ITEMS),
    "Counted": lambda: Counted(ITEMS),
    "LiarList": lambda: LiarList(ITEMS),
    "tuple": lambda: (*ITEMS,),
    "tuple of tensors": lambda: (ONE * 2, ONE * 3),
    "Pair": lambda: Pair(ITEMS),
    "LiarTuple": lambda: LiarTuple(ITEMS),
    "Point": lambda: Point(1, 2),
    "dict": lambda: dict(PAIRS),
    "dict of tensors": lambda: {"a": ONE * 2, "b": ONE * 3},
    "dict of lists": lambda: {"a": [1], "b": [2]},
    "Table": lambda: Table(PAIRS),
    "Table with an attribute": attributed,
    "Scaled": lambda: Scaled(PAIRS),
    "Slotted": lambda: Slotted(PAIRS),
    "Missing": lambda: Missing(PAIRS),
    "LiarDict": lambda: LiarDict(PAIRS),
    "Named": lambda: Named(PAIRS),
    "OrderedDict": lambda: collections.OrderedDict(PAIRS),
    "moved OrderedDict": lambda: moved(collections.OrderedDict(PAIRS)),
    "Ordered": lambda: Ordered(PAIRS),
    "Recent": lambda: Recent(PAIRS),
    "defaultdict": lambda: collections.defaultdict(list, PAIRS),
    "Lists": lambda: Lists(int, PAIRS),
    "Counter": lambda: collections.Counter("abb"),
    "Tally": lambda: Tally("abb"),
    "set": lambda: {*ITEMS},
    "Tags": lambda: Tags(ITEMS),
    "LoudSet": lambda: LoudSet(ITEMS),
    "LiarSet": lambda: LiarSet(ITEMS),
    "frozenset": lambda: frozenset(ITEMS),
    "FrozenTags": lambda: FrozenTags(ITEMS),
    "deque": lambda: collections.deque(ITEMS),
    "short deque": lambda: collections.deque(ITEMS, 3),
    "Queue": lambda: Queue(ITEMS),
    "bytearray": lambda: bytearray(ITEMS),
    "empty list": list,
    "empty dict": dict,
    "empty set": set,
}


def moved(ordered: Any) -> Any:
    ordered.move_to_end("a")
    return ordered


OPERATIONS = """
# construct
r = list({c})
r = tuple({c})
r = set({c})
r = frozenset({c})
r = dict({c})
r = collections.OrderedDict({c})
r = collections.deque({c})
r = collections.Counter({c})
r = [*{c}]
r = {{*{c}}}
r = {{**{c}}}
r = type({c})({c})
# read
r = len({c})
r = bool({c})
r = {c}[0]
r = {c}[-1]
r = {c}[1:]
r = {c}["a"]
r = {c}["zz"]
r = {c}.get("a")
r = {c}.get("zz", 9)
r = 1 in {c}
r = "a" in {c}
r = "a" not in {c}
r = {c}.index(1)
r = {c}.count(1)
r = min({c})
r = max({c})
r = sum({c})
r = any({c}), all({c})
r = operator.itemgetter("a")({c})
r = {c}.__getitem__(0)
r = {c}.__contains__("a"), 5
r = {c}.__len__()
a, b = {c}; r = a, b
a, *b = {c}; r = a, b
r = got(*{c})
r = got(**{c})
# write
{c}[0] = 5
{c}[0] = y
{c}[1:] = [7, y]
{c}["a"] = 5
{c}["n"] = y
{c}["n"] = {c}["a"] = 4
del {c}[0]
del {c}["a"]
del {c}["a"]; {c}["a"] = 6
del {c}["a"]; {c}["n"] = 6; {c}["a"] = y; r = list({c})
{c}.append(y)
{c}.append(4); r = len({c})
{c}.appendleft(4)
{c}.insert(1, 4)
{c}.extend([4, y])
{c}.extend(other)
{c}.extendleft([4, 5])
r = {c}.pop()
r = {c}.pop(0)
r = {c}.pop("a")
r = {c}.pop("zz", 3)
r = {c}.popleft()
r = {c}.popitem()
r = {c}.popitem(last=False), list({c})
{c}.move_to_end("a"); r = list({c})
{c}.move_to_end("b", last=False); r = list({c}), next(iter({c}))
{c}.remove(1)
{c}.discard(1)
{c}.add(4)
{c}.add(1); r = sorted({c})
{c}.clear()
{c}.clear(); {c}["b"] = 1; r = list({c})
{c}.reverse()
{c}.sort()
{c}.rotate(1)
{c}.update({{"n": y, "b": 5}})
{c}.update([("n", y)])
{c}.update(n=4)
{c}.update(other)
{c}.update([4, 5])
{c}.difference_update(other)
{c}.intersection_update([1, 2, 9])
{c}.symmetric_difference_update({{1, 9}})
{c}.subtract(["a"])
r = {c}.setdefault("a", 8), {c}.setdefault("n", 9)
{c}.__setitem__("n", 4)
{c}.__delitem__("a")
{c}.__setitem__(0, y)
type({c}).__mro__[1].__setitem__({c}, "n", 4)
{c}.extra = 3; r = {c}.extra
{c}.a = 3; r = {c}.a, len({c})
# in place
{c} += other
{c} += [y]
{c} += other; {c} += other; r = len({c})
{c} *= 2
{c} *= len(other)
{c} -= other
{c} |= other
{c} |= other; r = len({c})
{c} |= [("n", y)]
{c} &= other
{c} ^= other
{c} @= other
{c} %= 2
{c} //= other
{c} >>= 1
same = {c}; same += other; r = same is {c}
same = {c}; same |= other; r = same is {c}
r = operator.ior({c}, other)
r = operator.iadd({c}, other)
r = operator.imul({c}, 2)
r = operator.isub({c}, other)
r = {c}.__ior__(other)
r = {c}.__iadd__(other)
r = {c}.__imul__(2)
r = {c}.__isub__(other)
r = {c}.__iand__(other)
r = {c}.__ixor__(other)
{c} |= other; broken(); r = len({c}), sorted({c}, key=str)
{c} += other; broken(); r = len({c})
broken(); {c} -= other; r = len({c})
# iterate
r = [i for i in {c}]
r = next(iter({c}))
r = list(reversed({c}))
r = list(enumerate({c}))
r = list(zip({c}, {c}))
r = list(map(str, {c}))
r = [*filter(None, {c})]
r = sorted({c}, key=str)
r = list({c}.keys()), list({c}.values())
r = [pair for pair in {c}.items()]
r = list(reversed({c}.items()))
r = list({c}.elements()), {c}.total()
for i in {c}: r = i; break
# compare
r = {c} == {c}, {c} != {c}
r = {c} == other, other == {c}
r = {c} == copy.copy({c})
r = {c} < other
r = {c} <= {c}
r = {c} is {c}, {c} is other
r = {c}.issubset({{1, 2, 3, 4}})
r = {c}.isdisjoint(other)
r = {c} == [3, 1, 2], {c} == {{3, 1, 2}}
r = {c} == dict(b=2, a=1), {c} == collections.OrderedDict(b=2, a=1)
# text
r = str({c})
r = repr({c})
r = f"{{{c}}}"
r = f"{{{c}!r:>30}}"
r = "%s" % ({c},)
r = "{{}}".format({c})
r = str([{c}])
r = str({{"k": {c}}})
r = ",".join(map(str, {c}))
# combine and copy
r = {c} + {c}
r = {c} + [y]
r = {c} * 2
r = {c} | {c}
r = {c} | other
r = other | {c}
r = {c} & {{1, 2}}
r = {c} - {{1}}
r = {{1, 7}} - {c}
r = {c} ^ {{1}}
r = {c}.copy()
r = copy.copy({c})
r = {c}.union([9])
r = {c}.intersection([1])
r = {c}.most_common()
r = collections.ChainMap({c})["a"]
r = {c}.keys() & {{"a"}}
r = [{c}, {c}]
# as an argument, and about its class
r = len({c}), change({c}), len({c})
r = change({c}, 2), list({c})
r = torch.stack(list({c}))
r = type({c}).__name__, isinstance({c}, dict), isinstance({c}, (list, set))
r = hasattr({c}, "append"), hasattr({c}, "a")
r = getattr({c}, "extra", None), getattr({c}, "calls", None)
r = {c}.extra
r = {c}.a
match {c}:
    case [first, *_]: r = first
    case {{"a": first, **rest}}: r = first, rest
"""

PLACES = {
    "argument": "c",
    "global": "G",
    "attribute": "box.c",
    "item": "table['c']",
    "made inside": "c",
    "closure": "enclosed",
}


class Box:
    def __init__(self, c: Any) -> None:
        self.c = c


def got(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def change(container: Any, more: int = 1) -> Any:
    """A function that is handed the container, and changes it."""
    for name in ("append", "add"):
        if hasattr(container, name):
            getattr(container, name)(more)
            return name
    if isinstance(container, dict):
        container["changed"] = more
    return None


def operations() -> list[str]:
    lines: list[str] = []
    for line in OPERATIONS.strip().splitlines():
        if line.startswith(" "):
            lines[-1] += "\n" + line
        elif not line.startswith("#"):
            lines.append(line)
    return lines


BASES = dict, list, tuple, set, frozenset, collections.deque, bytearray


def other_of(kind: str) -> Any:
    """The second operand that fits a kind."""
    container = KINDS[kind]()
    if isinstance(container, collections.Counter):
        return collections.Counter("bcc")
    if isinstance(container, dict):
        return {"n": ONE * 5, "b": 7}
    if isinstance(container, bytearray):
        return b"xy"
    if isinstance(container, set | frozenset):
        return {1, 9}
    return (ONE * 5, 6) if isinstance(container, tuple) else [ONE * 5, 6]


def broken_by(wrap: Any) -> Any:
    """A call that ends a graph, if the program is compiled."""
    return (lambda: None) if wrap is python else mc.disable(lambda: None)


class Cell:
    """One program, which can be run again and again on fresh containers."""

    def __init__(self, kind: str, place: str, operation: str) -> None:
        self.kind, self.place, self.operation = kind, place, operation

    def __str__(self) -> str:
        return f"{self.kind} as {self.place}: {self.operation}"

    @property
    def text(self) -> str:
        """The function, made by another one that gives it its closure."""
        body = self.operation.replace("{c}", "\0").replace("{{", "{").replace("}}", "}")
        body = body.replace("\0", PLACES[self.place])
        head = {"global": "global G", "closure": "nonlocal enclosed", "made inside": "c = make()"}
        lines = "\n        ".join((head.get(self.place, "pass"), *body.splitlines()))
        return f"""
def enclosing(enclosed):
    def program(x, c, box, table, other):
        y, r = x + 1, None
        {lines}
        return y * 2, r, {PLACES[self.place]}
    return program
"""

    def shown(self, wrap: Callable[[Any], Any], calls: int = 2) -> Iterator[Any]:
        """What each call shows."""
        make = KINDS[self.kind]
        scope = {**globals(), "broken": broken_by(wrap), "make": make}
        exec(code_of(self.text), scope)
        enclosed = scope["enclosing"](None)
        function = wrap(enclosed)
        cells = dict(zip(enclosed.__code__.co_freevars, enclosed.__closure__ or (), strict=True))
        for call in range(calls):
            container, other = make(), other_of(self.kind)
            scope["G"] = container
            if "enclosed" in cells:
                cells["enclosed"].cell_contents = container
            box, table = Box(container), {"c": container}
            try:
                given = function(torch.arange(2.0) + call, container, box, table, other)
            except Exception as error:
                given = type(error).__name__
            everything = given, container, box.c, table["c"], scope["G"], other
            yield show(everything, {})


@functools.cache
def code_of(text: str) -> Any:
    return compile(text, "<cell>", "exec")


def show(value: Any, seen: dict[int, int]) -> Any:
    """A value as nested tuples, equal for values that no caller could tell apart."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return kind, value.tolist()
    if not isinstance(value, (*BASES, Box)):
        plain = value is None or isinstance(value, bool | int | float | str | bytes)
        return kind, repr(value) if plain else ""
    if value and not isinstance(value, tuple | frozenset):
        if id(value) in seen:
            return "again", seen[id(value)]
        seen[id(value)] = len(seen)
    attributes = [(key, show(item, seen)) for key, item in getattr(value, "__dict__", {}).items()]
    if isinstance(value, Slotted):
        attributes.append(("a", show(getattr(value, "a", None), seen)))
    return kind, attributes, list(contents(value, seen))


def contents(value: Any, seen: dict[int, int]) -> Iterator[Any]:
    """The items, whatever the class makes of iteration."""
    if isinstance(value, dict):
        ordered = isinstance(value, collections.OrderedDict)
        items: Any = collections.OrderedDict.items if ordered else dict.items
        yield from ((show(key, seen), show(item, seen)) for key, item in items(value))
        yield getattr(value, "default_factory", None)
    elif isinstance(value, set | frozenset):
        base = set if isinstance(value, set) else frozenset
        yield from (show(item, seen) for item in sorted(base.__iter__(value), key=repr))
    elif not isinstance(value, Box):
        base = next(base for base in BASES if isinstance(value, base))
        yield from (show(item, seen) for item in base.__iter__(value))
        yield getattr(value, "maxlen", None)


def cells(kind: str) -> Iterator[Cell]:
    """A kind's cells: each operation, in one of the places."""
    turn, places = list(KINDS).index(kind), list(PLACES)
    for number, operation in enumerate(operations()):
        yield Cell(kind, places[(turn + number) % len(places)], operation)


def python(function: Any) -> Any:
    """How the program runs by Python alone."""
    return function


def chosen(kind: str) -> Iterator[tuple[Cell, list[Any]]]:
    """Cells and what Python shows: every other one, and few of those that raise. All, if asked for."""
    whole = "MINICOMPILE_WHOLE_TABLE" in os.environ
    for number, cell in enumerate(cells(kind)):
        shown = list(cell.shown(python))
        raises = shown[0][2][0][0] == "str"
        if whole or (number + len(kind)) % (10 if raises else 2) == 0:
            yield cell, shown


__all__ = ["chosen", "copy", "operator"]
