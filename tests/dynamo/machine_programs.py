"""Run by each CPython that is present, without torch: the plain machine against CPython itself.

`python machine_programs.py ROOT` exits with 0 if every program agrees and every opcode in a sample of the standard library is known.
"""

# ruff: noqa
import sys

sys.path.insert(0, sys.argv[1])

import inspect
import json
import os
import re
import statistics
import textwrap
import types
from pathlib import Path

import minicompile.dynamo.opcodes
import plain_scopes
from minicompile.dynamo.bytecode import decode
from minicompile.dynamo.interpreter import bytecode
from plain_machine import PlainMachine
from plain_programs import LOG, PROGRAMS, Derived

assert "torch" not in sys.modules

LIBRARY = [
    (json.dumps, [({"a": [1, {"b": None}]},)]),
    (json.loads, [('{"a": [1, 2.5, "x"]}',)]),
    (textwrap.fill, [("hello world " * 9, 30)]),
    (statistics.stdev, [([1, 2, 4.5],)]),
    (re.split, [("a|b", "xaybz")]),
]
OTHERWISE = {
    *("exceptions", "context_of_exceptions", "exception_in_handler"),
    *("local_names", "walrus", "deleted_self", "free_variables", "reads"),
    *("groups", "drives_coroutine", "typed", "unbound_cell", "try_in_loop"),
}
"""They ask for the frame, which is the machine's own, read an exception's words, or are refused."""
REFUSED = {
    *("ASYNC_GEN_WRAP", "BEFORE_ASYNC_WITH", "GET_AWAITABLE", "GET_AITER", "GET_ANEXT"),
    *("END_ASYNC_FOR", "IMPORT_STAR", "CHECK_EG_MATCH", "PREP_RERAISE_STAR"),
    *("CALL_INTRINSIC_1", "CALL_INTRINSIC_2"),
}


def outcome(call, case):
    """What a call on fresh arguments gives or raises, and what it logs."""
    LOG.clear()
    try:
        result = call(*(Derived() if argument == "self" else argument for argument in case))
    except Exception as error:
        result = type(error).__name__, str(error)
    return repr(result), [*map(repr, LOG)]


def opnames(code):
    """What functions consist of; Python runs modules and class bodies."""
    if code.co_flags & inspect.CO_OPTIMIZED:
        yield from (instruction.opname for instruction in decode(code).instructions)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from opnames(constant)


def main():
    for function, cases in [*PROGRAMS, *LIBRARY]:
        for case in cases if function.__name__ not in OTHERWISE else ():
            want = outcome(function, case)
            got = outcome(lambda *args: PlainMachine().call(function, args, {}), case)
            assert want == got, (function.__name__, want, got)
    found = set()
    for path in sorted(Path(os.__file__).parent.glob("*.py"))[::4]:
        found.update(opnames(compile(path.read_bytes(), str(path), "exec")))
    unknown = found - set(bytecode) - REFUSED
    assert not unknown, unknown
    print(f"{len(PROGRAMS)} programs, {len(found)} opcodes")


main()
