# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 12 · Why are these two loops one kernel?
#
# After this lesson you can
#
# - say when two loops may become one kernel, and when that would give wrong numbers;
# - say what it saves, in bytes;
# - read every decision of the scheduler, overrule it, and give it a rule of your own.
#
# Our example has three steps. To see each as a loop of its own, we forbid lowering to inline them
# (`inline="never"`); later we allow it again.

# %% name="setup" tags=["setup"]
try:
    import minicompile as mc
except ModuleNotFoundError:  # opened elsewhere, as on Colab
    get_ipython().run_line_magic(
        "pip", 'install -q "minicompile[notebook] @ git+https://github.com/your_name/minicompile"'
    )
    import minicompile as mc

import torch

from minicompile.extension import FusionPolicy, fusion_rule
from minicompile.lessons.exercise import checks

check = checks("12")

# %% name="example"


def f(x):
    y = torch.relu(x)
    u = y * 2
    return u + u.t()


def apart(function, *inputs, **options):
    """A trace in which lowering inlines nothing."""
    return mc.trace(mc.compile(function, options={"inline": "never", **options}), *inputs)


torch.manual_seed(0)
x = torch.randn(8, 8)
trace = apart(f, x)
trace.fusion_steps()

# %% [markdown]
# That is the whole story: three loops, two questions. Move the slider. To fuse loops is to run them
# as one kernel. The first pair was fused, the second was not, and each answer has its reason. The
# scheduler asks such questions until no pair is left; this lesson is about its two words, **right**
# and **wise**.
#
# ## What one kernel saves
#
# Arithmetic is cheap, memory is not. A fused kernel computes an element of `y`, keeps it in a
# register, and multiplies it at once. `y` is never written to memory, and never read back. Count it:

# %% name="bytes"


def moved(stages):
    """Bytes that all kernels read and write."""
    return sum(plan.cost.bytes for plan in stages.plans)


unfused = apart(f, x, fusion=False)
print("one table of floats:", x.numel() * x.itemsize, "bytes")
print(f"apart: {len(unfused.kernels)} kernels move {moved(unfused)} bytes")
print(f"fused: {len(trace.kernels)} kernels move {moved(trace)} bytes")
print("never in memory:", sorted(trace.schedule.memory.internal))

# %% name="fused-kernel"
trace.kernels[0]

# %% [markdown]
# ## Who reads what, and where
#
# Before fusion each loop is a node, with its *dependencies*: which elements of which buffer it reads
# and writes, as an index over its loops. A node must run after the writer of all that it reads. That
# is all the scheduler knows about a function, and it is enough.

# %% name="nodes"
for node in trace.schedule.before:
    print(node)

# %% [markdown]
# **Predict, then run.** `buf2` reads `buf1` at two places; their indices are printed above. Why
# does one of them make fusion impossible? Think of element `[0, 1]`: what has the loop over `buf1`
# written by the time when `[0, 1]` is computed?

# %% name="why-not"
trace.schedule.why("buf1", "buf2")

# %% [markdown]
# ## When is it right?
#
# Three conditions. Each slide is a function that breaks one, and what the scheduler said.
#
# 1. **The loops match**: both nodes walk the same space, perhaps after splitting or merging loops.
# 2. **Read where written**: what one node reads of the other, it reads at the very index that was
#    written in the same round.
# 3. **No third in between**: nobody must run after the one and before the other. If there is, fusing
#    them would make a *cycle*: the kernel would wait for itself.

# %% name="conditions"
from minicompile.lessons.pictures import slides


def different_loops(x):
    return x.sum(1), x.sum()


def another_index(x):
    y = torch.exp(x)
    return y, y[:, :4] * 2


def one_between(x):
    y = torch.exp(x)
    return y @ y + y


refusals = []
for function in (different_loops, another_index, one_between):
    decisions = apart(function, x).schedule.decisions
    last = [d for d in decisions if not d.fused and d.cause != "extern"][-1]
    refusals.append((function.__name__, last.cause, last))
slides("Three ways to be refused", *refusals)

# %% [markdown]
# **Predict, then run.** A softmax has reductions: the largest of a row must be known before the first
# `exp`. So is the `exp` another kernel? Decide: how many kernels for all the loops of
# `softmax(relu(x))`?

# %% name="softmax"


def soft(x):
    return torch.softmax(torch.relu(x), -1)


soft_trace = apart(soft, x)
print(len(soft_trace.schedule.before), "loops,", len(soft_trace.kernels), "kernel(s)")
soft_trace.kernels[0]

# %% [markdown]
# A kernel may have several loops over `r0` inside of one loop over `x0`. What a reduction gives is there
# for the rest of its row; a row lies in a small array that never leaves the cache. In the words of the
# decisions: a *prologue* goes into the loop of a reduction, an *epilogue* comes after it.

# %% name="soft-decisions"
for decision in soft_trace.schedule.decisions:
    print(decision)

# %% [markdown]
# **Break it.** The index is checked three times: when loops are matched, when they are joined, and
# once more when code is written. We take all three checks away, so that "the loops match" is enough.
# Predict what `u + u.t()` becomes.

# %% name="break-it"
from unittest import mock

from minicompile.codegen import merge
from minicompile.scheduling import align

with (
    mock.patch.object(align.Matching, "match", lambda self, mine, theirs: True),
    mock.patch.object(align, "_flaw", lambda nest: None),
    mock.patch.object(merge, "same", lambda one, other: True),
    mc.fresh_cache(),
):
    mc.reset()
    wrong_kernel = apart(f, x).kernels[0]
    wrong = mc.compile(f, options={"inline": "never"})(x)
mc.reset()
print(wrong_kernel)
print("equal to eager:", torch.allclose(wrong, f(x)))
print("equal to u + u:", torch.allclose(wrong, 4 * torch.relu(x)))

# %% [markdown]
# One kernel, the fewest bytes, and a wrong answer: the transposed element did not exist yet, so the
# kernel took the one at hand.
#
# ## When is it wise?
#
# What is right need not be good. A *fusion policy* answers two questions about a pair: `can_fuse` (is
# one kernel better?) and `score` (which pair comes first?). The built-in one fuses what saves memory
# traffic, the most bytes first, within a limit on a kernel's operations: its code grows with them.
# Two ways to save:
#
# - *vertical*: one reads what the other writes. Nobody need read it back, perhaps nobody need write it.
# - *horizontal*: both read the same elements. One load serves both.

# %% name="kinds"


def two_ways(x):
    y = torch.exp(x)
    return y + 1, x * 2


for decision in apart(two_ways, x).schedule.decisions:
    print(decision)
    print("   ", decision.numbers())

# %% [markdown]
# **Predict, then run.** Both loops read all of `x`. Will they be one kernel?

# %% name="nothing-saved"


def halves(x):
    return x[:4] + 1, x[4:] * 2


for decision in mc.trace(halves, x).schedule.decisions:
    print(decision)

# %% [markdown]
# They read all of it together, but no element twice: nothing is saved, so they stay apart. It would be
# right, though. Overrule the policy and see what changes: `schedule.what_if` fuses once more with your
# wishes. (What is wrong stays refused.)

# %% name="what-if" tags=["varies"]
mc.trace(halves, x).schedule.what_if(fuse=[("buf0", "buf1")])

# %% name="what-if-wrong" tags=["varies"]
print(trace.schedule.what_if(fuse=[("buf1", "buf2")]))

# %% [markdown]
# `mc.what_if` goes all the way: it compiles, checks the answer against eager and times both. Times
# differ, so nothing is kept here: run the cell. In JupyterLab it is a panel with switches.

# %% name="what-if-live" tags=["varies"]
mc.what_if(f, x)

# %% [markdown]
# ## A policy of your own
#
# A policy is an object in the registry. What is **right** it can't overrule: that is checked whatever
# it says. This one dislikes horizontal fusions:

# %% name="own-policy"


class VerticalOnly(FusionPolicy):
    def can_fuse(self, producer, consumer, context):
        if not context.flows(producer, consumer):
            return False, "neither reads what the other writes"
        return super().can_fuse(producer, consumer, context)


with mc.scoped():
    fusion_rule("policy")(VerticalOnly)
    for decision in apart(two_ways, x).schedule.decisions:
        print(decision)

# %% [markdown]
# ## Greedy
#
# The scheduler is *greedy*: it takes the pair with the highest score, fuses it, and looks again. It
# never undoes anything. So the order matters: a good first step may close the way to a better second
# one. Below, three loops read the same tables. The first one feeds a matrix product, the two others
# are needed after it. Follow the slides: which fusion is the one to regret?

# %% name="greedy"


def regret(x, y, z, w):
    b = torch.exp(x) * y + z
    a = torch.sin(x) * y - z
    c = torch.cos(x) * z - y
    return (b @ w) * a + c


tables = [torch.randn(16, 16) for _ in range(4)]
regret_trace = apart(regret, *tables)
print(moved(regret_trace), "bytes")
regret_trace.fusion_steps()

# %% [markdown]
# Sharing loads saves more than handing over one table, so all three came together before the product.
# From then on nobody could join the loops after it: the product stands between. Exercise four is to
# do better.
#
# ## With inlining
#
# Now allow lowering to inline, as it does by default:

# %% name="inlined"
inlined = mc.trace(f, x)
print(inlined.loops.operations[0])
print(f"{len(inlined.kernels)} kernel, {moved(inlined)} bytes")

# %% [markdown]
# One loop! Inlining can do what fusion can't: it doesn't wait for the transposed element, it computes
# it again, at any index. That is cheap for a `relu` and a product by two, and dear for an `exp`. So
# there are two rooms with two tools: lowering repeats what is cheap, scheduling joins what is written.

# %% name="inlined-exp"


def dear(x):
    u = torch.exp(x)
    return u + u.t()


for operation in mc.trace(dear, x).loops.operations:
    print(operation)

# %% [markdown]
# ## One block of the model
#
# The same for a `Block`, as it is compiled by default: nodes before, kernels after, and the reasons
# of those that stayed apart.

# %% name="block"
from collections import Counter

from minicompile.lessons.model import Block, GPTConfig

block = Block(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16))
with torch.no_grad():
    schedule = mc.trace(block, torch.randn(2, 16, 32)).schedule
loops = [node for node in schedule.before if hasattr(node, "body")]
print(len(loops), "loops and", len(schedule.before) - len(loops), "library calls before")
print(len(schedule.kernels), "kernels after")
for cause, count in Counter(d.cause for d in schedule.decisions).most_common():
    print(f"{count:>3} x {cause}")

# %% name="block-picture"
schedule

# %% [markdown]
# > **In torch.compile.** TorchInductor's `Scheduler` does the same on the same kind of data: nodes with
# > `MemoryDep`s (a buffer, an index, ranges), `can_fuse` (legal), `score_fusion` (bytes in common), greedy
# > rounds. Below, live and without building a kernel: nodes named `op0_op1` are fused. Read
# > `torch/_inductor/scheduler.py` (`fuse_nodes`, `can_fuse_vertical`, `will_fusion_create_cycle`), then
# > `choices.py` beside it. They also time some fusions on the GPU and fuse into their own matrix products.

# %% name="torch-compile"
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def their_nodes(function, *inputs):
    """Inductor's nodes after fusion: what each reads and writes."""
    lowered = GraphLowering(make_fx(function, select_decomp_table(), "fake")(*inputs))
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    debug = V.set_debug_handler(DebugContext())
    with V.set_graph_handler(lowered), V.set_fake_mode(fakes), debug:
        lowered.run(*map(fakes.from_tensor, inputs))
        for node in Scheduler(lowered.operations).nodes:
            reads, writes = node.read_writes.reads, node.read_writes.writes
            print(node.get_name(), "reads", *map(str, reads), "writes", *map(str, writes))


square = torch.randn(64, 64)
print("softmax(relu(x)):")
their_nodes(soft, square)
print("exp(x) @ exp(x) + exp(x):")
their_nodes(one_between, square)

# %% [markdown]
# ## Recap
#
# 1. Two loops become one kernel to keep values in registers instead of memory.
# 2. That is right if their loops match, if each element is read where it is written, and if no third
#    must run between them.
# 3. It is wise if it saves memory traffic and the kernel does not grow too large; a policy says so.
# 4. The scheduler is greedy: the best pair first, and nothing is undone.
# 5. Inlining computes again, fusion hands over: the first works at any index, the second costs no
#    arithmetic.

# %% [markdown]
# ## Exercises
#
# **Exercise 1 · What never reaches memory?** (easy, 2 points). Write `in_registers(schedule)`: the set of
# names of buffers that need no memory, since the only kernel that reads them is the one that computes
# them, and the graph doesn't return them.

# %% [markdown]
# **You will need**
#
# - `schedule.kernels`: the fused nodes; the `nodes` of each are its members, a node's `name` is the buffer
#   that it writes. `[[node.name for node in kernel.nodes] for kernel in trace.schedule.kernels]` gives
#   `[['buf0', 'buf1'], ['buf2']]`. Library calls are not among them.
# - `schedule.before`: all nodes, library calls too. Each has `reads`:
#   `[read.buffer for read in trace.schedule.before[1].reads]` gives `['buf0']`.
# - `schedule.graph.returned`: the names of what the graph returns, `list(trace.schedule.graph.returned)`
#   gives `['buf2']`.
# - `schedule.memory` is not allowed here: it holds the answer.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# For each member of each kernel: which nodes of `schedule.before` read its buffer?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# It needs no memory if all of them are members of the same kernel, and it isn't returned.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def in_registers(schedule):
    """Names of buffers that exist inside of one kernel only, as a set.

    in_registers(trace.schedule) gives {'buf0'}.
    """
    ### BEGIN SOLUTION
    found = set()
    for kernel in schedule.kernels:
        members = {node.name for node in kernel.nodes}
        for name in members - set(schedule.graph.returned):
            readers = {n.name for n in schedule.before if name in {d.buffer for d in n.reads}}
            if readers <= members:
                found.add(name)
    return found
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-not-returned" tags=["wrong"] kind="misconception" says="expected ['buf0'], got ['buf0',"
def in_registers(schedule):
    members = {node.name for kernel in schedule.kernels for node in kernel.nodes}
    return members - set(schedule.graph.returned)


# %% name="ex1-wrong-all-but-last" tags=["wrong"] kind="misconception" says="expected [], got ['buf0']"
def in_registers(schedule):
    return {node.name for kernel in schedule.kernels for node in kernel.nodes[:-1]}


# %% name="ex1-wrong-kernels-only" tags=["wrong"] kind="visible-only" says="expected [], got ['buf0']"
def in_registers(schedule):
    found = set()
    for kernel in schedule.kernels:
        members = {node.name for node in kernel.nodes}
        for name in members - set(schedule.graph.returned):
            loops = [node for other in schedule.kernels for node in other.nodes]
            readers = {n.name for n in loops if name in {d.buffer for d in n.reads}}
            if readers <= members:
                found.add(name)
    return found


# %% name="ex1-wrong-plan" tags=["wrong"] kind="built-in" says="a use of internal"
def in_registers(schedule):
    return set(schedule.memory.internal)


# %% [markdown]
# **Exercise 2 · A cycle without a library** (solid, 3 points). Above, a matrix product stood between two
# loops. Write `cyclic(x)` for a table of floats, in which two loops are kept apart because *a loop of
# ours* must run between them. No library call may be left, and the answer must equal eager's.

# %% [markdown]
# **You will need**
#
# - `apart(cyclic, x).schedule`: print it, for the kernels, and its `decisions`, for who was kept apart.
# - A pair kept apart like this has `"cycle"` as its `cause`:
#   `[decision.cause for decision in apart(one_between, x).schedule.decisions if not decision.fused]` gives
#   `['extern', 'extern', 'cycle']`.
# - `y.sum()`, `y.sum(1, keepdim=True)`: loops with a sum. `y / y.sum()` is no cycle: the sum goes over the
#   same elements as both its neighbours, and all become one kernel.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# You need a loop that reads the first and is read by the last, and that can share a kernel with neither: it
# must go over other elements than they do.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# Sum in two steps: first each row, then the sums of the rows. The second of these goes over one number for
# each row.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# Let the last loop, over the whole table, use both the sums of the rows and the sum of these.
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def cyclic(x):
    """A function in which a loop stands between two others."""
    ### BEGIN SOLUTION
    y = torch.exp(x)
    rows = y.sum(1, keepdim=True)
    return y / rows * rows.sum()
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-product" tags=["wrong"] kind="misconception" says="no library call, got aten.mm"
def cyclic(x):
    y = torch.exp(x)
    return y @ y.t() @ y + y


# %% name="ex2-wrong-eight" tags=["wrong"] kind="visible-only" says="expected a result"
def cyclic(x):
    y = torch.exp(x.reshape(8, 8))
    rows = y.sum(1, keepdim=True)
    return y / rows * rows.sum()


# %% name="ex2-wrong-policy" tags=["wrong"] kind="built-in" says="a use of fusion_rule"
def cyclic(x):
    return torch.exp(x) + x


class AlwaysCyclic(FusionPolicy):
    def can_fuse(self, producer, consumer, context):
        return False, "cycle: says so", "cycle"


fusion_rule("policy")(AlwaysCyclic)


# %% [markdown]
# **Exercise 3 · can_fuse** (solid, 5 points). The policy is taken away: the scheduler asks you. `p` and `c`
# are lists of nodes; those of each list share a kernel already, and `c` may read what `p` writes. `nodes`
# are all nodes in an order in which they can run. Write `can_fuse(p, c, nodes)`, which gives a verdict
# and a reason in words. Say yes if it is right: all nodes have equal ranges; whatever `c` reads of `p`
# it reads at the index at which it was written; no path leads from `p` through a third node to `c`.

# %% [markdown]
# **You will need**
#
# - `tuple(node.body.all_ranges.values())`: the extents of a node's loops.
#   `tuple(trace.schedule.before[0].body.all_ranges.values())` gives `(8, 8)`.
# - `p`, `c`: lists of single nodes, such as `trace.schedule.before[:1]`. `nodes`: the list of all single
#   nodes, like `trace.schedule.before`; those of `p` and `c` are among them.
# - `node.reads`, `node.writes`: entries with a `buffer` and an `index`. It is None where the data decides
#   which element it is, as in `x[i]`; such an index equals nothing, not even None.
#   `[(place.buffer, str(place.index)) for place in trace.schedule.before[0].writes]` gives
#   `[('buf0', '8*p0 + p1')]`.
# - `nodes` may hold library calls, which have `reads` and `writes`, but no `body`; `p` and `c` hold loops
#   only.
# - `return False, "their loops differ"`: a verdict with its reason.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Three rules, one after the other: each returns a refusal, and what is left is a yes.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# For the second, a dict from each buffer that `p` writes to the index at which it does; then go through
# what `c` reads.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# For the path go through `nodes` once and keep a set of buffers that depend on `p` through others: a node
# that is in neither list, and reads something written by `p` or from that set, adds all that it writes.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def can_fuse(p, c, nodes):
    """May the nodes of p and c run as one kernel? (verdict, reason)

    With nodes = trace.schedule.before, can_fuse(nodes[:1], nodes[1:2], nodes)[0] gives True, and
    can_fuse(nodes[:2], nodes[2:], nodes)[0] gives False.
    """
    ### BEGIN SOLUTION
    if len({tuple(node.body.all_ranges.values()) for node in p + c}) > 1:
        return False, "their loops differ"
    written = {place.buffer: place.index for node in p for place in node.writes}
    for node in c:
        for read in node.reads:
            if read.buffer in written:
                index = written[read.buffer]
                if index is None or read.index != index:
                    return False, f"{read.buffer} is written at {index}, read at {read.index}"
    through = set()
    for node in nodes:
        reads = {read.buffer for read in node.reads}
        if node in c and reads & through:
            return False, f"{node.name} needs a third node, which needs the producer"
        if node not in p and node not in c and reads & (through | written.keys()):
            through |= {place.buffer for place in node.writes}
    return True, "every element is read where it is written"
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-ranges" tags=["wrong"] kind="misconception" says="+ 8*p1: expected refusal, got fusion"
def can_fuse(p, c, nodes):
    spaces = {tuple(node.body.all_ranges.values()) for node in p + c}
    return len(spaces) == 1, "the loops are equal, or not"


# %% name="ex3-wrong-shy" tags=["wrong"] kind="misconception" says="expected fusion, got refusal"
def can_fuse(p, c, nodes):
    return False, "two kernels are always right"


# %% name="ex3-wrong-one-hop" tags=["wrong"] kind="misconception" says="between: expected refusal, got fusion"
def can_fuse(p, c, nodes):
    if len({tuple(node.body.all_ranges.values()) for node in p + c}) > 1:
        return False, "their loops differ"
    written = {place.buffer: place.index for node in p for place in node.writes}
    read = {place.buffer for node in c for place in node.reads}
    for node in c:
        for place in node.reads:
            if place.buffer in written and place.index != written[place.buffer]:
                return False, "another index"
    for node in nodes:
        if node not in p and node not in c:
            takes = {place.buffer for place in node.reads} & written.keys()
            if takes and {place.buffer for place in node.writes} & read:
                return False, "a third node"
    return True, "fine"


# %% name="ex3-wrong-two-nones" tags=["wrong"] kind="visible-only" says="None: expected refusal, got fusion"
def can_fuse(p, c, nodes):
    if len({tuple(node.body.all_ranges.values()) for node in p + c}) > 1:
        return False, "their loops differ"
    written = {place.buffer: place.index for node in p for place in node.writes}
    for node in c:
        for read in node.reads:
            if read.buffer in written and read.index != written[read.buffer]:
                return False, "another index"
    through = set()
    for node in nodes:
        reads = {read.buffer for read in node.reads}
        if node in c and reads & through:
            return False, "a third node"
        if node not in p and node not in c and reads & (through | written.keys()):
            through |= {place.buffer for place in node.writes}
    return True, "every element is read where it is written"


# %% name="ex3-wrong-bare" tags=["wrong"] kind="misconception" says="expected (verdict, reason), got True"
def can_fuse(p, c, nodes):
    return len({tuple(node.body.all_ranges.values()) for node in p + c}) == 1


# %% name="ex3-wrong-align" tags=["wrong"] kind="built-in" says="a use of align"
def can_fuse(p, c, nodes):
    from minicompile.scheduling.align import align
    from minicompile.scheduling.nest import LoopNest, nest_of

    joined = align(*(nest_of(group[0], nodes.index(group[0]), {}) for group in (p, c)))
    return isinstance(joined, LoopNest), "the compiler says so"


# %% [markdown]
# **Exercise 4 · A score that looks further** (hard, 4 points). The greedy scheduler regrets its order on
# `regret`, above. Write `score(producer, consumer, context)`: the higher, the earlier a pair is
# fused. Numbers or tuples of numbers will do. Your score becomes the policy's; on `regret`, and on
# variants of it in other orders, the kernels must move fewer bytes than with the built-in score. On a
# `Block` they may not move more.

# %% [markdown]
# **You will need**
#
# - `producer`, `consumer`: two kernels as far as they are fused, objects of class `LoopNest`. A score need
#   only hand them to `context`. For `f` above, the first two are those of `buf0` and `buf1`.
# - `context.flows(producer, consumer)`: the names of the buffers that one writes and the other reads, a set
#   that is empty where both only read the same. For these two it is `frozenset({'buf0'})`.
# - `context.saved(producer, consumer).total()`: the bytes that fusing saves, here `512`. A score that
#   returns just this is the built-in one, but for ties.
# - Tuples are compared from the left: `(True, 1) > (False, 9)` gives `True`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Look at the steps of `regret` above: which fusion came first, and which one was refused after it?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Which kind of saving is lost for good when another fusion comes first, and which one can often be had
# later?
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def score(producer, consumer, context):
    """What is fused first: a number, or a tuple of numbers.

    The scheduler calls score(producer, consumer, context) for each pair and fuses the one with the highest.
    """
    ### BEGIN SOLUTION
    saved = context.saved(producer, consumer).total()
    return bool(context.flows(producer, consumer)), saved
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-least" tags=["wrong"] kind="misconception" says="expected fewer than 10240, got 10240"
def score(producer, consumer, context):
    return -context.saved(producer, consumer).total()


# %% name="ex4-wrong-last-first" tags=["wrong"] kind="visible-only" says="bytes: expected fewer than"
def score(producer, consumer, context):
    return min(nest.members[0].order for nest in (producer, consumer))


# %% name="ex4-wrong-built-in" tags=["wrong"] kind="built-in" says="a use of FusionPolicy"
def score(producer, consumer, context):
    return FusionPolicy().score(producer, consumer, context)


# %% [markdown]
# **Exercise 5 · Right, but not wise** (hard, 3 points, optional). Find two loops that the scheduler keeps
# apart, and that could be one kernel, which moves just as many bytes. Write `unwise(schedule)`: the
# names of two buffers that such loops write and the cause of the refusal, three strings `(a, b, cause)`. Try
# it with `what_if`: `schedule.decisions` is not allowed here.

# %% [markdown]
# **You will need**
#
# - `schedule`: what `mc.trace(function, x).schedule` gives.
# - `schedule.what_if(fuse=[(a, b)])`: its `refused` is empty if the wish was granted; its `rows` is a list
#   of tuples of three strings, name, before and after, such as `("bytes moved", "512 B", "512 B")`.
# - `schedule.why(a, b)`: `trace.schedule.why("buf1", "buf2").same_kernel` gives `False`, and its
#   `decision.cause` is `trace.schedule.why("buf1", "buf2").decision.cause`: `'index_mismatch'`.
# - `[node.name for kernel in schedule.kernels for node in kernel.nodes]`: the names of all loops.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Try all pairs of loops that are not in the same kernel.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# A pair is right if nothing is refused, and unwise if before and after are equal in the row of the bytes.
#
# </details>


# %% name="ex5-answer" tags=["answer"]
def unwise(schedule):
    """(a, b, cause): two loops whose fusion would be right and save nothing.

    unwise(mc.trace(halves, x).schedule) gives ('buf0', 'buf1', 'no_saving').
    """
    ### BEGIN SOLUTION
    names = [node.name for kernel in schedule.kernels for node in kernel.nodes]
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            answer = schedule.why(a, b)
            if answer.same_kernel:
                continue
            tried = schedule.what_if(fuse=[(a, b)])
            before, after = next(row[1:] for row in tried.rows if row[0] == "bytes moved")
            if not tried.refused and before == after:
                return a, b, answer.decision.cause
    return None
    ### END SOLUTION


# %% name="ex5-check" tags=["nbval-check-output"]
check("ex5")


# %% name="ex5-wrong-refused" tags=["wrong"] kind="misconception" says="expected a fusion that is right, got"
def unwise(schedule):
    names = [node.name for kernel in schedule.kernels for node in kernel.nodes]
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            answer = schedule.why(a, b)
            if not answer.same_kernel:
                return a, b, answer.decision.cause
    return None


# %% name="ex5-wrong-first-two" tags=["wrong"] kind="visible-only" says="expected two kernels, got one"
def unwise(schedule):
    names = [node.name for kernel in schedule.kernels for node in kernel.nodes]
    return names[-2], names[-1], "no_saving"


# %% name="ex5-wrong-list" tags=["wrong"] kind="built-in" says="a use of decisions"
def unwise(schedule):
    for decision in schedule.decisions:
        if decision.cause == "no_saving":
            return decision.producer, decision.consumer, decision.cause
    return None


# %% [markdown]
# ## Go deeper
#
# - `minicompile/scheduling/fusion.py`: the greedy loop and the policy, top to bottom.
# - `minicompile/scheduling/align.py`: how two loop nests become one, and the check at its end.
# - `minicompile/scheduling/nodes.py`: what a schedule consists of.
# - `minicompile/scheduling/memory.py`: what is allocated, reused and freed.
# - `torch/_inductor/scheduler.py`, `torch/_inductor/choices.py`, `torch/_inductor/dependencies.py`.
#
# **Where you are.** Loops have become kernels, on paper. The next lesson writes them down.

# %% name="corridor"
from minicompile.lessons.pictures import corridor

corridor("scheduling")
