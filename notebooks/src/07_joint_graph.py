# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 07 · Where does the backward graph come from?
#
# You write a forward pass. Training needs a second program that nobody wrote: the one that computes
# gradients. Eager PyTorch makes it anew in every step. A compiler makes it once, before anything runs.
#
# After this lesson you can
#
# - read a joint graph: what goes in, what comes out, where forward ends and backward begins;
# - say which of two programs decided each line of it, the recorder or autograd;
# - write an operator's gradient yourself, have the compiler use it, and prove that it is right.

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

aten = torch.ops.aten
check = checks("07")

# %% [markdown]
# The running example: a matrix product, a `tanh`, a sum of squares. Only `w` wants a gradient.

# %% name="picture"
import torch

import minicompile as mc


def f(x, w):
    y = torch.tanh(x @ w)
    return (y * y).sum()


torch.manual_seed(0)
x, w = torch.randn(4, 3), torch.randn(3, 5, requires_grad=True)
trace = mc.trace(f, x, w)
joint = trace.aot.level("full")
joint

# %% [markdown]
# That is the answer: a *joint graph*, forward and backward in one. Frames in blue are what you wrote,
# frames in orange what follows from it. The whole graph is one ordinary function without any autograd
# left in it: the chain rule has become lines of code. A fill (and the stripe beside the code) stands
# for a line of Python: each backward operation has the one that it is the derivative of.
#
# ## Reading it
#
# A joint graph has two kinds of inputs. The *primals* are the inputs of your function, `x` and `w`.
# The *tangents* are what training sends in from behind: for each result, the gradient of the loss
# with respect to that result. It has two kinds of outputs too: the results, and one gradient for each
# primal that wants one.

# %% name="ends"
from minicompile.ops.graph import output_node, placeholders

inputs = placeholders(joint.gm.graph)
results, gradients = output_node(joint.gm.graph).args[0]
print("primals:  ", [node.name for node in inputs if node.meta["phase"] == "forward"])
print("tangents: ", [node.name for node in inputs if node.meta["phase"] == "backward"])
print("results:  ", [node.name for node in results])
print(
    "gradients:",
    [node.name for node in gradients],
    "of inputs",
    trace.aot.metadata.differentiable_inputs,
)

# %% [markdown]
# Since the graph is a plain function, we can call it. Send in a tangent of one (that is what
# `loss.backward()` does) and compare with eager:

# %% name="call-it"
(result,), (gradient,) = joint.gm(x, w.detach(), torch.tensor(1.0))
f(x, w).backward()
print("same result:  ", torch.allclose(result, f(x, w)))
print("same gradient:", torch.allclose(gradient, w.grad))

# %% [markdown]
# ## How it is made
#
# There is no differentiator in this compiler. PyTorch has one already, so we let it work and watch.
# The captured graph is run once on *FakeTensors*, tensors with a shape but without numbers, which
# require grad. While the forward runs, autograd hangs a node on every result, as it always does: the
# *tape*. Then we ask for gradients, autograd walks its tape backwards, and every operator that it
# calls passes the recorder like any other. Ten lines of PyTorch show the trick:

# %% name="recorder"
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """Sees every operator that reaches a kernel: below autograd."""

    def __init__(self):
        super().__init__()
        self.phase, self.seen = "forward", []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        running = torch._C._current_autograd_node()  # None unless autograd is at work
        self.seen.append((self.phase, str(op), running and running.name()))
        return op(*args, **(kwargs or {}))


tangent = torch.tensor(1.0)
with Recorder() as recorder:
    loss = f(x, w)
    recorder.phase = "backward"
    torch.autograd.grad(loss, [w], tangent)
for phase, op, _ in recorder.seen:
    print(f"{phase:>8}  {op}")

# %% [markdown]
# Compare this with the orange half above: the same operators in the same order. (`aten.detach` is
# autograd unpacking a value that it kept; it computes nothing, and the graph drops it.) The recorder
# sits below autograd: it never sees a rule of calculus, only the operators that the rules call.
#
# The slides put tape and recording side by side. Watch the tape grow, then be eaten from its end.

# %% name="tape"
from minicompile.lessons.pictures import slides

tape, node = [], loss.grad_fn
while node is not None:
    tape.insert(0, node.name())
    node = next((before for before, _ in node.next_functions if before), None)

frames, done, length = [], [], 1
for phase, op, running in recorder.seen:
    done.append(f"{phase:>8}  {op}")
    if phase == "forward":
        length, remark = length + (op != "aten.detach.default"), "autograd notes"
    else:
        length = tape.index(running) + 1 if running in tape else length
        remark = f"{running} runs" if running else "the engine adds two gradients"
    frames.append(
        (op, remark, "the tape:  " + " > ".join(tape[:length]) + "\n\n" + "\n".join(done))
    )
slides("recording a joint graph", *frames)

# %% [markdown]
# The first entry of the tape, `AccumulateGrad`, is where `w` itself hangs. The real recorder,
# `minicompile.aot.joint.JointTracer`, adds what toys leave out: which outputs are views of inputs, what
# is written in place, which line an operation came from. Then the graph is made functional and
# brought down to simpler operators like any other: the backward half needs no special treatment. Move
# on to `functionalization`, where four operations become eleven, and further:

# %% name="steps"
trace.steps()

# %% [markdown]
# No training, no joint graph. The compiler looks at the grad mode and at who requires grad:

# %% name="inference"
with torch.no_grad():
    inference = mc.trace(f, x, w)
print("joint graph:", inference.aot.joint, "- backward:", inference.aot.backward)
print("operations: ", inference.aot.level("full").op_count, "instead of", joint.op_count)

# %% [markdown]
# ## One rule an operator: the vjp
#
# What does autograd know of `tanh`? One rule. Given the gradient of the loss with respect to the
# operator's result, it computes the gradient with respect to its argument. All partial
# derivatives of results by arguments would be a matrix, the Jacobian; the rule is a row vector times
# that matrix, a *vector-Jacobian product*, or *vjp*. The matrix itself is never made:

# %% name="jacobian"
z = torch.randn(4, 5, dtype=torch.float64)
whole = torch.autograd.functional.jacobian(torch.tanh, z).reshape(20, 20)
g = torch.randn(4, 5, dtype=torch.float64)
short = g * (1 - torch.tanh(z) ** 2)
print("numbers in the Jacobian:", whole.numel(), "of which not zero:", int(whole.count_nonzero()))
print(
    "g @ Jacobian equals g * (1 - tanh**2):", torch.allclose(g.flatten() @ whole, short.flatten())
)

# %% [markdown]
# The chain rule is then: call the rules in reverse order, add up where a value was read twice. Find
# that addition in the joint graph: `y * y` reads `y` twice, so its two gradients meet in an `aten.add`.
#
# A rule may read the operator's arguments, its result, or neither. What it reads must still be there
# when backward comes, so it decides how much memory training takes. **Predict, then run**: what will
# the backward of `v * 2`, of `sin`, of `exp` and of `relu` read: nothing, the argument or the result?


# %% name="reads"
def backward_reads(fn, *inputs):
    """Names of the forward values that a backward operation reads."""
    graph = mc.trace(fn, *inputs).aot.level("full")
    backward = [node for node in graph.nodes if node.meta.get("phase") == "backward"]
    read = (used for node in backward for used in node.all_input_nodes)
    return sorted({used.name for used in read if used.meta["phase"] == "forward"})


examples = {
    "v * 2": lambda v: v * 2,
    "sin": lambda v: torch.sin(v),
    "exp": lambda v: torch.exp(v),
    "relu": lambda v: torch.relu(v),
}
for name, fn in examples.items():
    read = backward_reads(fn, torch.randn(3, 4, requires_grad=True))
    print(f"{name:>6}: backward reads {read or 'nothing'}")

# %% [markdown]
# `relu` is the surprise: its argument would do, but its result says just as well where the gradient
# passes, and the result is in memory anyway, since the next operator reads it. Good rules are chosen
# with an eye on memory. The next lesson drives this further.
#
# ## Your own rule
#
# `mc.register_vjp` puts a rule of yours in place of PyTorch's. It gets the gradient of the result, the
# result, and the arguments. It is plain PyTorch code; what it calls lands in the joint graph, where
# `aten.tanh_backward` was. `mc.scoped()` forgets it at the end of the block.

# %% name="own-rule"
with mc.scoped():

    @mc.register_vjp(aten.tanh.default)
    def tanh_vjp(grad, result, x):
        return grad * (1 - result * result)

    mine = mc.trace(f, x, w)

print(mine.aot.level("full"))

# %% [markdown]
# (The copy of the result is there because memory may be written to between forward and backward; in a
# functional graph it is dropped again.) The graphs side by side: at this level yours has more operations,
# but compare the rows below, operations in prims, kernels, bytes. A rule of your own costs nothing,
# since PyTorch's `aten.tanh_backward` is taken apart into the same operators on its way down.

# %% name="diff"
trace.diff(mine, "full")

# %% [markdown]
# ## Is it right? Ask the function itself
#
# A derivative is a promise about small steps. So take one: move `w` a little in some direction, there
# and back, and see how fast the result changes. That is a *finite difference*, here a two-sided one.
# The gradient promises the same number: its dot product with the direction. In float64, since
# differences of nearly equal numbers lose digits.

# %% name="differences"
a, b = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
direction = torch.randn_like(b)


def slope(fn, step=1e-5):
    """How fast `fn` changes as `b` moves in `direction`."""
    return ((fn(a, b + step * direction) - fn(a, b - step * direction)) / (2 * step)).item()


def promised(fn):
    """The same by the compiled function's gradient."""
    leaf = b.clone().requires_grad_()
    mc.compile(fn, backend="aot_eager")(a, leaf).backward()
    return (leaf.grad * direction).sum().item()


print("promise and slope agree within 1e-8:", abs(promised(f) - slope(f)) < 1e-8)

# %% [markdown]
# **Break it.** A rule with one wrong letter: it squares the argument where the result is meant. The
# compiler believes it: shapes fit, nothing crashes. Only the difference tells:

# %% name="broken"
with mc.scoped():

    @mc.register_vjp(aten.tanh.default)
    def careless(grad, result, x):
        return grad * (1 - x * x)

    wrong = promised(f)
    mc.reset()

print(f"the slope is {slope(f):.4f}")
print(f"the wrong rule promises {wrong:.4f}")
print(f"without it, promised again: {promised(f):.4f}")

# %% [markdown]
# Why didn't the compiler notice? It can't know what you mean. Some rules are meant to differ from
# the derivative: rounding has slope zero nearly everywhere, so that nothing before it would ever
# learn; a straight-through rule lets the gradient pass as if nothing had been rounded.


# %% name="straight-through"
def rounded(v):
    return (torch.round(v * 4) / 4).square().sum()


leaf = torch.linspace(-1, 1, 5).requires_grad_()
mc.compile(rounded, backend="aot_eager")(leaf).backward()
print("by calculus:     ", leaf.grad.tolist())
mc.reset()
with mc.scoped():

    @mc.register_vjp(aten.round.default)
    def straight_through(grad, result, x):
        return grad

    leaf.grad = None
    mc.compile(rounded, backend="aot_eager")(leaf).backward()
    mc.reset()
print("straight through:", leaf.grad.tolist())

# %% [markdown]
# ## On the lesson model
#
# One block of our GPT, attention and a small network. Each line of its Python has forward operations,
# and backward ones that were made of them. How does the backward know? Each node of autograd's tape
# is made while some node of the captured graph runs; the recorder notes which, and looks it up when
# that tape node runs.

# %% name="block"
from collections import Counter

from minicompile.ops.graph import unpacks, user_line

torch.manual_seed(0)
block = Block(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8))
h = torch.randn(2, 8, 16, requires_grad=True)
block_trace = mc.trace(block, h)
whole_graph = block_trace.aot.level("full")
counts = Counter(
    (user_line(node), node.meta["phase"])
    for node in whole_graph.nodes
    if node.op == "call_function" and not unpacks(node)
)
print("forward  backward")
for line in sorted({line for line, _ in counts}):
    print(f"{counts[line, 'forward']:>7}  {counts[line, 'backward']:>8}  {line.text[:70]}")

# %% [markdown]
# A rule of thumb falls out of this table. A matrix product is one product in forward and two in
# backward: one for each of its two arguments. So a training step does about three times the
# arithmetic of a forward pass. Count them:

# %% name="products"
products = Counter(
    node.meta["phase"]
    for node in whole_graph.nodes
    if node.target in (aten.mm.default, aten.addmm.default, aten.bmm.default)
)
print(dict(products))

# %% [markdown]
# The network half of the block alone is small enough to draw. Find where `tangents_0` comes in, and the
# boxes without an arrow out: the result, and the gradients of weights and biases.

# %% name="mlp"
mlp_trace = mc.trace(block.mlp, torch.randn(2, 8, 16))
mlp_trace.aot.level("full")

# %% [markdown]
# > **In torch.compile.** AOTAutograd does just this: it runs the captured function on FakeTensors
# > under a proxy mode and calls `torch.autograd.grad`. Below is its joint graph of the same `f`. Its
# > formulas are not written in Python: C++ is generated from one line an operator in the table
# > [derivatives.yaml](https://github.com/pytorch/pytorch/blob/main/tools/autograd/derivatives.yaml).
# > A custom operator gets its own by `torch.library.register_autograd`. We simplified: no tensor
# > subclasses, no first run to learn what is mutated; our rules replace those of built-in operators
# > too. Read `torch/_functorch/_aot_autograd/graph_capture.py` beside `minicompile/aot/joint.py`.

# %% name="torch-joint"
from torch._functorch.aot_autograd import aot_export_joint_simple

theirs = aot_export_joint_simple(lambda *args: (f(*args),), [x, w], trace_joint=True)
calls = [str(n.target) for n in theirs.graph.nodes if n.op == "call_function"]
ours = [str(n.target) for n in joint.nodes if n.op == "call_function"]
print("AOTAutograd:", ", ".join(calls))
print("equal to ours, without detach:", [c for c in calls if "detach" not in c] == ours)

# %% [markdown]
# ## Recap
#
# 1. A joint graph takes primals and tangents, and gives results and gradients.
# 2. It is made by running the forward on FakeTensors, asking autograd for gradients, and recording
#    every operator that both of them call.
# 3. Autograd needs one rule an operator, a vector-Jacobian product, and never builds the Jacobian.
# 4. What a rule reads of the forward must be kept or computed again, so rules decide over memory.
# 5. A wrong rule compiles without complaint; finite differences find it.

# %% [markdown]
# ## Exercises
#
# **Exercise 1 · The gradient that isn't there** (easy, 2 points). An input can want a gradient and get
# none: nothing that it does reaches the results. The joint graph leaves it out. Write
# `without_gradient(aot)`: the names of the inputs that want a gradient and get none, in order, as a
# list. `aot` is what `trace.aot` is; use `aot.captured` and `aot.metadata.differentiable_inputs`.

# %% [markdown]
# **You will need**
#
# - `aot.captured.nodes`: an input has `node.op == "placeholder"`, a `name`, and `node.meta["val"]`, a
#   tensor that says whether it wants a gradient: `requires_grad`.
# - `aot.metadata.differentiable_inputs`: the positions among the placeholders of those that get one.
#   `trace.aot.metadata.differentiable_inputs` gives `(1,)`: of `x` and `w`, the second.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Number the placeholders from zero, and keep those that want a gradient and whose number is missing.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# An input without readers is not the same thing: a detached one has readers; and a gradient of zeros is a
# gradient.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def without_gradient(aot):
    """Names of the inputs whose gradient is wanted but not there."""
    ### BEGIN SOLUTION
    there = aot.metadata.differentiable_inputs
    nodes = [node for node in aot.captured.nodes if node.op == "placeholder"]
    wanted = [(i, node) for i, node in enumerate(nodes) if node.meta["val"].requires_grad]
    return [node.name for i, node in wanted if i not in there]
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-readers" tags=["wrong"] kind="misconception" says="expected ['w'], got []"
def without_gradient(aot):
    nodes = [node for node in aot.captured.nodes if node.op == "placeholder"]
    return [node.name for node in nodes if node.meta["val"].requires_grad and not node.users]


# %% name="ex1-wrong-wanted" tags=["wrong"] kind="visible-only" says="expected ['a'], got ['n', 'a']"
def without_gradient(aot):
    nodes = [node for node in aot.captured.nodes if node.op == "placeholder"]
    there = aot.metadata.differentiable_inputs
    return [node.name for i, node in enumerate(nodes) if i not in there]


# %% name="ex1-wrong-autograd" tags=["wrong"] kind="built-in" says="a use of autograd"
def without_gradient(aot):
    nodes = [node for node in aot.captured.nodes if node.op == "placeholder"]
    inputs = [torch.ones(node.meta["val"].shape, requires_grad=True) for node in nodes]
    found = torch.autograd.grad(aot.captured.gm(*inputs)[0], inputs, allow_unused=True)
    return [node.name for node, gradient in zip(nodes, found) if gradient is None]


# %% [markdown]
# **Exercise 2 · What does backward read?** (solid, 2 points). Write three functions of one tensor, each with
# a result of the same shape through which a gradient flows. The backward of `reads_nothing` reads
# no forward value; that of `reads_input` reads the input `x` and nothing else; that of `reads_result`
# reads what the function returns and nothing else. `backward_reads` above is the judge.

# %% [markdown]
# **You will need**
#
# - `backward_reads(function, x)`: `backward_reads(lambda v: v * 2, torch.randn(3, 4, requires_grad=True))`
#   gives `[]`. The input is called by the name of its parameter.
# - The printed table above has an example of each kind.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# The derivative of a linear function is a constant.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# For the other two, think of the formula: is it easier said with the argument (`sin` has `cos`) or with the
# result (`exp` has itself)?
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def reads_nothing(x):
    """Backward reads no forward value."""
    ### BEGIN SOLUTION
    return x * 3
    ### END SOLUTION


def reads_input(x):
    """Backward reads only x."""
    ### BEGIN SOLUTION
    return torch.sin(x)
    ### END SOLUTION


def reads_result(x):
    """Backward reads only what this returns."""
    ### BEGIN SOLUTION
    return torch.exp(x)
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-relu" tags=["wrong"] kind="misconception" says="['the input'], got ['the result']"
def reads_nothing(x):
    return x + 1


def reads_input(x):
    return torch.relu(x)


def reads_result(x):
    return torch.sigmoid(x)


# %% name="ex2-wrong-shape" tags=["wrong"] kind="visible-only" says="expected [], got ["
def reads_nothing(x):
    return x * 3 if x.shape == (3, 4) else x * x


def reads_input(x):
    return torch.cos(x)


def reads_result(x):
    return torch.tanh(x)


# %% name="ex2-wrong-function" tags=["wrong"] kind="built-in" says="a use of register_vjp"
@mc.register_vjp(aten.cos.default)
def anything(grad, result, x):
    return grad * result


def reads_nothing(x):
    return x * 3


def reads_input(x):
    return torch.sin(x)


def reads_result(x):
    return torch.cos(x)


# %% [markdown]
# **Exercise 3 · A rule without calculus** (solid, 3 points). Finite differences need no formula, so they
# can be the rule, at least for operators that work element by element. Write `by_differences(op)`:
# it gives a function to register as the vjp of `op`, an operator whose first argument is the only
# tensor. Others, positional and by name, are passed on as they came. The check registers it for the
# `gelu` of the block, compiles that in float64, and compares gradients with eager to nine digits.

# %% [markdown]
# **You will need**
#
# - `op(x, *args, **kwargs)`: calls the operator. `aten.gelu.default(torch.tensor(1.0))` gives
#   `tensor(0.8413)`.
# - `grad`: the gradient of the result; what you return is that of `x`: each element's slope times its
#   `grad`.
# - A difference on both sides, as in `slope` above: `(fn(b + step) - fn(b - step)) / (2 * step)`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# How much does the result change if `x` is a little larger, and a little smaller? A step of `1e-5` is
# right.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# A vjp is no derivative, it passes a gradient on: multiply by `grad`.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def by_differences(op):
    """A vjp for `op` that only calls `op`."""

    def rule(grad, result, x, *args, **kwargs):
        ### BEGIN SOLUTION
        step = 1e-5
        rise = op(x + step, *args, **kwargs) - op(x - step, *args, **kwargs)
        return grad * rise / (2 * step)
        ### END SOLUTION

    return rule


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-onesided" tags=["wrong"] kind="misconception" says="aten.gelu.default: expected float64"
def by_differences(op):
    def rule(grad, result, x, *args, **kwargs):
        step = 1e-5
        return grad * (op(x + step, *args, **kwargs) - result) / step

    return rule


# %% name="ex3-wrong-derivative" tags=["wrong"] kind="misconception" says="expected float64"
def by_differences(op):
    def rule(grad, result, x, *args, **kwargs):
        step = 1e-5
        return (op(x + step, *args, **kwargs) - op(x - step, *args, **kwargs)) / (2 * step)

    return rule


# %% name="ex3-wrong-arguments" tags=["wrong"] kind="visible-only" says="expected float64"
def by_differences(op):
    def rule(grad, result, x, *args, **kwargs):
        step = 1e-5
        return grad * (op(x + step) - op(x - step)) / (2 * step)

    return rule


# %% name="ex3-wrong-autograd" tags=["wrong"] kind="built-in" says="a use of autograd"
def by_differences(op):
    def rule(grad, result, x, *args, **kwargs):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(op(leaf, *args, **kwargs), leaf, grad)[0]

    return rule


# %% [markdown]
# **Exercise 4 · Three rules of the block** (hard, 4 points). Write the vjps of `gelu`, `softmax` and the
# batched matrix product `bmm`, in plain PyTorch. The check registers all three, differentiates the
# lesson model's block with them, and looks whether any of PyTorch's own formulas is left.
# `gelu(x) = x * P(x)`, where `P(x) = (1 + erf(x / sqrt(2))) / 2` is the normal distribution, whose
# derivative is `exp(-x * x / 2) / sqrt(2 * pi)`. `softmax_vjp` may use `result`; `dim` is any
# dimension; `half_to_float` you may ignore.

# %% [markdown]
# **You will need**
#
# - `torch.erf(x)`, `torch.exp(x)`, `torch.pi`: for the two formulas.
# - `(grad * result).sum(dim, keepdim=True)`: a sum over one dimension, which stays with size one.
# - `a.mT`: the matrices of a batch, transposed. `torch.ones(5, 2, 3).mT.shape` gives
#   `torch.Size([5, 3, 2])`.
# - `bmm_vjp` returns a pair, the gradients of `a` and of `b`.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# `gelu`: the product rule, with `P(x)` and its derivative.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# `softmax`: each result depends on all arguments of its row. The sum of `grad * result` over `dim` is the
# coupling: `result * (grad - coupling)`.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# `bmm`: with `c = a @ b`, what shapes must the two gradients have, and which transposes give them?
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def gelu_vjp(grad, result, x):
    """The gradient of x for result = gelu(x)."""
    ### BEGIN SOLUTION
    below = (1 + torch.erf(x * 0.5**0.5)) / 2
    density = torch.exp(-x * x / 2) * (0.5 / torch.pi) ** 0.5
    return grad * (below + x * density)
    ### END SOLUTION


def softmax_vjp(grad, result, x, dim, half_to_float):
    """The gradient of x for result = softmax(x, dim)."""
    ### BEGIN SOLUTION
    coupling = (grad * result).sum(dim, keepdim=True)
    return result * (grad - coupling)
    ### END SOLUTION


def bmm_vjp(grad, result, a, b):
    """The gradients of a and b for result = bmm(a, b)."""
    ### BEGIN SOLUTION
    return grad @ b.mT, a.mT @ grad
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-elementwise" tags=["wrong"] kind="misconception" says="softmax(x, -1) of shape [2, 3]"
def gelu_vjp(grad, result, x):
    below = (1 + torch.erf(x * 0.5**0.5)) / 2
    return grad * (below + x * torch.exp(-x * x / 2) * (0.5 / torch.pi) ** 0.5)


def softmax_vjp(grad, result, x, dim, half_to_float):
    return grad * result * (1 - result)


def bmm_vjp(grad, result, a, b):
    return grad @ b.mT, a.mT @ grad


# %% name="ex4-wrong-last-dim" tags=["wrong"] kind="visible-only" says="softmax(x, 0) of shape [4, 2, 3]"
def gelu_vjp(grad, result, x):
    below = (1 + torch.erf(x * 0.5**0.5)) / 2
    return grad * (below + x * torch.exp(-x * x / 2) * (0.5 / torch.pi) ** 0.5)


def softmax_vjp(grad, result, x, dim, half_to_float):
    return result * (grad - (grad * result).sum(-1, keepdim=True))


def bmm_vjp(grad, result, a, b):
    return grad @ b.mT, a.mT @ grad


# %% name="ex4-wrong-import" tags=["wrong"] kind="built-in" says="a use of autograd"
from torch.autograd import grad as slope


def gelu_vjp(grad, result, x):
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        return slope(leaf * (1 + torch.erf(leaf * 0.5**0.5)) / 2, leaf, grad)[0]


def softmax_vjp(grad, result, x, dim, half_to_float):
    return result * (grad - (grad * result).sum(dim, keepdim=True))


def bmm_vjp(grad, result, a, b):
    return grad @ b.mT, a.mT @ grad


# %% name="ex4-wrong-torch" tags=["wrong"] kind="built-in" says="a use of _softmax_backward_data"
def gelu_vjp(grad, result, x):
    below = (1 + torch.erf(x * 0.5**0.5)) / 2
    return grad * (below + x * torch.exp(-x * x / 2) * (0.5 / torch.pi) ** 0.5)


def softmax_vjp(grad, result, x, dim, half_to_float):
    return aten._softmax_backward_data(grad, result, dim, x.dtype)


def bmm_vjp(grad, result, a, b):
    return grad @ b.mT, a.mT @ grad


# %% [markdown]
# **Exercise 5 · Layer norm, all of it** (hard, 3 points, optional). The last rule of the block:
# `native_layer_norm` has three results (the normed tensor, the mean, and the reciprocal standard
# deviation of each row) and three gradients (of `x`, `weight`, `bias`; None for a weight or bias that
# is None). `grads` and `results` are tuples; only `grads[0]` matters here. It norms over the last
# `len(shape)` dimensions, of which there may be several.

# %% [markdown]
# **You will need**
#
# - `_, mean, rstd = results`: of each row, with the normed dimensions kept at size one. So
#   `n = (x - mean) * rstd` is the normed tensor.
# - `tuple(range(x.dim() - len(shape), x.dim()))`: the normed dimensions; those before are the others.
# - `g.mean(dims, keepdim=True)`, `g.sum(dims)`: over several dimensions.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# The gradients of weight and bias are sums over all other dimensions: of `grad * n`, and of `grad`.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# With `g = grad * weight`: moving one `x` also moves mean and deviation of its row, so the mean of `g` and
# the mean of `g * n` count.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# The gradient of x is `rstd * (g - mean(g) - n * mean(g * n))`, means over the normed dimensions.
#
# </details>


# %% name="ex5-answer" tags=["answer"]
def layer_norm_vjp(grads, results, x, shape, weight, bias, eps):
    """The gradients of x, weight and bias."""
    ### BEGIN SOLUTION
    grad, (_, mean, rstd) = grads[0], results
    normed = tuple(range(x.dim() - len(shape), x.dim()))
    others = tuple(range(x.dim() - len(shape)))
    n = (x - mean) * rstd
    g = grad if weight is None else grad * weight
    of_x = rstd * (g - g.mean(normed, keepdim=True) - n * (g * n).mean(normed, keepdim=True))
    of_weight = None if weight is None else (grad * n).sum(others)
    return of_x, of_weight, None if bias is None else grad.sum(others)
    ### END SOLUTION


# %% name="ex5-check" tags=["nbval-check-output"]
check("ex5")


# %% name="ex5-wrong-constant-mean" tags=["wrong"] kind="misconception" says="expected float64"
def layer_norm_vjp(grads, results, x, shape, weight, bias, eps):
    grad, (_, mean, rstd) = grads[0], results
    others = tuple(range(x.dim() - len(shape)))
    return grad * weight * rstd, (grad * (x - mean) * rstd).sum(others), grad.sum(others)


# %% name="ex5-wrong-one-dim" tags=["wrong"] kind="visible-only" says="layer_norm over [3, 4]"
def layer_norm_vjp(grads, results, x, shape, weight, bias, eps):
    grad, (_, mean, rstd) = grads[0], results
    n = (x - mean) * rstd
    g = grad if weight is None else grad * weight
    of_x = rstd * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))
    if weight is None:
        return of_x, None, None
    others = tuple(range(x.dim() - len(shape)))
    return of_x, (grad * n).sum(others), None if bias is None else grad.sum(others)


# %% name="ex5-wrong-torch" tags=["wrong"] kind="built-in" says="a use of native_layer_norm_backward"
def layer_norm_vjp(grads, results, x, shape, weight, bias, eps):
    _, mean, rstd = results
    wanted = [True, weight is not None, bias is not None]
    return aten.native_layer_norm_backward(grads[0], x, shape, mean, rstd, weight, bias, wanted)


# %% [markdown]
# ## Go deeper
#
# - `minicompile/aot/joint.py`: `record` is the whole story, `JointTracer` the recorder that follows lines.
# - `minicompile/custom/vjps.py`: how a rule takes the place of a formula, below autograd's own dispatch.
# - `minicompile/aot/autograd.py`: the room's table of contents, one function.
# - `torch/_functorch/_aot_autograd/graph_capture.py`, `torch/_functorch/aot_autograd.py`: PyTorch's.
# - `torch/autograd/gradcheck.py`: finite differences, with all care that we left out.
#
# **Where you are.** The model now has a joint graph. The next lesson cuts it in two.

# %% name="corridor"
from minicompile.lessons.pictures import corridor

corridor("aot")
