"""Whatever a user can take out of a trace shows itself, as text that can be read and as sound HTML."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.debug.roofline import DeviceSpec
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.ops.display import Several, Shown, to_html
from tests.show.test_views import parsed

SPEC = DeviceSpec("toy", 1e9, 1e10)
SIZES = GPTConfig(n_layer=1, n_embd=16, n_head=2, block_size=8)


@functools.cache
def traced() -> Any:
    """The lesson GPT's training step, small."""
    torch.manual_seed(0)
    tokens = torch.arange(16).view(2, 8)
    return mc.trace(GPT(SIZES), tokens, tokens + 1)


@functools.cache
def explained() -> Any:
    @mc.compile
    def stops(x: torch.Tensor) -> torch.Tensor:
        print("a break")
        return x.relu() + x.size(0)

    for size in (2, 3):
        stops(torch.ones(size))
    return mc.explain(stops)(torch.ones(4))


@functools.cache
def accurate() -> Any:
    return mc.accuracy(lambda x: (x.exp() / 3).sum(), torch.ones(4, requires_grad=True))


@functools.cache
def attended() -> Any:
    """Attention with capped scores, by a template."""
    options = {"plugins": ["flash_attention"], "device_codegen": "triton"}
    capped = lambda q, k, v: torch.softmax(9 * torch.tanh(q @ k.mT / 9), -1) @ v  # noqa: E731
    return mc.trace(mc.compile(capped, options=options), *(torch.ones(1, 1, 16, 16) for _ in "qkv"))


def pictures(page: str) -> int:
    return page.count("<img class=") + page.count("<svg")


def two_kernels() -> tuple[str, str]:
    first, second = traced().schedule.kernels[:2]
    return first.nodes[0].name, second.nodes[0].name


Find = Callable[[], Any]
ONE: dict[str, Find] = {
    "trace": traced,
    "compiled stages": lambda: traced().forward,
    "capture": lambda: traced().capture,
    "captured graph": lambda: traced().capture.graph,
    "guard": lambda: traced().capture.guards[0],
    "source": lambda: traced().capture.guards[0].sources[0],
    "bytecode": lambda: traced().capture.bytecode,
    "explanation": explained,
    "timeline": lambda: explained().timelines[0],
    "graph break": lambda: explained().breaks[0],
    "guard failure": lambda: explained().failures[0],
    "symbols": lambda: next(c.shape_env for c in explained().captures if c.shape_env),
    "autograd": lambda: traced().aot,
    "joint graph": lambda: traced().aot.joint,
    "forward graph": lambda: traced().aot.forward,
    "level": lambda: traced().aot.level("core"),
    "pass": lambda: next(p for p in traced().aot.passes if p.changed),
    "partition": lambda: traced().aot.partition,
    "runtime metadata": lambda: traced().aot.metadata,
    "loop graph": lambda: traced().loops,
    "input buffer": lambda: traced().loops.inputs[0],
    "computed buffer": lambda: traced().schedule.before[0].buffer,
    "extern call": lambda: traced().loops.externs[0],
    "template": lambda: attended().loops.externs[0],
    "template plan": lambda: attended().plans[0],
    "template kernel": lambda: attended().kernels[0],
    "schedule": lambda: traced().schedule,
    "scheduler node": lambda: traced().schedule.before[0],
    "extern node": lambda: next(n for n in traced().schedule.nodes if hasattr(n, "kernel")),
    "fused node": lambda: traced().schedule.kernels[0],
    "dependency": lambda: traced().schedule.before[0].reads[0],
    "loop body": lambda: traced().schedule.before[0].body,
    "fusion decision": lambda: traced().schedule.decisions[0],
    "fusion steps": lambda: traced().schedule.steps(),
    "explorer": lambda: traced().explore(),
    "why": lambda: traced().schedule.why(*two_kernels()),
    "what if": lambda: traced().schedule.what_if(forbid=[two_kernels()]),
    "memory plan": lambda: traced().schedule.memory,
    "kernel plan": lambda: traced().plans[0],
    "kernel": lambda: traced().kernels[0],
    "wrapper": lambda: traced().wrapper,
    "backward kernel": lambda: traced().backward.kernels[0],
    "roofline": lambda: traced().roofline(SPEC),
    "accuracy": accurate,
    "accuracy of a stage": lambda: accurate()["compiled"],
    "piece": lambda: traced().from_line(traced().source_lines()[0].line, "model.py")[0],
}
LISTS: dict[str, Find] = {
    "captures": lambda: explained().captures,
    "breaks": lambda: explained().breaks,
    "failures": lambda: explained().failures,
    "guards": lambda: traced().capture.guards,
    "graph inputs": lambda: traced().capture.inputs,
    "passages": lambda: traced().capture.passages,
    "passes": lambda: traced().aot.passes,
    "saved": lambda: traced().aot.partition.saved,
    "recomputed": lambda: traced().aot.partition.recomputed,
    "loop inputs": lambda: traced().loops.inputs,
    "operations": lambda: traced().loops.operations,
    "nodes before": lambda: traced().schedule.before,
    "nodes after": lambda: traced().schedule.nodes,
    "fused nodes": lambda: traced().schedule.kernels,
    "decisions": lambda: traced().schedule.decisions,
    "plans": lambda: traced().plans,
    "kernels": lambda: traced().kernels,
    "pieces of a line": lambda: traced().from_line(traced().source_lines()[0].line, "model.py"),
}
PICTURED = (
    *("captured graph", "capture", "autograd", "joint graph", "forward graph", "level"),
    *("schedule", "memory plan", "roofline"),
)
"""Of these there is a drawing, where something here can draw."""


@pytest.mark.long
@pytest.mark.parametrize("name", [*ONE, *LISTS])
def test_it_shows_itself_as_text_and_as_html(name: str) -> None:
    found = {**ONE, **LISTS}[name]()
    bundle = found._repr_mimebundle_()
    told, page = bundle["text/plain"], bundle["text/html"]
    assert told == str(found) and page.startswith("<style>") and page.count("<style>") == 1
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    for form in (told, repr(found)):
        assert form and not re.search(r"object at|0x[0-9a-f]{6,}", form)
        assert str(Path(mc.__file__).parents[1]) not in form + page
    assert len(repr(found).splitlines()) == 1
    for tag, attribute, value in parsed(page + page).attributes:
        assert attribute != "id" and not attribute.startswith("on"), f"<{tag} {attribute}>"
        assert attribute not in ("src", "href") or value.startswith("data:image/svg+xml;base64,")
    assert bundle == found._repr_mimebundle_()


@pytest.mark.long
@pytest.mark.parametrize("name", LISTS)
def test_a_list_shows_each_of_its_objects(name: str) -> None:
    found = LISTS[name]()
    assert isinstance(found, Several) and found
    assert all(str(item) in str(found) for item in found)
    page = to_html(found)
    assert page.count("<tr>") + page.count("<details") + page.count('class="ln"') >= len(found)


@pytest.mark.parametrize("name", PICTURED)
def test_it_has_a_drawing(name: str) -> None:
    from minicompile.show.graphviz import svg

    if svg("digraph G { a -> b }") is None and name not in ("memory plan", "roofline"):
        pytest.skip("nothing here can draw graphs")
    assert pictures(to_html(ONE[name]()))


def test_every_stage_object_of_the_package_is_in_the_inventory() -> None:
    """Or it needs Triton or a module of its own (`elsewhere`), or it is a kind of something that is there."""
    elsewhere = {"Assembly", "KernelModule", "ConstantBuffer", "ExternOutput", "Several"}
    inventory = {type(find()) for find in ONE.values()}
    for cls in subclasses(Shown):
        rooms = cls.__module__.split(".")[1] in ROOMS
        if rooms and cls.__name__ not in elsewhere:
            assert any(issubclass(found, cls) for found in inventory), cls


ROOMS = ("dynamo", "aot", "lowering", "scheduling", "codegen", "runtime", "shapes", "ops")


def subclasses(cls: type) -> list[type]:
    found = [sub for sub in cls.__subclasses__() if sub.__module__.startswith("minicompile.")]
    return found + [below for sub in found for below in subclasses(sub)]
