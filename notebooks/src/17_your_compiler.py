# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 17 · How do you make the compiler yours?
#
# Every room that you have seen is a loop over a table of rules, and every table has a decorator that
# adds to it. In this lesson the compiler learns an operator that nobody told it about, then a language
# that it can't write. After this lesson you can
#
# - teach it an operator from end to end: gradient, decomposition, lowering, fused kernel;
# - give it a back end of your own, and train the GPT with it;
# - read what each optimization costs and buys, leave it out, and bring one of your own in a folder.

# %% name="setup" tags=["setup"]
try:
    import minicompile as mc
except ModuleNotFoundError:  # opened elsewhere, as on Colab
    get_ipython().run_line_magic(
        "pip", 'install -q "minicompile[notebook] @ git+https://github.com/your_name/minicompile"'
    )
    import minicompile as mc

import importlib.util

import torch

from minicompile.extension import code_generator, decompose, kernel_loader, lowering
from minicompile.lessons.exercise import checks
from minicompile.lowering.rules.common import elementwise

check = checks("17")
if importlib.util.find_spec("triton") is None:  # its kernels are printed all the same, not run
    kernel_loader("triton")(
        lambda module, options: lambda: dict.fromkeys(k.name for k in module.kernels)
    )

# %% [markdown]
# The example: a matrix product, an activation, a little arithmetic. The activation is called snake,
# x + sin²(x), made for periodic signals. PyTorch has no such operator, so we make one. A fake says
# what shape comes out, so that a compiler can ask without data.

# %% name="operator" tags=["setup"]
if not hasattr(torch.ops.lesson17, "snake"):  # this cell may be run again, an operator is made once

    @torch.library.custom_op("lesson17::snake", mutates_args=())
    def snake(x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(x) ** 2

    @snake.register_fake
    def snake_shape(x):
        return torch.empty_like(x)


snake_op = torch.ops.lesson17.snake.default


def f(x, w):
    return torch.ops.lesson17.snake(x @ w + 1) * 2


# %% [markdown]
# Here is the answer to the question, as slides. Each adds one rule to a room; look at what the room
# after it makes of the operator. First it is a call that the compiler can't see into, at the end it is
# one line in the middle of a kernel. We take the steps one by one below.

# %% name="picture"
from minicompile.lessons.pictures import slides

torch.manual_seed(0)
x, w = torch.randn(8, 16), torch.randn(16, 32)
unknown = mc.trace(f, x, w)

with mc.scoped():

    @decompose(snake_op, to="core")
    def snake_in_parts(x):
        return x + torch.sin(x) ** 2

    in_parts = mc.trace(f, x, w)

with mc.scoped():

    @lowering(snake_op)
    def snake_as_loop(ctx, x):
        def formula(ops, v):
            wave = ops.sin(v)
            return ops.add(v, ops.mul(wave, wave))

        return elementwise(ctx, formula, x)

    as_loop = mc.trace(f, x, w)

slides(
    "One operator, rule by rule",
    ("no rule: a call", "between two kernels", unknown.loops),
    ("a decomposition", "other operators take its place in the graph", in_parts.aot.forward),
    ("a lowering", "the operator stays, and is a formula", as_loop.aot.forward),
    ("either way", "one loop", as_loop.loops),
    ("the kernel", "the sine stands between its neighbours", as_loop.kernels[0]),
)

# %% [markdown]
# ## Without any rule
#
# An operator without a rule still runs: the compiler calls PyTorch's function, an extern call, and
# notes why. What it costs is not the call. It is the memory around it: what stands before must be
# written out for it, what stands behind must be read back in.
#
# **Predict, then run.** How many kernels, and how many calls of a library?

# %% name="launches"


def summary(trace):
    plans = trace.plans
    kernels = len(trace.kernels)
    calls = [str(extern.op) for extern in trace.loops.externs]
    return (
        f"{kernels} kernel(s), {sum(p.cost.bytes for p in plans)} bytes in them, calls of {calls}"
    )


print("no rule:      ", summary(unknown))
print("decomposition:", summary(in_parts))
print("lowering:     ", summary(as_loop))
print("why a call:   ", unknown.loops.externs[-1].reason)

# %% [markdown]
# The decomposition and the lowering end in the same kernel here. They differ in who profits. A
# *decomposition* is written in PyTorch and runs early: graph passes see its parts, and so do other
# back ends. A *lowering* is written in loop operations and runs late: passes still see the whole
# operator, and the formula says exactly what a kernel computes. Inductor prefers decompositions.

# %% name="what-a-decomposition-changes"
unknown.diff(in_parts, "aot.forward")

# %% [markdown]
# ## A gradient
#
# Ask PyTorch for the gradient of our operator: it has none. The compiler can be given one, a *vjp*
# (vector-Jacobian product): from the gradient of the result to that of the argument. The derivative
# of x + sin²(x) is 1 + 2 sin(x) cos(x), which is 1 + sin(2x).

# %% name="no-gradient"
h = torch.randn(4, 8, requires_grad=True)
try:
    torch.ops.lesson17.snake(h).sum().backward()
except RuntimeError as error:
    print("eager:", str(error).partition(". ")[0])


def snake_vjp(grad, result, x):
    return grad * (1 + torch.sin(2 * x))


def gradient_of(rule, x):
    with mc.scoped():
        mc.register_vjp(snake_op)(rule)
        mc.compile(torch.ops.lesson17.snake)(x).sum().backward()
    found, x.grad = x.grad, None
    return found


expected = torch.autograd.grad((h + torch.sin(h) ** 2).sum(), h)[0]
print(
    "compiled, with a vjp: equal to the formula's",
    torch.allclose(gradient_of(snake_vjp, h), expected),
)

# %% [markdown]
# **Break it.** Everybody forgets the inner derivative once. The forward pass stays right, the loss
# still falls, more slowly. What tells is a number that no rule of ours has touched: the difference of
# two forward passes. Predict which of the columns notices, then run.

# %% name="break-gradient"


def careless_vjp(grad, result, x):
    return grad * (1 + 2 * torch.sin(x))  # the inner derivative cos(x) is missing


point = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
step = 1e-4
with torch.no_grad():
    slope = (snake_op(point + step) - snake_op(point - step)) / (2 * step)
for name, rule in (("right", snake_vjp), ("careless", careless_vjp)):
    found = gradient_of(rule, point)
    print(
        f"{name:>9}: value {snake_op(point).item():.4f}, gradient {found.item():+.4f},",
        f"measured {slope.item():+.4f}",
    )

# %% [markdown]
# `mc.scoped()` has forgotten the careless rule again. Now all three rules at once, in the model: a
# block whose network has `snake` in place of `gelu`. The rules apply to both graphs, since the
# gradient's `sin` is an ordinary operator that the compiler knows. Predict: one call less in which
# graph, and how many kernels more?

# %% name="rules"
from torch import nn

from minicompile.lessons.model import GPT, GPTConfig
from minicompile.lessons.train import train


class Periodic(nn.Module):
    """The network of a block, with another activation."""

    def __init__(self, mlp, activation):
        super().__init__()
        self.widen, self.project, self.activation = mlp.widen, mlp.project, activation

    def forward(self, x):
        return self.project(self.activation(self.widen(x)))


def periodic(model, activation=torch.ops.lesson17.snake):
    for block in model.blocks:
        block.mlp = Periodic(block.mlp, activation)
    return model


def teach_snake():
    mc.register_vjp(snake_op)(snake_vjp)
    lowering(snake_op)(snake_as_loop)


tiny = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)
wave_block = periodic(GPT(tiny)).blocks[0]
tokens = torch.randn(2, 16, 32, requires_grad=True)
with mc.scoped():
    mc.register_vjp(snake_op)(snake_vjp)  # the least that training needs
    before = mc.trace(wave_block, tokens)
    teach_snake()
    after = mc.trace(wave_block, tokens)
for name, stages in (("a vjp only", before), ("and a lowering", after)):
    for part, graph in stages.graphs.items():
        calls, kernels = len(graph.loops.externs), len(graph.kernels)
        print(f"{name:>14}: {part:>8} {calls:2} calls, {kernels} kernels")

# %% [markdown]
# One call less and no kernel more: the bias that stood before the call takes snake along.
#
# Your rule, lit in the corridor: everything that came from one operator, room by room. In the
# explorer you get the same by pointing at the line of Python.

# %% name="your-rule"
inside = [
    (piece.stage, piece)
    for piece in after.pieces()
    if any("snake" in origin.target for origin in piece.origins)
]
for stage in dict.fromkeys(stage for stage, _ in inside):
    print(f"{stage:<20} {sum(s == stage for s, _ in inside)} piece(s)")

# %% name="explore"
as_loop.explore(panes=("source", "aot", "loops", "kernels"))

# %% [markdown]
# > **In torch.compile.** The same three doors. `torch.library.custom_op` and its `register_autograd`
# > are PyTorch's own; `torch/_inductor/decomposition.py` and `torch/_inductor/lowering.py` hold the
# > tables. Dynamo captures the operator as one node, as here; without a rule Inductor calls it (a
# > `FallbackKernel` in `torch/_inductor/ir.py`). Simplified here: no kinds of fallback, no layouts
# > that an extern operator may demand.

# %% name="torch-compile"
from torch._inductor.decomposition import decompositions
from torch._inductor.lowering import lowerings


def show_graph(gm, example_inputs):
    print("captured:", [str(node.target) for node in gm.graph.nodes if node.op == "call_function"])
    return gm


torch.compile(f, backend=show_graph)(x, w)
aten = torch.ops.aten
print("sin has a lowering:", aten.sin.default in lowerings)
print("mish has a decomposition:", aten.mish.default in decompositions)
print("snake has either:", snake_op in lowerings or snake_op in decompositions)

# %% [markdown]
# ## A language
#
# The rooms up to the *kernel plan* know no language: a plan holds typed values in order, each a load, a
# store, arithmetic or a reduction over an index formula. A *code generator* prints it, a *kernel
# loader* makes it callable. So a new back end is a printer. Ours writes NumPy, and needs no loops at
# all: each loop variable is an array of all its values at once, and NumPy broadcasts.

# %% name="plan"
print(as_loop.plans[0].body)

# %% [markdown]
# First the words: loop operation to text. The package has such a table for C and one for Triton; they
# share what both languages write alike (`INFIX`). Index formulas have a printer of their own, which
# only needs to hear how NumPy divides.

# %% name="words"
from minicompile.codegen.printing import INFIX, IndexPrinter, LinePrinter, form

WORDS = {
    **INFIX,
    **{n: form(f"np.{n}({{0}})") for n in ("exp", "log", "log1p", "expm1", "sqrt", "sin", "cos")},
    **{n: form(f"np.{n}({{0}})") for n in ("tanh", "floor", "ceil", "trunc", "abs", "sign")},
    **{n: form(f"np.{n}({{0}})") for n in ("isnan", "reciprocal")},
    **{n: form(f"np.{n}({{0}}, {{1}})") for n in ("maximum", "minimum")},
    "neg": form("-{0}"),
    "truediv": form("{0} / {1}"),
    "pow": form("{0} ** {1}"),
    "fma": form("{0} * {1} + {2}"),
    "rsqrt": form("1 / np.sqrt({0})"),
    "sigmoid": form("1 / (1 + np.exp(-{0}))"),
    "erf": form("erf({0})"),
    "where": form("np.where({0}, {1}, {2})"),
    "logical_not": form("~{0}"),
    "bitwise_not": form("~{0}"),
}
REDUCTIONS = ("sum", "prod", "max", "min", "any", "all")


class NumpyIndex(IndexPrinter):
    language, divide = "NumPy", "//"
    floor_divide, floor_modulo = "np.floor_divide", "np.remainder"
    maximum, minimum = "np.maximum({0}, {1})", "np.minimum({0}, {1})"


# %% [markdown]
# Then the lines, one for each value. A constant carries its type, or NumPy would
# compute in doubles. A reduction first stretches its operand over all loops (`every`), then reduces
# the axes of the reduction. What we have no word for is refused: a refusal falls back, a guess is a
# wrong answer.

# %% name="printer"
from minicompile.errors import Unsupported


def typed(dtype):
    return "np." + str(dtype).removeprefix("torch.").replace("bool", "bool_")


class NumpyPrinter(LinePrinter):
    def __init__(self, plan):
        super().__init__(plan)
        self.index = NumpyIndex({})
        self.names.update({v: str(v.symbol) for v in self.names if v.symbol is not None})

    def ref(self, value):
        """How an operand is written."""
        if value.op != "constant":
            return self.names[value]
        text = str(value.constant)
        text = repr(text) if text in ("inf", "-inf", "nan") else text
        return f"{typed(value.dtype)}({text})"

    def expression(self, value):
        """One value as NumPy text."""
        operands = [self.ref(v) for v in value.inputs]
        mask = "" if value.mask is None else f", {self.ref(value.mask)}"
        match value.op:
            case "load":
                return f"load({self.arguments[value.buffer].name}, {self.index(value.index)}{mask})"
            case "index_expr":
                return f"np.asarray({self.index(value.index)}, {typed(value.dtype)})"
            case "to_dtype":
                return f"{operands[0]}.astype({typed(value.dtype)})"
            case "indirect":
                size, wrap = self.index(value.size), value.wrap_negative
                return f"inside({operands[0]}, {size}, {wrap}, {value.check}{mask})"
            case "reduction" if value.kind in REDUCTIONS:
                return f"np.{value.kind}(every({operands[0]}), axis=R, keepdims=True)"
            case operation if operation in WORDS:
                return WORDS[operation](value.inputs[-1].dtype, *operands)
        raise Unsupported(f"no way to write ops.{value.op} in NumPy")

    def store(self, value):
        target, what = self.arguments[value.buffer].name, self.ref(value.inputs[0])
        where = self.index(value.index)
        if value.kind == "atomic_add":
            return f"np.add.at({target}, every({where}), every({what}))"
        return f"store({target}, {where}, {what})"


# %% [markdown]
# Last the kernel: a head, one array for each loop variable along an axis of its own, then the values
# in order. `line` takes the origins along, so that even these lines know the Python that they came
# from. `source` packs them into the object that all views understand.

# %% name="kernel"
from minicompile.codegen.plan import KernelModule


def numpy_kernel(plan):
    printer = NumpyPrinter(plan)
    loops = list(plan.body.all_ranges.items())
    parameters = [a.name for a in plan.arguments] + [str(size) for size in plan.sizes]
    with printer.block(f"def {plan.name}({', '.join(parameters)}):"):
        printer.line(f"shape = ({''.join(printer.index(size) + ', ' for _, size in loops)})")
        printer.line(f"R = {tuple(range(len(plan.ranges), len(loops)))}")
        printer.line("every = lambda value: np.broadcast_to(value, shape)")
        for axis, (variable, size) in enumerate(loops):
            along = ", ".join("-1" if a == axis else "1" for a in range(len(loops)))
            printer.line(f"{variable} = np.arange({printer.index(size)}).reshape({along})")
        for value in plan.body.values:
            if value.op == "store":
                printer.line(printer.store(value), value.origins)
            elif value.op != "constant":
                printer.line(f"{printer.names[value]} = {printer.expression(value)}", value.origins)
    return printer.source("numpy", lambda text: "")


def numpy_module(plans):
    kernels = [numpy_kernel(plan) for plan in plans]
    return KernelModule("numpy", "\n".join(kernel.text for kernel in kernels), kernels)


# %% [markdown]
# The loader executes the text and hands each kernel the memory of its tensors. The helpers are what
# the text calls by name. (NumPy has no `erf`; we borrow one.) Two decorators, and the language exists.

# %% name="loader"
import numpy as np


def load(memory, at, mask=None):
    if mask is None:
        return memory[at]
    return np.where(mask, memory[np.where(mask, at, 0)], memory.dtype.type(0))


def store(memory, at, value):
    at, value = np.broadcast_arrays(at, value)
    memory[at] = value


def inside(at, size, wrap, check, mask=True):
    at = np.where(at < 0, at + size, at) if wrap else at
    bad = (at < 0) | (at >= size)
    if check and np.any(bad & mask):
        raise IndexError(f"index out of range for size {size}")
    return np.where(bad, 0, at)


def erf(value):
    return torch.erf(torch.as_tensor(value)).numpy()


def memory_of(tensor):
    tensor = tensor.detach()
    tensor = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
    count = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return tensor.as_strided((count,), (1,)).numpy()


def load_numpy(module, options):
    scope = {f.__name__: f for f in (load, store, inside, erf)} | {"np": np}
    exec(module.text, scope)

    def bind(name):
        def kernel(*given):
            arrays = [memory_of(a) if isinstance(a, torch.Tensor) else a for a in given]
            with np.errstate(all="ignore"):
                scope[name](*arrays)

        return kernel

    return lambda: {kernel.name: bind(kernel.name) for kernel in module.kernels}


code_generator("numpy")(numpy_module)
kernel_loader("numpy")(load_numpy)
print("languages:", ", ".join(code_generator))

# %% [markdown]
# **Predict, then run.** The same plan in two languages: where the C++ kernel has loops, what has NumPy?

# %% name="two-languages"


def softmax_of_relu(x, w):
    return torch.softmax(torch.relu(x @ w), dim=-1)


in_numpy = mc.compile(softmax_of_relu, options={"device_codegen": "numpy"})
print("equal to eager:", torch.allclose(in_numpy(x, w), softmax_of_relu(x, w), atol=1e-6))
numpy_trace = mc.trace(in_numpy, x, w)
slides(
    "One plan, two languages",
    ("C++", "for each row: three loops, vectors", mc.trace(softmax_of_relu, x, w).kernels[0]),
    ("NumPy", "a dozen arrays, no loop", numpy_trace.kernels[0]),
)

# %% [markdown]
# **Break it.** `every` looks like pedantry: NumPy broadcasts by itself. Take it away and most programs
# stay right. Which of these two sums doesn't: that of a row in which the first number is repeated, or
# that of any row? Predict, then run.

# %% name="break-numpy"
from unittest import mock


def hasty(self, value):
    return right(self, value).replace("every", "")


def row_sums(x):
    return x[:, :1].expand_as(x).sum(-1), x.sum(-1)


right = NumpyPrinter.expression
rows = torch.arange(15.0).reshape(3, 5)
with mock.patch.object(NumpyPrinter, "expression", hasty):
    broken = mc.compile(row_sums, options={"device_codegen": "numpy"})(rows)
whole = mc.compile(row_sums, options={"device_codegen": "numpy"})(rows)
for name, (repeated, plain) in (
    ("without every", broken),
    ("with every", whole),
    ("eager", row_sums(rows)),
):
    print(f"{name:>13}: {repeated.tolist()} and {plain.tolist()}")

# %% [markdown]
# The repeated number doesn't depend on the column, so NumPy keeps it once for each row, and the sum of
# one number is that number. A compiler's bugs are like this: right on what everybody tries first.
# Now the model. It trains in a language that the compiler had never heard of a page ago.

# %% name="train"
from functools import partial

learner = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16)


def losses(activation, compile_fn, steps=8):
    torch.manual_seed(0)
    return train(periodic(GPT(learner), activation), steps, compile_fn).losses


with mc.scoped():
    teach_snake()
    in_numpy = partial(mc.compile, options={"device_codegen": "numpy"})
    ours = losses(torch.ops.lesson17.snake, in_numpy)
eager = losses(lambda x: x + torch.sin(x) ** 2, lambda model: model)

largest = max(abs(a - b) for a, b in zip(ours, eager, strict=True))
print("losses equal eager's within 1e-4:", largest < 1e-4)
print("the loss falls:", ours[-1] < ours[0])

# %% [markdown]
# > **In torch.compile.** A device registers its scheduling class and wrapper with
# > `register_backend_for_device` in `torch/_inductor/codegen/common.py`; the scheduling class makes
# > kernels (`torch/_inductor/codegen/simd.py` and `torch/_inductor/codegen/cpp.py`), an `OpOverrides`
# > is the table of words. There a printer runs while the loop body is traced; here the body is made
# > first and printed after. Easier to read, and a printer can look ahead.

# %% name="torch-backends"
from torch._inductor.codegen import common
from torch._inductor.codegen.triton import TritonOverrides

print("their table of words is a class:", TritonOverrides.__mro__[1].__name__)
print("their word for sin:", TritonOverrides.sin("x"))
print("the door:", common.register_backend_for_device.__name__)

# %% [markdown]
# ## A form that the compiler knows
#
# Some kernels no rule for single operators finds. Attention gives each query a row of scores, one for
# each key, and a softmax needs the whole row. A *template*, a kernel's text with holes, does it with
# tiles of scores that never reach memory. Here a *plug-in* brings it, a part that the compiler can do
# without: its pass over the captured graph recognises the written-out form, product, softmax, product; its
# template (`template_plan`, `kernel_template`) prints the kernel. What happens to scores in between is yours.
# **Predict, then run:** a cap, a penalty for distance and a mask; how many kernels and calls, without the
# plug-in and with it?

# %% name="attention"
TEMPLATE = {"plugins": ["flash_attention"], "device_codegen": "triton"}


def change(s, i, j):
    """Scores of queries i and keys j: capped, lower for what is far, none beyond 24 back."""
    s = 20 * torch.tanh(s / 20) - (i - j) / 8
    return s.masked_fill((j > i) | (i - j >= 24), -torch.inf)


def attention(q, k, v):
    s = q @ k.transpose(-2, -1) / 4
    i, j = (torch.arange(n) for n in s.shape[-2:])
    return torch.softmax(change(s, i[:, None], j), -1) @ v


q, k, v = (torch.randn(1, 2, 128, 16) for _ in "qkv")
written = mc.trace(attention, q, k, v)
known = mc.trace(mc.compile(attention, options=TEMPLATE), q, k, v)
print("written out:", summary(written))
print("recognised: ", len(known.kernels), "kernel, and the scores in it:\n")
print(known.loops.externs[0].args[-1])

# %% [markdown]
# The whole form became one operator, and `score` is its argument: what stood between product and
# softmax, as text. The compiler traces it, makes a loop body of it, fused like any other, and prints
# that into the template's first hole. The mask is gone: it follows from places alone, so the template asks
# for it where a tile is at its edge; tiles of which every score counts are never asked.

# %% name="score"
parts = [part.strip() for part in known.kernels[0].text.split("@triton.jit")]
slides(
    "a template of attention",
    ("the hole", "arithmetic alone, done to every score", parts[1]),
    ("the template's loop", "products, a mask at edges, a softmax that corrects itself", parts[2]),
    ("a program", "its queries, and the ranges of keys that it goes over", parts[3]),
)

# %% [markdown]
# The loop is an *online softmax* (lesson 14): where a larger score comes, what was summed is scaled down.
# Here the same in PyTorch, for one head. It also notes which tiles of scores count.

# %% name="online"


def by_tiles(q, k, v, score, side=16):
    """Attention of one head, a tile of scores at a time; and a picture of the tiles."""
    out, picture = torch.empty_like(q), []
    for first in range(0, len(q), side):
        i = torch.arange(first, first + side)[:, None]
        sums, total = torch.zeros(side, q.shape[1]), torch.zeros(side)
        most, row = torch.full((side,), -torch.inf), ""
        for start in range(0, len(k), side):
            j = torch.arange(start, start + side)
            s = score(q[i[:, 0]] @ k[j].T / 4, i, j)
            counts = s > -torch.inf
            row += " #" if counts.all() else " /" if counts.any() else " ."
            if not counts.any():
                continue
            new = torch.maximum(most, s.amax(1))
            base = torch.where(new == -torch.inf, 0.0, new)  # nothing counted so far
            weights, shrink = torch.exp(s - base[:, None]), torch.exp(most - base)
            sums = sums * shrink[:, None] + weights @ v[j]
            total, most = total * shrink + weights.sum(1), new
        out[i[:, 0]] = sums / total[:, None]
        picture.append(row)
    return out, "\n".join(picture)


by_hand, picture = by_tiles(q[0, 0], k[0, 0], v[0, 0], change)
eager = attention(q, k, v)
print("by tiles as eager:", torch.allclose(by_hand, eager[0, 0], atol=1e-5))
if importlib.util.find_spec("triton"):
    compiled = mc.compile(attention, options=TEMPLATE)(q, k, v)
    print("kernel, interpreted, as eager:", torch.allclose(compiled, eager, atol=1e-5))

# %% [markdown]
# Most tiles were left out. **Predict, then run:** down the rows go queries, across go keys. Where are
# the tiles that count, and which of them need no mask? (`#`: every score counts, `/`: some, `.`: none.)

# %% name="band"


def tiles_of(rule):
    return by_tiles(q[0, 0], k[0, 0], v[0, 0], rule)[1]


def causal(s, i, j):
    return s.masked_fill(j > i, -torch.inf)


slides(
    "tiles of scores",
    ("everything", "64 tiles", tiles_of(lambda s, i, j: s)),
    ("no key after its query", "causal: about half of them", tiles_of(causal)),
    ("24 keys at most", "a band", picture),
)

# %% [markdown]
# The kernel knows that before it runs. The compiler tried the formula on every distance `i - j`: a score
# that is surely `-inf` is outside of a *band*, the places where `low <= i - j <= high`. Each program computes
# from it where its keys begin and end, and from `left` to `right` masks nothing:

# %% name="ranges"
ENDS = "    begin =", "    left =", "    right =", "    end ="
print(known.plans[0].scores.band)
print(*(line for line in parts[3].splitlines() if line.startswith(ENDS)), sep="\n")

# %% [markdown]
# > **In torch.compile.** `torch.nn.attention.flex_attention` takes `score_mod` and a `block_mask` as
# > arguments; Inductor fills templates with them (`torch/_inductor/kernel/flex/flex_attention.py`). Its
# > block mask is found by evaluating the mask at all places, so it may have any shape. The written-out form
# > is only recognised where the library has the very same (`torch/_inductor/fx_passes/fuse_attention.py`).

# %% name="torch-attention"
from torch.nn.attention.flex_attention import create_block_mask

mask = create_block_mask(lambda b, h, i, j: (j <= i) & (i - j < 24), 1, 1, 128, 128, "cpu", 16)
print("their tiles that count:", int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()))
print("ours, counted above:   ", picture.count("#") + picture.count("/"))

# %% [markdown]
# ## What an optimization costs
#
# Attention is one plug-in of many. What makes programs faster, or covers a rare family of them, lies in
# `minicompile/plugins/`, one folder each, and every folder can be deleted: the answers stay right. So each
# has a price, in tokens of Python that somebody has to read, and should buy something for it. The list below
# is what `minicompile plugins` prints: times and peak memory with the plug-in off, then on;
# `minicompile plugins --measure` measures them on your machine.

# %% name="prices" tags=["varies"]
from IPython.display import Markdown

from minicompile.bench.prices import markdown
from minicompile.ops.plugins import available

_, _, rows = markdown(available().values()).partition("\n\n|")
Markdown("|" + rows)

# %% [markdown]
# `options={"plugins": ...}` says which ones a compilation may use: "default", "all", "none", or names. For a
# whole script the variable `MINICOMPILE_PLUGINS` does.
#
# **Predict, then run.** A little network of images, first with all defaults, then without the pooling
# rules, then without anything. Which numbers change: results, kernels, calls of the library?

# %% name="left-out"
from minicompile.options import Options


def pooled(x, w):
    y = torch.relu(torch.nn.functional.conv2d(x, w))
    return torch.nn.functional.max_pool2d(y, 3, stride=2).exp().sum((0, 2, 3))


images, weight = torch.randn(4, 3, 16, 16), torch.randn(8, 3, 3, 3)
usual = Options().plugins
choices = {
    "default": usual,
    "without image_windows": [name for name in usual if name != "image_windows"],
    "none": [],
}
for name, chosen in choices.items():
    compiled = mc.compile(pooled, options={"plugins": chosen})
    close = torch.allclose(compiled(images, weight), pooled(images, weight), rtol=1e-4)
    trace = mc.trace(compiled, images, weight)
    calls = [str(extern.op).removeprefix("aten.") for extern in trace.loops.externs]
    print(f"{name}: as eager {close}, {len(trace.kernels)} kernels, calls of {calls}")

# %% [markdown]
# Without its rule pooling became a call, and whatever could have shared a loop with it is written out and
# read again. Nothing else happened: a rule that is missing is no error, it is an extern call, a graph break
# or a slower kernel. Where do the numbers of the price list come from? From exactly this, timed.
#
# ## A plug-in of your own
#
# A plug-in is a folder with a `PLUGIN` in its `__init__.py`, and modules that register rules by the
# decorators of this lesson. Here is snake's lowering as one. `add_plugin` makes it known to this process; an
# installed package is found by itself, by an *entry point* of the group `minicompile.plugins`.

# %% name="own-plugin"
import importlib
import sys
import tempfile
from pathlib import Path

from minicompile.extension import add_plugin

FILES = {
    "__init__.py": """
from minicompile.extension import Plugin

PLUGIN = Plugin(
    "snake_loops",
    "Computes snake inside of kernels.",
    ("snake_loops.rules",),
    default=False,
)
""",
    "rules.py": """
import torch
from minicompile.extension import lowering
from minicompile.lowering.rules.common import elementwise

@lowering(torch.ops.lesson17.snake.default)
def snake(ctx, x):
    def formula(ops, v):
        wave = ops.sin(v)
        return ops.add(v, ops.mul(wave, wave))

    return elementwise(ctx, formula, x)
""",
}
home = Path(tempfile.mkdtemp())
(home / "snake_loops").mkdir()
for name, text in FILES.items():
    (home / "snake_loops" / name).write_text(text)
sys.path.insert(0, str(home))
add_plugin(importlib.import_module("snake_loops").PLUGIN)

for chosen in ("default", "default,snake_loops"):
    compiled = mc.compile(f, options={"plugins": chosen})
    print(f"{chosen:>20}:", summary(mc.trace(compiled, x, w)))
    print(" " * 21, "as eager", torch.allclose(compiled(x, w), f(x, w), atol=1e-5))

# %% [markdown]
# **Break it.** Ask for a plug-in that nobody has. A name that is misspelt must not silently cost you an
# optimization, so it is refused, with the names that there are.

# %% name="no-such-plugin"
try:
    mc.compile(f, options={"plugins": "default,snake_lops"})
except mc.MinicompileError as error:
    print(str(error).partition(";")[0])

# %% [markdown]
# > **In torch.compile.** Most optimizations are switches of `torch/_inductor/config.py`, several hundred of
# > them; the code behind a switch stands in the middle of the compiler, so that it can't be deleted. From
# > outside you can add passes (`post_grad_custom_pre_pass` and its kin), backends and lowerings. What a
# > switch buys is not recorded beside it.

# %% name="torch-switches"
from torch._inductor import config

switches = [name for name in dir(config) if isinstance(getattr(config, name), bool)]
print("more than 100 switches:", len(switches) > 100)
print("a door for passes:", config.post_grad_custom_pre_pass)

# %% [markdown]
# ## Recap
#
# 1. An operator without a rule is called as it is; it splits the kernels around it and costs memory traffic.
# 2. A vjp gives it a gradient, a decomposition other operators in its place, a lowering a loop: measure each
#    against something that it doesn't touch.
# 3. Everything before the kernel plan knows no language; a back end is a code generator and a loader, and
#    refuses what it has no word for.
# 4. A template is a kernel with holes: a known form around it, and your formula, fused, inside.
# 5. An optimization is a plug-in, a folder that registers rules: its price is known, and without it the
#    answers stay right.
#
# ## Exercises
#
# **Exercise 1 · Where did it go?** (easy, 2 points). Write `kernels_of(trace, operator)`: the names of all
# kernels that hold code from an operator, forward ones first, then backward ones, in order. Each line
# of a kernel has `origins`; the `target` of an origin is a dotted name such as
# `torch._C._nn.gelu`, and `operator` one of its parts. Lines with `scaffold` set compute nothing.

# %% [markdown]
# **You will need**
#
# - `trace.graphs`: `list(as_loop.graphs)` gives `['forward']`; a function that trains has "backward", too.
#   Each graph has `kernels`.
# - `kernel.name`, `kernel.lines`; `line.scaffold`, `line.origins`; `origin.target`, a dotted name:
#   `"gelu" in "torch._C._nn.gelu".split(".")` gives `True`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Four levels: graphs, kernels, lines, origins. A kernel counts once, however many of its lines do.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# `any(...)` over the lines without `scaffold`, and over the origins of each.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def kernels_of(trace, operator):
    """Names of the kernels, forward then backward, with a line that `operator` made."""
    ### BEGIN SOLUTION
    return [
        kernel.name
        for graph in trace.graphs.values()
        for kernel in graph.kernels
        if any(
            operator in origin.target.split(".")
            for line in kernel.lines
            if not line.scaffold
            for origin in line.origins
        )
    ]
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-forward" tags=["wrong"] kind="misconception" says="2 kernels, got 1 kernels"
def kernels_of(trace, operator):
    return [
        kernel.name
        for kernel in trace.kernels
        if any(
            operator in origin.target.split(".")
            for line in kernel.lines
            if not line.scaffold
            for origin in line.origins
        )
    ]


# %% name="ex1-wrong-name" tags=["wrong"] kind="visible-only" says="kernels, got"
def kernels_of(trace, operator):
    return [
        kernel.name
        for graph in trace.graphs.values()
        for kernel in graph.kernels
        if operator in kernel.name
    ]


# %% name="ex1-wrong-pieces" tags=["wrong"] kind="built-in" says="a use of pieces"
def kernels_of(trace, operator):
    return [p.name for p in trace.pieces() if any(operator in o.target for o in p.origins)]


# %% [markdown]
# **Exercise 2 · Make it worth it** (solid, 2 points). Construct `worth_it(x)`: a function of a tensor
# `f32[n]`, any `n` from 1 on, that calls `torch.ops.lesson17.snake` once, for which the lowering of snake is
# worth most: with it all is one kernel, and that kernel moves less than a tenth of the bytes that
# the kernels move without it. The result is for you to choose.

# %% [markdown]
# **You will need**
#
# - `torch.ops.lesson17.snake(table)`: of a tensor of any shape. A call needs its whole argument in memory,
#   and gives its whole result in memory.
# - `summary(mc.trace(worth_it, torch.randn(64)))`: kernels, bytes in them, calls, as above.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# How small can the input and output of your function be, and how large what `snake` sees between them?
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# From n numbers come n times k, if a column meets a row of k numbers, such as `torch.arange(k)`; a sum makes
# them n again. For which k is the part that is left small, whatever n is?
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def worth_it(x):
    """One call of torch.ops.lesson17.snake; fused, it moves under a tenth of the bytes."""
    ### BEGIN SOLUTION
    table = x[:, None] * torch.arange(32)
    return torch.ops.lesson17.snake(table).sum(-1)
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-pointwise" tags=["wrong"] kind="misconception" says="got 50%"
def worth_it(x):
    return torch.ops.lesson17.snake(x * 2) + 1


# %% name="ex2-wrong-square" tags=["wrong"] kind="misconception" says="expected under 10%, got 20%"
def worth_it(x):
    return torch.ops.lesson17.snake(x[:, None] * x).sum(1)


# %% name="ex2-wrong-size" tags=["wrong"] kind="visible-only" says="shape '[-1, 4]' is invalid"
def worth_it(x):
    table = x.reshape(-1, 4).reshape(-1, 1) * torch.arange(32)
    return torch.ops.lesson17.snake(table).sum(-1)


# %% name="ex2-wrong-spelled" tags=["wrong"] kind="built-in" says="a use of sin"
def worth_it(x):
    table = x[:, None] * x[None, :]
    return (table + torch.sin(table) ** 2).sum(-1)


# %% [markdown]
# **Exercise 3 · An operator, end to end** (solid, 5 points). Large models keep their logits within bounds by
# soft-capping: cap · tanh(x / cap). Here it is as an operator that the compiler
# knows nothing of. Write its three rules. The check registers them, one by one and together, and the
# GPT trains with capped logits. Any float dtype; `cap` is a float, and may be one that is only known
# when the kernel runs.

# %% name="ex3-operator" tags=["setup"]
if not hasattr(torch.ops.lesson17, "softcap"):

    @torch.library.custom_op("lesson17::softcap", mutates_args=())
    def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
        return cap * torch.tanh(x / cap)

    @softcap.register_fake
    def softcap_shape(x, cap):
        return torch.empty_like(x)


# %% [markdown]
# **You will need**
#
# - `softcap_vjp`: gets the gradient of the result, the result, and the operator's arguments, as `snake_vjp`
#   above.
# - `softcap_in_parts`: plain functions of tensors, as `snake_in_parts`.
# - `elementwise(ctx, formula, x, cap)`: takes numbers as operands too; it calls `formula(ops, v, c)`, both
#   in the dtype of `x`.
# - The words for a loop: `ops.tanh(v)`, `ops.truediv(v, c)`, `ops.mul(v, c)`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# All three follow from the formula; two of them just write it.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# The derivative of tanh(u) is 1 - tanh²(u), and `result / cap` is that tanh. The inner derivative cancels
# `cap`.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def softcap_vjp(grad, result, x, cap):
    """The gradient of x, from that of the result: tensors of one shape."""
    ### BEGIN SOLUTION
    slope = result / cap
    return grad * (1 - slope * slope)
    ### END SOLUTION


def softcap_in_parts(x, cap):
    """softcap in operators that the compiler knows."""
    ### BEGIN SOLUTION
    return cap * torch.tanh(x / cap)
    ### END SOLUTION


def lower_softcap(ctx, x, cap):
    """softcap as a loop: what `elementwise` gives."""

    ### BEGIN SOLUTION
    def formula(ops, v, c):
        return ops.mul(c, ops.tanh(ops.truediv(v, c)))

    return elementwise(ctx, formula, x, cap)
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-chain-rule" tags=["wrong"] kind="misconception" says="softcap_vjp of"
def softcap_vjp(grad, result, x, cap):
    return grad * (1 - result * result)


def softcap_in_parts(x, cap):
    return cap * torch.tanh(x / cap)


def lower_softcap(ctx, x, cap):
    return elementwise(ctx, lambda ops, v, c: ops.mul(c, ops.tanh(ops.truediv(v, c))), x, cap)


# %% name="ex3-wrong-clamp" tags=["wrong"] kind="misconception" says="lower_softcap of x*3"
def softcap_vjp(grad, result, x, cap):
    return grad * (1 - (result / cap) ** 2)


def softcap_in_parts(x, cap):
    return cap * torch.tanh(x / cap)


def lower_softcap(ctx, x, cap):
    return elementwise(ctx, lambda ops, v, c: ops.minimum(v, c), x, cap)


# %% name="ex3-wrong-float32" tags=["wrong"] kind="visible-only" says="operands of one dtype"
def softcap_vjp(grad, result, x, cap):
    return grad * (1 - (result / cap) ** 2)


def softcap_in_parts(x, cap):
    return cap * torch.tanh(x / cap)


def lower_softcap(ctx, x, cap):
    def formula(ops, v):
        c = ops.constant(cap, torch.float32)
        return ops.mul(c, ops.tanh(ops.truediv(v, c)))

    return elementwise(ctx, formula, x)


# %% name="ex3-wrong-autograd" tags=["wrong"] kind="built-in" says="a use of autograd"
def softcap_vjp(grad, result, x, cap):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return torch.autograd.grad(cap * torch.tanh(y / cap), y, grad)[0]


def softcap_in_parts(x, cap):
    return cap * torch.tanh(x / cap)


def lower_softcap(ctx, x, cap):
    return elementwise(ctx, lambda ops, v, c: ops.mul(c, ops.tanh(ops.truediv(v, c))), x, cap)


# %% [markdown]
# **Exercise 4 · A back end that writes plain C** (hard, 6 points). NumPy needed no loops. C is nothing but
# loops, and the package's C++ back end is long because its loops are fast. Write the plain ones:
# `print_loops(printer, plan)` prints what stands between the braces of one C function. The values
# are given below: `printer.compute(values, printer.accumulate)` prints one line each, `printer.begin`
# declares the accumulator of a reduction. Then the GPT trains on your loops.

# %% [markdown]
# A plan cuts its values into *phases*: `plan.phases`, in order, each with `level` and `values`. Values
# of level "row" are computed once for each index of `plan.ranges`; those of level "loop" for every
# index of `plan.reduction_ranges` inside it, and some of them are reductions (`value.op`). Both ranges
# map variables to sizes; there may be several, or none.

# %% name="ex4-given" tags=["setup"]
from minicompile.codegen.cpp_ops import STORAGE
from minicompile.codegen.cpp_values import Loop, ValuePrinter
from minicompile.codegen.helpers import c_prelude
from minicompile.codegen.plan import KernelModule


class PlainPrinter(ValuePrinter):
    """Lines of C. `line(text)` adds one, `with loops([Loop(var, size), ...])` nests loops around lines."""

    def begin(self, value):
        """Declare a reduction's accumulator, with what it starts from."""
        for suffix, ctype, start in self.accumulators(value):
            self.line(f"{ctype} {self.names[value]}{suffix} = {start};", value.origins)

    def accumulate(self, value):
        """Add one more element to a reduction."""
        if value.op == "scan" or value.kind.startswith("arg"):
            raise NotImplementedError(f"{value.op} {value.kind} in plain C")
        name = self.names[value]
        self.line(
            f"{name} = {self.combine(value, name, self.ref(value.inputs[0]))};", value.origins
        )


def plain_module(print_loops):
    """A code generator: each plan's loops by `print_loops(printer, plan)`."""

    def generate(plans):
        kernels = []
        for plan in plans:
            printer = PlainPrinter(plan)
            parameters = [f"{STORAGE[a.dtype]}* {a.name}" for a in plan.arguments]
            parameters += [f"int64_t {size}" for size in plan.sizes]
            with printer.braces(f"int64_t {plan.name}({', '.join(parameters)})"):
                printer.line("int32_t error = 0;")
                print_loops(printer, plan)
                printer.line("return error;")
            kernels.append(printer.source("c", c_prelude))
        text = "\n".join(kernel.text for kernel in kernels)
        return KernelModule("c", f"{c_prelude(text)}\n{text}", kernels)

    return generate


# %% [markdown]
# **You will need**
#
# - `with printer.loops([Loop(*item) for item in plan.ranges.items()]):` nests loops around what is printed
#   inside.
# - `printer.compute(phase.values)`: a line for each value; with `printer.accumulate` as second argument,
#   reductions take in one more element.
# - `printer.begin(value)`: declares the accumulator of a reduction, `value.op == "reduction"`.
# - `[(phase.level, [value.op for value in phase.values][-1]) for phase in mc.trace(softmax_of_relu, x,
#   w).plans[0].phases]` gives `[('loop', 'reduction'), ('loop', 'reduction'), ('loop', 'store')]`: level and
#   last value of each phase.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Write a softmax of one table by hand first: for each row, a loop for the maximum, a loop for the sum, a
# loop that stores. Each "loop" phase is one of these.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# Where must an accumulator be declared, so that each row has its own, and the next phase still sees it?
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# Inside the loops over `plan.ranges`, phase by phase: a "row" phase is just computed; a "loop" phase
# declares, then opens its own loops.
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def print_loops(printer, plan):
    """Print one kernel's loops: over plan.ranges, and inside them a loop for each "loop" phase."""
    ### BEGIN SOLUTION
    with printer.loops([Loop(*item) for item in plan.ranges.items()]):
        for phase in plan.phases:
            if phase.level == "row":
                printer.compute(phase.values)
                continue
            for value in phase.values:
                if value.op == "reduction":
                    printer.begin(value)
            with printer.loops([Loop(*item) for item in plan.reduction_ranges.items()]):
                printer.compute(phase.values, printer.accumulate)
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-outside" tags=["wrong"] kind="misconception" says="row sums, f32[3, 5]: expected"
def print_loops(printer, plan):
    for phase in plan.phases:
        for value in phase.values:
            if value.op == "reduction":
                printer.begin(value)
    with printer.loops([Loop(*item) for item in plan.ranges.items()]):
        for phase in plan.phases:
            if phase.level == "row":
                printer.compute(phase.values)
                continue
            with printer.loops([Loop(*item) for item in plan.reduction_ranges.items()]):
                printer.compute(phase.values, printer.accumulate)


# %% name="ex4-wrong-from-zero" tags=["wrong"] kind="visible-only" says="lows, f32[4, 6]: expected"
def print_loops(printer, plan):
    with printer.loops([Loop(*item) for item in plan.ranges.items()]):
        for phase in plan.phases:
            if phase.level == "row":
                printer.compute(phase.values)
                continue
            for value in phase.values:
                if value.op == "reduction":
                    printer.line(f"float {printer.names[value]} = 0;")
            with printer.loops([Loop(*item) for item in plan.reduction_ranges.items()]):
                printer.compute(phase.values, printer.accumulate)


# %% name="ex4-wrong-built-in" tags=["wrong"] kind="built-in" says="a use of LoopPrinter"
def print_loops(printer, plan):
    from minicompile.codegen.cpp_loops import LoopPrinter

    other = LoopPrinter(plan)
    other.nest()
    printer.lines += other.lines


# %% [markdown]
# **Exercise 5 · Fewer kernels and bytes than given** (hard, 4 points, optional). A product with a matrix
# that has one column is no product that a library is good at: it is a sum for each row, and a sum can
# share a kernel with what stands around it. Write `thin_product(a, b)`, a decomposition of
# `torch.ops.aten.mm.default`: for products whose inner or outer work is that thin, the same in
# operators that become loops; for all others `NotImplemented`, which leaves the call as it is. The
# given function takes two kernels and a call; yours must take one kernel, and fewer bytes.

# %% name="ex5-given" tags=["setup"]


def score(x, w):
    """One number for each row: f32[n, k] and f32[k, 1] to f32[n, 1]."""
    return torch.sigmoid(torch.tanh(x) @ w)


# %% [markdown]
# **You will need**
#
# - `tensor.unsqueeze(2)`: one more dimension of size one.
#   `(torch.ones(2, 3).unsqueeze(2).shape, torch.ones(3, 4).unsqueeze(0).shape)` gives
#   `(torch.Size([2, 3, 1]), torch.Size([1, 3, 4]))`; their product has shape `[2, 3, 4]`.
# - `return NotImplemented`: leave this call as it is.
# - `a.size(0)`, `a.size(1)`, `b.size(1)`: rows, inner size, columns.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Element i, j of the product is the sum over k of `a[i, k] * b[k, j]`: a table of three dimensions, summed.
# It never reaches memory.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Which sizes are thin? With one column this reads every element once. A wide product would read everything
# many times.
#
# </details>


# %% name="ex5-answer" tags=["answer"]
def thin_product(a, b):
    """`a @ b` as loops where `b` has one column (or `a` one row), else NotImplemented."""
    ### BEGIN SOLUTION
    if b.size(1) != 1 and a.size(0) != 1:
        return NotImplemented
    return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)
    ### END SOLUTION


# %% name="ex5-check" tags=["nbval-check-output"]
check("ex5")


# %% name="ex5-wrong-always" tags=["wrong"] kind="misconception" says="expected 6 calls"
def thin_product(a, b):
    return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)


# %% name="ex5-wrong-row" tags=["wrong"] kind="visible-only" says="expected 1 kernel"
def thin_product(a, b):
    if b.size(1) != 1:
        return NotImplemented
    return (a * b.view(1, -1)).sum(1, keepdim=True)


# %% name="ex5-wrong-einsum" tags=["wrong"] kind="built-in" says="a use of einsum"
def thin_product(a, b):
    if b.size(1) != 1 and a.size(0) != 1:
        return NotImplemented
    return torch.einsum("ik,kj->ij", a, b)


# %% [markdown]
# **Exercise 6 · Which keys count?** (hard, 4 points, optional). A program of attention's kernel has the
# queries `first` to `first + XBLOCK - 1`, and goes over keys in steps of `RBLOCK`. A score counts only where
# `band.low <= i - j <= band.high`; None is no bound. `keys_of(band, keys)` gives two Triton expressions,
# as text: where the keys begin (never below 0, a multiple of `RBLOCK`) and where they end (at most
# `keys`). No tile may be missing, and none may be gone over that holds no score that counts. Your
# ranges take the place of the template's own (`kernel_template("attention")`).

# %% [markdown]
# **You will need**
#
# - `band.low`, `band.high`: whole numbers or None. With neither, the answer is `("0", str(keys))`.
# - `tl.maximum(a, b)`, `tl.minimum(a, b)`, as text. `x // RBLOCK * RBLOCK` is the largest multiple of
#   `RBLOCK` that is not above `x`.
# - `keys_of` returns texts, such as `f"tl.maximum(first - {band.high}, 0)"`.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Solve `low <= i - j <= high` for j.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# The smallest key belongs to the first query of the block, the largest to the last.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# The end is one more than the largest key: an end itself is not gone over.
#
# </details>


# %% name="ex6-answer" tags=["answer"]
def keys_of(band, keys):
    """Where a program's keys begin and end: Triton expressions of first, XBLOCK and RBLOCK."""
    ### BEGIN SOLUTION
    begin, end = "0", str(keys)
    if band.high is not None:
        begin = f"tl.maximum(first - {band.high}, 0) // RBLOCK * RBLOCK"
    if band.low is not None:
        end = f"tl.minimum(first + XBLOCK - ({band.low}), {keys})"
    return begin, end
    ### END SOLUTION


# %% name="ex6-check" tags=["nbval-check-output"]
check("ex6")


# %% name="ex6-wrong-all" tags=["wrong"] kind="misconception" says="tiles gone over: expected at most"
def keys_of(band, keys):
    return "0", str(keys)


# %% name="ex6-wrong-first-query" tags=["wrong"] kind="misconception" says="expected all keys that count, got"
def keys_of(band, keys):
    begin, end = "0", str(keys)
    if band.high is not None:
        begin = f"tl.maximum(first - {band.high}, 0) // RBLOCK * RBLOCK"
    if band.low is not None:
        end = f"tl.minimum(first + 1 - ({band.low}), {keys})"
    return begin, end


# %% name="ex6-wrong-causal" tags=["wrong"] kind="visible-only" says="tiles gone over: expected at most"
def keys_of(band, keys):
    return "0", f"tl.minimum(first + XBLOCK, {keys})" if band.low == 0 else str(keys)


# %% name="ex6-wrong-below" tags=["wrong"] kind="visible-only" says="expected at least 0, got"
def keys_of(band, keys):
    begin, end = "0", str(keys)
    if band.high is not None:
        begin = f"(first - {band.high}) // RBLOCK * RBLOCK"
    if band.low is not None:
        end = f"tl.minimum(first + XBLOCK - ({band.low}), {keys})"
    return begin, end


# %% name="ex6-wrong-built-in" tags=["wrong"] kind="built-in" says="a use of ends_of"
def keys_of(band, keys):
    from minicompile.plugins.flash_attention.kernels import ends_of

    lines = ends_of(keys, band.low, band.high)
    return lines[0], lines[-1]


# %% [markdown]
# ## Go deeper
#
# - `minicompile/extension.py`: every table and its decorator. `minicompile rules` prints what they hold.
# - `minicompile/codegen/cpp_loops.py`: your plain loops, made fast; `minicompile/codegen/triton.py`: a grid.
# - `minicompile/plugins/custom_rules/vjps.py`, `minicompile/lowering/rules/pointwise.py`: where rules live.
# - `minicompile/plugins/flash_attention/`: `recognise.py` finds attention, `score.py` bands, `kernels.py`
#   holds the templates.
# - `torch/_inductor/lowering.py` has `register_lowering`; `torch/_inductor/decomposition.py` has an `mm` that
#   is exercise 5; `torch/_inductor/codegen/common.py` has `OpOverrides` and `register_backend_for_device`.
#
# **Where you are.** At the end of the corridor, with a key to every door. All rooms are lit. The lessons
# followed one model from Python to kernels; the next compiler pass you read in `torch/_inductor` has a
# smaller sister here, and the next idea you have is a decorator away.

# %% name="corridor"
from minicompile.lessons.pictures import corridor

corridor("dynamo", "aot", "lowering", "scheduling", "codegen", "runtime")
