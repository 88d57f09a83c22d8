"""Why Python runs something itself: every reason's id, what it means, and the usual fix.

`refusal(id, what)` makes the exception; `what` says what was met this time.
The real compiler: torch/_dynamo/graph_break_registry.json, torch/_dynamo/exc.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from minicompile.errors import Unsupported
from minicompile.ops.origin import SourceLine

E = TypeVar("E", bound=Unsupported)


@dataclass(frozen=True)
class Reason:
    """`explanation` is for somebody who has not met it before; `fix` is what usually helps."""

    explanation: str
    fix: str


REASONS: dict[str, Reason] = {
    # -- a tensor's data, which capture does not have
    "branch-on-tensor": Reason(
        "Python must know whether something is true to choose its way, but a captured tensor has no values "
        "yet, only a shape and a dtype.",
        "use torch.where, or move the branch outside of the compiled function",
    ),
    "item": Reason(
        "A tensor is turned into a Python number. Its value exists only when the graph runs, so the graph "
        "has to end before.",
        "keep it a tensor, or compute it outside of the compiled function",
    ),
    "numpy": Reason(
        "NumPy works on memory. A captured tensor has none, and a graph can't hold NumPy's calls.",
        "use torch functions, or call numpy outside of the compiled function",
    ),
    "tensor-as-index": Reason(
        "A list or dict is looked up with a tensor, which needs the tensor's value.",
        "index a tensor with it, or compute the index outside",
    ),
    "tensor-as-text": Reason(
        "The text of a tensor is made of its values, which are not known during capture.",
        "print outside of the compiled function",
    ),
    "data-dependent-size": Reason(
        "How large the result is depends on values in the tensor; a graph's sizes must follow from the "
        "sizes of its inputs.",
        "use an operation with a result of fixed size, or leave it outside of the compiled function",
    ),
    # -- effects that must happen at the right moment
    "print": Reason(
        "Printing is an effect on the world: it must happen at every call and in order, so Python does it "
        "between two graphs.",
        "print outside of the compiled function",
    ),
    "log": Reason(
        "Logging and warnings are effects too, and what they do depends on handlers and filters that can "
        "change at any time.",
        "log outside of the compiled function",
    ),
    "file-or-terminal": Reason(
        "Files and the terminal belong to the outside world; what is read may be different at the next call.",
        "read it before the call and pass it in",
    ),
    "time-or-random": Reason(
        "A clock or Python's random numbers give another value each time; a graph would repeat the first.",
        "pass the value in as an argument",
    ),
    "random-state": Reason(
        "Seeding changes the state from which all later random numbers come.",
        "seed outside of the compiled function",
    ),
    "default-dtype-or-device": Reason(
        "The default dtype and device decide what later calls of torch functions make, in all code.",
        "pass `dtype=` or `device=` where tensors are made, or set the default outside",
    ),
    "mode-left-changed": Reason(
        "The frame left a setting of torch in another state, and capture can't repeat that change.",
        "restore it in the same function, with a `with` statement",
    ),
    "context-variable": Reason(
        "A ContextVar's value belongs to the running thread or task, and changing it is an effect.",
        "set it outside, and pass its value in",
    ),
    "first-import": Reason(
        "Importing a module for the first time runs all of its code.",
        "import it at the top of the file",
    ),
    # -- autograd and torch's own machinery
    "autograd-state": Reason(
        "A tensor's history, gradient and hooks belong to the running program, not to a graph.",
        "set up requires_grad and hooks before the call, read gradients after it",
    ),
    "backward": Reason(
        "The backward pass is derived from the captured graph once that is complete; it can't start inside.",
        "compile the forward function and call backward outside",
    ),
    "autograd-function": Reason(
        "A custom autograd.Function brings its own backward code, which capture does not follow.",
        "write it with torch operations, and autograd will differentiate them",
    ),
    "checkpoint": Reason(
        "Checkpointing re-runs Python code during the backward pass.",
        "compile the function without checkpoint: the compiler chooses what to recompute by itself",
    ),
    "function-transform": Reason(
        "torch.func's transforms replace tensors by wrappers that capture can't look into.",
        "apply the transform outside, to functions that are not compiled",
    ),
    "function-mode": Reason(
        "A torch function mode or dispatch mode sees every single call of torch; a graph would hide them.",
        "call the compiled function outside of the mode",
    ),
    "disabled": Reason(
        "The function asked not to be compiled, so Python runs it, and all that it calls.",
        "call it outside of the compiled function, or take the mark away",
    ),
    "allowed-function": Reason(
        "A function under mc.allow_in_graph is one opaque call of the graph: what goes in and out must be "
        "visible there.",
        "give it all its tensors as arguments, and return tensors",
    ),
    "no-value-yet": Reason(
        "A variable or slot that existed before the call is empty, and no guard can watch over nothing.",
        "assign it before the call",
    ),
    "nested-compile": Reason(
        "Code that steers a compiler itself (torch.compile, compiler.disable) runs as it is.",
        "leave such calls outside of the compiled function",
    ),
    "tensor-memory": Reason(
        "The tensor's memory or layout is asked for or replaced, but memory is chosen after the capture.",
        "work with shapes and values; clone instead of resizing in place",
    ),
    "tensor-attribute": Reason(
        "Capture knows the attributes of tensors that follow from guarded facts, and this is none of them.",
        "keep such data in an object or a dict beside the tensor",
    ),
    "tensor-kind": Reason(
        "Only ordinary dense tensors are captured; this one has a class or a layout with rules of its own.",
        "convert it to a plain tensor before the call",
    ),
    "shared-memory": Reason(
        "The graph writes to a tensor whose memory another input can see; the order of reads and writes "
        "would matter.",
        "clone one of them",
    ),
    "graph-value": Reason(
        "Arguments and results of the torch functions in a graph must be tensors, numbers, or lists of them, "
        "that this capture knows.",
        "take the object apart before the torch function is called",
    ),
    "size-expression": Reason(
        "A symbolic size is computed in a way that guards and graphs can't express.",
        "compile with dynamic=False, or compute the size outside",
    ),
    # -- Python objects
    "outside-object": Reason(
        "An object from outside has a type whose inside is hidden in C code: no guard could notice a change.",
        "pass what is needed as a list, tuple, dict or tensor",
    ),
    "outside-change": Reason(
        "The frame changes an object that others can see, in a way that can't be replayed after the graph.",
        "make the change outside of the compiled function",
    ),
    "iterator-from-outside": Reason(
        "Advancing an iterator that was made outside uses it up, and nobody can look at what it will give.",
        "pass a list instead",
    ),
    "class-change": Reason(
        "Classes are changed or made in a way that runs code of other classes.",
        "set up classes before the call",
    ),
    "attribute-kind": Reason(
        "Reading or setting this attribute runs C code or a descriptor that capture does not know.",
        "read it before the call and pass the value in",
    ),
    "own-equality": Reason(
        "A lookup or a sort would run the object's own `__hash__`, `__eq__` or `__lt__` from C code.",
        "use numbers, strings or tuples of them as keys",
    ),
    "object-as-text": Reason(
        "An object's text may show its address or data, and then it differs from call to call.",
        "make the text outside of the compiled function",
    ),
    "copy": Reason(
        "Copying calls what the object's class defines for it, often in C code.",
        "use clone() for tensors, and copy other objects before the call",
    ),
    "cached-function": Reason(
        "A cached function looks its arguments up in a table that other callers fill and empty.",
        "call the uncached function, or pass the result in",
    ),
    "memory-address": Reason(
        "The number depends on where an object lies in memory, which differs in every process.",
        "compare with `is` instead",
    ),
    "returned-object": Reason(
        "The frame made an object whose type capture can't rebuild at the next call.",
        "return tensors, numbers, containers, or objects of plain Python classes",
    ),
    # -- code
    "unknown-c-function": Reason(
        "The call goes into C code that is not on the list of what is known to be free of effects, so it "
        "must run at every call.",
        "call it outside of the compiled function",
    ),
    "unusual-arguments": Reason(
        "The function is known to capture, but not with arguments like these.",
        "use its plain form",
    ),
    "code-from-text": Reason(
        "Code made from text while the program runs can do anything, and differ at the next call.",
        "define the function before the call",
    ),
    "frame-inspection": Reason(
        "The code looks at its own frame or variables; that frame does not exist when the graph runs.",
        "pass the variables explicitly",
    ),
    "generator-or-coroutine": Reason(
        "Generators and coroutines stop in the middle and are continued by somebody else.",
        "compile the functions it calls, or a function that uses it up",
    ),
    "instruction": Reason(
        "Capture has no rule for this bytecode instruction.",
        "write the line in another way, and report it",
    ),
    "deep-calls": Reason(
        "Calls are nested so deeply that Python's own stack would run out.",
        "turn the recursion into a loop",
    ),
    "place-of-cut": Reason(
        "A graph can't end at this place: the frame could not be restored there.",
        "move the line that can't be captured out of this block or function",
    ),
    "exception": Reason(
        "The code raises an exception. Python runs it again, so that it is the same exception as ever.",
        "catch it in the compiled function, or check the condition before the call",
    ),
    # -- not the program's doing
    "recompile-limit": Reason(
        "Something different at every call made a new capture necessary again and again.",
        "make what changes a tensor, or raise the limit; mc.explain shows what changes",
    ),
    "guards-changed": Reason(
        "What was guarded was no longer true when the capture had ended, perhaps because of another thread.",
        "don't change the objects that the function reads while it is being compiled",
    ),
    "later-stage": Reason(
        "The frame was captured, but a stage after capture can't compile its graph.",
        'see the message; backend="eager" runs the graph as it was captured',
    ),
    "missing-tool": Reason(
        "A tool that the backend needs (a C++ compiler, a GPU) is missing here or failed.",
        'install it, or use backend="aot_eager"',
    ),
    "internal-error": Reason(
        "A bug in minicompile. The answer is still right: Python ran the frame.",
        "please report it; fullgraph=True raises it",
    ),
}


def refusal(
    id: str,
    what: str,
    where: SourceLine | None = None,
    hint: str = "",
    kind: type[E] = Unsupported,  # type: ignore[assignment]
) -> E:
    """The exception for one of the reasons; a `hint` takes the place of its usual fix."""
    return kind(what, where, hint or REASONS[id].fix, id)
