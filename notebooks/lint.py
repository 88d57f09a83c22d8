"""`python -m notebooks.lint [NN ...]`: what a lesson's text must keep. A line for each finding, exit code 1.

For contributors, in the order in which it is checked:

structure   A question as title, goals ("After this lesson you can ..."), a picture within the first three
            code cells, "Predict, then run", "Break it", a box "In torch.compile" with a live cell, a recap
            of five sentences, four or more exercises of rising level (statement with its difficulty and
            points, "You will need", two or three hints, each to be opened, answer, check, three wrong
            answers), "Go deeper", the strip; two views that move; every code cell has a name; no text of
            more than eight lines (twelve for exercises, hints and lists).
spelling    Every word of the prose is in a dictionary, British or American, or in `terms/words.txt`, or in
            `words = [...]` of the lesson's `terms/NN.toml`, or a term.
links       Relative links and files in backticks exist, here or in the installed PyTorch; web addresses are
            well-formed (nothing is fetched).
numbers     A number in prose stands in the code or the output of the cell before or after it. (So do number
            words from three to twelve before something that a lesson counts: "five kernels".)
vocabulary  A term of the glossary is in italics, *so*, and explained, where it is first used or before;
            so are no other one to three words. A name in backticks is in code or output that the reader
            saw, up to the next cell, or is Python's, PyTorch's or this package's. Headings of views are
            terms explained so far, or stand in `terms/labels.toml`.

Labels, pictures and outputs are read from the solution; where it isn't built these checks are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import inspect
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from minicompile.errors import MinicompileError
from minicompile.lessons.exercise import DIFFICULTY, LEVELS, Exercise, Lesson
from minicompile.ops.display import count_text
from notebooks import names
from notebooks.build import find_folder
from notebooks.reading import (
    ADDRESS,
    CODE,
    COVER,
    FENCE,
    GOALS,
    LINK,
    Cell,
    Course,
    Text,
    covered,
    minutes,
    read_course,
    where,
)
from notebooks.vocabulary import vocabulary

LONGEST, LONGEST_LIST, WIDTH = 8, 12, 110
"""Lines of a text cell, of one with an exercise, a hint or a list, and characters of a line."""


class Finding(NamedTuple):
    """Something to mend in a lesson."""

    lesson: str
    cell: str
    problem: str

    def __str__(self) -> str:
        return f"{self.lesson} {self.cell}: {self.problem}"


@functools.cache
def checks_of(number: str, folder: Path) -> Lesson | None:
    """The checks of a lesson in `folder`, None where there are none. Raises MinicompileError."""
    path = folder / "checks" / f"lesson_{number}.py"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location(f"lint_checks_{number}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise MinicompileError(f"checks/{path.name}: {error}") from error
    found: Lesson = module.lesson
    return found


# ------------------------------------------------------------------------------------------------ structure


def structure(lesson: Text, course: Course) -> Iterator[tuple[str, str]]:
    """What a lesson must have, in order."""
    prose = [cell for cell in lesson.cells if not cell.code]
    first = prose[0].text if prose else ""
    if not re.match(rf"# {lesson.number} · [^\n]+\?\s*(\n|\Z)", first):
        yield "title", f"the first text must begin with `# {lesson.number} · A question?`"
    yield from goals(lesson)
    for cell in lesson.cells:
        if cell.code and not cell.named:
            yield where(cell), f"has no name: {cell.text.strip().splitlines()[:1]}"
    setup = lesson.code[0] if lesson.code else None
    if setup is None or "setup" not in setup.tags or f'checks("{lesson.number}")' not in setup.text:
        yield (
            "setup",
            f'the first code cell must be tagged "setup" and call checks("{lesson.number}")',
        )
    for words in ("Predict, then run", "Break it"):
        if not any(re.search(rf"\*\*{words}|^#+ {words}", c.text, re.M) for c in prose):
            yield "lesson", f"has no **{words}**"
    box = [i for i, c in enumerate(lesson.cells) if not c.code and "> **In torch.compile" in c.text]
    if not any(lesson.cells[i + 1].code for i in box if i + 1 < len(lesson.cells)):
        yield "lesson", "has no box `> **In torch.compile.** ...` followed by a live cell"
    yield from recap(lesson)
    yield from ending(lesson)
    yield from lengths(lesson)
    yield from views(lesson)
    yield from exercises(lesson, course)


def goals(lesson: Text) -> Iterator[tuple[str, str]]:
    for cell in lesson.cells:
        if not cell.code and (found := GOALS.search(cell.text)):
            listed = cell.text[found.end() :]
            count = len(re.findall(r"^\s*(?:[-*]|\d+\.) ", listed, re.M))
            if count not in (2, 3):
                yield where(cell), f"lists {count} goals, expected two or three"
            return
    yield "goals", "no list after `After this lesson you can`"


def recap(lesson: Text) -> Iterator[tuple[str, str]]:
    """A numbered list of five, one sentence each."""
    for cell in lesson.cells:
        if cell.code or not re.search(r"^#+ Recap\b", cell.text, re.M):
            continue
        after = re.split(r"^#+ Recap\b", cell.prose, maxsplit=1, flags=re.M)[1]
        after = re.split(r"^#+ ", after, maxsplit=1, flags=re.M)[0]
        items = re.split(r"^\s*\d+\. ", after, flags=re.M)[1:]
        if len(items) != 5:
            yield where(cell), f"the recap has {len(items)} numbered sentences, expected five"
        for number, item in enumerate(items, 1):
            ends = len(re.findall(r"[.!?][\")*]*(?=\s|\Z)", item))
            if ends != 1:
                yield where(cell), f"point {number} of the recap has {ends} sentences, expected one"
        return
    yield "recap", "no heading `## Recap` with five numbered sentences"


def ending(lesson: Text) -> Iterator[tuple[str, str]]:
    """Recap, exercises, "Go deeper", the strip, in this order."""
    marks = {
        "Recap": r"^#+ Recap\b",
        "Exercise 1": r"\*\*Exercise 1\b",
        "Go deeper": r"^(#+ |\*\*)Go deeper",
        "Where you are": r"^(#+ |\*\*)Where you are",
    }
    places = {}
    for name, pattern in marks.items():
        found = [
            i for i, c in enumerate(lesson.cells) if not c.code and re.search(pattern, c.text, re.M)
        ]
        if not found:
            yield "lesson", f"has no `{name}`"
        else:
            places[name] = found[0]
    if list(places) != sorted(places, key=lambda name: places[name]):
        yield "lesson", f"expected the order {', '.join(marks)}"
    if "Go deeper" in places:
        cell = lesson.cells[places["Go deeper"]]
        files = [name for name in cell.names if names.is_path(name)]
        for top, whose in (("minicompile/", "this package"), ("torch/", "PyTorch")):
            if not any(file.startswith(top) for file in files):
                yield where(cell), f"names no file of {whose} (`{top}...`)"
    if not lesson.code or "corridor(" not in lesson.code[-1].text:
        yield "strip", "the last cell must light the room: corridor(...)"


def lengths(lesson: Text) -> Iterator[tuple[str, str]]:
    for cell in lesson.cells:
        if cell.code:
            continue
        text = FENCE.sub("", cell.text)
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        count = sum(math.ceil(len(line) / WIDTH) for line in lines if "<details>" not in line)
        count -= text.count("</details>")
        longer = re.search(r"\*\*Exercise|<details>|^\s*(?:[-*]|\d+\.) |^\|", text, re.M)
        allowed = LONGEST_LIST if longer else LONGEST
        if count > allowed:
            yield where(cell), f"has {count} lines of text, allowed {allowed}"


def views(lesson: Text) -> Iterator[tuple[str, str]]:
    if not lesson.built:
        return
    if not any(cell.shown.picture for cell in lesson.code[:3]):
        yield "lesson", "no picture within the first three code cells"
    live = [cell for cell in lesson.code if cell.shown.interactive or made_live(cell)]
    if len(live) < 2:
        yield "lesson", f"{len(live)} interactive views, expected two or more"


def made_live(cell: Cell) -> bool:
    """Whether a cell whose output isn't kept shows a view with controls."""
    return (
        "varies" in cell.tags
        and re.search(r"what_if\(|interact\(|widgets\.", cell.text) is not None
    )


def exercises(lesson: Text, course: Course) -> Iterator[tuple[str, str]]:
    try:
        checks = checks_of(lesson.number, course.folder)
    except MinicompileError as error:
        yield "exercises", str(error)
        return
    if checks is None:
        yield "exercises", f"there is no checks/lesson_{lesson.number}.py"
        return
    found = list(checks.exercises.values())
    if len(found) < 4:
        yield "exercises", f"{len(found)} exercises, expected four or more"
    levels = [LEVELS.index(exercise.level) for exercise in found]
    if levels != sorted(levels):
        yield "exercises", f"levels don't rise: {', '.join(e.level for e in found)}"
    if sum(exercise.level in ("implement", "real") for exercise in found) < 2:
        yield "exercises", "fewer than two implement something that the compiler then uses"
    for exercise in found:
        for problem in parts_of(lesson, exercise):
            yield exercise.name, problem


def parts_of(lesson: Text, exercise: Exercise) -> Iterator[str]:
    """What an exercise lacks."""
    cells, name = list(lesson.cells), exercise.name
    number = re.sub(r"\D", "", name)
    starts = [i for i, c in enumerate(cells) if not c.code and f"**Exercise {number} " in c.text]
    own = [i for i, c in enumerate(cells) if c.exercise == name and c.code]
    answers = [i for i in own if "answer" in cells[i].tags]
    checking = [i for i in own if "nbval-check-output" in cells[i].tags]
    wrong = [i for i in own if "wrong" in cells[i].tags]
    if not starts:
        yield f"no text begins `**Exercise {number} · title** (easy, 1 point).`"
    else:
        told = re.search(
            rf"\*\*Exercise {number} .*?\((\w+, \d+ points?(?:, optional)?)\)",
            cells[starts[0]].text,
            re.S,
        )
        right = f"{DIFFICULTY[exercise.level]}, {count_text(exercise.points, 'point')}"
        right += ", optional" * (exercise.level == "stretch")
        if told is None or " ".join(told[1].split()) != right:
            yield f"its text says {told[1] if told else 'nothing'}, its check {right}"
        until = answers[0] if answers else len(cells)
        text = "\n".join(cell.text for cell in cells[starts[0] : until] if not cell.code)
        yield from help_in(text)
    if len(answers) != 1:
        yield f'{len(answers)} cells tagged "answer", expected one'
    if not any(f'check("{name}")' in cells[i].text for i in checking):
        yield f'no cell tagged "nbval-check-output" with check("{name}")'
    if len(wrong) < 3:
        yield f"{len(wrong)} wrong answers, expected three or more"


def help_in(text: str) -> Iterator[str]:
    """What the text of an exercise lacks above its answer: what is needed, and hints, one at a time."""
    needed = re.search(r"\*\*You will need\*\*\n\n- .*`", text)
    hints = re.findall(r"<details><summary>Hint (\d) of (\d)</summary>\n\n(?!</)", text)
    steps = [(str(n), str(len(hints))) for n in range(1, len(hints) + 1)]
    if needed is None:
        yield "has no list `**You will need**` of names, with an example each, before its answer"
    if len(hints) not in (2, 3) or hints != steps or text.count("</details>") != len(hints):
        yield "needs `<details><summary>Hint 1 of 2</summary>` and one or two more before its answer"
    elif needed is not None and needed.start() > text.index("<details>"):
        yield "opens with hints: what the reader needs comes first"


# ------------------------------------------------------------------------------------------------- spelling

ENDINGS = (
    ("our", "or"), ("oured", "ored"), ("ouring", "oring"), ("ourful", "orful"), ("iour", "ior"),
    ("ise", "ize"), ("ised", "ized"), ("ising", "izing"), ("iser", "izer"), ("isable", "izable"),
    ("isation", "ization"), ("yse", "yze"), ("ysed", "yzed"), ("ysing", "yzing"), ("tre", "ter"),
    ("lled", "led"), ("lling", "ling"), ("ller", "ler"), ("ence", "ense"), ("ogue", "og"),
    ("ourite", "orite"), ("mme", "m"), ("able", "e"), ("able", ""),
)  # fmt: skip
"""British endings and what American dictionaries have for them."""
BEGINNINGS = ("un", "re", "non", "pre", "sub", "in", "over", "multi")


@functools.cache
def dictionary() -> Any:
    """The English dictionary. Raises MinicompileError where it isn't installed."""
    try:
        from spellchecker import SpellChecker
    except ImportError as error:
        raise MinicompileError(f"{error}; pip install 'minicompile[dev]' brings it") from error
    return SpellChecker()


@functools.cache
def spelled(word: str) -> bool:
    """Whether an English dictionary has a word, in British or American spelling."""
    lower = word.lower().replace("’", "'")
    lower = re.sub(r"'s?$", "", lower)
    if len(lower) < 2 or lower in dictionary():
        return True
    for british, american in ENDINGS:
        for plural in ("", "s"):
            stem = lower.removesuffix(british + plural)
            if stem != lower and stem + american + plural in dictionary():
                return True
    for beginning in BEGINNINGS:
        rest = lower.removeprefix(beginning)
        if rest != lower and len(rest) > 3 and spelled(rest):
            return True
    return False


def prose_words(text: str) -> list[str]:
    """The words of covered prose: no names in code style, no abbreviations in capitals such as GPU."""
    found = re.findall(rf"(?<![\w{COVER}.@/-])[A-Za-z]+(?:['’-][A-Za-z]+)*(?![\w{COVER}])", text)
    parts = [part for word in found for part in word.split("-")]
    return [part for part in parts if not re.fullmatch(r"[A-Z]{2,6}(?:['’]?s)?", part)]


def bare(word: str) -> str:
    """A word without capitals and genitive."""
    return re.sub(r"['’]s?$", "", word).lower()


def own_words(course: Course) -> set[str]:
    """Words that are right though no dictionary has them."""
    listed = {bare(word) for words in course.glossary.words.values() for word in words}
    for term in course.glossary.terms:
        listed.update(
            part.lower() for form in term.forms for part in re.findall(r"[A-Za-z]+", form)
        )
    return listed


def misspelled(text: str, own: set[str]) -> list[str]:
    def good(word: str) -> bool:
        return bare(word) in own or bare(word).removesuffix("s") in own or spelled(word)

    return [word for word in dict.fromkeys(prose_words(text)) if not good(word)]


def spelling(lesson: Text, course: Course) -> Iterator[tuple[str, str]]:
    own = own_words(course)
    for cell in lesson.cells:
        if not cell.code:
            for word in misspelled(cell.prose, own):
                yield where(cell), f"spelling: {word}"
    for term in course.glossary.terms:
        if term.lesson == lesson.number:
            for word in misspelled(covered(term.means, CODE), own):
                yield (
                    f"terms/{lesson.number}.toml",
                    f"spelling in the meaning of {term.name!r}: {word}",
                )


def unused_words(course: Course) -> list[str]:
    """Listed words that no lesson uses, or that need not be listed."""
    texts = [cell.prose for lesson in course.lessons for cell in lesson.cells if not cell.code]
    texts += [covered(term.means, CODE) for term in course.glossary.terms]
    texts += course.glossary.labels.values()
    used = {bare(word) for text in texts for word in prose_words(text)}
    used |= {word.removesuffix("s") for word in used}
    listed = [word for words in course.glossary.words.values() for word in words]
    return [word for word in listed if bare(word) not in used or spelled(word)]


# ---------------------------------------------------------------------------------------------------- links


def links(lesson: Text, course: Course) -> Iterator[tuple[str, str]]:
    for cell in lesson.cells:
        if cell.code:
            continue
        text = covered(cell.text, FENCE, CODE)
        targets = [found["target"] for found in LINK.finditer(text)]
        targets += re.findall(r"<(?:a|img)\b[^>]*?\b(?:href|src)=[\"']([^\"']+)", text)
        targets += [found[0].rstrip(".,;:") for found in ADDRESS.finditer(text)]
        for target in dict.fromkeys(targets):
            if problem := broken(target, lesson, course):
                yield where(cell), problem
        for name in cell.names:
            foreign = (
                names.is_path(name)
                and f"`{name}`](http" not in cell.text
                and not made_by_reader(name, lesson)
            )
            if foreign and not names.path_exists(name, course.root):
                yield where(cell), f"there is no file `{name}`"


def made_by_reader(name: str, lesson: Text) -> bool:
    """Whether a path is one that the lesson's own code writes or prints."""
    return any(name in cell.text or name in cell.shown.text for cell in lesson.code)


def broken(target: str, lesson: Text, course: Course) -> str:
    """What is wrong with a link, "" if nothing is."""
    if re.match(r"[a-z]+:", target):
        parts = urlsplit(target)
        fine = parts.scheme in ("http", "https") and re.fullmatch(
            r"[\w-]+(\.[\w-]+)+(:\d+)?", parts.netloc
        )
        return "" if fine else f"{target!r} is no web address"
    path, _, anchor = target.partition("#")
    if path:
        lessons = {f"{source.source.stem}.ipynb" for source in course.lessons}
        exists = (course.folder / path).exists() or path in lessons
        return "" if exists else f"the link {target!r} leads nowhere"
    headings = [
        line.lstrip("# ").strip().replace(" ", "-")
        for cell in lesson.cells
        if not cell.code
        for line in cell.text.splitlines()
        if line.startswith("#")
    ]
    return "" if anchor in headings else f"no heading for the link {target!r}"


# -------------------------------------------------------------------------------------------------- numbers

UNSHOWN = "is neither in the cell before nor in the one after"
NUMBER_WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"
]  # fmt: skip
COUNTED = "kernels guards buffers launches instructions recompiles recompilations compilations"
COUNTED += " nests loops graphs breaks fusions"
NUMBER = re.compile(r"(?<![\w.\x01-])\d+(?:[.,]\d+)*(?:e[+-]?\d+)?(?![\w\x01])")
COUNT = re.compile(
    rf"\b({'|'.join(NUMBER_WORDS[3:])})\s+(?:\w+\s+)?(?:{'|'.join(COUNTED.split())})\b", re.I
)
CLAIM = re.compile(r"[^=<>!]==?\s+(-?\d+(?:[.,]\d+)*)\s*$")
"""Code that says what comes out: `log(96) = 4.56`."""
NO_CLAIM: tuple[re.Pattern[str], ...] = (
    re.compile(r"^#+ \d\d ·.*$", re.M),
    re.compile(r"^\s*\d+\. ", re.M),
    re.compile(
        r"\b(?:lessons?|exercises?|rooms?|python|pytorch)\s+[\d.]+(?:(?:,| and| to)\s+[\d.]+)*",
        re.I,
    ),
    re.compile(
        r"\b(?:versions?|dims?|dimensions?|axis|rows?|columns?|elements?|lanes?)\s+\d+(?: and \d+)*"
    ),
    re.compile(r"\(\w+, \d+ points?\b"),
    re.compile(r"Hint \d of \d"),
    re.compile(r"\d+-?(?:bit|byte|D)\b"),
    re.compile(r"\bC\+\+\d+"),
    re.compile(r"\bfrom [01]\b"),
)


def numbers(lesson: Text, course: Course) -> Iterator[tuple[str, str]]:
    checks = None
    with contextlib.suppress(MinicompileError):  # said by `exercises`
        checks = checks_of(lesson.number, course.folder)
    current = ""
    for place, cell in enumerate(lesson.cells):
        if cell.code:
            continue
        if found := re.search(r"\*\*Exercise (\d+)", cell.text):
            current = f"ex{found[1]}"
        shown = " ".join(f"{near.text}\n{near.shown.text}" for near in lesson.beside(place))
        if checks is not None and current in checks.exercises:
            shown += inspect.getsource(checks.exercises[current].test)
        figures = re.findall(r"\d+(?:[.,_]\d+)*(?:e[+-]?\d+)?", shown)
        spelled_out = set(re.findall(r"[a-z]+", shown.lower())) & set(NUMBER_WORDS)
        there = {plain_number(number) for number in figures}
        there |= {str(NUMBER_WORDS.index(word)) for word in spelled_out}
        text = covered(cell.prose, *NO_CLAIM)
        said = [found[0] for found in NUMBER.finditer(text)]
        said += [found[1] for name in cell.names if (found := CLAIM.search(name))]
        for number in dict.fromkeys(said):
            if plain_number(number) not in there:
                yield where(cell), f"{number} {UNSHOWN}"
        for found in COUNT.finditer(text):
            if str(NUMBER_WORDS.index(found[1].lower())) not in there:
                words = " ".join(found[0].split())
                yield where(cell), f"{words!r}: the number {UNSHOWN}"


def plain_number(number: str) -> str:
    return re.sub(r"(?<=\d)[,_](?=\d{3})", "", number).rstrip(".,")


# ------------------------------------------------------------------------------------------------------ all

CHECKS = (structure, spelling, links, numbers, vocabulary)


def chosen_by(lesson: Text, wanted: Sequence[str]) -> bool:
    return not wanted or lesson.source.stem.startswith(tuple(wanted))


def findings(course: Course, wanted: Sequence[str] = ()) -> Iterator[Finding]:
    """Everything to mend in the lessons that begin with one of these numbers, or in all."""
    for lesson in course.lessons:
        if chosen_by(lesson, wanted):
            for check in CHECKS:
                for cell, problem in check(lesson, course):
                    yield Finding(lesson.number, cell, problem)


def shared_faults(course: Course) -> Iterator[Finding]:
    """What is to mend in the lists that all lessons share."""
    for word in unused_words(course):
        yield Finding("--", "words", f"{word!r} is used nowhere, or need not be listed")
    for file, words in course.glossary.words.items():
        in_order = sorted(set(words), key=str.lower)
        if len(words) != len(in_order) or (file == "words.txt" and list(words) != in_order):
            yield Finding("--", file, "its words are not sorted, or one stands there twice")
    for number, row, right in stale_rows(course):
        yield Finding("--", "README.md", f"lesson {number}: says {row}, expected {right}")


def stale_rows(course: Course) -> Iterator[tuple[str, str, str]]:
    """Of the README's table: lessons whose minutes or exercises are others, what it says, what is so."""
    readme = course.folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    rows = re.findall(r"^\| (\d\d)[^|]*\|[^|]*\| ([^|]*\|[^|]*) \|", text, re.M)
    for number, row in rows:
        lesson = next((lesson for lesson in course.lessons if lesson.number == number), None)
        checks = checks_of(number, course.folder)
        if lesson is not None and checks is not None:
            levels = Counter(DIFFICULTY[exercise.level] for exercise in checks.exercises.values())
            counts = ", ".join(f"{count} {level}" for level, count in levels.items())
            if row != (right := f"{minutes(lesson)} | {counts}"):
                yield number, row, right


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings; exit code 1 if there are any."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m notebooks.lint", description=about)
    parser.add_argument("names", nargs="*", help="lessons by number, such as 03 (default: all)")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="a checkout (default: here)")
    chosen = parser.parse_args(arguments)
    try:
        course = read_course(find_folder(chosen.root.resolve()))
        found = list(findings(course, chosen.names))
        found += [] if chosen.names else list(shared_faults(course))
    except MinicompileError as error:
        print(error, file=sys.stderr)
        return 1
    for lesson in course.lessons:
        if not lesson.built and chosen_by(lesson, chosen.names):
            note = "its solution is not built, so its views are not checked"
            print(f"{lesson.number}: {note}", file=sys.stderr)
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
