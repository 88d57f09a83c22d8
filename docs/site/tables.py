"""Pages that are tables: what is done with each operator, and what was measured."""

from __future__ import annotations

import html
import importlib.resources
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "minicompile/bench/results"


# ---------------------------------------------------------------------------------------------- operators


def packet_name(op: Any) -> str:
    """`aten.silu` of the operator `aten.silu.default` or its packet."""
    return ".".join(str(op).split(".")[:2])


def rule_cell(rule: Any, link: Callable[[str], str]) -> str:
    """Where a rule is written: a link into this package, or torch's module."""
    function = getattr(rule, "rule", rule)
    while hasattr(function, "func"):
        function = function.func
    module = getattr(inspect.unwrap(function), "__module__", "") or ""
    if not module.startswith("minicompile"):
        return "PyTorch's"
    file = f"{module.replace('.', '/')}.py"
    if not (ROOT / file).exists():
        file = f"{module.replace('.', '/')}/__init__.py"
    return f"[{module.removeprefix('minicompile.')}]({link(file)})"


def differentiated() -> set[str]:
    """Names of operators whose gradient PyTorch's table of derivatives has."""
    packaged = importlib.resources.files("torchgen") / "packaged/autograd/derivatives.yaml"
    rows = yaml.safe_load(packaged.read_text(encoding="utf-8"))
    return {"aten." + re.split(r"[.(]", row["name"])[0] for row in rows}


def operators(link: Callable[[str], str]) -> str:
    """A row for each operator that some rule is registered for."""
    from minicompile import extension, pipeline  # noqa: F401 (they fill the registries)
    from minicompile.ops.registry import ALL, key_name

    formulas = differentiated()
    columns = ("decomposition", "lowering", "extern", "inverse", "vjp")
    tables: dict[str, dict[str, Any]] = {name: {} for name in columns}
    for name in columns:
        for op, rule in ALL[name].items():
            tables[name][key_name(op)] = rule
    overloads = {name for table in tables.values() for name in table if name.count(".") > 1}
    packets = {name for name in tables["extern"] if name.count(".") == 1}
    packets -= {packet_name(name) for name in overloads}
    lines = [
        "# Operators",
        "",
        "What happens to each ATen operator on its way to a kernel. A *decomposition* writes it with simpler",
        "operators; a *lowering* makes loops of it; what has neither, and what is listed as *extern*, is",
        "called as PyTorch's own kernel. Gradients come from PyTorch's table of derivatives while the joint",
        "graph is traced; a blank says that the operator is differentiated through its parts, or not at all.",
        "",
        f"{len(tables['decomposition'])} decompositions, {len(tables['lowering'])} lowerings and",
        f"{len(tables['extern'])} reasons for extern calls, as `minicompile rules` lists them.",
        "",
        "| operator | decomposition | lowering | extern | gradient |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in sorted(overloads | packets):
        packet = packet_name(name)
        cells = [f"`{name}`"]
        for column in ("decomposition", "lowering"):
            rule = tables[column].get(name)
            cells.append("" if rule is None else rule_cell(rule, link))
        cells.append(tables["extern"].get(name) or tables["extern"].get(packet) or "")
        own = name in tables["vjp"]
        cells.append("a rule" if own else "PyTorch's formula" if packet in formulas else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------- measurements


def bars(seconds: dict[str, float]) -> str:
    """A bar for each compiler, the slowest full; the numbers stand in the table beside it."""
    most = max(seconds.values())
    rows = "".join(
        f'<span class="measured-bar" style="width:{100 * value / most:.1f}%" data-who="{who}"></span>'
        for who, value in seconds.items()
    )
    return f'<span class="measured-bars" aria-hidden="true">{rows}</span>'


def measured() -> str:
    """The stored measurements, a section for each."""
    lines = [
        "# Measured",
        "",
        "Each table is a stored result of `python -m minicompile bench`: milliseconds a call. Bars compare",
        '<span class="measured-key" data-who="eager">eager</span>,',
        '<span class="measured-key" data-who="torch.compile">torch.compile</span> and',
        '<span class="measured-key" data-who="minicompile">minicompile</span>; the longest of a row is full.',
        "",
    ]
    for file in sorted(RESULTS.glob("*.json")):
        for result in json.loads(file.read_text(encoding="utf-8")):
            lines += section(file.name, result)
    return "\n".join(lines) + "\n"


def section(file: str, result: dict[str, Any]) -> Iterator[str]:
    machine, versions = result["machine"], result["versions"]
    kinds = "first calls" if result["first_calls"] else file.removesuffix(".json").split("-")[-1]
    yield f"## {machine.get('gpu') or machine['processor']}: {kinds}, {result['dtype']}"
    yield ""
    known = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "triton"))
    yield f"`{file}`, {result['date'][:10]}, commit `{result['commit']}`, {known}."
    yield f"By `{result['command']}`."
    yield ""
    if result["cases"]:
        yield from cases(result["cases"])
    if result["first_calls"]:
        yield from first_calls(result["first_calls"])


def cases(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield '<table class="measured"><thead><tr><th>case</th><th>compared</th><th>eager</th>'
    yield "<th>torch.compile</th><th>minicompile</th><th>ours / theirs</th></tr></thead><tbody>"
    for case in rows:
        seconds = case["seconds"]
        cells = "".join(
            f"<td>{1000 * seconds[who]:.3g}</td>" if who in seconds else "<td>failed</td>"
            for who in ("eager", "torch.compile", "minicompile")
        )
        ratio = case["to_theirs"]
        ours = f"{ratio['median']:.2f}" if ratio else ""
        yield f"<tr><th scope=row>{html.escape(case['case'])}</th><td>{bars(seconds)}</td>"
        yield f"{cells}<td>{ours}</td></tr>"
    yield "</tbody></table>"
    yield ""


def first_calls(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "Seconds to the first answer of a process:"
    yield ""
    yield "| model | state of the caches | torch.compile | minicompile |"
    yield "| --- | --- | ---: | ---: |"
    for row in rows:
        yield f"| `{row['case']}` | {row['state']} | {row['theirs']:.1f} | {row['ours']:.1f} |"
    yield ""
