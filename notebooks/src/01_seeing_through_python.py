# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 01 · How can a compiler see through Python?
#
# Python decides everything while it runs: which branch, which method, which type. Yet a compiler
# needs to know what happens before it happens. This lesson shows the trick: run the function once,
# on tensors without numbers, and write down what it does. After it you can
#
# - read bytecode, and follow it by hand,
# - say which Python leaves a trace in the graph (operations on tensors) and which does not,
# - add an instruction to the compiler's own interpreter.

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

check = checks("01")

# %% [markdown]
# Our example has a branch and three tensor operations. Move the slider: each slide is one instruction
# of Python's bytecode, executed by the compiler. Watch the right column, the graph: when does it grow?

# %% name="example"
from minicompile.lessons.stepping import bytecode_steps


def f(x, y):
    if x.size(0) > 2:
        x = x * 2 + y
    return torch.relu(x)


x, y = torch.ones(3, 4), torch.ones(3, 4)
bytecode_steps(f, x, y)

# %% [markdown]
# That is the whole answer. The compiler runs the function's bytecode itself, one instruction after
# the other. Numbers, branches and calls happen as in Python and leave nothing behind. An operation on
# a tensor leaves a node in the graph. What comes out at the end is a list of tensor operations.

# %% name="the-graph"
trace = mc.trace(f, x, y)
print(trace.capture.graph)

# %% [markdown]
# ## A machine with a stack
#
# Python does not run your text. It translates each function to bytecode, and its interpreter runs
# that on a *stack*: a pile of values of which only the top is touched. `LOAD_FAST` puts a local
# variable on top, `BINARY_OP` takes two values away and puts the result there, `STORE_FAST` takes the
# top and gives it a name. The standard library's `dis` shows what Python made of a function:

# %% name="dis"
import dis

dis.dis(f)

# %% [markdown]
# Every version of Python changes its instructions a little. So minicompile first rewrites them in a
# spelling of its own that means the same on all versions. The name of an instruction is its *opcode*;
# beside it stands its argument.

# %% name="decode"
from minicompile.dynamo.bytecode import decode

print(decode(f.__code__))

# %% [markdown]
# ## Tensors without numbers
#
# What is on the stack while the compiler runs this? Not your tensors: computing on them would be slow,
# and would happen twice. In their place stand *FakeTensors*: they know shape, dtype, device and
# *strides* (how far apart neighbours lie in memory), and hold no numbers. Every operation of PyTorch
# can tell what it would give for them.

# %% name="fake"
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode():
    huge = torch.empty(1_000_000, 1_000_000)
    product = huge @ huge
print("shape of the product:", tuple(product.shape), product.dtype)
print("its numbers would need", product.numel() * 4 // 2**40, "TiB; it needs none")

# %% [markdown]
# So `x.size(0) > 2` has an answer while compiling: shapes are known. A question about numbers, such as
# `x.sum() > 0`, has none. That is where a compiler must stop (lesson 03 shows how it goes on).
#
# ## A compiler's eye in twenty lines
#
# Here is capture without the details. The stack holds constants and graph nodes. Such a graph of
# PyTorch's own kind is an *FX graph*; its inputs are placeholders.

# %% name="toy"
from minicompile.dynamo.interpreter import BINARY


def toy_capture(function, *tensors):
    program, mode = decode(function.__code__), FakeTensorMode()
    graph, local, stack = torch.fx.Graph(), {}, []
    for name, tensor in zip(program.slots, tensors):
        local[name] = graph.placeholder(name)
        local[name].meta["val"] = mode.from_tensor(tensor)

    def value(item):
        return item.meta["val"] if isinstance(item, torch.fx.Node) else item

    for ins in program.instructions:
        if ins.opname == "LOAD_FAST":
            stack.append(local[ins.value])
        elif ins.opname == "LOAD_CONST":
            stack.append(ins.value)
        elif ins.opname == "STORE_FAST":
            local[ins.value] = stack.pop()
        elif ins.opname == "BINARY_OP":
            right, left = stack.pop(), stack.pop()
            operation = BINARY[ins.value]
            stack.append(graph.call_function(operation, (left, right)))
            stack[-1].meta["val"] = operation(value(left), value(right))
        elif ins.opname == "RETURN_VALUE":
            graph.output(stack.pop())
    return graph


# %% [markdown]
# **Predict, then run.** `y` is a row and `x` a table. Which shape has `z`, and who worked it out? How
# many nodes does the graph have besides its placeholders?

# %% name="toy-run"


def line(x, y):
    z = x * 2 + y
    return z @ z.T if False else z - 1  # Python drops the dead half before we see it


graph = toy_capture(line, torch.ones(3, 4), torch.ones(4))
for node in graph.nodes:
    print(f"{node.op:14} {node.name:12} {getattr(node.meta.get('val'), 'shape', '')}")

# %% [markdown]
# The real room differs in breadth, not in kind. Its loop is the method `Frame.run` of
# `minicompile/dynamo/interpreter.py`; what an opcode does is a *handler* in a table, and the table's
# rows read like the description of a stack machine. These are some of them:

# %% name="effects"
from minicompile.dynamo.opcodes import EFFECTS

rows = [row for row in EFFECTS.splitlines() if row.startswith(("LOAD_CONST", "BINARY_", "BUILD_T"))]
print("\n".join(rows))

# %% [markdown]
# Left of the dashes is what the instruction takes from the stack, right of them what it gives. `world`
# is the *tracer*: it knows what an addition means while capturing. For two ints that is Python's
# own; for a FakeTensor it runs the operation on fakes and records a node.
#
# ## What leaves a trace
#
# **Predict, then run.** The function below has a loop, a list, a string and a helper function. How
# many operations will the graph have?

# %% name="loops"


def scaled(tensor, factors):
    return [tensor * factor for factor in factors]


def g(x):
    parts = scaled(x, range(1, 4))
    names = ", ".join(f"part {i}" for i, _ in enumerate(parts))
    return parts[0] + parts[-1] if "part 2" in names else x


explained = mc.explain(g)(x)
print(dict(explained.operators))
print("calls followed inside:", explained.captures[0].inlined)

# %% [markdown]
# The loop is gone: it ran while compiling, and its three products stand one after the other. The
# string was made, looked at and forgotten. One product stands there that nobody needs: capture only
# writes down, a later room clears away. The call of `scaled` was *inlined*: the interpreter opened a
# frame for it and went on inside. (A *frame* is one running call: its locals, its stack, its place.)

# %% [markdown]
# ## Where values come from
#
# The graph must run again on later calls. So for every object that existed before, the compiler notes
# the path by which the frame reached it, its *Source*, in a *VariableTracker*, which also keeps what
# the frame did to the object. A module's weight becomes an input of the graph, read along its path:

# %% name="block"
from minicompile.lessons.model import GPT, GPTConfig

torch.manual_seed(0)
config = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)
block, h = GPT(config).blocks[0], torch.randn(2, 16, 32)
capture = mc.explain(block)(h).captures[0]
for given in capture.inputs[:5]:
    print(given)
print("...", len(capture.inputs), "inputs,", capture.graph.op_count, "operations,", end=" ")
print(len(capture.bytecode), "instructions executed")

# %% [markdown]
# Almost all of these instructions only moved Python objects around. Here they are, line by line, with
# the operations that they left (calls stand further right; click to fold and unfold):

# %% name="mlp-picture"
mc.explain(block.mlp)(h)

# %% [markdown]
# ## Break it
#
# Is our interpreter right? It must do exactly what Python does. Here is a planted fault: a handler
# for `BINARY_OP` that takes its two operands in the wrong order. `mc.scoped()` forgets it afterwards.

# %% name="break-it"
from minicompile.extension import bytecode


def difference(x, y):
    return x - 2 * y


print("eager:      ", difference(x, y)[0, 0].item())
with mc.scoped():

    @bytecode("BINARY_OP")
    def swapped(frame, ins):
        left, right = frame.stack.pop(), frame.stack.pop()
        frame.stack.append(frame.world.binary(ins.value, left, right))

    print("swapped:    ", mc.compile(difference, backend="eager")(x, y)[0, 0].item())
print("as it was:  ", mc.compile(difference, backend="eager")(x, y)[0, 0].item())

# %% [markdown]
# A wrong handler gives a wrong number. A missing handler does not: where the interpreter meets an
# instruction that it does not know, it cuts the function in two, and Python runs that instruction
# itself. That is a *graph break*. **Predict, then run:** how many graphs does the block become without
# `UNPACK_SEQUENCE`, the instruction behind `q, k, v = ...`?

# %% name="missing"
with mc.without("bytecode:UNPACK_SEQUENCE"):
    crippled = mc.explain(block)(h)
    same = torch.equal(mc.compile(block, backend="eager")(h), block(h))
print("graphs:", crippled.graph_count, " same answer:", same)
for found in crippled.breaks:
    print(f"  {found.reason}, at {found.user_line.text}")

# %% [markdown]
# > **In torch.compile.** TorchDynamo is the same machine: `torch/_dynamo/symbolic_convert.py` has a
# > class with a method for each opcode, and a stack of VariableTrackers. It wraps every value in one,
# > ints and lists too; our stack holds the real objects and replaces tensors only, which is shorter
# > and covers less. A backend of three lines shows the graph that it found for our example:

# %% name="torch-compile"


def show_graph(gm, inputs):
    print(gm.code.strip())
    return gm.forward


print(torch.equal(torch.compile(f, backend=show_graph)(x, y), f(x, y)))

# %% [markdown]
# The same operations, in the same order. The branch is gone there too.
#
# ## Recap
#
# 1. Capture is an interpreter: it runs a function's bytecode on a stack of its own.
# 2. Tensors are replaced by FakeTensors, which have a shape and no numbers; everything else is real.
# 3. Only operations on tensors leave nodes in the graph; branches, loops and calls are gone.
# 4. What existed before the call has a Source, the path by which later calls find it again.
# 5. What the interpreter does not know ends the graph, and Python takes over: slower, never wrong.

# %% [markdown]
# ## Exercises
#
# **Exercise 1 · the height of the stack** (easy, 2 points). You get the normalised instructions of a
# function without jumps: objects with `opname` and `arg`, as printed above by `decode`. Give a list: how
# many values lie on the stack after each of them? Do it by hand for `ex1_example` first. Only these
# opcodes occur: LOAD_FAST, LOAD_CONST, LOAD_GLOBAL, LOAD_ATTR, LOAD_METHOD, PUSH_NULL, STORE_FAST,
# BINARY_OP, COMPARE_OP, UNARY_NEGATIVE, BUILD_TUPLE, CALL, RETURN_VALUE.

# %% name="ex1-example"


def ex1_example(x, y):
    z = torch.relu(x * 2)
    return z + y


print(decode(ex1_example.__code__))

# %% [markdown]
# **You will need**
#
# - `ins.opname`, `ins.arg`:
#   `(decode(ex1_example.__code__).instructions[0].opname, decode(ex1_example.__code__).instructions[0].arg)`
#   gives `('LOAD_GLOBAL', 0)`.
# - Names that begin with LOAD, and PUSH_NULL, put one value on the stack. LOAD_ATTR takes one first;
#   LOAD_METHOD takes one and puts two there: the method and its object.
# - STORE_FAST and RETURN_VALUE take one. BINARY_OP and COMPARE_OP take two and give one, UNARY_NEGATIVE
#   takes one and gives one, BUILD_TUPLE takes `ins.arg` values and gives one.
# - CALL takes `ins.arg` arguments, the function below them, and what lies beside the function (a NULL, or
#   the object whose method it is). It gives one value.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Write the height beside each printed line of `ex1_example`. After RETURN_VALUE the stack is empty: that is
# a test of your numbers.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Most opcodes change the height by a fixed number: a dict. Only CALL and BUILD_TUPLE look at `ins.arg`.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def stack_heights(instructions):
    """How many values lie on the stack after each instruction, as a list of ints."""
    ### BEGIN SOLUTION
    changes = {"LOAD_ATTR": 0, "UNARY_NEGATIVE": 0, "STORE_FAST": -1, "RETURN_VALUE": -1}
    changes |= {"BINARY_OP": -1, "COMPARE_OP": -1}
    height, heights = 0, []
    for ins in instructions:
        if ins.opname == "CALL":
            height -= ins.arg + 1
        elif ins.opname == "BUILD_TUPLE":
            height -= ins.arg - 1
        else:
            height += changes.get(ins.opname, 1)
        heights.append(height)
    return heights
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-null" tags=["wrong"] kind="misconception" says="product_and_relu: expected"
def stack_heights(instructions):
    changes = {"LOAD_ATTR": 0, "UNARY_NEGATIVE": 0, "STORE_FAST": -1, "RETURN_VALUE": -1}
    changes |= {"BINARY_OP": -1, "COMPARE_OP": -1}
    height, heights = 0, []
    for ins in instructions:
        if ins.opname == "CALL":
            height -= ins.arg
        elif ins.opname == "BUILD_TUPLE":
            height -= ins.arg - 1
        else:
            height += changes.get(ins.opname, 1)
        heights.append(height)
    return heights


# %% name="ex1-wrong-one-argument" tags=["wrong"] kind="visible-only" says="does not show, stack_heights for"
def stack_heights(instructions):
    changes = {"LOAD_ATTR": 0, "UNARY_NEGATIVE": 0, "STORE_FAST": -1, "RETURN_VALUE": -1}
    changes |= {"BINARY_OP": -1, "COMPARE_OP": -1, "CALL": -2}
    height, heights = 0, []
    for ins in instructions:
        height += changes.get(ins.opname, 1)
        heights.append(height)
    return heights


# %% name="ex1-wrong-dis" tags=["wrong"] kind="built-in" says="a use of dis"
def stack_heights(instructions):
    import dis

    height, heights = 0, []
    for ins in instructions:
        height += dis.stack_effect(dis.opmap[ins.opname], ins.arg)
        heights.append(height)
    return heights


# %% [markdown]
# **Exercise 2 · two paths, two graphs** (solid, 2 points). Write `two_paths(x)`: it gives `torch.relu(x)` if
# `x` has at least four rows, else `torch.tanh(x)`. The compiler must capture it whole, without a break,
# and each graph must hold the one operation that is needed and not the other.

# %% [markdown]
# **You will need**
#
# - `x.size(0)`: the number of rows. While the function is captured it is a plain number, of which a
#   FakeTensor knows: `two_paths` may ask with `if`.
# - `mc.explain(two_paths)(x)`: what was captured. `dict(mc.explain(f)(x, y).operators)` gives
#   `{'operator.mul': 1, 'operator.add': 1, 'torch.relu': 1}`, and `mc.explain(f)(x, y).breaks` are the
#   breaks.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# What does a FakeTensor know, and what does it not? Decide by something that it knows.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# `torch.where` computes both sides. An `if` on a shape follows one of them, and becomes a guard.
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def two_paths(x):
    """relu of at least four rows, tanh of fewer: a graph for each."""
    ### BEGIN SOLUTION
    if x.size(0) >= 4:
        return torch.relu(x)
    return torch.tanh(x)
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-where" tags=["wrong"] kind="misconception" says="expected only relu, got"
def two_paths(x):
    many = torch.tensor(x.size(0) >= 4)
    return torch.where(many, torch.relu(x), torch.tanh(x))


# %% name="ex2-wrong-data" tags=["wrong"] kind="misconception" says="expected no break, got"
def two_paths(x):
    if torch.ones_like(x[:, 0]).sum() >= 4:
        return torch.relu(x)
    return torch.tanh(x)


# %% name="ex2-wrong-three" tags=["wrong"] kind="visible-only" says="3 rows of 7: expected only tanh, got"
def two_paths(x):
    return torch.relu(x) if x.size(0) > 2 else torch.tanh(x)


# %% name="ex2-wrong-cond" tags=["wrong"] kind="built-in" says="a use of cond"
def two_paths(x):
    return torch.cond(x.size(0) >= 4, torch.relu, torch.tanh, (x,))


# %% [markdown]
# **Exercise 3 · operators** (solid, 3 points). The check takes the handler of `BINARY_OP` away; then the
# block falls into pieces at each `*` and `//`. Write it: a function of the running frame and the
# instruction. `frame.stack` is a list; `ins.value` is the operator as text, such as `"+"` or `"-="`;
# `frame.world.binary(operator, left, right)` does what it means while capturing.

# %% [markdown]
# **You will need**
#
# - `frame.stack.pop()` takes the top of the stack, `frame.stack.append(value)` puts a value there.
# - `ins.value`: the operator as text, such as `"+"`.
# - `frame.world.binary("-", left, right)`: the value of `left - right`, recorded in the graph if there is a
#   tensor in it. It may lie on the stack.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Three statements. The cell of the section "Break it" is nearly right.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# In `a - b`, `a` was put on the stack first: what lies on top is the right operand.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def binary_op(frame, ins):
    """Take two values from the stack, put there what the operator makes of them."""
    ### BEGIN SOLUTION
    right = frame.stack.pop()
    left = frame.stack.pop()
    frame.stack.append(frame.world.binary(ins.value, left, right))
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-swapped" tags=["wrong"] kind="misconception" says="x - 2: expected"
def binary_op(frame, ins):
    left, right = frame.stack.pop(), frame.stack.pop()
    frame.stack.append(frame.world.binary(ins.value, left, right))


# %% name="ex3-wrong-not-recorded" tags=["wrong"] kind="misconception" says="came from outside of the capture"
def binary_op(frame, ins):
    right, left = frame.stack.pop(), frame.stack.pop()
    frame.stack.append({"+": left.__add__, "-": left.__sub__}[ins.value](right))


# %% name="ex3-wrong-some" tags=["wrong"] kind="visible-only" says="raises ValueError: **"
def binary_op(frame, ins):
    right, left = frame.stack.pop(), frame.stack.pop()
    if ins.value not in ("+", "-", "*", "/", "//", "@"):
        raise ValueError(ins.value)
    frame.stack.append(frame.world.binary(ins.value, left, right))


# %% name="ex3-wrong-table" tags=["wrong"] kind="built-in" says="a use of effect"
def binary_op(frame, ins):
    from minicompile.dynamo.opcodes import effect

    row = "BINARY_OP", "left, right", "world.binary(named, left, right)", ""
    return effect(*row)(frame, ins)


# %% [markdown]
# **Exercise 4 · unpacking** (hard, 4 points). Now a real one: `UNPACK_SEQUENCE`, the instruction behind
# `batch, length, width = x.shape`. It takes the sequence from the stack and puts its `ins.arg` items
# there, so that the first item comes to lie on top. `frame.world.items(sequence)` gives the items as
# a tuple or list, and guards their number. Python raises a `ValueError` if there are too many or too few, and
# users catch that: so must yours. The check takes the built-in handler away, and compiles the block.

# %% [markdown]
# **You will need**
#
# - `frame.stack`: as in exercise 3. The sequence is on top.
# - `frame.world.items(sequence)`: its items, as a tuple or list; a guard is made on their number.
# - `ins.arg`: how many names are on the left side. For `a, b = pair` it is `2`.
# - `raise ValueError(text)`: what a handler raises goes to the `except` of the interpreted code, as in
#   Python.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Take one value, look at how many items it has, put the items there.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# The next instruction is a STORE_FAST for the first name, and it takes what lies on top.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# So the last item goes first: `reversed(items)`, and `frame.stack.extend` puts several values there.
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def unpack(frame, ins):
    """Replace the sequence on top of the stack by its `ins.arg` items, the first one on top."""
    ### BEGIN SOLUTION
    items = frame.world.items(frame.stack.pop())
    if len(items) != ins.arg:
        raise ValueError(f"expected {ins.arg} values to unpack, got {len(items)}")
    frame.stack.extend(reversed(items))
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-order" tags=["wrong"] kind="misconception" says="first_less_second(f32[2, 3]): expected"
def unpack(frame, ins):
    items = frame.world.items(frame.stack.pop())
    if len(items) != ins.arg:
        raise ValueError("wrong number of values to unpack")
    frame.stack.extend(items)


# %% name="ex4-wrong-count" tags=["wrong"] kind="visible-only" says="does not show, first_of_two"
def unpack(frame, ins):
    items = frame.world.items(frame.stack.pop())
    if len(items) < ins.arg:
        raise ValueError("too few values to unpack")
    frame.stack.extend(reversed(items[: ins.arg]))


# %% name="ex4-wrong-no-guard" tags=["wrong"] kind="visible-only" says="one_more(f32[2, 3], [2, 3, 4])"
def unpack(frame, ins):
    items = tuple(frame.stack.pop())
    if len(items) != ins.arg:
        raise ValueError("wrong number of values to unpack")
    frame.stack.extend(reversed(items))


# %% name="ex4-wrong-given" tags=["wrong"] kind="built-in" says="a use of minicompile.dynamo.opcodes"
def unpack(frame, ins):
    import minicompile.dynamo.opcodes as given

    given.unpack_sequence(frame, ins)


# %% [markdown]
# ## Go deeper
#
# - `minicompile/dynamo/interpreter.py`: the machine; `minicompile/dynamo/opcodes.py`: its handlers.
# - `minicompile/dynamo/bytecode.py`: how three versions of Python become one instruction stream.
# - `minicompile/dynamo/world.py`: what is known while capturing, and where operations get their meaning;
#   `minicompile/dynamo/recorder.py`: how one becomes a node.
# - `torch/_dynamo/symbolic_convert.py`, `torch/_dynamo/variables/base.py` and
#   `torch/_dynamo/output_graph.py`: the same three in torch.compile.
# - `torch/_subclasses/fake_tensor.py`: FakeTensors.

# %% [markdown]
# **Where you are.** The block of the model is one graph, written down while its bytecode ran on fakes.
# The graph is right for this call. The next lesson asks when it is right for another.

# %% name="where"
from minicompile.lessons.pictures import corridor

corridor("dynamo")
