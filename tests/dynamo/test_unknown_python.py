"""Under a Python newer than tested the package imports, says so once, and runs everything in eager."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRETEND = """
import collections, sys, warnings
import torch, torch._dynamo  # torch's own tables are made for the Python that really runs
Version = collections.namedtuple("Version", "major minor micro releaselevel serial")
sys.version_info = Version(3, 14, 0, "final", 0)
"""
RUN = """
import minicompile as mc
from minicompile.dynamo import hook

def inner(x):
    return torch.relu(x) * 2

def outer(x):
    print("outer")
    return inner(x) + 1

x = torch.tensor([1.0, -1.0], requires_grad=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compiled, module = mc.compile(outer), mc.compile(torch.nn.ReLU())
    result = compiled(x) + module(x) + compiled(x)
result.sum().backward()
assert torch.equal(result, torch.tensor([7.0, 2.0])), result
assert torch.equal(x.grad, torch.tensor([5.0, 0.0])), x.grad
[only] = [str(one.message) for one in caught]
assert "tested with Python 3.11 to 3.13; Python 3.14.0 is newer" in only, only
assert "every call runs in eager [python-unknown]" in only, only
explained = mc.explain(compiled)(x)
assert explained.graph_count == 0 and {one.id for one in explained.breaks} == {"python-unknown"}
assert hook.load_hook() is None
try:
    mc.compile(inner, fullgraph=True)(x)
except mc.Unsupported as error:
    assert error.id == "python-unknown"
else:
    raise AssertionError("fullgraph=True raises")
"""


@pytest.mark.long
def test_an_unknown_python_is_named_once_and_everything_runs_in_eager():
    done = subprocess.run(
        [sys.executable, "-c", PRETEND + RUN], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


IMPORT_ALL = """
import importlib, pkgutil
import minicompile
for module in pkgutil.walk_packages(minicompile.__path__, "minicompile."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


@pytest.mark.long
def test_every_module_imports_under_an_unknown_python():
    code = PRETEND + IMPORT_ALL
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
