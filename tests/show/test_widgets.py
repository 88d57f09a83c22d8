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
from minicompile.show.widgets import Panel

X = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))


def scores(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x) * 2, -1).sum(0)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant, "FEWEST_CALLS", 1)
    monkeypatch.setattr(variant, "SECONDS", 0.0)


@pytest.fixture
def panel() -> Panel:
    found = mc.what_if(scores, X)
    return Panel(found, found.run())


def shown(panel: Panel) -> str:
    return html.unescape(re.sub("<.*?>", " ", panel.result.value.partition("</style>")[2]))


def test_it_opens_with_the_decisions_of_the_schedule(panel: Panel) -> None:
    decisions = mc.trace(scores, X).schedule.decisions
    labels = [label for label, _ in panel.decision.options]
    assert len(labels) == len(decisions)
    for label, decision in zip(labels, decisions):
        assert label.endswith(decision.reason)
        assert (": fused, " in label) == decision.fused
    assert panel.result.value == "" and panel.wish.value == "as decided"


def test_forcing_two_apart_and_back_compiles_each_time(panel: Panel) -> None:
    panel.decision.value = ("buf0", "buf1")
    panel.wish.value = "force apart"
    assert "forbid = (('buf0', 'buf1'),)" in shown(panel)
    assert re.search(r"kernels\s+2\s+3", shown(panel))
    assert any("buf0 + buf1: force apart" in label for label, _ in panel.decision.options)
    panel.decision.value = ("buf1", "buf2")
    assert panel.wish.value == "as decided", "the buttons follow the selected decision"
    panel.decision.value = ("buf0", "buf1")
    assert panel.wish.value == "force apart"
    panel.wish.value = "as decided"
    assert "nothing changed" in shown(panel)
    assert any("buf0 + buf1: fused, " in label for label, _ in panel.decision.options)


def test_what_is_forced_together_though_it_would_be_wrong_is_refused_in_the_panel(
    panel: Panel,
) -> None:
    panel.decision.value = ("buf2", "buf3")
    panel.wish.value = "force together"
    (refused,) = mc.trace(scores, X).schedule.what_if(fuse=[("buf2", "buf3")]).refused
    assert f"refused {refused.headline}" in " ".join(shown(panel).split())


@pytest.mark.long
def test_dropdowns_and_the_tile_slider_compile(panel: Panel) -> None:
    panel.knobs["inline"].value = "never"
    assert "inline = 'never'" in shown(panel) and len(panel.decision.options) == 7
    panel.axis.value = "x"
    panel.size.value = 32
    assert "tiles = {'x': 32}" in shown(panel) and "refused" not in shown(panel)
    panel.size.value = 4096
    assert "columns lie on the stack" in shown(panel)
    panel.axis.value = "as planned"
    panel.knobs["backend"].value = "aot_eager"
    assert "its backend stops before them" in shown(panel)


def test_errors_are_text_in_the_panel(panel: Panel, capsys: pytest.CaptureFixture[str]) -> None:
    panel.decision.value = ("buf0", "buf1")
    panel.wish.value = "force apart"
    before = panel.result.value
    panel.knobs["backend"].value = "eager"
    assert "OptionError: with backend &#x27;eager&#x27; there is no" in panel.status.value
    assert "Below is what was compiled last" in panel.status.value
    assert panel.result.value == before
    assert not any(control.disabled for control in panel.controls)
    panel.knobs["backend"].value = "inductor"
    assert panel.status.value == ""
    assert "Traceback" not in "".join(capsys.readouterr())


def test_controls_are_off_while_it_compiles(panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = Experiment.run

    def watched(self: Experiment, **changes: Any) -> Any:
        seen.append([control.disabled for control in panel.controls])
        assert "compiling" in panel.status.value
        return run(self, **changes)

    monkeypatch.setattr(Experiment, "run", watched)
    panel.knobs["dynamic"].value = "yes"
    assert seen == [[True] * len(panel.controls)]
    assert not any(control.disabled for control in panel.controls)


def displayed(found: Experiment, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a notebook's cell with an experiment shows, one output after the other."""
    outputs: list[Any] = []
    monkeypatch.setattr(IPython.display, "display", outputs.append)
    found._ipython_display_()
    return outputs


def test_the_first_state_is_an_output_beside_the_panel_and_stays_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, panel = displayed(mc.what_if(scores, X), monkeypatch)
    assert isinstance(panel, ipywidgets.VBox)
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
