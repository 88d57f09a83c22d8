"""Small programs: dataclasses, named tuples, enums."""

# ruff: noqa
# mypy: ignore-errors
import collections
import dataclasses
import enum
import typing

import torch

from tests.dynamo.program_table import Table

program = Table()
x = torch.randn(3, 4)
y = torch.randn(3, 4)


# -- dataclasses, named tuples, enums


@dataclasses.dataclass
class Batch:
    data: torch.Tensor
    names: list = dataclasses.field(default_factory=list)
    size: int = 0
    kind: typing.ClassVar[str] = "batch"

    def __post_init__(self):
        self.size = self.size or self.data.shape[0]

    def with_data(self, data):
        return dataclasses.replace(self, data=data, size=0)


@dataclasses.dataclass(frozen=True, order=True)
class Step:
    index: int
    lr: float = 0.1


@dataclasses.dataclass(slots=True, kw_only=True)
class Slim:
    a: torch.Tensor
    n: int = 2


@dataclasses.dataclass
class Named(Batch):
    title: str = "t"


batch = Batch(y[0])


@program(x, change="batch.data = torch.zeros(4)")
def dataclass_from_the_module(a):
    return a + batch.data, batch.size


@program(x, change="Batch.kind = 'other'")
def dataclass_made_and_replaced(a):
    made = Batch(a)
    made.names.append("n")
    return made.with_data(a * 2), made.kind, dataclasses.asdict(Step(1))


@program(x, Batch(x[0], ["p"]), again=(x, Batch(y[0], [])))
def dataclass_as_argument(a, b):
    b.size += 1
    return a * b.size + b.data, b


@program(x)
def frozen_dataclass(a):
    step = Step(2)
    try:
        step.index = 5
    except dataclasses.FrozenInstanceError as error:
        return (
            a * step.index,
            str(error),
            step < Step(3),
            hash(step) == hash(Step(2)),
            step == Step(2),
        )


@program(x)
def dataclass_with_slots(a):
    slim = Slim(a=a)
    slim.n = 4
    return slim.a * slim.n, slim


@program(x, whole=False)
def dataclass_inheritance_and_repr(a):
    made = Named(a, title="z")
    return (
        made,
        [f.name for f in dataclasses.fields(made)],
        repr(Step(1)),
        dataclasses.is_dataclass(made),
    )


Pair = collections.namedtuple("Pair", ["left", "right"], defaults=[1])


class Typed(typing.NamedTuple):
    t: torch.Tensor
    n: int = 3

    def scaled(self):
        return self.t * self.n


@program(x)
def named_tuples(a):
    pair, typed = Pair(a), Typed(a)
    left, right = pair
    return (
        typed.scaled() + left * right,
        pair._replace(right=a),
        Pair._fields,
        typed._asdict(),
        typed,
    )


@program(x, Pair(2, 3), again=(x, Pair(2, 5)))
def named_tuple_as_argument(a, pair):
    return a * pair.left + pair[1], pair == (2, 3), pair


@program(x)
def named_results_of_operators(a):
    found = a.max(dim=1)
    values, indices = torch.topk(a, 2)
    return found.values, found[1], values, indices, found


class Mode(enum.Enum):
    SUM = "sum"
    MEAN = "mean"

    def apply(self, a):
        return getattr(a, self.value)(0)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 10


class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()
    AB = A | B


@program(x, Mode.SUM)
def enum_with_method(a, mode):
    return mode.apply(a), mode.name, Mode("mean") is Mode.MEAN, [m.value for m in Mode], mode


@program(x, Mode.SUM, again=(x, Mode.MEAN))
def enum_in_match(a, mode):
    match mode:
        case Mode.SUM:
            return a.sum()
        case Mode.MEAN:
            return a.mean()


@program(x, Level.LOW, again=(x, Level.HIGH), whole=False)
def int_enum(a, level):
    return a * level, level + 1, level < Level.HIGH, {level: "v"}[level]


@program(x, Flags.A, again=(x, Flags.AB))
def flags(a, given):
    return a * given.value if Flags.B in given else a, given | Flags.B, bool(given & Flags.B)
