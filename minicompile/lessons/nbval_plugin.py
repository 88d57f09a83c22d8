"""What the grader adds to nbval: `pytest -p minicompile.lessons.nbval_plugin --grading-results=FILE`.

nbval waits as long as a cell may take where the kernel has died, and without end where a cell never stops
printing. Here a dead kernel is noticed within a second, and one that is past its time is killed. Each cell's
outcome is written to FILE as soon as it is known, a JSON object a line, so that what was graded stays graded
whatever happens later. A cell's points (its metadata) become properties of its test case in JUnit's report.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from queue import Empty
from typing import Any

import pytest
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell

MOST_OUTPUT = 2_000_000
"""Most characters that the cells of one exercise may print."""


class GradingKernel(RunningKernel):  # type: ignore[misc]  # nbval has no types
    """A kernel that is given up once it is dead, silent too long, or too talkative."""

    deadline = float("inf")
    printed = 0
    overdue = False

    def execute_cell_input(self, cell_input: str, allow_stdin: bool | None = None) -> Any:
        self.deadline = float("inf")
        return super().execute_cell_input(cell_input, allow_stdin)

    def get_message(self, stream: str, timeout: float | None = None) -> Any:
        end = min(time.monotonic() + (timeout or 5), self.deadline)
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise Empty
            try:
                message = super().get_message(stream, timeout=min(0.5, left))
            except Empty:
                if not self.is_alive():
                    raise RuntimeError("the kernel died") from None
                continue
            self.printed += len(str(message["content"].get("text", "")))
            if self.printed > MOST_OUTPUT:
                self.kill()
                raise RuntimeError(f"more than {MOST_OUTPUT:,} characters printed")
            return message

    def interrupt(self) -> None:
        """A cell is past its time: what may not listen to an interrupt is killed."""
        self.kill()
        self.overdue = True
        self.deadline = time.monotonic()

    def kill(self) -> None:
        self.km.shutdown_kernel(now=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--grading-results", default="", help="write each cell's outcome here")


def pytest_configure(config: pytest.Config) -> None:
    import nbval.plugin

    nbval.plugin.RunningKernel = GradingKernel


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, IPyNbCell):
            data = item.cell.metadata
            # The verdict is printed; a warning, of a missing compiler say, is none.
            item.parent.skip_compare = (*item.parent.skip_compare, "stderr")
            item.name = item.cell.get("id", item.name)
            item.user_properties += [("points", data.get("points", 0))]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield  # type: ignore[misc]  # what the other plugins made of it
    if isinstance(item, IPyNbCell) and (report.when == "call" or report.outcome == "failed"):
        row = {
            "notebook": item.path.stem,
            "cell": item.cell.get("id", ""),
            "passed": report.outcome == "passed" and not hasattr(report, "wasxfail"),
            "message": "" if report.outcome == "passed" else message_of(item, call),
        }
        with open(item.config.getoption("--grading-results"), "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return report


def message_of(item: Any, call: Any) -> str:
    """Why a cell failed, in the words of its exception."""
    if item.parent.kernel.overdue:
        return f"it took longer than {item.config.option.nbval_cell_timeout:g} seconds"
    for output in item.test_outputs or ():
        if output.output_type == "error":
            prefix = "" if output["ename"] in ("Wrong", "NotAnswered") else f"{output['ename']}: "
            return f"{prefix}{output['evalue']}"
    return str(call.excinfo.value) if call.excinfo else "not run, since an earlier cell failed"


def pytest_unconfigure(config: pytest.Config) -> None:
    import nbval.plugin

    nbval.plugin.RunningKernel = RunningKernel
