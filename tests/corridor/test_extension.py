"""A rule from outside each room, plugged in through its registry, changes the compiled lesson model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import minicompile as mc
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.ops.events import observer
from minicompile.ops.registry import ALL, Registry
from tests.comparing import assert_as_eager

aten = torch.ops.aten


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(n_layer=1, n_embd=16, n_head=2, block_size=8))


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def assert_still_right(model: GPT, batch, **options) -> None:
    compiled = mc.compile(model, fullgraph=True, options=options)
    call = lambda run: lambda: run(*batch)[1]  # noqa: E731
    assert_as_eager(call(compiled), call(model), module=model, atol=1e-5, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("level", ["core", "prims"])
def test_a_decomposition(model, batch, level):
    from minicompile.aot.decompositions.registry import decompose

    with mc.scoped():

        @decompose(aten.gelu.default, to=level)
        def gelu(x, approximate="none"):
            return x * (torch.erfc(x * -(0.5**0.5)) * 0.5)

        aot = mc.trace(model, *batch).aot
        assert "aten.erfc" in str(aot.forward) and aten.gelu.default in aot.level(level).applied
        assert_still_right(model, batch)
    assert "aten.erfc" not in str(mc.trace(model, *batch).aot.forward)


def test_an_observer_that_raises_is_told_of_in_a_warning():
    with mc.scoped(), pytest.warns(UserWarning, match="observer failed on start: ValueError: no"):

        @observer("mine")
        def complain(event):
            raise ValueError("no")

        compiled = mc.compile(lambda x: x + 1, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize(
    "name, why",
    [("nowhere:add", "no registry 'nowhere'"), ("lowering:aten.nothing", "no rule 'aten.nothing'")],
)
def test_a_rule_that_there_is_not_can_not_be_taken_away(name, why):
    with pytest.raises(KeyError, match=why), mc.without(name):
        pass


def test_a_code_generator_and_its_loader(model, batch):
    """A new language: it prints what C++ prints, under its own name, and counts its kernels."""
    from minicompile.codegen.generate import code_generator, generate_cpp
    from minicompile.codegen.plan import KernelModule
    from minicompile.runtime.load import kernel_loader, load_cpp

    printed: list[str] = []
    with mc.scoped():

        @code_generator("mine")
        def generate(plans):
            module = generate_cpp(plans)
            printed.extend(kernel.name for kernel in module.kernels)
            return KernelModule("mine", "// mine\n" + module.text, module.kernels)

        kernel_loader("mine")(load_cpp)
        assert_still_right(model, batch, device_codegen="mine")
    assert printed and all(name.startswith("mine_") for name in printed)


def test_a_rule_stays_that_was_there_before_the_built_in_ones_were_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = "from minicompile.ops.registry import ALL\nALL['late']('one', 'two')('built in')\n"
    (tmp_path / "late_rules.py").write_text(register)
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[str] = Registry("late", "for this test alone")
    try:
        registry.modules.append("late_rules")
        registry("one")("mine")
        assert dict(registry) == {"one": "mine", "two": "built in"}
        registry("two")("mine")
        assert registry["two"] == "mine"
    finally:
        del ALL["late"]
