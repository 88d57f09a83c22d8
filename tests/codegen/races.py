"""Data races that the text of a C++ kernel shows: threads that write where others write or read."""

from __future__ import annotations

import re
from collections.abc import Iterator

LOOP = re.compile(r"for \(int64_t (\w+) = ([^;]*);")
DECLARED = re.compile(
    r"^(?:const )?[A-Za-z_][\w:]*(?:<[^>]*>)?(?:\s+|\s*\*\s*)(?:__restrict )?(\w+)\s*(?:\[|=|;)(.*)$"
)
WRITTEN = re.compile(r"^(\w+)(?:\[(.*?)\])? (?:[-+*|&^]?=)(?!=)")
STATEMENTS = {"return", "if", "else", "for", "while", "break", "continue"}


def shared_writes(text: str) -> list[str]:
    """Lines of parallel loops that write to what is declared outside of them, at a place which doesn't depend
    on the iteration."""
    lines = [line.strip() for line in text.splitlines()]
    found = []
    for i, line in enumerate(lines):
        if line.startswith("#pragma omp") and re.search(r"\bfor\b", line):
            own = declared_between(lines, i) if "parallel" not in line else set()
            own |= words(" ".join(re.findall(r"reduction\([^:]*:([^)]*)\)", line)))
            collapse = re.search(r"collapse\((\d+)\)", line)
            inside = list(block(lines, i + 1))
            found += [
                f"{line}: {wrong}"
                for wrong in unsafe(inside, own, int(collapse[1]) if collapse else 1)
            ]
    return found


def block(lines: list[str], start: int) -> Iterator[str]:
    """The lines of a loop, to its closing brace, or its one statement."""
    depth = 0
    for line in lines[start:]:
        yield line
        depth += line.count("{") - line.count("}")
        if depth <= 0 and not line.startswith("#"):
            return


def declared_between(lines: list[str], end: int) -> set[str]:
    """What a parallel region declares before its loop: each thread has its own."""
    start = max(i for i, line in enumerate(lines[:end]) if line.startswith("#pragma omp parallel"))
    return {name for line in lines[start:end] if (name := declaration(line)[0])}


def declaration(line: str) -> tuple[str, str]:
    """The name that a line declares, and the text of its value; two empty texts if it declares none."""
    match = DECLARED.match(line)
    if match is None or line.split()[0] in STATEMENTS:
        return "", ""
    return match[1], match[2]


def words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", text))


def unsafe(inside: list[str], own: set[str], shared: int) -> Iterator[str]:
    """`own`: names that each thread has for itself; the first `shared` loops are those that threads share."""
    moving: set[str] = set()  # what is another number in another iteration
    for line in inside:
        loop, (name, value) = LOOP.search(line), declaration(line)
        if loop is not None:
            name, value = loop[1], loop[2]
            moving |= {name} if shared > 0 else set()
            shared -= 1
        own |= {name}
        moving |= {name} if words(value) & moving else set()
        written = WRITTEN.match(line)
        if written and written[1] not in own and not words(written[2] or "") & moving:
            yield line


def loop_nests(text: str) -> int:
    """Count the loops of C++ functions that are in no other loop."""
    found, end = 0, 0
    for match in re.finditer(r"\b(for|mc_row_\w+)\s*\(", text):
        if match.start() >= end:
            found, end = found + 1, _statement_end(text, match.end() - 1)
    return found


def _statement_end(text: str, at: int) -> int:
    """Where the statement ends whose parentheses open at `at`."""
    depth = 0
    for match in re.compile(r"[(){};]").finditer(text, at):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] in "};":
            return match.end()
    return len(text)
