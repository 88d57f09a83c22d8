"""What is known of a lesson's exercises without running its checks: read from their text, without torch.

@lesson.exercise("ex2", points=3, level="construct", forbidden=["rot90"], ...)
def quarter_turns(run, quarter_turn): ...        -->  Outline("ex2", 3, "construct", ("quarter_turn",), ...)
"""

from __future__ import annotations

import ast
import functools
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minicompile.errors import MinicompileError


@dataclass(frozen=True)
class Outline:
    """What the text of a check says of its exercise."""

    name: str
    points: int
    level: str
    answers: tuple[str, ...]
    """The names that the answer cell defines: the parameters of the check after the run."""
    forbidden: frozenset[str]
    """Names that an answer may not use: the built-in way to have the result."""
    computed_names: bool
    """Whether an answer may look up attributes whose names its text doesn't show, as a graph's methods."""


def notebooks_folder() -> Path:
    """Where the lessons are: beside the package in a checkout, in the environment's share/minicompile where a
    wheel was installed. Raises MinicompileError where there are none."""
    places = (Path(__file__).parents[2], Path(sysconfig.get_path("data"), "share", "minicompile"))
    for folder in (place / "notebooks" for place in places):
        if (folder / "checks").is_dir():
            return folder
    where = " and ".join(map(str, places))
    raise MinicompileError(f"no lessons in {where}: install minicompile again, or use its checkout")


def checks_file(number: str) -> Path:
    """Where the checks of lesson `number` ("03") are. Raises MinicompileError for a lesson that has none."""
    path = notebooks_folder() / "checks" / f"lesson_{number}.py"
    if not path.exists():
        numbers = ", ".join(sorted(p.stem[-2:] for p in path.parent.glob("lesson_*.py")))
        raise MinicompileError(f"no checks for lesson {number!r}; there are {numbers}")
    return path


@functools.cache
def checks_text(number: str) -> str:
    """The text of a lesson's checks. Raises MinicompileError for a lesson that has none."""
    return checks_file(number).read_text(encoding="utf-8")


def decorated(node: ast.stmt) -> ast.Call | None:
    """The call in the decorator of a check, `@lesson.exercise("ex1", ...)`; None for other statements."""
    for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "lesson.exercise":
            return decorator
    return None


@functools.cache
def outlines(number: str) -> dict[str, Outline]:
    """The exercises of lesson `number`, by name, in order. Raises MinicompileError for an unknown lesson."""
    module = ast.parse(checks_text(number))
    constants = {
        node.targets[0].id: node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    exercises = {}
    for node in module.body:
        if call := decorated(node):
            assert isinstance(node, ast.FunctionDef)
            outline = outline_of(node, call, constants)
            exercises[outline.name] = outline
    return exercises


def outline_of(
    check: ast.FunctionDef, call: ast.Call, constants: Mapping[str, ast.expr]
) -> Outline:
    """The outline of one check; a keyword's value is a literal or the name of a module's constant."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}

    def literal(node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name):
                return literal(constants[name])
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                many = [
                    literal(p.value) if isinstance(p, ast.Starred) else [literal(p)] for p in parts
                ]
                return [item for items in many for item in items]
        return ast.literal_eval(node)

    def value(name: str, default: Any = None) -> Any:
        return literal(keywords[name]) if name in keywords else default

    return Outline(
        ast.literal_eval(call.args[0]),
        value("points"),
        value("level"),
        tuple(argument.arg for argument in check.args.args[1:]),
        frozenset(value("forbidden", ())),
        value("computed_names", False),
    )
