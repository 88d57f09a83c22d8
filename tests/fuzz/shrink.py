"""Make a failing program smaller: drop statements, and take blocks apart, while it still fails."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from tests.fuzz.generator import Program, Statement


def smaller(body: list[Statement]) -> Iterator[list[Statement]]:
    """Every body with one thing less in it."""
    for place, statement in enumerate(body):
        before, after = body[:place], body[place + 1 :]
        yield before + after
        for number, (head, inside) in enumerate(statement.clauses):
            if inside and not head.startswith(("def", "case", "match")):
                yield before + inside + after
            if number:
                yield [*before, Statement(statement.clauses[:number]), *after]
            for less in smaller(inside):
                clauses = list(statement.clauses)
                clauses[number] = (head, less)
                yield [*before, Statement(clauses), *after]


def shrink(program: Program, fails: Callable[[str], bool], most: int = 150) -> Program:
    """The smallest program found with at most `most` attempts."""
    program = copy.deepcopy(program)
    left, progress = most, True
    while progress and left > 0:
        progress = False
        for body in smaller(program.body):
            left -= 1
            candidate = Program(program.seed, body, program.wide)
            if left < 0:
                break
            if compiles(str(candidate)) and fails(str(candidate)):
                program, progress = candidate, True
                break
    return program


def compiles(text: str) -> bool:
    try:
        compile(text, "<candidate>", "exec")
    except SyntaxError:
        return False
    return True
