"""The commands `minicompile cache` and `minicompile site`: what lies on disk."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import webbrowser
from pathlib import Path

import minicompile
from minicompile.errors import MinicompileError
from minicompile.ops.files import why_unsafe
from minicompile.options import Options


def add_nothing(to: argparse.ArgumentParser) -> None:
    """Add no arguments."""


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
