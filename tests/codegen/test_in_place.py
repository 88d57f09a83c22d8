"""In-place reuse in real kernels: C++ and Triton, and wrong decisions that must not get through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from minicompile.codegen.generate import by_position, generate_kernels, make_plans
from minicompile.codegen.wrapper import generate_wrapper
from minicompile.debug.gpu_assembly import cross_compile
from minicompile.errors import VerifyError
from minicompile.lowering.ir import LoopGraph
from minicompile.options import Options
from minicompile.runtime.load import start_loading
from minicompile.scheduling import in_place, memory
from minicompile.scheduling.nodes import FusedSchedulerNode, Schedule
from minicompile.scheduling.schedule import schedule
from tests.codegen.races import shared_writes
from tests.fuzz.loop_checks import compare
from tests.fuzz.loops import generate
from tests.scheduling.building import GraphBuilder, T, check_wrapper

CPP = Options(verify=True)
TRITON = Options(verify=True, device_codegen="triton")


def build(result: Schedule, options: Options) -> Callable[[list[Any]], Any]:
    plans = make_plans(result, options)
    modules = generate_kernels(plans)
    assert not [line for module in modules for line in shared_writes(module.text)]
    wrapper = generate_wrapper(result, by_position(plans, modules))
    return start_loading(modules, options)(wrapper, result.graph.constants)


def run(graph: LoopGraph, options: Options) -> Schedule:
    result = schedule(graph, options)
    call = build(result, options)
    check_wrapper(call, graph)
    check_wrapper(call, graph, dict.fromkeys(graph.size_hints, 4), seed=1)
    return result


def twice(b: GraphBuilder, x: T) -> T:
    return b.pointwise(lambda ops, u: ops.add(u, u), x)


def product(b: GraphBuilder, x: T) -> T:
    """Something that ends a kernel: a library call whose result is ours."""
    return b.extern(torch.ops.aten.mm.default, (x, b.input((x.size[1], x.size[1]))), x.size)


def done(result: Schedule) -> list[tuple[str, str]]:
    return [(d.new, d.old) for d in result.memory.decisions if d.done]


Graph = Callable[[GraphBuilder], LoopGraph]


def softmax(b: GraphBuilder) -> LoopGraph:
    x = product(b, b.input((8, 24)))
    top = b.reduce(x, (1,), "max", keepdim=True)
    shifted = b.pointwise(lambda ops, u, v: ops.exp(ops.sub(u, v)), x, top)
    total = b.reduce(shifted, (1,), "sum", keepdim=True)
    return b.finish(b.pointwise(lambda ops, u, v: ops.truediv(u, v), shifted, total))


def read_by_a_helper(b: GraphBuilder) -> LoopGraph:
    x = product(b, b.input((8, 24)))
    top = b.reduce(x, (1,), "max")
    return b.finish(twice(b, x), top)


def two_outputs(b: GraphBuilder) -> LoopGraph:
    x = product(b, b.input((8, 24)))
    return b.finish(twice(b, x), b.pointwise(lambda ops, u: ops.neg(u), x))


def turned(b: GraphBuilder) -> LoopGraph:
    x = product(b, b.input((16, 16)))
    return b.finish(b.pointwise(lambda ops, u, v: ops.sub(u, v), x, x.t()))


def gathered(b: GraphBuilder) -> LoopGraph:
    rows = b.input((6,), torch.int64)
    return b.finish(b.gather(product(b, b.input((6, 8))), rows))


def masked(b: GraphBuilder) -> LoopGraph:
    return b.finish(b.keep_first(product(b, b.input((6, 8))), 0))


def read_again(b: GraphBuilder) -> LoopGraph:
    x = product(b, b.input((8, 24)))
    total = b.reduce(x, (1,), "sum", keepdim=True)
    late = b.reduce(b.pointwise(lambda ops, u, v: ops.mul(u, v), x, total), (1,), "max")
    return b.finish(twice(b, x), late)


languages = pytest.mark.parametrize("options", [CPP, TRITON], ids=["cpp", "triton"])


@languages
@pytest.mark.parametrize("graph", [softmax, read_by_a_helper, two_outputs])
def test_a_kernel_writes_over_its_dead_operand(graph: Graph, options: Options) -> None:
    result = run(graph(GraphBuilder()), options)
    assert len(result.kernels) == len(done(result)) == 1


REFUSED: dict[Graph, str] = {
    turned: "is read at",
    gathered: "only at run time",
    masked: "under a mask",
    read_again: "read again by a later loop",
}


@languages
@pytest.mark.parametrize("graph", REFUSED)
def test_what_is_still_to_be_read_is_not_overwritten(graph: Graph, options: Options) -> None:
    result = run(graph(GraphBuilder()), options)
    reasons = "\n".join(d.reason for d in result.memory.decisions if not d.done)
    assert not done(result) and REFUSED[graph] in reasons


def test_no_warp_of_a_gpu_overwrites_what_another_has_still_to_load() -> None:
    pytest.importorskip("triton")
    b = GraphBuilder()
    x = product(b, b.input((64, 256)))
    result = schedule(b.finish(twice(b, x), b.reduce(x, (1,), "sum")), TRITON)
    assert done(result)
    (module,) = generate_kernels(make_plans(result, TRITON))
    (kernel,) = module.kernels
    lines = [line.text.strip() for line in kernel.lines]
    store = next(i for i, text in enumerate(lines) if text.startswith("tl.store(in_out_ptr0"))
    assert lines[store - 1] == "tl.debug_barrier()"
    ptx = cross_compile(kernel).levels["ptx"]
    load, barrier, stored = (
        ptx.index("ld.global"), ptx.index("bar.sync"), ptx.index("st.global")
    )  # fmt: skip
    assert load < barrier < stored


def test_a_kernel_plan_with_a_wrong_decision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wrong decision that the schedule's own check would have stopped, with that check asleep."""

    for make in (turned, read_again, gathered):
        graph = make(GraphBuilder())
        assert not done(schedule(graph, CPP))
        with monkeypatch.context() as asleep:
            asleep.setattr(in_place, "refusal", lambda node, old, new: None)
            with pytest.raises(VerifyError, match="in place of"):  # verify has the real rule
                schedule(graph, CPP)
            result = schedule(graph, replace(CPP, verify=False))
        assert done(result)
        with pytest.raises(VerifyError, match="still to be read"):
            make_plans(result, CPP)


@languages
def test_random_graphs_in_real_kernels(options: Options) -> None:
    seen: Counter[bool] = Counter()
    for seed in range(30 if options is CPP else 18):
        chosen = replace(options, fusion=seed % 3 == 0)
        program = generate(seed + 7000, 6 + seed % 12)
        result = schedule(program.build(), chosen)
        assert compare(program, build(result, chosen)) is None
        seen.update(d.done for d in result.memory.decisions)
    assert seen[True] > 5 and seen[False] > 0


@pytest.mark.long
def test_every_decision_of_random_graphs_holds_in_the_kernel_plans() -> None:
    taken = 0
    for seed in range(300):
        graph = generate(seed + 9000, 6 + seed % 14).build()
        result = schedule(graph, replace(CPP, fusion=seed % 2 == 0))
        make_plans(result, CPP)
        taken += sum(d.done for d in result.memory.decisions)
        for step, node in enumerate(result.nodes):
            for new, old in result.memory.in_place(step).items():
                assert isinstance(node, FusedSchedulerNode)
                assert memory.Liveness(result.graph, result.nodes).last[old] == step, (new, old)
    assert taken > 50
