"""`minicompile plugins`: the price list. Each plug-in's tokens, and what it buys on its own cases.

A plug-in names its cases in `PLUGIN.cases`: cases of `minicompile bench`, as "max_pool, cache". `--measure`
times each with the plug-in off and on, in turns in one process, and writes `price.json` into its folder.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import json
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import minicompile
from minicompile.bench.cases import Case, find_cases
from minicompile.bench.machine import versions
from minicompile.bench.timing import peak_bytes, time_in_turns
from minicompile.errors import unknown
from minicompile.ops.plugins import Plugin, available

PRICE = "price.json"
WARM_CALLS = 4
"""Calls before the clock starts: a CUDA graph is replayed from the third one on."""
LAYOUT = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip


def tokens_of(source: str) -> int:
    """Count the tokens of a Python source without comments, docstrings and blank lines."""
    docs = set(_docstring_lines(ast.parse(source)))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type not in LAYOUT and not (token.type == tokenize.STRING and token.start[0] in docs)
        for token in tokens
    )


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the lines on which docstrings begin, those after a field or a constant too."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Constant(str())):
                yield node.lineno


def folder_of(plugin: Plugin) -> Path | None:
    """The folder of a plug-in's first module, if its source is there."""
    spec = importlib.util.find_spec(plugin.modules[0])
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def tokens_in(folder: Path) -> int:
    return sum(tokens_of(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))


def stored_price(folder: Path) -> dict[str, Any]:
    """What `--measure` wrote last: versions, device, and a row for each case; {} if it never did."""
    path = folder / PRICE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def price_text(plugin: Plugin) -> str:
    """One plug-in: name, default, tokens and purpose; under it a line for each measured case."""
    folder = folder_of(plugin)
    tokens = f"{tokens_in(folder):>7,}" if folder is not None else "?"
    state = "on" if plugin.default else "off"
    lines = [f"{plugin.name:<16} {state:<4} {tokens:>7} tokens  {plugin.purpose}"]
    price = stored_price(folder) if folder is not None else {}
    for row in price.get("cases", ()):
        time = f"time {row['on_ms'] / row['off_ms']:.2f} ({row['off_ms']:.3f} to {row['on_ms']:.3f} ms)"
        memory = f"memory {row['on_mib']:.1f} of {row['off_mib']:.1f} MiB"
        lines.append(f"    {row['case']} [{price['device']}]: {time}, {memory}")
    if not price:
        lines.append("    not measured: minicompile plugins --measure " + plugin.name)
    return "\n".join(lines)


def measure(plugin: Plugin, device: str, seconds: float) -> dict[str, Any]:
    """Time each case of a plug-in with it off and on: medians of turns, and peak memory above the inputs."""
    rows = [measure_case(plugin, case, device, seconds) for case in cases_of(plugin, device)]
    return {"device": device, "versions": versions(), "cases": rows}


def cases_of(plugin: Plugin, device: str) -> list[Case]:
    """A plug-in's cases; those at the scale "gpu" are for GPUs."""
    cases = []
    for name in plugin.cases:
        subject, *scale = name.split(", ")
        for case in find_cases([subject], (), [scale[0] if scale else "large"]):  # type: ignore[list-item]
            if case.name == name and (device == "cuda" or "gpu" not in scale):
                cases.append(case)
    return cases


def measure_case(plugin: Plugin, case: Case, device: str, seconds: float) -> dict[str, Any]:
    """One row of the list: milliseconds of a call and MiB of its peak memory, off and on."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    without = sorted({p.name for p in available().values() if p.default} - {plugin.name})
    choices = {"off": without, "on": sorted({*without, plugin.name, *plugin.needs})}
    steps = {}
    for name, plugins in choices.items():
        options = {"plugins": plugins, **dict(plugin.options if name == "on" else ())}
        torch.manual_seed(0)
        inputs = case.inputs(device, dtype)
        function = case.subject.fn
        fn = minicompile.compile(function, dynamic=False, mode=case.mode, options=options)
        steps[name] = case.step(fn, inputs)
        for _ in range(WARM_CALLS):
            steps[name]()
    found = time_in_turns(steps, seconds, device)
    row: dict[str, Any] = {"case": case.name}
    for name, step in steps.items():
        row[f"{name}_ms"] = round(1e3 * found.median(name), 4)
        row[f"{name}_mib"] = round(peak_bytes(step, device) / 2**20, 2)
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", help="plug-ins; none: all")
    parser.add_argument(
        "--measure", action="store_true", help="measure what they buy, and write it down"
    )
    parser.add_argument("--device", default="cpu", help='"cpu" or "cuda"')
    parser.add_argument("--seconds", type=float, default=2.0, help="for each case")


def run(chosen: argparse.Namespace) -> int:
    plugins = available()
    for name in chosen.names or plugins:
        if name not in plugins:
            raise unknown("plug-in", name, sorted(plugins))
        plugin = plugins[name]
        folder = folder_of(plugin)
        if chosen.measure and folder is not None:
            price = measure(plugin, chosen.device, chosen.seconds)
            if price["cases"]:
                (folder / PRICE).write_text(json.dumps(price, indent=1) + "\n", encoding="utf-8")
        print(price_text(plugin))
    return 0
