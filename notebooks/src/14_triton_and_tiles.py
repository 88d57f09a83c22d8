# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 14 · And on a GPU?
#
# The same loops can be written for a GPU. Its language here is Triton: Python that says what *one
# block of elements* does, and a compiler that spreads the block over threads. After this lesson you can
#
# - read a Triton kernel and follow a line of it down to the GPU's instructions,
# - choose blocks, tiles and warps, and say what a bad choice costs,
# - write kernels with reductions that the compiler then uses instead of its own.
#
# No GPU is needed: kernels are compiled for one that isn't there, and run in Triton's interpreter.
# A few cells show measurements saved on a GPU. **Triton itself is needed**; it exists for Linux. If
# the first cell says that it is missing, read on with the saved outputs of `notebooks/solutions`.

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

from minicompile.lessons.exercise import checks
from minicompile.lessons.gpu import on_gpu

check = checks("14")
TRITON = {"device_codegen": "triton"}
if importlib.util.find_spec("triton") is None:
    print("Triton isn't installed here, and most cells of this lesson need it (Linux has it).")
else:
    import triton.language as tl


def row_softmax(x):
    return torch.softmax(x, dim=-1)


def gelu_bias(x, bias):
    return torch.nn.functional.gelu(x + bias)


# %% name="picture"
def f(x, scale):
    return torch.relu(x * scale + 1)


torch.manual_seed(0)
x, scale = torch.randn(10, 100), torch.randn(100)
trace = mc.trace(mc.compile(f, options=TRITON), x, scale)
trace.explore(["kernels", "ttgir", "ptx", "sass"], assembly=True)

# %% [markdown]
# That is the whole way down; point at a line of the kernel. *TTIR* is Triton's own graph of block
# operations (its pane is one click away). *TTGIR* is the same after each block got a layout: which
# thread holds which elements. *PTX* is NVIDIA's portable assembly, *SASS* what the processor
# executes. The first two panes speak of blocks, the last two of a single thread.
#
# ## A grid of programs
#
# Here is the kernel alone. It is written for one *program*, which computes `XBLOCK` elements; all
# programs run the same text and differ in `tl.program_id(0)`. A call that starts a
# kernel is a *launch*, and its programs are its *grid*.

# %% name="kernel"
kernel = trace.kernels[0]
print(kernel)

# %% [markdown]
# A CPU kernel says in which order elements are computed. This one doesn't: programs may run in any
# order, and a program's elements all at once. The last program has elements left over, and a
# *mask* switches them off: lanes where `xmask` is false neither load nor store.

# %% name="grid"
from minicompile.lessons.pictures import corridor, slides


def program_text(program, numel, block):
    """The elements of one program; a dot for each that its mask switches off."""
    places = range(program * block, (program + 1) * block)
    return " ".join(f"{i:2}" if i < numel else " ." for i in places)


slides(
    "42 elements in blocks of 16",
    *((f"program {p}", "a dot is masked off", program_text(p, 42, 16)) for p in range(3)),
)

# %% [markdown]
# A GPU executes a program by one or more *warps*, groups of 32 threads that go in step. So a plan
# for a GPU has no vector axis and no threads to share: it has tiles, and `num_warps`.

# %% name="plan"
print(kernel.plan)

# %% [markdown]
# It runs here as well: Triton's interpreter executes a program with NumPy, one after the other.
# That is slow, but it has the meaning of the real thing, masks included.

# %% name="interpreted"
torch.testing.assert_close(mc.compile(f, options=TRITON)(x, scale), f(x, scale))
print("interpreted, and equal to eager")

# %% [markdown]
# **Break it.** What if the mask were forgotten in the store? We edit the kernel's lines and run it
# on a piece of a larger memory, so that nothing else is harmed. **Predict, then run:** ten elements
# in blocks of sixteen; which numbers behind them change?

# %% name="break-it"
from dataclasses import replace

from minicompile.runtime.triton import Tiles, load_kernel


def added_one(x):
    return x + 1


ten = torch.zeros(10)
right = mc.trace(mc.compile(added_one, options=TRITON), ten).kernels[0]
without_mask = replace(
    right,
    lines=[
        replace(line, text=line.text.replace(", xmask)", ")")) if "store" in line.text else line
        for line in right.lines
    ],
)
for name, one in (("with the mask", right), ("without", without_mask)):
    given, memory = torch.zeros(32), torch.full((20,), -1.0)
    load_kernel(one, Tiles(16))(given, memory)
    print(f"{name:14}", memory.int().tolist())

# %% [markdown]
# Six neighbours were overwritten: on a GPU they could belong to any other tensor. Only the copy of
# the kernel was wrong; the compiler's is as before.
#
# ## Wide loads
#
# In PTX each thread loads for itself. Memory answers in pieces of many bytes, so a thread should ask
# for several neighbours at once. That is allowed only if addresses are known to be *aligned*,
# multiples of 16 bytes: Triton compiles another version for tensors that aren't. **Predict, then
# run:** a block of 1024 elements, 4 warps. How many loads has a thread, with and without alignment?

# %% name="wide-loads"
from minicompile.debug.gpu_assembly import cross_compile

many = mc.trace(mc.compile(added_one, options=TRITON), torch.zeros(4096)).kernels[0]
for aligned in (True, False):
    found = cross_compile(many, tiles=Tiles(1024, 1, 4), aligned=aligned)
    loads = [line.strip() for line in found.levels["ptx"].splitlines() if "ld.global" in line]
    print(f"aligned: {aligned}, loads in each thread: {len(loads)}, the first: {loads[0]}")

# %% [markdown]
# `v4.b32` is four times 32 bits, and `@%p1` in front is the mask, now a *predicate* of this thread.
# Here is the choice of block sizes, measured. **Predict, then run:** is a larger block always better?


# %% name="gpu-blocks" tags=["gpu"]
@on_gpu("14-blocks")
def blocks_measured() -> str:
    """A pointwise kernel with blocks of different sizes: what reaches the memory's speed?"""
    from triton.testing import do_bench

    from minicompile.runtime.triton import Tiles, load_kernel

    x, bias = torch.randn(4096, 8192, device="cuda"), torch.randn(8192, device="cuda")
    [kernel] = mc.trace(gelu_bias, x, bias).kernels
    out, expected = torch.empty_like(x), gelu_bias(x, bias)
    planned = kernel.plan.tiles["x"], kernel.plan.num_warps
    moved = kernel.plan.cost.bytes
    lines = [f"{kernel.name}, {moved / 2**20:.0f} MiB", "XBLOCK  warps  elements/thread    GB/s"]
    for block, warps in [
        (32, 1),
        (128, 4),
        (512, 16),
        (128, 1),
        (512, 4),
        (256, 1),
        (1024, 4),
        (4096, 4),
    ]:
        launch = load_kernel(kernel, Tiles(block, 1, warps))
        launch(x, bias, out)
        torch.testing.assert_close(out, expected)
        speed = moved / do_bench(lambda: launch(x, bias, out), return_mode="median") / 1e6
        mark = "  <- the plan's" if (block, warps) == planned else ""
        lines.append(f"{block:6} {warps:6} {block / (32 * warps):16g} {speed:7.0f}{mark}")
    eager = do_bench(lambda: gelu_bias(x, bias), return_mode="median")
    copied = 2 * x.nbytes / do_bench(lambda: out.copy_(x), return_mode="median") / 1e6
    lines.append(f"eager, two kernels: {moved / eager / 1e6:.0f} GB/s of the same bytes")
    return "\n".join([*lines, f"a copy of the tensor: {copied:.0f} GB/s"])


# %% name="gpu-blocks-result"
blocks_measured

# %% [markdown]
# It takes both: several elements a thread, so that loads are wide, and enough of them in a program,
# so that it doesn't end before it has begun. With both, the kernel is about as fast as a plain copy
# of the tensor: there is nothing left to win, and still larger blocks win nothing. Eager runs two
# kernels, and so needs twice the traffic. The rule behind the plan's choice is `triton:tiles` in
# `minicompile/codegen/triton_rules.py`.
#
# ## Reductions: a tile of rows
#
# With a reduction a program holds a tile of two dimensions: `XBLOCK` rows and `RBLOCK` elements of
# each. If a whole row fits, the reduction is called *persistent*: the row is loaded once and stays
# in registers, of which each thread has its own, through maximum, sum and division.

# %% name="softmax-kernel"
softmax = mc.trace(mc.compile(row_softmax, options=TRITON), torch.randn(512, 8192)).kernels[0]
print(softmax)

# %% [markdown]
# The price: a thread has at most 255 registers, and what doesn't fit is *spilled*, written to memory
# and read back. More warps share a row among more threads, so each needs fewer. Both numbers can
# be read without a GPU:

# %% name="registers"
print("warps  registers  bytes spilled, for one row of 8192")
for warps in (1, 2, 4, 16):
    found = cross_compile(softmax, tiles=Tiles(1, 8192, warps))
    print(f"{warps:5} {found.registers:10} {found.spilled_bytes:14}")

# %% [markdown]
# A multiprocessor's registers are shared by all programs on it. Many registers a thread means few
# threads at a time (low *occupancy*), and fewer loads on their way while others wait. **Predict, then
# run:** which tile is fastest, and which slowest?


# %% name="gpu-tiles" tags=["gpu"]
@on_gpu("14-tiles")
def tiles_measured() -> str:
    """One softmax kernel with different tiles and warps: registers, spills, speed."""
    from triton.testing import do_bench

    from minicompile.debug.gpu_assembly import cross_compile
    from minicompile.runtime.triton import Tiles, load_kernel

    x = torch.randn(8192, 8192, device="cuda")
    [kernel] = mc.trace(row_softmax, x).kernels
    out, expected = torch.empty_like(x), row_softmax(x)
    planned = kernel.plan.tiles["x"], kernel.plan.num_warps
    moved = kernel.plan.cost.bytes
    lines = [
        f"{kernel.name}, rows of 8192 held whole, {moved / 2**20:.0f} MiB",
        "rows  warps  registers  spilled    GB/s",
    ]
    for rows, warps in [(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (2, 4), (2, 16), (4, 16)]:
        tiles = Tiles(rows, 8192, warps)
        assembly, launch = cross_compile(kernel, tiles=tiles), load_kernel(kernel, tiles)
        launch(x, out)
        torch.testing.assert_close(out, expected)
        speed = moved / do_bench(lambda: launch(x, out), return_mode="median") / 1e6
        mark = "  <- the plan's" if (rows, warps) == planned else ""
        used, spilled = assembly.registers, assembly.spilled_bytes
        lines.append(f"{rows:4} {warps:6} {used!s:>10} {spilled!s:>8} {speed:7.0f}{mark}")
    eager = do_bench(lambda: row_softmax(x), return_mode="median")
    return "\n".join([*lines, f"eager: {moved / eager / 1e6:.0f} GB/s"])


# %% name="gpu-tiles-result"
tiles_measured

# %% [markdown]
# Spilling nearly halves the speed. What doesn't spill differs little: wide loads, several in flight
# for each thread, keep the memory busy even at low occupancy.
#
# ## Rows that are too long
#
# Then a program *sweeps*: a loop goes over the row in tiles, once for each phase. A softmax has
# three phases, and so three loads of the same element. We can ask for it by taking a rule away: a
# plan's reduction begins as looped, and the rule `triton:reduction` makes it persistent.

# %% name="looped"
mc.reset()
with mc.without("plan:triton:reduction"):
    swept = mc.trace(mc.compile(row_softmax, options=TRITON), torch.randn(512, 8192)).kernels[0]
mc.reset()
slides(
    "softmax of rows of 8192",
    ("held whole", "persistent: one load of each element", softmax),
    ("swept", "looped: three loads of each element", swept),
)

# %% name="count-loads"
for name, one in (("held whole", softmax), ("swept", swept)):
    print(f"{name:11} tl.load in the text: {one.text.count('tl.load')}, tiles {one.plan.tiles}")

# %% [markdown]
# **Predict, then run.** Rows can stay in the GPU's own cache from one sweep to the next, if not too
# many are in work at once. From which length on does it matter that a row is read three times?


# %% name="gpu-sweeps" tags=["gpu"]
@on_gpu("14-sweeps")
def sweeps_measured() -> str:
    """Rows held whole against rows swept three times, for longer and longer rows."""
    from triton.testing import do_bench

    from minicompile.extension import plan_rule
    from minicompile.runtime.triton import load_kernel

    def speed(kernel, x):
        out = torch.empty_like(x)
        launch = load_kernel(kernel)
        launch(x, out)
        torch.testing.assert_close(out, row_softmax(x))
        milliseconds = do_bench(lambda: launch(x, out), return_mode="median")
        return kernel.plan.cost.bytes / milliseconds / 1e6

    lines = ["row length   held whole   swept   eager   (GB/s of one read and one write)"]
    for length in (256, 1024, 4096, 16384, 65536):
        x = torch.randn(2**26 // length, length, device="cuda")
        [planned] = mc.trace(row_softmax, x).kernels
        whole = f"{speed(planned, x):.0f}" if planned.plan.reduction == "persistent" else "too long"
        mc.reset()
        with mc.scoped():

            @plan_rule("triton:reduction")
            def always_swept(plan, options):
                """Leaves the plan's reduction as it begins: looped."""

            [looped] = mc.trace(row_softmax, x).kernels
        milliseconds = do_bench(lambda: row_softmax(x), return_mode="median")
        eager = planned.plan.cost.bytes / milliseconds / 1e6
        lines.append(f"{length:10} {whole:>12} {speed(looped, x):7.0f} {eager:7.0f}")
    return "\n".join(lines)


# %% name="gpu-sweeps-result"
sweeps_measured

# %% [markdown]
# Swept rows of many lengths run like those held whole, near the speed of a copy: the plan gives each
# multiprocessor few rows at a time, and loads say what the cache should keep. Only the longest rows
# no longer fit. An *online softmax* needs fewer sweeps: it keeps maximum and sum together in one, and
# corrects the sum whenever the maximum grows. The compiler does so for long rows; you write it in
# exercise 5.
#
# ## Too few rows
#
# A program takes whole rows. The sum of a matrix is a single row: one program on one multiprocessor
# would read everything, and the others would wait. **Predict, then run:** how many kernels does the
# sum of a million numbers make, and how many programs?


# %% name="split"
def total(x):
    return x.sum()


sweep, finish = mc.trace(mc.compile(total, options=TRITON), torch.randn(2**20)).kernels
slides(
    "the sum of 2**20 numbers",
    ("sweep", "each program: what one part comes to, in a workspace", sweep),
    ("finish", "one program: the parts", finish),
)

# %% [markdown]
# The reduction is split: the loop variable `p` counts parts, and parts are rows like any others. One
# kernel more costs a few microseconds, so that it must be worth it. The plan weighs both:

# %% name="split-or-not"
for shape in [(1, 2**18), (64, 2**14), (512, 2**11)]:
    mc.reset()
    made = mc.trace(mc.compile(lambda x: x.amax(1), options=TRITON), torch.randn(shape)).kernels
    programs = ", then ".join(str(-(-k.plan.rows // k.plan.tiles["x"])) for k in made)
    print(f"{shape[0]:4} x {shape[1]:6}, programs: {programs}")

# %% [markdown]
# In exercise 6 that decision is yours.
#
# Programs run in no order. Where many add to one element, as in an embedding's backward, they do so with
# `tl.atomic_add`, and the last digits differ from run to run; after
# `torch.use_deterministic_algorithms(True)` the compiler leaves such sums to eager's operators. An index
# that was loaded is checked by `tl.device_assert`, unless you compile with
# `options={"assert_indirect_indexing": False}`.
#
# ## The model, and matrix products
#
# One block of the lesson model, planned for a GPU. Every kernel is a pointwise one or a reduction:

# %% name="block"
from minicompile.lessons.model import GPT, GPTConfig

block = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)).blocks[0].eval()
h = torch.randn(2, 16, 32)
with torch.no_grad():
    block_trace = mc.trace(mc.compile(block, options=TRITON), h)
    torch.testing.assert_close(mc.compile(block, options=TRITON)(h), block(h))
for plan in block_trace.plans:
    tiles = ", ".join(f"{axis}: {size}" for axis, size in plan.tiles.items())
    print(f"{plan.name[13:46]:33} {plan.reduction:11} tiles {tiles}, {plan.num_warps} warps")

# %% [markdown]
# Matrix products are not among them. They are calls of a library, which is hard to beat. The price
# is what comes after: a product in a kernel of our own could apply the `relu` to each tile before
# it is stored, as an *epilogue*. The scheduler says so when it refuses:

# %% name="epilogue"


def product_and_relu(x, w):
    return torch.relu(x @ w)


square = torch.randn(16, 16)
print(mc.trace(mc.compile(product_and_relu, options=TRITON), square, square).schedule.decisions[0])

# %% [markdown]
# ## A product of our own: a template
#
# `mode="max-autotune"` takes the scheduler at its word. The product becomes a loop nest like the
# others, and its kernel comes from a *template*: a text that is written once, by hand, with *holes*
# that the loops fill. What is done to a factor's tile after its load is a *prologue*. **Predict, then
# run:** a sum before the product, a bias and `relu` behind it. How many kernels?


# %% name="template"
def dense(x, w, bias):
    return torch.relu((x + 1) @ w + bias)


def tuned(fn):
    return mc.compile(fn, mode="max-autotune", options=TRITON)


def with_holes(kernel):
    """The text of a product's kernel; `>` marks what fills a hole."""
    own = ("tl.zeros", "tl.dot")
    fills = [not line.scaffold and not any(o in line.text for o in own) for line in kernel.lines]
    return "\n".join(">  "[not fill :][:2] + line.text for fill, line in zip(fills, kernel.lines))


given = torch.randn(40, 100), torch.randn(100, 72), torch.randn(72)
product = mc.trace(tuned(dense), *given)
bare = mc.trace(tuned(torch.mm), *given[:2])
slides(
    "one template, two functions",
    ("the loops", "a product between two others", product.loops),
    ("the decisions", "both are taken over", "\n".join(map(str, product.schedule.decisions))),
    ("x @ w", "holes hold two loads and a store", with_holes(bare.kernels[0])),
    ("relu((x + 1) @ w + bias)", "a prologue, an epilogue", with_holes(product.kernels[0])),
)

# %% [markdown]
# One kernel, and nothing between its steps reaches memory. A program makes one tile of the result,
# `YBLOCK` rows by `XBLOCK` columns, and goes over the terms in steps of `RBLOCK`. `tl.dot` multiplies two
# tiles on the GPU's *tensor cores*, units made for that. The same in PyTorch, to compare with:


# %% name="by-tiles"
def by_tiles(x, w, prologue, epilogue, rows=16, columns=32, terms=64):
    """`epilogue(prologue(x) @ w)`, one tile of the result after the other."""
    out = torch.empty(x.shape[0], w.shape[1])
    for y in range(0, out.shape[0], rows):
        for c in range(0, out.shape[1], columns):
            down, across = slice(y, y + rows), slice(c, c + columns)
            total = torch.zeros_like(out[down, across])
            for r in range(0, x.shape[1], terms):
                step = slice(r, r + terms)
                total += prologue(x[down, step]) @ w[step, across]
            out[down, across] = epilogue(total, across)
    return out


x, w, bias = given
reference = by_tiles(x, w, lambda t: t + 1, lambda t, columns: torch.relu(t + bias[columns]))
for name, result in (("by tiles", reference), ("interpreted", tuned(dense)(*given))):
    print(f"{name:11} as eager:", torch.allclose(result, dense(*given), rtol=1e-4, atol=1e-4))

# %% [markdown]
# **Break it.** The last step reaches beyond the last term, and masked lanes are loaded as zero. The
# prologue changes that: zero plus one is one. So the template masks once more, by `tl.where`. We
# take that line away. **Predict, then run:** factors are zero before one is added, there are 100
# terms, in steps of 64. What is each element of the result, with and without that line?


# %% name="break-prologue"
def ones(x, w):
    return (x + 1) @ (w + 1)


zeros = torch.zeros(40, 100), torch.zeros(100, 72)
right = mc.trace(tuned(ones), *zeros).kernels[0]
careless = replace(right, lines=[line for line in right.lines if "tl.where" not in line.text])
for name, one in (("with tl.where", right), ("without", careless)):
    out = torch.empty(40, 72)
    load_kernel(one, Tiles(x=16, r=64, y=16))(*zeros, out)
    print(f"{name:13}", out.unique().tolist())

# %% [markdown]
# ## Who multiplies?
#
# Our kernel has a *rival*, another way to the same result: the library's product, then a kernel for the
# rest. `max-autotune` measures both on the GPU that it finds. The plan lists them without one:

# %% name="rivals"
from minicompile.plugins.matrix_products.autotune import candidates
from minicompile.runtime.gpu_kernel import planned_tiles, programs

for rows, terms, columns in [(4096, 1024, 4096), (64, 8192, 64), (50, 99, 70)]:
    factors = (torch.empty(s, dtype=torch.bfloat16) for s in ((rows, terms), (terms, columns)))
    kernel = mc.trace(tuned(torch.mm), *factors).kernels[0]
    tiles = planned_tiles(kernel.plan)
    print(f"{rows} x {terms} x {columns}: {programs(kernel.plan, tiles)} programs,", end=" ")
    print(
        f"tiles of {tiles.y} x {tiles.x}, rival {', '.join(r.name for r in kernel.plan.rivals)},",
        end=" ",
    )
    print(f"unmeasured: {candidates(kernel)[0].way}")

# %% [markdown]
# The second has tiles for a few programs only, while a GPU has a hundred multiprocessors. A library may
# share the terms of a tile among programs (*split-K*); our template does not. Where nothing can be
# measured, the library multiplies. What an H200 said stands at the head
# of `minicompile/plugins/matrix_products/tiles.py`; in exercise 7 you write the template.

# %% [markdown]
# > **In torch.compile.** Inductor's Triton printer is `torch/_inductor/codegen/triton.py`; one rule per
# > operation, as here. Its tiles come from `torch/_inductor/runtime/triton_heuristics.py`, and with
# > `mode="max-autotune"` it times several, matrix products with epilogues among them. So do we
# > (`MINICOMPILE_LOGS=autotuning` says what that gained). Their templates are Jinja texts, such as
# > `mm_template` in `torch/_inductor/kernel/mm.py`; ours is a class whose methods fill the holes. Below,
# > live: how both write the same operations. Our division rounds as eager's does; their maximum keeps NaN
# > in a helper, ours has an operation for that before it comes to printing.

# %% name="torch-compile"
from torch._inductor.codegen.triton import TritonOverrides

from minicompile.codegen.triton_ops import triton_op

for name, names in {
    "sqrt": "x",
    "exp": "x",
    "where": "mab",
    "truediv": "ab",
    "maximum": "ab",
}.items():
    theirs, ours = getattr(TritonOverrides, name)(*names), triton_op[name](torch.float32, *names)
    print(f"{name:8} theirs: {theirs:32} ours: {ours}")

# %% [markdown]
# ## Recap
#
# 1. A Triton kernel says what one program does with a block of elements; the grid covers the tensor.
# 2. Masks switch off the lanes behind the end, for loads and for stores.
# 3. Threads should load many neighbouring bytes at once, which needs alignment and large blocks.
# 4. A persistent reduction loads a row once and holds it in registers; spilled registers undo the gain.
# 5. A row that doesn't fit is swept, once for each phase; a template is fixed but for its holes.

# %% [markdown]
# ## Exercises
#
# **Exercise 1 · Read the loads** (easy, 2 points). `load_bytes(assembly)` gives the bytes that each global
# load of `assembly.levels["ptx"]` reads for one thread, in order of the text: `[16, 16]` for two
# loads of four floats. A load looks like `ld.global.v4.b32`: how many pieces, and bits of each.

# %% [markdown]
# **You will need**
#
# - `assembly.levels["ptx"]`: a text. Loads are `ld.global.v4.b32` (four pieces of 32 bits) or, for one
#   piece, `ld.global.b32`. Types are `b8` to `b64`.
# - `re.findall(pattern, text)`: with two groups, a list of pairs.
#   `re.findall(r"v(\d)\.b(\d+)", "ld.global.v4.b32")` gives `[('4', '32')]`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# The part with the digit may be missing: a group with a question mark after it finds an empty text then.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Bytes are pieces times bits, divided by 8; an empty text is one piece.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
import re


def load_bytes(assembly):
    """Bytes that each load instruction reads for one thread."""
    ### BEGIN SOLUTION
    found = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[bfus](\d+)", assembly.levels["ptx"])
    return [int(pieces or 1) * int(bits) // 8 for pieces, bits in found]
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-narrow" tags=["wrong"] kind="misconception" says="expected 4096, got 1024"
import re


def load_bytes(assembly):
    found = re.findall(r"ld\.global\S*?\.[bfus](\d+)", assembly.levels["ptx"])
    return [int(bits) // 8 for bits in found]


# %% name="ex1-wrong-floats" tags=["wrong"] kind="visible-only" says="bytes, all threads: expected"
def load_bytes(assembly):
    ptx = assembly.levels["ptx"]
    return [16 if "ld.global.v4" in ptx else 4] * ptx.count("ld.global")


# %% name="ex1-wrong-cost" tags=["wrong"] kind="built-in" says="got a use of"
def load_bytes(assembly):
    loads = assembly.levels["ptx"].count("ld.global")
    return [assembly.source.plan.cost.bytes_read // loads] * loads


# %% [markdown]
# **Exercise 2 · Mind the tails** (solid, 3 points). Write the body of a Triton function: one program takes
# `XBLOCK` of `xnumel` rows with `rnumel` elements each, which lie one after the other at `in_ptr`, and
# stores the largest of each row at `out_ptr`. `RBLOCK` is at least `rnumel`. Rows and columns may end
# within the tile. (The check puts `@triton.jit` in front; kernels of `amax` then call yours.)

# %% [markdown]
# **You will need**
#
# - `tl.program_id(0)`: which program this is. `tl.arange(0, XBLOCK)[:, None]`: a column of numbers from
#   zero; `tl.arange(0, RBLOCK)[None, :]`: a row.
# - A column plus a row is a tile. Row `i`, column `j` lies at `in_ptr + i * rnumel + j`.
# - `in_ptr`, `out_ptr`: pointers to the first float32 element of the rows and of the result, which has one
#   element for each row. `xnumel`, `rnumel`: integers, the number of rows and of elements in each.
# - `tl.load(place, mask, other=number)`: a tile; where the mask is false, nothing is read, and the tile
#   holds `other`. Masks are joined by `&`. Where the mask is true, memory must be yours, even if you don't
#   use what is read.
# - `float("-inf")`: the neutral element of a maximum, as 0 is that of a sum; `max(float("-inf"), -7.0)` gives
#   `-7.0`.
# - `tl.max(tile, 1)[:, None]`: the largest of each row, a column. `tl.store(place, value, mask)` writes it.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# `rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]` are the rows of this program. Which of
# them exist?
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# A lane counts if its row and its column exist: two comparisons for the load, one for the store.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# What must a masked lane hold, so that it never is the largest, even if all numbers are negative?
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def largest_of_rows(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    """The largest element of each row of this program's tile.

    `[[1., 3., 2.], [5., 4., 6.]]` at in_ptr, xnumel = 2, rnumel = 3: `[3., 6.]` at out_ptr.
    """
    ### BEGIN SOLUTION
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    columns = tl.arange(0, RBLOCK)[None, :]
    mask = (rows < xnumel) & (columns < rnumel)
    tile = tl.load(in_ptr + rows * rnumel + columns, mask, other=float("-inf"))
    tl.store(out_ptr + rows, tl.max(tile, 1)[:, None], rows < xnumel)
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-no-column-mask" tags=["wrong"] kind="misconception" says="program 1 reads 2 elements"
def largest_of_rows(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    columns = tl.arange(0, RBLOCK)[None, :]
    tile = tl.load(in_ptr + rows * rnumel + columns, rows < xnumel, other=float("-inf"))
    tl.store(out_ptr + rows, tl.max(tile, 1)[:, None], rows < xnumel)


# %% name="ex2-wrong-zero" tags=["wrong"] kind="misconception" says="got float32[8] of [0, 0"
def largest_of_rows(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    columns = tl.arange(0, RBLOCK)[None, :]
    mask = (rows < xnumel) & (columns < rnumel)
    tile = tl.load(in_ptr + rows * rnumel + columns, mask, other=0.0)
    tl.store(out_ptr + rows, tl.max(tile, 1)[:, None], rows < xnumel)


# %% name="ex2-wrong-no-row-mask" tags=["wrong"] kind="visible-only" says="program 1 writes 3 elements"
def largest_of_rows(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    columns = tl.arange(0, RBLOCK)[None, :]
    mask = (rows < xnumel) & (columns < rnumel)
    tile = tl.load(in_ptr + rows * rnumel + columns, mask, other=float("-inf"))
    tl.store(out_ptr + rows, tl.max(tile, 1)[:, None])


# %% name="ex2-wrong-reads-behind" tags=["wrong"] kind="visible-only" says="program 1 reads 21 elements"
def largest_of_rows(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    columns = tl.arange(0, RBLOCK)[None, :]
    tile = tl.load(in_ptr + rows * rnumel + columns, columns < rnumel, other=float("-inf"))
    tl.store(out_ptr + rows, tl.max(tile, 1)[:, None], rows < xnumel)


# %% name="ex2-wrong-helper" tags=["wrong"] kind="built-in" says="got a use of max_combine"
def largest_of_rows(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    columns = tl.arange(0, RBLOCK)[None, :]
    tile = tl.load(in_ptr + rows * rnumel + columns)
    tl.store(out_ptr + rows, tl.reduce(tile, 1, tl.max_combine)[:, None])


# %% [markdown]
# **Exercise 3 · A softmax that keeps its row** (hard, 4 points). In the same way, a softmax of each row.
# Numbers may be large, and each element may be loaded only once. Kernels of `torch.softmax` then call yours.

# %% [markdown]
# **You will need**
#
# - What exercise 2 needs, and `tl.exp(tile)`, `tl.sum(tile, 1)[:, None]`, `tl.where(condition, a, b)`.
# - The result goes to `out_ptr + i * rnumel + j`, as large as the input.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Take the largest of a row from the row before `tl.exp`: then no number is too large.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# A masked lane must be no maximum and add nothing to the sum: one `other` does both, since `exp` of it is
# zero.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# A row that doesn't exist has that `other` everywhere, also as its largest: use zero there.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def softmax_rows(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    """The softmax of each row of this program's tile."""
    ### BEGIN SOLUTION
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    columns = tl.arange(0, RBLOCK)[None, :]
    mask = (rows < xnumel) & (columns < rnumel)
    tile = tl.load(in_ptr + rows * rnumel + columns, mask, other=float("-inf"))
    largest = tl.where(rows < xnumel, tl.max(tile, 1)[:, None], 0.0)
    shifted = tl.exp(tile - largest)
    total = tl.sum(shifted, 1)[:, None]
    tl.store(out_ptr + rows * rnumel + columns, shifted / total, mask)
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-twice" tags=["wrong"] kind="misconception" says="elements loaded: expected 180, got 360"
def softmax_rows(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    columns = tl.arange(0, RBLOCK)[None, :]
    mask = (rows < xnumel) & (columns < rnumel)
    tile = tl.load(in_ptr + rows * rnumel + columns, mask, other=float("-inf"))
    largest = tl.max(tile, 1)[:, None]
    total = tl.sum(tl.exp(tile - largest), 1)[:, None]
    again = tl.load(in_ptr + rows * rnumel + columns, mask, other=0.0)
    tl.store(out_ptr + rows * rnumel + columns, tl.exp(again - largest) / total, mask)


# %% name="ex3-wrong-no-max" tags=["wrong"] kind="visible-only" says="got float32[5, 30] of [nan"
def softmax_rows(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    columns = tl.arange(0, RBLOCK)[None, :]
    mask = (rows < xnumel) & (columns < rnumel)
    tile = tl.load(in_ptr + rows * rnumel + columns, mask, other=float("-inf"))
    shifted = tl.exp(tile)
    tl.store(out_ptr + rows * rnumel + columns, shifted / tl.sum(shifted, 1)[:, None], mask)


# %% name="ex3-wrong-library" tags=["wrong"] kind="built-in" says="got a use of softmax"
def softmax_rows(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    columns = tl.arange(0, RBLOCK)[None, :]
    tile = tl.load(in_ptr + rows * rnumel + columns)
    tl.store(out_ptr + rows * rnumel + columns, tl.softmax(tile, 1))


# %% [markdown]
# **Exercise 4 · Choose the tiles** (hard, 4 points). `tiles_for(plan, options)` takes the place of the rule
# `triton:tiles`: it sets `plan.tiles` (`{"x": ...}`, with a reduction `{"x": ..., "r": ...}`) and
# `plan.num_warps`, all powers of two, at most 32 warps. Kernels for rows of thousands of elements
# are then compiled for a GPU: none may spill, none may use more than 64 registers a thread.

# %% [markdown]
# **You will need**
#
# - `plan.reduction`: `"none"`, `"persistent"` (a row is held whole) or `"looped"`; `plan.row_length`: how
#   long a row is.
# - `plan.tiles = {"x": 1, "r": 2048}`, `plan.num_warps = 4`: what a rule sets, here for a reduction. `"r"`
#   of a persistent one is the next power of two from the row's length on.
# - `cross_compile(softmax, tiles=Tiles(1, 8192, 4))`: has `registers` and `spilled_bytes`, as printed
#   above. A thread holds `x * r / (32 * num_warps)` elements of each row that it keeps.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# Look at the registers in the cell "registers", and let the warps grow with the row.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Sixteen elements a thread are a good measure; a looped reduction need not take its whole row into the
# tile.
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def tiles_for(plan, options):
    """Set plan.tiles and plan.num_warps: nothing spilled, at most 64 registers a thread."""
    ### BEGIN SOLUTION
    if plan.reduction == "none":
        plan.tiles, plan.num_warps = {"x": 512}, 4
        return
    length = 1
    while length < plan.row_length:
        length *= 2
    if plan.reduction == "looped":
        length = min(length, 2048)
    plan.tiles = {"x": max(1024 // length, 1), "r": length}
    warps = plan.tiles["x"] * length // 512
    plan.num_warps = min(max(warps, 1), 32)
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-one-warp" tags=["wrong"] kind="misconception" says="expected 0 bytes spilled, got"
def tiles_for(plan, options):
    if plan.reduction == "none":
        plan.tiles, plan.num_warps = {"x": 512}, 4
    else:
        plan.tiles, plan.num_warps = {"x": 1, "r": 8192}, 1


# %% name="ex4-wrong-eight-warps" tags=["wrong"] kind="visible-only" says="expected at most 64 registers, got"
def tiles_for(plan, options):
    if plan.reduction == "none":
        plan.tiles, plan.num_warps = {"x": 512}, 4
    else:
        plan.tiles, plan.num_warps = {"x": 1, "r": 8192}, 8


# %% name="ex4-wrong-own-rule" tags=["wrong"] kind="built-in" says="got a use of"
def tiles_for(plan, options):
    from minicompile.codegen.triton_rules import choose_tiles

    choose_tiles(plan, options)


# %% [markdown]
# **Exercise 5 · Online softmax** (hard, 4 points, optional). Rows that don't fit: `RBLOCK` is smaller than
# `rnumel`, and each element may be loaded twice, not three times. The rule that makes reductions
# persistent is taken away; kernels of `torch.softmax` then call yours.

# %% [markdown]
# **You will need**
#
# - `for start in range(0, rnumel, RBLOCK):`: a sweep, as in the looped kernel above; its columns are
#   `start + tl.arange(0, RBLOCK)[None, :]`.
# - `tl.full([XBLOCK, 1], 0.0, tl.float32)`: a column to begin with. `tl.maximum(a, b)`: the larger, element
#   by element.
# - `by_tiles` of this lesson is a product in tiles, in plain PyTorch: how a result grows from step to step.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# The first sweep keeps `largest` and `total` of what it saw, both of shape `[XBLOCK, 1]`; the second one
# stores.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# When the maximum grows from `a` to `b`, what was summed is too large by `exp(b - a)`.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# Begin with a finite number that is smaller than all: minus infinity minus minus infinity is NaN.
#
# </details>


# %% name="ex5-answer" tags=["answer"]
def online_softmax(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    """The softmax of each row, in two sweeps."""
    ### BEGIN SOLUTION
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    largest = tl.full([XBLOCK, 1], -1e30, tl.float32)
    total = tl.full([XBLOCK, 1], 0.0, tl.float32)
    for start in range(0, rnumel, RBLOCK):
        columns = start + tl.arange(0, RBLOCK)[None, :]
        mask = (rows < xnumel) & (columns < rnumel)
        tile = tl.load(in_ptr + rows * rnumel + columns, mask, other=float("-inf"))
        larger = tl.maximum(largest, tl.max(tile, 1)[:, None])
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(tile - larger), 1)[:, None]
        largest = larger
    for start in range(0, rnumel, RBLOCK):
        columns = start + tl.arange(0, RBLOCK)[None, :]
        mask = (rows < xnumel) & (columns < rnumel)
        tile = tl.load(in_ptr + rows * rnumel + columns, mask, other=float("-inf"))
        tl.store(out_ptr + rows * rnumel + columns, tl.exp(tile - largest) / total, mask)
    ### END SOLUTION


# %% name="ex5-check" tags=["nbval-check-output"]
check("ex5")


# %% name="ex5-wrong-three" tags=["wrong"] kind="misconception" says="expected at most 4096, got 6144"
def online_softmax(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    largest = tl.full([XBLOCK, 1], -1e30, tl.float32)
    total = tl.full([XBLOCK, 1], 0.0, tl.float32)
    for start in range(0, rnumel, RBLOCK):
        columns = start + tl.arange(0, RBLOCK)[None, :]
        mask = (rows < xnumel) & (columns < rnumel)
        tile = tl.load(in_ptr + rows * rnumel + columns, mask, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(tile, 1)[:, None])
    for start in range(0, rnumel, RBLOCK):
        columns = start + tl.arange(0, RBLOCK)[None, :]
        mask = (rows < xnumel) & (columns < rnumel)
        tile = tl.load(in_ptr + rows * rnumel + columns, mask, other=float("-inf"))
        total += tl.sum(tl.exp(tile - largest), 1)[:, None]
    for start in range(0, rnumel, RBLOCK):
        columns = start + tl.arange(0, RBLOCK)[None, :]
        mask = (rows < xnumel) & (columns < rnumel)
        tile = tl.load(in_ptr + rows * rnumel + columns, mask, other=float("-inf"))
        tl.store(out_ptr + rows * rnumel + columns, tl.exp(tile - largest) / total, mask)


# %% name="ex5-wrong-uncorrected" tags=["wrong"] kind="misconception" says="2 x 128: expected float32[4, 512]"
def online_softmax(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    largest = tl.full([XBLOCK, 1], -1e30, tl.float32)
    total = tl.full([XBLOCK, 1], 0.0, tl.float32)
    for start in range(0, rnumel, RBLOCK):
        columns = start + tl.arange(0, RBLOCK)[None, :]
        mask = (rows < xnumel) & (columns < rnumel)
        tile = tl.load(in_ptr + rows * rnumel + columns, mask, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(tile, 1)[:, None])
        total += tl.sum(tl.exp(tile - largest), 1)[:, None]
    for start in range(0, rnumel, RBLOCK):
        columns = start + tl.arange(0, RBLOCK)[None, :]
        mask = (rows < xnumel) & (columns < rnumel)
        tile = tl.load(in_ptr + rows * rnumel + columns, mask, other=float("-inf"))
        tl.store(out_ptr + rows * rnumel + columns, tl.exp(tile - largest) / total, mask)


# %% name="ex5-wrong-no-tail" tags=["wrong"] kind="visible-only" says="online_softmax"
def online_softmax(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    largest = tl.full([XBLOCK, 1], -1e30, tl.float32)
    total = tl.full([XBLOCK, 1], 0.0, tl.float32)
    for start in range(0, rnumel // RBLOCK * RBLOCK, RBLOCK):
        columns = start + tl.arange(0, RBLOCK)[None, :]
        tile = tl.load(in_ptr + rows * rnumel + columns, rows < xnumel, other=float("-inf"))
        larger = tl.maximum(largest, tl.max(tile, 1)[:, None])
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(tile - larger), 1)[:, None]
        largest = larger
    for start in range(0, rnumel, RBLOCK):
        columns = start + tl.arange(0, RBLOCK)[None, :]
        mask = (rows < xnumel) & (columns < rnumel)
        tile = tl.load(in_ptr + rows * rnumel + columns, mask, other=float("-inf"))
        tl.store(out_ptr + rows * rnumel + columns, tl.exp(tile - largest) / total, mask)


# %% name="ex5-wrong-scan" tags=["wrong"] kind="built-in" says="got a use of"
def online_softmax(in_ptr, out_ptr, xnumel, rnumel, XBLOCK, RBLOCK):
    rows = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    columns = tl.arange(0, RBLOCK)[None, :]
    tile = tl.load(in_ptr + rows * rnumel + columns)
    tl.store(out_ptr + rows, tl.associative_scan(tile, 1, tl.maximum))


# %% [markdown]
# **Exercise 6 · Share a row** (hard, 4 points, optional). `share(plan, options)` takes the place of the rule
# `triton:split`. Kernels whose reduction is `"looped"` and that have fewer than 128 rows are to be split:
# set `plan.reduction = "split"` and `plan.parts` so that at least 128 programs run, and each has at
# least 512 elements. All others stay as they are.

# %% [markdown]
# **You will need**
#
# - `plan.reduction`, `plan.rows`, `plan.row_length`, `plan.parts`: to read, and two of them to set.
# - Two looped plans: one with `plan.rows == 4` and `plan.row_length == 2**18` is split, one with 512 rows
#   stays as it is.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# `plan.rows` rows in `n` parts each make `plan.rows * n` programs.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Round up: `-(-a // b)` is the smallest whole number that is at least `a / b`.
#
# </details>


# %% name="ex6-answer" tags=["answer"]
def share(plan, options):
    """Split a looped reduction of fewer than 128 rows into parts of at least 512 elements."""
    ### BEGIN SOLUTION
    if plan.reduction == "looped" and plan.rows < 128:
        plan.reduction, plan.parts = "split", -(-128 // plan.rows)
    ### END SOLUTION


# %% name="ex6-check" tags=["nbval-check-output"]
check("ex6")


# %% name="ex6-wrong-fixed" tags=["wrong"] kind="misconception" says="programs: expected at least 128, got"
def share(plan, options):
    if plan.reduction == "looped" and plan.rows < 128:
        plan.reduction, plan.parts = "split", 16


# %% name="ex6-wrong-always" tags=["wrong"] kind="visible-only" says="kernels: expected 1, got 2"
def share(plan, options):
    if plan.reduction == "looped":
        plan.reduction, plan.parts = "split", max(-(-128 // plan.rows), 2)


# %% name="ex6-wrong-crumbs" tags=["wrong"] kind="visible-only" says="a part: expected at least 512, got"
def share(plan, options):
    if plan.reduction == "looped" and plan.rows < 128:
        plan.reduction, plan.parts = "split", 128


# %% name="ex6-wrong-built-in" tags=["wrong"] kind="built-in" says="got a use of"
def share(plan, options):
    from minicompile.plugins.split_reductions.choose import choose_split

    choose_split(plan, options)


# %% [markdown]
# **Exercise 7 · Write the template** (hard, 4 points, optional). `template(printer, total)` prints what a
# program of a product does; `total` is the name of its tile. Holes are methods of `printer`: `tile()` prints
# which tile it is; `with printer.steps():` prints the loop over the terms; inside it `left()` and `right()`
# print the loads of a step and return the names of both tiles; `epilogue()` prints all that follows the
# product. `printer.line(text)` prints a line of yours. `kernel_template("product")` gets your template.

# %% [markdown]
# **You will need**
#
# - `printer.tile()`, `printer.left()`, `printer.right()`, `printer.epilogue()`: print their lines; the two
#   in the middle return a name.
# - `with printer.steps():`: what is printed inside stands in the loop.
# - `printer.line("total = 0")`: a line of your own, with the right indentation.
# - In Triton: `tl.zeros([YBLOCK, XBLOCK], tl.float32)`, and `tl.dot(a, b, c, input_precision="ieee")`, the
#   product of two tiles added to `c`; the last argument keeps float32 exact.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# You write two lines of Triton, the others are printed by holes; the picture above shows the order.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# A tile of zeros called `total` before the loop; in it, `total` becomes a `tl.dot` of both loads, added to
# itself.
#
# </details>


# %% name="ex7-answer" tags=["answer"]
def template(printer, total):
    """Print the lines of a matrix product's program; `total` names its tile."""
    ### BEGIN SOLUTION
    printer.tile()
    printer.line(f"{total} = tl.zeros([YBLOCK, XBLOCK], tl.float32)")
    with printer.steps():
        left, right = printer.left(), printer.right()
        printer.line(f"{total} = tl.dot({left}, {right}, {total}, input_precision='ieee')")
    printer.epilogue()
    ### END SOLUTION


# %% name="ex7-check" tags=["nbval-check-output"]
check("ex7")


# %% name="ex7-wrong-last-step" tags=["wrong"] kind="misconception" says="of 16: expected float32[32, 32]"
def template(printer, total):
    printer.tile()
    with printer.steps():
        left, right = printer.left(), printer.right()
        printer.line(f"{total} = tl.dot({left}, {right}, input_precision='ieee')")
    printer.epilogue()


# %% name="ex7-wrong-own-store" tags=["wrong"] kind="visible-only" says="dense of [40, 100]"
def template(printer, total):
    printer.tile()
    printer.line(f"{total} = tl.zeros([YBLOCK, XBLOCK], tl.float32)")
    with printer.steps():
        left, right = printer.left(), printer.right()
        printer.line(f"{total} = tl.dot({left}, {right}, {total}, input_precision='ieee')")
    printer.line(f"tl.store(out_ptr0 + (32 * yindex + xindex), {total}, ymask & xmask)")


# %% name="ex7-wrong-square" tags=["wrong"] kind="visible-only" says="expected a result, got"
def template(printer, total):
    printer.tile()
    printer.line(f"{total} = tl.zeros([XBLOCK, XBLOCK], tl.float32)")
    with printer.steps():
        left, right = printer.left(), printer.right()
        printer.line(f"{total} = tl.dot({left}, {right}, {total}, input_precision='ieee')")
    printer.epilogue()


# %% name="ex7-wrong-built-in" tags=["wrong"] kind="built-in" says="got a use of ProductPrinter"
def template(printer, total):
    from minicompile.plugins.matrix_products.template import ProductPrinter

    ProductPrinter.program(printer)


# %% [markdown]
# ## Go deeper
#
# - `minicompile/codegen/triton_tiles.py`, `minicompile/codegen/triton.py`: where a tile lies, and its values;
#   `minicompile/codegen/triton_rules.py`: the plan's rules.
# - `minicompile/plugins/split_reductions/split.py`: split reductions, and how their parts are combined.
# - `minicompile/plugins/matrix_products/`: the template, tiles, rivals.
# - `minicompile/plugins/fast_launcher/launch.py`: a launcher that knows its arguments.
# - `minicompile/debug/triton_interpreter.py`: the interpreter, and what had to be put right in it.
# - `torch/_inductor/codegen/triton.py`, `torch/_inductor/runtime/triton_heuristics.py`.
#
# **Where you are.** Kernels are written and compiled. Lesson 15 asks what happens between them.

# %% name="corridor"
corridor("codegen", "runtime")
