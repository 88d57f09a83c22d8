# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 04 · One graph for many sizes?
#
# After this lesson you can
#
# - predict how many versions a function gets when its sizes vary, under each setting of `dynamic`;
# - read size expressions and their guards, and name the line of Python that forced each;
# - find a size that was fixed by accident, and free it.
#
# The running example joins and reshapes. Compiled with `dynamic=True`, each size of `x` is a *symbol*, a
# letter that stands for any size. What are then the shapes of `y` and of the result? Decide, then look.

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

check = checks("04")

# %% name="example"
import torch

import minicompile as mc


def f(x):
    y = torch.cat([x, x])
    return y.view(-1, 8)


torch.manual_seed(0)
trace = mc.trace(mc.compile(f, dynamic=True), torch.randn(6, 20))
trace.capture

# %% [markdown]
# Look at the right column of the bytecode, from top to bottom. The input is `f32[s0, s1]`. `cat`
# gives `f32[2*s0, s1]`: a *size expression*, computed with symbols as with numbers. `view` divides what
# it has by eight.
#
# And that only works if the division leaves nothing over. So a guard was added. Each guard knows the
# operation that forced it, and your line:

# %% name="shape-guards"
for guard in trace.capture.guards:
    if guard.kind == "shape":
        print(f"{guard.expression:48} # {guard.reason}: {guard.user_line.text}")

# %% [markdown]
# So one graph serves every `x` whose number of elements fits. **Predict, then run.** Which of these
# calls will be answered by the first version: other sizes, a single row, a size that doesn't fit?

# %% name="three-calls"
from minicompile.debug.history import timeline


def g(x):
    return torch.cat([x, x]).view(-1, 8) * 2


compiled = mc.compile(g, dynamic=True, backend="eager")
for shape in [(6, 20), (10, 4), (3, 12), (1, 12), (5, 3)]:
    try:
        compiled(torch.randn(shape))
    except RuntimeError as error:
        print(shape, "raises:", error)
print(timeline(compiled)[0])

# %% [markdown]
# One row got a version of its own. **Sizes zero and one are always compiled apart**: a dimension of
# size one is broadcast, it is adjacent in memory whatever its stride, it makes loops vanish. If a
# symbol could be one, every operator would have to ask "is it one?", and each answer would be a
# guard. So a symbol begins at two.
#
# And what doesn't fit raises what it raises in Python, because Python runs it.

# %% [markdown]
# ## The experiment: ten sizes
#
# How much does it help? Ten batches, each twice the one before, through `layer_norm`. The argument
# `dynamic` of `mc.compile` says what may become a symbol: `False` nothing, `True` all sizes at once,
# `None` (the default) those that *were seen to vary*.
#
# **Predict** the number of versions for each before you run this.

# %% name="ten-sizes"
import dataclasses
import warnings

from torch.nn import functional as F

shapes = [(2**i, 256) for i in range(4, 14)]


def norm(x):
    return F.layer_norm(x, [x.shape[-1]])


def without_times(history):
    """A history to keep: seconds differ from run to run."""
    misses = tuple(dataclasses.replace(miss, seconds=0.0) for miss in history.misses)
    return dataclasses.replace(history, misses=misses)


histories = {}
for dynamic in (False, True, None):
    compiled = mc.compile(norm, dynamic=dynamic, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for shape in shapes:
            compiled(torch.randn(shape))
    histories[dynamic] = without_times(timeline(compiled)[0])
    versions, in_eager = len(histories[dynamic].answered) - 1, histories[dynamic].answered[0]
    print(f"dynamic={dynamic}: {versions} version(s) for {len(shapes)} calls, {in_eager} in eager")

# %% name="ten-sizes-picture"
from minicompile.lessons.pictures import corridor, slides

slides(
    "ten sizes",
    ("dynamic=None", "the second size shows that it varies", histories[None]),
    ("dynamic=True", "symbols from the first call on", histories[True]),
    ("dynamic=False", "a version each, until the limit", histories[False]),
)

# %% [markdown]
# With `False`, each size is a version, until there are as many as the option *recompile limit*
# allows. From there on new sizes run in eager: right, but as slow as without a compiler. A warning
# says so (we silenced it here).
#
# With `None`, the first version is fixed. The second call fails its guard in a size: so that size
# becomes a symbol, and only that one. The width, which never varied, stays a plain number. Most
# programs want this: what is fixed makes better kernels.
#
# Which mode is faster over all ten calls, compilation included? (Times differ, so none are kept.)

# %% name="ten-sizes-times" tags=["varies"]
import time

with mc.fresh_cache(), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for dynamic in (None, True, False):
        compiled, began = mc.compile(norm, dynamic=dynamic), time.perf_counter()
        for shape in shapes:
            compiled(torch.randn(shape))
        print(f"dynamic={dynamic}: {time.perf_counter() - began:.2f} s")

# %% [markdown]
# The kernel takes its symbols as arguments. Loops run to `s0` and `s1`; a mean divides by `s1`:

# %% name="kernel"
mc.trace(mc.compile(norm, dynamic=True), torch.randn(16, 256)).kernels[0]

# %% [markdown]
# Plain integers follow the same rules. Each call below passes another `n`. How many versions?

# %% name="numbers"


def head(x, n):
    return x[:n] * 2


compiled = mc.compile(head, backend="eager")
for n in range(100):
    compiled(torch.ones(100), n)
print(timeline(compiled)[0])

# %% [markdown]
# ## Where symbols and guards live
#
# Behind it all stands one small object, a *shape environment*. It knows each symbol's *hint* (its
# value while compiling) and its range. Sizes are numbers that remember how they were computed. When
# they are compared, the environment is asked. If the ranges decide, fine. If not, **the hint decides,
# and the answer becomes a guard**.

# %% name="environment"
from minicompile.shapes.env import ShapeEnv

env = ShapeEnv()
n = env.create_symbol(12, "n")
for question in ("n > 1", "n > 10", "n > 5", "2 * n > 20", "n % 4 == 0"):
    before = len(env.guards)
    answer = bool(eval(question))
    print(f"{question:10} is {answer}:", "a new guard" if len(env.guards) > before else "known")
print(f"n // 4 is {n // 4}, and n is {n}")
print(env)

# %% [markdown]
# Read that again: after the guard `n > 10`, the questions `n > 5` and `2 * n > 20` cost nothing.
# A guard is not only a check, it is a fact that simplifies what comes later. And after `n % 4 == 0`
# the size `n` is written as four times a new symbol: then `n // 4` has no division left in it.
#
# An `if` on a size takes one side, and guards on it:

# %% name="branch"


def either(x):
    if x.size(0) > 100:
        return x.sum(0)
    return x * 2


small, large = torch.ones(4), torch.ones(200)
compiled = mc.compile(either, dynamic=True, backend="eager")
print(list(compiled(small).shape), list(compiled(large).shape))
print(*(capture.shape_env for capture in mc.explain(compiled)(small).captures), sep="\n")

# %% [markdown]
# **Break it.** Take the rule away by which guards of the kind `shape` are checked. The second call
# now meets a graph that was made for the other side. What shape will it give?

# %% name="without-guards"
with mc.without("guard:shape"):
    compiled = mc.compile(either, dynamic=True, backend="eager")
    print(list(compiled(small).shape), list(compiled(large).shape))
print("eager:", list(either(small).shape), list(either(large).shape))

# %% [markdown]
# ## Equal by chance
#
# **Predict, then run.** `dynamic=True`, and a square first. Will the second call be answered by the
# same version?

# %% name="duck"


def double(x):
    return x * 2


compiled = mc.compile(double, dynamic=True, backend="eager")
compiled(torch.ones(8, 8))
compiled(torch.ones(8, 16))
print(timeline(compiled)[0])

# %% [markdown]
# Sizes that are equal while capturing share one symbol, and a guard keeps them equal. This is called
# *duck shaping*: what looks alike is taken to be alike. Mostly that is right, and saves questions
# ("may these two be added?"). Where it is not, a second version is made.
#
# Who knows better can say so. `mc.mark_dynamic` gives a dimension a symbol of its own, with a range:

# %% name="mark"
x = torch.ones(8, 8)
mc.mark_dynamic(x, 0, min=2, max=64)
print(mc.trace(double, x).capture.shape_env)

# %% [markdown]
# ## Fixed by accident
#
# A symbol that ends with one possible value has been *specialized*: every other size is a new version.
# Sometimes that must be: `layer_norm` over a weight of a fixed width. Often it is an
# accident. All of these four use the number of rows. Which of them fix it?

# %% name="accidents"
import math


def scaled(x):
    return x * math.sqrt(x.size(0))


def looked_up(x):
    return x * {64: 2.0}.get(x.size(0), 1.0)


def counted(x):
    return sum(x[row] for row in range(x.size(0)))


def halved(x):
    return x[: x.size(0) // 2] + 1


for function in (scaled, looked_up, counted, halved):
    compiled = mc.compile(function, dynamic=True, backend="eager")
    shape_env = mc.explain(compiled)(torch.ones(24, 16)).captures[0].shape_env
    symbol = next(iter(shape_env.symbols))
    print(f"{function.__name__:9}: {shape_env.text(symbol)} is {shape_env.values(symbol)}")

# %% [markdown]
# Arithmetic is fine: a square root of a symbol is just another expression. But a dictionary needs
# to know which key, and a Python loop needs to know how often. There is no graph for "as many nodes
# as there are rows". Exercise 3 frees such a size.

# %% [markdown]
# ## The lesson model
#
# Our GPT takes `(batch, length)` tokens. Both become symbols. Move the slider from line to line of
# the model: the symbols flow through every shape, and two lines force a guard.

# %% name="model"
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.ops.dtypes import value_text

model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16))
compiled = mc.compile(model, dynamic=True, backend="eager")
(capture,) = mc.explain(compiled)(torch.zeros(3, 7, dtype=torch.long)).captures
shape_of = {node.name: value_text(node.meta.get("val")) for node in capture.graph.nodes}
frames = []
for passage in capture.passages:
    made = [f"{name}: {shape_of[name]}" for name in passage.nodes]
    forced = [
        f"FORCED  {guard.expression}    # {guard.reason}"
        for guard in capture.guards
        if guard.kind == "shape" and guard.user_line == passage.line
    ]
    if made or forced:
        frames.append((passage.line.text, "a guard!" * bool(forced), "\n".join([*made, *forced])))
slides("symbols on their way through the model", *frames)

# %% name="model-symbols"
print("\n".join(capture.size_lines))

# %% [markdown]
# The first guard is a line of the model itself: `if start + length > ...: raise`. It also narrowed
# the symbol's range. The second one was nobody's wish. The causal mask is cut out of a larger square;
# if the cut-out happens to be all of it, its strides are others. So the full length will
# be compiled apart:

# %% name="model-calls"
for length in (7, 9, 15, 16):
    compiled(torch.zeros(3, length, dtype=torch.long))
print(timeline(compiled)[0])

# %% [markdown]
# > **In torch.compile.** The same words: symbols, hints, guards, duck shaping, zero and one apart;
# > and the same default, `dynamic=None`. Below, the ten sizes again. (We lift its recompile limit
# > for that: with it, torch too would go on in eager.) To read on:
# > `torch/fx/experimental/symbolic_shapes.py`. We left out *unbacked* symbols, which have no hint:
# > sizes that depend on data, such as the length of `nonzero`. There minicompile breaks the graph.

# %% name="torch-compile"
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

for dynamic in (False, True, None):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    with torch._dynamo.config.patch(recompile_limit=16):
        theirs = torch.compile(norm, backend=counter, dynamic=dynamic)
        for shape in shapes:
            theirs(torch.randn(shape))
    print(f"dynamic={dynamic}: {counter.frame_count} graph(s)")
for node in counter.graphs[-1].graph.find_nodes(op="placeholder"):
    value = node.meta["example_value"]
    print("an input of the last one:", list(getattr(value, "shape", [value])))

# %% [markdown]
# ## Recap
#
# 1. A symbol stands for every size from two on; shapes of intermediate tensors are expressions in symbols.
# 2. When Python or an operator needs to know more than the ranges tell, the hint decides and a guard
#    remembers it.
# 3. By default a size becomes a symbol when it was seen to vary; `dynamic=True` doesn't wait,
#    `dynamic=False` never does it, and the recompile limit ends in eager.
# 4. A guard is also a fact: later questions are answered from it, and divisions disappear.
# 5. A loop, a dictionary's key or a text made of a size fixes it, and then every size is a version of
#    its own.

# %% [markdown]
# ## Exercises
#
# **Exercise 1 · Read a history** (easy, 2 points). Write `read_history(timeline)`. It gives a pair: the
# list of the numbers of those calls for which a version was made, and how many calls ran in eager.
# A `Timeline` has `misses`, each with a `call` and `made`, and `answered`.

# %% [markdown]
# **You will need**
#
# - `timeline.misses`: `[miss.call for miss in histories[None].misses]` gives `[1, 2]`. The `made` of a miss
#   is the version that it made; it is empty where none was made.
# - `timeline.answered`: how many calls each version answered; number 0 stands for eager.
#   `histories[None].answered` gives `{0: 0, 1: 1, 2: 9}`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Not every miss makes a version: print `histories[False].misses[-1].made`.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# The list has a condition: `[... for miss in timeline.misses if miss.made]`.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def read_history(timeline):
    """(numbers of the calls for which a version was made, how many calls ran in eager)."""
    ### BEGIN SOLUTION
    return [miss.call for miss in timeline.misses if miss.made], timeline.answered[0]
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-misses" tags=["wrong"] kind="misconception" says="expected ([1, 2, 3, 4], 2), got"
def read_history(timeline):
    return [miss.call for miss in timeline.misses], timeline.answered[0]


# %% name="ex1-wrong-two" tags=["wrong"] kind="visible-only" says="expected ([1], 0), got ([1, 2], 0)"
def read_history(timeline):
    made = [1, 2, 3, 4] if timeline.answered[0] else [1, 2]
    return made, timeline.answered[0]


# %% name="ex1-wrong-text" tags=["wrong"] kind="built-in" says="a use of str"
def read_history(timeline):
    import re

    made = re.findall(r"call (\d+): .*made version", str(timeline))
    return list(map(int, made)), timeline.answered[0]


# %% [markdown]
# **Exercise 2 · Force a guard** (solid, 3 points). Write `needing(fact, number)`. It gives a function of a
# tensor `x` with two dimensions whose capture relies on exactly this fact about `x.size(0)`, and
# fixes no size. `fact` is `"at most"`, `"at least"` or `"a multiple of"`. Inputs in the check fulfil it.

# %% [markdown]
# **You will need**
#
# - `x.size(0)`: a symbol, since the check compiles for all sizes. A comparison by `if` makes a guard of the
#   side that is taken.
# - `mc.trace(mc.compile(either, dynamic=True), small).capture.shape_env`: the facts that a capture relies
#   on.
# - `size % number == 0`: is it a multiple?

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# An `if` on a size guards on the side that it takes. What it does inside doesn't matter.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# The check's inputs fulfil the fact: ask for just that fact, by `<=`, `>=` or `%`.
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def needing(fact, number):
    """A function of x that is compiled for those x.size(0) that are at most (at least, ...) `number`."""

    ### BEGIN SOLUTION
    def function(x):
        size = x.size(0)
        if fact == "at most":
            holds = size <= number
        elif fact == "at least":
            holds = size >= number
        else:
            holds = size % number == 0
        return x * 2 if holds else x

    return function
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-lookup" tags=["wrong"] kind="misconception" says="got x.size(0) is only 24"
def needing(fact, number):
    def function(x):
        fitting = dict.fromkeys(range(0, 100, number), True)
        return x * 2 if fitting.get(x.size(0), False) else x

    return function


# %% name="ex2-wrong-both" tags=["wrong"] kind="misconception" says="got x.size(0) > 8, x.size(0) % 8 == 0"
def needing(fact, number):
    def function(x):
        small, fits = x.size(0) <= number, x.size(0) % number == 0
        return x * 2 if small or fits else x

    return function


# %% name="ex2-wrong-eight" tags=["wrong"] kind="visible-only" says="expected a guard x.size(0) % 3 == 0"
def needing(fact, number):
    def function(x):
        return x * 2 if (x.size(0) % 8 == 0 if fact == "a multiple of" else x.size(0) <= 32) else x

    return function


# %% name="ex2-wrong-check" tags=["wrong"] kind="built-in" says="a use of _check"
def needing(fact, number):
    def function(x):
        torch._check(x.size(0) <= number)
        return x * 2

    return function


# %% [markdown]
# **Exercise 3 · Free a size** (solid, 4 points). This function adds its position to each row. It is compiled
# anew for every number of rows. Write `freed(x)`, which gives the same result, but whose graph serves
# all numbers of rows from two on.

# %% name="ex3-given" tags=["setup"]


def with_positions(x):
    positions = torch.tensor([float(row) for row in range(x.size(0))])
    return x + positions.unsqueeze(1) / x.size(0)


# %% [markdown]
# **You will need**
#
# - `range(x.size(0))` needs a plain number, and fixes the size. Functions of PyTorch that make tensors
#   don't: `torch.zeros(x.size(0))` takes a symbol.
# - `tensor.unsqueeze(1)`: a column. `torch.zeros(3).unsqueeze(1).shape` gives `torch.Size([3, 1])`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Which line asks for a plain number? What it makes must come from one function of PyTorch.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Which function makes the numbers from zero up to a size? Let it make floats.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def freed(x):
    """What with_positions gives, in one graph for all numbers of rows."""
    ### BEGIN SOLUTION
    positions = torch.arange(x.size(0), dtype=torch.float32)
    return x + positions.unsqueeze(1) / x.size(0)
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-list" tags=["wrong"] kind="misconception" says="got only 6, fixed by"
def freed(x):
    positions = torch.tensor(list(range(x.size(0))), dtype=torch.float32)
    return x + positions.unsqueeze(1) / x.size(0)


# %% name="ex3-wrong-constant" tags=["wrong"] kind="visible-only" says="tensor a (17) must match"
def freed(x):
    positions = torch.arange(6.0)
    return x + positions[: x.size(0)].unsqueeze(1) / x.size(0)


# %% name="ex3-wrong-mark" tags=["wrong"] kind="built-in" says="a use of with_positions"
def freed(x):
    return with_positions(x)


# %% [markdown]
# **Exercise 4 · Shapes of `cat` and `reshape`** (solid, 5 points). Every operator has a rule that computes
# its result's shape, long before there is data. Write two. Sizes may be ints or symbols: compute with
# them as with numbers, and compare them where you must.
#
# - `shape_of_cat(shapes, dim)`: tensors of these shapes, joined along `dim`. Raises `ValueError` if
#   they don't fit.
# - `shape_of_reshape(shape, wanted)`: one of the `wanted` sizes may be -1, "whatever is left".
#   Raises `ValueError` if the elements don't fit.
#
# The check makes two operators without rules, and the compiler uses yours for them.

# %% [markdown]
# **You will need**
#
# - `shape_of_cat([[2, 3], [4, 3]], 0)` is `[6, 3]`; `[[2, 3], [4, 5]]` along 0 doesn't fit.
# - `shape_of_reshape([6, 4], [3, -1])` is `[3, 8]`; `[5, -1]` doesn't fit.
# - `+`, `*`, `//`, `%` of symbols are symbols. A comparison in an `if` is a question: it becomes a guard.
#   `int(size)` fixes the size.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Of `cat`: all sizes but those along `dim` must be equal; those are added up.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# Of `reshape`: multiply all sizes of `shape`, and all of `wanted` but the -1. What is left is a quotient.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# `if total % known != 0: raise ValueError` is a question about symbols: it becomes a guard, as it should.
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def shape_of_cat(shapes, dim):
    """The shape of tensors of these shapes, joined along dimension `dim` (at least 0)."""
    ### BEGIN SOLUTION
    first, *others = shapes
    for shape in others:
        for place, (size, expected) in enumerate(zip(shape, first, strict=True)):
            if place != dim and size != expected:
                raise ValueError(f"size {size} instead of {expected} in dimension {place}")
    joined = list(first)
    joined[dim] = sum(shape[dim] for shape in shapes)
    return joined
    ### END SOLUTION


def shape_of_reshape(shape, wanted):
    """The shape that `wanted` means for a tensor of this shape."""
    ### BEGIN SOLUTION
    total = known = 1
    for size in shape:
        total = total * size
    for size in wanted:
        if size != -1:
            known = known * size
    fits = total % known == 0 if -1 in wanted else total == known
    if not fits:
        raise ValueError(f"{total} elements don't fit into {wanted}")
    return [total // known if size == -1 else size for size in wanted]
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-int" tags=["wrong"] kind="misconception" says="one version for all sizes, got 3"
def shape_of_cat(shapes, dim):
    joined = [int(size) for size in shapes[0]]
    joined[dim] = sum(int(shape[dim]) for shape in shapes)
    return joined


def shape_of_reshape(shape, wanted):
    total = known = 1
    for size in shape:
        total = total * int(size)
    for size in wanted:
        known = known * (1 if size == -1 else size)
    if total % known != 0:
        raise ValueError("doesn't fit")
    return [total // known if size == -1 else size for size in wanted]


# %% name="ex4-wrong-unchecked" tags=["wrong"] kind="misconception" says="expected ValueError, got [2]"
def shape_of_cat(shapes, dim):
    joined = list(shapes[0])
    joined[dim] = sum(shape[dim] for shape in shapes)
    return joined


def shape_of_reshape(shape, wanted):
    total = known = 1
    for size in shape:
        total = total * size
    for size in wanted:
        known = known * (1 if size == -1 else size)
    return [total // known if size == -1 else size for size in wanted]


# %% name="ex4-wrong-first" tags=["wrong"] kind="visible-only" says="shape_of_cat([[2, 3], [2, 4]], 1)"
def shape_of_cat(shapes, dim):
    return [sum(shape[0] for shape in shapes), *shapes[0][1:]]


def shape_of_reshape(shape, wanted):
    total = known = 1
    for size in shape:
        total = total * size
    for size in wanted:
        known = known * (1 if size == -1 else size)
    if total % known != 0:
        raise ValueError("doesn't fit")
    return [total // known if size == -1 else size for size in wanted]


# %% name="ex4-wrong-torch" tags=["wrong"] kind="built-in" says="a use of cat"
def shape_of_cat(shapes, dim):
    return torch.cat([torch.empty(*shape, device="meta") for shape in shapes], dim).shape


def shape_of_reshape(shape, wanted):
    return torch.empty(*shape, device="meta").reshape(wanted).shape


# %% [markdown]
# **Exercise 5 · Decide without asking** (hard, 6 points). Each question that the ranges decide is a guard
# less. Write `decide(relation, low)`: `relation` compares two sizes, as sympy has it (`relation.lhs`,
# `relation.rhs`, and `relation.rel_op`: one of `==`, `!=`, `<`, `<=`, `>`, `>=`). `low` gives the smallest
# value of each symbol. The answer is `True` or `False` if it is the same for all sizes from there
# on, else `None`. The shape environment will ask you alone.

# %% [markdown]
# **You will need**
#
# - `relation.free_symbols`: its symbols; `low[symbol]` is the smallest value.
#   `relation.has(sympy.Function)`: is there a division in it? Then answer `None`.
# - `expression.xreplace({old: new})` replaces symbols; `sympy.expand` multiplies out.
# - `expression.as_coefficients_dict()`: the factor of each term, the constant at `sympy.S.One`.
#   `dict(sympy.expand(2 * (sympy.Symbol("t") + 3)).as_coefficients_dict())` gives `{1: 6, t: 2}`.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Ask about the difference of both sides: what is the least that it can be, and the most?
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# Write each symbol as `low + t` with a new symbol `t` that is not negative, and expand the difference.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# If no factor (but the constant) is negative, the difference is at least the constant. If none is positive,
# it is at most the constant.
#
# </details>

# %% name="ex5-imports" tags=["setup"]
import sympy


# %% name="ex5-answer" tags=["answer"]
def decide(relation, low):
    """True or False if a comparison has one answer for all sizes from `low` on, else None."""
    ### BEGIN SOLUTION
    if relation.has(sympy.Function):
        return None
    above = {size: low[size] + sympy.Symbol(f"t_{size}") for size in relation.free_symbols}
    terms = dict(sympy.expand((relation.lhs - relation.rhs).xreplace(above)).as_coefficients_dict())
    constant = terms.pop(sympy.S.One, 0)
    least = constant if all(factor >= 0 for factor in terms.values()) else -sympy.oo
    most = constant if all(factor <= 0 for factor in terms.values()) else sympy.oo
    true, false = {
        "==": (least == most == 0, least > 0 or most < 0),
        "!=": (least > 0 or most < 0, least == most == 0),
        ">=": (least >= 0, most < 0),
        ">": (least > 0, most <= 0),
        "<=": (most <= 0, least > 0),
        "<": (most < 0, least >= 0),
    }[relation.rel_op]
    return True if true else False if false else None
    ### END SOLUTION


# %% name="ex5-check" tags=["nbval-check-output"]
check("ex5")


# %% name="ex5-wrong-one-size" tags=["wrong"] kind="misconception" says="expected None, got True"
def decide(relation, low):
    return bool(
        relation.xreplace({size: sympy.Integer(low[size]) for size in relation.free_symbols})
    )


# %% name="ex5-wrong-samples" tags=["wrong"] kind="visible-only" says="expected None, got True"
def decide(relation, low):
    if relation.has(sympy.Function):
        return None
    seen = set()
    for more in range(4):
        sizes = {size: sympy.Integer(low[size] + more) for size in relation.free_symbols}
        seen.add(bool(relation.xreplace(sizes)))
    return seen.pop() if len(seen) == 1 else None


# %% name="ex5-wrong-never" tags=["wrong"] kind="misconception" says="expected True, got None"
def decide(relation, low):
    return None


# %% name="ex5-wrong-built-in" tags=["wrong"] kind="built-in" says="a use of ShapeEnv"
def decide(relation, low):
    from minicompile.shapes.env import ShapeEnv

    env = ShapeEnv()
    env.ranges = {size: (low[size], None) for size in relation.free_symbols}
    answer = env._compare(relation)
    return None if answer is None else bool(answer)


# %% [markdown]
# ## Go deeper
#
# - `minicompile/shapes/env.py`: symbols, ranges, facts; `evaluate` is where guards are born;
# - `minicompile/shapes/symnode.py`: what torch's operators compute with in place of ints;
# - `minicompile/shapes/expr.py`: division and remainder that can be simplified;
# - `minicompile/dynamo/sizes.py`: which sizes get a symbol, and duck shaping;
# - `torch/fx/experimental/symbolic_shapes.py`: look for `evaluate_expr` and `produce_guards`;
# - `torch/fx/experimental/sym_node.py`: torch's counterpart of `SymNode`.
#
# **Where you are.** The capture is complete: a graph, its guards, its sizes. Next it is made fit for
# mathematics: without writes in place.

# %% name="corridor"
corridor("dynamo")
