"""The linked view of a trace as a test drives it: lines by pane and number, pointed at with the mouse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Lit = dict[str, set[int]]
"""Lines by pane."""


@dataclass
class Explorer:
    """One view on a page: `root` is its outermost element."""

    root: Any

    def lines(self, pane: str) -> list[str]:
        """The code in a pane, drawn or not."""
        found = self.root.evaluate("(root, pane) => root.explorer.lines(pane)", pane)
        return [line.strip() for line in found]

    def lit(self) -> Lit:
        found: Lit = {}
        for pane, number in self.root.evaluate("(root) => root.explorer.lit()"):
            found.setdefault(pane, set()).add(number)
        return found

    def drawn(self) -> tuple[Lit, Lit]:
        """Of the lines that are drawn: those with the colours of a lit line, and the others."""
        found = self.root.locator(".pane .ln").evaluate_all(
            """(lines) => lines.map((line) => [
                line.matches(".hot, .warm"), line.closest(".pane").dataset.p, Number(line.dataset.n)])"""
        )
        glowing: Lit = {}
        dark: Lit = {}
        for glows, pane, number in found:
            (glowing if glows else dark).setdefault(pane, set()).add(number)
        return glowing, dark

    def panes(self) -> list[str]:
        """All panes, open or not."""
        return self.root.locator(".room").evaluate_all("(all) => all.map((room) => room.dataset.p)")

    def pane(self, pane: str) -> Any:
        return self.root.locator(f".pane[data-p={pane}]")

    def line(self, pane: str, number: int) -> Any:
        return self.pane(pane).locator(f'.ln[data-n="{number}"]')

    @property
    def filter(self) -> Any:
        return self.root.locator("input[aria-label=filter]")

    def open(self, pane: str) -> None:
        if not self.pane(pane).is_visible():
            self.root.locator(f".room[data-p={pane}]").click()

    def bring(self, pane: str, number: int) -> Any:
        """Scroll to a line, which is drawn only where it can be seen."""
        self.open(pane)
        line, view = self.line(pane, number), self.pane(pane).locator(".view")
        drawn = """async (view, by) => {
            const before = view.scrollTop;
            view.scrollBy(0, by * view.clientHeight);
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            return view.scrollTop !== before;
        }"""
        if line.count() == 0:
            view.evaluate(drawn, -1000)
        while line.count() == 0:
            assert view.evaluate(drawn, 1), f"no line {number} in {pane}"
        return line

    def point(self, pane: str, number: int) -> None:
        self.bring(pane, number).hover()

    def reset(self) -> None:
        """Nothing lit or pinned."""
        if self.lit():
            self.filter.press("Escape")
            self.filter.hover()


@dataclass
class Oracle:
    """What each line came from, as the kernel's Python told it: by pane, (graph, code, operations) each."""

    panes: dict[str, list[tuple[str, str, set[int]]]]

    @classmethod
    def of(cls, told: dict[str, list[Any]]) -> Oracle:
        return cls(
            {
                pane: [(graph, code, set(made)) for graph, code, made in lines]
                for pane, lines in told.items()
            }
        )

    def code(self, pane: str) -> list[str]:
        return [code for _, code, _ in self.panes[pane]]

    def number_source(self, shown: list[str]) -> None:
        """Number the lines of source as a view does, which shows those between them too."""
        used = {code: (graph, code, made) for graph, code, made in self.panes["source"]}
        assert len(used) == len(self.panes["source"]), "this needs every line to be different"
        assert set(used) <= set(shown)
        self.panes["source"] = [used.get(code, ("", code, set())) for code in shown]

    def find(self, pane: str, code: str, graph: str = "") -> int:
        """The number of the first line that holds `code`, in the forward or the backward if that is asked."""
        for number, (made, text, _) in enumerate(self.panes[pane]):
            if code in text and graph in ("", made):
                return number
        raise AssertionError(f"no {code!r} in {self.code(pane)}")

    def shares(self, pane: str, number: int) -> Lit:
        """The lines that share an operation with this one."""
        made = self.panes[pane][number][2]
        lit = {p: {i for i, line in enumerate(self.panes[p]) if line[2] & made} for p in self.panes}
        return {pane: lines for pane, lines in lit.items() if lines}
