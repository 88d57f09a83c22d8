"""The stack machine: frames, exception unwinding and generators.

    Frame       one activation of a function: fast slots, value stack, program counter
    Interpreter the operations (call, load an attribute, add, iterate ...), whose meaning a subclass gives
    bytecode    registry: normalised opname -> handler(frame, instruction)

Capture's `World` is such a subclass. Nothing here imports torch: one that means what CPython does runs the
machine's tests on every version (tests/dynamo/plain_machine.py).
The real compiler: torch/_dynamo/symbolic_convert.py.
"""

from __future__ import annotations

import dis
import functools
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from minicompile.dynamo.assembler import Op, assemble
from minicompile.dynamo.bytecode import Instruction, is_coroutine, is_generator, parameters
from minicompile.errors import MinicompileError
from minicompile.ops.origin import SourceLine
from minicompile.ops.registry import Registry


class Marker:
    """A named sentinel."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


C_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)
"""Types of methods that C code defines, as a class has them."""
NULL = Marker("NULL")
"""CPython's NULL beside a callable on the stack."""
UNBOUND = Marker("UNBOUND")
"""An empty fast slot."""
DELETED = Marker("DELETED")
"""Stands for the new value where something is deleted."""


@dataclass(slots=True, frozen=True)
class Lazy:
    """An argument that the frame has not read yet; `source` says where it lives."""

    value: Any
    source: Any


Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Handler = Callable[["Frame", Instruction], "bool | None"]
"""Runs one instruction. Gives True when the frame is left (return or yield), with `frame.result` set."""

bytecode: Registry[Handler] = Registry("bytecode", "normalised opname -> what the interpreter does")
bytecode.modules.append("minicompile.dynamo.opcodes")


class Frame:
    """One activation of a Python function inside the interpreter."""

    def __init__(self, world: Any, function: types.FunctionType, fast: list[Any]) -> None:
        self.world, self.function, self.fast = world, function, fast
        self.program = program = world.program(function.__code__)
        self.parent = parent = world.frame
        self.stack: list[Any] = []
        self.pc = 0
        self.current: Instruction = program.instructions[0]
        self.result: Any = None
        self.finished = False
        self.handled: BaseException | None = None
        """The exception that an `except` block is handling."""
        self.called: Any = None
        """What the current or last call calls."""
        self.steps = self.before_raise = 0
        """Steps of the whole interpreter when this frame's current instruction began, and when the
        instruction began whose exception it handles."""
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.module_path: str = parent.module_path if parent is not None else ""

    @property
    def builtins(self) -> dict[str, Any]:
        return self.function.__builtins__  # type: ignore[attr-defined]

    @property
    def line(self) -> SourceLine:
        return self.program.line_of(self.current)

    @property
    def outwards(self) -> Iterator[Frame]:
        """This frame, the one that called it, and so on."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    def popn(self, count: int) -> list[Any]:
        """The top `count` values, lowest first."""
        bottom = len(self.stack) - count
        values = self.stack[bottom:]
        del self.stack[bottom:]
        return values

    def run(self, error: BaseException | None = None) -> Any:
        """Run until return or yield; `error` is thrown at the current instruction first.

        Raises what the interpreted function raises, and Unsupported.
        """
        world, instructions, handlers = self.world, self.program.instructions, bytecode.records
        if error is not None and not self.unwind(error):
            raise error
        outer, world.frame = world.frame, self
        try:
            while True:
                instruction = instructions[self.pc]
                self.current = instruction
                self.pc += 1
                try:
                    what = f"the instruction {instruction.opname} is not supported"
                    registered = handlers.get(instruction.opname)
                    registered = registered or world.unsupported("instruction", what)
                    left = registered[-1][1](self, instruction)
                except BaseException as raised:
                    world.frame = self
                    if not world.catches(raised) or not self.unwind(raised):
                        raise
                    left = None
                world.step(self, instruction)
                if left:
                    return self.result
        finally:
            world.frame = outer

    def unwind(self, error: BaseException) -> bool:
        """Go to the handler of the current instruction, if it has one."""
        entry = self.current.handler
        if entry is None:
            return False
        if self.handled is None and self.current.opname != "RERAISE":
            self.before_raise = self.steps
        del self.stack[entry.depth :]
        if entry.lasti:
            self.stack.append(self.program.instructions.index(self.current))
        self.stack.append(error)
        self.pc = entry.target
        return True

    def handling(self) -> BaseException | None:
        """The innermost exception being handled, as `raise` without arguments sees it."""
        return next((f.handled for f in self.outwards if f.handled is not None), None)


class TracedGenerator:
    """A generator whose body the interpreter runs; native code can iterate over it like any other.

    A generator of CPython's own drives the frame: that knows the rules of `send`, `throw` and `close`.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame, self.native = frame, drive(frame, weakref.ref(self))
        self.__name__ = frame.function.__name__

    def __iter__(self) -> TracedGenerator:
        return self

    def __next__(self) -> Any:
        return next(self.native)

    def send(self, value: Any) -> Any:
        return self.native.send(value)

    def throw(self, *error: Any) -> Any:
        return self.native.throw(*error)

    def close(self) -> None:
        self.native.close()

    @property
    def started(self) -> bool:
        return inspect.getgeneratorstate(self.native) != inspect.GEN_CREATED

    @property
    def inside_try(self) -> bool:
        """Whether it is suspended where closing it would run more of its code."""
        frame, state = self.frame, inspect.getgeneratorstate(self.native)
        if state != inspect.GEN_SUSPENDED or frame.current.handler is None:
            return False
        handler = frame.program.instructions[frame.current.handler.target]
        return handler.opname != "STOPITERATION_ERROR"  # from 3.12 on around every generator


def drive(frame: Frame, owner: Callable[[], Any]) -> Generator[Any, Any, Any]:
    """What the frame yields and returns. Once its owner is gone, it is left where it stands."""
    error: BaseException | None = None
    while True:
        frame.parent = frame.world.frame
        result = frame.run(error)
        if frame.finished:
            return result
        value = error = None
        try:
            value = yield result
        except BaseException as thrown:
            if owner() is None:
                return None
            error = thrown
        waiting = frame.pc >= 2 and frame.program.instructions[frame.pc - 2].opname == "SEND"
        if isinstance(error, GeneratorExit) and waiting and hasattr(frame.stack[-1], "close"):
            frame.stack[-1].close()  # what `yield from` waits for
        frame.stack.append(value)  # also when an exception is thrown: unwinding counts it


_OPERATORS = (
    "+ add, - sub, * mul, / truediv, // floordiv, % mod, ** pow, @ matmul, << lshift, >> rshift, "
    "& and, | or, ^ xor, < lt, <= le, == eq, != ne, > gt, >= ge"
)
METHOD_OF = dict(pair.split() for pair in _OPERATORS.split(", "))
"""The dunder method behind each operator, without its underscores."""
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    symbol: getattr(operator, METHOD_OF[symbol]) for symbol in dis.cmp_op
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    f"{symbol}{suffix}": getattr(operator, f"__{prefix}{name}__")
    for prefix, suffix in (("", ""), ("i", "="))
    for symbol, name in METHOD_OF.items()
    if symbol not in COMPARE
}
UNARY: dict[str, Callable[[Any], Any]] = {
    "-": operator.neg,
    "+": operator.pos,
    "~": operator.invert,
}
Operation = Callable[..., Any]


class Interpreter:
    """Runs Python functions instruction by instruction. What operations mean is a subclass's to say: those
    that `opcodes.EFFECTS` calls as `world.name(...)`."""

    max_depth = 200

    unsupported: Callable[..., NoReturn]
    """(id, what, hint): give up on this frame for the reason of that id; raises Unsupported."""
    user_line: Callable[[], SourceLine | None]
    call: Operation
    load_cell: Operation
    """What a cell holds; raises ValueError when it is empty."""
    realize: Operation
    """A Lazy argument at its first use; other values unchanged."""
    load_attr: Operation

    def __init__(self) -> None:
        bytecode.load()
        self.frame: Frame | None = None
        """The frame that is running."""
        self.raised: BaseException | None = None
        self.raised_at: SourceLine | None = None
        """The last exception, and the user's line where it came up."""

    def catches(self, error: BaseException) -> bool:
        """Whether interpreted code may handle an exception: ours and the user's interrupt pass through.

        What is raised while another exception is handled gets that as its context.
        """
        if error is not self.raised:
            self.raised, self.raised_at = error, self.user_line()
        handled = self.frame.handling() if self.frame is not None else None
        if error.__context__ is None and error is not handled:
            error.__context__ = handled
        return not isinstance(error, MinicompileError | KeyboardInterrupt)

    def step(self, frame: Frame, instruction: Instruction) -> None:
        """Called after each instruction."""

    def run_function(self, function: types.FunctionType, args: Args, kwargs: Kwargs) -> Any:
        """Interpret a Python function. A generator function gives a TracedGenerator."""
        code = function.__code__
        if is_coroutine(code):
            what = f"{function.__qualname__} is asynchronous"
            self.unsupported("generator-or-coroutine", what)
        frame = Frame(self, function, bind(self, function, args, kwargs))
        if frame.depth > self.max_depth:
            self.unsupported("deep-calls", f"calls nest deeper than {self.max_depth}")
        if is_generator(code):
            return TracedGenerator(frame)
        return frame.run()

    def zero_argument_super(self) -> Any:
        frame = self.frame
        assert frame is not None
        cls = self.load_cell(frame.fast[frame.program.slots.index("__class__")])
        first = frame.fast[0]
        # The first parameter lives in a cell when a nested function uses it.
        cell = isinstance(first, types.CellType)
        instance = self.load_cell(first) if cell else self.realize(first)
        return super(cls, instance)

    def import_from(self, module: Any, name: str) -> Any:
        try:
            return self.load_attr(module, name)
        except AttributeError:
            full = f"{module.__name__}.{name}"
            if full in sys.modules:
                return sys.modules[full]
            text = f"cannot import name {name!r} from {module.__name__!r}"
            raise ImportError(text) from None


def set_cell(cell: types.CellType, value: Any) -> None:
    if value is DELETED:
        del cell.cell_contents
    else:
        cell.cell_contents = value


def bind(world: Any, function: types.FunctionType, args: Args, kwargs: Kwargs) -> list[Any]:
    """Arguments in fast slots, bound by CPython itself. Raises TypeError as it does."""
    plain, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    binder = types.FunctionType(binder_of(function.__code__), {})
    binder.__qualname__ = function.__qualname__
    binder.__defaults__ = tuple(map(Default, range(len(plain))))
    binder.__kwdefaults__ = {name: Default(name) for name in named}
    fast: list[Any] = [UNBOUND] * len(world.program(function.__code__).slots)
    for slot, value in enumerate(binder(*args, **kwargs)):
        if type(value) is Default:
            by_name = isinstance(value.key, str)
            value = (world.keyword_default if by_name else world.default)(function, value.key)
        fast[slot] = value
    return fast


@dataclass(slots=True, frozen=True)
class Default:
    """An argument that is left out: the number of the default, or the keyword's name."""

    key: Any


@functools.lru_cache(maxsize=4096)
def binder_of(code: types.CodeType) -> types.CodeType:
    """Code with the same parameters that gives them, in the order of their slots."""
    *_, total = parameters(code)
    given = [Op("LOAD_FAST", slot) for slot in range(total)]
    return assemble(
        code,
        [Op("RESUME"), *given, Op("BUILD_TUPLE", total), Op("RETURN_VALUE")],
        co_flags=code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) | FUNCTION_BODY,
        co_cellvars=(),
        co_freevars=(),
        co_stacksize=total + 1,
    )


FUNCTION_BODY = inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS
