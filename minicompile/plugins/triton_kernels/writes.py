"""Which of its arguments a Triton kernel writes to: its TTIR, Triton's first IR, tells where stores point.

    %p = tt.addptr %y_ptr, %i      a pointer is followed to the parameters that it was made from
    %k = tt.load %q                a loaded value isn't followed: it is data, such as an index, and no pointer

Interpreted kernels and those that fail to compile have no TTIR, and some operations (UNKNOWN) aren't
followed. Then the kernel may write to all of its tensors, and a graph copies more than it must.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from typing import Any

from minicompile.compat import triton_api

VALUE = re.compile(r"%[\w.-]+(?:#\d+)?")
STORES = re.compile(
    r"tt\.(store|atomic_rmw|atomic_cas|descriptor_store|descriptor_reduce|descriptor_scatter)\b"
)
LOADS = re.compile(r"= tt\.(load|descriptor_load|descriptor_gather|atomic_rmw|atomic_cas)\b")
UNKNOWN = re.compile(r"tt\.call|int_to_ptr|extern_elementwise|inline_asm|scf\.while|\bcf\.")
CARRIED = re.compile(r"(%[\w.-]+) = (%[\w.-]+(?:#\d+)?)")
"""In the head of a loop: a value inside, and what it is before the first turn."""


def written_pointers(ttir: str) -> set[int] | None:
    """Return the places of the parameters that a kernel's stores may point at; None where that isn't known.

    Names don't tell: TTIR calls a parameter `%p` after `p = x_ptr`.
    """
    parameters: list[str] = []
    made_from: dict[str, set[str]] = defaultdict(set)
    stored: list[str] = []
    blocks: list[list[list[str]]] = []
    """Of each open block: for each value that it yields, the names under which that is used."""
    for line in ttir.splitlines():
        text = line.partition(" loc(")[0].strip() if "tt.func" not in line else line
        result, _, operation = text.partition(" = ") if text.startswith("%") else ("", "", text)
        name, values = result.partition(":")[0], VALUE.findall(operation)
        if UNKNOWN.search(operation):
            return None
        if "tt.func" in line:
            parameters = values
        if STORES.search(operation):
            stored.append(values[0])
        if text.startswith("}"):
            block = blocks.pop()
            if text.endswith("{"):  # an `else`
                blocks.append(block)
        elif text.endswith("{"):
            count = int(result.partition(":")[2] or bool(result))
            block = [[f"{name}#{i}" if count > 1 else name] for i in range(count)]
            carried = CARRIED.findall(operation.partition("iter_args")[2])
            for users, (inside, before) in zip(block, carried):
                users.append(inside)
                for user in users:
                    made_from[user].add(before)
            blocks.append(block)
        elif text.startswith("scf.yield"):
            for users, value in zip(blocks[-1], values):
                for user in users:
                    made_from[user].add(value)
        elif not LOADS.search(text):
            made_from[name].update(values)
    reached: set[str] = set()
    while stored:
        value = stored.pop()
        if value not in reached:
            reached.add(value)
            stored += made_from[value]
    return {place for place, name in enumerate(parameters) if name in reached}


@functools.cache
def written_parameters(
    function: Any, types: tuple[tuple[str, str], ...], constants: tuple[tuple[str, str, Any], ...]
) -> frozenset[str]:
    """Return the parameters that a kernel, for arguments of these Triton types and values, may write to."""
    pointers = {name for name, type in types if type.startswith("*")}
    if not isinstance(function, triton_api.jit_function()):
        return frozenset(pointers)  # interpreted
    known = {name: value for name, _, value in constants if name in function.arg_names}
    signature = dict(types) | dict.fromkeys(known, "constexpr")
    signature = {name: signature[name] for name in function.arg_names if name in signature}
    target = triton_api.gpu_target("cuda", 90)  # what a kernel writes to is the same on all
    try:
        compiled = triton_api.triton_compile(function, signature, known, [], target, {})
    except Exception:  # whatever the compiler says, the launch will say again
        return frozenset(pointers)
    written = written_pointers(compiled.asm["ttir"])
    if written is None:
        return frozenset(pointers)
    passed = [name for name, type in signature.items() if type != "constexpr"]
    return frozenset(passed[place] for place in written) & pointers
