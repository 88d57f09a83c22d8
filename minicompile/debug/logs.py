"""Log channels: what the compiler says while it compiles.

    MINICOMPILE_LOGS="graph_breaks,+dynamo" python script.py
    with mc.logs("fusion", "output_code", file="fusion.log"): ...

`+name` says more, and of dynamo, aot and inductor it switches on every channel of that stage; `-name` takes a
channel out again; `all` is every channel. A channel is a function from an event (ops/events.py) to text;
`log_channel` adds one. Named in the environment, some write files too, as documented (debug/dump.py).

Every line begins with the compilation and its channel, `[0/1] fusion:`. Lines go to a stream, not through
Python's `logging`: levels and handlers that a program sets for itself would hide or double them. The real
compiler: torch/_logging/_registrations.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TextIO

from minicompile.api import option_check
from minicompile.debug import stages
from minicompile.debug.overview import saving
from minicompile.dynamo.result import failure_lines
from minicompile.errors import OptionError
from minicompile.ops.display import count_text
from minicompile.ops.events import CALLED, KINDS, Event, observer
from minicompile.ops.graph import Listing
from minicompile.ops.registry import Registry

Text = Callable[[Event, bool], str]
"""(event, verbose) -> lines to print; "" for none."""


class Channel(NamedTuple):
    """What is told (`doc`), the events it listens to, its text, and the stage that it is a part of."""

    doc: str
    kinds: tuple[str, ...]
    text: Text
    stage: str = ""


channels: Registry[Channel] = Registry("log_channel", "name -> channel of MINICOMPILE_LOGS")


def log_channel(name: str, doc: str, *kinds: str, stage: str = "") -> Callable[[Text], Text]:
    """Decorator for the text of a channel. Raises OptionError for kinds of events that don't exist."""
    if unknown := set(kinds).difference(KINDS):
        raise OptionError(f"channel {name}: no event {min(unknown)!r}; known: {', '.join(KINDS)}")

    def add(text: Text) -> Text:
        channels(name)(Channel(doc, kinds, text, stage))
        return text

    return add


def levels(*names: str) -> dict[str, bool]:
    """The channels that names switch on, and whether they are verbose. Raises OptionError."""
    on: dict[str, bool] = {}
    for given in filter(None, map(str.strip, ",".join(names).split(","))):
        sign, name = (given[0], given[1:]) if given[0] in "+-" else ("", given)
        if name not in (*channels, "all"):
            known = ", ".join([*sorted(channels), "all"])
            raise OptionError(f"no log channel {name!r} (MINICOMPILE_LOGS); known: {known}")
        for key, channel in channels.items():
            if name in (key, "all") or (sign and name == channel.stage):
                on[key] = sign == "+" or on.get(key, False)
                if sign == "-":
                    del on[key]
    return on


class Log:
    """The observer behind all channels. `open`: the channels and the stream of each `logs` block."""

    open: tuple[tuple[dict[str, bool], TextIO | None], ...] = ()

    def __call__(self, event: Event) -> None:
        for on, file in ((levels(event.of.options.logs), None), *self.open):
            stream = file or sys.stderr
            parts = [line for name, more in on.items() for line in lines(name, event, more)]
            if parts:  # at once, whatever other threads write
                stream.write("\n".join([*parts, ""]))
                stream.flush()


def lines(name: str, event: Event, verbose: bool) -> Iterator[str]:
    """What a channel says about an event."""
    channel = channels.get(name)
    if channel is not None and event.kind in channel.kinds:
        for line in channel.text(event, verbose).splitlines():
            yield f"{event.of} {name}: {line}".rstrip()


log = Log()
observer("logs")(log)
option_check("logs")(lambda options: levels(options.logs))


@contextlib.contextmanager
def logs(*names: str, file: str | Path | TextIO | None = None) -> Iterator[None]:
    """Inside the block these channels are on as well: `mc.logs("fusion", "+dynamo")`.

    file  a path, written anew, or a stream; None: stderr

    Raises OptionError that lists the channels if there is no such channel.
    """
    on = levels(*names)
    with contextlib.ExitStack() as stack:
        if isinstance(file, str | Path):
            file = stack.enter_context(Path(file).open("w", encoding="utf-8"))
        block = (on, file)
        log.open += (block,)
        try:
            yield
        finally:
            log.open = tuple(other for other in log.open if other is not block)


# -- the channels


def dynamo(event: Event, verbose: bool) -> str:
    name, made = event.of.name, event.subject
    if event.kind == "start":
        return f"compiling {name}" + (", because no version fits" if made else "")
    if made is None:
        return f"{name} gets no version: it runs in eager, was only traced, or raised"
    if event.kind == "done":
        return f"{name} is compiled, {count_text(len(made.guards), 'guard')}"
    told = f"captured {operations(made.graph)}, {len(made.inputs)} inputs"
    return "\n".join([told, *(f"  inlined {function}" for function in made.inlined if verbose)])


def operations(graph: Listing) -> str:
    """How many, and from which lines of the user's."""
    origins = stages.graph_origins(graph)
    return f"{count_text(graph.op_count, 'operation')}{stages.places(origins)}"


def aot(event: Event, verbose: bool) -> str:
    made, told = event.subject, []
    for graph in filter(None, (made.forward, made.backward)):
        title = f"model__{event.of.frame}_{graph.name}_{event.of.version}"
        told += [f"[AOT] Compiling {graph.name} graph: {title}", f"  {operations(graph)}"]
    told += [f"  {saving(made.partition)}"] if made.partition is not None else []
    return "\n".join([*told, str(made.metadata)] if verbose else told)


def graph_passes(event: Event, stage: str, verbose: bool) -> str:
    """What passes made of graphs: both versions where they differ; verbose: every pass."""
    told, records = [], [r for r in event.subject.passes if r.name.startswith(f"{stage}.")]
    for graph, group in groupby(records, lambda record: getattr(record.before, "name", "")):
        mine = list(group)
        changed = [record for record in mine if record.changed]
        told += [f"{graph}:", *map(str, mine if verbose else changed)]
        if changed:
            told += ["before:", str(mine[0].before), "after:", str(mine[-1].after)]
    return "\n".join(told) or f"no {stage} pass ran"


def inductor(event: Event, verbose: bool) -> str:
    made = event.subject
    told = [f"{event.graph}: {line}" for line in str(made).splitlines()]
    told += [f"  kernel {k.name}{stages.places(k.origins)}" for k in made.kernels]
    for call in made.loops.externs:
        told.append(f"  call {call.op} ({call.reason}){stages.places(call.origins)}")
    return "\n".join([*told, *map(str, made.plans)] if verbose else told)


def schedule(event: Event, verbose: bool) -> str:
    memory, nodes = event.subject.memory, enumerate(event.subject.nodes)
    steps = [f"step {step}: {node}{stages.places(node.origins)}" for step, node in nodes]
    return "\n".join([f"{event.graph}:", *steps, *([str(memory)] if verbose else memory.facts())])


def perf(event: Event, verbose: bool) -> str:
    what = f"{event.seconds:8.3f} s  +{event.took:.3f} s  {event.graph} {event.kind}"
    if event.kind != "building":
        return what
    cached = sum(module.cached or 0 for module in event.subject)
    return f"{what}: {cached} files were in the cache"


for _stage, _name, _kinds, _doc, _text in (
    ("dynamo", "dynamo", "start capture done", "what is captured", dynamo),
    ("dynamo", "graph_breaks", "break", "where and why Python runs itself",
     lambda e, more: f"{e.subject}\n  {e.subject.explanation if more else ''}".rstrip()),
    ("dynamo", "graph_code", "capture", "the captured graph", lambda e, _: str(e.subject.graph)),
    ("dynamo", "bytecode", "capture", "instructions, and what they made", lambda e, _: e.subject.flow),
    ("dynamo", "recompiles", "start", "the guards that failed",
     lambda e, _: "\n".join(["no version fits", *failure_lines(e.subject)] if e.subject else [])),
    ("dynamo", "guards", "done", "what must hold for a version to be used",
     lambda e, _: "\n".join(map(str, (*e.subject.guards, *e.subject.size_lines) if e.subject else ()))),
    ("dynamo", "pre_grad_graphs", "aot", "before and after pre-grad passes",
     lambda e, more: graph_passes(e, "pre_grad", more)),
    ("aot", "aot", "aot", "which graphs are compiled", aot),
    ("aot", "aot_graphs", "aot", "forward and backward after partitioning", lambda e, _: "\n".join(
        str(stages.partitioned(e.subject, name) or "") for name in ("forward", "backward"))),
    ("aot", "aot_joint_graph", "aot", "forward and backward in one",
     lambda e, _: str(e.subject.joint or "no joint graph: nothing requires grad")),
    ("aot", "post_grad_graphs", "aot", "before and after post-grad passes",
     lambda e, more: graph_passes(e, "post_grad", more)),
    ("inductor", "inductor", "graph", "buffers, kernels, bytes", inductor),
    ("inductor", "ir_pre_fusion", "schedule", "loops", lambda e, _: stages.pre_fusion(e.subject)),
    ("inductor", "fusion", "schedule", "each question of the scheduler, and why",
     lambda e, more: "\n".join(stages.decision_text(d, more) for d in e.subject.decisions)),
    ("inductor", "schedule", "schedule", "kernels in order, memory", schedule),
    ("inductor", "ir_post_fusion", "schedule", "kernels", lambda e, _: stages.post_fusion(e.subject)),
    ("inductor", "output_code", "graph", "all code", lambda e, _: stages.output_code(e.subject)),
    ("inductor", "perf", " ".join(k for k in KINDS[1:] if k not in CALLED), "what each step took", perf),
    ("inductor", "cudagraphs", "cudagraphs", "CUDA graphs that are asked for, and why there are none",
     lambda e, _: f"{e.graph}: {e.subject}"),
    ("inductor", "autotuning", "autotuning", "tiles that max-autotune measured, and what they gain",
     lambda e, more: e.subject.told(more) if e.subject.done else ""),
):  # fmt: skip
    log_channel(_name, _doc, *_kinds.split(), stage=_stage)(_text)
