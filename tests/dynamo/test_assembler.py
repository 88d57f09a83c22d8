"""What is taken apart and put together is the same; what is inserted lands where it should."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import FunctionType

import pytest

from minicompile.dynamo.assembler import Op, assemble, disassemble
from tests.dynamo.test_bytecode import ROOT, VERSIONS, find_python


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_the_standard_library_is_reproduced(version: str) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    script = Path(__file__).with_name("stdlib_assembly.py")
    command = [python, str(script), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    count, long, handled, _ = map(int, re.findall(r"\d+", done.stdout))
    assert count > 3_000 and long > 30 and handled > 300


def guarded(items: list[int]) -> str:
    out = ""
    for item in items:
        try:
            out += str(1 // item)
        except ZeroDivisionError:
            out += "-"
    return out


def test_far_jumps_and_shifted_handlers_still_work() -> None:
    """1,000 instructions inserted everywhere: jumps grow prefixes, tables move."""
    ops = []
    for op in disassemble(guarded.__code__):
        pad = op.opname in ("STORE_FAST", "POP_TOP", "RESUME")
        ops.append(op)
        if pad:
            ops += [Op("NOP", handler=op.handler, line=op.line) for _ in range(1_000)]
    made = FunctionType(assemble(guarded.__code__, ops), globals())
    assert len(made.__code__.co_code) > 4_000
    assert made([1, 0, 2]) == guarded([1, 0, 2]) == "1-0"


def test_an_op_without_handler_lies_outside_the_try_block() -> None:
    code = guarded.__code__
    ops = disassemble(code)
    inside = next(
        i for i, op in enumerate(ops) if op.opname == "BINARY_OP" and op.handler is not None
    )
    raising = [Op("LOAD_CONST", len(code.co_consts)), Op("RAISE_VARARGS", 1)]
    error = ZeroDivisionError("not caught")
    broken = assemble(
        code, [*ops[:inside], *raising, *ops[inside:]], co_consts=(*code.co_consts, error)
    )
    with pytest.raises(ZeroDivisionError, match="not caught"):
        FunctionType(broken, globals())([1])
