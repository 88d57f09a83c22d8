# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 11 · How does index arithmetic become addresses?
#
# After this lesson you can
#
# - read what a loop does: its indices, its operations, the addresses that it walks through;
# - simplify an index with divisions in it, and say why that is allowed;
# - write a handler of your own that analyses any loop.
#
# Our example looks at a table column by column, as one row of numbers:

# %% name="setup" tags=["setup"]
try:
    import minicompile as mc
except ModuleNotFoundError:  # opened elsewhere, as on Colab
    get_ipython().run_line_magic(
        "pip", 'install -q "minicompile[notebook] @ git+https://github.com/your_name/minicompile"'
    )
    import minicompile as mc

import sympy
import torch

from minicompile.lessons.exercise import checks
from minicompile.lowering.ir import FormulaOps
from minicompile.shapes.expr import FloorDiv, ModularIndexing, bounds, simplify_index

check = checks("11")

# %% name="example"


def f(x):
    return x.t().reshape(24) + 1


torch.manual_seed(0)
x = torch.randn(4, 6)
trace = mc.trace(f, x)
body = trace.schedule.before[0].body
body

# %% [markdown]
# This is a *loop body*: the `inner_fn` of a buffer, run once with a handler that writes down what it
# was asked to do. At its head stand the loops; then each distinct index has a name; then one operation
# a line. The index of the load has a division and a remainder in it: element `p0` of the long row is
# in row `p0 % 4` and column `p0 // 4` of the table. Here are the addresses that it walks through:

# %% name="walk"
from minicompile.lessons.pictures import Walk

Walk(body)

# %% [markdown]
# Green is a *contiguous* step, to the next address. Orange is *strided*: a jump. Memory comes in lines
# of sixty-four bytes, so a contiguous walk uses all of each line that it fetches.
#
# A division for each element is slow, and a *vector* instruction, which handles several numbers at
# once, can't do it. Yet the kernel has none:

# %% name="kernel"
trace.kernels[0]

# %% [markdown]
# How did they vanish? In two steps, which this lesson follows: arithmetic on index expressions that
# knows how far each loop goes, and loops that are split, or *merged* into one, until the indices are simple.
#
# ## One body, many readings
#
# A loop body is data, but it came from a function, and a handler decides what that function does.
# The compiler has a dozen. Three of them on the same `inner_fn`: one that prints, one that records
# (what you saw above), one that computes with whole tensors.

# %% name="handlers"
from minicompile.debug.reference import run_reference
from minicompile.lowering.ir import evaluate_loops, loop_ranges
from minicompile.scheduling.body import LoopBody, Recorder

(buffer,) = trace.loops.operations
ranges, _ = loop_ranges(buffer.loops)

printed, _ = evaluate_loops(buffer.loops, FormulaOps(ranges))
recorder = Recorder(LoopBody("again", ranges, {}), {"x": torch.float32})
recorded, _ = evaluate_loops(buffer.loops, recorder)
(computed,) = run_reference(trace.loops, [x])
print("printed: ", printed)
print("recorded:", [value.op for value in recorder.body.values], "->", recorded.dtype)
print("computed:", torch.equal(computed, f(x)))

# %% [markdown]
# A handler inherits `Ops` and says what each operation means. A pointwise operation arrives as its name
# and its values. Here is one that measures how long the chain of operations behind a value is:

# %% name="depth"


class Depth(FormulaOps):
    """The value of an expression is how many operations it takes one after the other."""

    def load(self, buffer, index):
        return 0

    def constant(self, value, dtype):
        return 0

    def pointwise(self, name, *values):
        return 1 + max(values)


deep = mc.trace(lambda x: torch.relu(x * 2 + 1) * x, x).loops.operations[0]
print(deep)
print("depth:", evaluate_loops(deep.loops, Depth())[0])

# %% [markdown]
# ## Divisions that know their range
#
# Indices are expressions of sympy, a library for algebra, with two functions more: `FloorDiv(a, b)` is
# `a // b`, and `ModularIndexing(a, b, m)` is `(a // b) % m`: one *digit* of a number. A reshape takes a
# position apart into digits and puts other digits together.
#
# **Predict, then run.** `p0` is below six. What is `(4*p0 + p1) // 4` if `p1` is below four? And if
# `p1` is below five?

# %% name="simplify"
from minicompile.shapes.expr import loop_symbol

p0, p1 = loop_symbol("p0"), loop_symbol("p1")
for end in (4, 5):
    ranges = {p0: 6, p1: end}
    print(f"p1 < {end}:", simplify_index(FloorDiv(4 * p0 + p1, 4), ranges))

# %% [markdown]
# The rule: split off what the divisor divides, `4*p0`; what is left over, `p1`, vanishes if it is
# surely below four. "Surely" comes from the ranges: each loop variable is at least zero and below its
# extent, so every expression has bounds.

# %% name="bounds"
for expression in (p1, 4 * p0 + p1, p1 - p0):
    low, high = bounds(expression, {p0: 6, p1: 4})
    print(f"{expression!s:>10}: from {low} to {high}")

# %% [markdown]
# Watch a round trip. A table is cut into rows of another length, and back again: the index is full of
# digits, until the ranges are used. Each slide is one reshape more.

# %% name="round-trip"
from minicompile.lessons.pictures import slides

row, column = loop_symbol("row"), loop_symbol("column")
position = 6 * row + column  # in a table of 4 x 6
there = [FloorDiv(position, 8), ModularIndexing(position, 1, 8)]  # in one of 3 x 8
linear = 8 * there[0] + there[1]
known = {row: 4, column: 6}
simple = simplify_index(linear, known)
back = [FloorDiv(simple, 6), ModularIndexing(simple, 1, 6)]  # in 4 x 6 again
slides(
    "Out and back",
    ("position in memory", "two loops", position),
    ("digits in rows of 8", "", there),
    ("position again", "not simplified", linear),
    ("position, simplified", "the digits meet again", simple),
    ("digits in rows of 6", "not simplified", back),
    ("digits, simplified", "by the ranges", [simplify_index(digit, known) for digit in back]),
)

# %% [markdown]
# **Break it.** All of this rests on one question: does an expression stay below a limit? A rule that
# always says yes makes every index simple, and wrong. (The example begins at element one, so that its
# loop can't be split: the divisions are really there.)

# %% name="break-it"
from unittest import mock

from minicompile.shapes import expr


def shifted(x):
    return x.t().reshape(24)[1:] + 1


honest = mc.trace(shifted, x).kernels[0]
with mock.patch.object(expr, "_fits", lambda *anything: True), mc.fresh_cache():
    mc.reset()
    wrong_kernel = mc.trace(shifted, x).kernels[0]
    wrong = mc.compile(shifted)(x)
mc.reset()
print(honest)
print(wrong_kernel)
print("equal to eager:", torch.equal(wrong, shifted(x)))
print("the same number everywhere:", torch.equal(wrong, wrong[:1].expand(23)))

# %% [markdown]
# ## Loops are split and merged
#
# In our example no range helps: `p0 // 4` with `p0` below twenty-four is what it is. But the loop can
# be split in two, `p0 = 4*x0 + x1`. Then the division has an answer. The body before and after:

# %% name="split"
print(body)
print(trace.schedule.kernels[0].bodies[0])

# %% [markdown]
# The other way round, two loops merge into one if no index can tell the difference: everywhere the
# outer loop's stride is the inner one's times its extent. One long loop has less overhead and fills
# vectors better.
#
# **Predict, then run.** Three loops over `[2, 3, 4]`. How many are left in each kernel?

# %% name="merge"
t3 = torch.randn(2, 3, 4)
bias = torch.randn(3, 1)
looks = {
    "x + 1": lambda x: x + 1,
    "x.transpose(0, 1) + 1": lambda x: x.transpose(0, 1) + 1,
    "x + bias": lambda x: x + bias,
    "x.transpose(0, 1).contiguous()": lambda x: x.transpose(0, 1).contiguous(),
}
for text, look in looks.items():
    print(f"{text:<32}", mc.trace(look, t3).schedule.kernels[0].ranges)

# %% [markdown]
# The transpose alone changed nothing: the result may lie in memory as its operand does. With
# `contiguous()` it must lie in another order; then two strides disagree, and the loops stay.
#
# ## Which loop is innermost?
#
# The last loop runs fastest, and a CPU runs eight or sixteen of its rounds in one vector
# instruction. It wants loads whose address moves by one (a vector load) or not at all (one number for
# all). So the step of each access along the innermost loop decides:

# %% name="innermost"
both = mc.trace(lambda x, y: x + y.t(), torch.randn(6, 4), torch.randn(4, 6))
kernel = both.schedule.kernels[0]
Walk(kernel.bodies[0])

# %% [markdown]
# Whatever the order, one of the loads jumps: a transpose has no good loop order.
# The compiler counts, and lets the loop be innermost that most accesses walk with step one, writes
# before reads.
#
# ## How many bits has an address?
#
# Indices are 64-bit integers on a CPU. On a GPU, 32 bits save registers and time; and where an index
# is a value (`arange`, a mask), two 32-bit integers take the room of one. Bounds decide again, never
# hope. **Predict, then run:** the next cell takes 32 bits for granted.

# %% name="overflow"
from minicompile.codegen import legalize


def far(x):
    return x + torch.arange(0, 6 * 10**9, 10**9)


zeros = torch.zeros(6, dtype=torch.int64)
with mock.patch.object(legalize, "index_dtype", lambda *anything: torch.int32), mc.fresh_cache():
    mc.reset()
    print("32 bits:", mc.compile(far)(zeros).tolist())
mc.reset()
print("honest: ", mc.compile(far)(zeros).tolist())

# %% [markdown]
# Three times a thousand millions is above two to the power of thirty-one, and wraps around.
#
# ## One block of the model
#
# All index expressions of a `Block`: how many buffers are read with a division before the loops are
# split and merged, and how many in the kernels? And how many loops do they have?

# %% name="block"
from minicompile.lessons.model import Block, GPTConfig
from minicompile.scheduling.body import iterate_indices

block = Block(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16))


def folded(h):
    """The block, on an input whose heads lie in another order."""
    b, n, w = h.shape
    return block(h.reshape(b, n, 2, w // 2).transpose(2, 3).reshape(b, n, w))


with torch.no_grad():
    schedule = mc.trace(folded, torch.randn(2, 16, 32)).schedule
before = [node.body for node in schedule.before if hasattr(node, "body")]
after = [body for kernel in schedule.kernels for body in kernel.bodies]
for name, bodies in (("before", before), ("after", after)):
    indices = [index for body in bodies for index in iterate_indices(body)]
    divided = sum(index.has(FloorDiv, ModularIndexing) for index in indices)
    loops = sum(len(body.all_ranges) for body in bodies)
    print(f"{name}: {len(indices)} indices, {divided} with divisions, {loops} loops")

# %% name="block-body" tags=["varies"]
schedule.kernels[0]

# %% [markdown]
# > **In torch.compile.** The same words: `FloorDiv`, `ModularIndexing`, `simplify_with_ranges`,
# > `_simplify_loops`, live below. TorchInductor's `LoopBody` is recorded as an FX graph instead of a
# > list. Read `torch/_inductor/sizevars.py`, `torch/utils/_sympy/functions.py` and
# > `torch/_inductor/loop_body.py`. They also guard on symbolic sizes while simplifying; we only use what
# > is already known.

# %% name="torch-compile"
from torch._inductor.sizevars import SizeVarAllocator
from torch.utils._sympy.functions import FloorDiv as TheirFloorDiv
from torch.utils._sympy.functions import ModularIndexing as TheirModular

theirs = SizeVarAllocator()
i, j = sympy.symbols("i j", integer=True, nonnegative=True)
for expression, end in (
    (TheirFloorDiv(4 * i + j, 4), 4),
    (TheirModular(4 * i + j, 1, 4), 4),
    (TheirFloorDiv(4 * i + j, 4), 5),
):
    simple = theirs.simplify_with_ranges(expression, {i: 6, j: end})
    print(f"{expression} with j < {end}: {simple}")
merged_sizes, *_ = theirs._simplify_loops([i, j], [6, 4], [4 * i + j])
print("loops over [6, 4], read at 4*i + j, become loops over", merged_sizes)

# %% [markdown]
# ## Recap
#
# 1. A loop body is an `inner_fn` recorded by a handler: loops, named indices, operations.
# 2. Reshapes put divisions into indices, and known ranges take most of them out again.
# 3. Loops are split where an index divides, and merged where no index can tell.
# 4. The step along the innermost loop says which loads suit vectors.
# 5. Bounds also prove how many bits an index needs, and a wrong bound is a wrong number.

# %% [markdown]
# ## Exercises
#
# **Exercise 1 · Does it suit vectors?** (easy, 2 points). Write `steps(body)`: a dict from the name of each
# buffer that is loaded to the change of its address when the innermost loop (the last of
# `body.all_ranges`) moves on by one. None, where there is no such number: it differs from round to
# round, or a division hides it.

# %% [markdown]
# **You will need**
#
# - `body.all_ranges`: a dict from loops to extents, the innermost last. `list(body.all_ranges)` gives
#   `[p0]`.
# - `body.loads`: each has `buffer` and `index`. `[(load.buffer, load.index) for load in body.loads]` gives
#   `[('x', (p0 // 4) + 6*(p0 % 4))]`.
# - `index.subs(variable, variable + 1)`, `sympy.expand(expression)`. `result.has(variable)` and
#   `result.has(FloorDiv, ModularIndexing)` say what stands in it.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# How does the address change if the variable is replaced by itself plus one? Subtract, and expand.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# A result that still has the variable, or a division, is no number.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def steps(body):
    """The step of each loaded buffer's address along the innermost loop, or None."""
    ### BEGIN SOLUTION
    variable = list(body.all_ranges)[-1]
    found = {}
    for load in body.loads:
        step = sympy.expand(load.index.subs(variable, variable + 1) - load.index)
        unclear = step.has(variable) or step.has(FloorDiv, ModularIndexing)
        found[load.buffer] = None if unclear else int(step)
    return found
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-outermost" tags=["wrong"] kind="misconception" says="expected {'x': 1, 'y': 6}, got"
def steps(body):
    variable = next(iter(body.all_ranges))
    return {load.buffer: int(load.index.coeff(variable)) for load in body.loads}


# %% name="ex1-wrong-coefficient" tags=["wrong"] kind="visible-only" says="expected {'x': None}, got {'x': 0}"
def steps(body):
    variable = list(body.all_ranges)[-1]
    return {load.buffer: int(load.index.coeff(variable)) for load in body.loads}


# %% name="ex1-wrong-built-in" tags=["wrong"] kind="built-in" says="a use of coefficient_of"
def steps(body):
    from minicompile.shapes.expr import coefficient_of

    variable = list(body.all_ranges)[-1]
    return {load.buffer: int(coefficient_of(load.index, variable)) for load in body.loads}


# %% [markdown]
# **Exercise 2 · Thirty-two bits are not enough** (solid, 2 points). Write `overflows(x)` for a row `x` of any
# number of int64 values, at least two of them. A compiler that takes 32 bits for granted must give another
# result than eager; the honest one the same. The numbers in `x` are small: only an index may grow.

# %% [markdown]
# **You will need**
#
# - `torch.arange(start, end, step)`: an index expression, `start + step*p0`. `torch.arange(0, 6, 2)` gives
#   `tensor([0, 2, 4])`.
# - `x.numel()`: how many elements there are. 32 bits hold whole numbers below `2**31`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# `far` above is nearly right: it is for six elements. There must be one element for each of `x`, however
# many.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Already the last of two must not fit: choose the step so, and let the end follow from the number of
# elements.
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def overflows(x):
    """A function of x that 32-bit indices get wrong."""
    ### BEGIN SOLUTION
    step = 2**32
    return x + torch.arange(0, step * x.numel(), step)
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-limit" tags=["wrong"] kind="misconception" says="expected another result with 32 bits"
def overflows(x):
    step = (2**31 - 1) // (x.numel() - 1)
    return x + torch.arange(x.numel()) * 0 + torch.arange(0, step * x.numel(), step)


# %% name="ex2-wrong-six" tags=["wrong"] kind="visible-only" says="expected another result with 32 bits"
def overflows(x):
    return (
        x
        + torch.arange(x.numel(), dtype=torch.int64).mul(1)
        + torch.arange(0, 10**9 * x.numel(), 10**9)
    )


# %% name="ex2-wrong-patch" tags=["wrong"] kind="built-in" says="a use of int32"
def overflows(x):
    return (x + torch.arange(x.numel()) * 2**31).to(torch.int32).to(torch.int64)


# %% [markdown]
# **Exercise 3 · A handler that counts loads** (solid, 3 points). Write a class `CountLoads` that inherits
# `FormulaOps` and counts, in a dict `counts`, how many loads one element of a loop body makes of each buffer.
# What is loaded twice at the same index counts once: the compiler shares it. Loads under a mask count.

# %% [markdown]
# **You will need**
#
# - `FormulaOps`: its `load(buffer, index)` gives the value; in your class that is
#   `super().load(buffer, index)`. `Depth` above overrides it, too.
# - `simplify_index(index, self.ranges)`: equal for indices that are equal but look different.
# - `counts`: such as `{"x": 2, "w": 1}`. The check reads it after the body has been run.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Override `load`, and keep a set of what you have seen.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# What is the same load? The same buffer, at an index that simplifies to the same.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
class CountLoads(FormulaOps):
    """Counts distinct loads by buffer."""

    def __init__(self, ranges=None):
        super().__init__(ranges)
        ### BEGIN SOLUTION
        self.seen, self.counts = set(), {}
        ### END SOLUTION

    def load(self, buffer, index):
        """The value of a load, counted."""
        ### BEGIN SOLUTION
        key = buffer, simplify_index(index, self.ranges)
        if key not in self.seen:
            self.seen.add(key)
            self.counts[buffer] = self.counts.get(buffer, 0) + 1
        return super().load(buffer, index)
        ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-every" tags=["wrong"] kind="misconception" says="expected {'x': 1}, got {'x': 3}"
class CountLoads(FormulaOps):
    def __init__(self, ranges=None):
        super().__init__(ranges)
        self.counts = {}

    def load(self, buffer, index):
        self.counts[buffer] = self.counts.get(buffer, 0) + 1
        return super().load(buffer, index)


# %% name="ex3-wrong-looks" tags=["wrong"] kind="visible-only" says="expected {'x': 1}, got {'x': 2}"
class CountLoads(FormulaOps):
    def __init__(self, ranges=None):
        super().__init__(ranges)
        self.seen, self.counts = set(), {}

    def load(self, buffer, index):
        if (buffer, index) not in self.seen:
            self.seen.add((buffer, index))
            self.counts[buffer] = self.counts.get(buffer, 0) + 1
        return super().load(buffer, index)


# %% name="ex3-wrong-recorder" tags=["wrong"] kind="built-in" says="a use of Recorder"
from minicompile.scheduling.body import Recorder


class CountLoads(Recorder):
    pass


# %% [markdown]
# **Exercise 4 · Simplify a division** (solid, 4 points). Write `floor_div(base, divisor, ranges)`: an
# expression that equals `base // divisor` for all loop variables within their ranges, without a division
# where that can be seen. `base` is a sum of terms. The compiler's own rule is taken away and
# yours is used for every index, here and in a `Block`.

# %% [markdown]
# **You will need**
#
# - `sympy.Add.make_args(base)`: the terms. `sympy.Add.make_args(4 * p0 + p1)` gives `(p1, 4*p0)`.
# - `term.as_coeff_Mul()`: the number and the rest. `(4 * p0).as_coeff_Mul()` gives `(4, p0)`.
# - `bounds(rest, ranges)`: the least and the most, or None. `bounds(4 * p0 + p1, {p0: 6, p1: 4})` gives
#   `(0, 23)`.
# - `FloorDiv(rest, divisor)`: what stays a division. `divisor.is_Integer`: is it a number?

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Terms whose number the divisor divides go to the quotient, the others stay. A plain number has both a
# quotient and a remainder.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# What stays vanishes if its bounds lie between zero and the divisor minus one.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# A divisor that is no number: keep the whole division.
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def floor_div(base, divisor, ranges):
    """base // divisor, simpler."""
    ### BEGIN SOLUTION
    if not divisor.is_Integer:
        return FloorDiv(base, divisor)
    quotient, rest = sympy.Integer(0), sympy.Integer(0)
    for term in sympy.Add.make_args(base):
        number, variable = term.as_coeff_Mul()
        if term.is_Integer or number % divisor == 0:
            quotient += number // divisor * variable
            rest += number % divisor * variable
        else:
            rest += term
    found = bounds(rest, ranges)
    if found and all(b.is_Integer for b in found) and found[0] >= 0 and found[1] < divisor:
        return quotient
    return quotient + FloorDiv(rest, divisor)
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-drop" tags=["wrong"] kind="misconception" says="at p0=0, p1=4: expected 1, got 0"
def floor_div(base, divisor, ranges):
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(base)]
    return sympy.Add(*[number // divisor * rest for number, rest in terms])


# %% name="ex4-wrong-each-fits" tags=["wrong"] kind="visible-only" says="expected 1, got 0"
def floor_div(base, divisor, ranges):
    if not divisor.is_Integer:
        return FloorDiv(base, divisor)
    quotient, rest = sympy.Integer(0), sympy.Integer(0)
    for term in sympy.Add.make_args(base):
        number, variable = term.as_coeff_Mul()
        found = bounds(term, ranges)
        if term.is_Integer or number % divisor == 0:
            quotient += number // divisor * variable
            rest += number % divisor * variable
        elif not (
            found and all(b.is_Integer for b in found) and 0 <= found[0] <= found[1] < divisor
        ):
            rest += term
    return quotient + FloorDiv(rest, divisor)


# %% name="ex4-wrong-built-in" tags=["wrong"] kind="built-in" says="a use of simplify_index"
def floor_div(base, divisor, ranges):
    return simplify_index(FloorDiv(base, divisor), ranges)


# %% [markdown]
# **Exercise 5 · Merge two loops** (hard, 4 points). Write `mergeable(indices, sizes)`. `indices` lists, for
# each index of a loop nest, its strides: a dict from loops to numbers, without those that it doesn't use.
# `sizes` is a dict from loops to extents, outermost first. Give a pair `(outer, inner)` that no index can
# tell from one loop of both extents together, or None. The scheduler asks you until you say None.

# %% [markdown]
# **You will need**
#
# - `indices`: for `4*p0 + p1` it is `[{p0: 4, p1: 1}]`, with `sizes` as `{p0: 6, p1: 4}`. The answer is
#   `(p0, p1)`; with an extent of 5 for `p1` it is `None`.
# - `strides.get(loop, 0)`: an index that doesn't use a loop has stride 0.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# One loop `k` of both extents stands for `outer = k // n` and `inner = k % n`, where `n` is the inner
# extent. An index with strides `a` and `b` then is `a*outer + b*inner`. When is that `b*k`?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Any two loops may be a pair, neighbours or not; an index that uses neither agrees; one that uses just one
# does not.
#
# </details>


# %% name="ex5-answer" tags=["answer"]
def mergeable(indices, sizes):
    """Two loops, (outer, inner), that can be one; None if there are none."""
    ### BEGIN SOLUTION
    for outer in sizes:
        for inner in sizes:
            pairs = [(strides.get(outer, 0), strides.get(inner, 0)) for strides in indices]
            if outer != inner and all(a == b * sizes[inner] for a, b in pairs):
                return outer, inner
    return None
    ### END SOLUTION


# %% name="ex5-check" tags=["nbval-check-output"]
check("ex5")


# %% name="ex5-wrong-first-index" tags=["wrong"] kind="misconception" says="expected None, got (p"
def mergeable(indices, sizes):
    for outer in sizes:
        for inner in sizes:
            a, b = indices[-1].get(outer, 0), indices[-1].get(inner, 0)
            if outer != inner and a == b * sizes[inner]:
                return outer, inner
    return None


# %% name="ex5-wrong-neighbours" tags=["wrong"] kind="visible-only" says="expected a pair, got None"
def mergeable(indices, sizes):
    loops = list(sizes)
    for inner in loops[1:]:
        outer = loops[loops.index(inner) - 1]
        pairs = [(strides.get(outer, 0), strides.get(inner, 0)) for strides in indices]
        if all(a == b * sizes[inner] for a, b in pairs):
            return outer, inner
    return None


# %% name="ex5-wrong-built-in" tags=["wrong"] kind="built-in" says="a use of _mergeable"
def mergeable(indices, sizes):
    from minicompile.scheduling.nest import _mergeable

    return _mergeable(indices)


# %% [markdown]
# ## Go deeper
#
# - `minicompile/shapes/expr.py`: index expressions, bounds, simplification.
# - `minicompile/scheduling/body.py`: the loop body and the handler that records it.
# - `minicompile/scheduling/nest.py`: strides, splitting, merging, the order of loops.
# - `minicompile/debug/reference.py`: a handler that computes.
# - `torch/_inductor/sizevars.py`, `torch/_inductor/loop_body.py`, `torch/_inductor/ops_handler.py`.
#
# **Where you are.** Still at the loops, on the way to the scheduler, which asks what two of them share.

# %% name="corridor"
from minicompile.lessons.pictures import corridor

corridor("lowering", "scheduling")
