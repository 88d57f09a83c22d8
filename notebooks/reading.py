"""A lesson as the lint reads it: cells with their prose, code and outputs.

Markdown is read by regular expressions that keep every character in its place: what a check must not see
(code, links, tags) is covered by `COVER`, so that a place in the covered text is a place in the source.
"""

from __future__ import annotations

import functools
import html.parser
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minicompile.lessons.notebook import tags
from notebooks.build import ANSI, MARKERS, read_source
from notebooks.glossary import Glossary, read_glossary

GOALS = re.compile(r"After\s+(?:this\s+lesson|it),?\s+you\s+can")
COVER = "\x01"
"""Stands for each character of code, of a link's address or of a tag."""

FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.S | re.M)
CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
TAG = re.compile(r"<!--.*?-->|</?[a-zA-Z][^<>]*>", re.S)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^()\s]*)(?:\s[^)]*)?\)")
ADDRESS = re.compile(r"(?<![\w(])https?://[^\s)>\]`]+")
ITALIC = re.compile(r"(?<![*\w])\*(?![\s*])(?P<inside>[^*]+?)(?<![\s*])\*(?![*\w])")
BOLD = re.compile(r"\*\*(?![\s*])(?P<inside>[^*]+?)\*\*")

LABELS = {"th", "h1", "h2", "h3", "h4", "h5", "h6", "summary"}
TITLED = {"head", "room"}
"""Classes of elements whose bold text is a label: a view's title, a pane's button."""
ASIDE = {"small", "span", "code"}
"""Inside a label: what differs from picture to picture."""
SILENT = {"script", "style"}
VOID = {"br", "img", "hr", "input", "meta", "link", "wbr", "col"}


def covered(text: str, *patterns: re.Pattern[str]) -> str:
    """The text with everything that a pattern finds covered. Line breaks stay."""
    for pattern in patterns:
        text = pattern.sub(lambda found: re.sub(r"[^\n]", COVER, found[0]), text)
    return text


class Reader(html.parser.HTMLParser):
    """Collects what an HTML output shows: all its text, and its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.labels: list[str] = []
        self.open: list[tuple[str, str]] = []
        """Tag and class of each element that is open."""
        self.label = 0
        """How many were open when a label began, 0 outside of labels."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            return
        parent = self.open[-1][1].split() if self.open else []
        self.open.append((tag, dict(attrs).get("class") or ""))
        if tag in LABELS or (tag == "b" and TITLED & set(parent)):
            self.labels.append("")
            self.label = len(self.open)

    def handle_endtag(self, tag: str) -> None:
        if any(tag == name for name, _ in self.open):
            while self.open.pop()[0] != tag:
                pass
        if len(self.open) < self.label:
            self.label = 0

    def handle_data(self, data: str) -> None:
        inside = [name for name, _ in self.open]
        if SILENT & set(inside):
            return
        self.text.append(data)
        if self.label and not ASIDE & set(inside[self.label :]):
            self.labels[-1] += data


@dataclass(frozen=True)
class Shown:
    """The outputs of a code cell: all text, the labels of its views, and whether a view moves."""

    text: str = ""
    labels: tuple[str, ...] = ()
    picture: bool = False
    interactive: bool = False


def shown_by(outputs: Sequence[Any]) -> Shown:
    """What a reader sees of these outputs."""
    texts: list[str] = []
    labels: list[str] = []
    picture = interactive = False
    for output in outputs:
        data = output.get("data", {})
        kinds = {
            kind: "".join(value) for kind, value in data.items() if isinstance(value, str | list)
        }
        texts.append(ANSI.sub("", "".join(output.get("text", ""))))
        texts.append(kinds.get("text/plain", ""))
        markup = kinds.get("text/html", "")
        if markup:
            reader = Reader()
            reader.feed(markup)
            texts.append(" ".join(reader.text))
            labels += [" ".join(label.split()) for label in reader.labels]
        widget = "application/vnd.jupyter.widget-view+json" in data
        picture = (
            picture or bool(markup) or widget or any(kind.startswith("image/") for kind in data)
        )
        interactive = interactive or widget or "<details" in markup or "<script" in markup
    return Shown("\n".join(texts), tuple(dict.fromkeys(filter(None, labels))), picture, interactive)


@dataclass(frozen=True)
class Cell:
    """A cell of a source, with what its execution showed where the solution is built."""

    name: str
    line: int
    text: str
    code: bool
    named: bool
    tags: frozenset[str]
    shown: Shown
    metadata: dict[str, Any]

    @property
    def exercise(self) -> str:
        """ "ex2" for cells called "ex2-...", else ""."""
        found = re.match(r"(ex\w+?)-", self.name)
        return found[1] if found else ""

    @functools.cached_property
    def prose(self) -> str:
        """Markdown without code, addresses and tags."""
        text = covered(self.text, FENCE, CODE, TAG, ADDRESS)
        return LINK.sub(lambda found: covered_target(found), text)

    @functools.cached_property
    def names(self) -> list[str]:
        """What stands in backticks, in order."""
        return [found[2].strip() for found in CODE.finditer(covered(self.text, FENCE))]

    @functools.cached_property
    def italics(self) -> list[tuple[int, str]]:
        """What stands in italics, with its place."""
        text = covered(self.text, FENCE, CODE, TAG)
        text = re.sub(r"^(\s*)\*(?=\s)", r"\1 ", text, flags=re.M)  # a list's star
        return [
            (found.start(), self.text[found.start("inside") : found.end("inside")].replace("`", ""))
            for found in ITALIC.finditer(BOLD.sub(lambda bold: f"  {bold['inside']}  ", text))
        ]


def covered_target(found: re.Match[str]) -> str:
    """A link with its address covered."""
    start, end = (place - found.start() for place in found.span("target"))
    return found[0][:start] + COVER * (end - start) + found[0][end:]


@dataclass(frozen=True)
class Text:
    """A lesson: its number, its source, its cells."""

    number: str
    source: Path
    cells: tuple[Cell, ...]
    built: bool

    @property
    def code(self) -> list[Cell]:
        """The code cells that a learner sees."""
        return [cell for cell in self.cells if cell.code and "wrong" not in cell.tags]

    def beside(self, place: int) -> Iterator[Cell]:
        """The code cells before and after a place, and the cell there if it is one."""
        steps = (range(place - 1, -1, -1), range(place, len(self.cells)))
        for step in steps:
            for at in step:
                if self.cells[at].code and "wrong" not in self.cells[at].tags:
                    yield self.cells[at]
                    break


def read(source: Path, folder: Path) -> Text:
    """A lesson's source, with the outputs of its solution if that is built. Raises MinicompileError."""
    solution = folder / "solutions" / f"{source.stem}.ipynb"
    outputs: dict[str, Any] = {}
    if solution.exists():
        cells = json.loads(solution.read_text(encoding="utf-8"))["cells"]
        outputs = {cell["id"]: cell.get("outputs", ()) for cell in cells}
    lines, at, found = source.read_text(encoding="utf-8").splitlines(), 0, []
    for cell in read_source(source).cells:
        at = next((n for n in range(at, len(lines)) if lines[n].startswith("# %%")), at) + 1
        found.append(
            Cell(
                cell["id"],
                at,
                MARKERS.sub("", cell.source),
                cell.cell_type == "code",
                "name" in cell.metadata,
                frozenset(tags(cell)),
                shown_by(outputs.get(cell["id"], ())),
                dict(cell.metadata),
            )
        )
    return Text(source.stem[:2], source, tuple(found), solution.exists())


def minutes(lesson: Text) -> int:
    """How long reading takes up to the exercises, rounded to five minutes.

    A minute for 120 words or for a picture, four seconds for a line of code, one for a line of output.
    """
    seconds = 0.0
    for cell in lesson.cells:
        if "**Exercise 1" in cell.text:
            break
        if not cell.code:
            seconds += len(re.findall(r"\w[\w'.-]*", cell.text)) / 2
            continue
        seconds += 4 * sum(1 for line in cell.text.splitlines() if line.strip())
        seconds += 60 if cell.shown.picture else cell.shown.text.count("\n")
    return 5 * round(seconds / 300)


@dataclass(frozen=True)
class Course:
    """All lessons of a checkout in order, their glossary, their folder `notebooks`."""

    lessons: tuple[Text, ...]
    glossary: Glossary
    folder: Path

    @property
    def root(self) -> Path:
        return self.folder.parent


def read_course(folder: Path) -> Course:
    """Every source below `folder`. Raises MinicompileError."""
    sources = sorted((folder / "src").glob("*.py"))
    lessons = tuple(read(source, folder) for source in sources)
    return Course(lessons, read_glossary(folder), folder)


def where(cell: Cell) -> str:
    return cell.name if cell.named else f"{cell.name} (line {cell.line})"
