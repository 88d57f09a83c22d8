"""`python -m tests.bench.origins`: how much of GPT-2's generated code leads back to source.

Lines of kernels and wrappers, by kind: those that compute, load, store, call or allocate, with origins and
without, and scaffold, which only holds others. Then instructions of the kernels cross-compiled for an H100,
each distinct kernel once: those whose line table names a kernel line, of either kind; the prologue, which
loads parameters before the first such line; those that LLVM made of several lines' and gave line 0; and the
rest, without.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import minicompile as mc
from minicompile.codegen.plan import CodeLine, KernelSource
from minicompile.debug.gpu_assembly import Assembly, cross_compile
from minicompile.ops.display import aligned
from minicompile.pipeline_result import Trace

COLUMNS = ("with origins", "without", "scaffold", "prologue", "line 0")
LEVELS = ("ptx", "sass")
INSTRUCTION = {"ptx": r"\t(@?%?\w+ )?[a-z][\w.]*[ ;]", "sass": r"\s*/\*[0-9a-f]{4,}\*/"}
PROLOGUE = r"\tld\.param"


def training(language: str, layers: int = 2) -> Trace:
    """A training step of transformers' GPT-2, small."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tokens = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0, "n_positions": 64}
    size = {"n_embd": 64, "n_layer": layers, "n_head": 4, "use_cache": False}
    ids = torch.randint(0, 128, (2, 64))
    compiled = mc.compile(
        GPT2LMHeadModel(GPT2Config(**tokens, **size, **drop)),
        options={"device_codegen": language},
    )
    return mc.trace(compiled, input_ids=ids, labels=ids)


def kinds(lines: Iterable[CodeLine]) -> Counter[str]:
    """How many lines are scaffold, and how many others have origins or none."""
    found = Counter[str]()
    for line in lines:
        if line.text.strip():
            own = "with origins" if line.origins else "without"
            found["scaffold" if line.scaffold else own] += 1
    return found


def instructions(assembly: Assembly, level: str) -> Counter[str]:
    """How many instructions of a level come from which kind of kernel line."""
    found, located, table = Counter[str](), False, ""
    places = assembly.kernel_lines(level)
    for text, place in zip(assembly.levels[level].splitlines(), places, strict=True):
        table = next(iter(re.findall(r"\.loc\s+\d+ (\d+)", text)), table)
        if not re.match(INSTRUCTION[level], text):
            continue
        located |= place is not None
        if place is not None:
            found["scaffold" if assembly.source.lines[place].scaffold else "with origins"] += 1
        else:
            early = level == "ptx" and (not located or re.match(PROLOGUE, text))
            found["prologue" if early else "line 0" if table == "0" else "without"] += 1
    return found


def kernels(trace: Trace) -> list[KernelSource]:
    return [kernel for stages in trace.graphs.values() for kernel in stages.kernels]


def assemblies(sources: Iterable[KernelSource]) -> Iterator[Assembly]:
    """Each distinct kernel, compiled."""
    distinct = {kernel.text.replace(kernel.name, ""): kernel for kernel in sources}
    yield from map(cross_compile, distinct.values())


def row(name: str, counted: Counter[str]) -> tuple[str, ...]:
    """A row of the table; prologues aren't in the share, and line 0 is not attributed."""
    named = counted["with origins"] + counted["scaffold"]
    share = 100 * named / (named + counted["without"] + counted["line 0"])
    return (name, *(str(counted[column]) for column in COLUMNS), f"{share:.1f} %")


def main() -> None:
    rows: list[tuple[str, ...]] = [("", *COLUMNS, "attributed")]
    for language in ("cpp", "triton"):
        trace = training(language)
        lines = [line for kernel in kernels(trace) for line in kernel.lines]
        rows.append(row(f"{language} kernels, lines", kinds(lines)))
        wrappers = [line for stages in trace.graphs.values() for line in stages.wrapper.lines]
        rows.append(row(f"{language} wrappers, lines", kinds(wrappers)))
    compiled = list(assemblies(kernels(trace)))
    for level in LEVELS:
        found = [instructions(a, level) for a in compiled if level in a.levels]
        total = sum(found, Counter[str]())
        if total:
            rows.append(row(f"{level} of {len(found)} kernels, instructions", total))
    print("\n".join(aligned(rows)))


if __name__ == "__main__":
    main()
