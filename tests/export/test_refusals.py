"""What can't be exported, called or loaded is said, with the place and the way out."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import minicompile as mc

B = mc.Dim("b")


def says(*words: str) -> Any:
    return pytest.raises(mc.ExportError, match="(?s)" + ".*".join(map(re.escape, words)))


class Config:
    scale = 2.0


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x, what):
        if what == "number":
            self.calls += 1
        elif what == "list":
            self.seen.append(x)
        else:
            self.last = self.last + x
        return x + 1


def broken(x):
    return x + x.tolist()[0]


def test_a_break_is_named_with_its_line():
    line = broken.__code__.co_firstlineno + 1
    with says("broken is no single graph", "mc.explain", "tolist", f"test_refusals.py:{line}"):
        mc.export(broken, (torch.ones(3),))


def nn_of(function: Any) -> nn.Module:
    class Module(nn.Module):
        def forward(self, *args):
            return function(*args)

    return Module()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x + torch.ones(4), ("x.size(0)", "4")),
        (lambda x: x * 2 if x.size(0) > 3 else x, ("x.size(0) > 3",)),
        (lambda x: x.view(-1, 2), ("x.size(0) % 2",)),
        (lambda x: torch.zeros(64)[: x.size(0)] + x, ("x.size(0) <= 64",)),
    ],
)
def test_a_guard_that_narrows_a_declared_size_is_named(function, words):
    with says("narrows", "dimension 'b'", *words[:1]) as caught:
        mc.export(function, (torch.ones(4),), None, ({0: B},))
    assert all(word in str(caught.value) for word in words) and "test_refusals.py" in str(
        caught.value
    )


def test_two_dims_that_must_be_equal_are_named():
    with says("dimension 'b' and dimension 'c'", "x.size(0)", "y.size(0)", "one Dim"):
        dims = ({0: B}, {0: mc.Dim("c")})
        mc.export(lambda x, y: x + y, (torch.ones(4), torch.ones(4)), None, dims)


X = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (lambda: {"x": {2: B}}, ("x has no axis 2",)),
        (lambda: {"z": {0: B}}, ("no tensor for 'z'",)),
        (lambda: {"x": {0: mc.Dim("b", max=3)}}, ("x.size(0) is 4", "max=3")),
        (lambda: {"x": {0: B, 1: B}}, ("x.size(1) == x.size(0)", "f32[4, 3]")),
        (lambda: ({0: mc.Dim("b", min=1)},), ("min is 1", "apart")),
    ],
)
def test_what_is_declared_wrongly_is_said(declared, words):
    with says(*words):
        mc.export(lambda x, n=1: x, (X,), None, declared())


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        (lambda c: c.scale, (Config(),), ("c is", "Config", "close over")),
        (lambda x, y: x.add_(1) + y, (X, X[0]), ("share memory",)),
        (lambda xs: xs.append(1), ([X],), ("xs",)),
        (Stateful(), (torch.ones(2), "number"), ("self.calls",)),
        (Stateful(), (torch.ones(2), "list"), ("self.seen",)),
        (Stateful(), (torch.ones(2), "replaced"), ("self.last", "copy_")),
        (lambda d: d["x"], (OrderedDict(x=X),), ("OrderedDict", "no file can hold")),
    ],
)
def test_what_has_no_place_in_a_file_is_said(function, args, words):
    with says(*words):
        mc.export(function, args)


def program(x, batch, flag=True, *, scale=1.0):
    return x * scale + batch["y"][0] if flag else x


BATCH: Any = {"y": [torch.ones(3), 5]}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    made = mc.export(program, (X, BATCH), None, {"x": {0: mc.Dim("b", min=3, max=8)}})
    return made, mc.load_package(mc.aot_package(made, tmp_path_factory.mktemp("package")))


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((torch.ones(2, 3), BATCH), {}, ("3 <= x.size(0) <= 8", "x is f32[2, 3]")),
        ((torch.ones(4, 4), BATCH), {}, ("x.size(1) == 3", "x is f32[4, 4]")),
        ((X.double(), BATCH), {}, ("x.dtype == torch.float32", "x is f64")),
        ((X, {"y": [torch.ones(4), 5]}), {}, ("batch['y'][0].size(0) == 3", "batch is")),
        ((X, {"y": (torch.ones(3), 5)}), {}, ("type(batch['y']) is list", "batch is")),
        ((X, BATCH, False), {}, ("repr(flag) == 'True'", "flag is False")),
        ((X, BATCH), {"scale": 1}, ("repr(scale) == '1.0'", "scale is 1")),
        ((X,), {}, ("missing", "batch")),
    ],
)
def test_a_call_that_breaks_a_constraint_names_the_argument(exported, args, kwargs, words):
    for each in exported:
        with says("program", *words):
            each(*args, **kwargs)


@pytest.mark.parametrize("wrap", [lambda function: function, lambda function: nn_of(function)])
def test_a_call_has_as_many_arguments_as_the_example(wrap):
    made = mc.export(wrap(lambda *xs: sum(xs)), (torch.ones(2), torch.ones(2)))
    with says("len(", ") == 2"):
        made(*[torch.ones(2)] * 3)
    made = mc.export(lambda **named: sum(named.values()), (), {"a": torch.ones(2)})
    with says("type(named) is dict and list(named) == ['a']"):
        made(a=torch.ones(2), b=torch.ones(2))


def test_memory_that_is_changed_belongs_to_one_argument():
    made = mc.export(lambda x, y: x.add_(y), (torch.ones(3), torch.ones(3)))
    shared = torch.ones(4)
    with says("x and y share memory"):
        made(shared[1:], shared[:3])
