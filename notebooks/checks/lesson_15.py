"""Checks of lesson 15."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

import minicompile as mc
from minicompile.codegen.plan import WrapperSource
from minicompile.lessons.exercise import Lesson, Run, expects, show
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.lessons.replay import StandIn, launching
from minicompile.plugins.cuda_graphs import replay as cuda_graphs

lesson = Lesson("15")

Function = Callable[..., torch.Tensor]
MEMORY = ("empty_strided_cpu", "empty_large", "reinterpret", "to_layout")


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.relu(x @ w) * 2) @ w


def bordered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w + w[0]) @ w


def turned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return (y + y.t()) @ w


def first_row_added(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return (y + y[0]) @ w


def heads_apart(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).view(8, 2, 4).transpose(0, 1).reshape(16, 4)
    return y @ w[:4, :4]


def summed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sum(-1, keepdim=True) + x


def ordered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sort(x @ w).values * 2


def turned_back(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return (y.t() + y) @ w


def turned_later(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x) @ w / 8
    a = torch.exp(y)
    return a @ (a + y.t())


def turned_first(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x) @ w / 8
    a = torch.exp(y.t())
    return a @ (a + y)


def pair(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def small_block() -> tuple[torch.nn.Module, torch.Tensor]:
    """A block of the lesson model, and an input."""
    torch.manual_seed(0)
    config = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)
    return GPT(config).blocks[0].eval(), torch.randn(2, 16, 32)


def traced(target: Any, *inputs: torch.Tensor) -> Any:
    mc.reset()
    with torch.no_grad():
        return mc.trace(target, *inputs)


def calls_of(wrapper: WrapperSource) -> dict[str, int]:
    """What the wrapper's function calls, by kind; `args.clear()` and checks of strides are left out."""
    [call] = [n for n in ast.parse(wrapper.text).body if isinstance(n, ast.FunctionDef)]
    found = {"kernel": 0, "library": 0, "memory": 0}
    kernels = {kernel.name for kernel in wrapper.kernels}
    for node in ast.walk(call):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in kernels:
            found["kernel"] += 1
        elif name in MEMORY:
            found["memory"] += 1
        elif name.startswith(("torch.", "aten")):
            found["library"] += 1
    return found


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=["chain"],
    hidden=["summed", "heads_apart", "ordered", "block"],
    forbidden=["steps_of", "kind_of", "launches", "summary"],
)
def calls_are_counted(run: Run, count_calls: Callable[[Any], Any]) -> str:
    """Counts in the text of wrappers."""
    functions: dict[str, Any] = {f.__name__: f for f in (chain, summed, heads_apart, ordered)}
    said = ""
    for name in run.cases:
        target, inputs = functions.get(name), pair()
        wrapper = (traced(target, *inputs) if target else traced(*small_block())).wrapper
        expected = calls_of(wrapper)
        counts = count_calls(wrapper)
        got = dict(counts) if isinstance(counts, dict) else counts  # a Counter will do
        run.expect(got, expected, f"count_calls of the wrapper of {name}")
        said = said or ", ".join(f"{n} {kind}" for kind, n in expected.items())
    return said


def apart(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
    """Several heads of one input, each with a product and a kernel of its own."""
    return [torch.relu(x @ w) for w in weights]


@lesson.exercise(
    "ex2",
    points=3,
    level="construct",
    visible=[[8, 8, 8]],
    hidden=[[4, 12], [5, 5, 5, 5, 5]],
    forbidden=["compile", "what_if", "options"],
)
def heads_need_two_calls(
    run: Run, prepare: Callable[..., Any], heads_at_once: Callable[..., Any]
) -> str:
    """Counts launches of the wrapper of the rewritten function, which gets what `prepare` made."""
    said = ""
    for widths in run.cases:
        weights = [torch.randn(16, width) for width in widths]
        x, given = torch.randn(6, 16), f"heads of widths {widths}"
        prepared = prepare(*weights)
        expected = apart(x, *weights)
        tensor = run.seen(prepared)
        run.that(isinstance(tensor, torch.Tensor), given, "one tensor", show(tensor))

        def heads(
            x: torch.Tensor, prepared: torch.Tensor, widths: Sequence[int] = tuple(widths)
        ) -> Any:
            return list(heads_at_once(x, prepared, widths))

        got = heads(x, prepared)
        run.expect(len(got), len(widths), f"{given}: results")
        before, trace = traced(apart, x, *weights), traced(heads, x, prepared)
        compiled = mc.compile(heads)(x, prepared)
        by_number = {str(number): right for number, right in enumerate(expected)}
        run.all_close(list(compiled), by_number, f"{given}: head ", rtol=1e-5, atol=1e-5)
        launched, slow = run.seen(launches_in(trace.wrapper)), launches_in(before.wrapper)
        run.that(launched <= 2, f"{given}: kernels and library calls", "at most 2", launched)
        run.changed(before.wrapper.text, trace.wrapper.text, "the wrapper")
        said = said or f"{slow} -> {launched} launches"
    return said


def launches_in(wrapper: WrapperSource) -> int:
    found = calls_of(wrapper)
    return found["kernel"] + found["library"]


Touched = list[list[str]]


@lesson.exercise(
    "ex3",
    points=3,
    level="implement",
    visible=[[["x", "a"], ["a", "b"], ["b", "y"]]],
    hidden=[
        [["x", "a"], ["a", "b"], ["b"], ["x", "b", "y"]],
        [["a", "c"], [], ["a", "b"], ["b"]],
        [],
    ],
    forbidden=["last_uses", "Liveness", "memory"],
)
def memory_is_freed_after_its_last_use(run: Run, last_use: Callable[[Any], Any]) -> str:
    """On lists of names first; then the plan of a block is made with the answer."""
    for touched in run.cases:
        expected = {name: at for at, names in enumerate(touched) for name in names}
        run.expect(last_use(touched), expected, f"last_use of {touched}")
    block, h = small_block()

    def never(touched: Sequence[Iterable[str]]) -> dict[str, int]:
        return {name: len(touched) - 1 for names in touched for name in names}

    def answer(touched: Sequence[Iterable[str]]) -> Any:
        return last_use([list(names) for names in touched])

    path = "minicompile.scheduling.memory:last_uses"
    with run.replaced(path, never):
        before = traced(block, h)
    with run.replaced(path, answer) as asked, torch.no_grad():
        after = traced(block, h)
        mc.reset()
        run.close(mc.compile(block)(h), block(h), "the model's block", rtol=1e-4, atol=1e-5)
    run.that(run.seen(asked.called), "the memory plan", "a use of last_use", "none")
    run.changed(before.wrapper.text, after.wrapper.text, "the block's wrapper")
    without, found = (t.schedule.memory.peak_bytes for t in (before, after))
    run.expect(found, traced(block, h).schedule.memory.peak_bytes, "peak bytes of the block")
    return f"peak of the block {without} -> {found} bytes"


@lesson.exercise(
    "ex4",
    points=4,
    level="real",
    visible=[(chain, expects(1)), (bordered, expects(1))],
    hidden=[
        (turned, expects(0)),
        (turned_back, expects(0)),
        (turned_later, expects(None)),
        (turned_first, expects(None)),
        (first_row_added, expects(0)),
        (heads_apart, expects(0)),
        (summed, expects(None)),
    ],
    forbidden=["refusal", "in_place", "row_passes", "in_place_decision"],
)
def memory_is_taken_over_where_that_is_right(run: Run, why_not: Callable[..., Any]) -> str:
    """The compiler's own second look at finished kernels is off: a wrong answer is a wrong number."""
    path = "minicompile.scheduling.in_place:refusal"
    block, h = small_block()
    with (
        run.replaced("minicompile.codegen.generate:check_in_place", lambda *_: None),
        run.replaced(path, why_not),
        torch.no_grad(),
    ):
        for function, expected in run.cases:
            x, w = pair()
            decisions = traced(function, x, w).schedule.memory.decisions
            mc.reset()
            run.close(mc.compile(function)(x, w), function(x, w), f"{function.__name__}(x, w)")
            taken = run.seen(sum(d.done for d in decisions))
            if expected is not None:
                run.same(taken, expected, f"buffers in place in {function.__name__}")
        after = traced(block, h)
        mc.reset()
        run.close(mc.compile(block)(h), block(h), "the model's block", rtol=1e-4, atol=1e-5)
    with run.replaced(path, lambda *_: "never"):
        before = traced(block, h)
    run.changed(before.wrapper.text, after.wrapper.text, "the block's wrapper")
    return "buffers of the block are written in place, and no number is wrong"


@lesson.exercise(
    "ex5",
    points=4,
    level="real",
    visible=[("chain", 1)],
    hidden=[("chain", 3), ("bordered", 2)],
    forbidden=["launching", "CUDAGraph", "make_graphed_callables"],
)
def launches_are_replayed(run: Run, record: Callable[..., Any]) -> str:
    """Records a compiled graph's launches; its wrapper must not run again."""
    functions = {f.__name__: f for f in (chain, bordered)}
    said = ""
    for name, replays in run.cases:
        function, inputs = functions[name], list(pair())
        wrapper = launching(traced(function, *inputs))
        runs: list[int] = []
        launched: list[str] = []

        def counted(
            inputs: list[Any],
            do: Callable[..., Any],
            wrapper: Any = wrapper,
            runs: list[int] = runs,
            launched: list[str] = launched,
        ) -> tuple[Any, ...]:
            def noted(launch: Any, *args: Any, **named: Any) -> Any:
                launched.append(getattr(launch, "__name__", "kernel"))
                return do(launch, *args, **named)

            runs.append(1)
            return tuple(wrapper(inputs, noted))

        replay = record(counted, [t.clone() for t in inputs])
        run.expect(len(runs), 1, f"{name}: runs of the wrapper while recording")
        results = []
        for number in range(replays):
            results.append(replay(list(pair(10 + number))))
        run.expect(len(runs), 1, f"{name}: runs of the wrapper after {replays} replays")
        # after all replays: each must have its own memory
        for number, got in enumerate(run.seen(results)):
            given = f"replay {number + 1} of {name}"
            alone = isinstance(got, tuple) and len(got) == 1
            run.that(alone, given, "a tuple of one tensor", show(got))
            run.near(got[0], function(*pair(10 + number)), given, rtol=1e-5, atol=1e-5)
        run.changed("no launch", " ".join(launched), "what was launched")
        said = said or f"{len(launched)} launches recorded, replayed without the wrapper"
    return said


Steps = tuple[list[str], list[str]]


@lesson.exercise(
    "ex6",
    points=4,
    level="real",
    visible=["aw aw aw aw", "aw bw cw dw"],
    hidden=["aw bw cw cv dv av bw", "aw av aw av bv aw", "aw aw bw aw cw cv", "aw aw bv aw"],
    forbidden=["next_step", "cuda_graphs", "CudaGraphs"],
)
def graphs_are_replayed_where_that_is_right(run: Run, what_to_do: Callable[..., Any]) -> str:
    """Two letters are a call: which tensors it gets. Each stays where it is and has new numbers each time."""
    said = ""
    for calls in run.cases:
        found = graphed(run, calls, what_to_do)
        expected = graphed(Run([]), calls, cuda_graphs.next_step)
        did, copied = run.seen(found)
        run.same(did, expected[0], f"calls {calls}: what they did")
        run.same(copied, expected[1], f"calls {calls}: copied")
        run.changed(" ".join(["run"] * len(found[0])), " ".join(found[0]), "what a call does")
        said = said or f"{calls}: {', '.join(found[0])}"
    return said


def graphed(run: Run, calls: str, rule: Callable[..., Any]) -> Steps:
    """What calls did by a rule, and the tensors from which on an input is copied. Checks their results."""
    tensors = {name: torch.empty(8, 8) for name in sorted(set(calls) - {" "})}
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    steps: list[str] = []
    copied: list[str] = []
    said: list[Any] = []

    def noted(now: list[int], before: Any, recorded: Any) -> Any:
        got = rule(list(now), before and list(before), recorded and list(recorded))
        said.append((got, recorded is not None))
        if not is_step(got):
            return "run", []
        step, moved = got
        steps.append(step)
        copied.extend(names[now[place]] for place in moved if step == "record")
        return got

    around = partial(cuda_graphs.around, gpu=StandIn)
    random = torch.Generator().manual_seed(1)
    mc.reset()
    compiled = mc.compile(chain, mode="reduce-overhead", fullgraph=True)
    with (
        run.replaced("minicompile.plugins.cuda_graphs.replay:around", around),
        run.replaced("minicompile.plugins.cuda_graphs.replay:next_step", noted),
        torch.no_grad(),
    ):
        for number, call in enumerate(calls.split(), 1):
            x, w = (tensors[name].normal_(generator=random) for name in call)
            given = f"calls {calls}: result of call {number}"
            result = compiled(x, w)
            for got, again in run.seen(said[number - 1 :]):
                asked = f"calls {calls}: call {number}"
                run.that(is_step(got), asked, "a step and a list", show(got))
                possible = ("run", "record", "replay")[: 2 + again]
                run.that(got[0] in possible, asked, f"one of {', '.join(possible)}", show(got[0]))
            run.close(result, chain(x, w), given, rtol=1e-5, atol=1e-5)
    return steps, copied


def is_step(answer: Any) -> bool:
    return isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], list)
