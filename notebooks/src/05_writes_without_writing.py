# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 05 · What is an assignment to half a tensor, without assignment?
#
# After this lesson you can
#
# - tell from an operator's signature whether it makes a value, shows one, or writes into one;
# - follow a write through views of views, and say which values are wrong if one step is forgotten;
# - write the rule that carries a write from a view to its base, and have the compiler use it.
#
# The example writes into the left half of a table, through a second name for it:

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

aten = torch.ops.aten
check = checks("05")

# %% name="example"
from minicompile.lessons.storages import memory_story


def f(x):
    y = x.clone()
    half = y[:, :2]
    half.mul_(10)
    return y.t() + half.sum()


x = torch.arange(1.0, 9.0).view(2, 4)
trace = mc.trace(f, x)
memory_story(trace, x)

# %% [markdown]
# Move the slider, slowly, to the write. `half` and `y.t()` have no numbers of their own: each is a
# **view**, a shape laid over the memory of `y`. One write changes what three names show.
#
# Read the row of boxes as a film. Memory keeps only the last picture. A graph in which nothing is
# ever overwritten keeps all of them: version 0 is one value, version 1 another. That graph is what
# the compiler makes:

# %% name="both-graphs"
from minicompile.lessons.pictures import slides

slides(
    "f, with and without memory",
    ("recorded", "as eager PyTorch runs it: mul_ changes memory", trace.aot.recorded),
    ("functional", "every version is a value with a name", trace.aot.level("full")),
)

# %% [markdown]
# The second slide is the answer to the question above. `mul_` became `mul`, which makes two new
# columns, and `slice_scatter(clone, mul, 1, 0, 2)` makes **a new table**: that of `clone`, but
# columns 0 to 2 are those of `mul`. From there on, whoever reads `y` reads `slice_scatter`, and
# `half` is sliced anew from it.
#
# Rewriting a graph like this is *functionalization*: the same values, no operator that writes, no
# memory that two values share.

# %% [markdown]
# ## Why bother?
#
# Every later room moves, merges and removes operators. That is safe only if a call with the same
# arguments always gives the same result. Here is the simplest such rewrite: calls that look alike
# are made once.


# %% name="same-calls-once"
def same_calls_once(graph_module):
    seen = {}
    for node in list(graph_module.graph.nodes):
        first = seen.setdefault((node.target, node.args), node)
        if node.op == "call_function" and first is not node:
            node.replace_all_uses_with(first)
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


def growth(x):
    before = x.sum()
    x.add_(1)
    return x.sum() - before


# %% [markdown]
# **Predict, then run.** `growth` sums eight numbers, adds one to each, and sums again. What does it
# give after `same_calls_once`, on the recorded graph and on the functional one?

# %% name="predict-same-calls"
growth_trace = mc.trace(growth, x.clone())
on_recorded = same_calls_once(growth_trace.aot.recorded.gm)(x.clone())[0][0]
on_functional = same_calls_once(mc.trace(growth, x.clone()).aot.level("full").gm)(x.clone())[0]
print("eager:               ", growth(x.clone()).item())
print("merged, recorded:    ", on_recorded.item())
print("merged, functional:  ", on_functional.item())

# %% [markdown]
# In the recorded graph both sums are `aten.sum(x)`: equal text, different time. In the functional
# graph the second one reads another value, so time is no longer part of the meaning. All that
# functionalization does is to turn "when" into "which".

# %% [markdown]
# ## Three kinds of operators
#
# How does a compiler know what an operator does to memory? It never looks into the kernel. Each
# *overload*, a variant of an operator (`aten.add.out` is the one of `add` that writes into `out`),
# has a *schema*: its typed signature, which says who shares memory with whom. A letter names a
# memory, `!` means that it is written.

# %% name="schemas"
for op in (aten.mul.Tensor, aten.mul_.Tensor, aten.slice.Tensor, aten.split.Tensor, aten.add.out):
    print(op._schema)

# %% [markdown]
# No letter: the result is new. `Tensor(a)` in and `Tensor(a)` out: the result is a view, it shows
# the argument's memory. `Tensor(a!)`: the argument is written, and what comes back is the argument.
# The underscore of `mul_` is only a habit; `add.out` has none, and writes.
#
# Views give an *alias*: a second name for the same numbers. The box they live in is a *storage*. Ask
# PyTorch who lives where:

# %% name="storages"
y = x.clone()
half, turned, whole = y[:, :2], y.t(), y + 0
for name, value in (("y", y), ("half", half), ("turned", turned), ("whole", whole)):
    same = value.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    print(f"{name:>6}: size {list(value.shape)}, strides {value.stride()}, in y's storage: {same}")

# %% [markdown]
# The tracer notes the storage of each value it records, as `meta["storage"]`. That is all that
# functionalization needs to know about memory. A storage's first value is its **root**; views are
# made of the root, or of other views.

# %% name="who-shares"
boxes = {}
for node in trace.aot.recorded.nodes:
    if "storage" in node.meta:
        boxes.setdefault(node.meta["storage"], []).append(node.name)
for names in boxes.values():
    print("root", names[0], "and what shares its memory:", names[1:])

# %% [markdown]
# ## Writing: through the view, backwards
#
# A view is a function from the base to a part of it: `half = slice(y)`. A write hands us the new
# part. What is the new base? The function that answers is the *inverse view* of `slice`: it takes
# the old base and the new part. For `slice` it is `slice_scatter`, and there is one for each kind
# of view. They are a registry, like all rules here:

# %% name="inverses"
from minicompile.extension import inverse

print(len(inverse), "views have an inverse, among them")
base = torch.arange(1.0, 7.0).view(2, 3)
for view, arguments in (
    (aten.select.int, (0, 1)),
    (aten.t.default, ()),
    (aten.view.default, ([6],)),
):
    part = view(base, *arguments)
    back = inverse[view](base, part * 10, *arguments)
    print(f"  {view}{arguments} shows {part.tolist()}; ten times that gives {back.tolist()}")

# %% [markdown]
# What makes such a rule right? Two laws. First, you read what you wrote: the view of the new base is the
# new part. Second, nothing else changed: put back what was there, and the base is the old one. A rule
# that keeps both laws can't be told from a write.

# %% name="laws"
examples = {
    aten.slice.Tensor: (1, 0, 2),
    aten.select.int: (0, 1),
    aten.diagonal.default: (1,),
    aten.transpose.int: (0, 1),
    aten.unsqueeze.default: (0,),
}
for view, arguments in examples.items():
    old = view(base, *arguments)
    new = -old.clone()
    read = torch.equal(view(inverse[view](base, new, *arguments), *arguments), new)
    kept = torch.equal(inverse[view](base, old, *arguments), base)
    print(f"{view!s:<24} you read what you wrote: {read}   nothing else changed: {kept}")

# %% [markdown]
# ### A view of a view
#
# Real code stacks views. Then the write climbs: the inverse of the last view gives new contents of
# the view before it, and so on up to the root. `corner` below is a row of a half of a transpose.


# %% name="chain"
def chain(x):
    y = x.clone()
    left = y.t()[:2]
    corner = left[0]
    corner.mul_(100)
    return y


chain_trace = mc.trace(chain, x)
memory_story(chain_trace, x)

# %% [markdown]
# **Predict, then run.** Three views lie between `corner` and `y`. Which three inverses will the
# graph hold, and in which order?

# %% name="predict-chain"
for node, op in chain_trace.aot.level("full").calls:
    print(f"{node.name:<16} {op}")

# %% [markdown]
# Down to the row, a product, and up again: `select_scatter` undoes `select`, `slice_scatter` undoes
# `slice`, and a transpose is undone by a transpose.

# %% [markdown]
# ## Reading: late, and only if something changed
#
# After the write, every other view of that storage is out of date. Making them all anew would be
# wasteful: most are never read again. So each storage counts its versions, each value remembers
# the version that it was computed from, and a view is *replayed*, called again on the present
# root, when it is next read and the numbers differ.


# %% name="reading"
def two_writes(x):
    y = x.clone()
    row, column = y[0], y[:, 0]
    row.add_(1)
    row.add_(1)
    column.mul_(10)
    return row.sum()


print(mc.trace(two_writes, x).aot.level("full"))

# %% [markdown]
# Follow `row`: it is selected once before the first write, once before the second, and once at the
# end, since the write through `column` reached its first number. `column` itself was made before
# any write; what `mul` reads is a later copy of it.
#
# The pass is one class, and `read` is the method through which it looks at any old value. Put a
# listener before it, and watch which values were out of date when they were needed (`select` is the
# row, the next one the column):

# %% name="watch-reads"
from unittest import mock

from minicompile.aot.functionalize import Functionalizer

right_read = Functionalizer.read


def watched(self, node):
    first = self.same_as.get(node, node)
    _, old = self.values[first]
    contents = right_read(self, node)
    _, new = self.values[first]
    if new != old:
        print(f"{first}: computed at version {old}, called again at version {new}")
    return contents


with mock.patch.object(Functionalizer, "read", watched):
    mc.trace(two_writes, x)

# %% [markdown]
# ## Break it
#
# Take one line away: never replay, give every reader the value that it saw first. The graph is
# well-formed, it compiles, nothing warns. (The patch ends with the block; `mc.reset` forgets what
# was compiled meanwhile.)

# %% name="break-it"


def stale(self, node):
    value, _version = self.values[self.same_as.get(node, node)]
    return value


with mock.patch.object(Functionalizer, "read", stale):
    wrong = mc.compile(f, backend="aot_eager")(x)
mc.reset()
print("eager:       ", f(x)[0].tolist())
print("never replay:", wrong[0].tolist())
print("whole again: ", mc.compile(f, backend="aot_eager")(x)[0].tolist())

# %% [markdown]
# Both wrong numbers are off by the same amount. The sum read the old `half`, from before the write,
# while `y.t()` came after it and was right. That is how a lost write looks: a few plausible numbers
# are wrong, far from the line that is to blame.
#
# A rule may also be missing. Then nothing is lost: the write is placed by its address, with
# `as_strided_scatter`. Right for every view, but no later room can see through it:

# %% name="no-inverse"
with mc.without("inverse:aten.slice"):
    clumsy = mc.trace(f, x)
print("with the rule:   ", trace.aot.level("full").op_count, "operations")
print("without the rule:", clumsy.aot.level("full").op_count, "operations")
slides(
    "f, with and without the inverse of slice",
    ("with", "the write is a slice_scatter", trace.aot.level("full")),
    ("without", "flatten, scatter by address, shape again", clumsy.aot.level("full")),
)

# %% [markdown]
# ## Memory that others see
#
# Inside the graph we may rename versions as we like. But a caller sees two things: inputs that were
# written to, and outputs that share memory. A functional graph can do neither, so it returns the
# new values, and a list says what must be done with them afterwards.


# %% name="outside"
def outside(x):
    x[0].add_(1)
    doubled = x * 2
    return doubled[0], doubled[:, 1], x[1], doubled.sum()


outside_trace = mc.trace(outside, x.clone())
print(outside_trace.aot.metadata)

# %% [markdown]
# Input 0 gets its new contents by a *copy-back*. Output 2 is rebuilt as a view of that input. The
# first two outputs show one memory, so the graph returns the base once and the views are made of it
# afterwards. The sum is a result as it is: nothing to do.
#
# Aliased inputs are harder. If `a` and `b` overlap and `a` is written, then `b` changed too. The real
# compiler gives the graph one more input that holds both, a *synthetic base*, and makes `a` and `b` as
# its views. Ours refuses at the front desk, `aot/admit.py`: such calls are rare, so they run in eager,
# with a reason:


# %% name="overlapping"
def overlapping(a, b):
    a.mul_(10)
    return b + 1


def run(function):
    memory = torch.arange(1.0, 7.0)
    return function(memory[:4], memory[2:]).tolist()


compiled = mc.compile(overlapping)
memory = torch.arange(1.0, 7.0)
print("eager:   ", run(overlapping))
print("compiled:", run(compiled))
print(*mc.explain(compiled)(memory[:4], memory[2:]).breaks)

# %% [markdown]
# ## The model: a cache that is written in place
#
# When the GPT writes text token by token, each attention layer keeps the keys and values of all
# tokens so far, and writes new ones into the middle: `self.keys[:, :, start:end] = keys`. An
# assignment to part of a tensor, in the caller's memory, read again on the next line through
# another view.

# %% name="cache"
from minicompile.lessons.model import Block, GPTConfig, LayerCache

config = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)
torch.manual_seed(0)
block = Block(config).eval()
cache = LayerCache(config, 1, block.mlp.widen.weight)
h = torch.randn(1, 3, 32)
with torch.no_grad():
    cached = mc.trace(block, h, cache, 4)
for node, op in cached.aot.level("full").calls:
    if "scatter" in str(op):
        print(node.name, "=", op, node.args[1:])
print(cached.aot.metadata)

# %% [markdown]
# **Predict, then run.** Three of sixteen places are written. Must the compiled code copy the whole
# cache twice: once into `slice_scatter`, once back? Decide, then look at the wrapper of the append
# alone.


# %% name="predict-in-place"
def append(cache, keys):
    return cache.append(keys, keys, 4)[0].sum()


appended = mc.trace(append, cache, torch.randn(1, 2, 3, 16))
print(appended.wrapper)

# %% [markdown]
# No copy at all. `in place` in a comment means: the scheduler saw that a result is an input's new
# contents, that nobody reads the old ones any more, and let the kernel write there. So a
# functional graph costs nothing here: it gave up memory to be free to reorder, and a later room
# takes memory back where that is safe.
#
# The kernel still walks over all sixteen places: `slice_scatter` as a loop asks of each whether it
# is written. The answer changes at two places only, so the loop is cut there into pieces that ask
# nothing. Find the piece that takes the new values:

# %% name="cache-kernel"
appended.kernels[0]

# %% [markdown]
# > **In torch.compile.** AOTAutograd does the same while it traces: each tensor is wrapped
# > (`FunctionalTensorWrapper`), and the wrapper keeps what our pass keeps: root, chain of views,
# > a counter. `torch.func.functionalize` gives you that machine alone. Compare its graph of `f`
# > with ours. Where an input is written, it ends with one `copy_`; ours lists it in the metadata
# > instead. To read: `torch/_functorch/_aot_autograd/functional_utils.py`, and in ATen's C++ sources
# > the files FunctionalTensorWrapper and FunctionalInverses.

# %% name="in-torch"
from torch.fx.experimental.proxy_tensor import make_fx

print(make_fx(torch.func.functionalize(f))(x).code)
theirs = make_fx(torch.func.functionalize(outside))(x.clone())
print("their last write, to the input:", [n.name for n in theirs.graph.nodes if "copy_" in str(n)])

# %% [markdown]
# We simplified: our pass runs on a graph that is already recorded, theirs while recording. They
# also rewrite custom operators that write (`auto_functionalized`), and Inductor has a pass that
# turns scatters back into writes (`torch/_inductor/fx_passes/reinplace.py`), where we leave that to
# the scheduler.

# %% [markdown]
# ## Recap
#
# 1. A view is a shape over another value's memory; an operator's schema says whether it makes,
#    shows or writes.
# 2. Functionalization replaces "the same memory, later" by "another value": time leaves the graph.
# 3. A write through a view becomes a new root, by the inverse of each view on the way up.
# 4. Other views are replayed from the root when next read, if the storage's version has changed.
# 5. What a caller can see, written inputs and shared outputs, is returned as values and restored
#    around the graph.

# %% [markdown]
# ## Exercises

# %% [markdown]
# **Exercise 1 · make, show or write** (easy, 2 points). `what_it_does(op)` takes an operator overload such
# as `aten.mul_.Tensor` and gives `"new"`, `"view"` or `"write"`, read off its schema. Names prove
# nothing: some writers have no underscore.

# %% [markdown]
# **You will need**
#
# - `op._schema.arguments`, `op._schema.returns`: lists. Each entry has an `alias_info`, which is None for a
#   type without a letter.
# - `alias_info.is_write`: the `!`. `aten.mul_.Tensor._schema.arguments[0].alias_info.is_write` gives
#   `True`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# What has a view in its schema that an operator with a new result has not?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# An operator that writes also returns an alias: ask in the right order.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def what_it_does(op):
    """ "new", "view" or "write", from an operator's schema."""
    ### BEGIN SOLUTION
    schema = op._schema
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return "write"
    if any(result.alias_info is not None for result in schema.returns):
        return "view"
    return "new"
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-order" tags=["wrong"] kind="misconception" says="expected 'write', got 'view'"
def what_it_does(op):
    if any(result.alias_info is not None for result in op._schema.returns):
        return "view"
    return "new"


# %% name="ex1-wrong-name" tags=["wrong"] kind="visible-only" says="expected 'write', got 'view'"
def what_it_does(op):
    if op.overloadpacket.__name__.endswith("_"):
        return "write"
    return "view" if any(r.alias_info is not None for r in op._schema.returns) else "new"


# %% name="ex1-wrong-helper" tags=["wrong"] kind="built-in" says="a use of gives_view"
from minicompile.ops.nodes import gives_view, writes


def what_it_does(op):
    return "write" if writes(op) else "view" if gives_view(op) else "new"


# %% [markdown]
# **Exercise 2 · an alias pattern to order** (solid, 2 points). `build(x, pattern)` gives a tuple with one
# tensor for each letter of `pattern`. Tensors with the same letter share memory, those with
# different letters don't, and the letter `x` means the memory of the input. So `build(x, "xaab")`
# is a view of `x`, two views of one new memory, and one tensor by itself. The check reads what the
# compiler thinks of it: a letter that stands alone must be fresh. `x` has as many rows as the
# pattern has letters, or more. Each tensor is an object of its own: not `x` itself, none twice.

# %% [markdown]
# **You will need**
#
# - `x * 2`: a tensor in new memory. `y[0]`: its first row, a view; `y[:, 0]`: its first column.
# - `mc.trace(lambda x: build(x, "xaab"), torch.ones(4, 4)).aot.metadata`: what the compiler thinks of the
#   results.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# One intermediate tensor per letter, kept in a dictionary; for `x` it is the input.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Each result is another piece of it. A row of a table has no gaps in memory, a column has: which of them is
# fresh when it is alone?
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def build(x, pattern):
    """A tensor for each letter: equal letters share memory, "x" is the input's."""
    ### BEGIN SOLUTION
    memory = {letter: x if letter == "x" else x * 2 for letter in pattern}
    return tuple(memory[letter][row] for row, letter in enumerate(pattern))
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-clones" tags=["wrong"] kind="misconception" says="'view of input 0', got 'fresh'"
def build(x, pattern):
    memory = {letter: x.clone() for letter in pattern}
    return tuple(memory[letter][row] for row, letter in enumerate(pattern))


# %% name="ex2-wrong-neighbours" tags=["wrong"] kind="visible-only" says="'view of result 0', got 'fresh'"
def build(x, pattern):
    made, last, memory = [], "", x
    for row, letter in enumerate(pattern):
        if letter != last:
            memory = x if letter == "x" else x * 2
        made.append(memory[row])
        last = letter
    return tuple(made)


# %% name="ex2-wrong-strided" tags=["wrong"] kind="built-in" says="a use of as_strided"
def build(x, pattern):
    memory = {letter: x if letter == "x" else x * 2 for letter in pattern}
    return tuple(
        memory[letter].as_strided([x.shape[1]], [1], row * x.shape[1])
        for row, letter in enumerate(pattern)
    )


# %% [markdown]
# **Exercise 3 · two inverses** (solid, 4 points). `narrow` becomes `aten.slice`, `diagonal` stays itself. The
# built-in inverses of both are taken away; yours take their place, for the small functions of the
# check and for the block with its cache. Each takes the old base, the new part and the view's
# arguments, and gives the new base. It may not write and may not call a `..._scatter`: that is what
# you are building.
#
# `slice(x, dim, start, end, step)` is `x[..., start:end:step, ...]` along `dim`: `start` and `end` may be
# negative, `None` or far behind the end, as in Python. `diagonal(x, offset, dim1, dim2)` shows the elements
# with column - row = `offset`, where `dim1` counts rows and `dim2` columns; the diagonal is the last
# dimension of the part. `offset` may be negative, or so large that the diagonal is empty.

# %% [markdown]
# **You will need**
#
# - `torch.arange(6)[1:None:2]` gives `tensor([1, 3, 5])`: the places of a slice, whatever its numbers are.
# - `base.index_copy(dim, places, new)`: a copy with some places replaced.
#   `torch.zeros(3).index_copy(0, torch.tensor([1]), torch.tensor([5.0]))` gives `tensor([0., 5., 0.])`.
# - `x.movedim((0, 1), (-2, -1))`: dimensions moved to the end, and back with both pairs swapped.
#   `torch.ones(2, 3, 4).movedim((0, 1), (-2, -1)).shape` gives `torch.Size([4, 2, 3])`.
# - `new.index_select(-1, places)`, `tensor.clamp(0, most)`, `torch.where(condition, a, b)`.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# The slice: which places are they? A copy with these places replaced is all.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# The diagonal: bring both dimensions to the end, choose with `torch.where` by a table of "column - row
# equals offset", and turn back.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# Row r shows element r - max(-offset, 0) of the part; keep that number within the part, also where the
# table says no.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def inverse_of_slice(base, new, dim=0, start=None, end=None, step=1):
    """The base, its places start:end:step along `dim` replaced by `new`.

    inverse_of_slice(torch.zeros(4), torch.ones(2), 0, -3, None, 2) gives tensor([0., 1., 0., 1.]).
    """
    ### BEGIN SOLUTION
    places = torch.arange(base.shape[dim])[start:end:step]
    return base.index_copy(dim, places, new)
    ### END SOLUTION


def inverse_of_diagonal(base, new, offset=0, dim1=0, dim2=1):
    """The base, its diagonal replaced by `new`, whose last dimension runs along it.

    inverse_of_diagonal(torch.zeros(2, 2), torch.ones(1), -1) gives tensor([[0., 0.], [1., 0.]]).
    """
    ### BEGIN SOLUTION
    if not new.numel():
        return base.clone()
    turned = base.movedim((dim1, dim2), (-2, -1))
    rows, columns = (torch.arange(turned.shape[dim]) for dim in (-2, -1))
    element = (rows - max(-offset, 0)).clamp(0, new.shape[-1] - 1)
    spread = new.index_select(-1, element).unsqueeze(-1)
    on_it = columns - rows.unsqueeze(-1) == offset
    return torch.where(on_it, spread, turned).movedim((-2, -1), (dim1, dim2))
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-only-part" tags=["wrong"] kind="misconception" says="expected float32[2, 4] of [1"
def inverse_of_slice(base, new, dim=0, start=None, end=None, step=1):
    places = torch.arange(base.shape[dim])[start:end:step]
    return torch.zeros_like(base).index_copy(dim, places, new)


def inverse_of_diagonal(base, new, offset=0, dim1=0, dim2=1):
    return torch.zeros_like(base)


# %% name="ex3-wrong-square" tags=["wrong"] kind="misconception" says="of [1, 2, 3, -8, 5"
def inverse_of_slice(base, new, dim=0, start=None, end=None, step=1):
    places = torch.arange(base.shape[dim])[start:end:step]
    return base.index_copy(dim, places, new)


def inverse_of_diagonal(base, new, offset=0, dim1=0, dim2=1):
    rows, columns = torch.arange(base.shape[0]), torch.arange(base.shape[1])
    spread = new.index_select(0, rows.clamp(0, new.shape[0] - 1)).unsqueeze(1)
    return torch.where(columns - rows.unsqueeze(1) == offset, spread, base)


# %% name="ex3-wrong-never-empty" tags=["wrong"] kind="visible-only" says="expected a result, got"
def inverse_of_slice(base, new, dim=0, start=None, end=None, step=1):
    places = torch.arange(base.shape[dim])[start:end:step]
    return base.index_copy(dim, places, new)


def inverse_of_diagonal(base, new, offset=0, dim1=0, dim2=1):
    turned = base.movedim((dim1, dim2), (-2, -1))
    rows, columns = (torch.arange(turned.shape[dim]) for dim in (-2, -1))
    element = (rows - max(-offset, 0)).clamp(0, new.shape[-1] - 1)
    spread = new.index_select(-1, element).unsqueeze(-1)
    on_it = columns - rows.unsqueeze(-1) == offset
    return torch.where(on_it, spread, turned).movedim((-2, -1), (dim1, dim2))


# %% name="ex3-wrong-scatter" tags=["wrong"] kind="built-in" says="a use of diagonal_scatter"
def inverse_of_slice(base, new, dim=0, start=None, end=None, step=1):
    places = torch.arange(base.shape[dim])[start:end:step]
    return base.index_copy(dim, places, new)


def inverse_of_diagonal(base, new, offset=0, dim1=0, dim2=1):
    return torch.diagonal_scatter(base, new, offset, dim1, dim2)


# %% [markdown]
# **Exercise 4 · the heart of functionalization** (hard, 5 points). Write the two methods that carry all of
# it. They replace the built-in ones while the check compiles small functions and the block with
# its cache. `state` is the `Functionalizer`:
#
# - `state.values[node]` is a pair (value in the new graph, version it was computed from);
# - `state.storage(node)` has the present `version`; None where the node has no memory;
# - `state.view_of[node]` is what a view was made of; `state.apply_view(node, contents)` calls that
#   view again, on other contents;
# - `state.same_as` maps a node that is only another name (what `mul_` returned) to the first one;
# - `state.view_call(view)` gives (operator, arguments, keyword arguments) of a view, for `inverse`.

# %% [markdown]
# `read(state, node)` gives the node's present contents, and remembers what it computed.
# `carried(state, chain, new)` gets a chain [view, what it is a view of, ..., root] and new contents
# of the first, and gives new contents of the last. Who writes to a root directly has a chain of one.

# %% [markdown]
# **You will need**
#
# - `state.values[node] = (value, version)` remembers; `state.storage(node).version` is the present version.
# - `state.apply_view(node, contents)` calls a view again; `state.read(node)` calls your `read`.
# - `inverse[operator](base, new, *arguments, **keywords)`: new contents of the base, as in the cell on
#   inverses.
# - `pairwise(chain)`: neighbours. `list(pairwise("abc"))` gives `[('a', 'b'), ('b', 'c')]`.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# `read`: if the version is the present one, or there is no memory, the value is right. Else the view must
# be called again.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# `read` is recursive: a view is called again on the present contents of what it was made of.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# `carried` is a loop over neighbours in the chain, and needs the present contents of each base.
#
# </details>


# %% name="ex4-setup" tags=["setup"]
from itertools import pairwise

from minicompile.extension import inverse


# %% name="ex4-answer" tags=["answer"]
def read(state, node):
    """The present contents of an old node, as a value of the new graph."""
    ### BEGIN SOLUTION
    node = state.same_as.get(node, node)
    value, version = state.values[node]
    storage = state.storage(node)
    if storage is None or storage.version == version:
        return value
    value = state.apply_view(node, state.read(state.view_of[node]))
    state.values[node] = (value, storage.version)
    return value
    ### END SOLUTION


def carried(state, chain, new):
    """New contents of the chain's last node, given those of its first."""
    ### BEGIN SOLUTION
    for view, base in pairwise(chain):
        operator, arguments, keywords = state.view_call(view)
        new = inverse[operator](state.read(base), new, *arguments, **keywords)
    return new
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-stale" tags=["wrong"] kind="misconception" says="left half then sum, compiled"
def read(state, node):
    return state.values[state.same_as.get(node, node)][0]


def carried(state, chain, new):
    for view, base in pairwise(chain):
        operator, arguments, keywords = state.view_call(view)
        new = inverse[operator](state.read(base), new, *arguments, **keywords)
    return new


# %% name="ex4-wrong-one-step" tags=["wrong"] kind="visible-only" says="a row of a half"
def read(state, node):
    node = state.same_as.get(node, node)
    value, version = state.values[node]
    storage = state.storage(node)
    if storage is None or storage.version == version:
        return value
    value = state.apply_view(node, state.read(state.view_of[node]))
    state.values[node] = (value, storage.version)
    return value


def carried(state, chain, new):
    if len(chain) == 1:
        return new
    operator, arguments, _keywords = state.view_call(chain[0])
    part = inverse[operator](state.read(chain[1]), new, *arguments)
    return part if len(chain) == 2 else state.read(chain[-1])


# %% name="ex4-wrong-borrowed" tags=["wrong"] kind="built-in" says="a use of Functionalizer"
from minicompile.aot.functionalize import Functionalizer

kept = Functionalizer.read, Functionalizer.carried


def read(state, node):
    return kept[0](state, node)


def carried(state, chain, new):
    return kept[1](state, chain, new)


# %% [markdown]
# **Exercise 5 · catch the lost write** (hard, 3 points, optional). A test is a trap for wrong compilers.
# `traps()` gives a list of functions of one table `x` (two rows, four columns), which may write to
# `x`. The right compiler must pass all of them: same result and same `x` as eager. Each broken one
# must fail at least one. The broken compiler of the check never replays a view; when graded, yours
# meets others, which break other rules of this lesson.

# %% [markdown]
# **You will need**
#
# - `x`: such as `torch.arange(8.0).view(2, 4)`. A trap is a function of it: `lambda x: x[1].mul_(2)` is
#   one.
# - Views: `y[0]`, `y[1:]`, `y[:, 2:]`. Writes: `y.mul_(2)`, `y.add_(1)`. New memory: `x + 1`.
# - A trap compares nothing: it returns a tensor, and the check compares that, and `x`.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# For each sentence of the recap: which function shows that it was not obeyed?
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# Take a view, write, and read what should have changed: through a view of a view, a view that doesn't begin
# at index 0, two writes in a row.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# And one that writes to the input itself.
#
# </details>


# %% name="ex5-answer" tags=["answer"]
def traps():
    """Functions of a table that tell a broken functionalization from a right one."""

    ### BEGIN SOLUTION
    def read_after_write(x):
        y = x + 1
        row = y[0]
        y.mul_(2)
        return row + 0

    def view_of_view(x):
        y = x + 1
        y[1:][0].mul_(2)
        return y + 0

    def not_at_zero(x):
        y = x + 1
        y[1].mul_(2)
        y[:, 2:].add_(1)
        return y + 0

    def written_twice(x):
        y = x + 1
        row = y[0]
        y.mul_(2)
        first = row + 0
        y.mul_(2)
        return first + row

    def input_written(x):
        x[1].mul_(2)
        return x.sum()

    return [read_after_write, view_of_view, not_at_zero, written_twice, input_written]
    ### END SOLUTION


# %% name="ex5-check" tags=["nbval-check-output"]
check("ex5")


# %% name="ex5-wrong-no-reader" tags=["wrong"] kind="misconception" says="expected a wrong result"
def traps():
    def only_writes(x):
        y = x + 1
        y.mul_(2)
        return y + 0

    return [only_writes]


# %% name="ex5-wrong-one-trap" tags=["wrong"] kind="visible-only" says="expected a wrong result"
def traps():
    def read_after_write(x):
        y = x + 1
        row = y[0]
        y.mul_(2)
        return row + 0

    return [read_after_write]


# %% name="ex5-wrong-spy" tags=["wrong"] kind="built-in" says="a use of Functionalizer"
def traps():
    from minicompile.aot.functionalize import Functionalizer

    def looks_inside(x):
        return x + (1 if Functionalizer.read.__name__ == "read" else 2)

    return [looks_inside]


# %% [markdown]
# ## Go deeper
#
# - `minicompile/aot/functionalize.py`: the pass; `minicompile/aot/outputs.py`: what an output is of the
#   inputs; `minicompile/aot/admit.py`: what is refused; `minicompile/aot/runtime.py`: rebuilding views.
# - FunctionalTensorWrapper and FunctionalInverses, in the folder aten/src/ATen of PyTorch's source:
#   the real ones, in C++.
# - `torch/_functorch/_aot_autograd/collect_metadata_analysis.py`: what PyTorch must know about
#   inputs and outputs; `runtime_wrappers.py` (`merge_view_inputs`): synthetic bases.
# - `torch/_inductor/fx_passes/reinplace.py`: the way back, from scatters to writes.
#
# **Where you are.** The graph is free of memory. The next lesson makes its vocabulary small.

# %% name="corridor"
from minicompile.lessons.pictures import corridor

corridor("aot")
