# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 08 · Keep it or compute it again?
#
# The backward pass reads values that the forward made. Somebody must keep them until then, or make
# them a second time. Nobody asks you in eager mode: what a formula reads is kept. A compiler sees
# both passes at once, and can choose.
#
# After this lesson you can
#
# - say which values a training step keeps, how many bytes that is, and why each one;
# - read that choice as a minimum cut through a network, and solve a small one by hand;
# - write the rule that says what may be computed again, and what happens if it is wrong.

# %% name="setup" tags=["setup"]
try:
    import minicompile as mc
except ModuleNotFoundError:  # opened elsewhere, as on Colab
    get_ipython().run_line_magic(
        "pip", 'install -q "minicompile[notebook] @ git+https://github.com/your_name/minicompile"'
    )
    import minicompile as mc

from typing import NamedTuple

import torch
import torch.nn.functional as F

from minicompile.lessons.exercise import checks
from minicompile.lessons.model import Block, GPTConfig

aten = torch.ops.aten
check = checks("08")


class Value(NamedTuple):
    """Something that could be kept: how many bytes that takes, and the work of making it again."""

    name: str
    bytes: int
    work: int


# %% [markdown]
# The running example is half of a network with dropout written out: a product, a random mask, `gelu`,
# another product. We look at one room only: `divided` compiles up to the two graphs, calls the result
# once, and gives what an *observer*, a function that hears of each stage as it is made, was told.


# %% name="example"
from minicompile.extension import observer


def divided(fn, *inputs, **options):
    """Forward and backward graphs of a function; no kernels are made."""
    heard = []
    mc.reset()
    with mc.scoped():
        observer("lesson")(lambda event: heard.append(event) if event.kind == "aot" else None)
        mc.compile(fn, backend="aot_eager", options=options)(*inputs)
    return heard[0].subject


def net(x, w1, w2):
    a = torch.mm(x, w1)
    m = torch.rand_like(a) > 0.5
    d = F.gelu(a) * m * 2
    o = torch.mm(d, w2)
    return o


torch.manual_seed(0)
x = torch.randn(512, 64)
w1, w2 = torch.randn(64, 512, requires_grad=True), torch.randn(512, 64, requires_grad=True)
aot = divided(net, x, w1, w2)

# %% [markdown]
# Of the joint graph (forward and backward in one, lesson 07) we draw the forward values that the
# backward needs, directly or not. Green ones are kept; faint ones are computed again in backward.

# %% name="picture"
from minicompile.lessons.pictures import boxes
from minicompile.ops.display import bytes_text


def kept_picture(title, aot):
    """The forward values that the backward needs, the kept ones marked."""
    kept = {value.name: value.bytes for value in aot.partition.saved}
    again = {value.name for value in aot.partition.recomputed}
    words, arrows = {}, []
    for node in aot.joint.nodes:
        if node.op == "output" or not {node.name} & {*kept, *again}:
            continue
        size = bytes_text(node.meta["val"].nbytes)
        words[node.name] = f"kept, {size}" if node.name in kept else "made again"
        for user in node.users:
            needed = user.name in {*kept, *again} and user.meta["phase"] == "forward"
            arrows += [(node.name, user.name)] * needed
            arrows += [(node.name, "backward")] * (user.meta["phase"] == "backward")
    words["backward"] = "reads these"
    return boxes(title, words, dict.fromkeys(arrows), kept, again)


kept_picture("what crosses from forward to backward", aot)

# %% [markdown]
# That is the answer: some values cross from forward to backward, others are made again from those.
# Dividing a joint graph so is called *partitioning*; the crossing values are *saved*, and making one
# again is *recomputation* (the literature says rematerialization). Here is the same with bytes and
# reasons:

# %% name="partition"
aot.partition

# %% [markdown]
# Now without the choice. `partitioner="default"` keeps whatever the backward reads, as eager mode
# does:


# %% name="naive"
naive = divided(net, x, w1, w2, partitioner="default")
for split in (naive.partition, aot.partition):
    made = f"{len(split.recomputed)} operations again"
    print(f"{split.method:>8}: {bytes_text(split.saved_bytes)} saved beside inputs, {made}")

# %% [markdown]
# ## Why would recomputing be cheap?
#
# A value that is kept is written to memory in forward and read in backward. One that is made again
# costs arithmetic, in a kernel that runs anyway and has its inputs at hand; with element by element
# operators that is nearly free. **Predict, then run**: four such operators in a row. The backward
# reads three of the values between. How many bytes will be saved, beside the input?


# %% name="chain"
def chain(v):
    return v.sin().cos().exp().tanh().sum()


v = torch.randn(64, 64, requires_grad=True)
chained = mc.trace(chain, v)
print("saved beside inputs:", chained.aot.partition.saved_bytes, "bytes")
print("reading everything would take:", chained.aot.partition.default_bytes, "bytes")
print("kernels: forward", len(chained.forward.kernels), "- backward", len(chained.backward.kernels))

# %% [markdown]
# Nothing is saved: the input exists anyway, and all else follows from it, inside of one kernel. Less
# memory and less traffic; recomputation can make a training step faster, not only smaller.
#
# ## The choice as a cut
#
# A puzzle of six values, each with the bytes that keeping it takes. `x` is an input and `r` random: both
# can't be made again, though keeping them is possible. The backward reads `d` and `f`. Which values
# would you keep? Any set will do from which `d` and `f` can be made. Find the cheapest before you go on.

# %% name="puzzle"
sizes = {"x": 8, "a": 5, "r": 4, "b": 2, "d": 6, "f": 7}
made_of = {"x": (), "a": ("x",), "r": (), "b": ("a", "r"), "d": ("b",), "f": ("b", "a")}
fixed, read = {"x", "r"}, {"d", "f"}
labels = {name: f"{size} bytes" for name, size in sizes.items()} | {"backward": "reads d and f"}
arrows = [(made, name) for name, uses in made_of.items() for made in uses]
arrows += [(name, "backward") for name in sorted(read)]
boxes("keep which?", labels, arrows)

# %% [markdown]
# Think of pipes. Water runs from what can't be made again, along the arrows, to the backward; each
# value is a pipe as wide as its bytes. To keep a value is to cut its pipe: what lies behind can be
# made from it. The set is good when no water arrives. So the cheapest set is a *minimum cut* of a *flow
# network*, and that is a solved problem: the most water that can flow is exactly as much as the
# narrowest cut lets through, and pushing flow until nothing more fits finds it.

# %% name="solve"
from minicompile.aot.maxflow import UNLIMITED, FlowNetwork

network = FlowNetwork()
for name, size in sizes.items():
    network.add_edge((name, "in"), (name, "out"), size)  # the pipe: cut it, and the value is kept
    for used in made_of[name]:
        network.add_edge((used, "out"), (name, "in"), UNLIMITED)
    if name in fixed:
        network.add_edge("source", (name, "in"), UNLIMITED)
    if name in read:
        network.add_edge((name, "out"), "sink", UNLIMITED)
width, side = network.minimum_cut("source", "sink")
cut = [name for name in sizes if (name, "in") in side and (name, "out") not in side]
print("keep", cut, "for", width, "bytes")

# %% [markdown]
# The slides show three cuts. The first is what eager mode keeps. The second looks clever, as `b` is the
# smallest of all, but does not close: `f` also reads `a`.

# %% name="cuts"
from minicompile.lessons.pictures import slides


def drawn(saved):
    return boxes(f"keep {', '.join(saved)}", labels, arrows, saved)


slides(
    "three sets of values",
    ("what is read", f"{sizes['d'] + sizes['f']} bytes", drawn(["d", "f"])),
    ("b alone", "f can't be made: a is missing", drawn(["b"])),
    ("the minimum cut", f"{width} bytes", drawn(cut)),
)

# %% [markdown]
# ## What is never made again
#
# The real network is `minicompile.aot.partition.Cut`, and bytes are not all it knows. A value gets an
# unlimited pipe from the source (it is banned from recomputation) for a reason that the table above
# shows: it is an input, it is random, a library call makes it, it sums many numbers into one, or a
# library call in backward needs it in memory. Views have pipes that can't be cut, as they own no
# bytes. In the block of our lesson model, count the reasons:

# %% name="reasons"
from collections import Counter

torch.manual_seed(0)
block = Block(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8))
h = torch.randn(2, 8, 16)
saved = divided(block, h).partition.saved
for reason, count in Counter(value.reason for value in saved).items():
    print(f"{count:>3}  {reason}")

# %% [markdown]
# That an input can't be made again is a fact, and that random numbers must not be (there are none here)
# a matter of right and wrong. All other reasons are about time, and could be weighed otherwise.
#
# **Break it.** Let the partitioner believe that everything but inputs may be made again. It saves fewer
# bytes than ever. But random numbers differ from call to call: backward draws a mask of its own, and
# the gradients belong to another network. Compare what passed the mask and what learned from it:

# %% name="broken"
import contextlib
from unittest import mock

from minicompile.aot import partition as partitioner


def masked(v):
    return (v * (torch.rand_like(v) > 0.5)).sin()


def positions(tensor):
    return "".join("x" if number else "." for number in tensor.tolist())


ones = torch.ones(24, requires_grad=True)


def only_inputs(node, parts, in_memory):
    """The reason why a value can't be made again; "" if it can."""
    return "an input" if node.op == "placeholder" else ""


careless = mock.patch.object(partitioner, "why_not_recomputed", only_inputs)
for title, rule in (("as it is", contextlib.nullcontext()), ("careless", careless)):
    mc.reset()
    ones.grad = None
    torch.manual_seed(0)
    with rule:
        result = mc.compile(masked, backend="aot_eager")(ones)
    result.sum().backward()
    print(f"{title}: passed {positions(result)}, learned {positions(ones.grad)}")
mc.reset()

# %% [markdown]
# ## A budget
#
# What if memory is short? A *memory budget* is a number from 0 to 1: 0 recomputes all that can be, even
# matrix products; 1 keeps all that backward reads. Between lies a knapsack problem: of the values
# worth keeping, choose those that fit and spare the most work. Move the slider and watch the table of
# saved values shrink, the one of recomputed values grow.

# %% name="budget"
frames = []
for budget in (0, 0.3, 0.6, 1):
    split = divided(block, h, memory_budget=budget).partition
    remark = f"{bytes_text(split.saved_bytes)} saved, {len(split.recomputed)} operations again"
    frames.append((f"memory budget {budget}", remark, split))
slides("memory against recomputation", *frames)

# %% [markdown]
# You can draw the line by hand too: what `torch.utils.checkpoint.checkpoint` wraps is recomputed as a
# whole, and the partitioner obeys.

# %% name="checkpoint"
from torch.utils.checkpoint import checkpoint


def wrapped(v):
    return checkpoint(block.mlp, v, use_reentrant=False)


for title, fn in (("as it is", block.mlp), ("in checkpoint", wrapped)):
    print(f"{title:>13}: {divided(fn, h).partition.saved_bytes} bytes saved beside inputs")

# %% [markdown]
# ## Keep the gradient instead
#
# A language model's last product gives a row of logits for each token, as wide as the vocabulary: often
# the largest value of the whole step, and the loss's backward needs it again. No cut helps, as a product is
# what we don't make twice. But for a loss the forward can do the backward's work at once, a chunk of
# rows at a time: logits, their losses, the slope by each of them, and two products with it. Then the chunk
# is forgotten. What crosses are two gradients, as large as `x` and the weight however many rows there are.

# %% name="chunks"


def loss(x, w, labels):
    return F.cross_entropy(F.linear(x, w), labels)


tokens, vocabulary = torch.randn(2048, 16), torch.randn(16384, 16, requires_grad=True)
labels = torch.randint(16384, (2048,))
for title, chosen in (("all rows at once", "none"), ("in chunks", "default")):
    aot = divided(loss, tokens.requires_grad_(), vocabulary, labels, plugins=chosen)
    print(f"{title:>16}: {bytes_text(aot.partition.saved_bytes)} saved beside inputs")

# %% [markdown]
# A pass over the captured graph does it (the next lesson is about passes), before gradients are known. It
# belongs to a plug-in, `chunked_loss`: a part of the compiler that can be left out (lesson 17).

# %% name="chunks-pass"
print(next(record for record in aot.passes if "chunked_loss" in record.name))

# %% [markdown]
# > **In torch.compile.** Its partitioner is where the idea comes from; below it divides our `net`, live.
# > `default_partition` of eager-like training, then the minimum cut: look at what the forward returns
# > beside its result. A budget is `torch._functorch.config.activation_memory_budget`. We simplified: no
# > limit on the length of recomputed chains, no rule that banned operators near each other stay
# > together, no ILP solver. Read `torch/_functorch/partitioners.py`; its knapsacks are in
# > `torch/_functorch/_activation_checkpointing/knapsack.py`. Losses go in chunks if you switch
# > `torch._inductor.config.auto_chunker` on.

# %% name="torch-partitioner"
from functorch.compile import (
    aot_function,
    default_partition,
    make_boxed_func,
    min_cut_rematerialization_partition,
)


def listener(heard):
    def compiler(gm, example_inputs):
        heard.append(gm)
        return make_boxed_func(gm)

    return compiler


for divide in (default_partition, min_cut_rematerialization_partition):
    heard = []
    stop = listener(heard)
    aot_function(net, stop, stop, partition_fn=divide)(x, w1, w2).sum().backward()
    returned = next(node for node in heard[0].graph.nodes if node.op == "output").args[0]
    print(f"{divide.__name__}: forward returns {', '.join(map(str, returned))}")

# %% [markdown]
# ## Recap
#
# 1. What backward reads of the forward must be saved, or recomputed from what is.
# 2. A cheapest set of saved values is a minimum cut of a network whose pipes are as wide as bytes.
# 3. Random operators must never run twice, or the gradient belongs to another mask.
# 4. Library calls and sums shouldn't run twice, which is a matter of time and not of truth.
# 5. A memory budget moves the line: fewer bytes, more work; a loss in chunks saves bytes for no work.

# %% [markdown]
# ## Exercises
#
# **Exercise 1 · The cheapest set** (easy, 2 points). Write `cheapest(sizes, made_of, fixed, read)`, which
# solves puzzles like the one above: the set of names that costs the fewest bytes and from which everything
# in `read` can be made. Values in `fixed` can't be made again; all others from what `made_of` says,
# once that is there. There are at most ten values, so you may try all sets.

# %% [markdown]
# **You will need**
#
# - `sizes`, `made_of`, `fixed`, `read`: as in the puzzle above. `made_of["f"]` gives `('b', 'a')`, `fixed`
#   holds `"x"` and `"r"`.
# - `itertools.combinations(names, n)`: all choices of `n` names, after `import itertools`.
#   `list(itertools.combinations("abc", 2))` gives `[('a', 'b'), ('a', 'c'), ('b', 'c')]`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# First a function that says whether a value can be had from a set: it is in the set, or it isn't fixed and
# all that it is made of can be had.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Then try all sets, keep those from which all of `read` can be had, and take the one of the fewest bytes:
# `min` with a `key`.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def cheapest(sizes, made_of, fixed, read):
    """The names to keep, as a set."""
    ### BEGIN SOLUTION
    from itertools import combinations

    def there(name, kept):
        if name in kept:
            return True
        return name not in fixed and all(there(used, kept) for used in made_of[name])

    sets = [set(kept) for n in range(len(sizes) + 1) for kept in combinations(sizes, n)]
    enough = [kept for kept in sets if all(there(name, kept) for name in read)]
    return min(enough, key=lambda kept: sum(sizes[name] for name in kept))
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-read" tags=["wrong"] kind="misconception" says="got 13 bytes"
def cheapest(sizes, made_of, fixed, read):
    return set(read)


# %% name="ex1-wrong-fixed" tags=["wrong"] kind="visible-only" says="a set from which"
def cheapest(sizes, made_of, fixed, read):
    from itertools import combinations

    def there(name, kept):
        if name in kept or not made_of[name]:
            return name in kept
        return all(there(used, kept) for used in made_of[name])

    sets = [set(kept) for n in range(len(sizes) + 1) for kept in combinations(sizes, n)]
    enough = [kept for kept in sets if all(there(name, kept) for name in read)]
    return min(enough, key=lambda kept: sum(sizes[name] for name in kept))


# %% name="ex1-wrong-network" tags=["wrong"] kind="built-in" says="a use of FlowNetwork"
def cheapest(sizes, made_of, fixed, read):
    from minicompile.aot.maxflow import UNLIMITED, FlowNetwork

    network = FlowNetwork()
    for name, size in sizes.items():
        network.add_edge((name, "in"), (name, "out"), size)
        for used in made_of[name]:
            network.add_edge((used, "out"), (name, "in"), UNLIMITED)
        if name in fixed:
            network.add_edge("source", (name, "in"), UNLIMITED)
        if name in read:
            network.add_edge((name, "out"), "sink", UNLIMITED)
    _, side = network.minimum_cut("source", "sink")
    return {name for name in sizes if (name, "in") in side and (name, "out") not in side}


# %% [markdown]
# **Exercise 2 · Worth a cut** (solid, 2 points). Write a function of a matrix `x` of shape (n, k) and a
# square matrix `w` of shape (k, k), both of which want a gradient, for which the minimum cut saves something
# beside the inputs, but at most a quarter of the bytes that the backward reads.

# %% [markdown]
# **You will need**
#
# - `x @ w`: a library call, too expensive to make again. `y.sin()`, `y.exp()`: cheap, and their backwards
#   read forward values.
# - `divided(function, x, w).partition`: `saved_bytes` beside the inputs, `default_bytes` if all that the
#   backward reads were kept. `divided(chain, v).partition.default_bytes` gives `49152`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Something must be worth saving: one value that is too expensive to make again.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Behind it, a chain of operators whose backwards read many values, all of which can be made from that one.
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def worth_a_cut(x, w):
    """A function of two matrices that saves little."""
    ### BEGIN SOLUTION
    y = x @ w
    for _ in range(4):
        y = y.sin().exp()
    return y
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-products" tags=["wrong"] kind="misconception" says="at most a quarter"
def worth_a_cut(x, w):
    return x @ w @ w @ w @ w @ w


# %% name="ex2-wrong-nothing" tags=["wrong"] kind="misconception" says="more than 0 bytes"
def worth_a_cut(x, w):
    return x.sin().cos().exp().tanh().sum() + w.sin().exp().sum()


# %% name="ex2-wrong-shape" tags=["wrong"] kind="visible-only" says="at most a quarter"
def worth_a_cut(x, w):
    y = x @ w
    for _ in range(4 if x.shape[0] == 8 else 1):
        y = y.sin().exp()
    return y


# %% name="ex2-wrong-checkpoint" tags=["wrong"] kind="built-in" says="a use of checkpoint"
def worth_a_cut(x, w):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda y: (y @ w).sin().exp() @ w, x, use_reentrant=False)


# %% [markdown]
# **Exercise 3 · What may be made again?** (solid, 3 points). Write `may_recompute(node)` for the running
# example: true for a node of the joint graph (a `torch.fx.Node`; inputs and views are not asked for) if
# the backward may make its value again. A random operator must not run twice, a matrix product should
# not; everything else may. The check puts your rule in the place of the partitioner's, divides the
# example and a block with dropout, and compares masks and gradients.

# %% [markdown]
# **You will need**
#
# - `node.target`: the operator, or something else that has no `tags`: so
#   `getattr(node.target, "tags", ())`.
# - `torch.Tag.nondeterministic_seeded`: the tag of operators that draw random numbers.
#   `torch.Tag.nondeterministic_seeded in aten.rand_like.default.tags` gives `True`.
# - `aten.mm` and `aten.bmm`: the matrix products of the graph. `str(aten.mm.default)` gives
#   `'aten.mm.default'`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Two questions about the target: does it draw random numbers? Is it a product?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# `aten.addmm` and `aten.baddbmm` have been taken apart by then. Compare `node.target.overloadpacket`, or
# names.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def may_recompute(node):
    """May the backward make this node's value again?"""
    ### BEGIN SOLUTION
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    product = str(node.target).split(".")[1] in ("mm", "bmm", "addmm", "baddbmm")
    return not (random or product)
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-products" tags=["wrong"] kind="misconception" says="expected forward's mask, got another"
def may_recompute(node):
    return node.target is not aten.mm.default


# %% name="ex3-wrong-random" tags=["wrong"] kind="misconception" says="expected one product, got two"
def may_recompute(node):
    return torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())


# %% name="ex3-wrong-everything" tags=["wrong"] kind="misconception" says="expected saved {a, m}, 1.25 MiB"
def may_recompute(node):
    return False


# %% name="ex3-wrong-name" tags=["wrong"] kind="visible-only" says="poisson reran in backward"
def may_recompute(node):
    name = str(node.target)
    return "rand" not in name and "bernoulli" not in name and "mm" not in name


# %% name="ex3-wrong-rule" tags=["wrong"] kind="built-in" says="a use of is_heavy"
def may_recompute(node):
    from minicompile.aot.partition import is_heavy, is_random

    return not (is_heavy(node) or is_random(node))


# %% [markdown]
# **Exercise 4 · Fill the budget** (hard, 4 points). Write `keep(values, room)`: of a list of `Value`s, the
# names (a set) of those to keep, so that together they take at most `room` bytes and spare the most work. The
# check tries it alone, then makes it the partitioner's choice under a memory budget for the block:
# some thirty values, so trying all subsets takes too long.

# %% [markdown]
# **You will need**
#
# - `value.name`, `value.bytes`, `value.work`: `Value("a", 4, 10).work` gives `10`.
# - `keep([Value("a", 6, 7), Value("b", 4, 4), Value("c", 4, 4)], 8)` is `{"b", "c"}`: both fit, and spare
#   more work than the first one alone.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Taking the most work per byte first is good, and not the best, as the example shows.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# The classic: go through the values and remember, for every number of bytes used so far, the most work and
# how it was reached.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# That is a dict, at first `{0: (0, frozenset())}`. Each value then either joins each entry, if there is
# room, or doesn't.
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def keep(values, room):
    """The names of the values to keep."""
    ### BEGIN SOLUTION
    best = {0: (0, frozenset())}
    for value in values:
        for used, (work, names) in list(best.items()):
            total = used + value.bytes
            more = (work + value.work, names | {value.name})
            if total <= room and more[0] > best.get(total, (-1,))[0]:
                best[total] = more
    return set(max(best.values(), key=lambda found: found[0])[1])
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-greedy" tags=["wrong"] kind="misconception" says="expected 220 of work spared, got 160"
def keep(values, room):
    kept = set()
    for value in sorted(values, key=lambda v: -v.work / v.bytes):
        if value.bytes <= room:
            kept.add(value.name)
            room -= value.bytes
    return kept


# %% name="ex4-wrong-full" tags=["wrong"] kind="visible-only" says="expected 30 of work spared, got 0"
def keep(values, room):
    best = {0: (0, frozenset())}
    for value in values:
        for used, (work, names) in list(best.items()):
            total = used + value.bytes
            more = (work + value.work, names | {value.name})
            if total < room and more[0] > best.get(total, (-1,))[0]:
                best[total] = more
    return set(max(best.values(), key=lambda found: found[0])[1])


# %% name="ex4-wrong-torch" tags=["wrong"] kind="built-in" says="a use of dp_knapsack"
def keep(values, room):
    from torch._functorch._activation_checkpointing.knapsack import dp_knapsack

    memory, work = [float(v.bytes) for v in values], [float(v.work) for v in values]
    _, chosen, _ = dp_knapsack(memory, work, room)
    return {values[i].name for i in chosen}


# %% [markdown]
# **Exercise 5 · Weigh a value** (hard, 2 points, optional). How wide is a pipe? Write `weight(node)`: the
# bytes that keeping the value of a node takes, from `node.meta["val"]`: a tensor, or something else (a tuple
# of tensors, a number), which takes none. The partitioner uses it for every value of the block.

# %% [markdown]
# **You will need**
#
# - `node.meta["val"]`: a tensor, or something else; `isinstance(value, torch.Tensor)` tells.
# - `tensor.numel()`, `tensor.element_size()`: `(torch.ones(2, 3) > 0).element_size()` gives `1`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Elements and bytes are not the same: a mask has one byte an element, a `float64` eight.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# What is no tensor takes 0 bytes.
#
# </details>


# %% name="ex5-answer" tags=["answer"]
def weight(node):
    """Bytes of a node's value."""
    ### BEGIN SOLUTION
    value = node.meta["val"]
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
    ### END SOLUTION


# %% name="ex5-check" tags=["nbval-check-output"]
check("ex5")


# %% name="ex5-wrong-elements" tags=["wrong"] kind="misconception" says="bytes, got"
def weight(node):
    value = node.meta["val"]
    return value.numel() if isinstance(value, torch.Tensor) else 0


# %% name="ex5-wrong-types" tags=["wrong"] kind="visible-only" says="bytes, got"
def weight(node):
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return 0
    return value.numel() * (1 if value.dtype is torch.bool else 4)


# %% name="ex5-wrong-rule" tags=["wrong"] kind="built-in" says="a use of bytes_of"
def weight(node):
    from minicompile.aot.partition import bytes_of

    return bytes_of(node)


# %% [markdown]
# **Exercise 6 · A loss in chunks** (hard, 3 points, optional). Write `losses_and_slopes(logits, labels,
# ignore)`, the inside of such a chunk, as formulas: the sum of the rows' cross-entropy losses, and the
# gradient of that sum by `logits`, a tensor as large. A row whose label is `ignore` doesn't count. The check
# tries it alone, then makes it the pass's, and compares a model's loss and gradients with eager's.

# %% [markdown]
# **You will need**
#
# - `torch.log_softmax(logits, -1)`: logarithms of probabilities, row by row, without overflow.
# - `torch.arange(3) == torch.tensor([2, 0])[:, None]` gives
#   `tensor([[False, False, True], [ True, False, False]])`: a row for each label, true where it is.
# - `torch.where(condition, a, 0)`, `tensor.sum()`, `tensor.to(dtype)`.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# The loss of a row is minus the logarithm of the softmax at its label. Its slope by one of the logits is
# the softmax there, less 1 at the label.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# Don't index with labels: one that doesn't count may lie outside of the row. Compare instead, as in the
# example.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# Rows that don't count are zero in both: multiply by, or choose with, `(labels != ignore)[:, None]`.
#
# </details>


# %% name="ex6-answer" tags=["answer"]
def losses_and_slopes(logits, labels, ignore):
    """The sum of the losses, and its gradient by the logits."""
    ### BEGIN SOLUTION
    logs = torch.log_softmax(logits, -1)
    right = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    counts = (labels != ignore)[:, None]
    losses = -torch.where(right & counts, logs, 0).sum()
    return losses, (logs.exp() - right.to(logits.dtype)) * counts
    ### END SOLUTION


# %% name="ex6-check" tags=["nbval-check-output"]
check("ex6")


# %% name="ex6-wrong-softmax" tags=["wrong"] kind="misconception" says="the slopes of 4 rows"
def losses_and_slopes(logits, labels, ignore):
    logs = torch.log_softmax(logits, -1)
    right = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    counts = (labels != ignore)[:, None]
    return -torch.where(right & counts, logs, 0).sum(), logs.exp() * counts


# %% name="ex6-wrong-mean" tags=["wrong"] kind="misconception" says="the losses of 4 rows"
def losses_and_slopes(logits, labels, ignore):
    logs = torch.log_softmax(logits, -1)
    right = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    counts = (labels != ignore)[:, None]
    losses = -torch.where(right & counts, logs, 0).sum()
    return losses / len(labels), (logs.exp() - right.to(logits.dtype)) * counts / len(labels)


# %% name="ex6-wrong-ignored" tags=["wrong"] kind="visible-only" says="that don't count"
def losses_and_slopes(logits, labels, ignore):
    logs = torch.log_softmax(logits, -1)
    right = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    return -torch.where(right, logs, 0).sum(), logs.exp() - right.to(logits.dtype)


# %% name="ex6-wrong-overflow" tags=["wrong"] kind="visible-only" says="large logits"
def losses_and_slopes(logits, labels, ignore):
    softmax = logits.exp() / logits.exp().sum(-1, keepdim=True)
    right = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    counts = (labels != ignore)[:, None]
    losses = -torch.where(right & counts, softmax.log(), 0).sum()
    return losses, (softmax - right.to(logits.dtype)) * counts


# %% name="ex6-wrong-autograd" tags=["wrong"] kind="built-in" says="a use of cross_entropy"
def losses_and_slopes(logits, labels, ignore):
    logits = logits.detach().requires_grad_()
    with torch.enable_grad():
        losses = F.cross_entropy(logits, labels, ignore_index=ignore, reduction="sum")
    return losses.detach(), torch.autograd.grad(losses, logits)[0]


# %% [markdown]
# ## Go deeper
#
# - `minicompile/aot/partition.py`: this lesson is `min_cut` and `why_not_recomputed` there.
# - `minicompile/aot/maxflow.py`: Dinic's algorithm in one page.
# - `minicompile/plugins/chunked_loss/cross_entropy.py`: which losses go in chunks, and why others don't.
# - `torch/_functorch/partitioners.py`: `min_cut_rematerialization_partition`, and its bans.
# - `torch/_functorch/_activation_checkpointing/knapsack.py`: greedy, exact and by integer programming.
#
# **Where you are.** The model has a forward graph and a backward graph. The next lesson rewrites graphs.

# %% name="corridor"
from minicompile.lessons.pictures import corridor

corridor("aot")
