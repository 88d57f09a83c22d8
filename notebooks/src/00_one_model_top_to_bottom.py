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
# larger steps. This lesson opens the box once, from top to bottom; each later lesson stays in one
# room of it. After it you can
#
# - name the rooms of the corridor, and what each hands to the next,
# - follow one line of a model to the machine code that came from it,
# - take a rule away from the compiler and put one of your own in its place.

# %% [markdown]
# Our example has three operations: a matrix product, a `relu`, a `softmax`. `mc.trace` compiles it
# and keeps what every room made.

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
# That is the whole corridor; every pane is one room's result. From left to right: Python becomes a
# *graph* (operations, and arrows that say which needs which), the graph becomes loops, loops that
# share data become one *kernel* (a function in C++ that runs over whole tensors). Point at a line
# in any pane: what came from the same Python lights up in all of them.
#
# The answer is that of *eager* PyTorch, which runs one operation after the other, as you wrote them:

# %% name="same-answer"
compiled = mc.compile(f)
largest = (compiled(x, w) - f(x, w)).abs().max().item()
print("equal to eager within 1e-6:", largest < 1e-6)

# %% [markdown]
# **Predict, then run.** A softmax is five steps: the largest value of a row, subtract it, `torch.exp`,
# sum the row, divide. With the `relu` that makes a loop for each, over the same table of numbers. How many
# kernels did minicompile write for them? Decide before you run the next cell. The matrix product is
# not among them. A library does that: such a call of a kernel that somebody else wrote is *extern*.

# %% name="predict-kernels"
print("kernels:", len(trace.kernels))
print("calls of PyTorch's own kernels:", [str(extern.op) for extern in trace.loops.externs])

# %% [markdown]
# **Break it.** The compiler's best idea is *fusion*: loops over the same data become one. Two
# switches take it away: `inline="never"` writes every intermediate to memory, `"fusion": False` gives
# each a kernel of its own. The answer stays right; the kernels and the bytes that travel change:

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
# the next character comes out. Its heart is a block: attention, then a small network, each on
# normed input and added back. Here is one block, small enough to read. Its input requires a
# gradient, so there will be a *backward graph* too: the operations that compute the gradients.

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
# Python itself runs *bytecode*, small instructions made from your text. This room runs them too, on
# stand-ins that have a shape but no numbers, and writes down every operation on them: that is
# *capture*. Calls are followed inside, so the call of the attention leaves no trace but its
# operations. What the graph relied on (a shape, a type, an attribute) becomes a *guard*, a condition
# that is checked at each later call.

# %% name="capture"
print("operations:", block_trace.capture.graph.op_count)
print("calls followed inside:", len(block_trace.capture.inlined))
print("guards:", len(block_trace.capture.guards), "of which three:")
about_self = [guard for guard in block_trace.capture.guards if "self." in guard.expression]
for guard in [guard for guard in about_self if guard.kind == "equals"][:3]:
    print(f"  {guard.expression}\n    because of {guard.user_line.text}")

# %% name="capture-picture"
block_trace.capture

# %% [markdown]
# ### Room 2, autograd ahead of time: two simpler graphs
#
# The graph is rewritten in fewer, simpler *operators* (PyTorch's word for its operations), without
# writes into memory that others see. Then it is differentiated, while compiling: into a *forward
# graph* that also hands over what backward needs, and the backward graph. Which values are handed
# over and which are cheaper to compute again is one decision, the smallest cut through the graph.

# %% name="levels"
for level, graph in block_trace.aot.levels.items():
    print(f"{level:>5}: {graph.op_count} operations")

# %% [markdown]
# One operator can be many: `torch.layer_norm` is a mean, a variance, a division and more. A rule that
# writes one in simpler ones is a *decomposition*. That is what the levels are: the first has all
# operators of PyTorch, the last only the simplest. Now the values handed from forward to backward,
# each with the reason it was kept:

# %% name="partition"
block_trace.aot.partition

# %% [markdown]
# ### Room 3, lowering: every operator becomes a loop
#
# An operator disappears here, which is called *lowering*. What remains is a formula: which element of
# the result comes from which elements of the inputs. `torch.transpose` costs nothing any more: it is
# another formula for the index. Matrix products stay extern calls, and each says why.

# %% name="loops"
block_trace.loops

# %% [markdown]
# ### Room 4, scheduling: loops that share data become one
#
# *Scheduling* decides what runs when, and with what. Two loops may become one kernel if that changes
# no result and saves memory traffic. Every pair that was looked at is on record, with the verdict
# and the reason. The refusals are the more instructive half:

# %% name="decisions"
decisions = block_trace.schedule.decisions
fused = [d for d in decisions if d.fused]
print(
    f"{len(block_trace.schedule.before)} loops and calls before, {len(block_trace.schedule.nodes)} after"
)
print(f"{len(decisions)} pairs looked at, {len(fused)} fused")
for reason in sorted({d.reason for d in decisions if not d.fused}):
    print("  refused:", reason)

# %% [markdown]
# The picture of a schedule, for our small `f`: what became one kernel stands in one box.

# %% name="schedule"
trace.schedule

# %% [markdown]
# How does it come to that? One question a slide: move the slider. The two that are asked about stand side
# by side; the answer has its reason, and the bytes that need not travel.

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
# A *plan* settles what a kernel will look like before a line of it is written: the order of the
# loops, which one works on several numbers at a time, how wide an index is, in which type it
# computes. Then printing is easy. Each line knows its origins.

# %% name="plan"
print(block_trace.plans[0])

# %% name="kernel"
block_trace.kernels[0]

# %% [markdown]
# ### Room 6, the wrapper: what your call runs
#
# The last piece is a Python function, the *wrapper*: it allocates memory, calls kernels and the
# library in order, and lets go of each result when nothing needs it any more.

# %% name="wrapper"
block_trace.wrapper

# %% [markdown]
# ## Follow one line
#
# Where did the `gelu` of the model go? Ask for everything that came from that line of text, in every
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
# > AOTAutograd differentiates, TorchInductor lowers, schedules and prints. Here it is, on the
# > function we began with. Does it fuse the same loops? To read on: `torch/_inductor/graph.py` is
# > its lowering. We left out much of the breadth (more operators, devices, templates), nothing of
# > the way. `minicompile.compare_with_torch` sets all of its stages beside ours.

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
# code of Python's own standard library). The loss is that of guessing the next character, the
# first line what guessing blindly costs. The same run without a compiler is the judge.

# %% name="train"
import math

from minicompile.lessons.train import train

torch.set_num_threads(1)  # a model of this size is quickest so
config = GPTConfig(block_size=32)
print(f"guessing blindly: {math.log(config.vocab_size):.2f}")


def fresh_model():
    torch.manual_seed(0)
    return GPT(config)


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
# And the time? It depends on your machine, so this notebook keeps no numbers: run the cell. For steps
# this small most of it is the first call, which compiles. `README.md` says how to run a longer race,
# with torch.compile beside it.

# %% name="times" tags=["varies"]
print("minicompile:", ours)
print("eager:      ", eager)

# %% [markdown]
# ## Recap
#
# 1. A compiler for PyTorch is a corridor: Python's bytecode, graph, two functional graphs, loops, fused
#    loops, kernels, wrapper.
# 2. Every room hands on one plain object, and every object remembers the Python line it came from.
# 3. Operators end at lowering; from there on there are only loops and index formulas.
# 4. Most of the gain is memory traffic: fused loops keep intermediate values inside the
#    processor.
# 5. What a room can't do runs as before, and the reason is on record.

# %% [markdown]
# ## Exercises
#
# Write your answer into the cell, run it, then run the check below it. The checks ask the compiler
# itself; a wrong answer is told for which input, what was expected and what came.

# %% [markdown]
# **Exercise 1 · what fusion saves** (easy, 1 point). You get two traces of the same function, one compiled
# with fusion and one without. How many kernels did fusion save?

# %% [markdown]
# **You will need**
#
# - `fused.kernels`, `unfused.kernels`: the kernels of a trace, as a list. Extern calls are not in it. For
#   `f` above, `len(trace.kernels)` gives `1`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# A trace has a list of kernels. You need the lengths of two such lists.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Take the number with fusion from the number without.
#
# </details>


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


# %% name="ex1-wrong-always-one" tags=["wrong"] kind="visible-only" says="product_between: expected 4, got 5"
def kernels_saved(fused, unfused):
    return len(unfused.kernels) - 1


# %% name="ex1-wrong-report" tags=["wrong"] kind="built-in" says="a use of steps"
def kernels_saved(fused, unfused):
    return len(fused.schedule.steps())


# %% [markdown]
# **Exercise 2 · as many kernels as you like** (solid, 2 points). Fusion is eager to make one kernel of
# everything. Write `with_kernels(count)`: it gives a function of two square tensors `x` and `w` that
# minicompile, with its usual settings, compiles to exactly `count` kernels. Your function may do
# whatever you like, but it must give one tensor.

# %% [markdown]
# **You will need**
#
# - `torch.relu(x)`: a loop. Loops over the same data become one kernel:
#   `len(mc.trace(lambda x: torch.relu(torch.relu(x)), x).kernels)` gives `1`.
# - `x @ w`: an extern call. It is no kernel, and loops on either side of it can't fuse.
# - `len(mc.trace(function, x, w).kernels)`: how many kernels your own function gives. Try it.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Ask the compiler what it did with two `torch.relu` in a row, and with two that have a matrix product
# between them.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# A Python loop runs while the function is captured, so it may run `count - 1` times, with a product and a
# `torch.relu` in each round.
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def with_kernels(count):
    """A function `(x, w) -> tensor` that is compiled to `count` kernels."""
    ### BEGIN SOLUTION

    def function(x, w):
        y = torch.relu(x)
        for _ in range(count - 1):
            y = torch.relu(y @ w)
        return y

    return function
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-chain" tags=["wrong"] kind="misconception" says="expected 2, got 1"
def with_kernels(count):
    def function(x, w):
        for _ in range(count):
            x = torch.relu(x) + 1
        return x

    return function


# %% name="ex2-wrong-two" tags=["wrong"] kind="visible-only" says="expected 3, got 2"
def with_kernels(count):
    def one(x, w):
        return torch.relu(x)

    def two(x, w):
        return torch.relu(torch.relu(x) @ w)

    return one if count == 1 else two


# %% name="ex2-wrong-switch" tags=["wrong"] kind="built-in" says="a use of compile"
def with_kernels(count):
    def function(x, w):
        for _ in range(count):
            x = torch.relu(x)
        return x

    return mc.compile(function, options={"inline": "never", "fusion": False})


# %% [markdown]
# **Exercise 3 · give gelu back** (solid, 3 points). The check takes away the compiler's decomposition of
# `gelu`. The block still runs (what has no rule is an extern call of PyTorch's kernel), but nothing
# fuses with that call any more. Write the operator in simpler ones: `x` times the probability that a
# normal random number is below `x`, which is half of `1 + erf(x / sqrt(2))`. With
# `approximate="tanh"` PyTorch computes `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))`.

# %% [markdown]
# **You will need**
#
# - `torch.erf(x)`, `torch.tanh(x)`: element by element. `torch.erf(torch.tensor(1.0))` gives
#   `tensor(0.8427)`.
# - `math.sqrt(number)`: for constants, after `import math`. `math.sqrt(2 / math.pi)` gives
#   `0.7978845608028654`.
# - `approximate`: the text `"none"` or `"tanh"`. Write a plain function of tensors; the check registers it
#   with `minicompile.extension.decompose`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Both formulas stand above: an `if` on `approximate` chooses between them.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# The first one, in Python: `0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))`. Write `x**3` as `x * x * x`.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def gelu_in_parts(x, approximate="none"):
    """gelu of a tensor, without gelu. `approximate` is "none" or "tanh"."""
    ### BEGIN SOLUTION
    import math

    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + torch.tanh(inner))
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-sigmoid" tags=["wrong"] kind="misconception" says="gelu with approximate='none'"
def gelu_in_parts(x, approximate="none"):
    return x * torch.sigmoid(1.702 * x)


# %% name="ex3-wrong-exact-only" tags=["wrong"] kind="visible-only" says="gelu with approximate='tanh'"
def gelu_in_parts(x, approximate="none"):
    return 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))


# %% name="ex3-wrong-torch" tags=["wrong"] kind="built-in" says="a use of gelu"
def gelu_in_parts(x, approximate="none"):
    return torch.nn.functional.gelu(x, approximate=approximate)


# %% [markdown]
# **Exercise 4 · the smallest backend** (hard, 4 points). Everything behind the first room can be replaced.
# The check takes the name of the default *backend* (what `mc.compile` does with a captured graph)
# away and puts your function there: `run_graph` gets the graph's nodes, in order, and the input
# tensors, and runs one node after the other. A node has `op`, `target`, `args` and `kwargs`; where an
# argument was computed by another node, that node stands there.

# %% name="ex4-nodes"
for node in list(trace.capture.graph.nodes):
    print(f"{node.op:14} {node.target!s:40.40} {node.args} {node.kwargs}")

# %% [markdown]
# **You will need**
#
# - `node.op`: `"placeholder"` (a *placeholder* stands for an
#   input), `"call_function"`, `"call_method"` or `"output"`, as in the list
#   above.
# - `node.target(*args, **kwargs)`: runs a `"call_function"`. For a `"call_method"` the target is a name:
#   `getattr(x, "sum")()` calls the method of `x` that is called so.
# - `torch.fx.map_arg(node.args, function)`: the arguments, with `function(n)` for each node `n`, also
#   inside of tuples, lists and dicts. `torch.fx.map_arg((node, [node, 2]), lambda n: 5)` gives
#   `(5, [5, 2])`.
# - `node.args[0]` of `"output"`: what to give back; it may hold nodes, in a tuple or list.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Keep a dict from nodes to their values, and fill it in the order of the nodes.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# A placeholder takes the next of the inputs: `given = iter(inputs)` once, then `next(given)` each time.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# For all other nodes begin with `args = torch.fx.map_arg(node.args, values.get)`, and the same for
# `node.kwargs`.
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def run_graph(nodes, inputs):
    """What a graph's output node gives for these inputs. Nodes come in an order in which they can run."""
    ### BEGIN SOLUTION
    values, given = {}, iter(inputs)
    for node in nodes:
        args = torch.fx.map_arg(node.args, values.get)
        kwargs = torch.fx.map_arg(node.kwargs, values.get)
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "call_function":
            values[node] = node.target(*args, **kwargs)
        elif node.op == "call_method":
            values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            values[node] = args[0]
    return values[nodes[-1]]
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-keywords" tags=["wrong"] kind="misconception" says="expected a result, got TypeError"
def run_graph(nodes, inputs):
    values, given = {}, iter(inputs)
    for node in nodes:
        args = torch.fx.map_arg(node.args, values.get)
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "call_function":
            values[node] = node.target(*args)
        elif node.op == "call_method":
            values[node] = getattr(args[0], node.target)(*args[1:])
        else:
            values[node] = args[0]
    return values[nodes[-1]]


# %% name="ex4-wrong-lists" tags=["wrong"] kind="visible-only" says="got TypeError"
def run_graph(nodes, inputs):
    def value_of(argument):
        return values[argument] if isinstance(argument, torch.fx.Node) else argument

    values, given = {}, iter(inputs)
    for node in nodes:
        args = [value_of(argument) for argument in node.args]
        kwargs = {name: value_of(argument) for name, argument in node.kwargs.items()}
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "call_function":
            values[node] = node.target(*args, **kwargs)
        elif node.op == "call_method":
            values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            values[node] = [value_of(result) for result in args[0]]
    return values[nodes[-1]]


# %% name="ex4-wrong-torch" tags=["wrong"] kind="built-in" says="a use of GraphModule"
def run_graph(nodes, inputs):
    gm = torch.fx.GraphModule(torch.nn.Module(), nodes[0].graph)
    return torch.fx.Interpreter(gm).run(*inputs)


# %% [markdown]
# ## Go deeper
#
# - `minicompile/pipeline.py`: the corridor as one short function; begin here.
# - `minicompile/pipeline_result.py`: what a trace holds.
# - `minicompile/extension.py`: every place where a rule of yours fits in.
# - `torch/_dynamo/convert_frame.py`, `torch/_functorch/aot_autograd.py` and
#   `torch/_inductor/compile_fx.py`: the doors of the same rooms in torch.compile.

# %% [markdown]
# **Where you are.** The whole corridor is lit. The next lesson walks into the first room and watches
# a function being read, instruction by instruction.

# %% name="where"
from minicompile.lessons.pictures import corridor

corridor("dynamo", "aot", "lowering", "scheduling", "codegen", "runtime")
