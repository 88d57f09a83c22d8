"""The registry of reasons for graph breaks and eager frames: each one's id, meaning and usual fix.

`refusal(id, what)` makes the exception; `what` says what was met this time.
The real compiler: torch/_dynamo/graph_break_registry.json, torch/_dynamo/exc.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from minicompile.errors import Unsupported
from minicompile.ops.origin import SourceLine

if TYPE_CHECKING:
    from minicompile.dynamo.result import GraphBreak

E = TypeVar("E", bound=Unsupported)


@dataclass(frozen=True)
class Reason:
    """`explanation` is for somebody who has not met it before; `fix` is what usually helps."""

    explanation: str
    fix: str


TEXT = """
# a tensor's data, which capture does not have
branch-on-tensor: use torch.where, or functions for the branches: `torch.cond(test, if_true, if_false, (x,))`
    Python must know whether something is true to choose its way, but a captured tensor has no values
    yet, only a shape and a dtype.
control-flow: call it outside of the compiled function, or have its functions give new tensors of equal kinds
    torch.cond, while_loop, scan and map choose at run time what their functions do, how often; Python
    runs such a call where a graph can't hold these functions.
item: keep it a tensor, or compute it outside of the compiled function
    A tensor is turned into a Python number. Its value exists only when the graph runs, so the graph has
    to end before.
numpy: use torch functions, or call numpy outside of the compiled function
    NumPy works on memory. A captured tensor has none, and a graph can't hold NumPy's calls.
tensor-as-index: index a tensor with it, or compute the index outside
    A list or dict is looked up with a tensor, which needs the tensor's value.
tensor-as-text: print outside of the compiled function
    The text of a tensor is made of its values, which are not known during capture.
data-dependent-size: use an operation with a result of fixed size, or call it outside of the compiled function
    How large the result is depends on values in the tensor; a graph's sizes must follow from the sizes
    of its inputs.
# effects that must happen at the right moment
print: print outside of the compiled function
    Printing is an effect on the world: it must happen at every call and in order, so Python does it
    between two graphs.
log: log outside of the compiled function
    Logging and warnings are effects too, and what they do depends on handlers and filters that can
    change at any time.
file-or-terminal: read it before the call and pass it in
    Files and the terminal belong to the outside world; what is read may be different at the next call.
time-or-random: pass the value in as an argument
    A clock or Python's random numbers give another value each time; a graph would repeat the first.
random-state: seed outside of the compiled function
    Seeding changes the state from which all later random numbers come.
default-dtype-or-device: pass `dtype=` or `device=` where tensors are made; a default dtype may be set outside
    The default dtype and device decide what later calls of torch functions make, in all code.
inference-mode: put the whole forward under inference mode, or call it there
    A graph runs as a whole in inference mode or out of it, because its results are inference tensors or
    not; autograd can't use those.
context-variable: set it outside, and pass its value in
    A ContextVar's value belongs to the running thread or task, and changing it is an effect.
first-import: import it at the top of the file
    Importing a module for the first time runs all of its code.
# autograd and torch's own machinery
autograd-state: set up requires_grad and hooks before the call, read gradients after it
    A tensor's history, gradient and hooks belong to the running program, not to a graph.
backward: compile the forward function and call backward outside
    The backward pass is derived from the captured graph once that is complete; it can't start inside.
autograd-function: write it with torch operations, and autograd will differentiate them
    A custom autograd.Function brings its own backward code, which capture does not follow.
checkpoint: compile the function without checkpoint: the compiler chooses what to recompute by itself
    Checkpointing re-runs Python code during the backward pass.
function-transform: apply the transform outside, to functions that are not compiled
    torch.func's transforms replace tensors by wrappers that capture can't look into.
function-mode: call the compiled function outside of the mode
    A torch function mode or dispatch mode sees every single call of torch; a graph would hide them.
disabled: call it outside of the compiled function, or take the mark away
    The function asked not to be compiled, so Python runs it, and all that it calls.
allowed-function: give it all its tensors as arguments, and return tensors
    A function under mc.allow_in_graph is one opaque call of the graph: what goes in and out must be
    visible there.
several-processes: compile what lies between
    Processes exchange tensors at a moment that all must reach, and in the order in which they call.
no-value-yet: assign it before the call
    A variable or slot that existed before the call is empty, and no guard can watch over nothing.
triton-kernel: make it an operator with torch.library.triton_op, or launch it outside
    A launch is Python code of Triton's, which compiles and starts the kernel; it runs as it is.
nested-compile: leave such calls outside of the compiled function
    Code that steers a compiler itself (torch.compile, compiler.disable) runs as it is.
tensor-memory: work with shapes and values; clone instead of resizing in place
    The tensor's memory or layout is asked for or replaced, but memory is chosen after the capture.
tensor-attribute: keep such data in an object or a dict beside the tensor
    Capture knows the attributes of tensors that follow from guarded facts, and this is none of them.
tensor-kind: convert it to a plain tensor before the call
    Only ordinary dense tensors are captured; this one has a class or a layout with rules of its own.
shared-memory: clone one of them
    The graph writes to a tensor whose memory another input can see; the order of reads and writes would
    matter.
graph-value: take the object apart before the torch function is called
    Arguments and results of the torch functions in a graph must be tensors, numbers, or lists of them,
    that this capture knows.
# Python objects
outside-object: pass what is needed as a list, tuple, dict or tensor
    An object from outside has a type whose inside is hidden in C code: no guard could notice a change.
outside-change: make the change outside of the compiled function
    The frame changes an object that others can see, in a way that can't be replayed after the graph.
iterator-from-outside: pass a list instead
    Advancing an iterator that was made outside uses it up, and nobody can look at what it will give.
class-change: set up classes before the call
    A class is made or changed, which may run code of its bases and of its metaclass: Python does that.
attribute-kind: read it before the call and pass the value in
    Reading or setting this attribute runs C code or a descriptor that capture does not know.
own-equality: use numbers, strings or tuples of them as keys
    A lookup or a sort would run the object's own `__hash__`, `__eq__` or `__lt__` from C code.
object-as-text: make the text outside of the compiled function
    An object's text may show its address or data, and then it differs from call to call.
copy: use clone() for tensors, and copy other objects before the call
    Copying calls what the object's class defines for it, often in C code.
cached-function: call the uncached function, or pass the result in
    A cached function looks its arguments up in a table that other callers fill and empty.
memory-address: compare with `is` instead
    The number depends on where an object lies in memory, which differs in every process.
returned-object: return tensors, numbers, containers, or objects of plain Python classes
    The frame made an object whose type capture can't rebuild at the next call.
# code
unknown-c-function: call it outside of the compiled function
    The call goes into C code that is not on the list of what is known to be free of effects, so it must
    run at every call.
unusual-arguments: use its plain form
    The function is known to capture, but not with arguments like these.
code-from-text: define the function before the call
    Code made from text while the program runs can do anything, and differ at the next call.
frame-inspection: pass the variables explicitly
    The code looks at its own frame or variables; that frame does not exist when the graph runs.
generator-or-coroutine: compile the functions it calls, or a function that uses it up
    Generators and coroutines stop in the middle and are continued by somebody else.
instruction: write the line in another way, and report it
    Capture has no rule for this bytecode instruction.
deep-calls: turn the recursion into a loop
    Calls are nested so deeply that Python's own stack would run out.
place-of-cut: move the line that can't be captured out of this block or function
    A graph can't end at this place: the frame could not be restored there.
exception: catch it in the compiled function, or check the condition before the call
    The code raises an exception. Python runs it again, so that it is the same exception as ever.
# not the program's doing
recompile-limit: make what changes a tensor, or raise the limit; mc.explain shows what changes
    Something different at every call made a new capture necessary again and again.
later-stage: see the message; backend="eager" runs the graph as it was captured
    The frame was captured, but a stage after capture can't compile its graph.
missing-tool: install it, or use backend="aot_eager"
    A tool that the backend needs (a C++ compiler, a GPU) is missing here or failed.
torch-part-gone: take a release of torch that `minicompile doctor` names as tested
    The installed torch or Triton lacks something private that minicompile needs for this, because it is
    newer or older than the releases that minicompile was tested with.
python-unknown: take a Python that `minicompile doctor` names as tested
    Capture reads bytecode, which changes with every release of Python, and it doesn't know this one's.
internal-error: please report it; fullgraph=True raises it
    A bug in minicompile. The answer is still right: Python ran the frame.
"""
"""Of each reason its id, the usual fix, and below them the explanation."""


_ENTRIES = re.findall(r"^([\w-]+): (.*)\n((?:    .*\n)+)", TEXT, re.MULTILINE)
REASONS = {id: Reason(" ".join(text.split()), fix) for id, fix, text in _ENTRIES}


def refusal(
    id: str,
    what: str,
    where: SourceLine | None = None,
    hint: str = "",
    kind: type[E] = Unsupported,  # type: ignore[assignment]
    places: Sequence[int] = (),
) -> E:
    """The exception for one of the reasons; a `hint` takes the place of its usual fix."""
    made = kind(what, where, hint or REASONS[id].fix, id)
    made.places = places
    return made


def graph_break(why: Unsupported, kind: str = "frame") -> GraphBreak:
    """Return the break that an exception is the reason for."""
    from minicompile.dynamo.result import GraphBreak  # tests run the stack machine without torch

    explanation = REASONS[why.id].explanation
    return GraphBreak(why.reason, why.where, why.hint, kind, why.id, explanation)
