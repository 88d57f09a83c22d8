"""Grading against an adversary: nothing scores for what it doesn't answer.

First the guard, which reads an answer's text; then, with the guard switched off, what the processes of
grading hold against an answer that does what it likes in its kernel.
"""

from __future__ import annotations

import copy
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from minicompile.lessons import grade as grading
from minicompile.lessons import processes
from minicompile.lessons.confine import landlock_version
from minicompile.lessons.exercise import checks, lesson_in
from minicompile.lessons.guard import refusal
from minicompile.lessons.probe import probe_of
from minicompile.lessons.processes import ENDED, Nursery

for module in ("nbformat", "nbval", "ipykernel"):
    pytest.importorskip(module, reason="the extra `lessons` is not installed")

import nbformat  # noqa: E402

from minicompile.lessons.notebook import (  # noqa: E402
    cells_of,
    checks_text,
    notebooks_folder,
    pristine,
    released,
)

pytestmark = pytest.mark.long

TURN = "def quarter_turn(x):\n    return {}\n"
"""An answer to exercise 2 of lesson 10, which forbids `rot90`."""

REFUSED = {
    "getattr of a concatenated name": TURN.format('getattr(torch, "rot" + "90")(x)'),
    "getattr of a constant name": TURN.format('getattr(torch, "rot90")(x)'),
    "getattr under another name": "g = getattr\n" + TURN.format('g(torch, "rot" + "90")(x)'),
    "getattr as an argument": "import functools\n"
    + TURN.format('functools.reduce(getattr, ["rot90"], torch)(x)'),
    "eval": TURN.format('eval("torch.rot" + "90")(x)'),
    "eval under another name": "run = eval\n" + TURN.format('run("torch.rot" + "90")(x)'),
    "exec": "names = {}\nexec('f = 1', names)\n" + TURN.format("x"),
    "the dictionary of a module": TURN.format('torch.__dict__["rot" + "90"](x)'),
    "vars": TURN.format('vars(torch)["rot" + "90"](x)'),
    "attrgetter": "from operator import attrgetter\n"
    + TURN.format('attrgetter("rot" + "90")(torch)(x)'),
    "methodcaller": "import operator\n" + TURN.format('operator.methodcaller("rot" + "90")(x)'),
    "getattribute": TURN.format('object.__getattribute__(x, "rot" + "90")()'),
    "a class pattern": "def quarter_turn(x):\n    match torch:\n        case object(rot90=f):\n"
    "            return f(x)\n",
    "an import under another name": "from torch import rot90 as f\n" + TURN.format("f(x)"),
    "everything of torch": "from torch import *\n" + TURN.format("x"),
    "subclasses": "found = object.__subclasses__()\n" + TURN.format("x"),
    "globals of a function": TURN.format("x") + "print(quarter_turn.__globals__)\n",
    "builtins": "print(__builtins__)\n" + TURN.format("x"),
    "an import of a text": "__import__('o' + 's')\n" + TURN.format("x"),
    "sys of another module": "torch.sys.exit()\n" + TURN.format("x"),
    "os of another module": "torch.os.getcwd()\n" + TURN.format("x"),
    "checks as a module": "import minicompile_checks_10\n" + TURN.format("x"),
    "checks as an attribute": "import minicompile\nminicompile.lessons\n" + TURN.format("x"),
    "a transformer": "get_ipython().input_transformers_post.append(max)\n" + TURN.format("x"),
    "builtins of a module": "import builtins as b\nb.print = None\n" + TURN.format("x"),
    "nbval": "import nbval.plugin\n" + TURN.format("x"),
    "pytest": "import pytest\n" + TURN.format("x"),
    "IPython": "from IPython import get_ipython\n" + TURN.format("x"),
    "a pickle": "torch.load('answer.pt')\n" + TURN.format("x"),
    "pickle": "import pickle\n" + TURN.format("x"),
    "C code": "from torch.utils import cpp_extension\n" + TURN.format("x"),
    "a changed library": "torch.equal = max\n" + TURN.format("x"),
    "a file": "open('x', 'w')\n" + TURN.format("x"),
    "a path": "import pathlib\n" + TURN.format("x"),
    "threads": "import threading\n" + TURN.format("x"),
    "signals": "import signal\n" + TURN.format("x"),
    "frames of a generator": "g = (1 for _ in '')\ng.gi_frame\n" + TURN.format("x"),
    "frames of a traceback": "try:\n    1 / 0\nexcept Exception as e:\n    e.__traceback__\n"
    + TURN.format("x"),
    "a parser that evaluates": "from sympy.parsing.sympy_parser import parse_expr\n"
    + TURN.format("x"),
    "a field of a format": "import string\n"
    + TURN.format('string.Formatter().get_field("0.rot" + "90", (torch,), {})[0](x)'),
    "an annotation that is evaluated": "import typing\ndef f(x: 'torch.rot' '90'): pass\n"
    + TURN.format('typing.get_type_hints(f)["x"](x)'),
    "the compiler's own exec": "from minicompile.dynamo.guards import generate as g\n"
    + TURN.format('g("f(x)", ["return x.rot" "90()"], {})(x)'),
    "a text that sympy evaluates": "import sympy\n" + TURN.format('sympy.sympify("1")'),
    "a method of a graph by its name": TURN.format(
        'torch.fx.Graph().call_method("rot" + "90", (x,))'
    ),
    "a node of a graph by its name": TURN.format(
        'torch.fx.Graph().create_node("call_method", "rot90", (x,))'
    ),
    "code that a graph generates": "torch.fx.Graph().on_generate_code(lambda _: print)\n"
    + TURN.format("x"),
    "a text that the compiler defines": "from minicompile.runtime.load import define as d\n"
    + TURN.format("x"),
    "a table of functions": "torch.overrides.get_overridable_functions()\n" + TURN.format("x"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_shortcut_is_refused_before_it_runs(name: str):
    setup, _ = cells_of(pristine("10"), "ex2")
    exercise = checks("10").exercises["ex2"]
    assert refusal("import torch\n" + REFUSED[name], setup, exercise)
    assert not refusal("import torch\n" + TURN.format("x.t().flip(0)"), setup, exercise)


@pytest.mark.parametrize("number", [f"{n:02}" for n in range(18)])
def test_no_reference_answer_is_refused(number: str):
    for name, exercise in checks(number).exercises.items():
        setup, answer = cells_of(pristine(number), name)
        assert refusal(answer.source, setup, exercise) == "", name


# -- past the guard

FIRST = "def kernels_saved(fused, unfused):\n    return 99\n"
SECOND = "def with_kernels(count):\n    return lambda x, w: x\n"
THIRD = "def gelu_in_parts(x, approximate='none'):\n    return x\n"
FOURTH = "def run_graph(nodes, inputs):\n    return tuple(inputs)\n"

HOOKS = """
import builtins, importlib.abc, os, pathlib, site, sys, sysconfig
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        return None
sys.meta_path.insert(0, Finder())
real_import = builtins.__import__
builtins.__import__ = lambda *a, **k: real_import(*a, **k)
evil = "import os, sys\\nos.write(1, b'{\\"ex1\\": \\"\\"}')\\nos._exit(0)\\n"
for place in (os.getcwd(), os.path.expanduser("~"), os.environ["TMPDIR"], site.getusersitepackages()):
    for name in ("sitecustomize.py", "usercustomize.py", "json.py", "torch.py", "conftest.py", "evil.pth"):
        try:
            os.makedirs(place, exist_ok=True)
            pathlib.Path(place, name).write_text(evil)
        except OSError:
            pass
os.environ.update(PYTHONSTARTUP="sitecustomize.py", PYTHONPATH=os.getcwd(), PYTHONINSPECT="1")
"""

PATCHES = """
import atexit, gc, inspect, json, operator, pickle, sys
import torch
import minicompile.lessons.exercise as e, minicompile.lessons.wire as w
torch.testing.assert_close = lambda *a, **k: None
torch.equal = torch.allclose = lambda *a, **k: True
operator.eq = lambda a, b: True
e.Run.expect = e.Run.that = e.Run.close = e.Run.same = e.Run.near = lambda *a, **k: None
e.Wrong.__init__ = lambda self, *a: None
e.Exercise.judged = lambda *a, **k: "pass"
w.thaw = lambda data: True
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __reduce__(self): return (print, ("ex2 pass",))
    __class__ = int
def with_kernels(count):
    return Always()
for each in gc.get_objects():
    if isinstance(each, e.Lesson):
        each.exercises.clear()
frame = sys._getframe()
while frame:
    frame.f_locals.update(expected=0) if "expected" in frame.f_locals else None
    frame = frame.f_back
atexit.register(lambda: print("ex2 pass"))
get_ipython().push({"check": lambda *a, **k: print("ex2 pass")})
print('{"ex2": ""}'); print("ex2 sent")
"""

THREADS = """
import json, os, pathlib, signal, subprocess, sys, threading, time
here = os.getcwd()
def forge():
    while True:
        for name in ("ex1", "ex2", "ex3", "ex4"):
            try:
                pathlib.Path(here, "..", name).mkdir(exist_ok=True)
                pathlib.Path(here, "..", name, "answer.json").write_text("[[], []]")
                rows = json.dumps({"notebook": name, "passed": True})
                pathlib.Path(here, "..", "results.jsonl").write_text(rows)
            except OSError:
                pass
        time.sleep(0.01)
threading.Thread(target=forge, daemon=True).start()
late = "import time, pathlib\\nfor _ in range(600):\\n    time.sleep(0.1)\\n"
late += "    pathlib.Path('LATE').write_text('x')\\n"
try:
    subprocess.Popen([sys.executable, "-c", late], start_new_session=True, cwd="/tmp/cheat_place")
except OSError:
    pass
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""

DESCRIPTORS = """
import ctypes, json, os, resource, stat
row = {"notebook": "ex4", "cell": "x", "passed": True, "message": "", "last": True, "data": "[[],[]]"}
row = json.dumps(row).encode() + b"\\n"
for number in range(3, 64):
    try:
        if stat.S_ISFIFO(os.fstat(number).st_mode):  # the kernel's own sockets would stop it
            os.write(number, row)
    except OSError:
        pass
parent = os.getppid()
try:
    for number in os.listdir(f"/proc/{parent}/fd"):
        with open(os.open(f"/proc/{parent}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK), "wb") as file:
            file.write(row)
except OSError:
    pass
ctypes.CDLL(None).ptrace(0x4206, parent, 0, 0)  # PTRACE_SEIZE
try:
    resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))
except (OSError, ValueError):
    pass
"""


def notebook_with(answers: dict[str, str], lesson: str = "00") -> Any:
    notebook = copy.deepcopy(released(lesson))
    for cell in notebook.cells:
        if cell["id"] in answers:
            cell.source = answers[cell["id"]]
    return notebook


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """The process that all notebooks of a command share."""
    with Nursery() as shared:
        yield shared


def graded_without_guard(
    tmp_path: Path, nursery: Nursery, answers: dict[str, str]
) -> grading.GradeReport:
    path = tmp_path / "00_mine.ipynb"
    nbformat.write(notebook_with(answers), path)
    with mock.patch.object(grading, "refusal", lambda *given: ""):
        return grading.grade(path, nursery, seconds=60)


@pytest.mark.parametrize("confined", [True, False])
def test_an_answer_that_does_what_it_likes_scores_nothing(
    tmp_path: Path, nursery: Nursery, confined: bool, monkeypatch: pytest.MonkeyPatch
):
    """Import hooks and start-up files; patched libraries, frames and verdicts; threads, processes, signals
    that outlive the cell; descriptors, /proc and ptrace: each in the process of one exercise."""
    if not confined:
        monkeypatch.setattr(processes, "readable", lambda *given: [])
    place = tmp_path / "late"
    place.mkdir()
    answers = {
        "ex1-answer": FIRST + HOOKS,
        "ex2-answer": SECOND + PATCHES,
        "ex3-answer": THIRD + THREADS.replace("/tmp/cheat_place", str(place)),
        "ex4-answer": FOURTH + DESCRIPTORS,
    }
    report = graded_without_guard(tmp_path, nursery, answers)
    assert report.earned == 0 and not report.problem, report
    assert "got 99" in str(report)
    before = {name: (place / name).stat().st_mtime_ns for name in os.listdir(place)}
    signal.sigtimedwait([], 0.5)  # a process that is left would write now
    assert {name: (place / name).stat().st_mtime_ns for name in os.listdir(place)} == before


def test_an_answer_that_ends_its_keeper_costs_its_points_alone(
    tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "readable", lambda *given: [])  # no Landlock, which forbids it
    _, right = cells_of(pristine("00"), "ex1")
    answers = {
        "ex1-answer": right.source,
        "ex2-answer": SECOND + "import os\nos.kill(os.getppid(), 9)\n",
    }
    first, second, *_ = graded_without_guard(tmp_path, nursery, answers).grades
    assert first.earned == first.points
    assert second.earned == 0 and second.feedback == ENDED


REACH = """
import os, pathlib, socket, sympy
def tried(name, deed):
    try:
        deed()
        return name
    except (OSError, TypeError):
        return ""
def kernels_saved(fused, unfused):
    listener = socket.socket()
    deeds = {
        "solutions": lambda: pathlib.Path(SOLUTIONS).read_text(),
        "checks": lambda: os.listdir(CHECKS),
        "home": lambda: pathlib.Path(HOME, "planted").write_text("x"),
        "library": lambda: os.chmod(mc.__file__, 0o644) or pathlib.Path(mc.__file__).write_text(""),
        "others": lambda: pathlib.Path("..", "ex2", "answer.json").write_text("[[], []]"),
        "signal": lambda: os.kill(os.getppid(), 0),
        "tcp": lambda: socket.create_connection(("127.0.0.1", PORT)),
        "listen": lambda: listener.bind(("127.0.0.1", 0)),
        "memory": lambda: open(f"/proc/{os.getppid()}/mem", "rb"),
        "text": lambda: sympy.expand("__import__('os').getcwd() and 1"),
        "root": lambda: os.setuid(0) if os.getuid() else os.chown(".", 1, 1),
        "own": lambda: pathlib.Path("own").write_text("x"),
    }
    return " ".join(filter(None, (tried(*item) for item in deeds.items())))
"""


@pytest.mark.skipif(landlock_version() < 6, reason="a Linux without Landlock 6")
def test_a_kernel_writes_its_own_folder_and_reaches_nothing_else(tmp_path: Path, nursery: Nursery):
    """No file of the lessons, home, library or another exercise; no other process, network or privilege."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        folder = notebooks_folder()
        [solution] = (folder / "solutions").glob("00_*.ipynb")
        names = {"SOLUTIONS": str(solution), "CHECKS": str(folder / "checks")}
        names |= {"HOME": str(tmp_path), "PORT": server.getsockname()[1]}
        head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        answers = {"ex1-answer": head + REACH, "ex2-answer": SECOND}
        report = graded_without_guard(tmp_path, nursery, answers)
    assert report.grades[0].feedback.endswith("got 'own'"), report
    assert not (tmp_path / "planted").exists()


# -- what an answer's process gets


@pytest.mark.parametrize("number", [f"{n:02}" for n in range(18)])
def test_a_probe_holds_no_verdict_and_no_expected_value(number: str):
    text = checks_text(number)
    for name in checks(number).exercises:
        probe = probe_of(text, name)
        for word in ("run.expect", "run.close", "run.that", "run.same", "run.near", "Wrong("):
            assert word not in probe, (name, word)
        assert "expects(" not in probe.replace("import expects", "")
        assert list(lesson_in(probe, f"probe_{number}_{name}").exercises) == [name]
        assert "run.seen(" in probe
