# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 09 · How do you rewrite a graph safely?
#
# Between capture and loops a graph is improved: a few nodes go, others come, the answer stays. Finding
# the place is easy. Being sure that the answer stays is the work.
#
# After this lesson you can
#
# - write a rewrite as two plain functions, and read what it did in a trace;
# - name four reasons why a place that looks right is refused;
# - build the program that breaks a careless rewrite.

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
from minicompile.lessons.model import Block, GPTConfig

check = checks("09")
tensor = torch.empty(2, 2)

# %% [markdown]
# The running example takes the logarithm of a softmax. There is an operator that does both, and
# better. A *pattern* says so in two functions: what to look for, and what to put there instead.


# %% name="example"
def f(x):
    y = torch.log(torch.softmax(x, -1))
    return y * 2


def both_at_once(x):
    return torch.log_softmax(x, -1)


def looked_for(x):
    return torch.log(torch.softmax(x, -1))


x = torch.tensor([[0.0, 200.0], [1.0, 2.0]])
plain = mc.trace(f, x)
with mc.scoped():
    mc.register_pattern("log_of_softmax", search=looked_for, examples=[tensor])(both_at_once)
    rewritten = mc.trace(f, x)
    better = mc.compile(f)(x)
for title, result in (("eager:    ", f(x)), ("rewritten:", better)):
    print(title, [[round(v, 3) for v in row] for row in result.tolist()])

# %% name="picture"
from minicompile.lessons.pictures import boxes, slides
from minicompile.ops.graph import target_name, unpacks


def drawn(title, nodes, marked=()):
    """Nodes of a graph, some of them marked."""
    nodes = [node for node in nodes if node.op != "output" and not unpacks(node)]
    words = {n.name: target_name(n.target) if n.op != "placeholder" else "input" for n in nodes}
    arrows = [(n.name, u.name) for n in nodes for u in n.users if u.name in words]
    return boxes(title, words, arrows, {node.name for node in nodes} & set(marked))


pattern = list(mc.trace(looked_for, tensor).aot.level("full").nodes)
before, after = plain.aot.level("full").nodes, rewritten.aot.level("core").nodes
slides(
    "one rewrite",
    ("the pattern", "any tensor, and two calls", drawn("looked for", pattern)),
    ("the match", "the same calls, in the graph", drawn("f", before, ("softmax", "log"))),
    ("afterwards", "decomposed further", drawn("f, rewritten", after)),
)

# %% [markdown]
# That is the answer: the search function becomes a small graph, that graph is looked for in the large
# one (a *match*), and the replacement's graph goes where the match was. It even repairs the `-inf`: the
# softmax of a much smaller number is zero, whose logarithm tells nothing. What was done is on record:

# %% name="record"
record = next(record for record in rewritten.aot.passes if "log_of_softmax" in record.name)
print(record)

# %% [markdown]
# ## Looking for it
#
# A matcher works backwards. It takes the pattern's result, finds a call of the same operator, and
# compares their arguments, and theirs. An argument of the pattern stands for whatever comes first; if
# it comes again, it must be the same. That is *unification*. Here it is for expressions made of tuples:


# %% name="toy-matcher"
def unify(wanted, given, bound):
    """`bound` with more in it if `given` is what `wanted` describes, else None."""
    if isinstance(wanted, str):  # a parameter
        return {**bound, wanted: given} if bound.get(wanted, given) == given else None
    if not isinstance(wanted, tuple):
        return bound if wanted == given and type(wanted) is type(given) else None
    if not isinstance(given, tuple) or len(wanted) != len(given) or wanted[0] != given[0]:
        return None
    for one, other in zip(wanted[1:], given[1:]):
        bound = bound if bound is None else unify(one, other, bound)
    return bound


square = ("mul", "x", "x")
print(unify(square, ("mul", ("neg", 7), ("neg", 7)), {}))
print(unify(square, ("mul", ("neg", 7), ("neg", 8)), {}))
print(unify(("add", "x", 1), ("add", 5, 1.0), {}))

# %% [markdown]
# The second fails since `x` can't be two things, the third since 1 and 1.0 are not the same number to an
# operator: one keeps integers integers. The real one, `minicompile.custom.matching.Matcher`, adds
# operators that may swap their arguments, several results, and numbers that stand for any number.
#
# ## Why a match is not enough
#
# **Predict, then run.** The pattern is the one above. In which of these functions will it fire?


# %% name="fires"
def plainly(x):
    return torch.log(torch.softmax(x, -1))


def shared(x):
    p = torch.softmax(x, -1)
    return torch.log(p), p * 2


def other_dimension(x):
    return torch.log(torch.softmax(x, 0))


def in_between(x):
    p = torch.softmax(x, -1)
    p.add_(1)
    return torch.log(p)


def rewrites(fn, *inputs, **how):
    """How often each pattern fired."""
    passes = mc.trace(mc.compile(fn, **how), *inputs).aot.passes
    return {r.name: r.changed for r in passes if "pattern:" in r.name and r.changed}


with mc.scoped():
    mc.register_pattern("log_of_softmax", search=looked_for, examples=[tensor])(both_at_once)
    for fn in (plainly, shared, other_dimension, in_between):
        print(f"{fn.__name__:>16}: {rewrites(fn, x) or 'refused'}")

# %% [markdown]
# Four rules lie behind this, and each protects an answer.
#
# 1. Nobody outside reads an inner value: `shared` needs its softmax anyway.
# 2. Arguments that aren't tensors agree, and the search, traced on the very arguments that were found,
#    is the very calls that were found. So a pattern can't be right for one shape and wrong for another.
# 3. Nothing is written between the match and its place. In `in_between` the graph is functional
#    already, so an addition stands between the two calls, and there is no match at all.
# 4. What takes a result's place has memory of its own, if anybody could tell. The next section
#    shows why.

# %% [markdown]
# ## Break it
#
# The most harmless rewrite of all: `x * 1` is `x`. Here is a *graph pass*, a function that edits a graph,
# which does just that to the captured graph, before it is made functional. What could go wrong?

# %% name="careless" tags=["setup"]
from minicompile.extension import graph_pass


def careless(gm, mode):
    """`x * 1` is `x`, so why keep it?"""
    found = [n for n in gm.graph.nodes if n.op == "call_function" and n.args[1:] == (1,)]
    found = [n for n in found if n.target.__name__ == "mul"]
    for node in found:
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    return len(found)


# %% name="broken"
def counted(x):
    y = x * 1
    y.add_(1)
    return x.sum()


zeros = torch.zeros(3)
print("eager:   ", counted(zeros.clone()).item())
with mc.scoped():
    graph_pass("careless", stage="pre_grad")(careless)
    print("careless:", mc.compile(counted, backend="aot_eager")(zeros.clone()).item())
mc.reset()
with mc.scoped():
    mc.register_pattern("one", search=lambda x: x * 1, examples=[tensor], stage="pre_grad")(
        lambda x: x
    )
    print("pattern: ", mc.compile(counted, backend="aot_eager")(zeros.clone()).item())
    print(next(r for r in mc.trace(counted, zeros).aot.passes if "pattern:one" in r.name))
mc.reset()

# %% [markdown]
# `x * 1` has the numbers of `x`, and memory of its own: writing to one doesn't change the other. The
# careless pass made them one. A name for the same memory is an *alias*; this one wasn't there before.
# The package's pattern fired too, and put a copy there. (Later passes drop the copy where no one
# writes: in a functional graph nobody does.)
#
# ## Where in the corridor?
#
# A pattern names its stage. Each has its price: early graphs have what users wrote, with writes and
# views; later ones are functional, and made of smaller pieces. These are the passes of one trace, in
# order; slides show what each changed:


# %% name="stages"
def step(x):
    return torch.log(torch.softmax(x, -1)).sum() * 1


steps_of = mc.trace(step, torch.randn(4, 4, requires_grad=True))
for stage in ("pre_grad", "joint", "prims", "post_grad"):
    names = [
        r.name.partition(".")[2] for r in steps_of.aot.passes if r.name.startswith(f"{stage}.")
    ]
    print(f"{stage:>9}: {', '.join(dict.fromkeys(names)) or 'none by default'}")

# %% [markdown]
# Not every pass is a pattern. `prims.cse` merges calls that are equal (*common subexpressions*);
# `prims.dead_code` removes what nobody reads; `prims.fold_constants` computes what is known. What one of
# them changed, side by side:

# %% name="cse"
torch.manual_seed(0)
block = Block(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8))
h = torch.randn(2, 8, 16)
block_trace = mc.trace(block.mlp, h)
block_trace.diff("prims.cse")

# %% [markdown]
# ## On the lesson model
#
# The block spells attention out: a product, a scale, a mask, a softmax, a product. A library can do all
# of it at once without ever holding the table of weights. Patterns for it would be many, since people
# write this in many ways. So a plug-in has a pass of its own: it goes back from a product to a softmax, over
# whatever is done to scores, to another product. It is off by default, as the library rounds differently. In
# our block a dropout of rate zero stands between softmax and product. It gives back what it gets, but its
# call still reads the softmax, and the first rule would refuse: the pass counts such calls as inside.

# %% name="attention"
with torch.no_grad():
    found = mc.trace(mc.compile(block, options={"plugins": ["flash_attention"]}), h)
fired = [r for r in found.aot.passes if r.changed and r.name.startswith("pre_grad")]
print(f"{len(found.loops.externs)} library calls, {len(found.kernels)} kernels")
print(*fired)

# %% [markdown]
# > **In torch.compile.** Inductor's matcher does the same with the same words: `search` and `replace`
# > functions, traced on examples, for inference or with gradients. Below it rewrites a graph of our `f`.
# > Its patterns for attention are kept traced, in files, to save start-up time. We simplified: ours are
# > traced when first needed. Read `torch/_inductor/pattern_matcher.py`, then
# > `torch/_inductor/fx_passes/fuse_attention.py`.

# %% name="torch-patterns"
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement

theirs = PatternMatcherPass()
register_replacement(looked_for, both_at_once, [torch.empty(2, 2)], fwd_only, theirs)
graph = fwd_only(f, [x])
print("before:", [str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
print("fired: ", theirs.apply(graph))
print("after: ", [str(n.target) for n in graph.graph.nodes if n.op == "call_function"])

# %% [markdown]
# ## Recap
#
# 1. A pattern is two functions, and both are traced: one is looked for, the other put in its place.
# 2. Matching is unification from the results backwards; parameters stand for anything, but the same.
# 3. A match is refused if an inner value has other readers or something is written in between.
# 4. What replaces a new tensor must be new memory, or an alias appears that wasn't there.
# 5. The stage decides how much a rewrite must care for: functional graphs forgive more.

# %% [markdown]
# ## Exercises
#
# **Exercise 1 · Who fired?** (easy, 2 points). Write `fired(aot)`: a dict from a pattern's name (without
# stage and the word before the colon) to the number of places that it rewrote, for patterns that rewrote
# something. `aot.passes` has a record for each pass: `name`, such as `joint.pattern:log_of_softmax`, and
# `changed`.

# %% [markdown]
# **You will need**
#
# - `aot.passes`: a record for each pass, with `name` and `changed`. `(record.name, record.changed)` of the
#   record above gives `('joint.pattern:log_of_softmax', 1)`.
# - `text.partition("pattern:")`: before, the word itself, after; the word is empty where the text hasn't
#   got it. `"joint.pattern:a.b".partition("pattern:")` gives `('joint.', 'pattern:', 'a.b')`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Other passes change graphs too, and aren't patterns; a pattern's own name may have dots.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Keep records with that word in their name and with `changed` above zero; the key is what comes after the
# word.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def fired(aot):
    """How many places each pattern rewrote."""
    ### BEGIN SOLUTION
    found = [(r.name.partition("pattern:"), r.changed) for r in aot.passes]
    return {name: changed for (_, is_pattern, name), changed in found if is_pattern and changed}
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-passes" tags=["wrong"] kind="misconception" says="'prims.cse'"
def fired(aot):
    return {r.name: r.changed for r in aot.passes if r.changed}


# %% name="ex1-wrong-dots" tags=["wrong"] kind="visible-only" says="expected {'lesson.twice': 1}"
def fired(aot):
    records = [r for r in aot.passes if "pattern:" in r.name and r.changed]
    return {r.name.split(".")[1].split(":")[1]: r.changed for r in records}


# %% name="ex1-wrong-text" tags=["wrong"] kind="built-in" says="a use of rewrites"
def fired(aot):
    counts = {}
    for record in aot.passes:
        for rewrite in record.rewrites:
            counts[rewrite.pattern] = counts.get(rewrite.pattern, 0) + 1
    return counts


# %% [markdown]
# **Exercise 2 · Break the careless one** (solid, 2 points). Write `broken_by(x)`: a function of a tensor of
# floats for which the pass `careless` above changes the answer, whatever the numbers in `x` are. The check
# compiles it with that pass (it must differ from eager) and with the package's own pattern (it must
# not). Make it another one than `counted`: `x` itself must not be among what you write to.

# %% [markdown]
# **You will need**
#
# - `careless`: after it, `x * 1` is `x` itself: two names for one tensor, where eager has two tensors.
# - `x.sin()`: a new tensor. `a.add_(1)`: a write to it. In `counted` the write to `y` changed `x`, which
#   was read after it.
# - `mc.compile(broken_by)(x)` without the pass gives what eager gives.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Work on something that you made from `x`.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# There must be two names that `careless` makes one, a write to one of them, and a read of the other after
# it.
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def broken_by(x):
    """The careless pass gives another answer than eager."""
    ### BEGIN SOLUTION
    a = x.sin()
    b = a * 1
    a.add_(1)
    return b
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-read" tags=["wrong"] kind="misconception" says="expected another answer than eager's"
def broken_by(x):
    a = x.sin()
    b = a * 1
    return a + b


# %% name="ex2-wrong-input" tags=["wrong"] kind="misconception" says="expected x as it was"
def broken_by(x):
    b = x * 1
    x.add_(1)
    return b


# %% name="ex2-wrong-shape" tags=["wrong"] kind="visible-only" says="expected another answer than eager's"
def broken_by(x):
    a = x.sin()
    b = a * 1
    if x.dim() == 2:
        a.add_(1)
    return b


# %% name="ex2-wrong-pass" tags=["wrong"] kind="built-in" says="a use of graph_pass"
@graph_pass("worse", stage="pre_grad")
def worse(gm, mode):
    return 0


def broken_by(x):
    return x * 1


# %% [markdown]
# **Exercise 3 · Two patterns** (solid, 3 points). Write `register_two()`, which registers patterns in the
# stage "joint" (the default), so that `x * 1` (with an integer or a float one) and pairs
# `x.t().t()` disappear from the graph. The compiler's own passes for that are taken away. The check
# counts what is left, in small functions and in a block whose heads have width one: the scale of
# its attention is then `1.0`.

# %% [markdown]
# **You will need**
#
# - `mc.register_pattern(name, search=function, examples=[tensor])(replacement)`: as in the first cell. Both
#   functions take a tensor for each example.
# - A pattern has one search. Register as many as you like, under different names.
# - A float among `examples` stands for any number. For one number, write it in the search:
#   `lambda x: x * 1`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# What takes the place is the tensor itself: a function that returns its argument.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# As `unify` says above, `1` and `1.0` are not the same: that makes three searches in all.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def register_two():
    """Register patterns for x * 1 and x.t().t()."""

    ### BEGIN SOLUTION
    def itself(x):
        return x

    searches = {
        "times_one": lambda x: x * 1,
        "times_one_float": lambda x: x * 1.0,
        "transposed_twice": lambda x: x.t().t(),
    }
    for name, search in searches.items():
        mc.register_pattern(name, search=search, examples=[torch.empty(2, 2)])(itself)
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-any-number" tags=["wrong"] kind="misconception" says="x * 2: expected float32"
def register_two():
    def itself(x, *number):
        return x

    pair = {"search": lambda x: x.t().t(), "examples": [torch.empty(2, 2)]}
    mc.register_pattern("transposed_twice", **pair)(itself)
    number = {"search": lambda x, s: x * s, "examples": [torch.empty(2, 2), 1.0]}
    mc.register_pattern("times_one", **number)(itself)


# %% name="ex3-wrong-float" tags=["wrong"] kind="visible-only" says="expected 0 products left, got 1"
def register_two():
    for name, search in (("one", lambda x: x * 1.0), ("pair", lambda x: x.t().t())):
        mc.register_pattern(name, search=search, examples=[torch.empty(2, 2)])(lambda x: x)


# %% name="ex3-wrong-pass" tags=["wrong"] kind="built-in" says="a use of remove_no_ops"
def register_two():
    from minicompile.aot.passes.cleanup import remove_no_ops

    graph_pass("ones", stage="joint")(remove_no_ops)


# %% [markdown]
# **Exercise 4 · Products of products** (hard, 4 points). `(x @ a) @ b` is `x @ (a @ b)`. Which takes fewer
# multiplications depends on the shapes. Write `register_products()`, which registers a pattern for two
# `torch.mm`s that fires where the second form takes fewer, and nowhere else, in inference and in
# training. The check tries shapes, then trains a block whose first linear layer is such a product.

# %% [markdown]
# **You will need**
#
# - `when=`: a function of the match, which says whether the pattern may fire. The cell below has an
#   example.
# - `match.values`: the tensors found for the parameters of the search, in order. They have shapes, but no
#   numbers.
# - A product of an n x k and a k x m matrix takes n * k * m multiplications.
# - In training the backward reads the inner product: in the joint graph it has an outside reader. With
#   `stage="pre_grad"` the pattern is looked for before gradients are added, so one registration is enough
#   for inference and for training.

# %% name="ex4-when"
with mc.scoped():
    mc.register_pattern(
        "log_of_softmax",
        search=looked_for,
        examples=[tensor],
        when=lambda match: match.values[0].shape[0] > 2,
    )(both_at_once)
    for rows in (2, 3):
        print(f"{rows} rows:", rewrites(plainly, torch.randn(rows, 4)) or "refused")

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Write both products as functions of three tensors: one is the search, the other the replacement.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# `when=` compares two sums of two terms each. The shapes of `x`, `a` and `b` are all that it needs.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# In training it fires only in stage `pre_grad`.
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def register_products():
    """Register a pattern: mm(mm(x, a), b) where mm(x, mm(a, b)) is cheaper."""

    ### BEGIN SOLUTION
    def cheaper(match):
        x, a, b = match.values
        (rows, inner), (_, middle), (_, columns) = x.shape, a.shape, b.shape
        before = rows * inner * middle + rows * middle * columns
        return inner * middle * columns + rows * inner * columns < before

    mc.register_pattern(
        "products",
        search=lambda x, a, b: torch.mm(torch.mm(x, a), b),
        examples=[torch.empty(2, 2) for _ in "xab"],
        stage="pre_grad",
        when=cheaper,
    )(lambda x, a, b: torch.mm(x, torch.mm(a, b)))
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-always" tags=["wrong"] kind="misconception" says="expected 0 rewrites, got 1"
def register_products():
    mc.register_pattern(
        "products",
        search=lambda x, a, b: torch.mm(torch.mm(x, a), b),
        examples=[torch.empty(2, 2) for _ in "xab"],
        stage="pre_grad",
    )(lambda x, a, b: torch.mm(x, torch.mm(a, b)))


# %% name="ex4-wrong-tie" tags=["wrong"] kind="misconception" says="(8, 8): expected 0 rewrites, got 1"
def register_products():
    def as_cheap(match):
        x, a, b = match.values
        (rows, inner), (_, middle), (_, columns) = x.shape, a.shape, b.shape
        before = rows * inner * middle + rows * middle * columns
        return inner * middle * columns + rows * inner * columns <= before

    mc.register_pattern(
        "products",
        search=lambda x, a, b: torch.mm(torch.mm(x, a), b),
        examples=[torch.empty(2, 2) for _ in "xab"],
        stage="pre_grad",
        when=as_cheap,
    )(lambda x, a, b: torch.mm(x, torch.mm(a, b)))


# %% name="ex4-wrong-inference" tags=["wrong"] kind="misconception" says="expected 1 rewrites, got 0"
def register_products():
    def cheaper(match):
        x, a, b = match.values
        (rows, inner), (_, middle), (_, columns) = x.shape, a.shape, b.shape
        before = rows * inner * middle + rows * middle * columns
        return inner * middle * columns + rows * inner * columns < before

    mc.register_pattern(
        "products",
        search=lambda x, a, b: torch.mm(torch.mm(x, a), b),
        examples=[torch.empty(2, 2) for _ in "xab"],
        when=cheaper,
    )(lambda x, a, b: torch.mm(x, torch.mm(a, b)))


# %% name="ex4-wrong-rows" tags=["wrong"] kind="visible-only" says="expected 0 rewrites, got 1"
def register_products():
    def many_rows(match):
        x = match.values[0]
        return x.shape[0] > x.shape[1]

    mc.register_pattern(
        "products",
        search=lambda x, a, b: torch.mm(torch.mm(x, a), b),
        examples=[torch.empty(2, 2) for _ in "xab"],
        stage="pre_grad",
        when=many_rows,
    )(lambda x, a, b: torch.mm(x, torch.mm(a, b)))


# %% name="ex4-wrong-multi-dot" tags=["wrong"] kind="built-in" says="a use of multi_dot"
def register_products():
    mc.register_pattern(
        "products",
        search=lambda x, a, b: torch.mm(torch.mm(x, a), b),
        examples=[torch.empty(2, 2) for _ in "xab"],
        stage="pre_grad",
    )(lambda x, a, b: torch.linalg.multi_dot([x, a, b]))


# %% [markdown]
# ## Go deeper
#
# - `minicompile/custom/matching.py`: the matcher; `patterns.py` beside it traces and confirms.
# - `minicompile/aot/passes/replacing.py`: replacing; `place_of` looks for writes.
# - `minicompile/aot/passes/cleanup.py`: passes that aren't patterns.
# - `torch/_inductor/pattern_matcher.py` and `torch/_inductor/fx_passes/post_grad.py`: the same in Inductor.
#
# **Where you are.** The model's graphs are as good as graphs get. The next lesson takes operators apart.

# %% name="corridor"
from minicompile.lessons.pictures import corridor

corridor("aot")
