"""`python -m tests.bench.explorer --layers 12`: how large the explorer of a GPT-2 training step is, how fast.

Traces one step (forward and backward) of transformers' GPT-2 of that many layers, writes the explorer with
`trace.save`, and opens it in Chromium. Opening is timed from the start of the navigation until a mouse that
points at a line has lit it. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOST_BYTES, MOST_SECONDS = 15_000_000, 3.0
OPENINGS = 5


def gpt2_step(layers: int, width: int = 768, heads: int = 12, words: int = 50257) -> Any:
    """The trace of a training step, from random weights."""
    import torch
    import transformers

    import minicompile as mc

    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": words}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).train()
    model.config.use_cache = False
    ids = torch.randint(0, 512, (2, 256))
    return mc.trace(lambda ids: model(ids, labels=ids).loss, ids)


def opening_seconds(page: Path, times: int = OPENINGS) -> list[float]:
    """From navigation until a hover lights lines, in a fresh window each time."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    found = []
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        for _ in range(times):
            window = browser.new_page(viewport={"width": 1280, "height": 900})
            start = time.perf_counter()
            window.goto(page.as_uri(), wait_until="commit")
            window.locator(
                ".mc.trace.live .pane[data-p=kernels] .ln:not([data-n='0'])"
            ).first.hover()
            window.wait_for_selector(".ln.hot")
            found.append(time.perf_counter() - start)
            window.close()
        browser.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Size and speed of the explorer.")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--out", type=Path, help="keep the files in this folder")
    chosen = parser.parse_args(arguments)
    start = time.perf_counter()
    trace = gpt2_step(chosen.layers)
    traced = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        view = trace.explore()
        html = view._repr_mimebundle_()["text/html"]
        shown = time.perf_counter() - start
        start = time.perf_counter()
        page = trace.save(chosen.out or folder)
        written = time.perf_counter() - start
        size, files = page.stat().st_size, [f.stat().st_size for f in page.parent.iterdir()]
        opened = opening_seconds(page)
    lines = sum(pane.lines for pane in view.panes)
    print(
        f"{chosen.layers} layers: {lines:,} lines in {len(view.panes)} panes, traced in {traced:.1f} s"
    )
    print(f"explorer: {len(html.encode()) / 1e6:.1f} MB, made in {shown:.1f} s")
    print(
        f"index.html: {size / 1e6:.1f} MB (target {MOST_BYTES / 1e6:.0f}); the folder, "
        f"{len(files)} files of {sum(files) / 1e6:.1f} MB, written in {written:.1f} s"
    )
    print(
        f"opens in {statistics.median(opened):.2f} s, at most {max(opened):.2f} s (target {MOST_SECONDS:.0f})"
    )
    return 0 if size < MOST_BYTES and max(opened) < MOST_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
