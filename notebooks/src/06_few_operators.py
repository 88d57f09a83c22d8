# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 06 · How many operators does a compiler really need?
#
# After this lesson you can
#
# - say what the operator levels Full ATen, Core ATen and Prims are for, and read a graph at each;
# - write an operator in terms of simpler ones, so that the compiler uses it;
# - tell a formula that is right on paper from one that is right in floating point.
#
# The example is the end of a small classifier, three calls of PyTorch's library:

# %% name="setup" tags=["setup"]
try:
    import minicompile as mc
except ModuleNotFoundError:  # opened elsewhere, as on Colab
    get_ipython().run_line_magic(
        "pip", 'install -q "minicompile[notebook] @ git+https://github.com/your_name/minicompile"'
    )
    import minicompile as mc

import torch

from minicompile.extension import decompose
from minicompile.lessons.exercise import checks

aten = torch.ops.aten
check = checks("06")

# %% name="example"
from torch.nn import functional as F

from minicompile.lessons.levels import fall


def f(x, y):
    h = F.gelu(x)
    h = F.layer_norm(h, [8])
    return F.cross_entropy(h, y)


torch.manual_seed(0)
x, y = torch.randn(4, 8), torch.tensor([1, 2, 3, 4])
trace = mc.trace(f, x, y)
fall(trace)

# %% [markdown]
# Each line falls from left to right. *Full ATen* is PyTorch's own operator library as the functional
# graph has it: a `gelu` is a `gelu`. *Core ATen* is a smaller set that PyTorch has agreed on. *Prims*
# are the simplest: one formula for one element, sums and other totals, views, and little else.
# Point at a coloured operator: it says its family.
#
# The step from one level to the next is a *decomposition*: an operator, written with simpler ones.

# %% [markdown]
# ## How many are there?
#
# A compiler that wanted to know every operator would have a lot to learn. PyTorch can be asked, and
# so can our registry of decompositions:

# %% name="how-many"
from collections import Counter

from minicompile.aot.decompositions.registry import decomposition

names = [n[6:] for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
overloads = [getattr(getattr(aten, name), overload or "default")
             for name, _, overload in (n.partition(".") for n in names)]  # fmt: skip
print("overloads in ATen:            ", len(names))
print("of which tagged as core:      ", sum(torch.Tag.core in op.tags for op in overloads))
print("minicompile's decompositions: ", dict(Counter(d.level for d in decomposition.values())))

# %% [markdown]
# Many of the overloads are those that write into an argument, which the last lesson made disappear.
#
# **Predict, then run.** Some library functions, trained, so each brings a backward operator too.
# How many different operators do their graphs hold at each level, all together? And how does that
# number grow with each function?

# %% name="predict-vocabulary"
functions = {
    "log_softmax": lambda x: F.log_softmax(x, -1), "layer_norm": lambda x: F.layer_norm(x, [8]),
    "gelu": F.gelu, "silu": F.silu, "elu": F.elu, "softplus": F.softplus, "hardswish": F.hardswish,
    "logsigmoid": F.logsigmoid, "mish": F.mish, "leaky_relu": F.leaky_relu,
    "huber": lambda x: F.huber_loss(x, x * 2), "hardsigmoid": F.hardsigmoid,
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x * 2), "selu": F.selu, "hardtanh": F.hardtanh,
}  # fmt: skip
found = {"full": set(), "core": set(), "prims": set()}
print("so far          full  core  prims")
for name, function in functions.items():
    traced = mc.trace(mc.compile(function, backend="aot_eager"), x.clone().requires_grad_())
    for level, graph in traced.aot.levels.items():
        found[level] |= {op for _, op in graph.calls}
    full, core, prims = (len(operators) for operators in found.values())
    print(f"+ {name:<12} {full:>5} {core:>5} {prims:>6}")

# %% [markdown]
# At first Prims need more operators: one function becomes several. But the parts are the same ones
# again and again. The left column keeps growing; the right one soon hardly does, and the next
# activation, whatever its name, will most likely add nothing there. Whatever comes after this room
# has to know only those:

# %% name="vocabulary"
print(sorted({op.overloadpacket.__name__ for op in found["prims"]}))

# %% [markdown]
# ## A decomposition is a Python function
#
# No new language is needed. A rule has the operator's signature and computes the same with other
# operators. The tracer of the last lessons runs it on fake tensors and records what it calls.

# %% name="rules"
import inspect

from minicompile.aot.decompositions import activations, losses

print(inspect.getsource(activations.gelu))
print(inspect.getsource(losses.softmax))

# %% [markdown]
# `to="prims"` says at which level the rule is applied. The operators that it calls may have rules
# themselves, so a rule can stay short. It may also decline a call by returning `NotImplemented`
# (an odd type, an empty tensor); then the operator stays as it is.
#
# The difference between two levels, with the rule that is to blame for each line:

# %% name="core-to-prims"
trace.diff("core", "prims")

# %% [markdown]
# ## Why two steps?
#
# Why not go down to Prims at once? Because the levels are good for different work. At Core a
# `gelu` can still be recognised by a person, or by a pass that wants to replace it. At Prims nothing
# is left unsaid. Here is the smallest example: a table of integers plus a row of floats.


# %% name="predict-add"
def mixed(a, b):
    return a + b


mixed_trace = mc.trace(mixed, torch.arange(3).view(3, 1), torch.randn(4))
print(mixed_trace.aot.level("core"))
print(mixed_trace.aot.level("prims"))

# %% [markdown]
# Eager's `add` decides at each call: which type is the result, which size is stretched? At Prims
# the answers are operators of their own, `convert_element_type` and `expand`. What comes next, a
# loop with one formula for each element, no longer has to know PyTorch's rules of *type promotion*
# (which type two types give) or *broadcasting* (how sizes that differ are stretched).

# %% [markdown]
# ## What must not be taken apart
#
# A matrix product is multiplications and sums. One could write it so. Here is that rule, for once,
# put over the built-in behaviour and forgotten after the block:


# %% name="mm-in-parts"
def product(a, b):
    return torch.relu(a @ b)


a, b = torch.randn(32, 64), torch.randn(64, 48)
with mc.scoped():

    @decompose(aten.mm.default, to="prims")
    def mm_in_parts(a, b):
        return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)

    in_parts = mc.trace(product, a, b)
whole = mc.trace(product, a, b)
print("library calls, kernels, whole:   ", len(whole.loops.externs), len(whole.kernels))
print("library calls, kernels, in parts:", len(in_parts.loops.externs), len(in_parts.kernels))
in_parts.kernels[0]

# %% [markdown]
# The result would be right, in one kernel. But for each row of the result this plain loop reads all
# of `b` again, where a good matrix product works in blocks that stay in a cache, and uses each number
# many times. That knowledge lies in a library, and a formula throws it away. So products,
# convolutions and sorting form a family of their own, the library's, and stay calls.
#
# For the rest the opposite holds: what is a call can't be fused. Take the rules away and look:

# %% name="without-rules"


def bytes_moved(stages):
    return sum(plan.cost.bytes_read + plan.cost.bytes_written for plan in stages.plans)


with mc.without("decomposition:aten.native_layer_norm"):
    called = mc.trace(f, x, y)
print(f"with the rule:    {len(trace.kernels)} kernels, {len(trace.loops.externs)} calls,",
      f"{bytes_moved(trace)} bytes through kernels")  # fmt: skip
print(f"without the rule: {len(called.kernels)} kernels, {len(called.loops.externs)} calls,",
      f"{bytes_moved(called)} bytes through kernels")  # fmt: skip
print(called.loops.externs[0].reason)

# %% [markdown]
# A call is a wall: what stands before it must be written to memory for it, what stands after it must
# read that again. (The bytes that the call itself moves are not even counted here.)

# %% [markdown]
# ## Break it: right on paper
#
# A softmax is `exp(x) / sum(exp(x))`, says the textbook. **Predict, then run**: what does that rule
# give for these three harmless rows?

# %% name="naive-softmax"


def naive_softmax(x, dim, half_to_float):
    power = torch.exp(x)
    return power / power.sum(dim, keepdim=True)


def softmax(x):
    return torch.softmax(x, -1)


rows = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 100.0], [-200.0, -201.0, -202.0]])
with mc.scoped():
    decompose(aten._softmax.default, to="prims")(naive_softmax)
    naive = mc.compile(softmax, backend="aot_eager")(rows)
mc.reset()
for given, ours, eager in zip(rows.tolist(), naive, softmax(rows)):
    print(f"{given!s:<24} naive {ours.tolist()}, eager {[round(p, 4) for p in eager.tolist()]}")

# %% [markdown]
# The first row is right, so a test with small random numbers passes. In the second, `exp(100)` is
# larger than any float32 can be: infinity by infinity is not a number. In the third every `exp` is
# too small to be told from zero, and zero by zero is not a number either. The built-in rule
# subtracts the row's largest value first: on paper nothing changes, and no `exp` exceeds one.
#
# How large is too large? That depends on the type:

# %% name="limits"
import math

for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    largest = torch.finfo(dtype).max
    print(f"{dtype}: largest number {largest:.3g}, exp overflows above {math.log(largest):.2f}")

# %% [markdown]
# ### Digits that cancel
#
# A second trap gives no NaN, only wrong digits. The variance is the mean of squares less the square
# of the mean, says the same book. Here are a thousand numbers around ten thousand, with a spread of
# about one:


# %% name="naive-variance"
def variance(x):
    return torch.var(x, -1, correction=0)


far = torch.randn(1, 1000) + 10_000
with mc.scoped():

    @decompose(aten.var.correction, to="core")
    def naive_variance(x, dim=None, correction=1, keepdim=False):
        return (x * x).mean(dim, keepdim) - x.mean(dim, keepdim) ** 2

    naive = mc.compile(variance, backend="aot_eager")(far)
mc.reset()
print("naive:  ", naive.item())
print("ours:   ", mc.compile(variance, backend="aot_eager")(far).item())
print("float64:", variance(far.double()).item())
square = far.mean() ** 2
print("next to", square.item(), "comes", torch.nextafter(square, 2 * square).item())

# %% [markdown]
# Both terms are near a hundred million, where neighbouring float32 numbers lie far apart; their
# difference is what was rounded away. This is *cancellation*. The built-in rule goes over the
# numbers twice: first the mean, then the squares of the small differences.
#
# ### Half types
#
# A bfloat16 keeps between two and three decimal digits. If each step of a formula is rounded to that, errors
# add up. Eager's kernels compute in float32 and round once, at the end. A rule with `wide=True` gets
# its half-type arguments as float32, and its result is rounded back:

# %% name="wide"
half = torch.randn(10_000).bfloat16()
exact = F.gelu(half.double())


def gelu_error():
    mc.reset()
    error = mc.compile(F.gelu, backend="aot_eager")(half).double() - exact
    return error.abs().mean().item()


with mc.scoped():
    decompose(aten.gelu.default, to="prims")(activations.gelu)  # the same rule, but not wide
    narrow = gelu_error()
print(f"rounded at each step has {narrow / gelu_error():.2f} times the error of rounded once")
mc.reset()

# %% [markdown]
# ## The model
#
# The GPT in training, with its loss: forward and backward in one graph, at three levels. Below, the
# block's feed-forward part, line by line. (`addmm`, a product with something added, is taken apart
# into `mm` and `add`, so that the addition may fuse with what follows.)

# %% name="model"
from minicompile.lessons.levels import families, family
from minicompile.lessons.model import GPT, GPTConfig

config = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)
model = GPT(config)
tokens = torch.randint(0, config.vocab_size, (2, 16))
gpt = mc.trace(mc.compile(model, backend="aot_eager"), tokens, tokens)
for level, graph in gpt.aot.levels.items():
    print(f"{level:>5}: {len({op for _, op in graph.calls})} operators in {families(graph)}")
feed_forward = mc.compile(model.blocks[0].mlp, backend="aot_eager")
fall(mc.trace(feed_forward, torch.randn(2, 16, 32)))

# %% [markdown]
# For one model the number of kinds hardly changes: a few fused operators go, their parts come. The
# gain is over all models together, as in the table above. What is left at Prims that no loop does?
# Count the calls of the families that the library computes:

# %% name="model-externs"
prims = gpt.aot.level("prims")
library = [str(op) for _, op in prims.calls if family(prims, op) in ("library", "custom", "extern")]
for name in sorted(set(library)):
    print(f"{library.count(name):>3} x {name}")

# %% [markdown]
# ## In torch.compile
#
# > **In torch.compile.** The same idea, and much the same rules: a table from operators to Python
# > functions, given to the tracer. `core_aten_decompositions` is the table to Core ATen. Inductor
# > adds its own and removes those whose operators it lowers better whole. Below, our `f` by the first
# > table: what is taken apart, and what stays? To read: `torch/_decomp/decompositions.py`,
# > `torch/_inductor/decomposition.py`; `torch/_prims/__init__.py` has the Prims.

# %% name="in-torch"
from torch._decomp import core_aten_decompositions
from torch._inductor.decomposition import decompositions as inductors_table
from torch.fx.experimental.proxy_tensor import make_fx

table = core_aten_decompositions()
theirs = make_fx(f, decomposition_table=table)(x, y)
called = [node.target for node in theirs.graph.nodes if node.op == "call_function"]
print("torch.compile at Core:", [op.__name__ for op in called if "getitem" not in str(op)])
print("minicompile at Core:  ", [op.__name__ for _, op in trace.aot.level("core").calls])
print(
    "overloads with a rule to Core ATen:", len(table), " in Inductor's table:", len(inductors_table)
)

# %% [markdown]
# Where we simplified: PyTorch has one table and one step, and Inductor then lowers Core ATen and
# more directly; broadcasting and type promotion happen inside each lowering. We take the second
# step to Prims in the graph, where it can be seen, and lower what is left.

# %% [markdown]
# ## Recap
#
# 1. A decomposition is a plain function that computes an operator with simpler ones, and is traced.
# 2. Full ATen is what users call, Core ATen is what people and passes recognise, Prims leave nothing
#    unsaid: no hidden conversion, no hidden stretching.
# 3. Graphs become longer, but all of them share one small vocabulary, and whatever comes next has
#    only that to learn.
# 4. What a library computes better than any formula, a matrix product first of all, stays a call.
# 5. A rule must be right in floating point: shift before `exp`, subtract before squaring, and round
#    half types once.

# %% [markdown]
# ## Exercises

# %% [markdown]
# **Exercise 1 · the vocabulary** (easy, 2 points). `vocabulary(traces, level)` gives the set of all
# operators, as strings such as `"aten.mul.Tensor"`, that the graphs of several traces call at a
# level ("full", "core" or "prims"). `trace.aot.level(level).nodes` are the nodes; count neither
# inputs nor the outputs nor the accesses that take a result of several apart.

# %% [markdown]
# **You will need**
#
# - `trace.aot.level("core").nodes`: nodes; the `target` of a call is an operator, of inputs and outputs a
#   text, of an access Python's `operator.getitem`.
# - `torch._ops.OpOverload`: the class of operators.
#   `(isinstance(aten.mul.Tensor, torch._ops.OpOverload), str(aten.mul.Tensor))` gives
#   `(True, 'aten.mul.Tensor')`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Which class do the targets have that count?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# One set, from two loops: over the traces, and over the nodes of each.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def vocabulary(traces, level):
    """The operators that the traces' graphs call at this level, as a set of strings."""
    ### BEGIN SOLUTION
    return {
        str(node.target)
        for trace in traces
        for node in trace.aot.level(level).nodes
        if isinstance(node.target, torch._ops.OpOverload)
    }
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-nodes" tags=["wrong"] kind="misconception" says="'full'"
def vocabulary(traces, level):
    return {node.name for trace in traces for node in trace.aot.level(level).nodes}


# %% name="ex1-wrong-aten" tags=["wrong"] kind="visible-only" says="prims.convert_element_type"
def vocabulary(traces, level):
    nodes = [node for trace in traces for node in trace.aot.level(level).nodes]
    return {str(node.target) for node in nodes if str(node.target).startswith("aten.")}


# %% name="ex1-wrong-getitem" tags=["wrong"] kind="visible-only" says="<built-in function getitem>"
def vocabulary(traces, level):
    nodes = [node for trace in traces for node in trace.aot.level(level).nodes]
    return {str(node.target) for node in nodes if node.op == "call_function"}


# %% name="ex1-wrong-calls" tags=["wrong"] kind="built-in" says="a use of calls"
def vocabulary(traces, level):
    return {str(op) for trace in traces for _, op in trace.aot.level(level).calls}


# %% [markdown]
# **Exercise 2 · spoil the naive softmax** (solid, 2 points). `spoilers(dtype)` gives two rows of that type,
# all of their numbers finite. Eager's softmax of both is fine. The compiler with the naive rule of above
# must give NaN for both: for the first since an `exp` is too large; the second has no number above
# zero. Half types are widened to float32 first.

# %% [markdown]
# **You will need**
#
# - `torch.finfo(dtype).max`: the largest number. `math.log(torch.finfo(torch.float32).max)` gives
#   `88.72283905206835`: above that, `exp` is infinite. Below about the same number, negative, it becomes
#   zero.
# - `torch.tensor([1.0, 2.0], dtype=dtype)`: a row. Half types compute in float32, float64 in float64.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# The first row needs one number that is too large; all numbers of the second must be too small.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# The zero comes a little later than the overflow: be generous, say twice as far, but stay finite in
# `dtype`.
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def spoilers(dtype):
    """Two finite rows for which exp(x) / sum(exp(x)) is NaN: one too large, one too small."""
    ### BEGIN SOLUTION
    computed = dtype if dtype == torch.float64 else torch.float32
    far = 2 * math.log(torch.finfo(computed).max)
    return torch.tensor([1.0, far], dtype=dtype), torch.tensor([-far, -far - 8], dtype=dtype)
    ### END SOLUTION


# %% name="ex2-setup" tags=["setup"]
import math

# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-infinite" tags=["wrong"] kind="misconception" says="expected finite numbers"
def spoilers(dtype):
    return torch.tensor([1.0, math.inf], dtype=dtype), torch.tensor([-math.inf] * 2, dtype=dtype)


# %% name="ex2-wrong-hundred" tags=["wrong"] kind="visible-only" says="float64"
def spoilers(dtype):
    return torch.tensor([1.0, 100.0], dtype=dtype), torch.tensor([-200.0, -208.0], dtype=dtype)


# %% name="ex2-wrong-search" tags=["wrong"] kind="built-in" says="a use of softmax"
def spoilers(dtype):
    far = 1.0
    while torch.softmax(torch.tensor([0.0, far], dtype=dtype), 0)[0] > 0:
        far *= 2
    return torch.tensor([0.0, far], dtype=dtype), torch.tensor([-far, -far], dtype=dtype)


# %% [markdown]
# **Exercise 3 · three decompositions** (solid, 4 points). The built-in rules for `silu` and `huber_loss` are
# taken away; RMS norm comes as a custom operator that no rule knows. Write all three. They are
# checked in float64 and float32, then put into a GPT block that has RMS norms, `silu` in its
# feed-forward part and a Huber loss.
#
# - silu: x times the sigmoid of x, also for large numbers of either sign;
# - RMS norm: x, divided by the root of (mean of squares over the last dimension, plus `eps`), times
#   `weight`;
# - Huber: with z = |x - y|, half of z squared below `delta`, else `delta` times (z - `delta` / 2);
#   `reduction` is 0 (none), 1 (mean) or 2 (sum).

# %% [markdown]
# **You will need**
#
# - `torch.sigmoid(x)`, `torch.where(condition, a, b)`, `x.abs()`: any function of tensors will do that
#   doesn't call the operator itself.
# - `torch.rsqrt(x)`: one over the root. `torch.rsqrt(torch.tensor(4.0))` gives `tensor(0.5000)`.
# - `x.mean(-1, keepdim=True)`: means of the last dimension, which stays with size one.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# The first two are one line each, just as the text says.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Huber: compute both formulas for all elements, choose with `torch.where`, then look at `reduction`.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def silu(x):
    """aten.silu"""
    ### BEGIN SOLUTION
    return x * torch.sigmoid(x)
    ### END SOLUTION


def rms_norm(x, weight, eps):
    """lesson06.rms_norm"""
    ### BEGIN SOLUTION
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight
    ### END SOLUTION


def huber(x, y, reduction=1, delta=1.0):
    """aten.huber_loss"""
    ### BEGIN SOLUTION
    z = (x - y).abs()
    losses = torch.where(z < delta, 0.5 * z * z, delta * (z - 0.5 * delta))
    return losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-norm" tags=["wrong"] kind="misconception" says="rms_norm"
def silu(x):
    return x * torch.sigmoid(x)


def rms_norm(x, weight, eps):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + eps) * weight


def huber(x, y, reduction=1, delta=1.0):
    z = (x - y).abs()
    losses = torch.where(z < delta, 0.5 * z * z, delta * (z - 0.5 * delta))
    return losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()


# %% name="ex3-wrong-exp" tags=["wrong"] kind="visible-only" says="got float64[4] of [nan"
def silu(x):
    return x * torch.exp(x) / (1 + torch.exp(x))


def rms_norm(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def huber(x, y, reduction=1, delta=1.0):
    z = (x - y).abs()
    losses = torch.where(z < delta, 0.5 * z * z, delta * (z - 0.5 * delta))
    return losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()


# %% name="ex3-wrong-library" tags=["wrong"] kind="built-in" says="a use of functional"
def silu(x):
    return x * torch.sigmoid(x)


def rms_norm(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def huber(x, y, reduction=1, delta=1.0):
    how = ("none", "mean", "sum")[reduction]
    return delta * torch.nn.functional.smooth_l1_loss(x, y, reduction=how, beta=delta)


# %% [markdown]
# **Exercise 4 · repair the softmax** (hard, 4 points). The built-in rules for softmax and its logarithm are
# taken away. Write both so that they are right for every finite row, and for attention, whose masked
# positions are minus infinity. The GPT is then compiled with them: attention and loss. Both get
# (x, dim, half_to_float); the last one can be ignored.

# %% [markdown]
# **You will need**
#
# - `x.amax(dim, keepdim=True)`: the largest along `dim`.
#   `torch.tensor([[1.0, 5.0]]).amax(-1, keepdim=True)` gives `tensor([[5.]])`.
# - `torch.exp`, `torch.log`, `x.sum(dim, keepdim=True)`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# A softmax stays the same if one number is taken from a whole row. Which number makes every `exp` harmless?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# The logarithm of a softmax is not the logarithm of the softmax's result: that is log of zero where a
# probability is tiny. Write log(a / b) as log a minus log b, on paper, before you write code.
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def stable_softmax(x, dim, half_to_float):
    """aten._softmax"""
    ### BEGIN SOLUTION
    power = torch.exp(x - x.amax(dim, keepdim=True))
    return power / power.sum(dim, keepdim=True)
    ### END SOLUTION


def stable_log_softmax(x, dim, half_to_float):
    """aten._log_softmax"""
    ### BEGIN SOLUTION
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-log-of-it" tags=["wrong"] kind="misconception" says="got float64[2, 3] of [-inf"
def stable_softmax(x, dim, half_to_float):
    power = torch.exp(x - x.amax(dim, keepdim=True))
    return power / power.sum(dim, keepdim=True)


def stable_log_softmax(x, dim, half_to_float):
    return torch.log(stable_softmax(x, dim, half_to_float))


# %% name="ex4-wrong-mean" tags=["wrong"] kind="visible-only" says="expected float64"
def stable_softmax(x, dim, half_to_float):
    middle = x.masked_fill(x.abs() == float("inf"), 0.0).mean(dim, keepdim=True)
    power = torch.exp(x - middle)
    return power / power.sum(dim, keepdim=True)


def stable_log_softmax(x, dim, half_to_float):
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))


# %% name="ex4-wrong-library" tags=["wrong"] kind="built-in" says="a use of logsumexp"
def stable_softmax(x, dim, half_to_float):
    return torch.exp(x - torch.logsumexp(x, dim, keepdim=True))


def stable_log_softmax(x, dim, half_to_float):
    return x - torch.logsumexp(x, dim, keepdim=True)


# %% [markdown]
# **Exercise 5 · a norm far from zero** (hard, 3 points, optional). Write `aten.native_layer_norm`: from
# (x, shape, weight, bias, eps), where `shape` are the last sizes of x, the three results (normalized
# x, mean, one over the deviation), the last two with the normalized dimensions kept at size one.
# `weight` and `bias` may be None. It must be as exact as eager's for inputs around ten thousand: at
# most a few times its error, both measured against float64.

# %% [markdown]
# **You will need**
#
# - `x.mean(dims, keepdim=True)`: means over several dimensions, a list. With shape `[3, 4]` and three
#   dimensions, the normalized ones are `[1, 2]`.
# - `torch.rsqrt(x)`: one over the root.
# - The deviation's square is the mean of squared differences (divided by n, not by n - 1), plus `eps`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Which of the two formulas for a variance above is right far from zero?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Subtract the mean first, once, and use that difference for both: the variance and the result.
#
# </details>


# %% name="ex5-answer" tags=["answer"]
def layer_norm(x, shape, weight, bias, eps):
    """aten.native_layer_norm: (normalized x, mean, one over the deviation)."""
    ### BEGIN SOLUTION
    dims = list(range(x.dim() - len(shape), x.dim()))
    mean = x.mean(dims, keepdim=True)
    difference = x - mean
    rstd = torch.rsqrt((difference * difference).mean(dims, keepdim=True) + eps)
    result = difference * rstd
    result = result if weight is None else result * weight
    return result if bias is None else result + bias, mean, rstd
    ### END SOLUTION


# %% name="ex5-check" tags=["nbval-check-output"]
check("ex5")


# %% name="ex5-wrong-squares" tags=["wrong"] kind="misconception" says="expected at most"
def layer_norm(x, shape, weight, bias, eps):
    dims = list(range(x.dim() - len(shape), x.dim()))
    mean = x.mean(dims, keepdim=True)
    rstd = torch.rsqrt(((x * x).mean(dims, keepdim=True) - mean * mean).clamp(0) + eps)
    result = (x - mean) * rstd
    result = result if weight is None else result * weight
    return result if bias is None else result + bias, mean, rstd


# %% name="ex5-wrong-last" tags=["wrong"] kind="visible-only" says="layer_norm"
def layer_norm(x, shape, weight, bias, eps):
    mean = x.mean(-1, keepdim=True)
    difference = x - mean
    rstd = torch.rsqrt((difference * difference).mean(-1, keepdim=True) + eps)
    result = difference * rstd
    result = result if weight is None else result * weight
    return result if bias is None else result + bias, mean, rstd


# %% name="ex5-wrong-deviation" tags=["wrong"] kind="misconception" says="its one over the deviation"
def layer_norm(x, shape, weight, bias, eps):
    dims = list(range(x.dim() - len(shape), x.dim()))
    mean = x.mean(dims, keepdim=True)
    difference = x - mean
    deviation = torch.sqrt((difference * difference).mean(dims, keepdim=True) + eps)
    result = difference / deviation
    result = result if weight is None else result * weight
    return result if bias is None else result + bias, mean, deviation


# %% name="ex5-wrong-library" tags=["wrong"] kind="built-in" says="a use of var_mean"
def layer_norm(x, shape, weight, bias, eps):
    dims = list(range(x.dim() - len(shape), x.dim()))
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    result = (x - mean) * rstd
    result = result if weight is None else result * weight
    return result if bias is None else result + bias, mean, rstd


# %% [markdown]
# ## Go deeper
#
# - `minicompile/aot/decompositions/registry.py`, then `losses.py` and `normalization.py` beside it:
#   all rules; `minicompile/aot/levels.py`: what a level may hold, and how a graph is brought there.
# - `torch/_decomp/decompositions.py`: PyTorch's rules; `torch/_refs/__init__.py`: a whole library
#   written in Prims; `torch/_inductor/decomposition.py`: what Inductor adds and removes.
# - `docs/operators.md`: for each operator, whose rule takes it apart, or why it is called as it is.
#
# **Where you are.** The graph is functional, small in vocabulary and explicit. What is missing is the
# way back: next comes the gradient.

# %% name="corridor"
from minicompile.lessons.pictures import corridor

corridor("aot")
