# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 10 · What is an operator, seen from a loop?
#
# After this lesson you can
#
# - read the loops that a graph becomes, and say why a transpose or a slice costs nothing;
# - say why one intermediate is written to memory and another one is not;
# - write the rule that turns an operator into a loop, and have the compiler use it.
#
# Our example adds a row to a table, clips it at zero and transposes the result:

# %% name="setup" tags=["setup"]
try:
    import minicompile as mc
except ModuleNotFoundError:  # opened elsewhere, as on Colab
    get_ipython().run_line_magic(
        "pip", 'install -q "minicompile[notebook] @ git+https://github.com/your_name/minicompile"'
    )
    import minicompile as mc

import torch

from minicompile.extension import lowering
from minicompile.lessons.exercise import checks
from minicompile.lowering import views
from minicompile.lowering.rules.common import canonical_dims, elementwise
from minicompile.lowering.rules.reductions import reduce
from minicompile.shapes.expr import ModularIndexing

aten = torch.ops.aten
check = checks("10")

# %% name="example"


def f(x, w):
    return torch.relu(x + w).t()


torch.manual_seed(0)
x, w = torch.randn(4, 6), torch.randn(6)
trace = mc.trace(f, x, w)
trace.loops

# %% [markdown]
# That is the answer: **an operator is a formula for one element.** The graph that came in has four
# operators; what is left is one *buffer*, a named piece of memory, and the loop that fills it. Going
# from one to the other is called *lowering*. The add, the `relu` and the broadcast are inside of one
# formula; the transpose is only a note on how the result is looked at.

# %% name="before"
print(trace.aot.forward)
print()
print(trace.loops)

# %% [markdown]
# Point at a line of Python, a node, a loop or a line of the kernel: what belongs together lights up.

# %% name="explore"
trace.explore(["source", "aot", "loops", "kernels"])

# %% [markdown]
# ## A formula is a Python function
#
# `Pointwise([4, 6], ...)` reads: for each index `p0` below four and `p1` below six, compute this. The
# formula is kept as a function, called *inner_fn*: it takes an index (one expression for each loop)
# and a *handler*, an object with a method for each thing that a loop can do: `load`, `constant`,
# `add`, `maximum` and so on. Let us write the one above by hand, and print both.

# %% name="by-hand"
from minicompile.lowering.ir import Pointwise, loops_text


def body(ops, index):
    p0, p1 = index
    total = ops.add(ops.load("x", 6 * p0 + p1), ops.load("w", p1))
    return ops.maximum(total, ops.constant(0.0, torch.float32))


by_hand = Pointwise((4, 6), body)
compilers = trace.loops.operations[0].loops
print("ours:      ", loops_text(by_hand))
print("compiler's:", loops_text(compilers))

# %% [markdown]
# Why a function and no tree of nodes? Because what it computes depends on the handler. `loops_text`
# has one whose values are strings. Below is one whose values are numbers. Another writes C++.
# (Ours are a few lines: any object with the right methods will do.)

# %% name="numbers"


class Numbers:
    """Computes one element, from flat lists."""

    def __init__(self, **memory):
        self.memory = {name: tensor.flatten().tolist() for name, tensor in memory.items()}

    def load(self, buffer, index):
        return self.memory[buffer][int(index)]

    def constant(self, value, dtype):
        return value

    def add(self, a, b):
        return a + b

    def maximum(self, a, b):
        return max(a, b)


ops = Numbers(x=x, w=w)
table = torch.tensor([[by_hand.inner_fn(ops, (p0, p1)) for p1 in range(6)] for p0 in range(4)])
print("the formula, element by element, equals eager:", torch.allclose(table, torch.relu(x + w)))

# %% [markdown]
# ## Addresses
#
# Memory is one long row. A *layout* says how a tensor lies in it: a size and a *stride* for each
# dimension, the step in memory from one element to the next. The address of an element is
# `offset + index · stride`, summed over the dimensions. That is where `6*p0 + p1` comes from.
#
# **Predict, then run.** At which address does `x[2, 3]` lie? And element `[3, 2]` of `x.t()`?

# %% name="addresses"


def address(tensor, *index):
    return tensor.storage_offset() + sum(i * s for i, s in zip(index, tensor.stride()))


print("x     has strides", x.stride(), "and [2, 3] lies at", address(x, 2, 3))
print("x.t() has strides", x.t().stride(), "and [3, 2] lies at", address(x.t(), 3, 2))

# %% [markdown]
# *Broadcasting* is the same arithmetic. The row `w` has one dimension; to be added to a table it is
# expanded to two, and the new dimension has stride zero: all rows look at the same six numbers. So
# `w[0*p0 + p1]`, printed as `w[p1]`. Nothing is copied and no larger row is made.

# %% name="broadcast"
print("w expanded to the table has strides", w.expand(4, 6).stride())

# %% [markdown]
# ## Views are index formulas
#
# An *index map* takes an index of a view to an index of the tensor under it: `[i, j] -> [j, i]` for a
# transpose. Lowering composes such maps and never moves data. Each slide is a function that was
# lowered: look at the index inside the brackets.

# %% name="views"
from minicompile.lessons.pictures import slides

looks = {
    "as it is": lambda x: x + 1,
    "transpose": lambda x: x.t() + 1,
    "slice": lambda x: x[1:3, ::2] + 1,
    "flip": lambda x: x.flip(1) + 1,
    "flatten": lambda x: x.reshape(24) + 1,
    "transpose, then flatten": lambda x: x.t().reshape(24) + 1,
    "one column, six times": lambda x: x[:, :1].expand(4, 6) + 1,
}
seen = {name: mc.trace(look, x).loops for name, look in looks.items()}
slides(
    "One table, seven looks at it",
    *((name, str(loops.operations[0].layout.size), loops) for name, loops in seen.items()),
)

# %% [markdown]
# **Predict, then run.** Four looks in a row, and arithmetic in between. How many loops? What is in
# the brackets? (Eager copies the table for each `flip`.)

# %% name="predict-views"


def dizzy(x):
    y = x.flip(0) * 2
    return y[1:].t().flip(1) + 1


print("loops:", len(mc.trace(dizzy, x).loops.operations))
print(mc.trace(dizzy, x).loops.operations[0])

# %% [markdown]
# The two flips of the rows met in one index formula, and turned into a slice. "Transpose, then flatten"
# has divisions in it: how they are computed, and avoided, is the next lesson.
#
# **Break it.** The index map of a broadcast is a rule like any other. Here is a careless one: it lines
# dimensions up from the left instead of from the right. With a square table nothing crashes.

# %% name="break-it"


def shifted(x, w):
    return x * 10 + w


square, row = torch.zeros(3, 3), torch.tensor([1.0, 2.0, 3.0])
with mc.scoped():

    @lowering(aten.expand.default)
    def from_the_left(ctx, x, size):
        return ctx.view(x, views.ViewMap(tuple(size), lambda i: list(i[: x.dim])))

    mc.reset()
    wrong = mc.compile(shifted)(square, row)
    wrong_formula = mc.trace(shifted, square, row).loops.operations[0]
mc.reset()
print(wrong_formula)
print("wrong:", wrong.tolist())
print("right:", mc.compile(shifted)(square, row).tolist())

# %% [markdown]
# One index in one formula, `p0` for `p1`, and the sum goes down the columns. `mc.scoped()` has
# forgotten the rule.
#
# ## Reductions
#
# A sum over a row needs a second kind of loop. A *Reduction* has two groups of ranges: what it makes,
# and what it reduces. Its formula gets an index for either: `p0, p1, ...` and `r0, r1, ...`. A softmax
# is a chain of both kinds:

# %% name="softmax"
softmax = mc.trace(lambda x: torch.softmax(x, -1), x).loops
softmax

# %% [markdown]
# **Predict, then run.** The index of `buf0` in `buf1` has no `p1`. Why? Then: what does `sum(0)`
# instead of `sum(1)` change in the formula?

# %% name="predict-sum"
for dim in (0, 1):
    print(f"sum({dim}):", mc.trace(lambda x: x.sum(dim), x).loops.operations[0])

# %% [markdown]
# ## Written to memory, or computed again?
#
# Until something needs its memory, a lowered value is only a formula. If each reader takes the formula
# into its own, the value is *inlined*; to give it a buffer is to *realize* it. Both have a price:
# inlining computes again for each reader, realizing writes and reads memory.
#
# **Predict, then run.** Each function uses an intermediate twice. Which one gets a buffer?

# %% name="twice"


def cheap(x):
    y = x + 1
    return y.sum(0), y.sum(1)


def dear(x):
    y = torch.exp(x)
    return y.sum(0), y.sum(1)


for function in (cheap, dear):
    print(function.__name__)
    for operation in mc.trace(function, x).loops.operations:
        print("  ", operation)

# %% [markdown]
# Each buffer carries its reason behind the `#`. An addition is cheaper than reading a number back; an
# `exp` with two readers isn't. The rules are a few lines of `minicompile/lowering/realize.py`. You can
# overrule them: `inline="never"` gives every value its buffer.

# %% name="never"
never = mc.trace(mc.compile(cheap, options={"inline": "never"}), x).loops
for operation in never.operations:
    print(operation)

# %% [markdown]
# ## What has no rule
#
# An operator without a rule, or one that a library does better, is an *extern* call: PyTorch's own
# kernel runs, its operands lie in memory, and the reason is on record. Take a rule away and the
# operator becomes one:

# %% name="extern"
print(mc.trace(lambda x: torch.sort(x).values * 2, x).loops)
with mc.without("lowering:aten.relu"):
    print(mc.trace(f, x, w).loops)

# %% [markdown]
# ## A rule of your own
#
# A lowering rule is a function of a context, `ctx`, and the operands as lazy values. It gives a lazy
# value back: `ctx.pointwise(size, device, inner_fn)`, `ctx.reduction(...)`, or `ctx.view(x, map)`. The
# helper `elementwise` does the first for a formula of elements, with broadcasting. This is the whole
# of `relu`, and a leaky one in its place:

# %% name="own-rule"
import inspect

from minicompile.lowering.rules import pointwise

print(inspect.getsource(pointwise.relu))

with mc.scoped():

    @lowering(aten.relu.default)
    def leaky(ctx, x):
        def formula(ops, v):
            return ops.maximum(v, ops.mul(v, ops.constant(0.125, x.dtype)))

        return elementwise(ctx, formula, x)

    print(mc.trace(f, x, w).loops.operations[0])

# %% [markdown]
# ## Run the loops as they are
#
# Loops are not a picture: they can be run without any kernel. `run_reference` evaluates each formula
# with a handler whose values are whole tensors. It is slow and plain, and the judge of all later
# rooms; in the exercises it runs your rules.

# %% name="reference"
from minicompile.debug.reference import run_reference

(result,) = run_reference(trace.loops, [x, w])
print("loops, run as they are, equal eager:", torch.equal(result, f(x, w)))

# %% [markdown]
# ## One block of the model
#
# The same for a `Block` of the lesson model. Look for three things in the table: queries, keys and
# values are cut out of one product by an index alone; the mask is part of a formula; and each reason
# why something had to be in memory.

# %% name="block"
from minicompile.lessons.model import Block, GPTConfig

torch.manual_seed(0)
block = Block(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16))
h = torch.randn(2, 16, 32)
with torch.no_grad():
    block_trace = mc.trace(block, h)
block_loops = block_trace.loops
print("operators:", block_trace.aot.forward.op_count)
print("loops:", len(block_loops.operations) - len(block_loops.externs))
print("library calls:", len(block_loops.externs))
block_loops

# %% name="block-reasons"
from collections import Counter

why = Counter(o.why for o in block_loops.operations if o not in block_loops.externs)
for reason, count in why.most_common():
    print(f"{count:>2} x {reason}")

# %% [markdown]
# > **In torch.compile.** TorchInductor's first room is the same. `GraphLowering` walks the ATen graph,
# > each operator's rule gives a `Pointwise`, `Reduction` or `ExternKernel`, and the formula is a
# > Python closure over `ops` and an index. It is printed here by calling it, as we do. Theirs is
# > ambient (`V.ops`, a thread-local), ours an argument. Read `torch/_inductor/lowering.py`
# > (`make_pointwise`), then `torch/_inductor/ir.py` (`Pointwise`, `StorageBox.realize`). They also unroll
# > short reductions and choose layouts; we left that out.

# %% name="torch-compile"
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def their_loops(function, *inputs):
    """Inductor's buffers for a function; no kernel is built."""
    graph = make_fx(function, select_decomp_table(), "fake")(*inputs)
    lowered = GraphLowering(graph)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with V.set_graph_handler(lowered), V.set_fake_mode(fakes):
        lowered.run(*map(fakes.from_tensor, inputs))
        return [str(buffer.data) for buffer in lowered.buffers]


for text in their_loops(f, x, w):
    print(text)

# %% [markdown]
# ## Recap
#
# 1. An operator, lowered, is a formula for one element of its result: an `inner_fn` of a handler and
#    an index.
# 2. What the formula means depends on the handler: text, a number, a line of C++.
# 3. Views and broadcasts are arithmetic on the index and never copy.
# 4. A value stays a formula until something needs its memory, and each buffer says why it exists.
# 5. What has no rule is called as it is, with the reason on record.

# %% [markdown]
# ## Exercises
#
# Each answer is a function; the check runs it on the inputs you see and, when it is graded, on others.
#
# **Exercise 1 · What do these loops move?** (easy, 2 points). Suppose each loop of a graph were a kernel of
# its own. It would read each buffer in its `reads` once and write its own. Write `bytes_moved(loops)`:
# the bytes that all loops of a `LoopGraph` read and write together. Library calls don't count. The
# judge is the compiler's own account of the kernels, with fusion switched off.

# %% [markdown]
# **You will need**
#
# - `loops.buffers`: a dict.
#   `(trace.loops.buffers["x"].layout.numel, trace.loops.buffers["x"].layout.dtype.itemsize)` gives
#   `(24, 4)`.
# - `loops.operations`: loops and library calls; the calls are those in `loops.externs`.
#   `list(trace.loops.operations[0].reads)` gives `['x', 'w']`.
# - An operation is a buffer itself, the one that it writes: it has a `layout`, too.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# A function that gives the bytes of a buffer comes first.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# For each operation that is no library call, add what it writes, and each buffer that it reads, once.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def bytes_moved(loops):
    """Bytes read and written if each loop is a kernel of its own."""

    ### BEGIN SOLUTION
    def size(buffer):
        return buffer.layout.numel * buffer.layout.dtype.itemsize

    made = [o for o in loops.operations if o not in loops.externs]
    read = sum(size(loops.buffers[name]) for o in made for name in o.reads)
    return read + sum(map(size, made))
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-per-element" tags=["wrong"] kind="misconception" says="expected 112, got 32"
def bytes_moved(loops):
    total = 0
    for operation in loops.operations:
        if operation not in loops.externs:
            layout = operation.layout
            total += (1 + len(operation.reads)) * layout.numel * layout.dtype.itemsize
    return total


# %% name="ex1-wrong-four-bytes" tags=["wrong"] kind="visible-only" says="expected 480, got 336"
def bytes_moved(loops):
    total = 0
    for operation in loops.operations:
        if operation not in loops.externs:
            total += 4 * operation.layout.numel
            total += sum(4 * loops.buffers[name].layout.numel for name in operation.reads)
    return total


# %% name="ex1-wrong-cost" tags=["wrong"] kind="built-in" says="a use of cost_of"
def bytes_moved(loops):
    from minicompile.options import Options
    from minicompile.scheduling.cost import cost_of
    from minicompile.scheduling.schedule import schedule

    plan = schedule(loops, Options(fusion=False))
    return sum(cost_of(node, loops, plan.memory).bytes for node in plan.kernels)


# %% [markdown]
# **Exercise 2 · A quarter turn by index alone** (solid, 2 points). `torch.rot90` turns a table by a quarter,
# against the clock. Write `quarter_turn(x)` that gives the same for any table, without `rot90` or
# `as_strided` and without an index tensor, so that the compiler makes exactly one loop, which reads `x` at
# `6*p1 - p0 + 5` if it has six columns.

# %% [markdown]
# **You will need**
#
# - `x.t()`, `x.flip(0)`, `x.flip(1)`, `x[1:]`: looks at the same memory, in other orders.
# - `torch.rot90(torch.tensor([[1, 2], [3, 4]]))` gives `tensor([[2, 4], [1, 3]])`.
# - `mc.trace(quarter_turn, x).loops`: the loops, with what stands in the brackets.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# The first row of the result is the last column of `x`, from top to bottom.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Two looks are enough: one swaps rows and columns, one turns an order around.
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def quarter_turn(x):
    """The table turned by a quarter against the clock."""
    ### BEGIN SOLUTION
    return x.t().flip(0)
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-clockwise" tags=["wrong"] kind="misconception" says="6*p1 + 5, got p0 - 6*p1 + 18"
def quarter_turn(x):
    return x.t().flip(1)


# %% name="ex2-wrong-six" tags=["wrong"] kind="visible-only" says="expected a result"
def quarter_turn(x):
    return x.t().reshape(6, -1).flip(0)


# %% name="ex2-wrong-rot90" tags=["wrong"] kind="built-in" says="a use of rot90"
def quarter_turn(x):
    return torch.rot90(x, 1)


# %% [markdown]
# **Exercise 3 · A lowering for addcmul** (solid, 3 points). `torch.addcmul(a, b, c, value=1)` is
# `a + value * b * c`. The compiler's own rule is taken away: it calls the library now. Write
# `lower_addcmul(ctx, a, b, c, *, value=1)`, so that it is one loop. It is registered for
# `aten.addcmul.default`, run on tables, rows and columns, and in a gated `Block`.

# %% [markdown]
# **You will need**
#
# - `elementwise(ctx, formula, a, b, c)`: a lazy value; it calls `formula(ops, x, y, z)` with one element of
#   each, also if a row meets a table. The cell "own rule" above has one tensor, and a formula.
# - `ops.add`, `ops.mul`: of two elements. `ops.constant(value, a.dtype)`: a number, for use with them.
# - `value`: a Python `int` or `float`, given by name: `torch.addcmul(a, b, c, value=-0.5)` calls
#   `lower_addcmul(ctx, a, b, c, value=-0.5)`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Write the formula as a function inside of yours: it can read `value` from there.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# `ops` has no product of three: take `value` times `y`, then that times `z`.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def lower_addcmul(ctx, a, b, c, *, value=1):
    """The lazy value a + value * b * c."""

    ### BEGIN SOLUTION
    def formula(ops, x, y, z):
        product = ops.mul(ops.mul(ops.constant(value, a.dtype), y), z)
        return ops.add(x, product)

    return elementwise(ctx, formula, a, b, c)
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-order" tags=["wrong"] kind="misconception" says="expected float32[4, 6] of"
def lower_addcmul(ctx, a, b, c, *, value=1):
    def formula(ops, x, y, z):
        return ops.mul(ops.add(x, y), z)

    return elementwise(ctx, formula, a, b, c)


# %% name="ex3-wrong-no-value" tags=["wrong"] kind="misconception" says="value=2: expected float32[4, 6] of"
def lower_addcmul(ctx, a, b, c, *, value=1):
    def formula(ops, x, y, z):
        return ops.add(x, ops.mul(y, z))

    return elementwise(ctx, formula, a, b, c)


# %% name="ex3-wrong-whole" tags=["wrong"] kind="visible-only" says="value=-0.5: expected float32[4, 6] of"
def lower_addcmul(ctx, a, b, c, *, value=1):
    def formula(ops, x, y, z):
        product = ops.mul(ops.mul(ops.constant(int(value), a.dtype), y), z)
        return ops.add(x, product)

    return elementwise(ctx, formula, a, b, c)


# %% name="ex3-wrong-rules" tags=["wrong"] kind="built-in" says="a use of lowering"
def lower_addcmul(ctx, a, b, c, *, value=1):
    product = lowering[aten.mul.Tensor](ctx, b, c)
    return lowering[aten.add.Tensor](ctx, a, product, alpha=value)


# %% [markdown]
# **Exercise 4 · A lowering for roll** (solid, 4 points). `torch.roll(x, shifts, dims)` moves elements along
# dimensions; what falls off one end comes back at the other. Without `dims` the flattened tensor is
# rolled. Write `lower_roll(ctx, x, shifts, dims=())` as an index map: no copy, no select. `shifts` and
# `dims` are lists. The check registers it for `aten.roll.default` and shifts the tokens that a `Block`
# reads: that must not cost a single loop.

# %% [markdown]
# **You will need**
#
# - `views.ViewMap(size, function)`: from an index of the result (a list) to one of `x`.
#   `views.ViewMap(x.size, lambda i: [x.size[0] - 1 - i[0], i[1]])` flips the rows of a table.
# - `ctx.view(x, map)`: the lazy value that reads `x` through a map; `x.size` is its size.
# - `ModularIndexing(a, 1, n)`: `a % n` for an `a` that isn't negative.
# - `views.reshape(old, new)`: a map. `second.after(first)` puts one after the other: what the result of
#   `first` looks like through `second`.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Element `i` of the result is element `(i - shift) % size` of `x`.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# An index may not be negative before `ModularIndexing`: add `-shift % n` instead, a number from zero to
# `n`.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# Without `dims`: reshape to one dimension, roll that, and reshape back.
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def lower_roll(ctx, x, shifts, dims=()):
    """The lazy value of x, rolled."""

    ### BEGIN SOLUTION
    def rolled(size, moves):
        def index(i):
            i = list(i)
            for shift, dim in moves:
                dim, n = dim % len(size), size[dim]
                i[dim] = ModularIndexing(i[dim] + -shift % n, 1, n)
            return i

        return views.ViewMap(tuple(size), index)

    if dims:
        return ctx.view(x, rolled(x.size, list(zip(shifts, dims))))
    count = [torch.Size(x.size).numel()]
    turned = rolled(count, [(shifts[0], 0)]).after(views.reshape(x.size, count))
    return ctx.view(x, views.reshape(count, x.size).after(turned))
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-direction" tags=["wrong"] kind="misconception" says="of [2, 3, 4, 5, 0, 1, ...], got"
def lower_roll(ctx, x, shifts, dims=()):
    moves = list(zip(shifts, dims))

    def index(i):
        i = list(i)
        for shift, dim in moves:
            i[dim] = ModularIndexing(i[dim] + shift % x.size[dim], 1, x.size[dim])
        return i

    return ctx.view(x, views.ViewMap(tuple(x.size), index))


# %% name="ex4-wrong-one-dim" tags=["wrong"] kind="visible-only" says="expected float32[3, 5] of"
def lower_roll(ctx, x, shifts, dims=()):
    shift, dim = shifts[0], dims[0] if dims else 0

    def index(i):
        i = list(i)
        n = x.size[dim]
        i[dim] = ModularIndexing(i[dim] + -shift % n, 1, n)
        return i

    return ctx.view(x, views.ViewMap(tuple(x.size), index))


# %% name="ex4-wrong-library" tags=["wrong"] kind="built-in" says="got a call of aten.roll"
def lower_roll(ctx, x, shifts, dims=()):
    from minicompile.errors import Unsupported

    raise Unsupported("the library knows how")


# %% [markdown]
# **Exercise 5 · A lowering for logsumexp** (hard, 5 points). `logsumexp(x, dims)` is `log(sum(exp(x)))` over
# dimensions, and must not overflow: `exp(1000)` is infinite, the result of rows around a thousand is
# not. Write `lower_logsumexp(ctx, x, dims, keepdim=False)`. The check registers it and computes the
# loss of a small GPT with it, which eager's operator must agree with; rows with infinities, too.

# %% [markdown]
# **You will need**
#
# - `reduce(ctx, kind, x, dims, keepdim)`: a lazy value; `kind` is `"max"` or `"sum"`. Its `dims` must be
#   sorted and not negative: `canonical_dims([-1], 2)` gives `[1]`.
# - `elementwise(ctx, formula, x, peak)`: as in exercise 3. A size of one meets any other.
# - `ops.exp`, `ops.sub`, `ops.log`, `ops.add`; `ops.abs`, `ops.eq`, `ops.where(condition, a, b)`.
# - `ctx.view(result, views.squeeze(result.size, dims))`: drops dimensions of size one.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Subtract the largest of the row before `exp`, add it after `log`.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# Infinity minus infinity is NaN: if the largest is infinite, subtract zero.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# Reduce with `keepdim` true, so that sizes meet, and drop the dimensions at the end if the caller asks.
#
# </details>


# %% name="ex5-answer" tags=["answer"]
def lower_logsumexp(ctx, x, dims, keepdim=False):
    """The lazy value log(sum(exp(x))) over dims, without overflow."""
    ### BEGIN SOLUTION
    dims = canonical_dims(dims, x.dim)

    def finite(ops, largest):
        infinite = ops.eq(ops.abs(largest), ops.constant(float("inf"), x.dtype))
        return ops.where(infinite, ops.constant(0.0, x.dtype), largest)

    peak = elementwise(ctx, finite, reduce(ctx, "max", x, dims, True))
    parts = elementwise(ctx, lambda ops, v, p: ops.exp(ops.sub(v, p)), x, peak)
    total = reduce(ctx, "sum", parts, dims, True)
    result = elementwise(ctx, lambda ops, t, p: ops.add(ops.log(t), p), total, peak)
    return result if keepdim else ctx.view(result, views.squeeze(result.size, dims))
    ### END SOLUTION


# %% name="ex5-check" tags=["nbval-check-output"]
check("ex5")


# %% name="ex5-wrong-naive" tags=["wrong"] kind="misconception" says="got float32[3] of [inf, inf, inf]"
def lower_logsumexp(ctx, x, dims, keepdim=False):
    dims = canonical_dims(dims, x.dim)
    parts = elementwise(ctx, lambda ops, v: ops.exp(v), x)
    total = reduce(ctx, "sum", parts, dims, keepdim)
    return elementwise(ctx, lambda ops, t: ops.log(t), total)


# %% name="ex5-wrong-infinite" tags=["wrong"] kind="visible-only" says="of [-inf, inf], got float32[2] of"
def lower_logsumexp(ctx, x, dims, keepdim=False):
    dims = canonical_dims(dims, x.dim)
    peak = reduce(ctx, "max", x, dims, True)
    parts = elementwise(ctx, lambda ops, v, p: ops.exp(ops.sub(v, p)), x, peak)
    total = reduce(ctx, "sum", parts, dims, True)
    result = elementwise(ctx, lambda ops, t, p: ops.add(ops.log(t), p), total, peak)
    return result if keepdim else ctx.view(result, views.squeeze(result.size, dims))


# %% name="ex5-wrong-library" tags=["wrong"] kind="built-in" says="got a call of aten.logsumexp"
def lower_logsumexp(ctx, x, dims, keepdim=False):
    from minicompile.errors import Unsupported

    raise Unsupported("the library knows how")


# %% [markdown]
# ## Go deeper
#
# - `minicompile/lowering/ir.py`: the grammar of the loops.
# - `minicompile/ops/handler.py`: what a loop can say.
# - `minicompile/lowering/lower.py`: from node to node.
# - `minicompile/lowering/value.py`, `minicompile/lowering/realize.py`: formula or buffer.
# - `minicompile/lowering/views.py`: all index maps. `minicompile/lowering/rules/`: all operators.
# - `torch/_inductor/graph.py`, `torch/_inductor/lowering.py`, `torch/_inductor/ir.py`: the same rooms.
#
# **Where you are.** The graph is gone; there are loops. The next lesson looks at what stands in their
# brackets.

# %% name="corridor"
from minicompile.lessons.pictures import corridor

corridor("lowering")
