"""Ahead-of-time packages: an exported graph as a shared library that needs neither Python nor torch.

    lib<name>.so               kernels, operators and the C interface of minicompile_package.h
    model.safetensors          parameters, buffers, constants
    metadata.json              signature, constraints, sizes and checksums of all files
    model.c kernels.c ...      what the library was built from
    main.c, README.md          an example program, and how to build it

The real compiler: torch/_inductor/package/package.py, torch/csrc/inductor/aoti_runtime.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sympy
import torch
from torch import Tensor

import minicompile
from minicompile.aot.autograd import ahead_of_time, fake_mode_of
from minicompile.codegen.cpp_ops import prelude
from minicompile.codegen.generate import by_position, generate_kernels, make_plans
from minicompile.errors import BackendError, Unsupported, unknown
from minicompile.exporting.c_wrapper import DTYPES, Condition, CWriter, ModelSource, c_string
from minicompile.exporting.checks import checksum, write_metadata
from minicompile.exporting.conditions import signature_rows
from minicompile.exporting.exported import Exported
from minicompile.exporting.safetensors import write_safetensors
from minicompile.exporting.self_check import check_built
from minicompile.lowering.lower import lower
from minicompile.ops import plugins
from minicompile.ops.graph import Graph, copied, output_node, placeholders
from minicompile.ops.toolchain import (
    BASE_FLAGS,
    find_compiler,
    machine_flags,
    openmp_flag,
    processor_features,
)
from minicompile.options import Options
from minicompile.scheduling.schedule import schedule

C_FILES = Path(__file__).with_name("c")
README = """# {name}, compiled by minicompile

    cc -O2 -o main main.c -ldl
    ./main . DTYPE:SHAPE:FILE ...

runs it: `main.c` is an example, and says what it takes. `metadata.json` lists the inputs. A program of yours
needs `minicompile_package.h` (the interface) and `minicompile_load.h` (which checks the files and loads the
library), `-ldl`, and this folder; not Python, not torch. `OMP_NUM_THREADS`: how many threads of a CPU work.

`lib{name}.so` was built from the C files beside it: `model.c` is the graph. From Python:
`mc.load_package(folder)`.
"""
AS_STRIDED = {torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default}
LEVELS: dict[str, tuple[str, ...]] = {
    "x86-64-v4": ("avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": ("avx2", "fma", "bmi2"),
    "x86-64": (),
}
"""Kinds of processors, as compilers name them, and what tells that a processor is of the kind."""


def aot_package(exported: Exported, path: str | Path, *, cpu: str | None = None) -> Path:
    """Compile an exported graph into a folder; gives its path.

    `cpu`: the kind of x86 processor to compile for (a key of `LEVELS`); None: the best that this one is.
    Built by clang it runs on one thread: its OpenMP library is seldom installed.
    Where this processor can run it, the package is run once and compared with the export.
    Raises Unsupported for what a package can't do, with the user's line, and BackendError without a
    compiler, or if that made something else of the program.
    """
    path = Path(path)
    with TemporaryDirectory(prefix="minicompile_package_", dir=path.absolute().parent) as work:
        folder = Path(work)
        _fill(folder, exported, cpu)
        path.mkdir(exist_ok=True)
        for file in sorted(folder.iterdir(), key=lambda file: file.name == "metadata.json"):
            file.replace(path / file.name)
    return path


def _fill(folder: Path, exported: Exported, cpu: str | None) -> None:
    name = re.sub(r"\W", "_", exported.name)
    level, features = _processor(cpu)
    held = [spec for spec in exported.signature.inputs if spec.kind != "input"]
    users = [spec for spec in exported.signature.inputs if spec.kind == "input"]
    selected, every = Options().plugins, plugins.available()
    usable = tuple(name for name in selected if not every[name].needs_torch)
    options = Options(plugins=usable)
    lowered = _Lowered(exported, options)
    weights = {spec.target: exported.state[spec.target] for spec in held}
    for constant in lowered.schedule.graph.constants:
        assert constant.value is not None
        weights[f"constant.{constant.name}"] = constant.value
    places = write_safetensors(folder / "model.safetensors", weights)
    env = exported.shape_env
    source = CWriter(
        lowered.schedule,
        lowered.kernels,
        len(held),
        [spec.target for spec in users],
        written_by_output(exported),
        conditions_of(exported),
        env.simplified if env is not None else lambda size: size,
    ).write()
    _write_sources(folder, lowered.text, source, places, [*weights], exported, name, features)
    _build(folder, name, level, options)
    if {*features} <= {*processor_features().split()}:
        check_built(folder, name, exported, lowered.schedule.graph.size_hints)
    mutated = {spec.target for spec in exported.signature.mutated}
    facts = {
        "name": name,
        "made_by": f"minicompile {minicompile.__version__}",
        "cpu": features,
        "call": signature_rows(exported.call),
        "inputs": [[spec.target, spec.target in mutated] for spec in users],
        "results": sum(spec.kind == "result" for spec in exported.signature.outputs),
        "structure": exported.structure,
        "constraints": [[c.condition, c.reason, c.line] for c in exported.constraints],
    }
    (folder / "README.md").write_text(README.format(name=name), encoding="utf-8")
    write_metadata(folder, facts)


def written_by_output(exported: Exported) -> dict[int, int]:
    """The outputs that are new contents, and the inputs, of all, that get them."""
    outputs, inputs = exported.signature.outputs, exported.signature.inputs
    number = {spec.target: i for i, spec in enumerate(inputs)}
    return {i: number[s.target] for i, s in enumerate(outputs) if s.kind == "mutation"}


def conditions_of(exported: Exported) -> list[Condition]:
    """What must hold of the sizes, besides those that are constants or equal to others."""
    env, found = exported.shape_env, list[Condition]()
    for symbol, (low, high) in env.ranges.items() if env is not None else ():
        if symbol in env.symbols and symbol not in env.fixed:
            text = f"{low} <= {env.text(symbol)}" + (f" <= {high}" if high is not None else "")
            holds = (
                sympy.And(low <= symbol, symbol <= high, evaluate=False) if high else low <= symbol
            )
            found.append(Condition(holds, text))
    for fact in env.guards if env is not None else ():
        found.append(Condition(fact.condition, env.text(fact.condition)))
    return found


class _Lowered:
    """The exported graph down to kernels."""

    def __init__(self, exported: Exported, options: Options) -> None:
        graph = copied(exported.graph)
        fakes = [node.meta["val"] for node in placeholders(graph.gm.graph)]
        if not all(isinstance(fake, Tensor) for fake in fakes):
            raise Unsupported("a package takes tensors: a number that varies can't be an input")
        mode = fake_mode_of(graph, fakes, exported.shape_env)
        if gpus := {str(fake.device) for fake in fakes} - {"cpu"}:
            raise Unsupported(f"a package runs on a CPU, not on {', '.join(gpus)}")
        if unknown := [str(fake.dtype) for fake in fakes if fake.dtype not in DTYPES]:
            raise Unsupported(f"a package has no {unknown[0]}")
        strided = any(node.target in AS_STRIDED for node in graph.nodes)
        if strided and not all(fake.is_contiguous() for fake in fakes):
            raise Unsupported("as_strided of what a package would lay out anew")
        with mode:  # the weights' file and the caller have rows without gaps
            fakes = [fake.contiguous() for fake in fakes]
        aot = ahead_of_time(graph, fakes, options, training=False, shape_env=exported.shape_env)
        shared = [spec.kind != "fresh" for spec in aot.metadata.outputs]
        if any(shared):
            _own_outputs(graph, shared)
            aot = ahead_of_time(graph, fakes, options, training=False, shape_env=exported.shape_env)
        loops = lower(aot.forward, options)
        self.schedule = schedule(loops, options)
        plans = make_plans(self.schedule, options)
        modules = generate_kernels(plans)
        self.kernels = by_position(plans, modules)
        self.text = "".join(module.text for module in modules)
        for plan in plans.values():
            for fact, why in plan.assumes.items():
                exported.shape_env.evaluate(fact, why)


def _own_outputs(graph: Graph, shared: Sequence[bool]) -> None:
    """Copy results that are an input or another result, or see their memory."""
    output = output_node(graph.gm.graph)
    (results,) = output.args
    assert isinstance(results, tuple | list)
    copies = []
    for result, copy in zip(results, shared, strict=True):
        if copy and isinstance(result, torch.fx.Node):
            with graph.gm.graph.inserting_before(output):
                rows: dict[str, Any] = {"memory_format": torch.contiguous_format}
                made = graph.gm.graph.call_function(torch.ops.aten.clone.default, (result,), rows)
            made.meta = dict(result.meta)
            result = made
        copies.append(result)
    output.args = (tuple(copies),)
    graph.gm.recompile()


def _processor(cpu: str | None) -> tuple[list[str], tuple[str, ...]]:
    """Flags for compilers, and what the package's user must have."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return [*machine_flags()], ()
    known = set(processor_features().split())
    if cpu is None:
        cpu = next(level for level, needed in LEVELS.items() if known.issuperset(needed))
    if cpu not in LEVELS:
        raise unknown("kind of processor", cpu, LEVELS)
    width = 512 if cpu == "x86-64-v4" else 256
    return [f"-march={cpu}", f"-mprefer-vector-width={width}"], LEVELS[cpu]


def _write_sources(
    folder: Path, kernels: str, source: ModelSource, places: Mapping[str, tuple[int, int]],
    names: Sequence[str], exported: Exported, name: str, features: Sequence[str],
) -> None:  # fmt: skip
    weights = folder / "model.safetensors"
    bytes = weights.stat().st_size
    header = min((at for at, _ in places.values()), default=bytes)
    writes = len(exported.signature.mutated)
    outputs = len(exported.signature.outputs)
    inputs = sum(spec.kind == "input" for spec in exported.signature.inputs)
    numbers = {
        "MC_WEIGHTS": len(names), "MC_INPUTS": inputs, "MC_OUTPUTS": outputs - writes,
        "MC_WRITES": writes, "MC_SIZES": source.sizes, "MC_PIECES": source.pieces,
        "MC_BYTES": bytes, "MC_HEADER": header,
        "MC_HEADER_CRC32": f"{checksum(weights, 0, header)}u",
        "MC_DATA_CRC32": f"{checksum(weights, header)}u",
    }  # fmt: skip
    target = [f"// What {name} was compiled for, and what belongs to it.", ""]
    target += [f'#define MC_NAME "{name}"']
    target += [f"#define {key} {value}" for key, value in numbers.items()]
    needs = " ".join(f'need("{feature}")' for feature in features)
    target += [f"#define MC_FEATURES(need) {needs}", ""]
    table = ["const mc_weight mc_weights[] = {"]
    table += [f"    {{{c_string(n)}, {places[n][0]}, {places[n][1]}}}," for n in names]
    table += ["    {0},", "};", ""]
    (folder / "target.h").write_text("\n".join(target), encoding="utf-8")
    (folder / "kernels.c").write_text(kernels, encoding="utf-8")
    (folder / "model.c").write_text(source.text + "\n" + "\n".join(table), encoding="utf-8")
    for file in C_FILES.iterdir():
        text = file.read_text(encoding="utf-8")
        helpers = prelude(text) + "\n" if file.name == "operators.c" else ""
        (folder / file.name).write_text(helpers + text, encoding="utf-8")


def _build(folder: Path, name: str, level: Sequence[str], options: Options) -> None:
    """The compilers side by side, then the linker. Raises BackendError."""
    compiler = find_compiler(options)
    threads = openmp_flag(compiler.version)
    base = [flag for flag in BASE_FLAGS if flag != "-shared"]
    native = [*level, threads]
    flags: dict[str, Sequence[str]] = {"model": native, "runtime": []}
    flags["operators"] = [*native, "-ffp-contract=fast"]
    with TemporaryDirectory() as work:
        objects = [f"{work}/{part}.o" for part in flags]
        commands = [
            [*base, *more, "-fvisibility=hidden", "-c", str(folder / f"{part}.c"), "-o", made]
            for (part, more), made in zip(flags.items(), objects, strict=True)
        ]
        _run([[*compiler.command, *command] for command in commands])
        link = ["-shared", "-s", "-Wl,--as-needed", *objects, "-o", str(folder / f"lib{name}.so")]
        _run([[*compiler.command, *link, threads, "-lm", "-lpthread", "-ldl"]])


def _run(commands: Sequence[Sequence[str]]) -> None:
    pipe = subprocess.PIPE
    running = [subprocess.Popen(command, stderr=pipe, text=True) for command in commands]
    said = [process.communicate()[1] for process in running]
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            first = "\n".join(text.splitlines()[:12])
            raise BackendError(f"{process.args} failed:\n{first}")  # type: ignore[str-bytes-safe]
