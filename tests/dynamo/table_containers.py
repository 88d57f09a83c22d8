"""Small programs: containers and attributes that are changed."""

# ruff: noqa
# mypy: ignore-errors
import array
import bisect
import collections
import contextvars
import copy
import functools
import heapq
import operator
import types

import torch

from tests.dynamo.program_table import Table

program = Table()
x = torch.randn(3, 4)
y = torch.randn(3, 4)


class Scale:
    def __init__(self, k=1):
        self.k = k


# -- lists


@program(x, [1, 2, 3], whole=False)
def list_mutation(a, items):
    items.append(a.shape[0])
    items.insert(0, "first")
    items.extend([a, 5])
    items[1:3] = ["cut"]
    del items[-1]
    items.remove("cut")
    return a * len(items)


@program(x, [3, 1, 2])
def list_sorted_in_place(a, items):
    items.sort(reverse=True)
    items.reverse()
    popped = items.pop()
    items.append(popped)
    return a + popped, items.index(2), items.count(1)


@program(x, [1, 2])
def list_repeated_in_place(a, items):
    same = items
    try:
        items *= 2
    except TypeError as error:
        return str(error)
    return a * len(same), items is same


@program([x, y])
def tensors_in_a_list_are_replaced(items):
    for n, t in enumerate(items):
        items[n] = t * 2
    return sum(items)


@program([x, y])
def tensors_in_a_list_are_changed(items):
    for t in items:
        t.add_(1)
    items[0][0] = 0
    return items[0].sum()


shared = [1]


@program(x, [shared, shared], change="shared.append(2)")
def one_list_twice(a, pair):
    pair[0].append(9)
    return a * len(pair[1]), pair[0] is pair[1]


@program(x, [[1], [2]])
def nested_lists(a, rows):
    rows[0].append(rows[1])
    rows[1].append(a)
    return a + len(rows[0]), [*map(len, rows)]


@program(x, [1, 2, 3, 4, 5])
def slices_of_lists(a, items):
    items[::2] = [0, 0, 0]
    tail = items[-2:]
    del items[1:3]
    items[1:1] = [7, 8]
    return a, tail, items[::-1], items == [0, 4, 0]


@program(x, [0, 1])
def list_grows_while_iterated(a, items):
    for n in items:
        if len(items) < 5:
            items.append(n + 2)
    return a * len(items), items


@program(x, [1, 2, 3])
def list_errors(a, items):
    seen = []
    for f in (
        lambda: items[9],
        lambda: items.remove(7),
        lambda: items.index("q"),
        lambda: [].pop(),
    ):
        try:
            f()
        except (IndexError, ValueError) as error:
            seen.append(f"{type(error).__name__} {error}")
    return a, seen


@program(x, [1, 2, 3], whole=False)
def changed_before_an_exception(a, items):
    items.append(4)
    a.mul_(2)
    raise ValueError("after the changes")


# -- dicts


@program(x, {"p": 1, "q": 2})
def dict_mutation(a, table):
    table["r"] = a
    table.update(p=5, s=6)
    table.setdefault("t", []).append(1)
    del table["r"]
    return a * table.pop("s"), table.pop("nothing", None), list(table)


@program(x, {"p": 1, "q": 2}, whole=False)
def dict_views_and_order(a, table):
    keys = table.keys()
    table["p"] = table.pop("p")
    return (
        a,
        list(keys),
        table.items() >= {("q", 2)},
        keys & {"q", "w"},
        dict(reversed(table.items())),
    )


@program(x, {"p": 1}, whole=False)
def dict_union_and_popitem(a, table):
    table |= {"q": a}
    last = table.popitem()
    return table | {"w": 2}, last[0], last[1] * 2


@program(x, {(1, 2): "t", None: "n", True: "b", 1.5: "f"})
def dict_with_many_kinds_of_keys(a, table):
    return a, table[1, 2], table[None], table[1], table.get(1.5), table.get("no", a)


@program(x, {"p": 1})
def dict_changes_size_while_iterated(a, table):
    try:
        for key in table:
            table[key + "!"] = 1
    except RuntimeError as error:
        return a, str(error), table


@program(x, {"p": x})
def dict_missing_key(a, table):
    try:
        return table["none"]
    except KeyError as error:
        return a, error.args[0], table.get("p") is table["p"]


@program({"a": {"b": [x, {"c": y}]}})
def deep_nesting(tree):
    tree["a"]["b"][1]["c"] += 1
    tree["a"]["new"] = tree["a"]["b"][0] * 2
    return tree["a"]["b"][1]["c"].sum()


@program(x, whole=False)
def default_dict_and_counter(a):
    groups = collections.defaultdict(list)
    for n, word in enumerate(["p", "q", "p"]):
        groups[word].append(a * n)
    count = collections.Counter("hello")
    count.update("lol")
    return groups, count.most_common(2), count["z"]


@program(x, collections.OrderedDict(p=1, q=2), whole=False)
def ordered_dict(a, table):
    table.move_to_end("p")
    table["r"] = a
    return list(table), table.popitem(last=False)


@program(x, collections.defaultdict(int, p=1))
def default_dict_argument(a, table):
    table["p"] += 1
    table["new"] += a.shape[0]
    return a * table["p"], len(table)


@program(x)
def chain_map_and_mapping_proxy(a):
    chain = collections.ChainMap({"p": 1}, {"p": 2, "q": 3})
    proxy = types.MappingProxyType({"k": a})
    return a * chain["p"] + chain["q"], proxy["k"], len(chain)


class Default(dict):
    def __missing__(self, key):
        return key * 2


@program(x, Default(p=1))
def dict_subclass(a, table):
    table["own"] = 4
    return a * table["own"], table["zz"], table["p"], type(table).__name__


class Stack(list):
    def push(self, item):
        self.append(item)
        return self


@program(x, Stack([1]))
def list_subclass(a, stack):
    stack.push(2).push(a)
    stack.note = "seen"
    return a * len(stack), stack[-1], isinstance(stack, list)


# -- sets, deques and others


@program(x, {1, 2}, whole=False)
def set_mutation(a, seen):
    seen.add(3)
    seen |= {4}
    seen.discard(1)
    seen.symmetric_difference_update({2, 9})
    return a * len(seen), seen - {9}, {3} <= seen, seen.isdisjoint({7})


@program(x, frozenset({1, 2}), again=(x, frozenset({2, 3})))
def frozen_set(a, given):
    return a * sum(given), 1 in given, given | {5}


@program(x, collections.deque([1, 2], maxlen=3), whole=False)
def deque_mutation(a, queue):
    queue.append(3)
    queue.appendleft(0)
    queue.rotate(1)
    return a * queue[0], list(queue), queue.popleft(), queue.maxlen


@program(x)
def tensors_as_keys(a):
    table = {a: "first", a + 1: "second"}
    return table[a], len(table), a in table


@program(x, whole=False)
def heaps_and_bisection(a):
    heap = [5, 1, 4]
    heapq.heapify(heap)
    heapq.heappush(heap, 0)
    return a * heapq.heappop(heap), heap, bisect.bisect_left([1, 3, 5], 3)


@program(x, whole=False)
def bytes_and_arrays(a):
    return a, b"abc"[1], bytearray(b"xy") + b"z", array.array("i", [1, 2])[1], bytes([65]).decode()


@program(x, (1, (2, [3])), whole=False)
def tuples(a, nested):
    first, (second, items) = nested
    items.append(first)
    return a * second, nested + (4,), nested * 2, nested.index(first), (1, 2) < (1, 3)


# -- attributes


class Holder:
    def __init__(self):
        self.items, self.count, self.state = [], 0, {}


holder = Holder()


@program(x, change="holder.count = 10")
def attribute_counters(a):
    holder.count += 1
    holder.items.append(holder.count)
    holder.state["last"] = a * holder.count
    return holder.state["last"] + 1


@program(x, change="holder.items = holder.state")
def attribute_rebound_to_another_type(a):
    holder.items = list(holder.items) + [1]
    return a * len(holder.items)


@program(x, change="holder.late = 3")
def attribute_that_appears(a):
    if hasattr(holder, "late"):
        return a * holder.late
    return a - 1


@program(x)
def attribute_made_then_deleted(a):
    holder.temporary = a * 2
    result = holder.temporary + 1
    del holder.temporary
    return result, hasattr(holder, "temporary")


@program(x, whole=False)
def attribute_changed_in_a_loop_with_exception(a):
    for n in range(3):
        holder.count += n
        if n == 2:
            raise RuntimeError(f"at {holder.count}")
    return a


@program(x, Holder())
def cyclic_objects(a, h):
    h.me = h
    h.items.append(h)
    return a * h.me.me.count, h.items[0] is h


@program(x, whole=False)
def cached_property_and_partial_method(a):
    class Cached:
        n = 0

        @functools.cached_property
        def value(self):
            Cached.n += 1
            return a * 2

        def power(self, t, n):
            return t**n

        cube = functools.partialmethod(power, n=3)

    made = Cached()
    return made.value + made.value, Cached.n, made.cube(a)


@program(x, whole=False)
def tensor_attributes(a):
    a.note = "kept"
    a.twice = a * 2
    return a.note, a.twice + 1


level = contextvars.ContextVar("level", default=2)


@program(x, change="level.set(5)")
def context_variables(a):
    return a * level.get()


@program(x, whole=False)
def object_equality_and_identity(a):
    p, q = Scale(1), Scale(1)
    return a, p == q, p is p, p in [q, p], [p, q].index(q), {p: 1}.get(q)


@program(x, whole=False)
def deep_copy_of_objects(a):
    made = copy.deepcopy(holder)
    made.items.append(a * 2)
    shallow = copy.copy(holder)
    shallow.count = 77
    return made.items, holder.items, shallow.items is holder.items, holder.count


@program(x)
def operator_functions_on_containers(a):
    items = [1, 2]
    operator.setitem(items, 0, a)
    items = operator.iadd(items, [3])
    return items, operator.contains(items[1:], 3), operator.index(5), operator.concat([1], [2])


class Iterating:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        self.at += 1
        if self.at > self.n:
            raise StopIteration
        return self.at

    def __reversed__(self):
        return iter([3, 2, 1])


@program(x, Iterating(3))
def own_iterator(a, numbers):
    return [a * n for n in numbers], list(reversed(numbers)), sum(numbers), numbers.at


class OldStyle:
    def __getitem__(self, n):
        if n >= 3:
            raise IndexError
        return n * 10


@program(x, whole=False)
def iteration_through_getitem(a):
    return a, list(OldStyle()), 20 in OldStyle(), [*zip(OldStyle(), "ab")]


class Sized:
    def __len__(self):
        return 0


@program(x)
def truth_of_objects(a):
    return a, bool(Sized()), bool(Scale()), not [], not {}, bool("0"), [] or "else", 0 and 1


@program(x)
def setoperators_of_tensors(a):
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
