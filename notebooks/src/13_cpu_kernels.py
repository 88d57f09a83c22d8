# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 13 · What does good CPU code look like?
#
# The scheduler has decided which loops share a kernel. Now somebody must write that kernel, for a
# processor that computes several numbers at once and has small fast caches. After this lesson you can
#
# - read a kernel plan, its C++ kernel and the instructions made of it, side by side,
# - say why a loop is computed sixteen elements at a time, or why it is not,
# - explain why a sum, a maximum and a transpose each need a trick of their own.
#
# Our example scales, shifts and clips a small table of numbers.

# %% name="setup" tags=["setup"]
try:
    import minicompile as mc
except ModuleNotFoundError:  # opened elsewhere, as on Colab
    get_ipython().run_line_magic(
        "pip", 'install -q "minicompile[notebook] @ git+https://github.com/your_name/minicompile"'
    )
    import minicompile as mc

import torch

from minicompile.codegen.plan import plan_rule
from minicompile.lessons.assembly import cpp_assembly, explore_assembly
from minicompile.lessons.cache import lines_fetched
from minicompile.lessons.exercise import checks
from minicompile.plugins.transposed_tiles.choose import transposed

check = checks("13")

# %% name="example"


def f(x, scale):
    return torch.relu(x * scale + 1)


torch.manual_seed(0)
x, scale = torch.randn(8, 256), torch.randn(256)
trace = mc.trace(f, x, scale)
explore_assembly(trace)

# %% [markdown]
# From left to right: your line, the C++ kernel, and *assembly*, the text form of what the processor
# executes: one instruction a line. Point at a line of the kernel and its instructions light up.
# Here is the same once more, with every instruction lit that computes several numbers at once.

# %% name="lit"
assembly = cpp_assembly(trace.kernels[0])
assembly

# %% [markdown]
# A *register* is a place for a number inside the processor. A *vector* register holds several of them
# side by side, and one instruction computes all: this is called *SIMD*, single instruction, multiple
# data. Each place in the register is a *lane*. How many floats fit depends on your processor; the
# cell counts them in the kernel above.

# %% name="lanes"
print("instructions on whole vectors:", assembly.counts()["packed"])
print("instructions on single floats:", assembly.counts()["scalar"])
print("floats in the widest vector:  ", assembly.widest // 4)

# %% [markdown]
# That is the answer in short. Good CPU code reads memory in order, computes full vectors, keeps
# what it needs in registers, and shares the rows among threads only if there are enough of them.
#
# ## First a plan, then text
#
# Before a line is printed, all of this is settled in a *kernel plan*: which loop is innermost and
# computed in vectors, how wide, what is kept in scratch memory, whether threads share the work.

# %% name="plan"
print(trace.plans[0])

# %% [markdown]
# `not parallel loop` is a rejected alternative with its reason: so little work isn't worth waking a
# thread. A plan starts with the facts; each decision after that is a step: a rule of the registry
# `plan_rule`, in order. The plan lists the steps that set something, each with its reason. Rules for
# C++ begin with `cpp:`.

# %% name="rules"
for key, rule in plan_rule.items():
    print(f"{key:22} {rule.__doc__.splitlines()[0]}")

# %% [markdown]
# A rule is a function that edits the plan. So we can overrule the *vector width*, the number of
# elements that the innermost loop takes at a time. `mc.scoped()` forgets our rule afterwards.
#
# **Predict, then run.** With vectors a quarter as wide, are there four times as many instructions?

# %% name="widths"
from minicompile.lessons.pictures import corridor, slides


def narrowed(width, flags=()):
    mc.reset()
    with mc.scoped():

        @plan_rule("cpp:narrow")
        def narrow(plan, options):
            plan.vector_width = width

        return cpp_assembly(mc.trace(f, x, scale).kernels[0], flags)


shown = [("kernel plan", assembly), ("4 lanes", narrowed(4))]
shown += [("1 lane", narrowed(1, ["-fno-tree-vectorize"]))]
for title, found in shown:
    counts = found.counts()
    print(f"{title:12} {counts['packed']} on vectors of up to {found.widest} bytes,", end=" ")
    print(f"{counts['scalar']} on single floats")

# %% name="widths-picture"
slides(
    "One kernel, three widths",
    *((title, f"vectors of {found.widest} bytes", found) for title, found in shown),
)

# %% [markdown]
# About as many instructions are written, but the loop goes round more often, so many more are
# executed. (For one float at a time the compiler had to be told to leave loops alone: on simple
# loops it finds vectors by itself. The line `#pragma omp simd` is our word that it may.)
#
# ## A sum can't simply be made a vector
#
# Adding up a row looks as simple. But each addition needs the one before it: a chain. To use lanes,
# the numbers must be added in another order, and for floats the order matters:

# %% name="order-matters"
big, one = torch.tensor(1e8), torch.tensor(1.0)
print("(big + one) - big =", ((big + one) - big).item())
print("(big - big) + one =", ((big - big) + one).item())

# %% [markdown]
# So a C compiler must keep the order that we wrote. Here is the obvious sum, put in the place of
# the function that our kernels call. It has one *accumulator*, the variable that collects the
# result. The cell counts additions on whole vectors, for this sum and for ours.

# %% name="one-accumulator"
from minicompile.codegen.helpers import HEADERS

obvious = """
static inline float mc_row_sum(const float* x, int64_t n) {
    float total = 0;
    for (int64_t i = 0; i < n; i++) total += x[i];
    return total;
}
"""


def row_sum(x):
    return x.sum(-1)


rows = torch.randn(8, 1000)
kernel = mc.trace(row_sum, rows).kernels[0]
print(kernel)
for name, found in {
    "one accumulator": cpp_assembly(kernel, prelude=HEADERS + obvious),
    "ours": cpp_assembly(kernel),
}.items():
    counts = found.counts("add")
    print(f"{name:16} additions of vectors: {counts['packed']}, of floats: {counts['scalar']}")

# %% [markdown]
# Ours has many accumulators, one for each lane of several registers, and adds those up at the end:
# another order, chosen once by us and the same on every machine. What is left over, when a row is
# no multiple of the lanes, is a *tail* of single elements. More accumulators are also more exact,
# since none of them grows large; and the lanes of a long row are doubles, to which four floats are
# added at a time. One tenth, a million times:

# %% name="exactness"
tenths = torch.full((1, 1_000_000), 0.1)
chain = torch.tensor(0.0).numpy()
for value in tenths[0].numpy():
    chain = chain + value
exact = tenths.double().sum().item()
print(f"one after the other: off by {abs(float(chain) - exact) / exact:.1e} of the result")
lanes_error = abs(mc.compile(row_sum)(tenths).item() - exact) / exact
print("in lanes of doubles: off by less than 1e-6 of the result:", lanes_error < 1e-6)

# %% [markdown]
# **Break it.** There is a switch that lets the compiler reorder by itself: `-ffast-math`. It is
# much in use. It also promises that no number is ever NaN, so the test for NaN may go.
# **Predict, then run:** what does a function that replaces NaN by zero give?

# %% name="break-it"


def without_nan(x):
    return torch.where(torch.isnan(x), 0.0, x)


with_nan = torch.tensor([1.0, float("nan"), 3.0, 4.0] * 4)
fast = mc.compile(without_nan, options={"cpp_flags": ("-ffast-math",)})
print("as it is:         ", mc.compile(without_nan)(with_nan)[:4].tolist())
print("with -ffast-math: ", fast(with_nan)[:4].tolist())

# %% [markdown]
# A wrong number, from a flag. Our flags change neither NaN nor the order of additions; only this
# one call had the switch. (Here you see the reason for the two comparisons in a maximum, too: it
# must take the larger number, and must take NaN, which is larger than nothing.)

# %% name="nan-in-max"


def column_max(x):
    return x.amax(0)


print(next(line for line in mc.trace(column_max, x).kernels[0].text.splitlines() if "!=" in line))

# %% [markdown]
# ## Along the row, or across the rows?
#
# That maximum was over columns, and its kernel needs no trick: neighbouring columns lie side by
# side, so each lane has a column of its own and a chain of its own. The plan looks at which loop
# steps through memory by one element, and calls it the vector axis: `r`, the *reduction* loop, or
# `x`, a loop over results. **Predict, then run:** the axis of the same sum over a transposed input?

# %% name="axes"
along, across = mc.trace(row_sum, torch.randn(64, 64)), mc.trace(row_sum, torch.randn(64, 64).t())
for name, found in (("rows in memory", along), ("columns in memory", across)):
    [plan] = found.plans
    print(
        f"{name:18} vector axis {plan.vector_axis}; not {plan.alternatives[0].description}: ",
        end="",
    )
    print(plan.alternatives[0].reason)

# %% name="axes-picture"
slides(
    "The same sum",
    ("along the row", "a helper with many lanes", along.kernels[0]),
    ("across the rows", "a tile of columns, one accumulator for each", across.kernels[0]),
)

# %% [markdown]
# The second kernel holds a *tile* of accumulators: a piece of the loop that is small enough to stay
# close. Three things keep a loop out of vectors: a *scan* (a running sum: each result needs the one
# before), a search for a position along a row of doubles, and a scatter to places known only at run
# time. (In a row of floats a helper finds in vectors how large the best is, then where it stands.)
#
# ## A transpose: memory comes in lines
#
# Memory is fetched into the cache by *cache lines* of 64 bytes, sixteen floats. Reading along a row
# uses all sixteen; reading down a column uses one and pays for the line. `lines_fetched` walks a
# plan's loops with a toy cache and counts.

# %% name="lines"


def added_turned(a, b):
    return a + b.t()


a, b = torch.randn(64, 1024), torch.randn(1024, 64)


def in_squares(side):
    """The plan and kernel with squares of this side; 0 for none."""
    mc.reset()
    with mc.scoped():

        @plan_rule("cpp:squares")
        def tiles(plan, options):
            if side:
                plan.tiles, plan.reduction = dict.fromkeys(map(str, plan.ranges), side), "squares"

        return mc.trace(added_turned, a, b).kernels[0]


least = 3 * a.numel() // 16
print("two tensors read, one written: at least", least, "lines")
print("row by row:                   ", lines_fetched(in_squares(0).plan), "lines")

# %% [markdown]
# Every element of `b` fetches a line of its own, which is gone before its neighbour is needed. The
# cure is a square: copy a square of `b` into scratch memory, turned, so that whole lines are used;
# then compute that square. **Predict, then run:** which side is best, and why is large bad again?

# %% name="squares"
for side in (4, 8, 16, 32, 64, 128):
    print(f"side {side:4}: {lines_fetched(in_squares(side).plan):7} lines")
chosen = mc.trace(added_turned, a, b).kernels[0]
print("the rule's own choice:", chosen.plan.tiles, lines_fetched(chosen.plan), "lines")

# %% [markdown]
# Small squares use only part of each line; in large ones the scratch square itself is crowded out. The
# built-in rule's square is a little too large for the toy cache: in exercise 5 you do better.

# %% name="squares-picture"
slides(
    "a + b.t()",
    ("row by row", "b is read down its columns", in_squares(0)),
    ("in squares", "a square is turned by shuffles between registers", chosen),
)

# %% [markdown]
# ## Threads, and the roof
#
# The outer loop can be shared among threads: `#pragma omp parallel for`. Waking them takes
# microseconds, so the rule `cpp:parallel` first estimates the work. The same function on larger and
# larger inputs:

# %% name="threads"
for rows in (8, 64, 512):
    plan = mc.trace(f, torch.randn(rows, 256), scale).plans[0]
    why = plan.alternatives[-1].reason if not plan.parallel else "enough to do"
    print(f"{rows:4} rows: {'all threads' if plan.parallel else 'one thread '}  ({why})")

# %% [markdown]
# How fast can a kernel be at all? It must move its bytes and do its operations; the slower of the
# two bounds it. *Arithmetic intensity* is operations for each byte. Drawn against speed, the limits
# form a *roofline*: a slope where memory is the limit, a flat roof where arithmetic is. Here is one
# block of the lesson model under the roof of a made-up machine (`trace.roofline()` measures yours).

# %% name="roofline"
from minicompile.debug.roofline import DeviceSpec
from minicompile.lessons.model import GPT, GPTConfig

block = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)).blocks[0].eval()
h = torch.randn(2, 16, 32)
with torch.no_grad():
    block_trace = mc.trace(block, h)
block_trace.roofline(DeviceSpec("a machine", 40e9, 400e9))

# %% [markdown]
# Nearly every dot sits on the slope: these kernels wait for memory. That is why fusing them paid,
# and why vectors alone would not. Point at a dot. And here is what was decided for each of them:

# %% name="block-plans"
for plan in block_trace.plans:
    vectors, tiles = f"{plan.vector_axis} x {plan.vector_width}", plan.tiles or "none"
    kept = ", ".join(v.op for v in plan.body.values if v in plan.stashed) or "nothing"
    print(f"{plan.name[10:44]:34} along {vectors}, tiles {tiles}, keeps {kept}")

# %% [markdown]
# "Keeps" is the *scratch row*: softmax computes each `exp` once and reads it back when it divides.
# If rows are too long for that, it is computed again. See it in the longest kernel of the block:

# %% name="softmax-kernel"
softmax = next(kernel for kernel in block_trace.kernels if "masked_fill" in kernel.name)
softmax

# %% [markdown]
# Do you know better than the rules? `mc.what_if` compiles with your wishes and times both. (Times
# differ between machines, so nothing is kept here: run it. In a terminal, the command
# `minicompile bench` times twelve such patterns beside eager and torch.compile.)

# %% name="what-if" tags=["varies"]
mc.what_if(added_turned, a, b)

# %% [markdown]
# ## Random numbers without a state
#
# One more chain: eager's random generator has a state, and each number changes it. So dropout is a
# library call that fills a tensor, one number after the other. *Philox* is a generator without a
# state: a number is a function of a seed and of its own place, so any lane computes any number.
# `fallback_random=False` asks for it. **Predict, then run:** what is left of the library call?

# %% name="dropout"
from minicompile.ops import philox


def dropped(x):
    return torch.nn.functional.dropout(torch.relu(x), 0.25) * 2


in_kernel = mc.compile(dropped, options={"fallback_random": False})
apart, fused = mc.trace(mc.compile(dropped), x), mc.trace(in_kernel, x)
for name, found in (("eager's numbers", apart), ("in the kernel", fused)):
    calls = ", ".join(str(call.op) for call in found.loops.externs)
    print(f"{name:16} kernels: {len(found.kernels)}, library calls: {calls}")

# %% [markdown]
# What is left draws one seed for each random operator of the graph, at each call. So after
# `torch.manual_seed` you get the same numbers again, but other ones than eager's. Here they are
# computed once more, in torch operators, from that seed and the places:

# %% name="same-numbers"
torch.manual_seed(1)
got = in_kernel(x)
torch.manual_seed(1)
[seed] = torch.randint(-(2**63), 2**63 - 1, (1,))
kept = philox.rand(seed, torch.arange(x.numel()).view(x.shape)) < 0.75
print(
    "kept:",
    kept.float().mean().item(),
    "of all; the same ones:",
    torch.equal(got != 0, kept & (x > 0)),
)

# %% name="dropout-picture"
slides(
    "Dropout",
    ("numbers from eager's generator", "they go through memory", apart.kernels[-1].text),
    ("numbers from a seed", "mc_rand computes them where they are used", fused.kernels[0].text),
    ("mc_rand", "ten rounds of two multiplications each", fused.kernels[0].prelude),
)

# %% [markdown]
# The backward pass needs the same numbers. On a CPU it is quicker to read a byte of mask for each
# element, so the partition keeps that. But with no memory to spare it keeps the seeds and computes
# the numbers again:

# %% name="dropout-saves"
for budget in (None, 0.0):
    options = {"fallback_random": False, "memory_budget": budget}
    partition = mc.trace(
        mc.compile(dropped, options=options), x.clone().requires_grad_()
    ).aot.partition
    saved = ", ".join(f"{value.name} ({value.bytes} bytes)" for value in partition.saved)
    print(f"memory budget {budget}: {saved}")

# %% [markdown]
# > **In torch.compile.** Inductor writes C++ too, but doesn't trust the compiler to find vectors: it
# > prints them, as `at::vec::Vectorized` objects. The idea of a plan is spread over
# > `torch/_inductor/codegen/cpp.py` (`CppKernel`, `CppVecKernel`, `LoopNest`); transposed loads are
# > `CppTile2DKernel`. We leave vectors to `omp simd`, so our printer is short.
# > Below, live and without compiling it, the vector lines of their kernel for `f`.

# %% name="torch-compile"
from torch._functorch import config as aot_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import get_code

# nothing is built, and nothing kept in their cache
with inductor_config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
    code = "".join(get_code(torch.compile(f), x, scale))
their_lines = [line.strip() for line in code.splitlines()]
for line in dict.fromkeys(their_lines):
    if "Vectorized" in line or line.startswith("for("):
        print(line)

# %% [markdown]
# ## Recap
#
# 1. A kernel plan settles loops, vector axis, tiles and threads before any text is printed.
# 2. A loop is computed in vectors if its elements lie side by side and no iteration needs another.
# 3. A sum needs many accumulators, because the order of float additions is part of the answer.
# 4. A maximum must keep NaN, so it needs a second comparison, and flags that promise no NaN are out.
# 5. Memory comes in cache lines: tiles make sure that each line is used up while it is near.

# %% [markdown]
# ## Exercises
#
# **Exercise 1 · What stops the vectors?** (easy, 2 points). `stops_vectors(plan)` gives the value of
# `plan.body.values` that keeps the kernel's inner loop out of vectors, or `None` if nothing does. A
# value has `op` (`"scan"`, `"reduction"`, `"store"`, ...) and `kind` (`"sum"`, `"argmax"`, `"argmin"`, ...).
# No plan of this exercise has a scatter, and its searches look at doubles.

# %% [markdown]
# **You will need**
#
# - `plan.vector_axis`: `"r"` if vectors would run along the row, `"x"` if across.
#   `(along.plans[0].vector_axis, across.plans[0].vector_axis)` gives `('r', 'x')`.
# - `plan.body.values`: `[(value.op, value.kind) for value in along.plans[0].body.values]` gives
#   `[('load', ''), ('reduction', 'sum'), ('store', 'store')]`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# A scan and a search stop vectors only if these would run along the row.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Print the plans and kernels of `x.argmax(-1)` and `x.argmax(0)` for doubles.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def stops_vectors(plan):
    """The value that keeps this plan's inner loop out of vectors, or None."""
    ### BEGIN SOLUTION
    if plan.vector_axis != "r":
        return None
    for value in plan.body.values:
        if value.op == "scan" or value.kind in ("argmax", "argmin"):
            return value
    return None
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-reductions" tags=["wrong"] kind="misconception" says="got 'reduction sum'"
def stops_vectors(plan):
    return next((v for v in plan.body.values if v.op in ("reduction", "scan")), None)


# %% name="ex1-wrong-axis" tags=["wrong"] kind="visible-only" says="got 'reduction argmax'"
def stops_vectors(plan):
    for value in plan.body.values:
        if value.op == "scan" or value.kind == "argmax":
            return value
    return None


# %% name="ex1-wrong-printer" tags=["wrong"] kind="built-in" says="got a use of LoopPrinter"
def stops_vectors(plan):
    from minicompile.codegen.cpp_loops import LoopPrinter

    return LoopPrinter(plan)._simd(plan.body.values, None, True) or None


# %% [markdown]
# **Exercise 2 · Turn the vectors** (solid, 2 points). `columns_first(rows, length)` gives a float tensor of
# that shape for which the kernel of `x.sum(-1)` has its vectors along `x`, not along `r`.

# %% [markdown]
# **You will need**
#
# - `tensor.stride()`: how far it is in memory to the next row, and to the next column.
#   `(torch.randn(3, 4).stride(), torch.randn(3, 4).t().stride())` gives `((4, 1), (1, 4))`.
# - `mc.trace(row_sum, columns_first(64, 64)).plans[0].vector_axis`: what you want is `"x"`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# The shape says nothing about where elements lie; strides do. Which neighbours must lie side by side?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Make the tensor that is turned, and turn it.
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def columns_first(rows, length):
    """A (rows, length) tensor whose columns lie side by side in memory."""
    ### BEGIN SOLUTION
    return torch.randn(length, rows).t()
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-rows" tags=["wrong"] kind="misconception" says="expected 'x', got 'r'"
def columns_first(rows, length):
    return torch.randn(length, rows).t().contiguous()


# %% name="ex2-wrong-square" tags=["wrong"] kind="visible-only" says="expected (16, 200), got (64, 48)"
def columns_first(rows, length):
    return torch.randn(48, 64).t()


# %% name="ex2-wrong-rule" tags=["wrong"] kind="built-in" says="got a use of plan_rule"
def columns_first(rows, length):
    @plan_rule("cpp:mine")
    def mine(plan, options):
        plan.vector_axis = "x"

    return torch.randn(rows, length)


# %% [markdown]
# **Exercise 3 · A maximum that keeps NaN** (solid, 3 points). In a kernel, `best` is the largest number so
# far and `other` the next one. `moves_on(other, best)` gives the C condition (text) under which
# `other` replaces `best`. The compiler's own is taken away: kernels of `amax` use yours. As in
# PyTorch, the maximum of numbers among which there is a NaN is NaN.

# %% [markdown]
# **You will need**
#
# - `moves_on("v1", "v0")` without a thought of NaN would be `"v1 > v0"`: the names are put into the text by
#   an f-string.
# - In C, a comparison gives 0 or 1; `|` joins two of them without a branch.
# - Every comparison with NaN is false, but for `!=`: `(float("nan") > 1.0, float("nan") != float("nan"))`
#   gives `(False, True)`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Two cases: the NaN comes now, or came before. Which of them does `>` already do right?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Only one number is not equal to itself.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def moves_on(other: str, best: str) -> str:
    """C condition: does `other` replace `best`?"""
    ### BEGIN SOLUTION
    return f"({other} > {best}) | ({other} != {other})"
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-plain" tags=["wrong"] kind="misconception" says="expected float32[32] of [nan"
def moves_on(other, best):
    return f"!({best} >= {other}) & ({other} == {other})"


# %% name="ex3-wrong-not-less" tags=["wrong"] kind="visible-only" says="nan, ...], got float32[32] of [2"
def moves_on(other, best):
    return f"!({other} <= {best})"


# %% name="ex3-wrong-borrowed" tags=["wrong"] kind="built-in" says="got a use of ValuePrinter"
def moves_on(other, best):
    from minicompile.codegen.cpp_values import ValuePrinter

    return ValuePrinter.better(None, None, other, best)


# %% [markdown]
# **Exercise 4 · A sum in lanes** (hard, 4 points). `row_sum_in_c()` gives the text of a C function
# `static inline float mc_row_sum(const float* x, int64_t n)`, the sum of `n` floats, any `n`. It takes
# the place of the built-in one in every kernel. Its instructions must add whole vectors: keep
# sixteen sums in an array, and say `#pragma omp simd` before the loop over them.

# %% [markdown]
# **You will need**
#
# - `obvious` above: the same function with one sum, as text.
# - `float lanes[16] = {0};` is an array of zeros in C; `lanes[j] += x[i + j];` adds to one of them.
# - `#pragma omp simd` on the line before a loop: its rounds may run as one vector.
# - `cpp_assembly(kernel, prelude=HEADERS + text).counts("add")`: how many additions are on vectors
#   (`packed`), how many on floats (`scalar`).

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Three parts: blocks of sixteen elements (with a loop over lanes inside), the sixteen sums, the tail.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Declare `int64_t i = 0;` before the blocks, so that the tail goes on where they stop:
# `for (; i + 16 <= n; i += 16)`.
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def row_sum_in_c() -> str:
    """C text of mc_row_sum."""
    ### BEGIN SOLUTION
    return """
static inline float mc_row_sum(const float* x, int64_t n) {
    float lanes[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        #pragma omp simd
        for (int j = 0; j < 16; j++) lanes[j] += x[i + j];
    }
    float total = 0;
    for (int j = 0; j < 16; j++) total += lanes[j];
    for (; i < n; i++) total += x[i];
    return total;
}
"""
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-chain" tags=["wrong"] kind="misconception" says="expected additions of whole vectors"
def row_sum_in_c():
    return """
static inline float mc_row_sum(const float* x, int64_t n) {
    float total = 0;
    for (int64_t i = 0; i < n; i += 1) total = total + x[i];
    return total;
}
"""


# %% name="ex4-wrong-tail" tags=["wrong"] kind="visible-only" says="the sums of 4 rows of 15: expected"
def row_sum_in_c():
    return """
static inline float mc_row_sum(const float* x, int64_t n) {
    float lanes[16] = {0};
    for (int64_t i = 0; i + 16 <= n; i += 16) {
        #pragma omp simd
        for (int j = 0; j < 16; j++) lanes[j] += x[i + j];
    }
    float total = 0;
    for (int j = 0; j < 16; j++) total += lanes[j];
    return total;
}
"""


# %% name="ex4-wrong-block-sum" tags=["wrong"] kind="built-in" says="got a use of mc_block_sum"
def row_sum_in_c():
    return (
        "static inline float mc_row_sum(const float* x, int64_t n) { return mc_block_sum(x, n); }"
    )


# %% [markdown]
# **Exercise 5 · Tile a transpose** (hard, 4 points). `squares(plan)` decides for pointwise kernels: it
# gives `{}`, or the sides of the squares by loop, such as `{"x0": 8, "x1": 8}`. The compiler's rule is
# taken away. For `a + b.t()` at most 1.3 times the fewest possible cache lines may be fetched; a
# kernel that reads everything in order, or has a loop too short for lines, gets no squares.
# `transposed(load, inner, across)` says whether a load jumps along `inner` and steps along `across`.

# %% [markdown]
# **You will need**
#
# - `plan.ranges`: the loops and their sizes, the innermost last.
#   `{str(loop): size for loop, size in chosen.plan.ranges.items()}` gives `{'x0': 64, 'x1': 1024}`;
#   `plan.body.loads` are the loads.
# - `transposed(load, inner, across)`:
#   `[transposed(load, *reversed(chosen.plan.ranges)) for load in chosen.plan.body.loads]` gives
#   `[False, True]`, for `a` and `b`.
# - `lines_fetched(plan)`: the cache lines, as above.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# With what sides did the cell "squares" above fetch the fewest lines? Whole lines, and a square that fits
# in the cache.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Squares pay if some load is transposed for the innermost loop and one of the others; both must be long
# enough.
#
# </details>


# %% name="ex5-answer" tags=["answer"]
def squares(plan):
    """The sides of squares by loop variable, {} for none."""
    ### BEGIN SOLUTION
    loops = [loop for loop, size in plan.ranges.items() if size >= 16]
    if len(loops) < 2 or loops[-1] is not list(plan.ranges)[-1]:
        return {}
    inner = loops[-1]
    for across in loops[:-1]:
        if any(transposed(load, inner, across) for load in plan.body.loads):
            return {str(across): 32, str(inner): 32}
    return {}
    ### END SOLUTION


# %% name="ex5-check" tags=["nbval-check-output"]
check("ex5")


# %% name="ex5-wrong-small" tags=["wrong"] kind="misconception" says="cache lines fetched: expected at most"
def squares(plan):
    loops = [loop for loop, size in plan.ranges.items() if size >= 16]
    for across in loops[:-1]:
        if any(transposed(load, loops[-1], across) for load in plan.body.loads):
            return {str(across): 4, str(loops[-1]): 4}
    return {}


# %% name="ex5-wrong-always" tags=["wrong"] kind="misconception" says="a * a[0], [64, 1024]: expected {}, got"
def squares(plan):
    return dict.fromkeys(map(str, plan.ranges), 32) if len(plan.ranges) == 2 else {}


# %% name="ex5-wrong-this-size" tags=["wrong"] kind="visible-only" says="cache lines fetched: expected"
def squares(plan):
    loops, sizes = list(plan.ranges), list(plan.ranges.values())
    if sizes == [64, 1024] and any(transposed(v, loops[-1], loops[0]) for v in plan.body.loads):
        return {str(loop): 32 for loop in loops}
    return {}


# %% name="ex5-wrong-own-rule" tags=["wrong"] kind="built-in" says="got a use of sides"
def squares(plan):
    from minicompile.plugins.transposed_tiles.choose import sides

    return sides(plan)


# %% [markdown]
# **Exercise 6 · A round of Philox** (hard, 4 points). `one_round(ops, words, keys)` computes one of the ten
# rounds, in loop operations. `words` are four values and `keys` two, all int64 of which only the
# lower 32 bits count; it gives the four new words, from 0 to 0xFFFFFFFF. With a = words[0] times
# 0xD2511F53 and b = words[2] times 0xCD9E8D57 they are: upper half of b ^ words[1] ^ keys[0];
# lower half of b; upper half of a ^ words[3] ^ keys[1]; lower half of a. The lowering of random
# numbers is taken away: dropout in the lesson model draws with yours.

# %% [markdown]
# **You will need**
#
# - `ops.mul(a, b)`, `ops.bitwise_xor(a, b)`, `ops.bitwise_and(a, b)`, `ops.rshift(a, b)`: each takes two
#   values.
# - `ops.constant(number, torch.int64)`: a number as a value, such as
#   `ops.constant(0xFFFFFFFF, torch.int64)`, the mask of the lower half.
# - In Python's numbers, `(0x123456789 & 0xFFFFFFFF, 0x123456789 >> 32)` gives `(591751049, 1)`: the lower
#   and the upper half.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Write small functions for a number, the lower half and the upper half; then the four words are one line
# each.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# A product may set the highest bit: then int64 is negative, and a shift to the right fills in ones. Mask
# after the shift.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# `words` may have more than 32 bits set: take the lower half before you multiply.
#
# </details>


# %% name="ex6-answer" tags=["answer"]
def one_round(ops, words, keys):
    """The four words after one round of Philox4x32."""

    ### BEGIN SOLUTION
    def number(n):
        return ops.constant(n, torch.int64)

    def low(value):
        return ops.bitwise_and(value, number(0xFFFFFFFF))

    def high(value):
        return low(ops.rshift(value, number(32)))

    def mixed(product, word, key):
        return low(ops.bitwise_xor(ops.bitwise_xor(high(product), word), key))

    a = ops.mul(low(words[0]), number(0xD2511F53))
    b = ops.mul(low(words[2]), number(0xCD9E8D57))
    return mixed(b, words[1], keys[0]), low(b), mixed(a, words[3], keys[1]), low(a)
    ### END SOLUTION


# %% name="ex6-check" tags=["nbval-check-output"]
check("ex6")


# %% name="ex6-wrong-crossed" tags=["wrong"] kind="misconception" says="one_round of words [1, 2"
def one_round(ops, words, keys):
    def half(value, shift):
        moved = ops.rshift(value, ops.constant(shift, torch.int64))
        return ops.bitwise_and(moved, ops.constant(0xFFFFFFFF, torch.int64))

    a = ops.mul(words[0], ops.constant(0xD2511F53, torch.int64))
    b = ops.mul(words[2], ops.constant(0xCD9E8D57, torch.int64))
    first = ops.bitwise_xor(ops.bitwise_xor(half(a, 32), words[1]), keys[0])
    third = ops.bitwise_xor(ops.bitwise_xor(half(b, 32), words[3]), keys[1])
    return first, half(a, 0), third, half(b, 0)


# %% name="ex6-wrong-signs" tags=["wrong"] kind="misconception" says="one_round of words [1, 2"
def one_round(ops, words, keys):
    a = ops.mul(words[0], ops.constant(0xD2511F53, torch.int64))
    b = ops.mul(words[2], ops.constant(0xCD9E8D57, torch.int64))
    shift, mask = ops.constant(32, torch.int64), ops.constant(0xFFFFFFFF, torch.int64)
    first = ops.bitwise_xor(ops.bitwise_xor(ops.rshift(b, shift), words[1]), keys[0])
    third = ops.bitwise_xor(ops.bitwise_xor(ops.rshift(a, shift), words[3]), keys[1])
    return first, ops.bitwise_and(b, mask), third, ops.bitwise_and(a, mask)


# %% name="ex6-wrong-upper-bits" tags=["wrong"] kind="visible-only" says="one_round of words [-1, 7"
def one_round(ops, words, keys):
    def half(value, shift):
        moved = ops.rshift(value, ops.constant(shift, torch.int64))
        return ops.bitwise_and(moved, ops.constant(0xFFFFFFFF, torch.int64))

    a = ops.mul(words[0], ops.constant(0xD2511F53, torch.int64))
    b = ops.mul(words[2], ops.constant(0xCD9E8D57, torch.int64))
    first = ops.bitwise_xor(ops.bitwise_xor(half(b, 32), words[1]), keys[0])
    third = ops.bitwise_xor(ops.bitwise_xor(half(a, 32), words[3]), keys[1])
    return first, half(b, 0), third, half(a, 0)


# %% name="ex6-wrong-borrowed" tags=["wrong"] kind="built-in" says="got a use of philox"
def one_round(ops, words, keys):
    from minicompile.ops import philox

    return philox.words(keys[0], words[0])


# %% [markdown]
# ## Go deeper
#
# - `minicompile/codegen/plan.py`, `minicompile/codegen/cpp_rules.py`: the plan and its rules, on two pages.
# - `minicompile/codegen/cpp_loops.py`: the four shapes of a C kernel.
# - `minicompile/codegen/helpers.h`: lanes, squares, `exp`, Philox. Who draws the seeds:
#   `minicompile/plugins/random_kernels/seeds.py` (in torch: `torch/_inductor/fx_passes/replace_random.py`).
# - `torch/_inductor/codegen/cpp.py`: `CppVecKernel`, `CppTile2DKernel`, and the choice between them.
#
# **Where you are.** The loops have become C++. Lesson 14 writes the same loops for a GPU.

# %% name="corridor"
corridor("codegen")
