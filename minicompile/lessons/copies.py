"""`minicompile lessons FOLDER`: the notebooks for whoever installed a wheel, without the repository."""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path

from minicompile.lessons.notebook import notebooks_folder


def add_arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("folder", nargs="?", default="minicompile-lessons", help="the folder to make")


def run(chosen: argparse.Namespace) -> int:
    """Copy the notebooks; what is in the folder stays as it is."""
    folder = Path(chosen.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for lesson in sorted(notebooks_folder().glob("[0-9]*.ipynb")):
        if (folder / lesson.name).exists():
            print(f"{folder / lesson.name} is there already: left as it is")
        else:
            shutil.copyfile(lesson, folder / lesson.name)
    first = shlex.quote(str(min(folder.glob("[0-9]*.ipynb"))))
    print(f"To begin: python -m jupyter lab {first}")
    return 0
