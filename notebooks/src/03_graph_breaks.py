# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 03 · What if Python does something a graph can't?
#
# After this lesson you can
#
# - find every place where a function falls apart into several graphs, say why, and mend it;
# - say what must be handed over such a gap, and write the function that goes on behind it;
# - predict what a compiled function changes outside of itself, and when.
#
# The running example is cut by its second line:

# %% name="setup" tags=["setup"]
try:
    import minicompile as mc
except ModuleNotFoundError:  # opened elsewhere, as on Colab
    get_ipython().run_line_magic(
        "pip", 'install -q "minicompile[notebook] @ git+https://github.com/your_name/minicompile"'
    )
    import minicompile as mc

import torch

from minicompile.lessons.exercise import checks

check = checks("03")

# %% name="example"
import torch

import minicompile as mc


def f(x):
    y = x.sin()
    print("between")
    return y.cos() + x


torch.manual_seed(0)
x = torch.randn(4, 8)
told = mc.explain(f)(x)
told

# %% [markdown]
# There is the answer: **the function is cut in two.** The scissors mark a *graph break*: the graph
# ends before the call of `print`, Python makes that call, and a second graph does the rest. Nothing
# went wrong. The program prints at every call, in order, as it would without a compiler.
#
# The second capture is called `f, resumed`. It is a function of its own, a *resume function*: its
# arguments are what the first part left. Here are the three acts, as the Python that minicompile
# generated for them. Move the slider.

# %% name="three-acts"
import inspect

from minicompile.api import dispatcher_of
from minicompile.lessons.pictures import corridor, slides


def generated(dispatcher):
    """The generated Python of a dispatcher's first version."""
    return inspect.getsource(dispatcher.entries[0].begin)


compiled = mc.compile(f, backend="eager")
compiled(x)
first = dispatcher_of(compiled)
(second,) = (dispatcher_of(function) for function in first.resumed.values())

slides(
    "f in three acts",
    ("the first graph", "its last line says what is left to do", generated(first)),
    ("one instruction", "Python itself runs it", 'CALL  print("between")'),
    (
        "the second graph",
        "a function with a cache, guards and a graph of its own",
        generated(second),
    ),
)

# %% [markdown]
# Read the end of the first act. `graph(inputs)` runs the sine. `result` collects four things: `x`,
# the graph's output `y`, the function `print` and its argument. Then `go_on(rest, result)` says:
# call `rest` with these. `rest` runs the one instruction and calls the resume function.
#
# Act three is an ordinary compiled function. It has guards, it can be compiled again for other
# inputs, and it can be cut again.

# %% [markdown]
# ## What a break costs
#
# **Predict, then run.** Without the `print`, sine, cosine and sum are one kernel. With it, how many
# kernels, and how many times the bytes through memory?

# %% name="cost"
from minicompile.extension import observer


def quiet(x):
    y = x.sin()
    return y.cos() + x


for function in (quiet, f):
    plans = []
    with mc.scoped():
        observer("plans")(lambda event: event.kind == "plans" and plans.extend(event.subject))
        mc.compile(function)(x)
    traffic = sum(plan.cost.bytes_read + plan.cost.bytes_written for plan in plans)
    print(f"{function.__name__}: {len(plans)} kernel(s), {traffic} bytes through memory")

# %% [markdown]
# `y` used to stay inside the processor. Now it crosses the gap: one kernel writes it, the next one reads it
# back, and `x` is read twice. No kernel is ever fused across a break. That is why people hunt for
# them, and why each has its reason and your source line on record:

# %% name="reasons"
for found in told.breaks:
    print(found)
    print(found.explanation)

# %% [markdown]
# ## How to enter a function in the middle
#
# A Python frame at one moment is little: which instruction is next, the values on its stack, and
# the local variables that have a value. Whoever restores these three can go on. The rest
# of a frame, as a function of this state, is called its *continuation*.
#
# Take a function without tensors. The slider shows the state before each instruction: what is on
# the stack, which names are bound.

# %% name="states"
from minicompile.dynamo.bytecode import SLOT_OPS, slot_names
from minicompile.dynamo.continuation import State, bind, continuation, successors, units


def two_lines(a, b):
    c = a * b
    return c - a


def states(code):
    """Every state of a frame that runs straight on."""
    following = [State(0, (), code.co_varnames[: code.co_argcount])]
    while following:
        yield following[0]
        following = successors(code, following[0])


def picture(code, state):
    rows, names = [], slot_names(code)
    for number, (op, *_) in enumerate(units(code)):
        if op.opname != "NOP":
            mark = "-->" if number == state.point else "   "
            rows.append(f"{mark} {op.opname} {names[op.arg] if op.opname in SLOT_OPS else ''}")
    held = sum(slot == "value" for slot in state.stack)
    rows += ["", f"bound: {', '.join(state.bound)}", f"values on the stack: {held}"]
    return "\n".join(rows)


code = two_lines.__code__
moments = [state for state in states(code) if units(code)[state.point][0].opname != "NOP"]
slides(
    "two_lines, before each instruction",
    *((f"instruction {state.point}", "", picture(code, state)) for state in moments),
)

# %% [markdown]
# `continuation(code, state)` makes the function that enters there. Its parameters are the bound
# names, then the stack. Inside is the original bytecode, behind a few new instructions that put
# everything in its place and jump.
#
# **Predict, then run.** We enter `two_lines` after its first line, and hand over `c = 100`. No
# `a * b` gives that.

# %% name="in-the-middle"
middle = next(s for s in moments if "c" in s.bound and not s.stack)
rest = bind(continuation(code, middle), two_lines, ())
print("parameters:", rest.__code__.co_varnames[: rest.__code__.co_argcount])
print("a=3, b=4, c=100 gives", rest(3, 4, 100))

# %% [markdown]
# Loops, `with` and `try` need nothing special: a loop's iterator lies on the stack, and so does
# what a `with` must call at its end. Here the frame is cut inside a `with`. The second part
# begins in the mode that it was cut in, and that too is guarded:

# %% name="inside-with"


def inside(x):
    with torch.no_grad():
        y = x * 2
        print("in the middle of a with")
        z = y.sin()
    return z + x


for capture in mc.explain(inside)(torch.randn(4, requires_grad=True)).captures:
    print(f"{capture.name}: gradients are recorded when it begins: {capture.grad_enabled}")

# %% [markdown]
# ## Breaks inside calls
#
# Calls are *inlined*: the compiler follows them, and their operations join the caller's graph. So
# what if the break is three calls deep? Then three frames stand open, and all of them must be cut.

# %% name="nested"


def inner(x):
    y = x.sin()
    print("deep inside")
    return y.cos()


def between(x):
    return inner(x * 2) + 1


def outer(x):
    return x.exp() * between(x)


compiled = mc.compile(outer, backend="eager")
torch.testing.assert_close(compiled(x), outer(x))
deep = dispatcher_of(compiled)
print(generated(deep).partition("out = graph(inputs)\n")[2])

# %% [markdown]
# Read it from the first line on. The rest of `inner` is wrapped up as `v0`. It is a `StandIn`: a
# callable that ignores its arguments and runs what it wraps. It takes the place of `inner` on the
# stack of `between`, so that the rest of `between`, `v1`, will call it. That one in turn stands in
# for `between` on the stack of `outer`. Three continuations, one within the other. These graphs run,
# in this order:

# %% name="nested-picture"
slides(
    "one graph after the other",
    *(("graph", capture.name, str(capture.graph)) for capture in deep.explanation().captures),
)

# %% [markdown]
# ## Break it: forget a name
#
# Which names must be handed over? Those that some later instruction may still read: the *live* ones.
# The function `live_names` of `minicompile/dynamo/breaks.py` works that out. Too many would only
# cost memory. **Predict:** what does a call do if one too few is handed over?

# %% name="forget-a-name"
from unittest import mock

from minicompile.dynamo import breaks

right = breaks.live_names
with mock.patch.object(breaks, "live_names", lambda code, point: right(code, point) - {"x"}):
    try:
        mc.compile(f, backend="eager")(x)
    except UnboundLocalError as error:
        print(type(error).__name__, "in f:", error)

# %% [markdown]
# `f` never does that in Python: `x` is its argument! The frame that goes on is a new one, and knows
# only what it was given.

# %% [markdown]
# ## Side effects
#
# A function may also change things outside of itself: append to a list, set an attribute, count.
# Such a *side effect* is no reason for a break. While the frame is captured, nothing outside may
# change: the capture may fail, or be thrown away. So each write is noted, and *replayed* at every
# call after the graph has run.

# %% name="side-effects"


class Statistics:
    calls = 0
    largest = []


statistics = Statistics()


def counted(x):
    statistics.calls += 1
    statistics.largest.append(x.max())
    return x * statistics.calls


mc.trace(counted, x)
print("after a trace:", statistics.calls, "calls,", len(statistics.largest), "results")
compiled = mc.compile(counted, backend="eager")
compiled(x)
print("after a call: ", statistics.calls, "call, ", len(statistics.largest), "result")
print(*dispatcher_of(compiled).entries[0].capture.side_effects, sep="\n")

# %% [markdown]
# `mc.trace` captures and compiles, but doesn't run the call: nothing changed. In the generated
# Python the writes are the lines behind the graph. If the graph raises, they are not reached, and
# eager runs the call from its start: the exception and all writes before it are eager's.

# %% name="effects-generated"
print(generated(dispatcher_of(compiled)))

# %% [markdown]
# **Break it.** Take the replay away. The function adds up how often it was called; three calls
# should give the factors one, two, three. What will they be?

# %% name="lost-effects"
from minicompile.dynamo.rebuild import Rebuild


def factors():
    mc.reset()
    statistics.calls = 0
    compiled = mc.compile(counted, backend="eager")
    return [int(compiled(torch.ones(1))) for _ in range(3)]


with mock.patch.object(Rebuild, "side_effects", lambda self: []):
    print("without the replay:", factors())
print("with it:           ", factors())

# %% [markdown]
# Look at the middle of the cell above: no exception, no warning, and wrong numbers. A lost write is
# worse than a break.

# %% [markdown]
# ## A model with three breaks
#
# This function is a classic: three lines of it can't be captured. Find them before you run the cell.

# %% name="three-breaks"


def broken_model(x, training=True):
    y = x.sin()
    print(f"Input norm: {x.norm():.2f}")
    if x.sum() > 0:
        y = y * 2
    results = sorted([y, y.cos()], key=lambda t: t.sum())
    return results[0]


found = mc.explain(broken_model)(x)
found

# %% name="three-breaks-lines"
for each in found.breaks:
    print(f"{each.id:18} {each.user_line.text}")

# %% [markdown]
# One line is there twice: to make the text, the value of the norm is needed, and then printing is
# an effect on the world. The other two ask for values as well: a branch for a truth value, a sort
# for an order. **A captured tensor has a shape and a dtype, and no numbers yet.** That one sentence
# explains most breaks that you will ever meet. Exercise 2 mends all three.
#
# If there must be no break, say so with `fullgraph=True`. Then a break is an error:

# %% name="fullgraph"
from minicompile.errors import Unsupported

try:
    mc.compile(broken_model, fullgraph=True)(x)
except Unsupported as error:
    print(error)

# %% [markdown]
# ## A walk without a break
#
# For comparison, a small model that stays in one piece, through all the stages. A function in the
# place of a backend sees each captured graph; a trace has everything that comes after.

# %% name="walk"


class TinyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 32)

    def forward(self, x):
        return torch.relu(self.linear(x)) * 0.5


def showing(graph_module, example_inputs):
    print(graph_module.code.strip())
    return graph_module


tiny, inputs = TinyModel(), torch.randn(8, 64)
mc.compile(tiny, backend=showing)(inputs)
walk = mc.trace(tiny, inputs)
print(walk)

# %% name="walk-kernel"
walk.kernels[0]

# %% [markdown]
# ## The lesson model
#
# Our GPT has a switch `debug_print`: each block prints the mean of its input. The break is inside
# an inlined call, in a loop over blocks. So two frames are cut, and the loop's iterator is handed
# over with them. Every capture, and what ended it:

# %% name="gpt"
from minicompile.lessons.model import GPT, GPTConfig

small = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16}
model, tokens = GPT(GPTConfig(**small, debug_print=True)), torch.zeros(1, 8, dtype=torch.long)
talking = mc.explain(model)(tokens)
for capture in talking.captures:
    ended = capture.stopped_by.id if capture.stopped_by else "its frame returns"
    print(f"{capture.graph.op_count:3} operations, until: {ended}")
print("without the print:", mc.explain(GPT(GPTConfig(**small)))(tokens).graph_count, "graph")

# %% [markdown]
# > **In torch.compile.** The same idea: `torch/_dynamo/resume_execution.py` writes a resume
# > function for each break, from the original bytecode behind a prologue. Below are its breaks of
# > our three-break model, and the parameters of the function that it made for `f`. A break inside a
# > call it treats in another way: by default it breaks before the outermost call, and again in each
# > frame below. Its option `torch._dynamo.config.nested_graph_breaks` cuts all frames at once, as we
# > do, and joins what is left of them in one graph, where ours are one for each frame.

# %% name="torch-compile"
import torch._dynamo

theirs = torch._dynamo.explain(broken_model)(x)
print(theirs.graph_count, "graphs;", theirs.graph_break_count, "breaks:")
for reason in theirs.break_reasons:
    print(" ", reason.user_stack[-1].line)

torch.compile(f, backend="eager")(x)
resumed = next(value for name, value in globals().items() if name.startswith("__resume_at"))
print([name for name in resumed.__code__.co_varnames if name in ("___stack0", "x", "y")])

ours = mc.explain(outer)(x).graph_count
print("outer:", torch._dynamo.explain(outer)(x).graph_count, "graphs, ours:", ours)

# %% [markdown]
# ## Recap
#
# 1. What no graph can hold, Python runs: the frame is cut before the instruction and goes on behind
#    it, compiled again.
# 2. A continuation is the original bytecode, entered in the middle with the bound names and the stack.
# 3. A break inside inlined calls cuts every open frame; each one's rest stands in for the callee of
#    the next.
# 4. A break costs fusion: what is alive must go through memory.
# 5. Writes to the outside are noted during capture and replayed after the graph, at each call.

# %% [markdown]
# ## Exercises
#
# **Exercise 1 · What crosses the gap** (easy, 2 points). Write `bytes_over_the_gap(explanation)`: how many
# bytes of tensors do the resume functions of an explanation take in, all together? Each capture
# has a `name` and `inputs`; a `GraphInput` has a `fake`, a tensor with a shape and a dtype.

# %% [markdown]
# **You will need**
#
# - `explanation.captures`: a list. Names of resume functions end with `resumed`:
#   `[capture.name for capture in told.captures]` gives `['f', 'f, resumed']`.
# - `capture.inputs`: a list; `told.captures[0].inputs[0].fake` is a tensor with a shape and a dtype.
# - `tensor.numel()`, `tensor.element_size()`: `(torch.ones(2, 3).numel(), torch.ones(2, 3).element_size())`
#   gives `(6, 4)`, elements and bytes of each.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Which captures are resume functions? Their inputs are what crossed the gap.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# A tensor of `n` elements needs `n` times `element_size()` bytes; add them up.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def bytes_over_the_gap(explanation):
    """Bytes of the tensors that the resume functions of an explanation take as inputs."""
    ### BEGIN SOLUTION
    resumed = [c for c in explanation.captures if c.name.endswith("resumed")]
    tensors = [given.fake for capture in resumed for given in capture.inputs]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-every" tags=["wrong"] kind="misconception" says="expected 256, got 384"
def bytes_over_the_gap(explanation):
    tensors = [given.fake for capture in explanation.captures for given in capture.inputs]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# %% name="ex1-wrong-all-but-the-first" tags=["wrong"] kind="visible-only" says="expected 256, got 384"
def bytes_over_the_gap(explanation):
    tensors = [given.fake for capture in explanation.captures[1:] for given in capture.inputs]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# %% name="ex1-wrong-floats" tags=["wrong"] kind="visible-only" says="expected 512, got 256"
def bytes_over_the_gap(explanation):
    resumed = [c for c in explanation.captures if c.name.endswith("resumed")]
    return sum(4 * given.fake.numel() for capture in resumed for given in capture.inputs)


# %% name="ex1-wrong-text" tags=["wrong"] kind="built-in" says="a use of str"
def bytes_over_the_gap(explanation):
    import re

    shapes = re.findall(r"f32\[(\d+), (\d+)\]", str(explanation))
    return sum(4 * int(rows) * int(columns) for rows, columns in shapes)


# %% [markdown]
# **Exercise 2 · Mend three breaks** (solid, 4 points). Write `mended(x, training=True)`: it returns what
# `broken_model` returns, for every `x`, in a single graph. Nothing needs to be printed. The check
# compiles it with `fullgraph=True`.

# %% [markdown]
# **You will need**
#
# - `torch.where(condition, a, b)`: chooses on captured tensors, also if the condition is one number.
#   `torch.where(torch.tensor(2) > 1, torch.ones(2), torch.zeros(2))` gives `tensor([1., 1.])`.
# - `y.sum() < other.sum()`: a tensor that holds one truth value.
# - `mc.explain(mended)(x)`: are there breaks left?

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Leave the print out. Each other break is a choice that Python makes by a number in a tensor.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Of two things, sorted, the first is the smaller one: that is a `torch.where`, too.
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def mended(x, training=True):
    """What `broken_model` returns, without a graph break."""
    ### BEGIN SOLUTION
    y = x.sin()
    y = torch.where(x.sum() > 0, y * 2, y)
    other = y.cos()
    return torch.where(other.sum() < y.sum(), other, y)
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-each" tags=["wrong"] kind="misconception" says="mended of a tensor with sum"
def mended(x, training=True):
    y = torch.where(x > 0, x.sin() * 2, x.sin())
    other = y.cos()
    return torch.where(other.sum() < y.sum(), other, y)


# %% name="ex2-wrong-branch" tags=["wrong"] kind="misconception" says="expected one graph, got a break"
def mended(x, training=True):
    y = x.sin()
    if x.sum() > 0:
        y = y * 2
    other = y.cos()
    return torch.where(other.sum() < y.sum(), other, y)


# %% name="ex2-wrong-always" tags=["wrong"] kind="visible-only" says="mended of a tensor with sum -"
def mended(x, training=True):
    y = x.sin() * 2
    other = y.cos()
    return torch.where(other.sum() < y.sum(), other, y)


# %% name="ex2-wrong-call" tags=["wrong"] kind="built-in" says="a use of disable"
def mended(x, training=True):
    def as_it_was(x):
        y = x.sin()
        y = y * 2 if x.sum() > 0 else y
        return min([y, y.cos()], key=lambda t: t.sum())

    return mc.disable(as_it_was)(x)


# %% [markdown]
# **Exercise 3 · A break inside a `with`** (solid, 4 points). Write `cut_inside(reason)`. It returns a
# function of a tensor `x` and a list `trail`. That function appends `"before"`, `"inside"` and
# `"after"` to the trail: before a `with torch.no_grad()`, behind a break inside of it, and after
# it; it returns a tensor. The break must be of the given kind: `"print"`, `"item"` or
# `"branch-on-tensor"`.

# %% [markdown]
# **You will need**
#
# - A call of `print` is a break of kind `"print"`, `x.sum().item()` one of kind `"item"`, `if x.sum() > 0:`
#   one of kind `"branch-on-tensor"`.
# - `reason`: a plain string, known while the function is captured: `if reason == "item":` is no break.
# - `trail.append("inside")`: no break either; the compiler makes such writes at the end of each graph.
# - `mc.explain(cut_inside("print"))(x, []).breaks`: the breaks, with their kinds.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Write a function inside of `cut_inside`, with three ways to break in it, and return it.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# The order is: "before", the `with`, the break, "inside", and behind the `with`, "after".
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# A graph must begin inside: do something with a tensor between the break and the end of the `with`.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def cut_inside(reason):
    """A function of (x, trail) that is cut inside of a `with torch.no_grad()`."""

    ### BEGIN SOLUTION
    def cut(x, trail):
        trail.append("before")
        with torch.no_grad():
            y = x * 2
            if reason == "print":
                print("inside")
            elif reason == "item":
                y = y + x.sum().item()
            elif x.sum() > 0:
                y = y + 1
            trail.append("inside")
            y = y.sin()
        trail.append("after")
        return y + x

    return cut
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-late" tags=["wrong"] kind="misconception" says="at the break: expected ['before'], got"
def cut_inside(reason):
    def cut(x, trail):
        trail.append("before")
        with torch.no_grad():
            y = x.sin()
            trail.append("inside")
        print("outside")
        trail.append("after")
        return y + x

    return cut


# %% name="ex3-wrong-order" tags=["wrong"] kind="misconception" says="expected ['before', 'inside', "
def cut_inside(reason):
    def cut(x, trail):
        with torch.no_grad():
            y = x * 2
            print("inside")
            trail.extend(["inside", "before", "after"])
            y = y.sin()
        return y + x

    return cut


# %% name="ex3-wrong-early" tags=["wrong"] kind="misconception" says="got ['before', 'inside']"
def cut_inside(reason):
    def cut(x, trail):
        trail.append("before")
        with torch.no_grad():
            trail.append("inside")
            print("inside")
            y = x.sin()
        trail.append("after")
        return y + x

    return cut


# %% name="ex3-wrong-print" tags=["wrong"] kind="visible-only" says="kind 'item', got 'print'"
def cut_inside(reason):
    def cut(x, trail):
        trail.append("before")
        with torch.no_grad():
            y = x * 2
            print("inside")
            trail.append("inside")
            y = y.sin()
        trail.append("after")
        return y + x

    return cut


# %% name="ex3-wrong-request" tags=["wrong"] kind="built-in" says="a use of graph_break"
def cut_inside(reason):
    def cut(x, trail):
        trail.append("before")
        with torch.no_grad():
            torch._dynamo.graph_break()
            trail.append("inside")
            y = x.sin()
        trail.append("after")
        return y + x

    return cut


# %% [markdown]
# **Exercise 4 · What is still alive?** (solid, 5 points). Write `live_names(code, point)`: the set of
# names that instructions read that can run from unit number `point` on. The compiler will use yours.
#
# `flow(code)` below gives the units of a code object, in order. Each has the names that it `reads`
# and the numbers of the units that may run `next`, also over jumps and to exception handlers. Loops
# lead back.

# %% name="ex4-flow" tags=["setup"]
from dataclasses import dataclass

from minicompile.dynamo.bytecode import SLOT_OPS, slot_names
from minicompile.dynamo.continuation import units


@dataclass
class Unit:
    """One unit of a code object: an instruction with what belongs to it."""

    reads: set
    """Names of locals whose value or cell it needs."""
    next: list
    """Numbers of the units that may run after it."""


def flow(code):
    """The units of a code object, in order."""
    every, names, found = units(code), slot_names(code), []
    number_of = {id(unit[0]): number for number, unit in enumerate(every)}
    leaves = ("RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS", "JUMP_FORWARD")
    for number, unit in enumerate(every):
        reads, after = set(), []
        for op in unit:
            if op.opname in SLOT_OPS and op.opname != "STORE_FAST":
                reads.add(names[op.arg])
            targets = (op.target, op.handler and op.handler.target)
            after += [number_of[id(target)] for target in targets if target is not None]
        last = unit[-1].opname
        if number + 1 < len(every) and last not in leaves and "JUMP_BACKWARD" not in last:
            after.append(number + 1)
        found.append(Unit(reads, after))
    return found


# %% [markdown]
# **You will need**
#
# - `flow(code)`: a list of units. `[unit.next for unit in flow(two_lines.__code__)]` gives
#   `[[1], [2], [3], [4], [5], [6], [7], [8], []]`.
# - `unit.reads`: a set of names. `flow(two_lines.__code__)[-3].reads` gives `{'a'}`.
# - `point`: the number of the unit that runs first. A unit further down need not run, and one further up
#   may.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Follow `next` from `point`: don't go by the place in the list.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# Keep a list of units to visit, at first `[point]`, and a set of those that were seen: loops lead back.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# Take one, add what it reads to the answer, put what may run next on the list. Stop when the list is empty.
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def live_names(code, point):
    """Names that instructions read that can run from unit `point` on."""
    ### BEGIN SOLUTION
    every, found, seen, waiting = flow(code), set(), set(), [point]
    while waiting:
        number = waiting.pop()
        if number not in seen:
            seen.add(number)
            found |= every[number].reads
            waiting += every[number].next
    return found
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-next" tags=["wrong"] kind="misconception" says="no more names than are read later"
def live_names(code, point):
    return set(slot_names(code))


# %% name="ex4-wrong-below" tags=["wrong"] kind="misconception" says="in_a_loop: expected what eager"
def live_names(code, point):
    return set().union(*(unit.reads for unit in flow(code)[point:]))


# %% name="ex4-wrong-no-handlers" tags=["wrong"] kind="visible-only" says="UnboundLocalError"
def live_names(code, point):
    every, found, seen, waiting = flow(code), set(), set(), [point]
    while waiting:
        number = waiting.pop()
        if number not in seen:
            seen.add(number)
            found |= every[number].reads
            waiting += [after for after in every[number].next if after <= number + 1]
    return found


# %% name="ex4-wrong-one" tags=["wrong"] kind="misconception" says="got UnboundLocalError"
def live_names(code, point):
    return flow(code)[point].reads


# %% name="ex4-wrong-built-in" tags=["wrong"] kind="built-in" says="a use of breaks"
def live_names(code, point):
    from minicompile.dynamo import breaks

    return breaks.live_names(code, point)


# %% [markdown]
# **Exercise 5 · Cut every open frame** (hard, 6 points). Write `go_on_after(frame, resume, fix_cells)`, and
# a break inside inlined calls works by your rule. `frame` is the innermost running frame; its
# caller is `frame.parent`, whose caller is `frame.parent.parent`, up to `None`. Given to you:
#
# - `cut(frame, index, stack, resume)` gives a `GoOn` for one frame: enter it at instruction `index`
#   with that stack. It has a `function` and `values`.
# - `at_its_call(frame, stand_in)` gives the stack of a frame that waits for a call, with `stand_in`
#   in the place of what it calls.
#
# Innermost: `cut(frame, frame.pc, frame.stack, resume)`. A caller must make its call again, which is
# the instruction before: `frame.pc - 1`. Call `fix_cells(frame.function)` for each frame below the
# outermost. The answer is the `GoOn` of the outermost frame.

# %% name="ex5-given" tags=["setup"]
from minicompile.dynamo.assembler import VERSION
from minicompile.dynamo.breaks import StandIn, cut
from minicompile.dynamo.interpreter import NULL


def at_its_call(frame, stand_in):
    """The stack of a frame that waits for a call, with `stand_in` as what it calls."""
    pair = [NULL, stand_in] if VERSION < (3, 13) else [stand_in, NULL]
    call = frame.current
    given = [None] * call.arg if call.opname == "CALL" else [(), {}][: 1 + (call.arg & 1)]
    return [*frame.stack, *pair, *given]


# %% [markdown]
# **You will need**
#
# - `frame.parent`, `frame.pc`, `frame.stack`, `frame.function`: of the innermost frame, and of each caller.
# - `cut(frame, frame.pc, frame.stack, resume)`: the `GoOn` of the innermost frame, with its `function` and
#   `values`.
# - `StandIn(go_on.function, go_on.values)`: what a caller calls, in the place of the frame below it.
# - `at_its_call(frame, stand_in)`: the stack of a caller, ready to call it at instruction `frame.pc - 1`.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Begin with the innermost frame, and go from each frame to its caller in a loop.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# In each round there is a `GoOn` for the frame below: make a `StandIn` of it, and cut the caller so that it
# calls that.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# Before each step to a parent call `fix_cells(frame.function)`. The last `GoOn` is the answer.
#
# </details>


# %% name="ex5-answer" tags=["answer"]
def go_on_after(frame, resume, fix_cells):
    """How to go on where `frame` and all its callers are cut."""
    ### BEGIN SOLUTION
    go_on = cut(frame, frame.pc, frame.stack, resume)
    while frame.parent is not None:
        fix_cells(frame.function)
        frame = frame.parent
        stack = at_its_call(frame, StandIn(go_on.function, go_on.values))
        go_on = cut(frame, frame.pc - 1, stack, resume)
    return go_on
    ### END SOLUTION


# %% name="ex5-check" tags=["nbval-check-output"]
check("ex5")


# %% name="ex5-wrong-innermost" tags=["wrong"] kind="misconception" says="got float32[2, 3] of [2"
def go_on_after(frame, resume, fix_cells):
    return cut(frame, frame.pc, frame.stack, resume)


# %% name="ex5-wrong-one-caller" tags=["wrong"] kind="visible-only" says="three calls deep"
def go_on_after(frame, resume, fix_cells):
    go_on = cut(frame, frame.pc, frame.stack, resume)
    if frame.parent is not None:
        fix_cells(frame.function)
        frame = frame.parent
        stack = at_its_call(frame, StandIn(go_on.function, go_on.values))
        go_on = cut(frame, frame.pc - 1, stack, resume)
    return go_on


# %% name="ex5-wrong-built-in" tags=["wrong"] kind="built-in" says="a use of resume_after"
def go_on_after(frame, resume, fix_cells):
    from minicompile.dynamo.breaks import resume_after

    return resume_after(frame, resume, fix_cells)


# %% [markdown]
# ## Go deeper
#
# - `minicompile/dynamo/breaks.py`: where a frame is cut, and who runs what is left;
# - `minicompile/dynamo/continuation.py`: how the two functions of a cut are written;
# - `minicompile/dynamo/rebuild.py`: results and side effects as generated Python;
# - `minicompile/dynamo/reasons.py`: every reason for a break, and the usual fix;
# - `torch/_dynamo/resume_execution.py`, `torch/_dynamo/side_effects.py`: the same in torch;
# - `torch/_dynamo/symbolic_convert.py`: look for `break_graph_if_unsupported`.
#
# **Where you are.** Still in the first room. The next lesson asks what one graph can do for many sizes.

# %% name="corridor"
corridor("dynamo")
