"""The lint's check of vocabulary: terms, names and labels of views are explained before they are used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from notebooks import names
from notebooks.glossary import Term, folded
from notebooks.reading import FENCE, GOALS, Cell, Course, Text, covered, where


class Place(NamedTuple):
    """Where something stands: lesson, cell, character."""

    lesson: int
    cell: int
    at: int


def pattern_of(form: str) -> str:
    return r"[-\s]+".join(map(re.escape, re.split(r"[-\s]+", form)))


def explanations(course: Course) -> dict[str, Place]:
    """Where each term first stands in italics: the start of that paragraph."""
    found: dict[str, Place] = {}
    for number, lesson in enumerate(course.lessons):
        for place, cell in enumerate(lesson.cells):
            for at, italic in () if cell.code else cell.italics:
                if term := course.glossary.find(italic):
                    start = paragraph_start(cell.text, at)
                    found.setdefault(term.name, Place(number, place, start))
    return found


def paragraph_start(text: str, at: int) -> int:
    """Where the paragraph of a place begins, or the heading right above it."""
    start = max(text.rfind("\n\n", 0, at), 0)
    above = text.rfind("\n\n", 0, start) if start else 0
    heading = max(above, 0)
    return heading if text[heading:start].strip().startswith("#") else start


def vocabulary(lesson: Text, course: Course) -> Iterator[tuple[str, str]]:
    number = course.lessons.index(lesson)
    explained = explanations(course)
    yield from own_terms(lesson, course, explained)
    yield from uses(lesson, course, explained)
    exercise = ""
    for place, cell in enumerate(lesson.cells):
        if cell.code:
            continue
        for _, italic in cell.italics:
            if course.glossary.find(italic) is None and len(italic.split()) <= 3:
                words = " ".join(italic.split())
                yield where(cell), f"{words!r} is in italics, but no term of the glossary"
        until = next(
            (i for i in range(place, len(lesson.cells)) if visible(lesson.cells[i])), place
        )
        if found := re.search(r"\*\*Exercise (\d+)", cell.text):
            exercise = f"ex{found[1]}"
        near = [c for c in lesson.cells[until + 1 :] if exercise and c.exercise == exercise]
        known = [c for c in (*lesson.cells[: until + 1], *near) if not wrong(c)]
        seen = "\n".join(map(shown_text, known))
        seen_words = names.words(seen)
        terms = {folded(form) for term in course.glossary.terms for form in term.forms}
        so_far = {
            folded(form)
            for term in course.glossary.terms
            if explained.get(term.name, NEVER) <= Place(number, place, len(cell.text))
            for form in term.forms
        }
        formulas = names.words(" ".join(name for name in cell.names if len(name) > 1))
        for name in cell.names:
            fine = folded(name) in so_far or (len(name) == 1 and name in formulas)
            if names.is_path(name) or fine:
                continue
            if folded(name) in terms and name not in seen:
                yield where(cell), unknown_name(name, name, lesson)
                continue
            for strange in names.strange(name, " ".join(seen.split()), seen_words, course.root):
                generated = not lesson.built and re.search(r"\d", strange)
                if folded(strange) not in so_far and not generated:
                    yield where(cell), unknown_name(name, strange, lesson)
    yield from labels(lesson, course, explained)


NEVER = Place(10**6, 0, 0)


def wrong(cell: Cell) -> bool:
    return "wrong" in cell.tags


def visible(cell: Cell) -> bool:
    return cell.code and not wrong(cell)


def shown_text(cell: Cell) -> str:
    """What a reader saw of a cell as code: all of a code cell, the fenced parts of a text."""
    if cell.code:
        return f"{cell.text}\n{cell.shown.text}"
    return "\n".join(found[0] for found in FENCE.finditer(cell.text))


def unknown_name(name: str, strange: str, lesson: Text) -> str:
    inside = "" if strange == name else f" in `{name}`"
    later = any(re.search(rf"\b{re.escape(strange)}\b", c.text) for c in lesson.code)
    why = "is used before a cell shows it" if later else "is no name that the reader knows"
    return f"`{strange}`{inside} {why}"


def own_terms(
    lesson: Text, course: Course, explained: dict[str, Place]
) -> Iterator[tuple[str, str]]:
    """Terms of this lesson's own list: explained here, a sentence each, their file there."""
    file = f"terms/{lesson.number}.toml"
    number = course.lessons.index(lesson)
    for term in course.glossary.terms:
        if term.lesson != lesson.number:
            continue
        if explained.get(term.name, NEVER).lesson > number:
            yield file, f"{term.name!r} is never in italics in this lesson"
        if not re.fullmatch(r"[A-Z0-9`].*[.!?]", term.means, re.S):
            yield file, f"the meaning of {term.name!r} is no sentence"
        if not names.path_exists(term.file, course.root) or "/" not in term.file:
            yield file, f"the file of {term.name!r} is not there: {term.file}"


def uses(lesson: Text, course: Course, explained: dict[str, Place]) -> Iterator[tuple[str, str]]:
    """Terms used before they are explained."""
    number = course.lessons.index(lesson)
    forms = {folded(form): term for term in course.glossary.terms for form in term.forms}
    if not forms:
        return
    ordered = sorted(forms, key=len, reverse=True)
    pattern = re.compile(
        rf"(?<![\w\x01])(?:{'|'.join(map(pattern_of, ordered))})(?![\w\x01])", re.I
    )
    told: set[str] = set()
    for place, cell in enumerate(lesson.cells):
        if cell.code:
            continue
        for found in pattern.finditer(without_announcements(cell, lesson, course)):
            term = forms[folded(found[0])]
            at = explained.get(term.name, NEVER)
            elsewhere = term.everyday and term.lesson != lesson.number
            if at <= Place(number, place, found.start()) or term.name in told or elsewhere:
                continue
            told.add(term.name)
            yield (
                where(cell),
                f"{found[0]!r} is used before it is explained: {told_where(term, at, course)}",
            )


def told_where(term: Term, at: Place, course: Course) -> str:
    if at is NEVER or at == NEVER:
        return f"nowhere in italics (a term of {term.lesson}.toml)"
    cell = course.lessons[at.lesson].cells[at.cell]
    return f"first in italics in lesson {course.lessons[at.lesson].number}, {where(cell)}"


def without_announcements(cell: Cell, lesson: Text, course: Course) -> str:
    """Prose without the title, and without this lesson's own terms in the goals: these announce."""
    text = covered(cell.prose, re.compile(r"\A# [^\n]*"))
    announced = GOALS.search(text)
    if announced is None:
        return text
    start = announced.start()
    end = re.search(r"\n\s*\n(?!\s*(?:[-*]|\d+\.) )", text[start:])
    stop = start + end.start() if end else len(text)
    own = [form for t in course.glossary.terms if t.lesson == lesson.number for form in t.forms]
    goals = text[start:stop]
    for form in sorted(own, key=len, reverse=True):
        goals = covered(goals, re.compile(rf"\b{pattern_of(form)}\b", re.I))
    return text[:start] + goals + text[stop:]


LABEL_WORDS = names.words("""
    a after again all an and as at before beside but by come comes each first for from how if in into is it
    last less more most never no not of on one only or other others out than that the their they to two was
    what when where which who whose why with without
""")
"""What needs no explanation."""


def labels(lesson: Text, course: Course, explained: dict[str, Place]) -> Iterator[tuple[str, str]]:
    """Headings of views that neither the glossary, so far, nor `labels.toml` explains."""
    number = course.lessons.index(lesson)
    told: set[str] = set()
    for place, cell in enumerate(lesson.cells):
        if not cell.code or not cell.shown.labels:
            continue
        here = Place(number, place, 0)
        terms = [t for t in course.glossary.terms if explained.get(t.name, NEVER) <= here]
        fine = [folded(form) for term in terms for form in term.forms] + list(
            course.glossary.labels
        )
        for label in cell.shown.labels:
            left = unexplained(label, sorted(fine, key=len, reverse=True), cell.text)
            for word in left:
                if word not in told:
                    told.add(word)
                    inside = "" if word == label.lower() else f" (in {label[:60]!r})"
                    yield where(cell), f"the view's label {word!r}{inside} is not explained"


CODE_LINE = re.compile(r"\w\(|[=\[\]{}<>]|:$")
"""In a label that is a line of code."""


def unexplained(label: str, fine: Sequence[str], source: str) -> list[str]:
    """The words of a label that no phrase explains, without names of code and what the cell itself says."""
    if label in source or CODE_LINE.search(label):
        return []
    label = re.sub(r" of \S+$", "", label)  # "capture of Block"
    words = [w for w in re.split(r"[^\w.'@-]+", label) if re.search(r"[A-Za-z]{2}", w)]
    kept = [w.strip(".'-") for w in words if not re.search(r"[._\d]|[a-z][A-Z]", w.strip(".'-"))]
    text = f" {folded(' '.join(kept))} "
    for phrase in fine:
        while f" {phrase} " in text:
            text = text.replace(f" {phrase} ", " ")
    left = [w for w in text.split() if w not in LABEL_WORDS and len(w) > 1]
    return [w for w in left if not re.search(rf"\b{re.escape(w)}\b", source, re.I)]
