"""The wrapper: readable Python that allocates, calls kernels and library operators, and frees.

    def call(args):
        x, w, s0 = args
        args.clear()
        buf0 = empty_strided_cpu((s0, 64), (64, 1), torch.float32)
        cpp_fused_relu_0(x, buf0, s0)
        del x
        ...
        return (buf3,)

Names the text expects where it runs, besides `torch`: each kernel and each constant by its name; `aten`
(`torch.ops.aten`); `empty_strided_cpu(size, stride, dtype)` and, for other devices,
`empty_strided(size, stride, dtype, device)`; `empty_large(size, stride, dtype)`, on the CPU, which an
`allocator` may give; `reinterpret(tensor, size, stride, offset)`, which sees a tensor's memory with another
layout; `to_layout(tensor, size, stride)`, which copies (runtime/load.py has them). `call` runs without
autograd: its caller sees to that.
The real compiler: torch/_inductor/codegen/wrapper.py.
"""

from __future__ import annotations

import keyword
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch

from minicompile.codegen.plan import CodeLine, KernelSource, WrapperSource, size_text
from minicompile.errors import Unsupported
from minicompile.lowering.ir import ComputedBuffer, ExternKernel, InputBuffer, Layout, View
from minicompile.ops.display import count_text
from minicompile.ops.functional import WRITING
from minicompile.ops.origin import NO_ORIGINS, Origins, union
from minicompile.scheduling.nodes import (
    LARGE,
    Allocation,
    ExternKernelSchedulerNode,
    FusedSchedulerNode,
    Schedule,
)
from minicompile.shapes.expr import FloorDiv, ModularIndexing, Size, coefficient_of, same, size_hint

HELPERS = {
    "empty_large",
    "empty_strided",
    "empty_strided_cpu",
    "reinterpret",
    "to_layout",
}
RESERVED = HELPERS | {"aten", "torch", "args", "call", "results", "float"}


def generate_wrapper(
    schedule: Schedule, kernels: Mapping[int, Sequence[KernelSource]]
) -> WrapperSource:
    """Python for a schedule. `kernels` has those of each fused node by its position in `schedule.nodes`.

    Raises Unsupported for sizes that no input gives and arguments that have no text.
    """
    return _Writer(schedule, kernels).write()


class _Writer:
    def __init__(self, schedule: Schedule, kernels: Mapping[int, Sequence[KernelSource]]) -> None:
        self.schedule, self.kernels = schedule, kernels
        self.graph, self.memory = schedule.graph, schedule.memory
        self.inputs = [b for b in self.graph.inputs if isinstance(b, InputBuffer)]
        self.used: set[sympy.Symbol] = set()
        self.objects: dict[str, str] = {}
        """Module-level names for operators and devices: looked up once, when the module is loaded."""
        self.taken = RESERVED | {kernel.name for group in kernels.values() for kernel in group}
        self.taken |= set(map(str, self.graph.size_hints))
        self.names: dict[str, str] = {}
        self.given: list[tuple[Size, str]] = []
        """Numbers among the inputs that are no symbol of their own."""
        for constant in self.graph.constants:
            self._name(constant.name)
        self.layouts = variable_layouts(schedule)
        self.handed_on = {a.reuses for new in self.memory.allocate for a in new}
        buffers = self.graph.buffers.items()
        self.made_by = {name: getattr(b, "made_by", b.origins) for name, b in buffers}
        """The operations whose results the buffers are."""
        self.lines: list[CodeLine] = []
        self.bound = {b.name for b in self.inputs}
        """Buffers that are Python variables right now."""
        self.owned: set[str] = set()
        """Buffers whose variable is no view of another."""
        changed = (self.graph.inputs[i] for i in self.graph.written_back.values())
        self.written = {b.name for b in changed if isinstance(b, InputBuffer)}
        steps = enumerate(self.memory.allocate)
        self.full = max((i for i, new in steps for a in new if a.reuses is None), default=0)
        """The last step at which memory may run out."""

    def write(self) -> WrapperSource:
        inputs = [self._input_name(value) for value in self.graph.inputs]
        for step, node in enumerate(self.schedule.nodes):
            self._step(step, node)
        outputs = tuple(self.graph.outputs)
        self._line(f"return {self._argument(outputs)}")
        views = [o for o in outputs if isinstance(o, View)]
        owned = all(o.buffer in self.owned and self._argument(o) in self.taken for o in views)
        body, self.lines = self.lines, []
        self._start(inputs)
        lines = [CodeLine(text, scaffold=True) for text in self._head()] + self.lines + body
        kernels = [kernel for _, group in sorted(self.kernels.items()) for kernel in group]
        return WrapperSource(self.graph.name, lines, kernels, owned)

    def _head(self) -> list[str]:
        kernels = len(self.schedule.kernels)
        externs = len(self.schedule.nodes) - kernels
        counts = count_text(kernels, "kernel"), count_text(externs, "library call")
        lines = [f"# {self.graph.name}: {', '.join(counts)}"]
        lines += ["import torch", ""]
        lines += [f"{name} = {text}" for text, name in self.objects.items()]
        return [*lines, "", "", "def call(args):"]

    def _start(self, inputs: list[str]) -> None:
        """Take the arguments, find the sizes, drop what isn't needed."""
        if inputs:
            self._line(f"{', '.join(inputs)}{',' if len(inputs) == 1 else ''} = args")
        self._line("args.clear()")
        self._find_sizes({symbol for symbol in self.used if str(symbol) not in inputs})
        needed = {o.buffer for o in self.graph.outputs if isinstance(o, View)} | self.handed_on
        for node in self.schedule.nodes:
            needed.update(d.buffer for d in node.reads)
        unread = [self.names[b.name] for b in self.inputs if b.name not in needed]
        if unread:
            self._line(f"del {', '.join(unread)}")

    # -- inputs and sizes

    def _input_name(self, value: InputBuffer | Size) -> str:
        if isinstance(value, InputBuffer):
            return self._name(value.name)
        if isinstance(value, sympy.Symbol):
            return str(value)
        self.given.append((value, self._unique("size")))
        return self.given[-1][1]

    def _name(self, buffer: str) -> str:
        """The variable of a buffer: its own name if Python allows it."""
        if buffer not in self.names:
            name = re.sub(r"\W", "_", buffer)
            if not name.isidentifier() or keyword.iskeyword(name):
                name = f"_{name}"
            self.names[buffer] = self._unique(name)
        return self.names[buffer]

    def _unique(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def _find_sizes(self, missing: set[sympy.Symbol]) -> None:
        """Lines that read size symbols off the inputs."""
        for symbol in sorted(missing, key=str):
            self._line(f"{symbol} = {self._source(symbol)}")

    def _source(self, symbol: sympy.Symbol) -> str:
        """Where an input shows the value of a size symbol."""
        for size, text in self.given:
            if found := solved(size, symbol, text):
                return found
        for buffer in self.inputs:
            for kind, form in (("size", "{}.shape[{}]"), ("stride", "{}.stride({})")):
                for axis, size in enumerate(getattr(buffer.layout, kind)):
                    text = form.format(self.names[buffer.name], axis)
                    if found := solved(size, symbol, text):
                        return found
        raise Unsupported(f"no input tells what {symbol} is")

    # -- steps

    def _step(self, step: int, node: FusedSchedulerNode | ExternKernelSchedulerNode) -> None:
        fused, given = isinstance(node, FusedSchedulerNode), self.memory.allocate[step]
        sums = [a for a in given if a.in_place and not fused]  # the library reads what it writes
        for allocation in given:
            if allocation not in sums:
                self._allocate(allocation)
        if isinstance(node, FusedSchedulerNode):
            for allocation in given if step < self.full else ():
                if allocation.reuses in self.written:  # should memory run out: not to be run again
                    self._line(f"increment_version({self._name(allocation.buffer)})", node.origins)
            self._kernel(step, node)
        elif step in self.kernels:
            self._template(step, node)
        elif node.kernel.op in WRITING:
            self._writing(step, node.kernel, WRITING[node.kernel.op])
        elif sums:
            self._extern(node.kernel, sums[0].reuses)
            self._allocate(sums[0])
        else:
            self._extern(node.kernel, given[0].buffer if given else None)
        dead = [n for n in self.memory.free[step] if n in self.bound - self.handed_on]
        self.bound.difference_update(dead)
        if dead:
            origins = union(self.made_by[n] for n in dead) or None
            self._line(f"del {', '.join(map(self._name, dead))}", origins)

    def _allocate(self, allocation: Allocation) -> None:
        layout, origins = self.layouts[allocation.buffer], self.made_by[allocation.buffer]
        name, old = self._name(allocation.buffer), allocation.reuses
        self.bound.add(allocation.buffer)
        if old is None:
            self.owned.add(allocation.buffer)
            self._line(f"{name} = {self._empty(layout)}", origins)
            return
        self.bound.discard(old)
        memory = self._view(View(old, layout))
        if old in self.owned and memory in self.taken:
            self.owned.add(allocation.buffer)
        how = "in place" if allocation.in_place else "reuse"
        self._line(f"{name} = {memory}; del {self._name(old)}  # {how}", origins)

    def _empty(self, layout: Layout) -> str:
        arguments = f"{self._memory(layout)}, {layout.dtype}"
        if layout.device.type == "cpu":
            elements = size_hint(layout.storage_size, self.graph.size_hints)
            large = elements * layout.dtype.itemsize >= LARGE
            return f"empty_{'large' if large else 'strided_cpu'}({arguments})"
        return f"empty_strided({arguments}, {self._device(layout.device)})"

    def _kernel(self, step: int, node: FusedSchedulerNode) -> None:
        for member in node.nodes:
            target = self.memory.aliases.get(member.name)
            if target is not None:
                self.bound.add(member.name)
                text = f"{self._name(member.name)} = {self._name(target)}  # updated in place"
                self._line(text, member.buffer.made_by)
        if 0 in node.ranges.values():
            self._line(f"# {node.name}: no elements", node.origins)
            return
        self._launches(step, node.origins)

    def _launches(self, step: int, origins: Origins) -> None:
        spaces: list[str] = []
        for kernel in self.kernels[step]:
            for name, layout in kernel.plan.workspace.items():
                if self._name(name) not in spaces:
                    spaces.append(self._name(name))
                    self._line(f"{spaces[-1]} = {self._empty(layout)}", origins)
            arguments = [self._name(a.buffer) for a in kernel.plan.arguments]
            arguments += [self._size(s) for s in kernel.plan.sizes]
            self._line(f"{kernel.name}({', '.join(arguments)})", origins)
        if spaces:
            self._line(f"del {', '.join(spaces)}", origins)

    def _template(self, step: int, node: ExternKernelSchedulerNode) -> None:
        """The kernels that compute an operator."""
        for output in filter(None, node.kernel.outputs):
            self.bound.add(output.name)
            self.owned.add(output.name)
            name, memory = self._name(output.name), self._empty(output.layout)
            self._line(f"{name} = {memory}", node.origins)
        self._launches(step, node.origins)

    def _extern(self, kernel: ExternKernel, given: str | None) -> None:
        """A library call; `given` is the buffer that the plan has for its result."""
        arguments = [self._argument(a) for a in kernel.args]
        arguments += [f"{key}={self._argument(value)}" for key, value in kernel.kwargs.items()]
        outputs = [o for o in kernel.outputs if o is not None]
        origins = kernel.origins
        if given is not None:  # torch's binding takes half the time of the operator's
            arguments.append(f"out={self._name(given)}")
            function = str(kernel.op).split(".")[1]
            self._line(f"torch.{function}({', '.join(arguments)})", origins)
            return
        self.bound.update(o.name for o in outputs)
        call = f"{self._operator(kernel.op)}({', '.join(arguments)})"
        if len(outputs) == 1 and outputs[0].index is None:
            self._line(f"{self._name(outputs[0].name)} = {call}", origins)
        elif outputs:
            self._line(f"results = {call}", origins)
            for output in outputs:
                self._line(f"{self._name(output.name)} = results[{output.index}]", origins)
            self._line("del results", origins)
        else:
            self._line(call, origins)
        for output in outputs:
            self._expect(self._name(output.name), output.layout, origins)

    def _writing(self, step: int, kernel: ExternKernel, op: torch._ops.OpOverload) -> None:
        """Call a user's operator that writes: on a clone of each tensor that it writes to, or on the tensor
        itself where nothing else reads that memory."""
        nodes = (n for n in self.schedule.nodes if isinstance(n, ExternKernelSchedulerNode))
        seen = Counter(view.buffer for n in nodes for view in n.kernel.views())
        made = [i for i, result in enumerate(op._schema.returns) if result.alias_info is None]
        several, origins = len(op._schema.returns) > 1, kernel.origins
        values = [f"results[{i}]" if several else "results" for i in made]
        outputs = iter(kernel.outputs[len(made) :])

        def text(value: Any, written: bool) -> str:
            name = self._argument(value)
            if not written:
                return name
            output = next(outputs)
            if not isinstance(value, View):
                values.append("torch.empty(0)")
                return name
            alone = value.buffer in self.owned and seen[value.buffer] == 1 and name in self.taken
            if not alone or value.buffer not in self.memory.free[step]:
                copy = self._unique("copy") if output is None else self._name(output.name)
                self._line(f"{copy} = {name}.clone()", origins)
                name = copy
            values.append(name)
            return name

        arguments = []
        for place, parameter in enumerate(op._schema.arguments):
            name, written = parameter.name, parameter.alias_info is not None
            if place < len(kernel.args):
                arguments.append(text(kernel.args[place], written))
            elif name in kernel.kwargs:
                arguments.append(f"{name}={text(kernel.kwargs[name], written)}")
            elif written:  # left out, which is None
                text(None, written)
        call = f"{self._operator(op)}({', '.join(arguments)})"
        self._line(f"results = {call}" if made else call, origins)
        for output, value in zip(kernel.outputs, values):
            if output is None:
                continue
            name = self._name(output.name)
            self.bound.add(output.name)
            if value in self.taken - RESERVED:
                self.owned.add(output.name)
            if value != name:
                self._line(f"{name} = {value}", origins)
            self._expect(name, output.layout, origins)
        if made:
            self._line("del results", origins)

    def _expect(self, name: str, layout: Layout, origins: Origins) -> None:
        """What a library returns must lie as kernels expect it."""
        if not layout.size:
            return
        self._line(f"if {name}.stride() != {self._sizes(layout.stride)}:", origins)
        self._line(f"    {name} = to_layout({name}, {self._memory(layout)})", origins)

    # -- text

    def _line(self, text: str, origins: Origins | None = None) -> None:
        """A line with the origins of what it makes, calls or frees; without any it is scaffold."""
        self.lines.append(CodeLine(f"    {text}", origins or NO_ORIGINS, origins is None))

    def _operator(self, op: torch._ops.OpOverload) -> str:
        name = str(op)
        text = name if name.startswith("aten.") else f"torch.ops.{name}"
        return self._object(text, name.replace(".", "_"))

    def _device(self, device: torch.device) -> str:
        index = "" if device.index is None else f", {device.index}"
        name = f"{device.type}{'' if device.index is None else device.index}"
        return self._object(f"torch.device('{device.type}'{index})", name)

    def _object(self, text: str, name: str) -> str:
        if text not in self.objects:
            self.objects[text] = self._unique(name)
        return self.objects[text]

    def _size(self, size: Size) -> str:
        if not isinstance(size, int):
            self.used |= size.free_symbols
        return size_text(size)

    def _sizes(self, sizes: Iterable[Size]) -> str:
        return _tuple(map(self._size, sizes))

    def _memory(self, layout: Layout) -> str:
        """Size and stride: two arguments of whatever makes or sees a tensor."""
        return f"{self._sizes(layout.size)}, {self._sizes(layout.stride)}"

    def _view(self, view: View) -> str:
        """A buffer's variable where that has the layout, else its memory seen otherwise."""
        own, layout = self.layouts[view.buffer], view.layout
        name = self._name(view.buffer)
        if own == layout:  # strides of dimensions of size 1 included: callers may look at them
            return name
        return f"reinterpret({name}, {self._memory(layout)}, {self._size(layout.offset)})"

    def _argument(self, value: Any) -> str:
        """An argument or output as Python text."""
        if isinstance(value, View):
            return self._view(value)
        if isinstance(value, sympy.Expr):
            return self._size(value)
        if isinstance(value, tuple | list):
            items = [self._argument(v) for v in value]
            return _tuple(items) if isinstance(value, tuple) else f"[{', '.join(items)}]"
        if isinstance(value, float) and not math.isfinite(value):
            return f"float('{value}')"
        if isinstance(value, torch.device):
            return self._device(value)
        known = (
            bool | int | float | complex | str | torch.dtype | torch.layout | torch.memory_format
        )
        if value is None or isinstance(value, known):
            return repr(value)
        raise Unsupported(f"a library call with an argument of type {type(value).__name__}")


def _tuple(items: Iterable[str]) -> str:
    texts = list(items)
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def variable_layouts(schedule: Schedule) -> dict[str, Layout]:
    """The layout that each buffer's variable has in Python.

    Kernels see memory only, so a buffer of ours is allocated the way library calls and the caller look at it
    most often: each look saved is a microsecond and a half. Offsets are left to views.
    """
    graph, memory = schedule.graph, schedule.memory
    externs = (n.kernel for n in schedule.nodes if isinstance(n, ExternKernelSchedulerNode))
    views = [view for kernel in externs for view in kernel.views()]
    views += [output for output in graph.outputs if isinstance(output, View)]
    looks: dict[str, list[Layout]] = {}
    for view in views:
        looks.setdefault(view.buffer, []).append(view.layout)
    allocated = {allocation.buffer for step in memory.allocate for allocation in step}
    targets = {*memory.aliases, *memory.aliases.values()}
    found: dict[str, Layout] = {}
    for name, buffer in graph.buffers.items():
        found[name] = buffer.layout
        if name in allocated and isinstance(buffer, ComputedBuffer) and name not in targets:
            own = found[name]
            fitting = [
                look
                for look in looks.get(name, ())
                if _is_plain(look) and same(look.storage_size, own.storage_size)
            ]
            found[name] = max(fitting, key=fitting.count, default=own)
    for name, target in memory.aliases.items():
        found[name] = found[target]
    return found


def _is_plain(layout: Layout) -> bool:
    """It begins where its memory does, and no two of its elements are one."""
    expanded = any(s == 0 and n != 1 for s, n in zip(layout.stride, layout.size, strict=True))
    return layout.offset == 0 and not expanded


def solved(size: Size, symbol: sympy.Symbol, text: str, divide: str = "//") -> str | None:
    """Text for the symbol, given text for a size that is linear in it alone."""
    if isinstance(size, int) or size.free_symbols != {symbol}:
        return None
    if size == symbol:
        return text
    step = coefficient_of(size, symbol)
    if step is None or not step.is_Integer or size.has(FloorDiv, ModularIndexing):
        return None
    rest = int(size.xreplace({symbol: sympy.Integer(0)}))
    shifted = f"({text} - {rest})" if rest else text
    return shifted if step == 1 else f"{shifted} {divide} {step}"
