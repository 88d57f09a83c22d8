"""Nested frames: functions that eager code below a compiled function calls, captured where that pays.

While a compiled function runs something natively (a refused frame, the instruction after which it broke off),
the frame hook asks about every function called there. One of the user's gets a dispatcher with the compiled
function's backend and options; torch's, the standard library's, a notebook's and ours are left alone.

    NestedFrames.watched(function)(...)  the function, run with the hook on
    NestedFrames.decide(function)        what the hook asks

A function whose capture records nothing, or is refused, is left alone from then on: that costs 20 ns a call.
The real compiler decides per frame, for all compiled functions together: torch/_dynamo/convert_frame.py,
trace_rules.py.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from minicompile.dynamo.bytecode import parameters
from minicompile.dynamo.continuation import bind
from minicompile.dynamo.dispatch import Dispatcher, frame_watchers
from minicompile.dynamo.entry import MISS
from minicompile.dynamo.variables import is_fixed, library_of
from minicompile.plugins.nested_frames import hook
from minicompile.plugins.nested_frames.hook import LEAVE, NEVER, QUIET

QUIET_MODULES = (
    *("minicompile", "torch._dynamo", "torch._inductor", "torch._functorch", "torch.func"),
    *("torch.fx", "torch.jit", "torch.export", "torch._export", "torch.onnx", "torch._library"),
    *("torch._higher_order_ops", "torch.utils.checkpoint", "torch.utils._python_dispatch"),
)
"""Transform, trace or repeat what they call: they must see it as it is."""
QUIET_NAMES = ("__torch_dispatch__", "__torch_function__")
"""Called in the middle of an operator."""
MAX_CLOSURES, MAX_MODULES = 8, 256
"""Functions of one code, each with a closure of its own, that are captured; modules whose method it is."""


@frame_watchers("nested")
class NestedFrames:
    """The dispatchers of functions called by eager code below one compiled function."""

    def __init__(self, root: Dispatcher) -> None:
        self.root = weakref.ref(root)
        self.dispatchers: list[Dispatcher] = []
        """All but the root's own."""
        self.codes: dict[int, NestedCode] = {}
        """By the id of the code object, which it keeps alive."""
        self.serial = hook.next_serial()
        # code after graph breaks refers to `decide`, and such cycles are never collected
        weak = weakref.ref(self)

        def decide(function: types.FunctionType) -> Any:
            frames = weak()
            return LEAVE if frames is None else frames.decide(function)

        self._decide = decide

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as it is, but what it calls may be captured."""
        return hook.watched(self._decide, self.serial, function)

    def decide(self, function: types.FunctionType) -> Any:
        code = function.__code__
        found = self.codes.get(id(code))
        if found is None:
            standing = standing_of(function)
            if standing is not None:
                return standing
            found = self.codes[id(code)] = NestedCode(self, code)
        return found.entry


class NestedCode:
    """All functions of one code object. `entry(function, *locals)` is called in the place of their frames."""

    def __init__(self, frames: NestedFrames, code: types.CodeType) -> None:
        self.frames, self.code = weakref.ref(frames), code
        self.dispatchers: dict[tuple[int, ...], Dispatcher] = {}
        """By what makes calls differ altogether: globals and cells, the module that it is a method of."""
        self.entry: Any = self.answering()

    def answering(self) -> Callable[..., Any]:
        """The entry. Only `self.entry` keeps it alive: the hook must see that it is dropped."""
        plain, named, starred, _ = parameters(self.code)
        unordered = plain < named < starred  # a signature has *args before the keywords

        weak = weakref.ref(self)

        def answer(function: types.FunctionType, /, *given: Any) -> Any:
            self = weak()
            if self is None:
                return LEAVE
            found = self.dispatcher(function, given[0] if plain else None)
            if found is None:
                return LEAVE
            if unordered:
                moved = *given[named:starred], *given[plain:named]
                given = *given[:plain], *moved, *given[starred:]
            for entry in found.entries:
                result = entry.call(*given)
                if result is not MISS:
                    return result
            return self.missed(found, given)

        return answer

    def dispatcher(self, function: types.FunctionType, first: Any) -> Dispatcher | None:
        """The one for a call; None when there are too many of this code."""
        module = first if isinstance(first, torch.nn.Module) else None
        key, frames = identity(function, module), self.frames()
        root = None if frames is None else frames.root()
        if frames is None or root is None:
            return None
        if root.function.__code__ is self.code and key == identity(root.function, None):
            return root  # it calls itself
        most = MAX_CLOSURES if module is None else MAX_MODULES
        if key not in self.dispatchers and len(self.dispatchers) < most:
            own = bind(self.code, function, function.__closure__ or ())
            self.dispatchers[key] = root.another(own, one_module=module is not None)
            frames.dispatchers.append(self.dispatchers[key])
        return self.dispatchers.get(key)

    def missed(self, dispatcher: Dispatcher, arguments: tuple[Any, ...]) -> Any:
        """A call that no cache entry answered."""
        found = dispatcher.answer(arguments, wait=False)
        if found is MISS:
            dispatcher.eager_calls += 1
            found = LEAVE
        tried = dispatcher.entries or dispatcher.breaks
        if tried and not any(map(pays, dispatcher.entries)):
            self.entry = LEAVE
            frames = self.frames()
            if frames and not dispatcher.breaks and dispatcher in frames.dispatchers:
                frames.dispatchers.remove(dispatcher)  # nothing to tell
        return found


def pays(entry: Any) -> bool:
    """Whether an entry records anything, or may record what follows a graph break."""
    capture = entry.capture
    return capture.graph.op_count > 0 or (capture.stopped_by is not None and bool(capture.inputs))


def identity(function: types.FunctionType, module: torch.nn.Module | None) -> tuple[int, ...]:
    return id(module), id(function.__globals__), *map(id, function.__closure__ or ())


def standing_of(function: types.FunctionType) -> Any:
    """NEVER or QUIET for functions that are none of our business, None for the user's own."""
    code, module = function.__code__, function.__globals__.get("__name__")
    module = module if isinstance(module, str) else ""
    below = any(f"{module}.".startswith(f"{name}.") for name in QUIET_MODULES)
    if (below and is_fixed(module)) or code.co_filename.startswith("<minicompile "):
        return QUIET
    if code.co_name in QUIET_NAMES or library_of(module) in ("ipykernel", "IPython"):
        return QUIET
    if is_fixed(module) or library_of(module) == "numpy" or code.co_name == "__del__":
        return NEVER
    comprehension = not all(name.isidentifier() for name in code.co_varnames)
    return NEVER if comprehension else None
