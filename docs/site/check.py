"""`python docs/site/check.py build/site/html`: what can be said of the built site without a browser.

Links inside of the site lead to pages and places that are there; no page loads anything from elsewhere; no
page is too large; no lesson shows the answer of an exercise. A line for each finding, exit code 1.
"""

from __future__ import annotations

import functools
import html.parser
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from notebooks.build import read_source, without_answer  # noqa: E402

LARGEST = 1_500_000
"""Most bytes of a page."""
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "link": "href"}
SHORT = 20
"""Shorter lines of an answer may stand anywhere."""


class Page(html.parser.HTMLParser):
    """The places of a page, its links, what it loads, and its text."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.places |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        if tag in LOADING and named.get("rel") not in ("canonical", "next", "prev"):
            self.loads += [named[LOADING[tag]]] if LOADING[tag] in named else []

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)


@functools.cache
def read(file: Path) -> Page:
    return Page(file)


def links(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*.html")):
        page = read(file)
        for address in [*page.links, *page.loads]:
            parts = urlsplit(address)
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                if address in page.loads:
                    yield f"{file}: loads {address}"
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{file}: no page {address}"
            elif (
                parts.fragment
                and target.suffix == ".html"
                and unquote(parts.fragment) not in read(target).places
            ):
                yield f"{file}: no place {address}"


def sizes(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*.html")):
        if file.stat().st_size > LARGEST:
            yield f"{file}: {file.stat().st_size:,} bytes, allowed {LARGEST:,}"


def squeezed(text: str) -> str:
    return " ".join(text.split())


def answer_lines(source: Path) -> set[str]:
    """Lines of a lesson's answers that its learner's notebook has nowhere."""
    cells = read_source(source).cells
    answers = [cell.source for cell in cells if "answer" in cell.metadata.get("tags", [])]
    lines = {squeezed(line) for text in answers for line in text.splitlines()}
    opened = ROOT / "notebooks" / f"{source.stem}.ipynb"
    given = "\n".join(
        "".join(cell["source"]) for cell in json.loads(opened.read_text(encoding="utf-8"))["cells"]
    )
    assert all(without_answer(text) in given for text in answers)
    given = squeezed(given)
    return {line for line in lines if len(line) >= SHORT and line not in given} - {""}


def shown_answers(source: Path, text: str) -> set[str]:
    """Lines of a lesson's answers that a page's text has."""
    text = squeezed(text)
    shown = {line for line in answer_lines(source) if line in text}
    return {line for line in shown if line not in package_text()}


@functools.cache
def package_text() -> str:
    """The compiler's own text, which pictures of kernels and rules may show."""
    files = [*ROOT.glob("minicompile/**/*.py"), *ROOT.glob("minicompile/**/*.h")]
    return squeezed("\n".join(file.read_text(encoding="utf-8") for file in files))


def answers(folder: Path) -> Iterator[str]:
    for source in sorted((ROOT / "notebooks/src").glob("*.py")):
        page = folder / "lessons" / f"{source.stem}.html"
        for line in sorted(shown_answers(source, read(page).text)):
            yield f"{page}: shows an answer: {line}"


def main(folder: Path) -> int:
    findings = [*links(folder), *sizes(folder), *answers(folder)]
    pages = [*folder.rglob("*.html")]
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    largest = max(pages, key=lambda page: page.stat().st_size)
    print(*findings, sep="\n", end="\n" * bool(findings))
    print(
        f"{len(pages)} pages, {total / 1e6:.1f} MB, the largest {largest.name} with "
        f"{largest.stat().st_size / 1e6:.2f} MB; {len(findings)} findings"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
