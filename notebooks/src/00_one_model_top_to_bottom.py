# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 00 · What happens between `mc.compile(model)` and the answer?
#
# A compiler takes a Python function and gives back one that computes the same numbers in fewer,
# larger steps. This lesson opens the box once, from top to bottom. Each later lesson stays in one
# room of it.
#
# Our example has three operations: a matrix product, a `relu`, a `softmax`.

# %% name="setup" tags=["setup"]
import torch

import minicompile as mc
from minicompile.lessons.exercise import checks

check = checks("00")

# %% name="example"
import torch

import minicompile as mc


def f(x, w):
    y = torch.relu(x @ w)
    return torch.softmax(y, dim=-1)


torch.manual_seed(0)
x, w = torch.randn(8, 16), torch.randn(16, 32)
trace = mc.trace(f, x, w)
trace

# %% [markdown]
# That is the whole corridor. Every pane is one room's result; point at a line of Python, a graph
# node, a loop or a line of the kernel, and what came from the same source lights up everywhere.
# Read it from left to right: Python becomes a graph, the graph becomes loops, loops that share data
# become one kernel, and the kernel is text that a C++ compiler understands.
#
# The answer is the same as without the compiler:

# %% name="same-answer"
compiled = mc.compile(f)
largest = (compiled(x, w) - f(x, w)).abs().max().item()
print("equal to eager within 1e-6:", largest < 1e-6)

# %% [markdown]
# **Predict, then run.** A softmax is five steps: the largest value of a row, subtract it, `exp`,
# sum the row, divide. With the `relu` that makes six loops over the same table of 8 x 32 numbers.
# How many kernels did minicompile write for them? Decide before you run the next cell. (The matrix
# product is not among them: a library does that.)

# %% name="predict-kernels"
print("kernels:", len(trace.kernels))
print("calls of PyTorch's own kernels:", [str(extern.op) for extern in trace.loops.externs])

# %% [markdown]
# **Break it.** Two switches take the compiler's best idea away. `inline="never"` writes every
# intermediate to memory; `fusion=False` then gives each of them a kernel of its own. The answer
# stays right. Only the number of kernels and the bytes that travel change:

# %% name="unfused"
unfused = mc.trace(mc.compile(f, options={"inline": "never", "fusion": False}), x, w)


def bytes_moved(stages):
    return sum(plan.cost.bytes_read + plan.cost.bytes_written for plan in stages.plans)


print(f"one by one: {len(unfused.kernels)} kernel(s), {bytes_moved(unfused)} bytes through memory")
print(f"fused:      {len(trace.kernels)} kernel(s), {bytes_moved(trace)} bytes through memory")

# %% [markdown]
# ## One block of the model
#
# Every lesson works on the same small GPT, `minicompile/lessons/model.py`: text goes in, a guess at
# the next character comes out. Its heart is a *block*: attention, then a small network, each on
# normed input and added back. Here is one block, small enough to read, with training switched on:
# so there will be a backward graph too.

# %% name="block"
from minicompile.lessons.model import GPT, GPTConfig

small = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)
block = GPT(small).blocks[0]
h = torch.randn(2, 16, 32, requires_grad=True)
block_trace = mc.trace(block, h)
print(block_trace)

# %% [markdown]
# ### Room 1, capture: Python becomes a graph
#
# minicompile runs the *bytecode* of `forward` on stand-ins that have a shape but no numbers, and
# writes down every operation on them. Calls are followed inside, so `self.attention(...)` leaves no
# trace but its operations. What the graph relied on (a shape, a type, an attribute) becomes a
# *guard*, checked at each later call.

# %% name="capture"
print("operations:", block_trace.capture.graph.op_count)
print("calls followed inside:", len(block_trace.capture.inlined))
print("guards:", len(block_trace.capture.guards), "of which three:")
for guard in [guard for guard in block_trace.capture.guards if guard.kind == "equals"][:3]:
    print(f"  {guard.expression}\n    because of {guard.user_line.text}")

# %% name="capture-picture"
block_trace.capture

# %% [markdown]
# ### Room 2, autograd ahead of time: two graphs without side effects
#
# The graph is rewritten in fewer, simpler operators, without views or in-place writes. Then it is
# differentiated while compiling: a forward graph that also hands over what backward needs, and a
# backward graph. Which values are handed over and which are cheaper to compute again is one
# decision, found as the smallest cut through the graph.

# %% name="levels"
for level, graph in block_trace.aot.levels.items():
    print(f"{level:>5}: {graph.op_count} operations")

# %% [markdown]
# One operator can be many: `layer_norm` is a mean, a variance, a division and more. That is what the
# levels are: *full* has all of ATen's operators, *core* fewer, *prims* only the simplest. Now the
# values handed from forward to backward, each with the reason it was kept:

# %% name="partition"
block_trace.aot.partition

# %% [markdown]
# ### Room 3, lowering: every operator becomes a loop
#
# An operator disappears here. What remains is a formula: which element of the result comes from
# which elements of the inputs. `transpose` costs nothing any more: it is another formula for the
# index. Matrix products stay calls of a library (*extern*), and each says why.

# %% name="loops"
block_trace.loops

# %% [markdown]
# ### Room 4, scheduling: loops that share data become one
#
# Two loops may become one kernel if that changes no result and saves memory traffic. Every pair
# that was looked at is on record with the verdict and the reason. The refusals are the more
# instructive half:

# %% name="decisions"
decisions = block_trace.schedule.decisions
fused = [d for d in decisions if d.fused]
print(
    f"{len(block_trace.schedule.before)} loops and calls before, {len(block_trace.schedule.nodes)} after"
)
print(f"{len(decisions)} pairs looked at, {len(fused)} fused")
for reason in sorted({d.reason for d in decisions if not d.fused}):
    print("  refused:", reason)

# %% name="schedule"
block_trace.schedule

# %% [markdown]
# How does it come to that? For our small `f`, one question a slide: move the slider. The two that
# are asked about are framed; the answer has its reason and the bytes saved so far.

# %% name="fusion-steps"
trace.fusion_steps()

# %% [markdown]
# Do you know better? Overrule it: `mc.what_if` compiles the function again, for real, checks the
# answer and times both. (Times differ from machine to machine, so nothing is kept here: run the
# cell. In JupyterLab it is a panel with switches.)

# %% name="what-if" tags=["varies"]
mc.what_if(f, x, w)

# %% [markdown]
# ### Room 5, code generation: a plan, then text
#
# A plan settles what a kernel will look like before a line of it is written: the order of the
# loops, which one is vectorised, how wide an index is, in which type it computes. Then printing is
# easy. Each line knows its origins.

# %% name="plan"
print(block_trace.plans[0])

# %% name="kernel"
block_trace.kernels[0]

# %% [markdown]
# ### Room 6, the wrapper: what your call runs
#
# The last piece is a Python function that allocates, calls kernels and the library in order, and
# frees each buffer when nothing needs it any more.

# %% name="wrapper"
block_trace.wrapper

# %% [markdown]
# ## Follow one line
#
# Where did the `gelu` of the model go? Ask for everything that came from its source line, in every
# room, forward and backward:

# %% name="follow"
import inspect

from minicompile.lessons import model

text, first = inspect.getsourcelines(model.MLP.forward)
line = first + next(number for number, code in enumerate(text) if "gelu" in code)
found = block_trace.from_line(line, "lessons/model.py")
print(text[line - first].strip())
print(len(found), "pieces, in", ", ".join(dict.fromkeys(piece.stage for piece in found)))

# %% [markdown]
# > **In torch.compile.** The rooms have the same names and the same order: TorchDynamo captures,
# > AOTAutograd differentiates, TorchInductor lowers, schedules and prints. Here it is, live, on the
# > function we began with. Does it fuse the same loops? To read on: `torch/_inductor/graph.py`,
# > `scheduler.py` and `codegen/cpp.py`. We left out much of the breadth, nothing of the way.
# > `mc.compare_with_torch(f, x, w)` sets all of its stages beside ours.

# %% name="torch-compile"
import re

from torch._inductor.utils import run_and_get_code

_, (their_code,) = run_and_get_code(torch.compile(f), x, w)
print("torch.compile's kernels:", sorted(set(re.findall(r"cpp_fused\w+", their_code))))
print("minicompile's kernels:  ", sorted(kernel.name for kernel in trace.kernels))

# %% [markdown]
# ## The whole model learns
#
# Now all of it: the model with its loss, forward and backward compiled, trained on real text (the
# source of Python's own standard library). The loss is that of guessing the next character;
# guessing blindly costs `log(96) = 4.56`. The same run without a compiler is the judge.

# %% name="train"
from minicompile.lessons.train import train

torch.set_num_threads(2)


def fresh_model():
    torch.manual_seed(0)
    return GPT(GPTConfig())


learner = fresh_model()
ours = train(learner, steps=60, compile_fn=mc.compile)
eager = train(fresh_model(), steps=60)
for step in (0, 20, 40, 59):
    print(
        f"step {step:2}: loss {ours.losses[step]:.2f}, without a compiler {eager.losses[step]:.2f}"
    )

# %% name="check-losses" tags=["nbval-check-output"]
differences = [abs(a - b) for a, b in zip(ours.losses, eager.losses)]
print("first five losses equal eager's within 1e-5:", max(differences[:5]) < 1e-5)
print("all losses equal eager's within 1e-2:", max(differences) < 1e-2)
print("the loss fell by more than a quarter:", ours.fall > 0.25)

# %% [markdown]
# And the time? It depends on your machine, so this notebook keeps no numbers: run the cell. `make
# demo` runs 300 steps of this and adds torch.compile to the table.

# %% name="times" tags=["varies"]
print("minicompile:", ours)
print("eager:      ", eager)

# %% [markdown]
# ## Recap
#
# 1. A compiler for PyTorch is a corridor: Python frame, graph, two functional graphs, loops, fused
#    loops, kernels, wrapper.
# 2. Every room hands on one plain object, and every object remembers the Python line it came from.
# 3. Operators end at lowering; from there on there are only loops and index formulas.
# 4. Most of the gain is memory traffic: fused loops keep intermediate values in registers.
# 5. What a room can't do runs as before, and the reason is on record.

# %% [markdown]
# ## Exercises
#
# Write your answers and run the check below each. The checks ask the compiler.
#
# **Exercise 1.** How many kernels does fusion save? Read it off two traces: one with fusion, one without.


# %% name="ex1-answer" tags=["answer"]
def kernels_saved(fused, unfused):
    """Kernels that fusion saved, from two traces of the same function."""
    ### BEGIN SOLUTION
    return len(unfused.kernels) - len(fused.kernels)
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-fused" tags=["wrong"] kind="misconception" says="got 1"
def kernels_saved(fused, unfused):
    return len(fused.kernels)


# %% name="ex1-wrong-constant" tags=["wrong"] kind="visible-only" says="got 5"
def kernels_saved(fused, unfused):
    return 5


# %% name="ex1-wrong-report" tags=["wrong"] kind="built-in" says="a use of steps"
def kernels_saved(fused, unfused):
    return len(fused.schedule.steps())


# %% [markdown]
# **Exercise 2.** Three variants. How many kernels will each make? Decide first, then check.

# %% name="ex2-variants"


def chain(x):
    return torch.relu(x * 2 + 1)


def around_a_product(x, w):
    return torch.relu(torch.relu(x) @ w)


def two_uses(x):
    y = torch.relu(x)
    return y + 1, y * 2


# %% name="ex2-answer" tags=["answer"]
kernels_of_chain = None
kernels_around_a_product = None
kernels_of_two_uses = None

# %% name="ex2-check" tags=["nbval-check-output"]

# %% [markdown]
# **Exercise 3.** Which line of `minicompile/lessons/model.py` made the last kernel of the block's
# forward? Any of its lines counts. Click the kernel's lines, or read
# `block_trace.kernels[-1].origins`.

# %% name="ex3-answer" tags=["answer"]
line_of_last_kernel = None

# %% name="ex3-check" tags=["nbval-check-output"]
from minicompile.ops.origin import source_lines

lines = {at.line for at in source_lines(block_trace.kernels[-1].origins)}

# %% [markdown]
# **Where you are.** The whole corridor is lit; the next lesson walks into the first room and
# watches a function being read instruction by instruction.

# %% name="corridor"
print(block_trace)
