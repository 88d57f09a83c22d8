"""Progress and tables: with `rich` where it is installed, in plain text otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minicompile.ops.display import aligned

FILE_WIDTH = 110
"""Characters of a line where the output is no terminal."""


class Screen:
    """Where a command shows what it does. `plain` leaves rich out even where it is installed."""

    def __init__(self, plain: bool = False) -> None:
        self.console: Any = None
        if plain:
            return
        with contextlib.suppress(ImportError):
            from rich.console import Console

            self.console = Console(soft_wrap=True, highlight=False)
            if not self.console.is_terminal:
                self.console.width = FILE_WIDTH

    def say(self, text: str) -> None:
        """A line of text."""
        if self.console is None:
            print(text, flush=True)
        else:
            self.console.print(text, markup=False)

    @contextlib.contextmanager
    def progress(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """Gives a function that takes how much of `total` is done; in plain text, a line at every tenth."""
        shown = -1

        def plain(done: int) -> None:
            nonlocal shown
            tenth = 10 * done // total
            if tenth > shown:
                shown = tenth
                self.say(f"{text}: {done}/{total}")

        if self.console is None or not self.console.is_terminal:
            yield plain
            return
        from rich.progress import Progress

        with Progress(console=self.console) as bar:
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
            table.add_column(name, min_width=min(widest, 24))
            table.columns[number].justify = "right" if number else "left"
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as aligned text."""
    rules = ["-" * max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(aligned([header, rules, *rows]))
