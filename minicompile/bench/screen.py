"""Progress and tables: with `rich` where it is installed, in plain text otherwise."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

FILE_WIDTH = 110
"""Characters of a line where the output is no terminal."""


def console() -> Any:
    """A rich console, or None without rich."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    found = Console(soft_wrap=True, highlight=False)
    if not found.is_terminal:
        found.width = FILE_WIDTH
    return found


class Screen:
    """Where a command shows what it does. `plain` leaves rich out even where it is installed."""

    def __init__(self, plain: bool = False) -> None:
        self.console = None if plain else console()

    def say(self, text: str) -> None:
        """A line of text."""
        if self.console is None:
            print(text, flush=True)
        else:
            self.console.print(text, markup=False)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Shows that something takes a while."""
        if self.console is None or not self.console.is_terminal:
            self.say(text)
            yield
        else:
            with self.console.status(text):
                yield

    @contextlib.contextmanager
    def progress(self, text: str, total: int) -> Iterator[Any]:
        """Gives a function that takes how much of `total` is done."""
        if self.console is None or not self.console.is_terminal:
            with plain_progress(text, total) as update:
                yield update
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task(text, total=total)
            yield lambda done: bar.update(task, completed=done)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns of text: the first to the left, the others to the right."""
        if self.console is None:
            print(f"\n{title}\n{plain_table(header, rows)}", flush=True)
            return
        from rich.box import SIMPLE
        from rich.table import Table

        table = Table(title=title, title_justify="left", box=SIMPLE)
        for number, name in enumerate(header):
            widest = max((len(row[number]) for row in rows), default=0)
            table.add_column(
                name, justify="left" if number == 0 else "right", min_width=min(widest, 24)
            )
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


@contextlib.contextmanager
def plain_progress(text: str, total: int) -> Iterator[Any]:
    """A line at every tenth."""
    shown = -1

    def update(done: int) -> None:
        nonlocal shown
        tenth = 10 * done // max(total, 1)
        if tenth > shown:
            shown = tenth
            print(f"{text}: {done}/{total}", flush=True)
            sys.stdout.flush()

    yield update


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as aligned text."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    cells = [header, ["-" * width for width in widths], *rows]
    lines = [
        [
            row[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
        ]
        for row in cells
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)
