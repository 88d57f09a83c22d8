"""Random small programs over tensors: a tree of statements that can be printed, and shrunk.

    Statement := clauses; clause := head, body
    one clause without a body is a plain line; `if`, `for`, `try`, `with`, `def` have clauses with bodies

Most names that a program reads are bound, and most shapes fit; the rest raise, in eager as well. Everything
follows from the seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.fuzz.forms import (
    ATTRIBUTES,
    CONTAINERS,
    FORMS,
    HALF,
    LOOKUPS,
    NAMES,
    ODD,
    READS,
    STEPS,
    WRITES,
    blanks,
)
from tests.fuzz.prelude import PRELUDE

PARAMETERS = ("a", "b", "n", "flag", "items", "table", "box", "net")


KINDS = ("Exception", "(ValueError, KeyError)", "ValueError", "ArithmeticError", "LookupError")


@dataclass
class Statement:
    """One clause is (head, body); a plain line has an empty body and a head without a colon at its end."""

    clauses: list[tuple[str, list[Statement]]]

    def lines(self, indent: str) -> Iterator[str]:
        for head, body in self.clauses:
            yield indent + head
            if head.endswith(":"):
                yield from block(body, indent + "    ")


def block(body: list[Statement], indent: str) -> Iterator[str]:
    if not body:
        yield f"{indent}pass"
    for statement in body:
        yield from statement.lines(indent)


def line(text: str) -> Statement:
    return Statement([(text, [])])


@dataclass
class Program:
    """`wide`: of tensors that fill vectors, with a rest."""

    seed: int
    body: list[Statement] = field(default_factory=list)
    wide: bool = False

    @property
    def function(self) -> str:
        head = f"def program({', '.join(PARAMETERS)}):"
        text = "\n".join([head, "    global COUNT", *block(self.body, "    "), ""])
        return widened(text) if self.wide else text

    def __str__(self) -> str:
        return (widened(PRELUDE) if self.wide else PRELUDE) + "\n" + self.function


def widened(text: str) -> str:
    """4 columns become 68, and a row 3; not where steps are counted."""
    return re.sub(r"(?<![%<] )\b4\b", "68", text).replace("ROWS = 68, 1", "ROWS = 68, 3")


def generate(seed: int, size: int = 7) -> Program:
    """A program of about `size` statements at its top level."""
    wide = random.Random(f"wide {seed}").random() < 0.25
    return Program(seed, Maker(random.Random(seed)).program(size), wide)


class Maker:
    """Chooses statements; knows which names are bound to what."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.tensors, self.ints, self.lists = ["a", "b"], ["n"], ["items"]
        self.callables: list[str] = []
        self.count = self.depth = self.loops = 0
        self.in_function = 0
        self.half = self.chance(0.1)

    # -- choices

    def name(self, start: str) -> str:
        self.count += 1
        return f"{start}{self.count}"

    def pick(self, *among: str) -> str:
        return self.choose.choice(among)

    def chance(self, share: float) -> bool:
        return self.choose.random() < share

    def t(self) -> str:
        return self.choose.choice(self.tensors[-5:] if self.chance(0.6) else self.tensors)

    def i(self) -> str:
        return self.pick(
            *self.ints, "1", "2", "3", "len(items)", "box.steps", "COUNT", f"{self.t()}.dim()"
        )

    def tensor(self, depth: int = 0) -> str:
        """An expression that gives a tensor."""
        t, u, i = self.t(), self.t(), self.i()
        shares, tables = zip(*FORMS.values())
        form = self.choose.choice(self.choose.choices(tables, shares)[0])
        if self.half and self.chance(0.15):
            form = self.choose.choice(HALF)
        found = form.format(**blanks(t, u, i, self.pick))
        if self.callables and self.chance(0.1):
            found = f"{self.pick(*self.callables)}({t})"
        if depth < 2 and self.chance(0.25):
            found = f"({found}) {self.pick('+', '-', '*')} ({self.tensor(depth + 1)})"
        return found

    def view(self) -> str:
        t, i = self.t(), self.i()
        return self.pick(
            f"{t}[0]",
            f"{t}[{i} % 2 :]",
            f"{t}[..., 1:3]",
            f"{t}.view(-1)",
            f"{t}.unsqueeze(0)",
            f"{t}[::2]",
            f"{t}.t()",
            f"{t}.expand(2, *{t}.shape)[0]",
            f"{t}.chunk(2)[0]",
            f"next(iter({t}))",
            f"{t}.detach()",
            f"{t}",
        )

    def condition(self) -> str:
        t, i = self.t(), self.i()
        return self.pick(
            "flag",
            "not flag",
            f"{i} > 2",
            f"{i} % 2 == 0 and flag",
            f"{t}.shape[0] > 2",
            f"{t}.dim() == 2 or flag",
            f"{t}.requires_grad",
            "'y' in table",
            "box",
            f"isinstance({t}, torch.Tensor)",
            f"{t} is {self.t()}",
            f"{t}.dtype is torch.float32",
            f"({t} > 0.13).any()",
            f"{t}.sum() > 0.37",
            f"peek({t})",
            f"(m := {i}) > 1 and m < 5",
            "torch.is_grad_enabled()",
            "items",
        )

    # -- statements

    def program(self, size: int) -> list[Statement]:
        body = self.body(size)
        parts = [self.t(), self.t(), self.i()]
        if self.chance(0.5):
            parts.append(
                self.pick("items", "table", "box.value", "SEEN[-2:]", "box", *self.tensors)
            )
        return [*body, line(f"return {self.pick('', 'tuple', 'list')}(({', '.join(parts)}))")]

    def body(self, size: int) -> list[Statement]:
        return [self.statement() for _ in range(max(1, size))]

    def inner(self, most: int = 3) -> list[Statement]:
        """A block's body: what it binds is usually forgotten after it."""
        kept = [list(names) for names in (self.tensors, self.ints, self.lists, self.callables)]
        self.depth += 1
        body = self.body(self.choose.randint(1, most))
        self.depth -= 1
        if self.chance(0.93):
            self.tensors, self.ints, self.lists, self.callables = kept
        return body

    def statement(self) -> Statement:
        plain: list[tuple[int, Callable[[], Statement]]] = [
            (10, self.assign),
            (5, self.write),
            (4, self.alias),
            (4, self.python),
            (3, self.container),
            (3, self.breaks),
            (2, self.state),
            (2, self.held),
        ]
        nested: list[tuple[int, Callable[[], Statement]]] = [
            (4, self.if_),
            (4, self.for_),
            (1, self.while_),
            (2, self.try_),
            (3, self.with_),
            (2, self.def_),
            (1, self.match_),
        ]
        rules = plain + nested if self.depth < 2 else plain
        if self.depth and self.chance(0.04):
            return line(f"return {self.t()}, {self.i()}")
        if self.loops and self.chance(0.08):
            return Statement([(f"if {self.condition()}:", [line(self.pick("break", "continue"))])])
        return self.choose.choices([rule for _, rule in rules], [weight for weight, _ in rules])[
            0
        ]()

    def bound(self, names: list[str], start: str, value: str) -> Statement:
        """Bind a name, old or new."""
        name = self.choose.choice(names) if self.chance(0.3) else self.name(start)
        if name not in names:
            names.append(name)
        return line(f"{name} = {value}")

    def assign(self) -> Statement:
        return self.bound(self.tensors, "t", self.tensor())

    def alias(self) -> Statement:
        return self.bound(self.tensors, "v", self.view())

    def write(self) -> Statement:
        t, u, i = self.t(), self.t(), self.i()
        return line(self.pick(*WRITES).format(**blanks(t, u, i, self.pick)))

    def python(self) -> Statement:
        t, i = self.t(), self.i()
        if self.chance(0.5):
            value = self.pick(
                f"{i} + {self.i()}",
                f"{t}.shape[0]",
                f"{t}.numel() % 7",
                f"len(items) - {i}",
                "len(table)",
                f"int(peek({t}))",
                f"({i} * 3) // 2",
                "len(f'{n}-{flag}')",
                "sum(len(v) for v in items if isinstance(v, torch.Tensor) and v.dim())",
            )
            return self.bound(self.ints, "k", value)
        first, rest = self.name("t"), self.name("rest")
        forms = [
            f"{first}, *{rest} = items",
            f"{first}, {rest} = {t}, [{self.t()}]",
            f"{first} = {t}; {rest} = [v + 1 for v in items if isinstance(v, torch.Tensor)]",
            f"{first} = {t}; {rest} = list(map(lambda v: v * {i}, [{t}, {self.t()}]))",
            f"{first} = {t}; {rest} = sorted([{t}, {self.t()}], key=lambda v: v.shape[0])",
            f"{first} = {t}; {rest} = [v for pair in zip(items, table.values()) for v in pair]",
        ]
        self.tensors.append(first)
        self.lists.append(rest)
        return line(self.choose.choice(forms))

    def container(self) -> Statement:
        t, i, items = self.t(), self.i(), self.pick(*self.lists)
        return line(
            self.pick(
                f"{items}.append({t})",
                f"{items}.insert(0, {t})",
                f"{items}.pop()",
                f"{items}[0] = {t}",
                f"{items}[-1] = {items}[0]",
                f"{items}.extend([{t}, {self.t()}])",
                f"{items} {self.pick('+=', '+= items[:2];' + items + ' +=')} [{t}]",
                f"{items} *= 1 + (len({items}) < 9)",
                f"table |= {{'{self.pick('x', 'z')}': {t}}}",
                f"table['{self.pick('x', 'y')}'] {self.pick('+=', '*=', '-=')} {self.pick(i, t)}",
                f"{items} = {items}[1:] + [{t}]" if items != "items" else "del items[1:]",
                f"{items}.reverse()",
                f"table['x'] = {t}",
                f"table['{self.pick('y', 'z')}'] = {self.tensor()}",
                f"table.setdefault('z', {t})",
                "table.pop('y', None)",
                "del table['x']",
                f"table.update(x={t}, w={i})",
                f"table['w'] = {self.pick('0', 'None', 'box', 'flag', 'items[0]')}",
                "table = {key: v for key, v in table.items()}",
            )
        )

    def held(self) -> Statement:
        """Something about a container that the caller holds, or about an attribute of an odd object."""
        place, changes = self.choose.choice(list(CONTAINERS.items()))
        place, i = place.format(i=self.i()), self.i()
        if self.chance(0.3):
            if self.chance(0.2):
                return line(self.pick(*ATTRIBUTES).format(i=i))
            odd, name = self.pick(*ODD), self.pick(*NAMES)
            return self.bound(self.ints, "k", self.pick(*LOOKUPS).format(i=i, odd=odd, name=name))
        if self.chance(0.3):
            return self.bound(self.ints, "k", self.pick(*READS).format(c=place, i=i))
        if self.chance(0.4):
            name = self.name("held")
            return line(f"{name} = {place}; " + self.pick(*changes).format(c=name, i=i))
        return line(self.pick(*changes).format(c=place, i=i))

    def state(self) -> Statement:
        t, i = self.t(), self.i()
        return line(
            self.pick(
                f"COUNT {self.pick('+= 1', '= 1')}",
                f"SEEN.append({i})",
                f"box.value = {t}",
                f"box.steps = {i}",
                f"box.bump({t}, {i})",
                f"box.extra = {t}",
                "del box.extra",
                f"box.extra = {self.pick('0', 'None', 'net', 'box.value')}",
                f"net.calls = {self.pick(i, '0')}",
                "net.train(flag)",
                "net.linear.weight.requires_grad_(flag)",
                f"net.seen = {t}",
                f"Box.limit = {i}",
                f"{t}.requires_grad_(False)" if self.chance(0.2) else "box.steps += 1",
            )
        )

    def breaks(self) -> Statement:
        t, i = self.t(), self.i()
        if self.chance(0.4):
            value = self.pick(
                f"({t} > 0.13).sum().item() % 5",
                f"len({t}.tolist()) % 5",
                f"int({STEPS.format(t=t)}.max()) % 3",
            )
            return self.bound(self.ints, "k", value)
        return line(
            self.pick(
                f"print('at', {i})",
                f"print({t}.shape, flag)",
                f"print({t})",
                f"SEEN.append({t}.detach().numpy().sum())",
                f"{t} = {t} + torch.from_numpy(np.ones(4, dtype=np.float32))",
                f"{t} = {t}[{t}[..., 0] > 0.13]" if self.chance(0.3) else f"print(len(items), {i})",
                f"print(f'{{{i}}} of {{{t}.dim()}}')",
                f"{t} = speak({t}, 'b')",
                f"assert {t}.sum() == {t}.sum(), 'nan'",
            )
        )

    def if_(self) -> Statement:
        clauses = [(f"if {self.condition()}:", self.inner())]
        if self.chance(0.3):
            clauses.append((f"elif {self.condition()}:", self.inner()))
        if self.chance(0.4):
            clauses.append(("else:", self.inner()))
        return Statement(clauses)

    def for_(self) -> Statement:
        i, t = self.name("i"), self.name("t")
        over = self.choose.choice(
            [
                (f"{i} in range({self.i()} % 4)", [i], []),
                (f"{i}, {t} in enumerate([{self.t()}, {self.t()}])", [i], [t]),
                (f"{t} in list(items)", [], [t]),
                (f"{t} in items[:2]", [], [t]),
                (f"{i}, {t} in list(table.items())", [], [t]),
                (f"{t} in steps({self.t()}, 3)", [], [t]),
                (f"{t} in {self.t()}", [], [t]),
                (f"{t}, {i} in zip([{self.t()}, {self.t()}], range(1, 3))", [i], [t]),
                (f"{t} in (v * 2 for v in [{self.t()}, {self.t()}])", [], [t]),
            ]
        )
        self.ints += over[1]
        self.tensors += over[2]
        clauses = [(f"for {over[0]}:", self.loop())]
        if self.chance(0.15):
            clauses.append(("else:", self.inner(1)))
        self.ints = [n for n in self.ints if n not in over[1]]
        self.tensors = [n for n in self.tensors if n not in over[2]]
        return Statement(clauses)

    def loop(self) -> list[Statement]:
        self.loops += 1
        body = self.inner()
        self.loops -= 1
        return body

    def while_(self) -> Statement:
        i = self.name("w")
        loop = Statement([(f"while ({i} := {i} + 1) < 4 and ({self.condition()}):", self.loop())])
        return Statement([("if True:", [line(f"{i} = 0"), loop])])

    def try_(self) -> Statement:
        bad = self.pick(
            "raise ValueError('v')",
            f"{self.t()}.no_such()",
            "table['missing']",
            f"1 // ({self.i()} - {self.i()})",
            f"torch.ones(3) + {self.t()}[..., :2]",
            "items[99]",
            f"assert {self.condition()}",
            "next(iter([]))",
        )
        body = self.inner(2)
        if self.chance(0.7):
            body.insert(self.choose.randint(0, len(body)), line(bad))
        kinds = self.choose.choice(KINDS)
        clauses = [("try:", body)]
        if self.chance(0.8):
            handler = self.inner(2)
            if self.chance(0.15):
                handler.append(line(self.pick("raise", "raise RuntimeError('again') from error")))
            if self.chance(0.4):
                handler.insert(0, line("SEEN.append(type(error).__name__)"))
            clauses.append((f"except {kinds} as error:", handler))
            if self.chance(0.2):
                clauses.append(("else:", self.inner(1)))
        if len(clauses) == 1 or self.chance(0.3):
            clauses.append(("finally:", self.inner(1)))
        return Statement(clauses)

    def with_(self) -> Statement:
        manager = self.pick(
            "torch.no_grad()",
            "torch.enable_grad()",
            "Scope(SEEN)",
            "Scope(SEEN, quiet=True) as depth",
            "noted(SEEN)",
            "torch.set_grad_enabled(flag)",
            "torch.no_grad(), Scope(SEEN)",
            "contextlib.suppress(ValueError)",
            "torch.autocast('cpu', dtype=torch.bfloat16)",
            "torch.inference_mode()",
        )
        body = self.inner()
        if self.chance(0.12):
            body.append(line("raise ValueError('in with')"))
        return Statement([(f"with {manager}:", body)])

    def def_(self) -> Statement:
        name, x = self.name("f"), self.name("x")
        shared = [t for t in self.tensors if t not in ("a", "b") and self.depth == 0]
        outer, self.loops = self.loops, 0
        inside: list[Statement] = []
        if shared and not self.in_function and self.chance(0.5):
            changed = self.choose.choice(shared)
            inside = [line(f"nonlocal {changed}"), line(f"{changed} = {changed} + 1")]
        elif self.tensors:
            inside = [line(f"inside = {self.t()} * 2")] if self.chance(0.5) else []
        lasting = self.tensors
        self.tensors = [x, "a"]  # other names may become local to the function
        self.in_function += 1
        body = [*inside, *self.local_body(), line(f"return {self.tensor()}")]
        self.in_function -= 1
        self.tensors, self.loops = lasting, outer
        heads = (f"def {name}({x}):", f"def {name}({x}, a=a, k=2):")
        self.callables.append(name)
        return Statement([(self.pick(*heads), body)])

    def local_body(self) -> list[Statement]:
        """Statements of a nested function that bind new names only."""
        kept = self.ints, self.lists, self.callables
        self.ints, self.lists, self.callables = ["2"], ["[a]"], []
        made = [self.bound_new() for _ in range(self.choose.randint(0, 2))]
        self.ints, self.lists, self.callables = kept
        return made

    def bound_new(self) -> Statement:
        if self.chance(0.25):
            return line(f"print('inside', {self.t()}.dim())")
        name = self.name("t")
        made = line(f"{name} = {self.tensor()}")
        self.tensors.append(name)
        return made

    def match_(self) -> Statement:
        subject = self.pick("n", "items", "table", "flag")
        cases = {
            "n": ["case 1:", "case 2 | 3:", "case _:"],
            "items": ["case [first]:", "case [first, *_]:", "case _:"],
            "table": ["case {'q': first}:", "case {'x': first}:", "case _:"],
            "flag": ["case True:", "case _:"],
        }
        arms: list[Statement] = [Statement([(head, self.inner(2))]) for head in cases[subject]]
        return Statement([(f"match {subject}:", arms)])
