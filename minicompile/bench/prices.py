"""`minicompile plugins`: the price list. Each plug-in's tokens, and what it buys on its own cases.

A plug-in names its cases in `PLUGIN.cases`: cases of `minicompile bench`, as "max_pool, cache". `--measure`
times each with the plug-in off and on, in turns in one process, and writes `price.json` into its folder. A
case that ends in ", second process" is a first call, where another process has made the same call before.
docs/plugins.md holds what is printed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import json
import tempfile
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import minicompile
from minicompile.bench import speed
from minicompile.bench.cases import OURS, BenchCase, ComparedCompiler, find_cases
from minicompile.bench.first_calls import in_fresh_process
from minicompile.bench.machine import processor, versions
from minicompile.errors import BackendError, unknown
from minicompile.ops.plugins import Plugin, available

PRICE = "price.json"
SECOND = ", second process"
MEASURED = ("call ms", "first call ms", "peak MiB")
LAYOUT = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip


def tokens_of(source: str) -> int:
    """Count the tokens of a Python source without comments, docstrings and blank lines.

    An f-string is one token, as Python 3.11 has it; later ones take it apart."""
    texts = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    docs = {
        text.lineno
        for text in texts  # also those after a field or a constant
        if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
    begin, end = (getattr(tokenize, f"FSTRING_{name}", None) for name in ("START", "END"))
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        depth -= token.type == end
        if not depth and token.type not in (*LAYOUT, end):
            count += not (token.type == tokenize.STRING and token.start[0] in docs)
        depth += token.type == begin
    return count


def folder_of(plugin: Plugin) -> Path | None:
    """The folder of a plug-in's first module, if its source is there."""
    spec = importlib.util.find_spec(plugin.modules[0])
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def tokens_in(folder: Path) -> int:
    return sum(tokens_of(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))


def stored_prices(folder: Path | None) -> dict[str, Any]:
    """Return what `--measure` wrote last: by device its name, versions, command and a row for each case."""
    if folder is None or not (folder / PRICE).is_file():
        return {}
    return json.loads((folder / PRICE).read_text(encoding="utf-8"))


def off_and_on(pair: Sequence[float]) -> str:
    """Two figures, to three digits; nothing breaks a line between them."""
    texts = (f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}" for figure in pair)
    return "\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}".join(texts)


def figures(plugin: Plugin) -> Iterator[tuple[str, str, list[str]]]:
    """For each measured case its name, the device, and a cell for each of MEASURED."""
    for price in stored_prices(folder_of(plugin)).values():
        for row in price["cases"]:
            cells = [off_and_on(row[what]) if what in row else "" for what in MEASURED]
            yield row["case"], price["device"], cells


HEAD = """# Plug-ins and their prices

The core compiles every program without them. Each costs tokens of Python and buys what the table says: its
cases with the plug-in off, then on. This page is what `minicompile plugins` prints; figures are taken by
`minicompile plugins --measure NAME` with `--device cpu` or `cuda`. Peak memory is what a call allocates
beyond its inputs; a CUDA graph allocates once, when it is captured, which isn't counted.

| plug-in | default | tokens | what it does |
| --- | --- | ---: | --- |
"""
FIGURES = """
| plug-in | case | device | call, ms | first call, ms | peak memory, MiB |
| --- | --- | --- | ---: | ---: | ---: |
"""


def markdown(plugins: Iterable[Plugin]) -> str:
    """Return the list as a page: what there is, then what was measured."""
    text, rows, taken = HEAD, "", set()
    for plugin in plugins:
        folder, state = folder_of(plugin), "on" if plugin.default else "off"
        tokens = f"{tokens_in(folder):,}" if folder is not None else "?"
        text += f"| `{plugin.name}` | {state} | {tokens} | {plugin.purpose} |\n"
        for case, device, cells in figures(plugin):
            rows += f"| `{plugin.name}` | {case} | {device} | {' | '.join(cells)} |\n"
        for price in stored_prices(folder_of(plugin)).values():
            taken.add(f"{price['device']}, torch {price['versions']['torch']}")
    return text + FIGURES + rows + f"\nTaken on: {'; '.join(sorted(taken))}.\n"


def price_of(plugin: Plugin, device: str, seconds: float) -> dict[str, Any]:
    """Measure each case of a plug-in with it off and on.

    A row holds pairs (off, on): milliseconds of a call, the median of turns, and MiB of the peak memory above
    the inputs; or milliseconds of a first call."""
    cases = cases_of(plugin, device)
    rows = [measure_case(plugin, case, device, seconds) for case in cases]
    starts = [name for name in plugin.cases if name.endswith(SECOND)] if device == "cuda" else []
    rows += [measure_start(plugin, name, device) for name in starts]
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    command = f"minicompile plugins --measure {plugin.name} --device {device}"
    return {"device": name, "command": command, "versions": versions(), "cases": rows}


def cases_of(plugin: Plugin, device: str) -> list[BenchCase]:
    """A plug-in's cases; those at the scale "gpu" are for GPUs."""
    cases = []
    for name in plugin.cases:
        subject, *scale = name.split(", ")
        for case in find_cases([subject], (), [scale[0] if scale else "large"]):  # type: ignore[list-item]
            if case.name == name and (device == "cuda" or "gpu" not in scale):
                cases.append(case)
    return cases


def choices(plugin: Plugin) -> dict[str, list[str]]:
    """Return the plug-ins to select with this one "off" and "on": the default ones beside it."""
    without = sorted({p.name for p in available().values() if p.default} - {plugin.name})
    return {"off": without, "on": sorted({*without, plugin.name, *plugin.needs})}


def measure_case(plugin: Plugin, case: BenchCase, device: str, seconds: float) -> dict[str, Any]:
    """Return one row of the list. Raises BackendError where the compiled case fails or is wrong."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    compilers = {}
    for name, plugins in choices(plugin).items():
        options = {"plugins": plugins, **dict(plugin.options if name == "on" else ())}
        compile = partial(minicompile.compile, dynamic=False, options=options)
        compilers[name] = ComparedCompiler(compile)
    row = speed.measure(case, device, dtype, seconds, compilers)
    if row.failures:
        raise BackendError(f"{case.name}: {row.failures}")
    return {
        "case": case.name,
        "call ms": [round(1e3 * row.seconds[name], 4) for name in compilers],
        "peak MiB": [round(row.peaks[name] / 2**20, 2) for name in compilers],
    }


def measure_start(plugin: Plugin, name: str, device: str) -> dict[str, Any]:
    """Return a row of first calls where another process has made the same call before."""
    case, threads = name.removesuffix(SECOND), torch.get_num_threads()
    found = []
    for plugins in choices(plugin).values():
        with tempfile.TemporaryDirectory() as cache:
            names = ",".join(plugins)
            for _ in range(2):
                seconds = in_fresh_process(
                    OURS, case, device, threads, cache, "bfloat16", MINICOMPILE_PLUGINS=names
                )
            found.append(round(1e3 * seconds, 1))
    return {"case": name, "first call ms": found}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", help="plug-ins; none: all")
    parser.add_argument(
        "--measure", action="store_true", help="measure what they buy, and write it down"
    )
    parser.add_argument("--device", default="cpu", help='"cpu" or "cuda"')
    parser.add_argument("--seconds", type=float, default=2.0, help="for each case")


def run(chosen: argparse.Namespace) -> int:
    plugins = available()
    for name in chosen.names:
        if name not in plugins:
            raise unknown("plug-in", name, sorted(plugins))
    wanted = [plugins[name] for name in chosen.names or plugins]
    for plugin in wanted if chosen.measure else ():
        price, folder = price_of(plugin, chosen.device, chosen.seconds), folder_of(plugin)
        if price["cases"] and folder is not None:
            prices = json.dumps({**stored_prices(folder), chosen.device: price}, indent=1)
            (folder / PRICE).write_text(prices + "\n", encoding="utf-8")
    print(markdown(wanted), end="")
    return 0
