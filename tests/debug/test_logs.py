"""Log channels: who is told what, where the lines go, and how a user adds a channel."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

import minicompile as mc
from minicompile.debug.logs import channels, levels
from minicompile.errors import OptionError
from minicompile.extension import log_channel, scoped
from minicompile.ops.events import Event
from tests.debug.documents import bash

SPEC = """dynamo aot inductor graph_breaks graph_code guards recompiles bytecode pre_grad_graphs
    aot_graphs aot_joint_graph post_grad_graphs ir_pre_fusion ir_post_fusion fusion schedule
    output_code cudagraphs autotuning perf"""
LINE = re.compile(r"\[\d+/\d+\] (\w+):( .*)?")


def relu_add_sum(x: torch.Tensor) -> torch.Tensor:
    return x.relu().add(1).sum(dim=-1)


def told(*names: str, options: dict[str, object] | None = None) -> str:
    """What channels say while a function is compiled."""
    out = io.StringIO()
    with mc.logs(*names, file=out):
        mc.compile(relu_add_sum, options=options)(torch.ones(10, 100))
    return out.getvalue()


def channels_of(text: str) -> set[str]:
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(found), text
    return {match[1] for match in found if match}


def test_the_channels_are_those_of_the_specification() -> None:
    assert channels.keys() == set(SPEC.split())
    assert all(channel.doc and channel.kinds for channel in channels.values())


def test_every_channel_says_something_and_where_it_comes_from() -> None:
    model, out = torch.nn.Linear(4, 4), io.StringIO()

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = model(x).relu()
        print(end="")
        return y * 2

    compiled = mc.compile(broken, mode="max-autotune")
    with mc.logs("all", file=out):
        compiled(torch.ones(3, 4))
        compiled(torch.ones(5, 4))
    text = out.getvalue()
    assert channels_of(text) == set(SPEC.split()) - {"autotuning"}  # on a GPU
    placed = {line.split()[1][:-1] for line in text.splitlines() if "test_logs.py:" in line}
    silent = {"pre_grad_graphs", "post_grad_graphs", "ir_pre_fusion", "ir_post_fusion"}
    assert placed == set(SPEC.split()) - silent - {"cudagraphs", "autotuning", "perf"}


def test_fusion_reads_as_in_the_document() -> None:
    text = re.sub(r"\[\d+/\d+\] fusion: ", "", told("fusion", options={"inline": "never"}))
    first = """\
FusionDecision: buf0 (Pointwise) <- producer
FusionDecision: buf1 (Pointwise) <- consumer
✓ Ranges match: [10, 100]
✓ Vertical fusion: """
    assert first in text and "→ Fused into 1 kernel from tests/debug/test_logs.py:" in text
    decisions = mc.trace(mc.compile(relu_add_sum, options={"inline": "never"}), torch.ones(10, 100))
    fused = sum(decision.fused for decision in decisions.schedule.decisions)
    assert text.count("→ Fused into 1 kernel") == fused > 0
    text = told("fusion", options={"inline": "never", "fusion": False})
    assert "→ Fused" not in text
    numbers = told("+fusion", options={"inline": "never"})
    assert "saves " in numbers and "operations" in numbers


def test_a_sign_means_more_or_none() -> None:
    stage = {name for name, channel in channels.items() if channel.stage == "dynamo"}
    assert levels("dynamo") == {"dynamo": False} and levels("+dynamo") == dict.fromkeys(stage, True)
    assert levels("all").keys() == set(channels) and not any(levels("all").values())
    assert levels("all, -output_code").keys() == set(channels) - {"output_code"}
    assert levels("+all,-aot").keys() == {n for n, c in channels.items() if c.stage != "aot"}
    assert levels("fusion", "+fusion", "fusion") == {"fusion": True} and levels("", " ,") == {}


def test_an_unknown_channel_is_an_error_that_lists_the_known_ones() -> None:
    known = ", ".join([*sorted(SPEC.split()), "all"])
    for wrong in ("fusio", "+nothing", "fusion,al", "-x"):
        with pytest.raises(OptionError, match=known), mc.logs(wrong):
            pass
    with pytest.raises(OptionError, match="no log channel 'x'"):
        mc.compile(relu_add_sum, options={"logs": "x"})


@pytest.mark.long
def test_in_the_environment_it_is_told_when_something_is_compiled_not_at_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import minicompile as mc; mc.compile; print('imported'); mc.compile(print)"
    out = bash(f'MINICOMPILE_LOGS="fusio" python -c "{program}"', tmp_path, {})
    assert out.startswith("imported\n")
    last = out.splitlines()[-1]
    assert last.startswith(
        "minicompile.errors.OptionError: no log channel 'fusio' (MINICOMPILE_LOGS"
    )
    assert "graph_breaks" in last
    monkeypatch.setenv("MINICOMPILE_LOGS", "fusio")
    with pytest.raises(OptionError, match="'fusio'"):
        mc.trace(relu_add_sum, torch.ones(2, 3))


def test_a_channel_of_ones_own_plugs_in_with_one_decorator() -> None:
    with scoped():

        @log_channel("buffers", "how many buffers there are", "loops", stage="inductor")
        def buffers(event: Event, verbose: bool) -> str:
            return f"{len(event.subject.operations)} buffers{'!' * verbose}\n\nof {event.graph}"

        text = told("buffers")
        assert re.fullmatch(
            r"(\[\d+/\d+\]) buffers: 1 buffers\n\1 buffers:\n\1 buffers: of forward\n", text
        )
        assert "buffers!" in told("+inductor")
        with pytest.raises(OptionError, match="no event 'lops'"):
            log_channel("x", "", "lops")
    with pytest.raises(OptionError):
        levels("buffers")


def test_blocks_nest_and_end_even_by_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
    inner = io.StringIO()
    with contextlib.suppress(ValueError), mc.logs("schedule"):
        with mc.logs("schedule", "+fusion"), mc.logs("aot", file=inner):
            told("perf", options={"inline": "never"})
        first = capsys.readouterr().err
        told("perf")
        assert channels_of(capsys.readouterr().err) == {"schedule"}
        raise ValueError
    told("perf")
    assert capsys.readouterr().err == ""
    assert channels_of(first) == {"schedule", "fusion"} and channels_of(inner.getvalue()) == {"aot"}
