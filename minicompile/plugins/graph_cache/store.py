"""Compiled captures for a GPU, kept on disk: a warm start differentiates, lowers and generates nothing.

    key    a digest of the captured graph's text with the layout of every value, the options, torch's
           settings, the GPU, the rules in force, and what compiles: this package, torch, Triton
    value  what runs around the graphs, and the texts of their wrappers and kernels, as JSON behind a seal;
           machine code has files of its own

What no text decides has no key, and is compiled anew: symbolic sizes, constants, views among the inputs,
functions, operators and rules from elsewhere. Who watches a compilation wants to see its stages, so then
nothing is read either.
The real compiler: torch/_functorch/_aot_autograd/autograd_cache.py, FxGraphCache in
torch/_inductor/codecache.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import sys
import types
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import fx

from minicompile import compat
from minicompile.aot.result import OutputSpec, RuntimeMetadata, Tangent
from minicompile.codegen.plan import CodeLine, KernelModule, WrapperSource
from minicompile.compat import triton_api
from minicompile.compat.settings import global_facts
from minicompile.dynamo.result import Capture
from minicompile.ops.cache import Cache, digest
from minicompile.ops.events import observer
from minicompile.ops.graph import Graph, argument_text
from minicompile.ops.registry import ALL, key_name
from minicompile.options import Options, triton_variables
from minicompile.pipeline import Compile, Program, around_compile, differentiate
from minicompile.plugins.fast_launcher import launch
from minicompile.runtime.load import load_wrapper

KIND = "cuda"
OWN = ("minicompile", "torch", "_operator", "builtins", "functools")
"""Whose functions the versions in the key tell all about."""
CAPTURING = {
    "bytecode",
    "call",
    "guard",
    "backend",
    "renderer",
    "accuracy_stage",
    "log_channel",
    "observer",
    "reduction",
}
"""Registries that don't decide what becomes of a captured graph; all others do."""
UNCONCERNED = {"dump", "logs"}
"""Observers that do without the stages, unless options ask for them."""
ELSEWHERE = {"cache_dir", "debug_dir", "recompile_limit"}
"""Options that don't decide."""
LITERALS = (
    *(type(None), bool, int, float, complex, str, slice, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
SPACES = ("aten", "prims")
"""Operators that are torch's."""
PLACES = {
    "torch": torch,
    "functional": torch.nn.functional,
    "special": torch.special,
    "linalg": torch.linalg,
    "fft": torch.fft,
    "operator": operator,
    **compat.BUILTINS,
}
"""Where torch's functions are found."""


class NoText(Exception):
    """Something has no text that says all about it."""


@around_compile("graph_cache")
def from_disk(capture: Capture, options: Options, compile: Compile) -> Program:
    """Read what an earlier process compiled of an equal capture; else compile it, and keep it."""
    key = key_of(capture, options)
    if key is None:
        return compile(capture, options)
    if (kept := read(key, options)) is not None:
        return load_kept(kept, capture, options)
    program = compile(capture, options)
    if not any(graph.stages.loops.constants for graph in program.graphs):
        texts = [(graph.stages.wrapper, graph.modules) for graph in program.graphs]
        keep(key, program.metadata, texts, options)
    return program


def load_kept(kept: Kept, capture: Capture, options: Options) -> Program:
    """Load the kernels and wrappers that were kept."""
    capture.watch.tell("building", [])
    waits = [launch.start_kernels(graph.kernels, options) for graph in kept.graphs]
    calls = [load_wrapper(graph.wrapper, wait()) for graph, wait in zip(kept.graphs, waits)]

    def backward() -> Graph | None:
        """The graph, made anew in a thread of its own: no mode of the user's is active there."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(differentiate, capture, options).result().backward

    return Program(kept.metadata, calls, backward, [])


# The key


def key_of(capture: Capture, options: Options) -> str | None:
    """The key of a capture; None where it has none, or the cache isn't asked for."""
    watched = capture.watch.listeners or options.logs or options.trace
    if watched or set(observer) - UNCONCERNED or compat.any_autocast_enabled():
        return None
    if not options.disk_cache or options.mode != "default" or capture.shape_env is not None:
        return None
    try:
        inputs = [input_text(value) for value in capture.fakes]
        storages = [compat.storage_id(value) for value in capture.fakes]
        if {value.device.type for value in capture.fakes} != {KIND}:
            return None
        if len({value.device for value in capture.fakes}) > 1 or len(set(storages)) < len(storages):
            return None
        nodes = [node_text(node) for node in capture.graph.nodes]
        facts: list[Any] = [capture.graph.name, capture.grad_enabled, inputs, nodes]
        facts += [capture.continues]
        facts += [options_text(options), settings(), rules_text(), versions()]
        facts += [gpu_text(capture.fakes[0].device), torch.cuda.current_device()]
    except NoText:
        return None
    return digest(*facts)


def input_text(value: Any) -> str:
    """A tensor as autograd sees it."""
    if not isinstance(value, torch.Tensor) or compat.is_view(value):
        raise NoText
    return repr((layout_text(value), value.requires_grad, value.is_leaf, value.is_inference()))


def layout_text(value: Any) -> str:
    """A value's type and place; symbolic numbers have no text."""
    if not isinstance(value, torch.Tensor):
        return literal_text(value)
    if type(value) not in (compat.FakeTensor, torch.nn.Parameter):
        raise NoText
    if value.layout is not torch.strided:
        raise NoText
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    if not all(type(number) is int for number in numbers):
        raise NoText
    facts = (len(value.shape), numbers, value.dtype, value.device)
    return repr((*facts, value.is_conj(), value.is_neg()))


def literal_text(value: Any) -> str:
    if type(value) not in LITERALS:
        raise NoText
    parts = (value.start, value.stop, value.step) if isinstance(value, slice) else ()
    if not all(isinstance(part, fx.Node) or type(part) in LITERALS for part in parts):
        raise NoText
    return argument_text(value)


def node_text(node: fx.Node) -> str:
    """A call with its arguments, and its value's layout."""
    if node.meta.keys() - {"origins", "val"}:
        raise NoText
    for leaf in compat.tree_leaves((node.args, node.kwargs)):
        if not isinstance(leaf, fx.Node):
            literal_text(leaf)
    if node.op == "call_function":
        target = function_text(node.target)
    elif node.op in ("placeholder", "call_method", "output"):
        target = str(node.target)
        module = getattr(getattr(torch.Tensor, target, None), "__module__", None) or "torch"
        if node.op == "call_method" and module.partition(".")[0] != "torch":
            raise NoText
    else:
        raise NoText
    layouts = [layout_text(leaf) for leaf in compat.tree_leaves(node.meta.get("val"))]
    arguments = argument_text(node.args), argument_text(dict(node.kwargs))
    return repr((node.op, node.name, target, *arguments, layouts))


def function_text(function: Any) -> str:
    """The name of one of torch's own functions."""
    if isinstance(function, torch._ops.OpOverload) and function.namespace in SPACES:
        return f"{function} {function._schema}"
    try:
        return torch_functions()[id(function)]
    except KeyError:
        raise NoText from None


@functools.cache
def torch_functions() -> dict[int, str]:
    """The names of what this process found in `PLACES` first."""
    found = {}
    for place, namespace in PLACES.items():
        for name, function in vars(namespace).items():
            module = getattr(function, "__module__", None) or "torch"
            if callable(function) and module.partition(".")[0] in ("torch", "_operator"):
                found[id(function)] = f"{place}.{name}"
    return found


def options_text(options: Options) -> str:
    """All options that decide."""
    found = dataclasses.asdict(options)
    return repr({name: value for name, value in found.items() if name not in ELSEWHERE})


def settings() -> str:
    """What of torch's settings decides, also which operator stands for an attention or a batch norm."""
    flags = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
    attention = [getattr(torch.backends.cuda, f"{flag}_enabled")() for flag in flags]
    cudnn = torch.backends.cudnn
    return repr((global_facts(), attention, cudnn.enabled, cudnn.deterministic))


def rules_text() -> str:
    """The rules in force: all of this package, whose files are in the key, or of torch."""
    names = sorted(ALL.keys() - CAPTURING)
    rules = [
        f"{n}:{key_name(key)}={rule_text(rule)}" for n in names for key, rule in ALL[n].items()
    ]
    return digest(*rules)


def rule_text(rule: Any, within: tuple[Any, ...] = ()) -> str:
    """A rule's name, and those of the functions that it holds."""
    if isinstance(rule, torch._ops.OpOverload):
        return function_text(rule)
    if not callable(rule) and not dataclasses.is_dataclass(rule):
        return repr(rule) if isinstance(rule, str | int | float | None) else ""
    if any(rule is one for one in within):
        return ""
    named = rule if hasattr(rule, "__qualname__") else type(rule)
    module = getattr(named, "__module__", None) or "torch"
    if module.partition(".")[0] not in OWN:
        raise NoText
    if isinstance(rule, types.FunctionType):
        held: Iterable[Any] = [cell.cell_contents for cell in rule.__closure__ or ()]
    elif isinstance(rule, functools.partial):
        held = [rule.func, *rule.args, *rule.keywords.values()]
    else:
        own = hasattr(rule, "__dict__") and not isinstance(rule, type)
        held = vars(rule).values() if own else ()
    inside = [rule_text(one, (*within, rule)) for one in held]
    return f"{module}.{named.__qualname__}{inside}"


def gpu_text(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_properties(device)}"


@functools.cache
def versions() -> str:
    """This package's files as they are, torch, Triton and Python."""
    files = sorted(Path(__file__).parents[2].rglob("*.*"))
    sources = [path.stat() for path in files if path.suffix in (".py", ".c", ".h")]
    stamps = [(info.st_size, info.st_mtime_ns) for info in sources]
    found = (stamps, torch.__version__, torch.version.git_version, sys.version)
    return repr((*found, triton_api.triton_identity(), triton_variables()))


# The value


@dataclasses.dataclass(frozen=True)
class KeptGraph:
    """A graph that needn't be compiled: its wrapper, and its kernels by name."""

    wrapper: WrapperSource
    kernels: dict[str, launch.LaunchedKernel]


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a key leads to."""

    metadata: RuntimeMetadata
    graphs: list[KeptGraph]


def keep(
    key: str,
    metadata: RuntimeMetadata,
    graphs: Sequence[tuple[WrapperSource, Sequence[KernelModule]]],
    options: Options,
) -> None:
    """Write down what was compiled, if all of it has a text and runs on the GPU."""
    sources = [kernel for _, modules in graphs for m in modules for kernel in m.kernels]
    if any(source.plan.device.type != KIND for source in sources):
        return
    if any("empty_large" in wrapper.text for wrapper, _ in graphs):
        return
    found: list[Any] = []
    for wrapper, modules in graphs:
        kernels = launch.launched_kernels([k for module in modules for k in module.kernels])
        texts = {name: dataclasses.asdict(kernel) for name, kernel in kernels.items()}
        found.append([wrapper.name, wrapper.text, wrapper.owned, texts])
    try:
        what = [plain(metadata), found]
    except NoText:
        return
    Cache(options, "graphs").put(key, json.dumps(what).encode())


def read(key: str, options: Options) -> Kept | None:
    """What is kept under a key; None where nothing whole is."""
    if (kept := Cache(options, "graphs").get(key)) is None:
        return None
    metadata, graphs = json.loads(kept)
    outputs = tuple(OutputSpec(**tuples(spec)) for spec in metadata.pop("outputs"))
    tangents = tuple(tangent_of(*tuples(tangent)) for tangent in metadata.pop("tangents"))
    found = []
    for name, text, owned, kernels in graphs:
        lines = [CodeLine(line) for line in text.splitlines()]
        loadable = {kernel: launch.LaunchedKernel(**facts) for kernel, facts in kernels.items()}
        found.append(KeptGraph(WrapperSource(name, lines, [], owned), loadable))
    return Kept(RuntimeMetadata(outputs, tangents=tangents, **tuples(metadata)), found)


def tangent_of(dtype: str, device: str, order: tuple[int, ...], size: int) -> Tangent:
    return Tangent(getattr(torch, dtype), torch.device(device), order, size)


def plain(value: Any) -> Any:
    """Dataclasses and tuples of plain values as JSON has them."""
    if isinstance(value, OutputSpec | RuntimeMetadata):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Tangent):
        dtype = str(value.dtype).removeprefix("torch.")
        return [dtype, str(value.device), list(value.order), value.bytes]
    if isinstance(value, tuple):
        return list(map(plain, value))
    if type(value) not in (type(None), bool, int, float, str):
        raise NoText
    return value


def tuples(value: Any) -> Any:
    """The way back from `plain`, of what isn't a dataclass."""
    if isinstance(value, dict):
        return {name: tuples(item) for name, item in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value
