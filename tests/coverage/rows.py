"""Keeps the lines that each test executed: a plug-in of pytest writes rows, `rows` reads them."""

from __future__ import annotations

import mmap
import os
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.coverage.marks import VARIABLE, core_digest, first_lines, put_marks
from tests.imports import ROOT

FOLDER = ROOT / "build" / "coverage"


@dataclass(frozen=True)
class Row:
    """A test, how long it took, and what it executed: a byte for each line of the core, 1 or 0."""

    test: str
    """Its node id; "" for what is executed between tests: imports."""
    long: bool
    """Whether `make test` leaves it out."""
    seconds: float
    compressed: bytes

    @property
    def marks(self) -> bytes:
        return zlib.decompress(self.compressed)


class Writer:
    """Writes a row after each test."""

    def __init__(self, path: Path, lines: mmap.mmap) -> None:
        self.path, self.lines, self.seconds = path, lines, 0.0

    def write(self, test: str, long: bool = False) -> None:
        marks = self.lines[:]
        self.lines[:] = bytes(len(marks))
        with self.path.open("ab") as file:
            pickle.dump(Row(test, long, self.seconds, zlib.compress(marks, 1)), file)
        self.seconds = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.write("")
        result = yield
        self.write(item.nodeid, item.get_closest_marker("long") is not None)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Put marks before anything imports the package; each process that runs tests has its own."""
    file = FOLDER / f"{os.getpid()}.marks"
    file.write_bytes(bytes(first_lines()[Path()]))
    os.environ[VARIABLE] = str(file)
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{ROOT}"
    lines = put_marks(str(file))
    early_config.pluginmanager.register(Writer(file.with_suffix(".rows"), lines))


def rows() -> Iterator[Row]:
    """Yield all rows of the last run. Raises SystemExit where there was none, or the core changed since."""
    digest = FOLDER / "digest"
    if not digest.exists() or digest.read_text() != core_digest():
        raise SystemExit(
            "no coverage of the core as it is: first run python -m tests.coverage --all"
        )
    for path in sorted(FOLDER.glob("*.rows")):
        with path.open("rb") as file:
            while file.peek(1):
                yield pickle.load(file)


def executed_lines() -> bytes:
    """Return a byte for each line of the core: 1 if any test executed it."""
    total = 0
    for row in rows():
        total |= int.from_bytes(row.marks)
    return total.to_bytes(first_lines()[Path()])
