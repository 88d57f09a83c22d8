"""What every random program can use: globals, functions, classes, and modules with parameters."""

PRELUDE = """\
import collections
import contextlib
import functools
import operator
import threading
import types
import weakref

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

WIDTH, ROWS = 4, 1
SCALE = 1.5
COUNT = 0
SEEN = []
LOCAL = threading.local()


class Tags(set):
    pass


class Rows(list):
    pass


class Doubled(dict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value * 2)


class Own:
    def __init__(self):
        self.held = [1]

    def __iadd__(self, other):
        self.held.append(other)
        return self

    def __ior__(self, other):
        return Own()

    def __len__(self):
        return len(self.held)


SHELF = types.SimpleNamespace(
    sets=[{1, 2}, Tags({1, 3})],
    dicts=[{"a": 1}, Doubled(a=2), collections.defaultdict(int, a=3), collections.Counter("aab")],
    ordered=collections.OrderedDict(a=1, b=2),
    lists=[[1, 2], Rows([3]), collections.deque([4, 5], 6)],
    parts=[(1, 2), frozenset({1, 3}), "ab", 5, 1.5],
    part=(3, 4), own=Own(), table={"in": [1]},
)


class Answering(type):
    def __getattr__(cls, name):
        if name == "scale":
            return 2
        raise AttributeError(name)


class Chosen(metaclass=Answering):
    pass


class Slotted:
    __slots__ = ("v", "late")

    def __init__(self):
        self.v = 2


class Odd:
    def __getattr__(self, name):
        SEEN.append(name)
        if name == "scale":
            return 3
        raise AttributeError(name)

    @property
    def steps(self):
        return self.missing

    @property
    def mark(self):
        raise AttributeError("mark")


ODD, ODD_MODULE = Odd(), types.ModuleType("odd_module")
ODD_MODULE.__getattr__ = lambda name: {"scale": 4}[name]


def asked(get):
    try:
        return len(str(type(get())))
    except AttributeError:
        return -1


class Box:
    limit = 3

    def __init__(self, value):
        self.value = value
        self.steps = 0

    @property
    def doubled(self):
        return self.value * 2

    def bump(self, by, times=1):
        self.steps += times
        self.value = self.value + by
        return self

    def __add__(self, other):
        return Box(self.value + other)

    def __len__(self):
        return self.steps

    def __call__(self, t):
        return t * self.limit


class Special(Box):
    def bump(self, by, times=2):
        super().bump(by, times)
        SEEN.append(times)
        return self


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.save_for_backward(t)
        return t ** 3

    @staticmethod
    def backward(ctx, down):
        (t,) = ctx.saved_tensors
        return down * 3 * t.square()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, by):
        ctx.by = by
        return t * by

    @staticmethod
    def backward(ctx, down):
        return down * ctx.by * 2, None


class Average(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))
        self.last = None

    def forward(self, t):
        if self.training:
            self.count += 1
            self.mean.lerp_(t.detach().float().reshape(-1, 4).mean(0), 0.25)
        self.last = t.shape
        return t - self.mean


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.calls = 0
        self.norm, self.batch = torch.nn.LayerNorm(4), torch.nn.BatchNorm1d(4)
        self.conv, self.words = torch.nn.Conv1d(1, 1, 3, padding=1), torch.nn.Embedding(5, 4)
        inner = torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Dropout(0.0), torch.nn.Linear(6, 4)
        self.chain, self.same = torch.nn.Sequential(*inner), torch.nn.Identity()
        self.average = Average()
        self.gru, self.lstm = (make(4, 4, 2, dropout=0.5) for make in (torch.nn.GRU, torch.nn.LSTM))
        self.rnn = torch.nn.RNN(4, 2, 2, dropout=0.5, bidirectional=True, batch_first=True)
        self.projected = torch.nn.LSTM(4, 6, 2, dropout=0.5, proj_size=3)
        self.cell, self.state = torch.nn.LSTMCell(4, 4), torch.nn.GRUCell(4, 4)

    def forward(self, t):
        self.calls += 1
        if self.training:
            self.seen.add_(t.detach().float().sum(0) if t.dim() == 2 else 1)
        return torch.tanh(self.linear(t))


class Scope:
    def __init__(self, log, quiet=False):
        self.log, self.quiet = log, quiet

    def __enter__(self):
        self.log.append("in")
        return len(self.log)

    def __exit__(self, kind, error, traceback):
        self.log.append("out" if kind is None else kind.__name__)
        return self.quiet


@contextlib.contextmanager
def noted(log):
    log.append("start")
    try:
        yield log
    finally:
        log.append("stop")


def helper(t, k=2, *more, sign=1):
    for extra in more:
        t = t + extra
    return t * k * sign


def steps(t, count):
    for i in range(count):
        yield t + i


def through(modules, t):
    for module in modules:
        t = module(t)
    return t


def speak(t, label):
    print(label, tuple(t.shape))
    return t + 1


def peek(t):
    return float(t.detach().sum()) > 0.37


def learn(net, t, steps):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
    goal = torch.tanh(t.detach().float())
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(net(goal), goal).backward()
        optimizer.step()
    return goal


def traced(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        SEEN.append(function.__name__)
        return function(*args, **kwargs)

    return call


@traced
def scaled(t, by=None):
    return t * (SCALE if by is None else by)

"""
