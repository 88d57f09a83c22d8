"""`python -m notebooks.glossary`: `notebooks/GLOSSARY.md` from the lessons' terms; `--check` compares.

`notebooks/terms/NN.toml` lists what lesson NN explains, in order:

    words = ["autotuned"]            # spelled right, though no dictionary has them (optional)

    [[term]]
    name = "guard"                   # as the prose says it
    also = ["guards"]                # its other forms
    means = "A condition that a later call must meet so that a compiled version may answer it."
    file = "minicompile/dynamo/guards.py"
    everyday = true                  # other lessons may use the word as everybody does (optional)

A term of several lessons belongs to the first. `labels.toml` gives plain words that the views use as headings
a meaning; `words.txt` lists words that are in no dictionary.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minicompile.errors import MinicompileError
from notebooks.build import find_folder


@dataclass(frozen=True)
class Term:
    """A term of a lesson: its forms, its meaning in a sentence, the file to read."""

    lesson: str
    name: str
    also: tuple[str, ...]
    means: str
    file: str
    everyday: bool = False
    """Also a word of every day: only its own lesson must explain it first."""

    @property
    def forms(self) -> tuple[str, ...]:
        return (self.name, *self.also)


@dataclass(frozen=True)
class Glossary:
    """All terms, the first lesson's where several have one; labels of views; words for the dictionary."""

    terms: tuple[Term, ...]
    labels: dict[str, str]
    words: dict[str, tuple[str, ...]]
    """File -> words listed there."""

    def find(self, text: str) -> Term | None:
        """The term that has this form."""
        wanted = folded(text)
        return next((t for t in self.terms if wanted in map(folded, t.forms)), None)


def folded(text: str) -> str:
    """A form for comparing: lower case, one space, no hyphens."""
    return " ".join(re.sub(r"[-\s]+", " ", text).lower().split())


def read_terms(file: Path) -> list[Term]:
    """The terms of a lesson. Raises MinicompileError for what is no term."""
    found = []
    for entry in tables(file).get("term", []):
        unknown = set(entry) - {"name", "also", "means", "file", "everyday"}
        missing = {"name", "means", "file"} - set(entry)
        if unknown or missing:
            wrong = ", ".join(sorted(unknown | missing))
            raise MinicompileError(
                f"{file.name}: {entry.get('name', '?')}: unknown or missing: {wrong}"
            )
        also = tuple(entry.get("also", ()))
        everyday = bool(entry.get("everyday", False))
        found.append(Term(file.stem, entry["name"], also, entry["means"], entry["file"], everyday))
    return found


def tables(file: Path) -> dict[str, list[dict[str, str]]]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise MinicompileError(f"{file.name}: {error}") from error


def read_glossary(folder: Path) -> Glossary:
    """The glossary of the lessons in a `notebooks` folder.

    Words and labels that lessons share come from here where that folder has none. Raises MinicompileError.
    """
    terms: list[Term] = []
    taken: set[str] = set()
    words: dict[str, tuple[str, ...]] = {}
    for file in sorted((folder / "terms").glob("[0-9]*.toml")):
        words[file.name] = tuple(tables(file).get("words", []))  # type: ignore[arg-type]
        for term in read_terms(file):
            if not taken & set(map(folded, term.forms)):
                terms.append(term)
                taken.update(map(folded, term.forms))
    shared = [folder / "terms", Path(__file__).parent / "terms"]
    lists = [place / "words.txt" for place in shared if (place / "words.txt").exists()][:1]
    words.update({file.name: tuple(file.read_text(encoding="utf-8").split()) for file in lists})
    labels: dict[str, str] = {}
    for file in [place / "labels.toml" for place in shared if (place / "labels.toml").exists()][:1]:
        labels = {folded(name): meaning for name, meaning in tables(file).items()}  # type: ignore[misc]
    return Glossary(tuple(terms), labels, words)


def lesson_of(number: str, folder: Path) -> str:
    """A link to a lesson, "" if there is none."""
    found = sorted((folder / "src").glob(f"{number}_*.py"))
    return f"[{number}]({found[0].stem}.ipynb)" if found else number


def written(folder: Path) -> str:
    """The text of GLOSSARY.md."""
    glossary = read_glossary(folder)
    return "\n".join(page(glossary, folder)) + "\n"


def page(glossary: Glossary, folder: Path) -> Iterator[str]:
    yield "# Glossary"
    yield ""
    yield "Made by `python -m notebooks.glossary` from [the lessons' terms](terms)."
    yield ""
    yield "| term | meaning | lesson | source |"
    yield "| --- | --- | --- | --- |"
    for term in sorted(glossary.terms, key=lambda term: folded(term.name)):
        source = f"[{term.file}]({place_of(term.file)})"
        lesson = lesson_of(term.lesson, folder)
        yield f"| {cell(term.name)} | {cell(term.means)} | {lesson} | {source} |"
    if glossary.labels:
        yield ""
        yield "## Words on the views"
        yield ""
        yield "| label | meaning |"
        yield "| --- | --- |"
        for name, meaning in sorted(glossary.labels.items()):
            yield f"| {cell(name)} | {cell(meaning)} |"


def cell(text: str) -> str:
    """Text that stays in its cell of a table."""
    return text.replace("|", "\\|")


def place_of(file: str) -> str:
    """The address of a source file: here, or in PyTorch's repository."""
    if file.startswith("torch/"):
        return f"https://github.com/pytorch/pytorch/blob/main/{file}"
    return f"../{file}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write GLOSSARY.md, or say that it is not what the terms give."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.glossary", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare; write nothing")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="a checkout (default: here)")
    chosen = parser.parse_args(arguments)
    try:
        folder = find_folder(chosen.root.resolve())
        text = written(folder)
    except MinicompileError as error:
        print(error, file=sys.stderr)
        return 1
    target = folder / "GLOSSARY.md"
    if not chosen.check:
        target.write_text(text, encoding="utf-8")
    elif not target.exists() or target.read_text(encoding="utf-8") != text:
        print(
            "GLOSSARY.md is not what the terms give: run python -m notebooks.glossary",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
