"""The project's address. `python docs/site/settings.py https://github.com/OWNER/NAME` writes it everywhere.

It stands in pyproject.toml; the lessons' first cells, README.md and CITATION.cff repeat it. The environment's
MINICOMPILE_REPOSITORY has the site of a fork lead to the fork.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
STATED = PROJECT["urls"]["Repository"]
REPOSITORY = os.environ.get("MINICOMPILE_REPOSITORY") or STATED


def pages_of(repository: str) -> str:
    """Where GitHub publishes the pages of a repository."""
    owner, name = repository.split("/")[-2:]
    return f"https://{owner.lower()}.github.io/{name}/"


def digest(file: Path) -> str:
    """A lesson's source as its notebooks record it."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def move(repository: str) -> None:
    """Replace the stated address in every file that has it; notebooks stay built from their sources."""
    listed = subprocess.run(
        ["git", "grep", "-lF", "-e", STATED, "-e", pages_of(STATED)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = [ROOT / name for name in listed.stdout.splitlines()]
    before = {file: digest(file) for file in files}
    for file in files:
        text = file.read_text(encoding="utf-8").replace(STATED, repository)
        file.write_text(text.replace(pages_of(STATED), pages_of(repository)), encoding="utf-8")
    for source in (file for file in files if file.parent.name == "src"):
        for folder in ("notebooks", "notebooks/solutions"):
            built = ROOT / folder / f"{source.stem}.ipynb"
            text = built.read_text(encoding="utf-8").replace(before[source], digest(source))
            built.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", sys.argv[1]):
        sys.exit("give an address such as https://github.com/OWNER/NAME")
    move(sys.argv[1])
