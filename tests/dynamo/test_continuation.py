"""A frame can be cut before every instruction, on every CPython that is present, and nothing differs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import FunctionType

import pytest

from minicompile.dynamo.continuation import (
    bind,
    continuation,
)
from tests.dynamo.plain_machine import start
from tests.dynamo.test_bytecode import ROOT, VERSIONS, find_python


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_every_break_point_of_every_program(version: str) -> None:
    """Value, exception and order of side effects, also with the break inside an inlined callee."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    script = Path(__file__).with_name("break_fuzzer.py")
    command = [python, "-X", "faulthandler", str(script), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    counts = list(
        map(int, re.findall(r"(\d+) (?=functions|break|nested|differences)", done.stdout))
    )
    functions, points, nested, differences = counts
    assert functions >= 48 and points >= 3_000 and nested >= 300 and differences == 0


def test_functions_keep_their_names_and_lines() -> None:
    def raises(x: int) -> None:
        x += 1
        raise ValueError(x)

    made = bind(continuation(raises.__code__, start(raises.__code__)), raises, ())
    assert isinstance(made, FunctionType) and made.__qualname__ == raises.__qualname__
    with pytest.raises(ValueError) as caught:
        made(1)
    trace = caught.value.__traceback__
    assert trace is not None and trace.tb_next is not None
    assert trace.tb_next.tb_lineno == raises.__code__.co_firstlineno + 2
