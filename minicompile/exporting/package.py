"""Ahead-of-time packages: an exported graph as a shared library that needs neither Python nor torch.

    lib<name>.so               kernels, operators and the C interface of minicompile_package.h
    weights.bin                parameters, buffers, constants: model.c has the table of their names and places
    metadata.json              signature, constraints, sizes and checksums of all files
    model.c kernels.c ...      what the library was built from
    main.c, README.md          an example program, and how to build it

The real compiler: torch/_inductor/package/package.py, torch/csrc/inductor/aoti_runtime.
"""

from __future__ import annotations

import ctypes
import json
import platform
import re
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sympy
from torch import Tensor

from minicompile.aot.autograd import ahead_of_time, fake_mode_of
from minicompile.codegen.generate import by_position, generate_kernels, make_plans
from minicompile.codegen.helpers import c_prelude
from minicompile.codegen.plan import KernelSource
from minicompile.errors import BackendError, Unsupported
from minicompile.exporting.c_wrapper import DTYPES, CWriter, c_string
from minicompile.exporting.conditions import always_holds
from minicompile.exporting.exported import Exported
from minicompile.exporting.load import LAST, VERSION
from minicompile.lowering.lower import lower
from minicompile.ops import plugins
from minicompile.ops.graph import copied, placeholders
from minicompile.ops.toolchain import (
    BASE_FLAGS,
    find_compiler,
    machine_flags,
    openmp_flag,
    processor_features,
)
from minicompile.options import Options
from minicompile.scheduling.nodes import Schedule
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
LEVELS: dict[str, tuple[str, ...]] = {
    "x86-64-v4": ("avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": ("avx2", "fma", "bmi2"),
    "x86-64": (),
}
"""Kinds of processors, as compilers name them, and what tells that a processor is of the kind."""


def aot_package(exported: Exported, path: str | Path) -> Path:
    """Compile an exported graph into a folder, for processors of this one's kind; gives its path.

    Built by clang it runs on one thread: its OpenMP library is seldom installed.
    Raises Unsupported for what a package can't do, with the user's line, and BackendError without a compiler.
    """
    path, name = Path(path), re.sub(r"\W", "_", exported.name)
    every = plugins.available()
    options = Options(plugins=tuple(p for p in Options().plugins if not every[p].needs_torch))
    planned, kernels, text = lowered(exported, options)
    writer = CWriter(planned, kernels, exported, conditions_of(exported))
    weights: dict[str, Any] = dict(exported.state)
    weights |= {f"constant.{c.name}": c.value for c in planned.graph.constants}
    with TemporaryDirectory(prefix="minicompile_package_", dir=path.absolute().parent) as work:
        folder = Path(work)
        places = write_weights(folder / "weights.bin", weights.values())
        rows = "\n".join(
            f"    {{{c_string(name)}, {at}, {size}}}," for name, (at, size) in zip(weights, places)
        )
        table = f"const mc_weight mc_weights[] = {{\n{rows}\n    {{0}},\n}};\n"
        (folder / "kernels.c").write_text(text, encoding="utf-8")
        (folder / "model.c").write_text(f"{writer.text}\n{table}", encoding="utf-8")
        (folder / "README.md").write_text(README.format(name=name), encoding="utf-8")
        for file in C_FILES.iterdir():
            text = file.read_text(encoding="utf-8")
            helpers = c_prelude(text) + "\n" if file.name == "operators.c" else ""
            (folder / file.name).write_text(helpers + text, encoding="utf-8")
        build(folder, name, len(weights), writer, options)
        mutated, outputs = exported.signature.mutated, exported.signature.outputs
        facts = {
            "name": name,
            "call": str(exported.call),
            "inputs": [[target, target in mutated] for target in writer.users],
            "results": len(outputs) - len(mutated),
            "structure": exported.structure,
            "constraints": [[c.condition, c.reason, c.line] for c in exported.constraints],
        }
        write_metadata(folder, facts)
        path.mkdir(exist_ok=True)
        for file in sorted(folder.iterdir(), key=lambda file: file.name == "metadata.json"):
            file.replace(path / file.name)
    return path


def lowered(
    exported: Exported, options: Options
) -> tuple[Schedule, Mapping[int, Sequence[KernelSource]], str]:
    """The exported graph down to kernels: the schedule, the kernels by its steps, their C."""
    graph, env = copied(exported.graph), exported.shape_env
    fakes = [node.meta["val"] for node in placeholders(graph.gm.graph)]
    for fake in fakes:
        if str(fake.device) != "cpu" or fake.dtype not in DTYPES:
            raise Unsupported(f"a package has CPU tensors only, and no {fake.dtype}: {fake.device}")
    if not all(fake.is_contiguous() for fake in fakes) and any(
        "as_strided" in str(node.target) for node in graph.nodes
    ):
        raise Unsupported("as_strided of what a package would lay out anew")
    with fake_mode_of(graph, fakes, env):  # the weights' file and the caller have rows without gaps
        fakes = [fake.contiguous() for fake in fakes]
    aot = ahead_of_time(graph, fakes, options, training=False, shape_env=env)
    if any(spec.kind != "result" or spec.is_view for spec in aot.metadata.outputs):
        raise Unsupported("a result of a package shares memory with another value")
    planned = schedule(lower(aot.forward, options), options)
    plans = make_plans(planned, options)
    modules = generate_kernels(plans)
    for plan in plans.values():
        for fact, why in plan.assumes.items():
            env.evaluate(fact, why)
    return planned, by_position(plans, modules), "".join(module.text for module in modules)


def conditions_of(exported: Exported) -> dict[str, sympy.Basic]:
    """What must hold of the sizes, by its text."""
    env, conditions = exported.shape_env, dict[str, sympy.Basic]()
    for symbol, (low, high) in env.ranges.items() if env is not None else ():
        if symbol in env.symbols:
            conditions[f"{env.text(symbol)} >= {low}"] = symbol >= low
            if high is not None:
                conditions[f"{env.text(symbol)} <= {high}"] = symbol <= high
    for fact in env.guards if env is not None else ():
        if not always_holds(fact.condition, env.ranges):
            conditions[env.text(fact.condition)] = fact.condition
    return conditions


def write_weights(path: Path, tensors: Any) -> list[tuple[int, int]]:
    """Write CPU tensors, each from the start of a cache line on; gives where each begins, and its bytes."""
    places = []
    with path.open("wb") as file:
        file.write(bytes(64))  # a file that is empty can't be mapped
        for tensor in tensors:
            rows: Tensor = tensor.detach().contiguous()
            file.write(bytes(-file.tell() % 64))
            places.append((file.tell(), rows.nbytes))
            file.write(ctypes.string_at(rows.data_ptr(), rows.nbytes))
    return places


def build(folder: Path, name: str, weights: int, writer: CWriter, options: Options) -> None:
    """Write target.h and compile the library. Raises BackendError."""
    native, features = [*machine_flags()], tuple[str, ...]()
    if platform.machine() in ("x86_64", "AMD64"):
        known = set(processor_features().split())
        level = next(level for level, needed in LEVELS.items() if known.issuperset(needed))
        width = 512 if level == "x86-64-v4" else 256
        native, features = [f"-march={level}", f"-mprefer-vector-width={width}"], LEVELS[level]
    content = (folder / "weights.bin").read_bytes()
    writes = len(writer.signature.mutated)
    target = {
        "MC_NAME": c_string(name), "MC_WEIGHTS": weights, "MC_INPUTS": len(writer.users),
        "MC_OUTPUTS": len(writer.signature.outputs) - writes, "MC_WRITES": writes,
        "MC_SIZES": len(writer.symbols), "MC_PIECES": len(writer.pieces),
        "MC_BYTES": len(content), "MC_CRC32": f"{zlib.crc32(content)}u",
        "MC_FEATURES(need)": " ".join(f'need("{feature}")' for feature in features),
    }  # fmt: skip
    lines = [f"#define {key} {value}\n" for key, value in target.items()]
    (folder / "target.h").write_text(f"// What {name} was compiled for.\n" + "".join(lines))
    compiler = find_compiler(options)
    threads = openmp_flag(compiler.version)
    base = [flag for flag in BASE_FLAGS if flag != "-shared"]
    native.append(threads)
    parts = {"model": native, "runtime": [], "operators": [*native, "-ffp-contract=fast"]}
    with TemporaryDirectory() as work:
        objects = [f"{work}/{part}.o" for part in parts]
        link = ["-shared", "-s", "-Wl,--as-needed", *objects, "-o", str(folder / f"lib{name}.so")]
        commands = [
            [*base, *flags, "-fvisibility=hidden", "-c", str(folder / f"{part}.c"), "-o", made]
            for (part, flags), made in zip(parts.items(), objects, strict=True)
        ]
        for command in (*commands, [*link, threads, "-lm", "-lpthread", "-ldl"]):
            done = subprocess.run([*compiler.command, *command], stderr=subprocess.PIPE, text=True)
            if done.returncode:
                raise BackendError(f"{done.args} failed:\n{done.stderr[:2000]}")


def write_metadata(folder: Path, facts: Mapping[str, Any]) -> None:
    """metadata.json: facts, a line for each file, and the checksum of all above it."""
    head = json.dumps({"format": "minicompile package", "version": VERSION, **facts}, indent=2)
    rows = []
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        entry = {"file": file.name, "bytes": len(content), "crc32": zlib.crc32(content)}
        rows.append("    " + json.dumps(entry))
    text = head.removesuffix("\n}") + ',\n  "files": [\n' + ",\n".join(rows) + "\n  ],\n  "
    text += f"{LAST}{zlib.crc32(text.encode())}\n}}\n"
    (folder / "metadata.json").write_text(text, encoding="utf-8")
