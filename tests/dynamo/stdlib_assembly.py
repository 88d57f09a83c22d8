"""Takes the standard library's code objects apart and puts them together: `python stdlib_assembly.py ROOT`.

Without torch. Prints counts; exit code 1 if a bytecode, exception table or line differs.
"""

from __future__ import annotations

import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

sys.path.insert(0, sys.argv[1])

from minicompile.dynamo.assembler import assemble, disassemble


def code_objects(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_objects(constant)


def facts(code: CodeType) -> tuple[object, ...]:
    return code.co_code, code.co_exceptiontable, [line for line, *_ in code.co_positions()]


def main() -> int:
    warnings.simplefilter("ignore")
    library = Path(sysconfig.get_path("stdlib"))
    files = [f for f in sorted(library.rglob("*.py")) if "site-packages" not in f.parts]
    count = wrong = long = handled = 0
    for file in files[:: max(1, len(files) // 250)]:
        try:
            module = compile(file.read_bytes(), str(file), "exec")
        except (SyntaxError, ValueError):  # the library's own tests of bad syntax
            continue
        for code in code_objects(module):
            made = assemble(code, disassemble(code))
            count += 1
            wrong += facts(made) != facts(code)
            long += len(code.co_code) > 2_000
            handled += bool(code.co_exceptiontable)
    print(f"{count} code objects, {long} long, {handled} with handlers, {wrong} differ")
    assert "torch" not in sys.modules
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
