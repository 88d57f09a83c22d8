"""Compiled GPU graphs, kept on disk: a warm start lowers, schedules and generates nothing.

    key    a digest of the ATen graph's text with the layout of every value, the options, torch's settings,
           the GPU, and what compiles: this package, torch, Triton
    value  the wrapper's and the kernels' texts, as JSON behind a seal; machine code has files of its own

What no text decides has no key, and is compiled anew: symbolic sizes, constants, functions and rules from
elsewhere. Who watches a compilation wants to see its stages, so then nothing is read either.
The real compiler: FxGraphCache in torch/_inductor/codecache.py.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from minicompile import compat
from minicompile.codegen.plan import CodeLine, KernelModule, WrapperSource
from minicompile.ops.build import cache_folder
from minicompile.ops.events import Watch, observer
from minicompile.ops.files import read_sealed, write_sealed
from minicompile.ops.graph import Graph, argument_text
from minicompile.ops.registry import ALL, key_name
from minicompile.options import Options, triton_variables
from minicompile.runtime.triton import GpuKernel, gpu_kernels

PACKAGE, KIND = "minicompile", "cuda"
EARLIER = (
    *("bytecode", "call", "guard", "backend", "decomposition", "inverse", "vjp", "pattern", "pass"),
    *("renderer", "accuracy_stage", "log_channel", "observer"),
)
"""Registries that don't decide what becomes of an ATen graph; all others do."""
UNCONCERNED = {"progress", "dump", "logs"}
"""Observers that do without the stages, unless options ask for them."""
ELSEWHERE = ("cache_dir", "debug_dir", "progress", "recompile_limit", "nested_frames")
"""Options that don't."""
LITERALS = (
    *(type(None), bool, int, float, complex, str, slice, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class NoText(Exception):
    """Something has no text that says all about it."""


def key_of(
    graph: Graph, options: Options, written_back: Mapping[int, int], watch: Watch
) -> str | None:
    """The key of a graph; None where it has none, or the cache isn't asked for."""
    watched = watch.listeners or options.logs or options.trace or set(observer) - UNCONCERNED
    if watched or not options.disk_cache or options.mode != "default":
        return None
    try:
        lines = [line_of(node) for node in graph.nodes]
        places = {place for _, found in lines for place in found}
        if {place.type for place in places} != {KIND} or len(places) > 1:
            return None
        facts: list[Any] = [graph.name, [text for text, _ in lines], sorted(written_back.items())]
        facts += [options_text(options), compat.global_facts(), rules_text()]
        facts += [gpu_text(places.pop()), torch.cuda.current_device(), versions()]
    except NoText:
        return None
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def line_of(node: fx.Node) -> tuple[str, list[torch.device]]:
    """A node as text, with its value's layout, and the devices of its tensors."""
    for leaf in compat.tree_leaves((node.args, node.kwargs)):
        parts = (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
        if not all(type(part) in LITERALS or isinstance(part, fx.Node) for part in parts):
            raise NoText
    if node.op not in ("placeholder", "call_function", "output"):
        raise NoText
    target = str(node.target)
    if node.op == "call_function" and node.target is not operator.getitem:
        if not isinstance(node.target, torch._ops.OpOverload):
            raise NoText
        target += str(node.target._schema)
    layouts = [layout_text(leaf) for leaf in compat.tree_leaves(node.meta.get("val"))]
    what = node.op, node.name, target, argument_text(node.args), argument_text(dict(node.kwargs))
    return repr((what, layouts)), [device for _, device in layouts if device is not None]


def layout_text(value: Any) -> tuple[str, torch.device | None]:
    """A value's type and place; symbolic numbers have no text."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (compat.FakeTensor, torch.nn.Parameter) or value.is_sparse:
            raise NoText
        numbers = (*value.shape, *value.stride(), value.storage_offset())
        if not all(type(number) is int for number in numbers):
            raise NoText
        facts = (len(value.shape), numbers, value.dtype, value.device, value.layout)
        return repr((*facts, value.is_conj(), value.is_neg())), value.device
    if type(value) not in LITERALS:
        raise NoText
    return argument_text(value), None


def options_text(options: Options) -> str:
    """All options that decide."""
    found = dataclasses.asdict(options)
    return repr({name: value for name, value in found.items() if name not in ELSEWHERE})


def rules_text() -> str:
    """The rules in force: all of this package, whose files are in the key."""

    def rules() -> Iterator[str]:
        for name in sorted(ALL.keys() - set(EARLIER)):
            for key, rule in ALL[name].items():
                if isinstance(rule, str):
                    yield f"{name}:{key_name(key)}={rule}"
                    continue
                kind = rule if hasattr(rule, "__qualname__") else type(rule)
                if kind.__module__.partition(".")[0] != PACKAGE:
                    raise NoText
                yield f"{name}:{key_name(key)}={kind.__module__}.{kind.__qualname__}"

    return hashlib.sha256("\0".join(rules()).encode()).hexdigest()


def gpu_text(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_properties(device)}"


@functools.cache
def versions() -> str:
    """This package's files as they are, torch, Triton and Python."""
    files = sorted(Path(__file__).parents[1].rglob("*.*"))
    sources = [path.stat() for path in files if path.suffix in (".py", ".c", ".h")]
    stamps = [(info.st_size, info.st_mtime_ns) for info in sources]
    found = (stamps, torch.__version__, torch.version.git_version, sys.version)
    return repr((*found, compat.triton_identity(), triton_variables()))


def keep(
    key: str, wrapper: WrapperSource, modules: Sequence[KernelModule], options: Options
) -> None:
    """Write a graph down whose kernels all run on the GPU."""
    folder = cache_folder(options, "graphs")
    sources = [kernel for module in modules for kernel in module.kernels]
    if folder is None or any(source.plan.device.type != KIND for source in sources):
        return
    found = {name: dataclasses.asdict(kernel) for name, kernel in gpu_kernels(sources).items()}
    about = {"name": wrapper.name, "text": wrapper.text, "owned": wrapper.owned, "kernels": found}
    write_sealed(folder / f"{key}.json", key, json.dumps(about).encode())


def read(key: str, options: Options) -> tuple[WrapperSource, dict[str, GpuKernel]] | None:
    """The wrapper and the kernels by name; None where nothing whole is kept."""
    folder = cache_folder(options, "graphs")
    kept = None if folder is None else read_sealed(folder / f"{key}.json", key)
    if kept is None:
        return None
    about = json.loads(kept)
    lines = [CodeLine(text) for text in about["text"].splitlines()]
    wrapper = WrapperSource(about["name"], lines, [], about["owned"])
    return wrapper, {name: GpuKernel(**kernel) for name, kernel in about["kernels"].items()}
