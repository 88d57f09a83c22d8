"""The command line: `minicompile COMMAND` or `python -m minicompile COMMAND`.

A command is a row of COMMANDS. Its module is imported when the command is asked for, since folders such as
bench/, lessons/ and exporting/ may be deleted from the package.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from minicompile import tool
from minicompile.errors import MinicompileError
from minicompile.ops.files import why_unsafe
from minicompile.options import Options


@dataclass(frozen=True)
class Command:
    """A subcommand: one line of help, what runs it and gives the exit code, what adds its arguments."""

    help: str
    run: Callable[[argparse.Namespace], int]
    arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None


def elsewhere(help: str, module: str, run: str = "run", adds: str = "add_arguments") -> Command:
    """A command whose two functions stand in a module, which is imported when one is needed."""

    return Command(
        help,
        lambda chosen: int(getattr(tool(module), run)(chosen)),
        lambda to: getattr(tool(module), adds)(to),
    )


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
    package = Path(__file__).parent
    for folder in (package / "pages", package.parent / "build/site/html"):
        if (page := folder / "index.html").exists():
            print(page)
            webbrowser.open(page.as_uri())
            return 0
    raise MinicompileError(
        "the pages are not here: `make site` builds them, `make wheel` packs them"
    )


COMMANDS = {
    "doctor": elsewhere("say what this machine and this torch lack, and the cure", "debug.doctor"),
    "demo": elsewhere("train the lesson model: eager, torch.compile, minicompile", "bench.demo"),
    "bench": elsewhere(
        "time patterns and models: eager, torch.compile, minicompile", "bench.speed"
    ),
    "plugins": elsewhere("the price list: what each plug-in costs and buys", "bench.prices"),
    "options": elsewhere(
        "list every option with its value and meaning", "debug.listings", "show_options"
    ),
    "errors": elsewhere(
        "list every error and break with cause and cure", "debug.listings", "show_errors"
    ),
    "rules": elsewhere(
        "list the registries, or the rules of one", "debug.listings", "show_rules", "add_registry"
    ),
    "cache": Command(
        "show or clear the folder of compiled code",
        run_cache,
        lambda to: to.add_argument("--clear", action="store_true", help="delete all in the folder"),
    ),
    "trace": elsewhere("run a script and write down all that it compiles", "debug.script"),
    "bisect": elsewhere("find what in the compiler makes a script fail", "debug.bisect"),
    "minify": elsewhere(
        "find the smallest graph in a script that fails, as a script of its own", "debug.minify"
    ),
    "lessons": elsewhere("copy the lesson notebooks into a folder of yours", "lessons.copies"),
    "site": Command("open the pages to read in a browser", open_site),
    "grade": elsewhere(
        "grade the exercises of lesson notebooks, or of a folder of them", "lessons.grade"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code (2 for a mistake in the arguments)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="minicompile", description="torch.compile, small enough to read."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    try:
        for name, command in COMMANDS.items():
            sub = commands.add_parser(name, help=command.help, description=command.help)
            if given[:1] == [name]:  # arguments of the others would only cost imports
                command.arguments(sub)
        chosen = parser.parse_args(given)
        return COMMANDS[chosen.command].run(chosen)
    except MinicompileError as error:
        print(f"minicompile {given[0]}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
