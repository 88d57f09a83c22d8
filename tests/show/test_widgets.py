"""The what-if panel: controls compile at once, errors are text, and the first state stays without widgets."""

from __future__ import annotations

import html
import re
import sys
from typing import Any

import IPython.display
import ipywidgets
import pytest
import torch

import minicompile as mc
from minicompile.debug import variant
from minicompile.debug.experiment import Experiment
from minicompile.ops.display import to_html
from minicompile.show.widgets import panel

X = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))


def scores(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x) * 2, -1).sum(0)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant, "FEWEST_CALLS", 1)
    monkeypatch.setattr(variant, "SECONDS", 0.0)


class Panel:
    """A panel, its controls by what they are called, and what it shows below them."""

    def __init__(self) -> None:
        *controls, self.result = panel(mc.what_if(scores, X)).children
        self.controls = {control.description: control for control in controls}

    def set(self, name: str, value: object) -> str:
        self.controls[name].value = value
        return html.unescape(re.sub("<.*?>", "", self.result.value.partition("</style>")[2]))


def test_it_opens_with_the_decisions_of_the_schedule() -> None:
    decisions = mc.trace(scores, X).schedule.decisions
    opened = Panel()
    labels = [label for label, _ in opened.controls["force apart"].options]
    assert len(labels) == len(decisions)
    for label, decision in zip(labels, decisions):
        assert label.endswith(decision.reason)
        assert (": fused, " in label) == decision.fused
    assert opened.result.value == ""


def test_forcing_two_apart_and_back_compiles_each_time() -> None:
    opened = Panel()
    apart = opened.set("force apart", (("buf0", "buf1"),))
    assert "forbid = (('buf0', 'buf1'),)" in apart
    assert re.search(r"kernels\s+2\s+3", apart)
    assert "nothing changed" in opened.set("force apart", ())


def test_what_is_forced_together_though_it_would_be_wrong_is_refused_in_the_panel() -> None:
    (refused,) = mc.trace(scores, X).schedule.what_if(fuse=[("buf2", "buf3")]).refused
    assert f"refused: {refused.headline}" in Panel().set("together", (("buf2", "buf3"),))


@pytest.mark.long
def test_dropdowns_compile() -> None:
    opened = Panel()
    assert "inline = 'never'" in opened.set("inline", "never")
    assert "answer" in opened.set("backend", "aot_eager")


def test_errors_are_text_in_the_panel(capsys: pytest.CaptureFixture[str]) -> None:
    opened = Panel()
    opened.set("force apart", (("buf0", "buf1"),))
    opened.set("backend", "eager")
    assert "OptionError: with backend &#x27;eager&#x27; there is no" in opened.result.value
    assert "Traceback" not in "".join(capsys.readouterr())


def displayed(found: Experiment, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a notebook's cell with an experiment shows, one output after the other."""
    outputs: list[Any] = []
    monkeypatch.setattr(IPython.display, "display", outputs.append)
    found._ipython_display_()
    return outputs


def test_the_first_state_is_an_output_beside_the_panel_and_stays_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, controls = displayed(mc.what_if(scores, X), monkeypatch)
    assert isinstance(controls, ipywidgets.VBox)
    bundle = first._repr_mimebundle_()
    assert bundle.keys() == {"text/plain", "text/html"}
    for told in bundle.values():
        assert "time, median of 1 calls" in told and "memory peak" in told
    assert "<script" not in bundle["text/html"]
    assert "code that differs</" not in bundle["text/html"] and "0 kernels" not in str(bundle)


def test_without_ipywidgets_there_is_a_sentence_and_the_first_state(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    [first] = displayed(mc.what_if(scores, X), monkeypatch)
    assert "memory peak" in to_html(first) and "memory peak" in str(first)
    assert "ipywidgets is not installed (pip install ipywidgets)" in capsys.readouterr().out
