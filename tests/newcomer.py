"""The newcomer's hour again: clone, set-up, first picture, exercise and own lowering rule, with times.

    python tests/newcomer.py
    python tests/newcomer.py --python python3.12 --without dot,compiler --offline --folder "/tmp/meine Übung"
    python tests/newcomer.py --without triton --user ada       (as root: ada runs it all)

It types what README.md says into a folder with a home of its own, and deletes both at the end. `--without`
hides programs: the PATH is links to all others. `--offline`: no network after the set-up (Linux). The set-up
holds the downloads; the other times don't. Not run by CI.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LESSON = "00_one_model_top_to_bottom.ipynb"
PROGRAMS = {
    "compiler": r".*(g\+\+|gcc|clang|c\+\+)[-.\d]*|cc|c89|c99",
    "dot": "dot",
    "triton": "^$",
}
KEPT = ("PIP_", "SSL_", "http_proxy", "https_proxy", "no_proxy")
"""Beginnings of the variables that commands see: how this machine finds packages."""

IN_NOTEBOOK = r"""
import sys, time, nbformat
from nbclient import NotebookClient
start, file, first, warned = time.time(), sys.argv[1], True, False
notebook = nbformat.read(file, 4)
solved = {cell.id: cell.source for cell in nbformat.read(sys.argv[2], 4).cells}
client = NotebookClient(notebook, kernel_name="python3", timeout=600, allow_errors=True)
client.resources = {"metadata": {"path": "notebooks"}}
with client.setup_kernel():
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        cell.source = solved[cell.id] if cell.id == "ex1-answer" else cell.source
        client.execute_cell(cell, number)
        for out in cell.outputs:
            if first and "text/html" in out.get("data", {}):
                print(f"{time.time() - start:7.1f} s  first picture", flush=True)
                first = False
            if out.output_type == "error":
                print(f"STUMBLE in {cell.id}: {out.ename}: {out.evalue[:300]}")
            if out.get("name") == "stderr":
                print(f"WARNING in {cell.id}: {out.text[:400]}")
            if cell.id == "ex1-check":
                print(f"{time.time() - start:7.1f} s  {out.get('data', {}).get('text/plain', '')}")
nbformat.write(notebook, file)
print(f"{time.time() - start:7.1f} s  all of lesson 00")
"""


def rule() -> str:
    """The operator and the lowering rule of docs/extending.md."""
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    return "\n".join(block for block in blocks if block is blocks[0] or "@lowering(" in block)


def path_without(hidden: str, folder: Path) -> str:
    """A PATH that has every program of this one but the hidden."""
    folder.mkdir()
    for program in (file for place in os.get_exec_path() for file in Path(place).glob("*")):
        if not re.fullmatch(hidden, program.name) and not (folder / program.name).exists():
            (folder / program.name).symlink_to(program)
    return str(folder)


class Newcomer:
    """Somebody with an empty home who types commands."""

    def __init__(self, chosen: argparse.Namespace, folder: Path) -> None:
        self.folder, self.prefix, self.typed = folder, [], 0
        hidden = "|".join(PROGRAMS[name] for name in chosen.without) or "^$"
        self.environment = {name: v for name, v in os.environ.items() if name.startswith(KEPT)}
        path = path_without(hidden, folder / "bin") if chosen.without else os.environ["PATH"]
        self.environment |= {"HOME": str(folder / "home"), "PATH": path, "LANG": "C.UTF-8"}
        if chosen.user:
            ids = ["--reuid", chosen.user, "--regid", chosen.user, "--init-groups"]
            self.prefix = ["setpriv", *ids]
        (folder / "home").mkdir()
        for place in (folder, folder / "home") if chosen.user else ():
            shutil.chown(place, chosen.user, chosen.user)

    def types(self, what: str, *command: str, where: str = "minicompile", sees: str = "") -> None:
        """Run a command and say how long it took. If it fails, or doesn't print `sees`, the hour is over."""
        self.typed += 1
        start, seen = time.monotonic(), ""
        print("$", *(word for word in command if "\n" not in word), flush=True)
        how = {"cwd": self.folder / where, "env": self.environment, "text": True}
        with subprocess.Popen([*self.prefix, *command], stdout=subprocess.PIPE, **how) as process:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                seen += line
        print(f"{time.monotonic() - start:7.1f} s  {what}\n", flush=True)
        if process.returncode or sees not in seen:
            sys.exit(f"STUMBLE: {what}: exit code {process.returncode}, without {sees!r}")


def main() -> None:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "--source", default=str(ROOT), help="what to clone: an address or a whole path"
    )
    parser.add_argument("--folder", help="a new folder (default: a temporary one)")
    parser.add_argument("--python", default="python3")
    parser.add_argument("--without", default=[], type=lambda names: names.split(","))
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--user", help="the account that runs it all; it must own --source")
    chosen = parser.parse_args()
    folder = Path(chosen.folder or tempfile.mkdtemp(prefix="newcomer_"))
    folder.mkdir(exist_ok=True)
    one = Newcomer(chosen, folder)
    try:
        one.types("clone", "git", "clone", "--quiet", chosen.source, "minicompile", where=".")
        # `make lab` makes this first; then JupyterLab would run until it is stopped.
        setup = ["make", ".venv/.lessons", f"PYTHON={chosen.python}"]
        one.types("set-up, with downloads", *setup)
        python = ".venv/bin/python"
        if "triton" in chosen.without:
            one.types("no Triton", python, "-m", "pip", "uninstall", "--quiet", "--yes", "triton")
        if chosen.offline:
            up = 'ip link set lo up && exec "$@"'
            one.prefix = ["unshare", "--net", "sh", "-c", up, "sh", *one.prefix]
        one.types("set-up again", *setup)
        files = [f"notebooks/{LESSON}", f"notebooks/solutions/{LESSON}"]
        one.types("in lesson 00", python, "-c", IN_NOTEBOOK, *files, sees="ex1 pass")
        one.types("graded", "make", "grade", "LESSON=00", sees="ex1  1/1  pass")
        (folder / "minicompile/rule.py").write_text(rule() + "\nprint(lowered.kernels[0].text)\n")
        one.types("own lowering rule", python, "rule.py", sees="_fused_")
        print(f"{one.typed} commands")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
