"""The commands `minicompile options`, `minicompile errors` and `minicompile rules`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re

from minicompile import errors
from minicompile.errors import unknown
from minicompile.options import CHOICES, Options


def add_arguments(to: argparse.ArgumentParser) -> None:
    """Add nothing: most of these commands take no arguments."""


def add_registry(to: argparse.ArgumentParser) -> None:
    to.add_argument("registry", nargs="?", help="list the rules of this registry")


def option_docs() -> dict[str, str]:
    """Each option's docstring: the string that follows its field in the source of `Options`."""
    rest_of_field = r"[^\n]*\n(?:        [^\n]*\n|    \)\n)*"
    field = re.compile(rf'^    (\w+): {rest_of_field}    """(.*?)"""', re.MULTILINE | re.DOTALL)
    return dict(field.findall(inspect.getsource(Options)))


def show_options(chosen: argparse.Namespace) -> int:
    """Every option with its value here, what it can be, and what it does."""
    docs, here = option_docs(), Options()
    for field in dataclasses.fields(Options):
        choices = ", ".join(map(repr, CHOICES.get(field.name, ())))
        allowed = f"  (one of {choices})" if choices else ""
        print(f"{field.name} = {getattr(here, field.name)!r}{allowed}")
        for line in docs.get(field.name, "").splitlines():
            print(f"    {line.strip()}")
    return 0


def show_errors(chosen: argparse.Namespace) -> int:
    """Every kind of error and every reason to run in eager, with cause and cure, as Markdown."""
    from minicompile.dynamo.reasons import REASONS

    kinds = [kind for kind in vars(errors).values() if "id" in getattr(kind, "__dict__", ())]
    raised = [(f"{kind.id} ({kind.__name__})", inspect.getdoc(kind), kind.cure) for kind in kinds]
    eager = [(id, reason.explanation, reason.fix) for id, reason in REASONS.items()]
    print(
        "# Errors\n\n`minicompile errors` prints this. Every error has its id as the attribute `id`."
    )
    for title, rows in (("Errors", raised), ("Reasons why Python runs something itself", eager)):
        print(f"\n## {title}")
        for name, cause, cure in rows:
            print(f"\n**{name}**: {str(cause).splitlines()[0]}  \nCure: {cure}")
    return 0


def show_rules(chosen: argparse.Namespace) -> int:
    """Every registry with its meaning; the rules of one if it is named."""
    from minicompile import extension, pipeline  # noqa: F401 (they fill the registries)
    from minicompile.ops.registry import ALL, key_name

    if chosen.registry is None:
        for name, registry in sorted(ALL.items()):
            print(f"{name:<14} {len(registry):>5} rules  {registry.doc}")
        return 0
    if chosen.registry not in ALL:
        raise unknown("registry", chosen.registry, sorted(ALL))
    for key in sorted(map(key_name, ALL[chosen.registry])):
        print(key)
    return 0
