"""CUDA graphs, for `mode="reduce-overhead"`: what a call launches is captured; later calls replay it at once.

    warm up   the first call with given sizes runs as it is: libraries set themselves up, kernels load
    record    the second one runs too, and then once more under capture, which launches nothing
    replay    later ones, unless something doesn't lie where the graph expects it

A graph reads and writes fixed addresses; nobody is to notice. So:

- An input that moved since the call before is copied into memory of the graph from now on, and back if the
  graph writes to it. The others (parameters, buffers) must lie where they lay.
- Results lie in the graph's memory, and are handed out as copies.
- What the forward saves for the backward is copied neither out nor in: while it is alive, as with two
  forwards before a backward, or lies elsewhere, a call runs without the graph.
- Each choice of sizes, numbers and stream has a recording of its own, at most MOST_RECORDINGS.

torch registers its generator with a graph, so random numbers go on. The graphs of a stream take their memory
from one pool: what only lives inside of one serves the next; results don't, since recordings hold theirs.
The real compiler, where the next run overwrites results: torch/_inductor/cudagraph_trees.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from minicompile import compat
from minicompile.aot.result import BoxedCallable
from minicompile.compat import triton_api
from minicompile.dynamo.result import Capture
from minicompile.lowering.ir import InputBuffer, LoopGraph, View
from minicompile.ops.display import count_text
from minicompile.options import Options
from minicompile.pipeline import Compile, Program, around_compile
from minicompile.runtime.load import to_layout
from minicompile.scheduling.nodes import Schedule

Step = Literal["run", "record", "replay"]

MODES = ("reduce-overhead", "max-autotune")
MOST_RECORDINGS = 16
"""Of a graph; and how often one is made again because inputs moved."""

LOOKS_AT_DATA = {
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe
}  # fmt: skip
"""Operators after which Python goes on with what the GPU computed, or which say so."""

LOCK = threading.RLock()
"""Nobody else copies inputs between ours and the replay."""


class CudaCapture:
    """What recordings need of CUDA."""

    kind = "cuda"
    pools: ClassVar[dict[Any, torch.cuda.CUDAGraph]] = {}
    """For each device and stream a graph that keeps their pool alive, as it must be for another one."""

    def __init__(self, device: torch.device) -> None:
        self.index = device.index or 0
        self.device, self.stream = triton_api.cuda_launch_state()

    def place(self) -> Any:
        """The device and stream that a call's kernels go to; None where nothing can be recorded now."""
        if self.device() != self.index or torch.cuda.is_current_stream_capturing():
            return None
        return self.index, self.stream(self.index)

    def capture(
        self, call: BoxedCallable, inputs: list[Any], place: Any
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        """A function that runs a call's kernels, and the results, which are there once it has run."""
        if place not in self.pools:
            keeper = torch.cuda.CUDAGraph()
            with torch.cuda.graph(keeper, capture_error_mode="thread_local"):
                torch.zeros(1, device="cuda")
            self.pools[place] = keeper
        graph, pool = torch.cuda.CUDAGraph(), self.pools[place].pool()
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            results = call(inputs)
        return graph.replay, results


def refusal(schedule: Schedule, kind: str) -> str:
    """Why a graph's calls can't be captured on devices of that kind; "" if they can."""
    used = {d.buffer for node in schedule.nodes for d in (*node.reads, *node.writes)}
    layouts = {n: b.layout for n, b in schedule.graph.buffers.items() if n in used}
    for name, layout in layouts.items():
        if layout.device.type != kind:
            return f"{name} is on the {layout.device.type.upper()}"
    if len({layout.device for layout in layouts.values()}) != 1:
        return "it is on several GPUs" if layouts else "it launches nothing"
    for kernel in schedule.graph.externs:
        for tag in LOOKS_AT_DATA.intersection(kernel.op.tags):
            return f"{kernel.op} has the tag {tag.name}"
    return ""


def saved_in_graph(forward: Schedule, first: int) -> set[int]:
    """Which of the forward's results from `first` on, counted from there, lie in its own memory."""
    given = {buffer.name for buffer in forward.graph.given}
    saved = enumerate(forward.graph.outputs[first:])
    return {i for i, value in saved if isinstance(value, View) and value.buffer not in given}


def next_step(
    now: list[int], before: list[int] | None, recorded: list[int] | None
) -> tuple[Step, list[int]]:
    """What a call does, and the places in `now` of inputs that moved, which are copied from here on. By the
    addresses of those that are not copied yet: now, at the call before (None: there was none), and in the
    graph (None: there is none)."""
    if now == recorded:
        return "replay", []
    if before is None:
        return "run", []
    return "record", [i for i, (new, old) in enumerate(zip(now, before, strict=True)) if new != old]


@around_compile("cuda_graphs")
def captured(capture: Capture, options: Options, compile: Compile) -> Program:
    """Compile, and put a CUDA graph around each call that can have one."""
    program = compile(capture, options)
    if options.mode in MODES and program.graphs:
        schedules = [graph.stages.schedule for graph in program.graphs]
        first_saved = len(program.metadata.result_requires_grad)
        program.calls = around(program.calls, schedules, first_saved, capture.watch.tell)
    return program


def around(
    calls: Sequence[BoxedCallable],
    schedules: Sequence[Schedule],
    first_saved: int,
    tell: Callable[..., None],
    gpu: type[CudaCapture] = CudaCapture,
) -> list[BoxedCallable]:
    """The calls of a forward and its backward, captured where that can be; `tell` hears why not. The former's
    results from `first_saved` on are the backward's first inputs."""
    found: list[BoxedCallable] = []
    saved = saved_in_graph(schedules[0], first_saved) if len(schedules) > 1 else set()
    nothing: set[int] = set()
    kept = [(nothing, {first_saved + i for i in saved}), (saved, nothing)]
    for call, schedule, (inputs, results) in zip(calls, schedules, kept):
        say: Callable[[str], None] = partial(tell, "cudagraphs", graph=schedule.graph.name)
        why = refusal(schedule, gpu.kind)
        if found and not why and not isinstance(found[0], CudaGraphs):
            why = "the forward has none, so what it saves lies anywhere"
        if why:
            say(f"no CUDA graph: {why}")
            found.append(call)
            continue
        say("a CUDA graph is captured when it is called again")
        layouts = (buffer.layout for buffer in schedule.graph.buffers.values())
        device = next(layout.device for layout in layouts if layout.device.type == gpu.kind)
        found.append(CudaGraphs(call, schedule.graph, inputs, results, say, gpu(device)))
    return found


@dataclass
class Sizes:
    """What is known for one choice of sizes, numbers and stream."""

    fixed: list[int]
    """The tensors among the inputs that have not moved yet; the others are copied."""
    addresses: list[int] | None = None
    """Where those were at the call before."""
    recording: Recording | None = None
    tries: int = MOST_RECORDINGS


class CudaGraphs:
    """A wrapper's call, replayed from a CUDA graph where that gives the same."""

    def __init__(
        self,
        call: BoxedCallable,
        graph: LoopGraph,
        kept_inputs: set[int],
        kept_results: set[int],
        say: Callable[[str], None],
        gpu: CudaCapture,
    ) -> None:
        """`kept_inputs` and `kept_results` lie in the memory of the forward's graph, and aren't copied."""
        self.call, self.say, self.gpu = call, say, gpu
        self.owned = getattr(call, "owned", False)
        self.kept_inputs, self.kept_results = kept_inputs, kept_results
        given = list(enumerate(graph.inputs))
        self.tensors = [i for i, value in given if isinstance(value, InputBuffer)]
        self.numbers = [i for i, value in given if not isinstance(value, InputBuffer)]
        self.written = set(graph.written_back.values())
        self.dynamic = bool(graph.size_hints)
        self.known: dict[Any, Sizes] = {}

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        with LOCK:
            place = self.gpu.place()
            sizes = self.sizes(inputs, place) if place is not None else None
            if sizes is None:
                return self.call(inputs)
            now = [inputs[i].data_ptr() for i in sizes.fixed]
            before, sizes.addresses = sizes.addresses, now
            recording = sizes.recording
            recorded = None if recording is None else recording.addresses
            step, moved = next_step(now, before, recorded)
            if step == "run":
                return self.call(inputs)
            if recording is None or step == "record":
                return self.record(inputs, sizes, moved, place)
            if recording.held():
                return self.call(inputs)
            given = list(inputs)
            inputs.clear()
            return recording.run(given, self.written)

    def sizes(self, inputs: Sequence[Any], place: Any) -> Sizes | None:
        """What is known for such inputs; None for one choice too many."""
        key: list[Any] = [place, *(str(inputs[i]) for i in self.numbers)]  # -0.0 is no 0.0
        if self.dynamic:
            key += [(inputs[i].shape, inputs[i].stride()) for i in self.tensors]
        found = self.known.get(tuple(key))
        if found is None and len(self.known) < MOST_RECORDINGS:
            found = self.known[tuple(key)] = Sizes(self.tensors)
            if len(self.known) == MOST_RECORDINGS:
                self.say(f"{MOST_RECORDINGS} choices of sizes: others run without a CUDA graph")
        return found

    def record(
        self, inputs: list[Any], sizes: Sizes, places: list[int], place: Any
    ) -> Sequence[Any]:
        """Run without a graph; then capture one that copies the inputs at these places of `fixed`, too."""
        moved = {sizes.fixed[i] for i in places}
        if moved & self.kept_inputs or not sizes.tries:
            return self.call(inputs)
        sizes.fixed = [i for i in sizes.fixed if i not in moved]
        sizes.addresses = [inputs[i].data_ptr() for i in sizes.fixed]
        sizes.tries -= 1
        given = list(inputs)
        results = self.call(inputs)
        sizes.recording = None  # its memory serves the next
        try:
            moving = set(self.tensors).difference(sizes.fixed)
            made = Recording(self.call, given, moving, self.kept_results, self.gpu, place)
            made.addresses = sizes.addresses
            sizes.recording = made
            self.say(f"captured; {len(moving)} of {count_text(len(given), 'input')} copied")
        except Exception as error:  # whatever capturing raises: the results are there
            sizes.tries = 0
            self.say(f"no CUDA graph: {str(error).splitlines()[0]}")
        return results


class Recording:
    """A captured call: what it reads and where, its results, and who holds those that are kept."""

    addresses: list[int]
    """Of the inputs but for those that are copied."""

    def __init__(
        self, call: BoxedCallable, given: Sequence[Any], moving: set[int], kept: set[int],
        gpu: CudaCapture, place: Any
    ) -> None:  # fmt: skip
        """`kept`: results that are handed out as they are."""
        self.kept = kept
        self.copies = {i: copy_of(given[i]) for i in moving}
        inputs = [self.copies.get(i, value) for i, value in enumerate(given)]
        owner = {compat.storage_id(v): i for i, v in enumerate(inputs) if isinstance(v, Tensor)}
        itself = {id(v): i for i, v in enumerate(inputs)}
        self.replay, results = gpu.capture(call, list(inputs), place)
        self.from_inputs: dict[int, tuple[int, Any]] = {}
        """Results that are inputs or views of them: the input, and the view's size, stride and offset."""
        for number, value in enumerate(results):
            if not isinstance(value, Tensor):
                continue
            i = itself.get(id(value), owner.get(compat.storage_id(value)))
            if i is not None:
                offset = value.storage_offset() - inputs[i].storage_offset()
                view = None if value is inputs[i] else (value.shape, value.stride(), offset)
                self.from_inputs[number] = i, view
        self.results = [None if n in self.from_inputs else v for n, v in enumerate(results)]
        own = ((n, v) for n, v in enumerate(self.results) if isinstance(v, Tensor))
        self.storages = {n: v.untyped_storage() for n, v in own if n in kept}
        self.pointers = {n: compat.storage_pointer(s) for n, s in self.storages.items()}
        self.uses = {n: self.uses_of(n) for n in self.storages}

    def uses_of(self, number: int) -> tuple[int, int, int]:
        """How many refer to a result's memory, in C++ (0: unknown) and in Python; and where it is."""
        storage = self.storages[number]
        references = sys.getrefcount(storage)
        return compat.storage_uses(self.pointers[number]), references, storage.data_ptr()

    def held(self) -> bool:
        """Does somebody hold a kept result of the last run still?"""
        return any(not old[0] or self.uses_of(n) != old for n, old in self.uses.items())

    def run(self, given: Sequence[Any], written: set[int]) -> list[Any]:
        """Replay with these inputs, of which those in `written` change."""
        for i, copy in self.copies.items():
            copy.copy_(given[i])
        self.replay()
        for i in written & self.copies.keys():
            given[i].copy_(self.copies[i])
        made: dict[Any, Any] = {}
        """One object stays one, but for what the backward keeps."""
        found: list[Any] = []
        for number, value in enumerate(self.results):
            key = id(value), number in self.kept
            if isinstance(value, Tensor) and key not in made:
                made[key] = value.detach() if number in self.kept else copy_of(value)
            found.append(made.get(key, value))
        for number, (i, view) in self.from_inputs.items():
            found[number] = given[i]
            if view is not None:
                size, stride, offset = view
                offset += given[i].storage_offset()
                found[number] = given[i].as_strided(size, stride, offset)
        return found


def copy_of(tensor: Tensor) -> Tensor:
    """In memory of its own, laid out alike."""
    return to_layout(tensor, tensor.shape, tensor.stride())
