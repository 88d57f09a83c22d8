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
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from minicompile.debug import stages
from minicompile.dynamo.result import recompiles_text
from minicompile.errors import OptionError
from minicompile.ops.display import count_text
from minicompile.ops.events import KINDS, Event, observer
from minicompile.ops.registry import Registry
from minicompile.options import in_colour, moves_cursor
from minicompile.pipeline_result import saving

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
        asked = event.of.options.logs
        streams: dict[Any, dict[str, bool]] = {}
        for on, file in (*self.open, *([(levels(asked), None)] if asked else [])):
            told = streams.setdefault(file or sys.stderr, {})  # a stream has each line once
            told.update({name: more or told.get(name, False) for name, more in on.items()})
        for stream, on in streams.items():
            parts = [told for name, more in on.items() for told in lines(name, event, more, stream)]
            if parts:  # at once, whatever other threads write; over a line of progress
                stream.write("\r\x1b[K" * moves_cursor(stream) + "\n".join([*parts, ""]))
                stream.flush()


def lines(name: str, event: Event, verbose: bool, stream: Any) -> Iterator[str]:
    """What a channel says about an event."""
    if (channel := channels.get(name)) is None or event.kind not in channel.kinds:
        return
    try:
        text = channel.text(event, verbose)
    except Exception as error:
        warnings.warn(f"log channel {name}: {type(error).__name__}: {error}", stacklevel=2)
        return
    head = f"{event.of} {name}:"
    head = f"\x1b[36m{head}\x1b[0m" if in_colour(stream) else head
    yield from (f"{head} {line}".rstrip() for line in text.splitlines())


log = Log()
observer("logs")(log)


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


def graph_passes(event: Event, stage: str, verbose: bool) -> str:
    """What passes made of graphs: both versions where they differ; verbose: every pass."""
    parts, records = [], [r for r in event.subject.passes if r.name.startswith(f"{stage}.")]
    for graph in dict.fromkeys(getattr(record.before, "name", "") for record in records):
        mine = [r for r in records if getattr(r.before, "name", "") == graph]
        changed = [r for r in mine if r.changed]
        parts.append(f"{graph}: {len(changed)} of {len(mine)} passes changed something")
        parts += map(str, mine if verbose else changed)
        if changed:
            parts += ["before:", str(mine[0].before), "after:", str(mine[-1].after)]
    return "\n".join(parts) or f"no {stage} pass ran"


@log_channel("dynamo", "what is captured", "start", "capture", "done", stage="dynamo")
def dynamo(event: Event, verbose: bool) -> str:
    name, made = event.of.name, event.subject
    if event.kind == "start":
        return f"compiling {name}" + (", because no version fits" if made else "")
    if made is None:
        return f"{name} gets no version: it runs in eager, was only traced, or raised"
    if event.kind == "done":
        return f"{name} is compiled, {count_text(len(made.guards), 'guard')}"
    told = f"captured {count_text(made.graph.op_count, 'operation')}, {len(made.inputs)} inputs"
    told += stages.places(stages.graph_origins(made.graph))
    return "\n".join([told, *(f"  inlined {function}" for function in made.inlined if verbose)])


@log_channel("aot", "which graphs are compiled", "aot", stage="aot")
def aot(event: Event, verbose: bool) -> str:
    made, told = event.subject, []
    for name in ("forward", "backward"):
        if (graph := getattr(made, name)) is not None:
            title = f"model__{event.of.frame}_{name}_{event.of.version}"
            told.append(f"[AOT] Compiling {name} graph: {title}")
            lines = stages.places(stages.graph_origins(graph))
            told.append(f"  {count_text(graph.op_count, 'operation')}{lines}")
    told += [f"  {saving(made.partition)}"] if made.partition is not None else []
    return "\n".join([*told, str(made.metadata)] if verbose else told)


@log_channel("inductor", "buffers, kernels, bytes", "graph", stage="inductor")
def inductor(event: Event, verbose: bool) -> str:
    made = event.subject
    told = [f"{event.graph}: {line}" for line in str(made).splitlines()]
    told += [f"  kernel {k.name}{stages.places(k.origins)}" for k in made.kernels]
    for call in made.loops.externs:
        told.append(f"  call {call.op} ({call.reason}){stages.places(call.origins)}")
    return "\n".join([*told, *map(str, made.plans)] if verbose else told)


@log_channel("schedule", "kernels in order, memory", "schedule", stage="inductor")
def schedule(event: Event, verbose: bool) -> str:
    memory, told = event.subject.memory, [f"{event.graph}:"]
    for step, node in enumerate(event.subject.nodes):
        told.append(f"step {step}: {node}{stages.places(node.origins)}")
    return "\n".join([*told, str(memory)] if verbose else [*told, *filter(None, memory.facts())])


@log_channel("perf", "what each step took", *KINDS[1:], stage="inductor")
def perf(event: Event, verbose: bool) -> str:
    what = f"{event.seconds:8.3f} s  +{event.took:.3f} s  {event.graph} {event.kind}"
    if event.kind != "building":
        return what
    files = sum(len(module.units) or 1 for module in event.subject)
    cached = sum(module.cached or 0 for module in event.subject)
    return f"{what}: {count_text(files, 'file')}, {cached} of them in the cache"


@log_channel("cudagraphs", "CUDA graphs that are asked for", "aot", stage="inductor")
def cudagraphs(event: Event, verbose: bool) -> str:
    if (mode := event.of.options.mode) not in ("reduce-overhead", "max-autotune"):
        return ""
    return (
        f"mode {mode!r} asks for CUDA graphs: there are none yet, kernels are launched one by one"
    )


for _name, _stage, _kind, _doc, _text in (
    ("graph_breaks", "dynamo", "break", "where and why Python runs itself",
     lambda e, more: f"{e.subject}\n  {e.subject.explanation if more else ''}".rstrip()),
    ("graph_code", "dynamo", "capture", "the captured graph", lambda e, _: str(e.subject.graph)),
    ("bytecode", "dynamo", "capture", "instructions, and what they made",
     lambda e, _: e.subject.flow),
    ("recompiles", "dynamo", "start", "the guards that failed",
     lambda e, _: "\n".join(recompiles_text(e.subject))),
    ("guards", "dynamo", "done", "what must hold for a version to be used",
     lambda e, _: "\n".join([*map(str, e.subject.guards), *e.subject.size_lines] if e.subject else [])),
    ("pre_grad_graphs", "dynamo", "aot", "before and after pre-grad passes",
     lambda e, more: graph_passes(e, "pre_grad", more)),
    ("aot_graphs", "aot", "aot", "forward and backward after partitioning",
     lambda e, _: "\n".join(
         str(stages.partitioned(e.subject, name) or "") for name in ("forward", "backward"))),
    ("aot_joint_graph", "aot", "aot", "forward and backward in one",
     lambda e, _: str(e.subject.joint or "no joint graph: nothing requires grad")),
    ("post_grad_graphs", "aot", "aot", "before and after post-grad passes",
     lambda e, more: graph_passes(e, "post_grad", more)),
    ("ir_pre_fusion", "inductor", "schedule", "each loop nest", lambda e, _: stages.pre_fusion(e.subject)),
    ("fusion", "inductor", "schedule", "each question of the scheduler, and why",
     lambda e, more: "\n".join(stages.decision_text(d, more) for d in e.subject.decisions)),
    ("ir_post_fusion", "inductor", "schedule", "the loop bodies of each kernel",
     lambda e, _: stages.post_fusion(e.subject)),
    ("output_code", "inductor", "graph", "kernels and wrapper",
     lambda e, _: stages.output_code(e.subject)),
):  # fmt: skip
    log_channel(_name, _doc, _kind, stage=_stage)(_text)
