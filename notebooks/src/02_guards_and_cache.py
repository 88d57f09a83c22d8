# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 02 · When is yesterday's graph still right?
#
# A graph was written down while a function ran once. The next call brings other arguments, and the
# world may have changed: a global, a weight, a flag. This lesson shows how the compiler knows. After
# this lesson you can
#
# - read the table of guards of a compiled function, and say which line of Python made each,
# - say why a call was compiled again, and change a function so that it is not,
# - see what is called below a function that runs in eager, and answer it with compiled code.

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

check = checks("02")

# %% [markdown]
# Our example reads a tensor, a number and a global. Each row of the table is one *guard*, a fact that
# the graph relies on: the check, why it is needed, and the line that read the fact.

# %% name="example"
SHIFT = 1


def f(x, k):
    if k > 2:
        return x * k + SHIFT
    return x - k


x = torch.arange(3)
captured = mc.explain(f)(x, 3).captures[0]
captured.guards

# %% [markdown]
# The graph holds a product with a constant. It would be wrong for another `k`, for another `SHIFT`, for
# a tensor of another dtype. None of this stands in the graph. So every fact that the compiler read
# while it captured became a guard, and only such facts: what was not read may change freely.

# %% name="graph"
print(captured.graph)

# %% [markdown]
# ## A guard is a small object
#
# It knows where to look (its Sources, the paths from lesson 01), what kind of check it is, what it
# expects, and who needs it. Here are the ones about arguments:

# %% name="guards"
for guard in captured.guards:
    for place in guard.sources:
        if place.kind == "local":
            print(
                f"{guard.kind:8} {place.name:4} expects {guard.expected!r:32.32} {guard.user_line}"
            )

# %% [markdown]
# The most common kinds: `equals` for numbers and strings, `type` for the class of an object whose inside
# matters, `length` and `keys` for containers, `identity` for functions and modules, `tensor` for shape,
# strides, dtype, device and whether it requires a gradient. How each is checked is a rule in a registry:

# %% name="kinds"
from minicompile.extension import guard_rules

print(", ".join(sorted(guard_rules)))

# %% [markdown]
# ## The cache
#
# A compiled function keeps a list of *entries*: guards, a compiled graph, and what to do with its
# results. A call asks one entry after the other; the first whose guards hold answers it, a *hit*. If
# none fits, that is a *miss*, and the function is captured anew: a *recompile*. Guards are asked on each
# call, so they must be fast: all guards of an entry are one generated Python function.

# %% name="entry"
import linecache

from minicompile.api import dispatcher_of

compiled = mc.compile(f, backend="eager", dynamic=False)
compiled(x, 3)
[entry] = dispatcher_of(compiled).entries


def text_of(entry):
    return "".join(linecache.getlines(entry.call.__code__.co_filename))


print(text_of(entry))

# %% [markdown]
# `state_holds` asks for settings such as grad mode, `tensors_hold` checks all tensors at once in C++,
# and `held` looks after objects that the entry itself holds, such as the global: it compares
# pointers, and asks the guards only if one has changed.
#
# **Predict, then run.** Five calls: `f(x, 3)` again, `f(x, 1)`, `f(x, 3.0)`, `f(x, 3)` with another `SHIFT`,
# and one with a tensor of another length. Which of them hit? Move the slider through the calls.

# %% name="timeline"
from dataclasses import replace

from minicompile.lessons.pictures import slides


def timeline_of(function):
    """The timeline without the seconds, which differ from run to run."""
    told = mc.timeline(function)[0]
    return replace(told, misses=tuple(replace(miss, seconds=0.0) for miss in told.misses))


frames = [("f(x, 3)", "the first call", timeline_of(compiled))]
for title, shift, arguments in (
    ("f(x, 3)", 1, (x, 3)),
    ("f(x, 1)", 1, (x, 1)),
    ("f(x, 3.0)", 1, (x, 3.0)),
    ("f(x, 3), SHIFT = 2", 2, (x, 3)),
    ("f of more elements, 3", 1, (torch.arange(5), 3)),
):
    SHIFT = shift
    assert torch.equal(compiled(*arguments), f(*arguments))
    frames.append((title, "", timeline_of(compiled)))
slides("calls of f", *frames)

# %% [markdown]
# A row is a version, a column runs from one miss to the next; a cross names the guard that failed. One
# call hit: the second. Note `f(x, 3.0)`: in Python `3 == 3.0`, yet the entry did not answer it. The
# result has another dtype, so an `equals` guard compares the type first.
#
# A recompile costs more than it gains if it happens on every call. So the compiler learns: a number
# that differed once becomes a *symbol* in the second version, which serves all values (lesson 04).

# %% name="symbols"


def scale(x, k):
    return x * k


learning = mc.compile(scale, backend="eager")
for k in range(2, 9):
    learning(x, k)
print(mc.timeline(learning))

# %% [markdown]
# Compare the two versions line by line: where has the number gone, and what is asked of it now?

# %% name="two-entries"
first, second = dispatcher_of(learning).entries
slides(
    "entries of scale",
    ("version 1", "for one number", text_of(first)),
    ("version 2", "for any number in a range", text_of(second)),
)

# %% [markdown]
# ## The world around
#
# Guards are not only about arguments. The block of the lesson model reads weights, flags and
# functions; all of these are guarded too. **Predict, then run:** which of these changes makes a miss?

# %% name="block"
from minicompile.lessons.model import GPT, GPTConfig

torch.manual_seed(0)
config = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, dropout=0.1)
block, h = GPT(config).blocks[0], torch.randn(2, 16, 32)
fast = mc.compile(block, backend="eager")


def misses():
    return len(mc.timeline(fast)[0].misses)


fast(h)
print("guards:", len(mc.explain(block)(h).captures[0].guards))
before = misses()
fast(h * 2)
print("other numbers:           ", misses() - before, "miss")
before = misses()
block.norm1.note = "an attribute that nobody reads"
fast(h)
print("an attribute nobody read:", misses() - before, "miss")
before = misses()
block.eval()
fast(h)
print("eval():                  ", misses() - before, "miss")
print(str(mc.timeline(fast)[0].misses[-1].failures[0]).splitlines()[0])

# %% [markdown]
# ## Break it
#
# Take one kind of guard away, and the cache believes anything. `mc.without` gives it back afterwards.

# %% name="break-it"
with mc.without("guard:equals"):
    careless = mc.compile(f, backend="eager")
    careless(x, 3)
    print("wrong:", careless(x, 1).tolist(), " eager:", f(x, 1).tolist())
careful = mc.compile(f, backend="eager")
careful(x, 3)
print("right:", careful(x, 1).tolist())

# %% [markdown]
# No error, just wrong numbers: that is what makes a missing guard the worst kind of fault in a compiler.
#
# ## The frame hook
#
# A compiled function stands in front of yours, so its calls go through the cache. But some functions
# can't be captured, and run in eager. Who catches the calls below them? CPython lets an extension
# step in wherever a frame begins: a *frame hook*. Ours is
# `minicompile/plugins/nested_frames/frame_hook.c`. It asks a callback about each function that it sees for
# the first time; the callback may leave it alone.

# %% name="hook"
from minicompile.plugins.nested_frames import hook


def helper(x):
    return torch.relu(x) * 2


def loop(x):
    for _ in range(3):
        x = helper(x)
    return x


def ask(function):
    print("asked about", function.__qualname__)
    return hook.LEAVE


hook.watched(ask, hook.next_serial(), loop)(x)

# %% [markdown]
# Asked once, although it was called three times: the answer is kept in the code object itself, where
# looking it up costs almost nothing. Instead of leaving a frame alone, the callback may give an *entry*:
# it is called in the frame's place, with the function and its arguments.

# %% name="intercept"


def instead(function, *arguments):
    return torch.full((3,), -1)


def answer(function):
    return instead if function is helper else hook.LEAVE


print(hook.watched(answer, hook.next_serial(), loop)(x))

# %% [markdown]
# The real callback gives a cache of entries, like that of a compiled function. Below, `exec` runs a text
# that no graph can hold. Python runs it, and the hook sees the block being called in there:

# %% name="nested"


def script(text, model, h):
    names = {"model": model, "h": h}
    exec(text, names)
    return names["h"] + 1


explained = mc.explain(script)("h = model(h)", block, h)
print(explained.breaks[0].reason)
for capture in explained.captures:
    print(f"  graph of {capture.graph.op_count} operations for {capture.name}")

# %% [markdown]
# > **In torch.compile.** Dynamo's guards are a tree that is checked in C++
# > (and built in `torch/_dynamo/guards.py`), ours are generated Python. It has a frame hook for all
# > frames (`torch/_dynamo/eval_frame.py` switches it on); we put a plain function in front, and need
# > the hook only below eager code. The same calls, with a backend that counts graphs:

# %% name="torch-compile"
made = []


def counting(gm, inputs):
    made.append(gm)
    return gm.forward


theirs = torch.compile(f, backend=counting, dynamic=False)
for arguments in ((x, 3), (x, 3), (x, 1), (x, 3.0)):
    theirs(*arguments)
print("calls: 4, graphs:", len(made))
for guard in torch._dynamo.explain(f)(x, 3).out_guards:
    if guard.name:
        print(f"  {guard.create_fn_name():16} {guard.name}")

# %% [markdown]
# ## Recap
#
# 1. Every fact that capture read and that could change becomes a guard.
# 2. A compiled function keeps entries; the first whose guards hold answers a call.
# 3. If none fits, the function is captured again, and the timeline says which guard failed.
# 4. A guard too few gives wrong numbers; a guard too many only costs a recompile.
# 5. Below functions that run in eager, a frame hook asks about every call that begins.

# %% [markdown]
# ## Exercises
#
# **Exercise 1 · provoke a miss** (solid, 2 points). `mixed` was compiled, with fixed sizes, for the arguments
# `torch.ones(3), 2, [1, 2], {"bias": 1}`. Write `arguments_that_miss(kind)`: the arguments (a tuple) of
# a call whose first failing guard is of that kind: `"equals"`, `"tensor"`, `"type"` or `"length"`.

# %% name="ex1-setup" tags=["setup"]


def mixed(x, factor, parts, options):
    y = x * factor + options["bias"]
    for part in parts:
        y = y + part
    return y


# %% [markdown]
# **You will need**
#
# - `mc.explain(mixed)(torch.ones(3), 2, [1, 2], {"bias": 1}).captures[0].guards`: the guards, in order,
#   with their kinds.
# - A guard of kind `"equals"` wants one constant, `"tensor"` a dtype and sizes, `"type"` a class,
#   `"length"` a number of items.
# - The call must work in eager, too: `mixed(torch.ones(3), 3, [1, 2], {"bias": 1})` gives
#   `tensor([7., 7., 7.])`, and fails `"equals"` first.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Change one argument at a time. Which guards look at it, and which of them is first?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# For `"type"`: what else than a list can be gone through by `for`? A float in the place of 2 fails
# `"equals"`, since the class of a number isn't asked apart.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def arguments_that_miss(kind):
    """Arguments of `mixed` for which the first guard that fails is of this kind."""
    ### BEGIN SOLUTION
    x, factor, parts, options = torch.ones(3), 2, [1, 2], {"bias": 1}
    if kind == "equals":
        factor = 3
    elif kind == "tensor":
        x = torch.ones(4)
    elif kind == "type":
        parts = (1, 2)
    elif kind == "length":
        parts = [1, 2, 3]
    return x, factor, parts, options
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-float" tags=["wrong"] kind="misconception" says="expected type, got equals"
def arguments_that_miss(kind):
    x, factor, parts, options = torch.ones(3), 2, [1, 2], {"bias": 1}
    if kind == "equals":
        factor = 3
    elif kind == "type":
        factor = 2.0
    return x, factor, parts, options


# %% name="ex1-wrong-two-kinds" tags=["wrong"] kind="visible-only" says="expected tensor, got no miss"
def arguments_that_miss(kind):
    if kind == "equals":
        return torch.ones(3), 3, [1, 2], {"bias": 1}
    if kind == "type":
        return torch.ones(3), 2, (1, 2), {"bias": 1}
    return torch.ones(3), 2, [1, 2], {"bias": 1}


# %% name="ex1-wrong-without" tags=["wrong"] kind="built-in" says="a use of guard_rules"
def arguments_that_miss(kind):
    from minicompile.extension import guard_rules

    @guard_rules(kind)
    def never(code, guard, values):
        return "False"

    return torch.ones(3), 2, [1, 2], {"bias": 1}


# %% [markdown]
# **Exercise 2 · the first failure** (solid, 3 points). The check takes the rules for `equals` and `type`
# away, and lets the cache ask you: `first_failure(guards, args)` gets the guards of these two kinds of an
# entry, in order, and the values of the call by the name of their Source (`args[guard.sources[0].name]`).
# Give the first guard that does not hold, or None. A guard of kind `type` expects a class, one of kind
# `equals` a constant.

# %% [markdown]
# **You will need**
#
# - `guard.kind`: `"type"` or `"equals"`; `guard.expected`: the class or the constant.
# - `args[guard.sources[0].name]`: the value that a guard is about. For `f(x, 3)` above, `args["k"]` would
#   be `3`.
# - `type(value)`: its class. `(type(True), isinstance(True, int), 2 == 2.0)` gives
#   `(<class 'bool'>, True, True)`.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Go through the guards in order, and return the first that does not hold.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# When is an entry made for one value right for another? `x * 2` and `x * 2.0` differ in dtype if `x` is of
# ints.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# For `"equals"`, class and value must both agree; compare classes by `is`.
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def first_failure(guards, args):
    """The first of the guards that the values in `args` (by name) do not meet, or None."""
    ### BEGIN SOLUTION
    for guard in guards:
        value = args[guard.sources[0].name]
        if guard.kind == "type":
            holds = type(value) is guard.expected
        else:
            holds = type(value) is type(guard.expected) and value == guard.expected
        if not holds:
            return guard
    return None
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-eq" tags=["wrong"] kind="misconception" says="for 2.0: expected int64, got float32"
def first_failure(guards, args):
    for guard in guards:
        value = args[guard.sources[0].name]
        if guard.kind == "equals" and value != guard.expected:
            return guard
        if guard.kind == "type" and type(value) is not guard.expected:
            return guard
    return None


# %% name="ex2-wrong-identity" tags=["wrong"] kind="misconception" says="expected a hit, got a miss"
def first_failure(guards, args):
    for guard in guards:
        value = args[guard.sources[0].name]
        if guard.kind == "type":
            value = type(value)
        if value is not guard.expected:
            return guard
    return None


# %% name="ex2-wrong-isinstance" tags=["wrong"] kind="visible-only" says="reused the entry for 1: expected"
def first_failure(guards, args):
    for guard in guards:
        value, expected = args[guard.sources[0].name], guard.expected
        if guard.kind == "type":
            holds = type(value) is expected
        else:
            holds = isinstance(value, type(expected)) and value == expected
        if not holds:
            return guard
    return None


# %% name="ex2-wrong-given" tags=["wrong"] kind="built-in" says="a use of"
def first_failure(guards, args):
    from minicompile.dynamo.variables import same_constant

    for guard in guards:
        if not same_constant(args[guard.sources[0].name], guard.expected):
            return guard
    return None


# %% [markdown]
# **Exercise 3 · one recompile** (solid, 3 points). `decay` below is called with `step` running from two
# upwards, and is compiled again and again: the index of a Python list must be a plain number. Write
# `steady(x, step)` with the same results, of which `mc.compile` makes no more than two versions (so: one
# recompile), whatever steps come.

# %% name="ex3-setup" tags=["setup"]
RATES = [0.01 * 2**step for step in range(8)]


def decay(x, step):
    return x * RATES[min(step, 7)]


# %% [markdown]
# **You will need**
#
# - `torch.tensor(RATES)`: the list as a tensor. A tensor may be its index:
#   `torch.tensor(RATES)[torch.tensor(2)]` gives `tensor(0.0400)`.
# - `torch.full((), step)`: a tensor that holds the number `step`. What a tensor holds is no guard.
#   `torch.full((), 3)` gives `tensor(3)`.
# - `tensor.clamp(max=7)`: no number above seven. `torch.tensor(9).clamp(max=7)` gives `tensor(7)`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# The value of a Python number is a guard, what a tensor holds is none. Where must `step` become a tensor?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Before it is compared: limit it there, then look up in a tensor of rates.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def steady(x, step):
    """What `decay` gives, without a guard on each value of `step`."""
    ### BEGIN SOLUTION
    table = torch.tensor(RATES)
    return x * table[torch.full((), step).clamp(max=7)]
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-min" tags=["wrong"] kind="misconception" says="expected at most 2, got"
def steady(x, step):
    return x * torch.tensor(RATES)[min(step, 7)]


# %% name="ex3-wrong-no-limit" tags=["wrong"] kind="visible-only" says="does not show, steady(x, 8)"
def steady(x, step):
    return x * 0.01 * 2 ** torch.full((), step)


# %% name="ex3-wrong-disable" tags=["wrong"] kind="built-in" says="a use of disable"
@mc.disable
def steady(x, step):
    return x * RATES[min(step, 7)]


# %% [markdown]
# **Exercise 4 · the hook's callback** (hard, 4 points). Now you are asked below eager code, in the place of
# the compiler's own callback. `decide(function, known, compile_it)` gives `hook.NEVER` for functions of
# PyTorch, of the standard library and of minicompile, and for each other function an entry, made by
# `compile_it(function)`. The hook refers to entries weakly: one that nobody keeps is gone, and you are
# asked again at every call. So keep them, by code object, in the dict `known`.

# %% [markdown]
# **You will need**
#
# - `is_fixed(function.__module__)`: does it belong to a library?
#   `(is_fixed("torch.nn"), is_fixed("__main__"))` gives `(True, False)`.
# - `function.__code__`: its code object, the same at every call. It can be a key of a dict.
# - `compile_it(function)`: a new entry, each time that you ask.
# - `known`: an empty dict at first; what you put there stays. `hook.NEVER`: this function's frames run as
#   they are.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Two questions, in order: does it belong to a library? Is there an entry already?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Two functions may have one name, and still be two functions. The code object tells them apart.
#
# </details>

# %% name="ex4-setup" tags=["setup"]
from minicompile.dynamo.variables import is_fixed
from minicompile.plugins.nested_frames import hook


# %% name="ex4-answer" tags=["answer"]
def decide(function, known, compile_it):
    """What stands in for the frames of a function: hook.NEVER, or an entry that `known` keeps."""
    ### BEGIN SOLUTION
    if is_fixed(function.__module__):
        return hook.NEVER
    code = function.__code__
    if code not in known:
        known[code] = compile_it(function)
    return known[code]
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-dropped" tags=["wrong"] kind="misconception" says="in 4 calls: expected 1, got 4"
def decide(function, known, compile_it):
    if is_fixed(function.__module__):
        return hook.NEVER
    return compile_it(function)


# %% name="ex4-wrong-everything" tags=["wrong"] kind="misconception" says="expected hook.NEVER"
def decide(function, known, compile_it):
    code = function.__code__
    if code not in known:
        known[code] = compile_it(function)
    return known[code]


# %% name="ex4-wrong-name" tags=["wrong"] kind="visible-only" says="does not show"
def decide(function, known, compile_it):
    if is_fixed(function.__module__):
        return hook.NEVER
    name = function.__module__, function.__qualname__
    if name not in known:
        known[name] = compile_it(function)
    return known[name]


# %% name="ex4-wrong-given" tags=["wrong"] kind="built-in" says="a use of"
def decide(function, known, compile_it):
    from minicompile.plugins.nested_frames.frames import standing_of

    standing = standing_of(function)
    return known.setdefault(function.__code__, standing or compile_it(function))


# %% [markdown]
# ## Go deeper
#
# - `minicompile/dynamo/guards.py`: each kind's rule, and the reasons of failures.
# - `minicompile/dynamo/entry.py`: the generated function; `minicompile/plugins/guard_snapshot/facts.py`: how
#   it sees by pointers that nothing changed. `minicompile/dynamo/dispatch.py`: the cache.
# - `minicompile/plugins/nested_frames/frames.py`: the callback, which `frame_hook.c` beside it asks.
# - Your answer to exercise 2 takes minus zero for zero. What does `same_constant` of
#   `minicompile/dynamo/variables.py` do about it, and why?
# - `torch/_dynamo/guards.py`, `torch/_dynamo/eval_frame.py` and `torch/_dynamo/cache_size.py`.

# %% [markdown]
# **Where you are.** Still in the first room: the graph of the block is now kept, and found again when it
# is right. The next lesson asks what happens to Python that no graph can hold.

# %% name="where"
from minicompile.lessons.pictures import corridor

corridor("dynamo")
