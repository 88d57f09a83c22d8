"""Kernel plans: names, arguments, phases, scratch, threads, and rules from outside."""

from __future__ import annotations

import pytest
import sympy
import torch

from minicompile.codegen.cpp import print_kernel
from minicompile.codegen.cpp_units import kernel_module
from minicompile.codegen.generate import language_of
from minicompile.codegen.plan import KernelPlan, plan_rule
from minicompile.codegen.printing import index_dtype
from minicompile.errors import BackendError, OptionError
from minicompile.options import Options
from minicompile.shapes.expr import ModularIndexing
from tests.codegen.fusing import Program, softmax

F32, I64 = torch.float32, torch.int64


def scaled(constant: float) -> Program:
    p = Program()
    p.input("x", (64,))
    p.pointwise(
        "half", (64,), lambda ops, i: ops.mul(ops.load("x", i[0]), ops.constant(constant, F32))
    )
    p.pointwise("out", (64,), lambda ops, i: ops.exp(ops.load("half", i[0])))
    return p


def test_int32_indices_only_where_they_fit() -> None:
    assert softmax(64, 512).plan(language="triton").index_dtype is torch.int32
    assert softmax(70_000, 65_536).plan(language="triton").index_dtype is I64


def test_a_rule_from_outside_changes_the_kernel() -> None:
    before = print_kernel(scaled(0.5).plan()).text
    with plan_rule.scoped():

        @plan_rule("cpp:narrow")
        def narrow(plan: KernelPlan, options: Options) -> None:
            plan.vector_width = 4

        assert "simdlen(4)" in print_kernel(scaled(0.5).plan()).text

        @plan_rule("cpp:parallel")
        def always(plan: KernelPlan, options: Options) -> None:
            plan.parallel = True

        assert "parallel for" in print_kernel(scaled(0.5).plan()).text
    assert print_kernel(scaled(0.5).plan()).text == before


def test_equal_kernels_are_written_once_and_called_by_the_others() -> None:
    plans = [softmax(8, 16).plan(position=i) for i in range(3)]
    module = kernel_module(plans)
    text, sources = module.text, module.kernels
    assert text.count("mc_exp(tmp") == 1
    assert text.count("{ return cpp_fused_amax_softmax_total_0(in_ptr0") == 2
    assert all("mc_exp(tmp" in source.text for source in sources)


def test_many_kernels_make_two_units_without_losing_any() -> None:
    plans = [softmax(8, 16 + i).plan(position=i) for i in range(12)]
    module = kernel_module(plans)
    assert len(module.units) == 2
    for source in module.kernels:
        assert sum(source.text in unit for unit in module.units) == 1
        assert source.text in module.text


@pytest.mark.parametrize(
    ("shift", "fits"), [(3, True), (1_000_000_000, False), (2**31, False)], ids=str
)
def test_what_an_index_divides_must_fit_as_well_as_its_result(shift: int, fits: bool):
    position, size = sympy.Symbol("p0", integer=True, nonnegative=True), 1_600_000_000
    turned = ModularIndexing(position + shift, 1, size)
    assert index_dtype(turned, {position: size}) is (torch.int32 if fits else I64)


@pytest.mark.parametrize(
    "device, language, error", [("mps", "auto", BackendError), ("cuda", "cpp", OptionError)]
)
def test_a_device_that_a_language_is_not_for_is_refused(
    device: str, language: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"(?i)cuda"):
        language_of(torch.device(device), Options(device_codegen=language))
