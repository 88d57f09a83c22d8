"""Private names of torch and Triton: all are listed with what their loss means, and a loss is a reason."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from importlib import metadata

import pytest
import torch

import minicompile as mc
from minicompile.compat import versions
from minicompile.compat.private import PARTS, all_names
from minicompile.versions import TESTED, Releases, release
from tests.imports import all_imports, trees
from tests.test_architecture import dotted_uses, is_private

pytestmark = pytest.mark.long

FILES = {
    name: tree
    for name, tree in trees().items()
    if name.startswith("minicompile.compat.") and name != "minicompile.compat.private"
}
OF_CPYTHON = {"_PyInterpreterState_GetEvalFrameFunc", "_PyInterpreterState_SetEvalFrameFunc"}
OPERATORS = {"_ops"}
"""Where operators are found, by names that are public."""


def test_compat_takes_every_private_path_through_private_py():
    """Imports for type checkers never run; a path written out is fine where `relies_on` lists it."""
    typing = {(one.importer, one.target) for one in all_imports() if one.typing_only}
    unlisted = [
        f"{file}:{line} uses {path}"
        for file, tree in FILES.items()
        for path, line in dotted_uses(file, tree)
        if is_private(path) and (file, path) not in typing and path not in all_names()
    ]
    assert unlisted == []


def test_attributes_that_compat_reads_from_objects_are_listed_too():
    listed = {path.rpartition(".")[2] for path in all_names()} | OF_CPYTHON | OPERATORS
    unlisted = [
        f"{file}:{node.lineno} reads {ast.unparse(node)}"
        for file, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match("_(?!_)", node.attr)
        and node.attr not in listed
        and not ast.unparse(node).startswith("torch.ops.")
    ]
    assert unlisted == []


def test_every_name_has_a_part_and_every_part_a_name():
    assert {name.part for name in all_names().values()} == set(PARTS)


SINCE = {"torch._C._autograd.SavedTensor.unpack": "2.12"}
"""The first release that has a name, where not all supported ones do."""


def test_a_known_torch_lacks_no_name_but_those_of_later_releases():
    """Names of CUDA are in builds for it only. What is imported late is not looked up here."""
    if TESTED["torch"].place(torch.__version__) != "known":
        pytest.skip(f"torch {torch.__version__} was not tested")
    here = release(torch.__version__)
    expected = {path for path, since in SINCE.items() if release(since) > here}
    missing = {path for path, name in all_names().items() if name.present is False}
    if torch.version.cuda is None:
        missing = {path for path in missing if "._cuda_" not in path}
    assert missing == expected


LOST = {
    "torch.Tensor._base": ("capture", "torch-part-gone"),
    "torch._dispatch.python.enable_python_dispatcher": ("differentiation", "torch-part-gone"),
    "torch.autograd.function.BackwardCFunction": ("training", "torch-part-gone"),
    "torch._C._dynamo.guards.TensorGuards": ("speed", ""),
}


def test_losing_a_name_raises_nothing_and_is_a_reason():
    """One of a part; `python -m tests.compat.losing` tries all. A loss of nothing but speed has no reason."""
    command = [sys.executable, "-m", "tests.compat.losing", *LOST]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\w+) +\d+ +\d+  (\S+): ?(.*)$", done.stdout, flags=re.M)
    assert {path: (part, reasons) for part, path, reasons in rows} == LOST


def test_a_newer_torch_than_tested_warns_once_and_compiles(monkeypatch: pytest.MonkeyPatch):
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "2.99.1" if name == "torch" else real(name)
    )
    versions.warn_if_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled, another = (mc.compile(lambda x: torch.relu(x) * 2, fullgraph=True) for _ in "ab")
    versions.warn_if_untested.cache_clear()
    [message] = [str(one.message) for one in caught]
    assert f"tested with torch {TESTED['torch']}; torch 2.99.1 is newer" in message
    x = torch.randn(5)
    torch.testing.assert_close(compiled(x), torch.relu(x) * 2)
    torch.testing.assert_close(another(x), torch.relu(x) * 2)


@pytest.mark.parametrize(
    ("version", "place"),
    [("2.10.2", "older"), ("2.11.0", "known"), ("2.15.1+cu130", "known"), ("2.16.0a0", "newer")],
)
def test_a_release_is_placed_by_its_first_two_numbers(version: str, place: str):
    assert Releases((2, 11), (2, 15)).place(version) == place


def test_what_needs_no_torch_imports_without_it():
    """The doctor runs where torch is missing; bytecode is read and assembled by Python alone."""
    modules = (
        "debug.doctor",
        "versions",
        "plugins.nested_frames.hook",
        "dynamo.opcodes",
        "dynamo.continuation",
    )
    names = ", ".join(f"minicompile.{module}" for module in modules)
    code = f"import sys; sys.modules['torch'] = sys.modules['triton'] = None; import {names}"
    subprocess.run([sys.executable, "-c", code], check=True)
