"""Pages in Chromium: opened, written down, driven."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

PANEL = ".jp-NotebookPanel:not(.lm-mod-hidden)"
LONGEST_RUN = 90
"""Seconds that the cells of a notebook may take."""


@dataclass
class Pages:
    """Opens pages of one browser and keeps every address that they ask for."""

    context: Any
    shots: str | None = None
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def open(self, url: str) -> Any:
        page = self.context.new_page()
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("websocket", lambda socket: self.requests.append(socket.url))
        page.on("pageerror", lambda error: self.complaints.append(f"{url}: {error}"))
        page.goto(url)
        return page

    def shot(self, shown: Any, name: str) -> None:
        """A picture of a page or a part of it, if pictures are wanted."""
        if self.shots:
            shown.screenshot(path=Path(self.shots) / f"{name}.png")


@dataclass
class Lab:
    """A running JupyterLab: its address and the folder that it serves."""

    url: str
    token: str
    folder: Path

    def write(self, name: str, *cells: str) -> None:
        """A notebook that was never run."""
        made = nbformat.v4.new_notebook()
        made.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
        made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(made, self.folder / name)

    def open(self, pages: Pages, name: str) -> Any:
        """The notebook in JupyterLab, when its cells are there."""
        return self.ready(pages.open(f"{self.url}/lab/tree/{name}?token={self.token}&reset"))

    def ready(self, page: Any) -> Any:
        """A page of JupyterLab when the cells of a notebook are there."""
        page.set_default_timeout(30_000)
        page.wait_for_selector(f"{PANEL} .jp-Cell")
        return page

    def kernel_answers(self) -> bool:
        """Whether the kernel of a notebook is there; while it starts, the server may not know."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/kernels?token={self.token}") as answer:
                return any(kernel["connections"] for kernel in json.load(answer))
        except urllib.error.HTTPError:
            return False

    def await_kernel(self, page: Any) -> None:
        """Wait until the kernel of the notebook is idle."""
        # Before its kernel answers a notebook looks idle too, and would ask which kernel to start.
        status = f"{PANEL} .jp-Notebook-ExecutionIndicator[data-status={{}}]"
        page.wait_for_selector(status.format("idle"))
        end = time.monotonic() + LONGEST_RUN
        while not self.kernel_answers():
            assert time.monotonic() < end, "the kernel did not start"
            page.wait_for_timeout(100)
        page.wait_for_selector(status.format("idle"))

    def run_all(self, page: Any, name: str) -> None:
        """Run every cell, to the end, and save. An exception in a cell is one here."""
        self.await_kernel(page)
        end = time.monotonic() + LONGEST_RUN
        for item in ("Run", "Run All Cells"):
            page.get_by_role("menuitem", name=item, exact=True).click()
        prompts = page.locator(f"{PANEL} .jp-CodeCell .jp-InputArea-prompt")

        def done() -> bool:
            return all(re.search(r"\d", prompt) for prompt in prompts.all_text_contents())

        while not done() and time.monotonic() < end:
            page.wait_for_timeout(100)
        self.save(page, name)  # a page has no outputs that are out of sight, the file has all
        cells = nbformat.read(self.folder / name, 4).cells
        outputs = [out for cell in cells for out in cell.get("outputs", ())]
        assert [out.evalue for out in outputs if out.output_type == "error"] == []
        assert done(), f"after {LONGEST_RUN} s: {prompts.all_text_contents()}"

    def save(self, page: Any, name: str) -> None:
        """Save as a user does, and wait until the file is written."""

        def written(answer: Any) -> bool:
            return answer.request.method == "PUT" and f"/api/contents/{name}" in answer.url

        with page.expect_response(written):
            page.keyboard.press("Control+s")
