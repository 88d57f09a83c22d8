"""The command line: `minicompile COMMAND` or `python -m minicompile COMMAND`.

A command is a row of COMMANDS. Its module is imported when the command is asked for, since folders such as
bench/, lessons/ and exporting/ may be deleted from the package.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from minicompile import tool
from minicompile.errors import MinicompileError


class Command(NamedTuple):
    """A subcommand: one line of help, and a module with two functions: what runs the command and gives the
    exit code, and what adds its arguments."""

    help: str
    module: str
    run: str = "run"
    adds: str = "add_arguments"


COMMANDS = {
    "doctor": Command("say what this machine and this torch lack, and the cure", "debug.doctor"),
    "demo": Command("train the lesson model: eager, torch.compile, minicompile", "bench.demo"),
    "bench": Command("time patterns and models: eager, torch.compile, minicompile", "bench.speed"),
    "plugins": Command("the price list: what each plug-in costs and buys", "bench.prices"),
    "options": Command(
        "list every option with its value and meaning", "debug.listings", "show_options"
    ),
    "errors": Command(
        "list every error and break with cause and cure", "debug.listings", "show_errors"
    ),
    "rules": Command(
        "list the registries, or the rules of one", "debug.listings", "show_rules", "add_registry"
    ),
    "cache": Command(
        "show or clear the folder of compiled code", "debug.listings", "run_cache", "add_clear"
    ),
    "trace": Command("run a script and write down all that it compiles", "debug.script"),
    "bisect": Command("find what in the compiler makes a script fail", "debug.bisect"),
    "minify": Command(
        "find the smallest graph in a script that fails, as a script of its own", "debug.minify"
    ),
    "lessons": Command("copy the lesson notebooks into a folder of yours", "lessons.copies"),
    "site": Command("open the pages to read in a browser", "debug.listings", "open_site"),
    "grade": Command(
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
                getattr(tool(command.module), command.adds)(sub)
        chosen = parser.parse_args(given)
        command = COMMANDS[chosen.command]
        return int(getattr(tool(command.module), command.run)(chosen))
    except MinicompileError as error:
        print(f"minicompile {given[0]}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
