# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 16 · It is slow, or wrong. Now what?
#
# A compiler has many rooms, and a bug is in one of them. Nobody reads them all. You ask questions that
# halve what is left, until one rule remains that you can read. After this lesson you can
#
# - name the room that makes a result wrong, or a program slow;
# - find the one rule in it by bisection, and make the program small that shows it;
# - choose inputs that catch such a bug before a user does.

# %% name="setup" tags=["setup"]
try:
    import minicompile as mc
except ModuleNotFoundError:  # opened elsewhere, as on Colab
    get_ipython().run_line_magic(
        "pip", 'install -q "minicompile[notebook] @ git+https://github.com/your_name/minicompile"'
    )
    import minicompile as mc

import warnings

import torch
from torch.nn import functional as F

from minicompile.lessons.bugs import planted
from minicompile.lessons.exercise import checks

check = checks("16")
warnings.filterwarnings("ignore", message="internal error")

# %% [markdown]
# The example is one line of an activation. `planted` puts a *planted bug* into the compiler, by the
# same registries that its own rules use, and takes it out again at the end of the block. The picture
# is the table: each row runs the program one stage further and compares with the same in float64.

# %% name="first-look"


def f(x):
    return torch.tanh(F.silu(x) * -1) + x


torch.manual_seed(0)
x = torch.randn(4, 9, requires_grad=True)
with planted("same sign"):
    report = mc.accuracy(f, x)
report

# %% [markdown]
# Read it downwards. Eager's own error is rounding, the *baseline*. Captured by dynamo and run by
# PyTorch: the same. From `aot` on the result is wrong, so the room aot made the mistake, and lowering
# and code generation only carried it on. One table, and most rooms are out of the question.
#
# The whole method is a tree of such questions. Open the branch that you need:

# %% name="tree"
from IPython.display import HTML


def branch(question, *inside):
    body = "".join(f"<li>{i}</li>" for i in inside)
    look = "margin:2px 0 2px 14px;font:13px system-ui"
    return f'<details open style="{look}"><summary>{question}</summary><ul>{body}</ul></details>'


HTML(
    branch(
        "<b>What do you see?</b>",
        branch(
            "It is <b>wrong</b>: mc.accuracy(fn, *args), the first stage that is wrong",
            "captured: dynamo. mc.explain(fn)(*args) shows the graph and the guards",
            "aot: disable_passes, or take decompositions and vjps away with mc.without",
            "loops (below): take lowerings away with mc.without",
            "compiled only: fusion=False, then count fusions; then the kernel's text",
        ),
        branch(
            "It is <b>slow</b>: mc.explain(fn)(*args), then mc.trace(fn, *args)",
            "breaks: more than one graph. The reason and the line are in the report",
            "misses: it compiles again and again. mc.timeline(compiled) names the guard",
            "calls: trace.loops.externs says why no kernel",
            "kernels: trace.roofline() says which one moves the bytes",
        ),
        branch(
            "It <b>fails</b>: fullgraph=True raises instead of falling back",
            "make it small: leave operations out for as long as it still fails",
        ),
    )
)

# %% [markdown]
# ## Wrong: one more rung
#
# Between `aot` and `compiled` lie lowering, scheduling, code generation and a C++ compiler. The package
# has a *reference interpreter* for loops: slow, in plain torch. As a backend it makes one more rung of
# the ladder, and it needs no C++ compiler, so questions become cheap.

# %% name="loops-backend" tags=["setup"]
from minicompile.aot.runtime import make_callable
from minicompile.debug.accuracy import accuracy_stage
from minicompile.debug.reference import run_reference
from minicompile.extension import backends
from minicompile.lowering.lower import lower
from minicompile.pipeline import differentiate


@backends("loops")
def loops_backend(options):
    """Up to the loops, which the reference interpreter runs."""

    def build(capture):
        def interpreted(graph):
            loops = lower(graph, options)

            def run(inputs):
                given = list(inputs)
                inputs.clear()
                return run_reference(loops, given)

            return run

        aot = differentiate(capture, options)
        backward = interpreted(aot.backward) if aot.backward is not None else None
        return make_callable(aot, interpreted(aot.forward), backward, capture.name)

    return build


@accuracy_stage("loops")
def to_loops(target):
    return mc.compile(target, backend="loops")


# %% [markdown]
# **Predict, then run.** Three bugs, three programs. In which row does each become wrong, and in which
# column? Slide through the reports.

# %% name="three-reports"
from minicompile.lessons.pictures import slides


def under(bug, function, *args):
    with planted(bug):
        return mc.accuracy(function, *args)


def negate(x):
    return -x


def squash(x):
    return torch.tanh(x)


def attend(x):
    return torch.softmax(x, -1)


slides(
    "Three planted bugs, stage by stage",
    ("-x", "a sign in the last column", under("ragged", negate, x)),
    ("tanh", "the outputs are right", under("wrong slope", squash, x)),
    ("softmax", "the loops are right", under("wrong base", attend, x)),
)

# %% [markdown]
# The second is the kind that people find last: every output is right, only the gradient is wrong. The
# third is right even as loops: so it is in scheduling, in a plan, in a printer. Note the order of the
# rows: the stage that was added last stands last, but belongs before `compiled`.
#
# **Break it** yourself: plant any of these bugs and use the compiler as usual. Here is the wrong number
# that a user would see.

# %% name="break-it"
with planted("ragged"):
    wrong = mc.compile(torch.neg)(torch.arange(1.0, 10.0))
print("with the bug:", wrong.tolist())
print("without it:  ", mc.compile(torch.neg)(torch.arange(1.0, 10.0)).tolist())

# %% [markdown]
# ## Which rule?
#
# The room aot has passes and decompositions by the dozen. All can be left out by name, and without
# them the program still runs, only slower: passes by `disable_passes`, rules by `mc.without`. So there
# is an experiment: leave half of them out. Still wrong? Then the guilty one is in the other half. Which
# passes are there, and which of them changed anything?

# %% name="passes"
from minicompile.extension import known_passes

with planted("same sign"):
    trace = mc.trace(f, x)
    names = [f"{entry.stage}.{entry.name}" for entry in known_passes()]
ran = [record.name for record in trace.aot.passes if record.changed]
print(len(names), "passes; changed something:", ran)

# %% [markdown]
# Where a record says what changed, the suspects are few. Still, an experiment is better than a
# suspicion. *Bisection* keeps two numbers: so many passes left out and still wrong, so many left out
# and right. Each question halves the distance. (Exercise 3 is to write it for rules; here you watch.)

# %% name="bisect-passes"


def is_wrong(left_out):
    compiled = mc.compile(f, backend="aot_eager", options={"disable_passes": tuple(left_out)})
    return not torch.allclose(compiled(x), f(x), atol=1e-5)


questions = []
with planted("same sign"):
    assert is_wrong([]) and not is_wrong(names)  # the two ends, always first
    wrong_at, right_at = 0, len(names)
    while right_at - wrong_at > 1:
        middle = (wrong_at + right_at) // 2
        found = is_wrong(names[:middle])
        questions.append((middle, found))
        wrong_at, right_at = (middle, right_at) if found else (wrong_at, middle)
print("guilty:", names[right_at - 1], "after", len(questions), "questions")


def bar(left_out, found):
    line = "".join("x" if i < left_out else "." for i in range(len(names)))
    return f"{line}\nx: left out. The result is {'still wrong' if found else 'right'}."


slides(
    "The bisector narrows down",
    *((f"{n} of {len(names)} left out", "", bar(n, found)) for n, found in questions),
)

# %% [markdown]
# ## Bisection by a counter
#
# What if it is no rule but a decision, such as one fusion of many? Decisions have no names, but an
# order that is the same in every run. So count them: allow the first n, refuse the others. A policy
# that counts is five lines. With none the result is right, with all it is wrong; some n is the first.

# %% name="bisect-fusions"
from minicompile.extension import FusionPolicy, fusion_rule


def weigh(x):
    return torch.softmax(torch.relu(x) * 2, -1).cumsum(-1)


class UpTo(FusionPolicy):
    def __init__(self, most):
        self.left = most

    def can_fuse(self, producer, consumer, context):
        verdict, reason, *_ = super().can_fuse(producer, consumer, context)
        self.left -= bool(verdict)
        return (
            (False, "the counter has run out") if verdict and self.left < 0 else (verdict, reason)
        )


def wrong_with(most):
    with mc.scoped():
        fusion_rule("policy")(lambda: UpTo(most))
        compiled = mc.compile(weigh, options={"inline": "never"})
        return not torch.allclose(compiled(plain), weigh(plain), atol=1e-5)


plain = x.detach()
with planted("wrong base"):
    fusions = [
        d
        for d in mc.trace(mc.compile(weigh, options={"inline": "never"}), plain).schedule.decisions
        if d.fused
    ]
    verdicts = [wrong_with(n) for n in range(len(fusions) + 1)]
print("fusions allowed:", list(range(len(verdicts))))
print("wrong:          ", [int(v) for v in verdicts])
first = verdicts.index(True)
print("the one that makes it wrong:", fusions[first - 1])

# %% [markdown]
# The fusion is innocent: it was allowed, and right. But it made the first kernel that holds a maximum
# and a sum, and that is what the guilty rule waits for. A bisector finds what wakes a bug. The
# cause you find by reading, and now there is little left to read: one kernel.

# %% name="the-kernel"
with planted("wrong base"):
    guilty_kernel = mc.trace(attend, plain).kernels[0]
slides(
    "One kernel to read",
    ("wrong", "look for the base", guilty_kernel),
    ("right", "", mc.trace(attend, plain).kernels[0]),
)

# %% [markdown]
# ## The compiler asks itself
#
# `mc.bisect` is this method as a tool. Every room asks before it applies a rule, whether that is allowed; a
# gate answers, and counts. So one loop halves them all: passes, decompositions, lowerings, fusions, decisions
# about a kernel. Predict its answer for the program above: the fusion, or the rule?

# %% name="machine"
with planted("wrong base"):
    found = mc.bisect(weigh, [plain])
found  # below: of each try, what was allowed and what came of it

# %% [markdown]
# Read the tries from above: the ladder, then each subsystem left out as a whole. Several cure it; the
# search goes on in the latest, because to leave out an early one takes work from all that follow. Then
# it halves, and at last refuses the one application alone. What it changed is shown, and holds the cause.
# A script is bisected by its exit code: `minicompile bisect script.py` runs it anew for each try.
#
# > **In torch.compile.** The same ladder: `backend="eager"`, `"aot_eager"`, `"inductor"`. The bisector
# > is `torch/_inductor/compiler_bisector.py`: it tries the backends in order, then the subsystems of the
# > guilty one, then counts the applications of a subsystem. Simplified here: one subsystem is searched,
# > and one culprit.

# %% name="torch-compile"
from torch._inductor.compiler_bisector import BACKENDS

for backend, subsystems in BACKENDS.items():
    print(f"{backend}: {len(subsystems)} subsystem(s)", *[s.name for s in subsystems][:3])
explained = torch._dynamo.explain(f)(x)
print(
    "torch's explain of f:",
    explained.graph_count,
    "graph(s),",
    explained.graph_break_count,
    "break(s)",
)

# %% [markdown]
# ## The program made small
#
# A *minifier* leaves the compiler as it is and takes the program apart. It proposes to leave out half of the
# operations, a quarter, one, or to take other values; what still fails in the same way stays. Predict how
# many operations of `f` the lost sign needs.

# %% name="minify"
with planted("same sign"):
    small = mc.minify(f, [plain])
small  # the script runs, and fails as long as the bug is there

# %% [markdown]
# Every internal error of the compiler names the command `minicompile minify` and writes its graph down for
# it. Float64 can also be asked after every operator, in every stage. How much error is allowed? Ten
# times as much as eager's, or ten times the rounding of the largest value; exercise 6 has a sharper rule.
# (PyTorch's own minifier is `torch/_dynamo/repro/after_aot.py`.)

# %% name="by-operator"
with planted("same sign"):
    by_operator = mc.operator_accuracy(f, plain)
by_operator

# %% [markdown]
# ## Slow: the same ladder
#
# A slow program is asked the same way: is it one graph? Does it stay compiled? What is called, what is
# a kernel, what moves the bytes? Here is a step with three ailments. Predict which of them the report
# shows, and in which order you would heal them.

# %% name="slow"


def step(x, scale):
    x = torch.relu(x) * scale
    if x.mean().item() > 1.0:  # Python needs the number
        x = x - 1.0
    return torch.sort(x.tanh()).values.sum()


slow = mc.compile(step, dynamic=False)
for scale in (1, 2, 3):
    slow(plain, scale)
told = mc.explain(slow)(plain, 4)
print(
    told.graph_count,
    "graphs;",
    len(told.breaks),
    "break(s);",
    len(told.failures),
    "missed guard(s)",
)
for found in told.breaks:
    print("  break:", found.reason)
for found in list(told.failures)[:2]:
    print("  missed:", str(found).splitlines()[0])

# %% name="slow-calls"
rest = mc.trace(lambda x: torch.sort(x.tanh()).values.sum(), plain)
for extern in rest.loops.externs:
    print("a call:", extern.op, "-", extern.reason)

# %% [markdown]
# The roofline measures your machine: a copy and a product tell how many bytes and operations a second
# it can do at most. A kernel under the slope waits for memory, one under the roof for arithmetic.

# %% name="roofline" tags=["varies"]
mc.trace(weigh, plain).roofline()

# %% [markdown]
# The break first: what comes after it can't be fused with what comes before. The missed guards next: a
# Python number that changes is a new version each time, unless it may be symbolic. Then calls, then
# kernels, by the bytes they move. Logs say the same while a program runs:

# %% name="logs" tags=["varies"]
with mc.logs("recompiles", "graph_breaks"):
    mc.reset()
    for scale in (1, 2):
        slow(plain, scale)

# %% [markdown]
# ## Recap
#
# 1. Run the program one stage further at a time, beside float64: the first wrong stage names the room.
# 2. Look at gradients and state as well, since outputs may be right while they are wrong.
# 3. What can be left out by name or by count can be bisected, with both ends tried first; `mc.bisect` does.
# 4. A bisector finds what wakes a bug; make the program small, and read what remains.
# 5. A slow program is asked in the same order: breaks, missed guards, calls, kernels.
#
# ## Exercises
#
# **Exercise 1 · The room to blame** (easy, 2 points). Write `blame(report)` for what `mc.accuracy` gives: the
# name of the room, "dynamo", "aot", "lowering" or "codegen", in which the first mistake was made; ""
# where all is well. A stage is at fault if its `verdict` is "wrong", "far from eager" or "raised".
# The stages are "captured", "aot", "loops" and "compiled"; `report["loops"]` is a row.

# %% [markdown]
# **You will need**
#
# - `report["loops"]`: a row. `report["captured"].verdict` gives `'same as eager'`, for the first report
#   above.
# - The rooms that the stages end: "captured" is dynamo's, "aot" is aot's, "loops" is lowering's. "codegen"
#   stands here for scheduling and all that follows.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Which room stands between a stage and the one before it?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Ask in the order of the corridor, not in the order of the table; the first stage at fault is the answer.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def blame(report):
    """The room in which the first mistake was made, "" if there is none."""
    ### BEGIN SOLUTION
    rooms = {"captured": "dynamo", "aot": "aot", "loops": "lowering", "compiled": "codegen"}
    for stage, room in rooms.items():
        if report[stage].verdict in ("wrong", "far from eager", "raised"):
            return room
    return ""
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-outputs" tags=["wrong"] kind="misconception" says="expected 'aot', got ''"
def blame(report):
    rooms = {"captured": "dynamo", "aot": "aot", "loops": "lowering", "compiled": "codegen"}
    baseline = max(report["eager"].output_error, 1e-6)
    for stage, room in rooms.items():
        if report[stage].output_error > 10 * baseline:
            return room
    return ""


# %% name="ex1-wrong-only-wrong" tags=["wrong"] kind="visible-only" says="expected 'dynamo', got 'aot'"
def blame(report):
    rooms = {"captured": "dynamo", "aot": "aot", "loops": "lowering", "compiled": "codegen"}
    return next((room for stage, room in rooms.items() if report[stage].verdict == "wrong"), "")


# %% name="ex1-wrong-table-order" tags=["wrong"] kind="misconception" says="got 'lowering'"
def blame(report):
    if report["loops"].verdict in ("wrong", "raised", "far from eager"):
        return "lowering"
    return "codegen" if report["compiled"].verdict in ("wrong", "raised") else ""


# %% name="ex1-wrong-ok" tags=["wrong"] kind="built-in" says="a use of ok"
def blame(report):
    return "" if report.ok else "lowering"


# %% [markdown]
# **Exercise 2 · Inputs for a regression test** (solid, 3 points). Random numbers find few bugs. Construct
# `hard_inputs()`: at most five tensors `f32[n, m]` such that a function of one operator, compiled with
# a planted bug, differs from eager on at least one of them. The check plants bugs in activations and
# in `-x`: among them those of a tail that was forgotten, an overflow on the way, a lost NaN.

# %% [markdown]
# **You will need**
#
# - `torch.tensor([[1.0, float("nan")]])`, `float("inf")`: a tensor `f32[1, 2]` of your own numbers.
# - `torch.linspace(-3, 3, 26).reshape(2, 13)`: numbers in order. Vectors have a power of two as width: what
#   doesn't fill one is the tail.
# - `torch.exp(torch.tensor([88.0, 89.0]))` gives `tensor([1.6516e+38, inf])`: where float32 ends.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# A tail, ordinary numbers of both signs, large numbers of both signs, a NaN, an infinity: each may wake
# another bug.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# The exponential of a number of no great size is too large; what happens on the other side?
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# One tensor may be hard in several ways, but a NaN can hide its neighbours in a reduction: give it a tensor
# of its own.
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def hard_inputs():
    """At most five float32 tensors of two dimensions."""
    ### BEGIN SOLUTION
    inf, nan = float("inf"), float("nan")
    return [
        torch.linspace(-3, 3, 2 * 13).reshape(2, 13),
        torch.tensor([[1000.0, -1000.0, 500.0], [-90.0, 89.0, 0.0]]),
        torch.tensor([[nan, 1.0, -1.0], [2.0, nan, -0.0]]),
        torch.tensor([[inf, 1.0, 2.0], [-inf, -1.0, 0.5]]),
    ]
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-random" tags=["wrong"] kind="misconception" says="got the same answer on all 3"
def hard_inputs():
    return [torch.randn(8, 8), torch.randn(4, 16), torch.zeros(2, 8)]


# %% name="ex2-wrong-no-overflow" tags=["wrong"] kind="visible-only" says="expected an input with"
def hard_inputs():
    return [torch.randn(2, 13), torch.tensor([[float("nan"), 1.0]])]


# %% name="ex2-wrong-made" tags=["wrong"] kind="built-in" says="a use of make_tensor"
def hard_inputs():
    return [torch.testing.make_tensor(2, 13, dtype=torch.float32, device="cpu", low=-900, high=900)]


# %% [markdown]
# **Exercise 3 · A bisector** (solid, 4 points). Write `guilty(names, fails)`. `names` is a list of rules, one
# of which is wrong, or none. `fails(left_out)` leaves a list of rules out and says whether the program
# still fails; with nothing left out it does. Return the name of the guilty rule, or None if the fault
# is in no rule of the list. Ask at most two questions more than the logarithm to base two of their
# number, rounded up. The check uses it on the compiler.

# %% [markdown]
# **You will need**
#
# - `fails(names[:3])`: with the first three left out, does the program still fail? `fails([])` is true.
# - The cell "bisect-passes" above does the same for passes.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Try the end first: with all of them left out, does it still fail? Then it is none of them.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Keep two numbers: with so many left out it fails, with so many it is right. Know which is which before you
# write the loop.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def guilty(names, fails):
    """The rule without which the program does not fail, None if it is none of these."""
    ### BEGIN SOLUTION
    if fails(names):
        return None
    wrong_at, right_at = 0, len(names)
    while right_at - wrong_at > 1:
        middle = (wrong_at + right_at) // 2
        if fails(names[:middle]):
            wrong_at = middle
        else:
            right_at = middle
    return names[right_at - 1]
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-one-by-one" tags=["wrong"] kind="misconception" says="at most 6 questions, got"
def guilty(names, fails):
    for name in names:
        if not fails([name]):
            return name
    return None


# %% name="ex3-wrong-no-control" tags=["wrong"] kind="visible-only" says="expected None, got"
def guilty(names, fails):
    low, high = 0, len(names)
    while high - low > 1:
        middle = (low + high) // 2
        if fails(names[:middle]):
            low = middle
        else:
            high = middle
    return names[high - 1]


# %% name="ex3-wrong-library" tags=["wrong"] kind="built-in" says="a use of bisect"
def guilty(names, fails):
    import bisect

    if fails(names):
        return None
    many = range(len(names) + 1)
    return names[bisect.bisect_left(many, True, key=lambda n: not fails(names[:n])) - 1]


# %% [markdown]
# **Exercise 4 · A minimiser** (hard, 5 points). Write `minimise(gm, fails)` for an `fx.GraphModule` with one
# output: a smaller one that still fails. Two moves make a graph smaller. **Cut**: let it return the
# result of an earlier call. **Bypass**: let a call's users read one of its arguments, of the same shape.
# Both are given. Make a move, ask `fails(candidate)`, keep it if it still fails, until no move is left.
# Inputs stay. The graph that you were given must stay as it was.

# %% name="ex4-given" tags=["setup"]
import copy


def calls(gm):
    """The graph's calls, in order."""
    return [node for node in gm.graph.nodes if node.op.startswith("call")]


def shape(node):
    value = node.meta.get("val")
    return value.shape if isinstance(value, torch.Tensor) else None


def finished(gm):
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def cut(gm, position):
    """A copy that returns the result of its call number `position`; None where that is no tensor."""
    copied = copy.deepcopy(gm)
    node = calls(copied)[position]
    if shape(node) is None:
        return None
    output = next(n for n in copied.graph.nodes if n.op == "output")
    output.args = ((node,),)
    return finished(copied)


def bypass(gm, position):
    """A copy in which the users of call number `position` read an argument of its shape; None without one."""
    copied = copy.deepcopy(gm)
    node = calls(copied)[position]
    like = [n for n in node.all_input_nodes if shape(n) is not None and shape(n) == shape(node)]
    if not like:
        return None
    node.replace_all_uses_with(like[0])
    return finished(copied)


# %% [markdown]
# **You will need**
#
# - `calls(gm)`: a list; `len(calls(gm))` is the size of a graph.
# - `cut(gm, position)`, `bypass(gm, position)`: a smaller copy, or `None`. `gm` itself stays as it was.
# - `fails(candidate)`: does this graph still fail?

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# A cut near the front removes most, so try these first, from the front. Then try to bypass.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# After every move that you keep, the positions are others: start again with the smaller graph.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# A bypass may make another cut possible. You are done when a whole round keeps nothing.
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def minimise(gm, fails):
    """A graph that still fails, and no longer does after any one cut or bypass."""
    ### BEGIN SOLUTION
    for move in (cut, bypass, cut):
        position = 0
        while position < len(calls(gm)):
            candidate = move(gm, position)
            smaller = candidate is not None and len(calls(candidate)) < len(calls(gm))
            if smaller and fails(candidate):
                gm, position = candidate, 0
            else:
                position += 1
    return gm
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-once" tags=["wrong"] kind="misconception" says="can be left out"
def minimise(gm, fails):
    for position in range(len(calls(gm))):
        candidate = cut(gm, position)
        if candidate is not None and fails(candidate):
            return candidate
    return gm


# %% name="ex4-wrong-gelu" tags=["wrong"] kind="visible-only" says="can be left out"
def minimise(gm, fails):
    for position, node in enumerate(calls(gm)):
        if "gelu" in str(node.target):
            gm = cut(gm, position)
            break
    for position in reversed(range(len(calls(gm)))):
        candidate = bypass(gm, position)
        if candidate is not None and fails(candidate):
            gm = candidate
    return gm


# %% name="ex4-wrong-minifier" tags=["wrong"] kind="built-in" says="a use of minifier"
def minimise(gm, fails):
    from functorch.compile import minifier

    return minifier(gm, [], fails)


# %% [markdown]
# **Exercise 5 · Why is it slow?** (hard, 3 points, optional). Write `why_slow(told)` for what
# `mc.explain(compiled)(*args)` gives after some calls: the list of ailments, of "eager" (calls that ran
# the frame in eager), "breaks" and "recompiles" (guards were missed), in this order; [] for a healthy one.

# %% [markdown]
# **You will need**
#
# - `told.eager_calls`, `told.graph_count`: numbers. `told.breaks`, `told.failures`: lists. For `slow`
#   above, `(told.eager_calls, told.graph_count, len(told.breaks) > 0, len(told.failures) > 0)` gives
#   `(0, 8, True, True)`.
# - So `why_slow(told)` is `["breaks", "recompiles"]` for it.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Each ailment is one question to `told`.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# A frame that ran in eager has a reason as well, among `told.breaks`: is that a break?
#
# </details>


# %% name="ex5-answer" tags=["answer"]
def why_slow(told):
    """Of "eager", "breaks", "recompiles" those that apply, in this order."""
    ### BEGIN SOLUTION
    ailments = {
        "eager": told.eager_calls > 0,
        "breaks": told.graph_count > 0 and len(told.breaks) > 0 and not told.eager_calls,
        "recompiles": len(told.failures) > 0,
    }
    return [name for name, applies in ailments.items() if applies]
    ### END SOLUTION


# %% name="ex5-check" tags=["nbval-check-output"]
check("ex5")


# %% name="ex5-wrong-graphs" tags=["wrong"] kind="misconception" says="['recompiles'], got ['breaks']"
def why_slow(told):
    return ["breaks"] if told.graph_count > 1 else []


# %% name="ex5-wrong-no-eager" tags=["wrong"] kind="visible-only" says="expected ['eager'"
def why_slow(told):
    found = ["breaks"] if told.breaks else []
    return found + (["recompiles"] if len(told.failures) else [])


# %% name="ex5-wrong-text" tags=["wrong"] kind="built-in" says="a use of str"
def why_slow(told):
    return [word for word in ("eager", "breaks", "recompiles") if word in str(told)]


# %% [markdown]
# **Exercise 6 · How far is too far?** (hard, 3 points, optional). Write `too_far(rows, stages)` for rows as
# above: each has `operator`, `largest` (its largest value), `dtype`, `errors`, by stage and of "eager", and
# `roundings`: one for each operation that the value went through, log2(n) for a sum of n. A stage may err
# twice as much as eager, or by two times `roundings` times one rounding of the largest value,
# `torch.finfo(dtype).eps` times that value; the larger of the two counts. Return the first of `stages` that
# errs more, with the first operator at which it does; None if there is none.

# %% [markdown]
# **You will need**
#
# - `row.operator`, `row.largest`, `row.dtype`, `row.roundings`, and `row.errors`, a dict:
#   `row.errors["eager"]` is eager's own error.
# - `torch.finfo(torch.float32).eps` gives `1.1920928955078125e-07`: one rounding of the number 1.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# The first stage comes before the first operator: which loop is the outer one?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# What is allowed is the larger of two numbers: twice eager's error, and twice `roundings` times one
# rounding of the largest value.
#
# </details>


# %% name="ex6-answer" tags=["answer"]
def too_far(rows, stages):
    """(stage, operator) of the first error that rounding does not explain, None without one."""
    ### BEGIN SOLUTION
    for stage in stages:
        for row in rows:
            rounding = torch.finfo(row.dtype).eps * row.largest
            allowed = max(2 * row.errors["eager"], 2 * row.roundings * rounding)
            if row.errors[stage] > allowed:
                return stage, row.operator
    return None
    ### END SOLUTION


# %% name="ex6-check" tags=["nbval-check-output"]
check("ex6")


# %% name="ex6-wrong-rows-first" tags=["wrong"] kind="misconception" says="expected ('functional', 'sum')"
def too_far(rows, stages):
    for row in rows:
        rounding = torch.finfo(row.dtype).eps * row.largest
        allowed = max(2 * row.errors["eager"], 2 * row.roundings * rounding)
        for stage in stages:
            if row.errors[stage] > allowed:
                return stage, row.operator
    return None


# %% name="ex6-wrong-guessed" tags=["wrong"] kind="visible-only" says="expected None, got"
def too_far(rows, stages):
    for stage in stages:
        for row in rows:
            if row.errors[stage] > max(2 * row.errors["eager"], 1e-5):
                return stage, row.operator
    return None


# %% name="ex6-wrong-close" tags=["wrong"] kind="built-in" says="a use of isclose"
def too_far(rows, stages):
    import math

    for stage in stages:
        for row in rows:
            if not math.isclose(row.errors[stage], row.errors["eager"], rel_tol=2):
                return stage, row.operator
    return None


# %% [markdown]
# ## Go deeper
#
# - `minicompile/debug/accuracy.py`: stages, copies, and why float64 is the measure.
# - `minicompile/debug/reference.py`: the interpreter of loops. `tests/fuzz/shrink.py`: programs made small.
# - `minicompile/ops/gates.py`, `minicompile/debug/bisect.py`: who asks, and who counts.
# - `minicompile/debug/minify.py`, `minicompile/debug/operator_accuracy.py`: proposals, and what is allowed.
# - `tests/faults/`: fifty more planted bugs. `minicompile/lessons/bugs.py`: those of here. Read it last.
# - `torch/_inductor/compiler_bisector.py`, `torch/_dynamo/repro/after_aot.py` and
#   `torch/_functorch/fx_minifier.py`.
#
# **Where you are.** Outside of the corridor, with a lamp that shines into any room. The last lesson
# gives you the keys.

# %% name="corridor"
from minicompile.lessons.pictures import corridor

corridor("dynamo", "aot", "lowering", "scheduling", "codegen", "runtime")
