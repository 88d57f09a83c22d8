"""A sample of random loop programs, and planted faults that they must find."""

from __future__ import annotations

import pytest
import torch

from minicompile.codegen import merge
from minicompile.debug.reference import run_reference
from minicompile.scheduling import align
from minicompile.scheduling.body import Recorder
from minicompile.shapes import expr
from tests.fuzz.loop_checks import LANGUAGES, error_bounds, failure, failures, magnitude
from tests.fuzz.loop_functions import FUNCTIONS
from tests.fuzz.loops import CHOICES, generate
from tests.scheduling.building import example_inputs

torch.set_num_threads(1)
CPP, TRITON = LANGUAGES["inductor"], LANGUAGES["triton"]


@pytest.mark.long
def test_a_sample_equals_the_reference_interpreter_in_cpp():
    assert failures([generate(seed) for seed in range(40)], CPP) == {}


def test_a_sample_equals_the_reference_interpreter_in_triton():
    assert failures([generate(seed, 5) for seed in range(6)], TRITON) == {}


def test_programs_come_in_all_kinds():
    programs = [generate(seed) for seed in range(400)]
    steps = [step for program in programs for step in program.steps]
    assert {step.what for step in steps} == {*CHOICES, "input"}
    assert {step.name for step in steps if step.what == "map"} == {f.name for f in FUNCTIONS}
    assert len({step.dtype for step in steps}) == 8
    assert {len(program.hints) for program in programs} == {0, 1, 2}
    assert any(0 in step.size for step in steps) and any(1 in step.size for step in steps)
    assert any(step.size == () for step in steps)


def plant(fault: str, patch: pytest.MonkeyPatch) -> None:
    load, store, fits = Recorder.load, Recorder.store, expr._fits
    if fault == "a digit is dropped that may be one too large":
        patch.setattr(expr, "_fits", lambda e, limit, ranges: fits(e, limit + 1, ranges))
    if fault == "a load forgets its mask":
        patch.setattr(Recorder, "load", lambda self, *a: load(self._changed(mask=None), *a))
    if fault == "an addition overwrites":
        patch.setattr(
            Recorder, "store", lambda self, b, i, v, mode="store": store(self, b, i, v, "store")
        )
    if fault == "a fused kernel is not checked":
        patch.setattr(align, "_flaw", lambda nest: None)
        patch.setattr(align, "flows", lambda a, b: ())
        patch.setattr(merge, "same", lambda a, b: True)


FAULTS = [
    "a digit is dropped that may be one too large",
    "a load forgets its mask",
    "an addition overwrites",
    "a fused kernel is not checked",
]


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch):
    plant(fault, monkeypatch)
    blocks = ([generate(s) for s in range(start, start + 12)] for start in range(0, 240, 12))
    seed = next(seed for block in blocks for seed in failures(block, CPP))
    monkeypatch.undo()
    assert failure(generate(seed), CPP) is None, "without the fault it is right"


def test_errors_are_bounded_closely() -> None:
    for seed in range(10):
        program = generate(seed)
        graph = program.build(whole=True)
        values = run_reference(graph, example_inputs(graph, seed=seed))
        for step, value, error in zip(program.steps, values, error_bounds(program, values)):
            assert (error == 0) == step.exact or magnitude(value) == 0
            if step.dtype in (torch.float32, torch.float64):
                assert error <= 1e-3 * (1 + magnitude(value))
