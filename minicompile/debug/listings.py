"""Small commands: `minicompile options`, `errors`, `rules`, and what lies on disk: `cache`, `site`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import os
import re
import shutil
import webbrowser
from pathlib import Path

import minicompile
from minicompile import errors
from minicompile.errors import MinicompileError, unknown
from minicompile.ops.files import why_unsafe
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


def add_clear(to: argparse.ArgumentParser) -> None:
    to.add_argument("--clear", action="store_true", help="delete all in the folder")


def run_cache(chosen: argparse.Namespace) -> int:
    """Where compiled code is kept, how much there is; `--clear` empties it."""
    folder = Options().cache_folder
    sizes: list[int] = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # others are at work
                sizes.append(os.stat(os.path.join(place, name)).st_size)
    print(f"{folder}: {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB")
    with contextlib.suppress(FileNotFoundError):
        if reason := why_unsafe(folder / "cpp"):
            print(f"compiled kernels are not kept: {reason}")
    if chosen.clear and folder.is_dir():
        if Path.home().is_relative_to(folder) or Path.cwd().is_relative_to(folder):
            reason = "holds your home or working folder, so it is not cleared"
            raise MinicompileError(f"{folder} {reason}")
        try:
            while folder.exists():
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(folder)
        except OSError as error:
            raise MinicompileError(f"{folder} can't be cleared: {error}") from error
        print("cleared")
    return 0


def open_site(chosen: argparse.Namespace) -> int:
    """Open the site's pages in a browser, from the installed package or as `make site` built them."""
    package = Path(minicompile.__file__).parent
    for folder in (package / "pages", package.parent / "build/site/html"):
        if (page := folder / "index.html").exists():
            print(page)
            webbrowser.open(page.as_uri())
            return 0
    raise MinicompileError(
        "the pages are not here: `make site` builds them, `make wheel` packs them"
    )
