# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 15 · What is left when kernels are fast?
#
# Kernels are as fast as memory allows. Now everything between them shows: Python that calls them,
# memory that is asked for and given back, compiling itself. After this lesson you can
#
# - read the generated wrapper, and count what a call costs besides its kernels,
# - explain what a CUDA graph records, and which traps come with it,
# - say when a buffer's memory may be used again, and when a kernel may write in place.
#
# Our example: two matrix products with something small between them.

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
from minicompile.lessons.gpu import on_gpu
from minicompile.lessons.model import GPT, GPTConfig

check = checks("15")

# %% name="example"


def f(x, w):
    return torch.relu(torch.relu(x @ w) * 2) @ w


torch.manual_seed(0)
x, w = torch.randn(8, 8), torch.randn(8, 8)
trace = mc.trace(f, x, w)
trace.wrapper

# %% [markdown]
# This is what a call of the compiled function runs: the *wrapper*, generated Python. It calls one
# kernel of ours and two of a library; all the rest is about memory. `empty_strided_cpu` allocates,
# `del` frees, and `buf1 = buf0` gives a new name to old memory. Now one block of the lesson model:

# %% name="picture"
block = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)).blocks[0].eval()
h = torch.randn(2, 16, 32)
with torch.no_grad():
    block_trace = mc.trace(block, h)
plan = block_trace.schedule.memory
plan

# %% [markdown]
# The *memory plan* of the block: one row for each piece of memory, from the step that fills it to
# the last that reads it. Several buffers live in one piece, one after the other.
#
# ## The time between kernels
#
# A *launch* is the call that starts a kernel. `mc.launches` puts a clock beside every line of the
# wrapper. (Times differ from machine to machine, so nothing is kept here: run the cell.)

# %% name="launches" tags=["varies"]
with torch.no_grad():
    times = mc.launches(mc.compile(block), h)
times

# %% [markdown]
# Look at the share called `python`, and at how short each kernel is. On a GPU it is worse: Python
# only queues a kernel, and if it queues slower than the GPU computes, the GPU waits. A *CUDA graph* is
# the cure: record all launches once, with their addresses, and let the driver *replay* the list.
# Here is a model of four blocks, measured. **Predict, then run:** how much faster is the replay?


# %% name="gpu-replay" tags=["gpu"]
@on_gpu("15-replay")
def launched_and_replayed() -> str:
    """The same kernels, launched one by one from Python and replayed as a CUDA graph."""
    import time

    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=4)).cuda().eval()
    tokens = torch.randint(0, 96, (2, 32), device="cuda")
    compiled = mc.compile(model)

    def microseconds(run, calls=300):
        for _ in range(30):
            run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / calls * 1e6

    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what happens once only happens here
            for _ in range(3):
                compiled(tokens)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = compiled(tokens)
        other = torch.randint(0, 96, (2, 32), device="cuda")
        tokens.copy_(other)
        graph.replay()
        torch.testing.assert_close(logits, model(other), rtol=1e-3, atol=1e-4)
        times = {
            "eager": microseconds(lambda: model(tokens)),
            "compiled, launched from Python": microseconds(lambda: compiled(tokens)),
            "compiled, replayed as a CUDA graph": microseconds(graph.replay),
        }
        schedule = mc.trace(model, tokens).schedule
        line = mc.launches(compiled, tokens)[0].summary
    kernels, calls = len(schedule.kernels), len(schedule.nodes) - len(schedule.kernels)
    lines = [f"a GPT of four blocks, 2 x 32 tokens: {kernels} kernels, {calls} library calls"]
    lines += [f"{name:<36} {time:7.0f} us a call" for name, time in times.items()]
    lines.append(f"line by line, with clocks: {line}")
    return "\n".join([*lines, "replayed with other tokens in the same memory: equal to eager"])


# %% name="gpu-replay-result"
launched_and_replayed

# %% [markdown]
# The kernels are the same in the last two rows; only who launches them differs. (A clock on the GPU
# costs it some time, too: with one after every line it was busier than in the replay.) The cell shows
# that a few lines around a compiled function do; `mc.compile(model, mode="reduce-overhead")` does it
# for you, and takes care of inputs that move and results that you keep.
#
# ## A CUDA graph without a GPU
#
# The idea needs no GPU. `launching` gives a compiled graph as `run(inputs, do)`: its wrapper, with
# every launch handed to `do`, which must make it and may do more. So we can write down what happens.

# %% name="recording"
from minicompile.lessons.pictures import corridor, slides
from minicompile.lessons.replay import launching

run = launching(trace)
recorded = []


def noting(function, *arguments, **named):
    recorded.append((getattr(function, "__name__", "kernel"), [*arguments, *named.values()]))
    return function(*arguments, **named)


run([x, w], noting)
addresses = list(dict.fromkeys(t.data_ptr() for _, tensors in recorded for t in tensors))


def launch_text(launch):
    name, tensors = launch
    return f"{name}({', '.join(f'memory {addresses.index(t.data_ptr())}' for t in tensors)})"


slides(
    "What was recorded",
    *((f"launch {i}", "", launch_text(launch)) for i, launch in enumerate(recorded, 1)),
)

# %% [markdown]
# A recorded launch knows addresses, not variables. Three things follow. New inputs must be copied
# into the old memory. The results stand in the same memory each time, so whoever keeps one must copy
# it. And all of Python is gone: an `if`, a print, a shape that changes are not in the list. You write
# the recorder in exercise 5, and in exercise 6 the rule that says which calls may be replayed.
#
# ## When is memory free again?
#
# The schedule knows all steps in advance. *Liveness* is a walk over them: a buffer is *alive* from
# the step that writes it to the last step that touches it. What is dead can be used again.

# %% name="alive"


def alive_at(step):
    """Each piece of memory at this step: how large it is, and whose it is."""
    lines = []
    for piece in plan.blocks:
        bar = "#" * (piece.bytes // 1024) if piece.born <= step <= piece.dies else ""
        lines.append(f"{' -> '.join(piece.buffers):42} {bar}")
    return "\n".join(lines)


slides(
    "One # for each KiB alive",
    *(
        (f"step {step}", f"{plan.live_bytes[step] // 1024} KiB", alive_at(step))
        for step in range(len(block_trace.schedule.nodes))
    ),
)

# %% [markdown]
# Move the slider and watch the memory being handed on. The *peak* is the most that is alive at any
# step. **Predict, then run:** what would the block need if nothing were ever freed, and what does
# eager need, which frees, but makes a tensor for each operation?

# %% name="peaks"
for name, count in (
    ("nothing freed", plan.buffer_bytes),
    ("eager", block_trace.eager_bytes()),
    ("as planned", plan.peak_bytes),
):
    print(f"{name:14} {count / 1024:4.0f} KiB")
print(
    "buffers that never reach memory, since one kernel writes and reads them:", len(plan.internal)
)

# %% [markdown]
# A plan is a claim about memory. Does it hold? A GPU's allocator counts every byte, so it can be
# asked. This is a larger model, measured on one:


# %% name="gpu-peak" tags=["gpu"]
@on_gpu("15-peak")
def peak_measured() -> str:
    """Most memory that a forward pass holds at once: planned, and measured by the GPU's allocator."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_embd=256, block_size=256)).cuda().eval()
    tokens = torch.randint(0, 96, (16, 256), device="cuda")

    def peak(run):
        run()  # what is allocated once is allocated here
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    with torch.no_grad():
        trace = mc.trace(model, tokens)
        plan = trace.schedule.memory
        compiled = mc.compile(model)
        found = {
            "planned, each buffer its own memory": plan.buffer_bytes,
            "planned, eager's operators": trace.eager_bytes(),
            "measured, eager": peak(lambda: model(tokens)),
            "planned, with reuse": plan.peak_bytes,
            "measured, compiled": peak(lambda: compiled(tokens)),
        }
    return "\n".join(f"{name:<38} {count / 2**20:7.1f} MiB" for name, count in found.items())


# %% name="gpu-peak-result"
peak_measured

# %% [markdown]
# The compiled model needs just what was planned; eager needs somewhat more than its operators'
# results, for what a library operator allocates inside is hidden from a plan.
#
# ## In place
#
# Still better than memory of a dead buffer is that of one that dies *in this very step*: a kernel may
# write its result over its input, *in place*, if each element is read where the new one is written,
# and never after. Every case that was considered is on record:

# %% name="in-place"
for decision in plan.decisions:
    print(decision)

# %% [markdown]
# The refusal at the transpose is the instructive one: `buf14` at some place needs an element of
# `buf13` from another place, which may have been overwritten already.
#
# **Break it.** We replace the rule by one that never refuses. The function adds a matrix to its own
# transpose. **Predict, then run:** is the result wrong?

# %% name="break-it"
import contextlib
import warnings
from unittest import mock

from minicompile.codegen import generate
from minicompile.scheduling import in_place


def turned(x, w):
    y = x @ w
    return (y + y.t()) @ w


@contextlib.contextmanager
def careless(second_look=True):
    """No refusals; and without the second look, no check of finished kernels either."""
    mc.reset()
    with contextlib.ExitStack() as undo:
        undo.enter_context(mock.patch.object(in_place, "refusal", lambda *given: None))
        if not second_look:
            undo.enter_context(mock.patch.object(generate, "check_in_place", lambda *given: None))
        yield
    mc.reset()


def off_by(compiled):
    return round((compiled(x, w) - turned(x, w)).abs().max().item(), 1)


print("the compiler as it is: off by", off_by(mc.compile(turned)))
with careless(), warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    print("a rule that never refuses: off by", off_by(mc.compile(turned)))
for warning in told:
    print("  it said:", str(warning.message).splitlines()[0].split(": ", 1)[1])
with careless(second_look=False):
    print("without the second look, too: off by", off_by(mc.compile(turned)))

# %% [markdown]
# The first mistake did no harm: finished kernels are looked at again, and a frame whose compilation
# fails runs in eager. It took two faults to get a wrong number. Both are undone.
#
# ## The second start
#
# The first call compiled: Python ran, then a C++ compiler. A *warm start* finds the built library on
# disk. Its name is a *cache key*, a hash of all that determines it. The cell counts how often a
# C++ compiler is started, in an empty cache. **Predict, then run:** which calls start one?

# %% name="warm-start"
from minicompile.ops import build


def compilers_started(options=None):
    """A first call, as a new process would make it."""
    mc.reset()
    with mock.patch.object(build.subprocess, "Popen", wraps=build.subprocess.Popen) as popen:
        mc.compile(f, options=options)(x, w)
    return popen.call_count


with mc.fresh_cache():
    print("cold:               ", compilers_started())
    print("warm:               ", compilers_started())
    print("with another flag:  ", compilers_started({"cpp_flags": ("-O3",)}))
    print("as before, warm:    ", compilers_started())

# %% [markdown]
# In the key are the kernels' text, the compiler, its version and flags, and the processor. One left
# out, and a warm start could load a library that was built for something else. Note what isn't
# kept: capture, autograd, lowering and scheduling run again; only their text is recognised.

# %% [markdown]
# ## A start without Python
#
# A warm start still runs Python, and Python loads torch. To do without both, everything must be known
# ahead of time: one graph with no break in it, and conditions on the arguments where guards were.
# `mc.export` makes such an *exported program*; a size with a `Dim` may differ from call to call.

# %% name="export"
from minicompile.lessons.train import train

torch.manual_seed(0)
gpt = GPT()
train(gpt, steps=60, compile_fn=mc.compile)
prompt = torch.randint(gpt.config.vocab_size, (1, 8))
tokens = mc.Dim("tokens", max=gpt.config.block_size)
exported = mc.export(gpt.eval(), (prompt,), dynamic_shapes=({1: tokens},))
exported

# %% [markdown]
# `exported(prompt)` runs with eager operators. `mc.aot_package` compiles it to a *compiled package*:
# kernels, matrix products and a wrapper, now in C, in one shared library, and the weights beside it.
# **Predict, then run:** what else will it need?

# %% name="package" tags=["varies"]
import subprocess
import tempfile
from pathlib import Path

folder = mc.aot_package(exported, Path(tempfile.mkdtemp(), "gpt"))
for file in sorted(folder.iterdir()):
    print(f"{file.stat().st_size:>8,} bytes  {file.name}")
try:
    print(subprocess.run(["ldd", folder / "libGPT.so"], capture_output=True, text=True).stdout)
except FileNotFoundError:
    print("(no ldd here: on macOS it is otool -L)")

# %% [markdown]
# The C library and one for threads: neither torch nor Python. The wrapper is called model.c; each line
# of yours stands there above the calls that it became. Now the GPT answers from C: this program extends
# a text by the character that the model finds most likely, until it is as long as it may be.

# %% name="c-program"
PROGRAM = r"""
#include <stdlib.h>
#include "minicompile_load.h"

int main(int count, char** given) {                  // FOLDER MOST CHARACTER ...
    mc_library gpt = mc_load(given[1]);              // checks every file, then loads the library
    mc_model* model = gpt.handle ? gpt.open(given[1]) : NULL;
    if (!model) return puts(gpt.handle ? gpt.error_text() : gpt.error), 1;
    int64_t text[1024], length = 0, most = atoi(given[2]);
    for (int i = 3; i < count; i++) text[length++] = atoi(given[i]);
    while (length < most) {
        mc_tensor idx = {text, MC_INT64, 2, {1, length}}, logits;
        if (gpt.run(model, &idx, 1, &logits, 1)) return puts(gpt.error_text()), 1;
        const float* last = (float*)logits.data + (length - 1) * logits.shape[2];
        int64_t best = 0;
        for (int64_t i = 1; i < logits.shape[2]; i++) if (last[i] > last[best]) best = i;
        text[length++] = best;
        gpt.free(&logits, 1);
    }
    for (int64_t i = 0; i < length; i++) printf("%ld ", (long)text[i]);
    return 0;
}
"""
(folder / "answer.c").write_text(PROGRAM)
build = ["cc", "-O2", "-o", folder / "answer", folder / "answer.c", "-ldl"]
_ = subprocess.run(build, check=True)

# %% name="c-answer"
from minicompile.lessons.data import decode, encode
from minicompile.lessons.model import generate

start = encode("def main(")[None]
run = [folder / "answer", folder, gpt.config.block_size, *start[0].tolist()]
said = subprocess.run(list(map(str, run)), capture_output=True, text=True, check=True).stdout
from_c = decode(list(map(int, said.split())))
from_python = decode(generate(gpt, start, gpt.config.block_size - start.size(1))[0])
print("C says what Python says:", from_c == from_python)
print("it has the right length:", len(from_c) == gpt.config.block_size)

# %% [markdown]
# After sixty steps of training it has little to say (`print(from_c)`), but it says it without Python.
# And the conditions? A call of the library checks them first, as `mc.load_package` does:

# %% name="package-refuses"
loaded = mc.load_package(folder)
print("as eager:", torch.allclose(loaded(start), gpt(start), atol=1e-5))
try:
    loaded(torch.zeros(1, gpt.config.block_size + 1, dtype=torch.int64))
except mc.errors.MinicompileError as error:
    print(error)

# %% [markdown]
# > **In torch.compile.** The same wrapper with the same words is written by
# > `torch/_inductor/codegen/wrapper.py`; memory is handed on by `codegen/memory_planning.py` and
# > `AllocateLine`. CUDA graphs come with `mode="reduce-overhead"`: `torch/_inductor/cudagraph_trees.py`
# > lets the next run overwrite results; ours copies those that you hold. Its cache keeps whole graphs
# > (`FxGraphCache` in `codecache.py`). `torch.export` and AOT Inductor make packages too; their
# > libraries need torch's. Below, live: the memory lines of its wrapper for our `f`.

# %% name="torch-compile"
from torch._functorch import config as aot_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import get_code

# nothing is built, and nothing kept in their cache
with inductor_config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
    code = "".join(get_code(torch.compile(f), x, w))
for line in code.splitlines():
    if "buf" in line and ("empty_strided" in line or "reuse" in line or "extern" in line):
        print(line.strip())

# %% [markdown]
# ## Recap
#
# 1. What a call runs is a wrapper: Python that allocates, launches and frees.
# 2. If kernels are short, launching them costs more than running them; a CUDA graph replays the list.
# 3. A replay knows addresses: inputs are copied in, results copied out, Python decisions are frozen.
# 4. Liveness says when memory is free again, and a kernel may write in place of what it reads last.
# 5. A warm start loads a library whose key covers everything that it was built from; a package starts
#    without Python, and checks conditions where guards were.

# %% [markdown]
# ## Exercises
#
# **Exercise 1 · Count the calls** (easy, 2 points). `count_calls(wrapper)` gives what a wrapper's text
# calls, as `{"kernel": ..., "library": ..., "memory": ...}`. Kernels are those of `wrapper.kernels`, by their
# `name`; library calls begin with `torch.` or `aten`; memory calls are `empty_strided_cpu`,
# `empty_large`, `reinterpret` and `to_layout`. `wrapper.lines` are lines with a `text`; count in `def call`.

# %% [markdown]
# **You will need**
#
# - `wrapper.kernels`: `[kernel.name for kernel in trace.wrapper.kernels]` gives `['cpp_fused_relu_mul_1']`.
# - `wrapper.text`: the whole text; `wrapper.text.partition("def call(args):")[2]` is what comes after that
#   line.
# - `re.findall(r"([\w.]+)\(", "a(b.c(x))")` gives `['a', 'b.c']`: names before an opening bracket.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# A line can hold two calls: `torch.mm(buf0, reinterpret(w, ...), out=buf1)`.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Search for names and opening brackets, or walk the tree that `ast.parse(wrapper.text)` gives; then look in
# which of the three lists a name is.
#
# </details>


# %% name="ex1-answer" tags=["answer"]
def count_calls(wrapper):
    """Calls in a wrapper by kind."""
    ### BEGIN SOLUTION
    import re

    found = {"kernel": 0, "library": 0, "memory": 0}
    kernels = {kernel.name for kernel in wrapper.kernels}
    text = wrapper.text.partition("def call(args):")[2]
    for name in re.findall(r"([\w.]+)\(", text):
        if name in kernels:
            found["kernel"] += 1
        elif name in ("empty_strided_cpu", "empty_large", "reinterpret", "to_layout"):
            found["memory"] += 1
        elif name.startswith(("torch.", "aten")):
            found["library"] += 1
    return found
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")


# %% name="ex1-wrong-lines" tags=["wrong"] kind="visible-only" says="the wrapper of heads_apart: expected"
def count_calls(wrapper):
    text = [line.text.strip() for line in wrapper.lines]
    kernels = tuple(kernel.name for kernel in wrapper.kernels)
    memory = sum(
        "empty_strided_cpu(" in t or (t.startswith("buf") and "reinterpret(" in t) for t in text
    )
    library = sum(t.startswith("torch.") for t in text)
    return {
        "kernel": sum(t.startswith(kernels) for t in text),
        "library": library,
        "memory": memory,
    }


# %% name="ex1-wrong-no-library" tags=["wrong"] kind="misconception" says="expected {'kernel': 1,"
def count_calls(wrapper):
    memory = wrapper.text.count("empty_strided_cpu(")
    return {"kernel": len(wrapper.kernels), "library": 0, "memory": memory}


# %% name="ex1-wrong-clock" tags=["wrong"] kind="built-in" says="got a use of launches"
def count_calls(wrapper):
    from minicompile.debug.launch_times import steps_of

    kinds = [step.kind for step in steps_of(wrapper)]
    return {"kernel": kinds.count("kernel"), "library": kinds.count("extern"), "memory": 0}


# %% [markdown]
# **Exercise 2 · Cut the calls** (solid, 3 points). `[torch.relu(x @ w) for w in weights]` makes two launches
# a weight. Write two functions that together give the same: `prepare(*weights)` is called once and gives
# one tensor; `heads_at_once(x, prepared, widths)` is compiled and may make two launches in all,
# whatever the weights. `widths` has the number of columns of each weight.

# %% [markdown]
# **You will need**
#
# - `torch.cat(weights, dim=1)`: columns side by side.
#   `torch.cat([torch.ones(2, 3), torch.ones(2, 4)], dim=1).shape` gives `torch.Size([2, 7])`.
# - Views cost no launch: `x[:, :3]`, `x.narrow(1, 0, 3)`, `x.split([3, 4], dim=1)`.
# - `len(mc.trace(heads_at_once, x, prepared, widths).schedule.nodes)`: how many launches it makes.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# One product with all columns side by side; `prepare` may do work that is done once.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Cut the result behind the `torch.relu`, by an operation that doesn't copy.
#
# </details>


# %% name="ex2-answer" tags=["answer"]
def prepare(*weights):
    """Everything of the weights that one product needs."""
    ### BEGIN SOLUTION
    return torch.cat(weights, dim=1)
    ### END SOLUTION


def heads_at_once(x, prepared, widths):
    """A list: relu(x @ w) of every weight."""
    ### BEGIN SOLUTION
    return list(torch.relu(x @ prepared).split(list(widths), dim=1))
    ### END SOLUTION


# %% name="ex2-check" tags=["nbval-check-output"]
check("ex2")


# %% name="ex2-wrong-split-first" tags=["wrong"] kind="misconception" says="expected at most 2, got"
def prepare(*weights):
    return torch.cat(weights, dim=1)


def heads_at_once(x, prepared, widths):
    return [torch.relu(x @ w) for w in prepared.split(list(widths), dim=1)]


# %% name="ex2-wrong-thirds" tags=["wrong"] kind="visible-only" says="results: expected 2, got 3"
def prepare(*weights):
    return torch.cat(weights, dim=1)


def heads_at_once(x, prepared, widths):
    return list(torch.relu(x @ prepared).chunk(3, dim=1))


# %% name="ex2-wrong-compiled" tags=["wrong"] kind="built-in" says="got a use of"
def prepare(*weights):
    return torch.cat(weights, dim=1)


def heads_at_once(x, prepared, widths):
    def heads(x, prepared):
        return [torch.relu(x @ w) for w in prepared.split(list(widths), dim=1)]

    return mc.compile(heads)(x, prepared)


# %% [markdown]
# **Exercise 3 · Liveness** (solid, 3 points). `last_use(touched)` gets a list with the names of the buffers
# that each step touches, and gives the last step of each buffer: `{"a": 1, ...}`, steps counted from 0. The
# compiler's own is replaced by yours; the block must stay right and its peak as low as it was.

# %% [markdown]
# **You will need**
#
# - `touched`: such as `[["a"], ["a", "b"], ["b"]]`, for which the answer is `{"a": 1, "b": 2}`.
# - `enumerate(touched)`: each step with its number.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# A buffer may rest for some steps and be touched again: think of the `x +` around attention.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Go through the steps in order: what is written into a dict last, stays.
#
# </details>


# %% name="ex3-answer" tags=["answer"]
def last_use(touched):
    """The last step that touches each buffer."""
    ### BEGIN SOLUTION
    found = {}
    for step, names in enumerate(touched):
        for name in names:
            found[name] = step
    return found
    ### END SOLUTION


# %% name="ex3-check" tags=["nbval-check-output"]
check("ex3")


# %% name="ex3-wrong-first" tags=["wrong"] kind="misconception" says="'b': 2, 'y': 2}, got"
def last_use(touched):
    found = {}
    for step, names in enumerate(touched):
        for name in names:
            found.setdefault(name, step)
    return found


# %% name="ex3-wrong-idle" tags=["wrong"] kind="visible-only" says="'b': 3}, got {"
def last_use(touched):
    found = {}
    for step in reversed(range(len(touched))):
        if not touched[step]:
            break
        for name in touched[step]:
            found.setdefault(name, step)
    return found


# %% name="ex3-wrong-borrowed" tags=["wrong"] kind="built-in" says="got a use of"
def last_use(touched):
    from minicompile.scheduling.memory import last_uses

    return last_uses(touched)


# %% [markdown]
# **Exercise 4 · In place, if that is right** (hard, 4 points). `why_not(node, old, new)` says why the kernel
# of `node` can't write buffer `new` over buffer `old`, or `None` if it can. `node.bodies` are the loop
# bodies that share the kernel; each has `loads` and `stores`: values with `buffer`, `index`, `mask`
# and `indirect`. You may refuse every kernel that has `node.reduction_ranges`. The compiler uses your
# rule, and its second look is off.

# %% [markdown]
# **You will need**
#
# - `node.reduction_ranges`: empty if there is no reduction. `node.bodies`: each has `loads` and `stores`.
# - A load or store has `buffer`, `index`, `mask` (None if there is none) and `indirect` (true if its place
#   comes from another tensor). A plain store has `kind` `"store"`.
# - `plan.decisions` above, and their reasons.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Find the store of `new` and all loads of `old`. Where must they stand? Several loads may read `old`.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# An element may be overwritten when nobody needs it any more: where every load is at the index of the
# store.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# Refuse what can't be known: a load with a mask, or a place from another tensor.
#
# </details>


# %% name="ex4-answer" tags=["answer"]
def why_not(node, old, new):
    """A reason not to write `new` in place of `old`, or None."""
    ### BEGIN SOLUTION
    if node.reduction_ranges:
        return "a loop over the row may read an element again"
    loads = [v for body in node.bodies for v in body.loads if v.buffer == old]
    [store] = [v for body in node.bodies for v in body.stores if v.buffer == new]
    if store.kind != "store" or store.indirect:
        return "the places that are written are known only at run time"
    for load in loads:
        if load.index != store.index or load.indirect or load.mask is not None:
            return "an element is read where another one is written"
    return None
    ### END SOLUTION


# %% name="ex4-check" tags=["nbval-check-output"]
check("ex4")


# %% name="ex4-wrong-alone" tags=["wrong"] kind="misconception" says="in bordered: expected 1, got 0"
def why_not(node, old, new):
    loads = [v for body in node.bodies for v in body.loads]
    return "it reads other buffers, too" if any(v.buffer != old for v in loads) else None


# %% name="ex4-wrong-first-load" tags=["wrong"] kind="visible-only" says="turned(x, w): expected float32"
def why_not(node, old, new):
    if node.reduction_ranges:
        return "a reduction"
    load = next(v for body in node.bodies for v in body.loads if v.buffer == old)
    [store] = [v for body in node.bodies for v in body.stores if v.buffer == new]
    return None if load.index == store.index else "it is read elsewhere"


# %% name="ex4-wrong-shape" tags=["wrong"] kind="misconception" says="the model's block: expected float32"
def why_not(node, old, new):
    return "a reduction" if node.reduction_ranges else None


# %% name="ex4-wrong-borrowed" tags=["wrong"] kind="built-in" says="got a use of"
def why_not(node, old, new):
    from minicompile.scheduling.in_place import refusal

    return refusal(node, old, new)


# %% [markdown]
# **Exercise 5 · A replay list** (hard, 4 points). `record(run, inputs)` calls `run` once, with a list
# of tensors and your `do`; `do(function, *arguments, **named)` makes a launch. It gives back
# `replay(new_inputs)`, which gives the results (a tuple of tensors) for new numbers of the same shapes,
# without `run`. Results of an earlier replay must stay as they are.

# %% [markdown]
# **You will need**
#
# - `run(inputs, do)`: gives a tuple of tensors; it makes each launch by
#   `do(function, *arguments, **named)`, and expects what `do` returns to be what `function` gave. `noting`
#   above is such a `do`.
# - `old.copy_(new)`: new numbers in old memory. `tensor.clone()`: a copy in new memory.

# %% [markdown]
# <details><summary>Hint 1 of 3</summary>
#
# Write a `do` that keeps function and arguments in a list, and makes the launch.
#
# </details>
#
# <details><summary>Hint 2 of 3</summary>
#
# Keep the tensors that you pass to `run`: later launches read those. A replay first copies the new numbers
# there.
#
# </details>
#
# <details><summary>Hint 3 of 3</summary>
#
# The tensors that `run` returned are where every replay's results stand: give copies away.
#
# </details>


# %% name="ex5-answer" tags=["answer"]
def record(run, inputs):
    """Run once, noting each launch; a function that replays them on new inputs."""
    ### BEGIN SOLUTION
    launches = []

    def do(function, *arguments, **named):
        launches.append((function, arguments, named))
        return function(*arguments, **named)

    fixed = [tensor.clone() for tensor in inputs]
    results = run(list(fixed), do)

    def replay(new_inputs):
        for old, new in zip(fixed, new_inputs):
            old.copy_(new)
        for function, arguments, named in launches:
            function(*arguments, **named)
        return tuple(result.clone() for result in results)

    return replay
    ### END SOLUTION


# %% name="ex5-check" tags=["nbval-check-output"]
check("ex5")


# %% name="ex5-wrong-not-copied" tags=["wrong"] kind="misconception" says="replay 1 of chain: expected"
def record(run, inputs):
    launches = []

    def do(function, *arguments, **named):
        launches.append((function, arguments, named))
        return function(*arguments, **named)

    results = run(list(inputs), do)

    def replay(new_inputs):
        inputs[:] = new_inputs
        for function, arguments, named in launches:
            function(*arguments, **named)
        return tuple(result.clone() for result in results)

    return replay


# %% name="ex5-wrong-shared" tags=["wrong"] kind="visible-only" says="replay 1 of chain: expected"
def record(run, inputs):
    launches = []

    def do(function, *arguments, **named):
        launches.append((function, arguments, named))
        return function(*arguments, **named)

    fixed = [tensor.clone() for tensor in inputs]
    results = run(list(fixed), do)

    def replay(new_inputs):
        for old, new in zip(fixed, new_inputs):
            old.copy_(new)
        for function, arguments, named in launches:
            function(*arguments, **named)
        return results

    return replay


# %% name="ex5-wrong-wrapper" tags=["wrong"] kind="built-in" says="after 1 replays: expected 1, got 2"
def record(run, inputs):
    def do(function, *arguments, **named):
        return function(*arguments, **named)

    run(list(inputs), do)
    return lambda new_inputs: run(list(new_inputs), do)


# %% [markdown]
# **Exercise 6 · Run, record or replay?** (hard, 4 points). `what_to_do(now, before, recorded)` decides on one
# call. `now` lists the addresses of the inputs that are not copied yet, `before` those of the call before
# (`None` at the first), `recorded` those in the graph (`None` while there is none). Answer
# `("run", [])` at the first call, `("replay", [])` where a replay is right, else `("record", moved)`:
# the places in `now` of the inputs that moved since the call before. They are copied from then on, so copy no
# others: a model's parameters stay where they are. The compiler asks your rule; a stand-in for the
# GPU replays.

# %% [markdown]
# **You will need**
#
# - `now`, `before`, `recorded`: lists of addresses, such as `[16, 32]`, or `None`.
# - `what_to_do([16, 32], None, None)` is `("run", [])`; `what_to_do([16, 48], [16, 32], None)` is
#   `("record", [1])`; `what_to_do([16, 48], [16, 40], [16, 48])` is `("replay", [])`.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# A replay reads what stands at the recorded addresses. If an input lies elsewhere now, those are an earlier
# call's numbers.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# What if somebody replaces a parameter after the recording? It must be recorded anew.
#
# </details>


# %% name="ex6-answer" tags=["answer"]
def what_to_do(now, before, recorded):
    """What a call does, and which inputs are copied from now on."""
    ### BEGIN SOLUTION
    if now == recorded:
        return "replay", []
    if before is None:
        return "run", []
    return "record", [place for place in range(len(now)) if now[place] != before[place]]
    ### END SOLUTION


# %% name="ex6-check" tags=["nbval-check-output"]
check("ex6")


# %% name="ex6-wrong-stays" tags=["wrong"] kind="visible-only" says="expected float32[8, 8]"
def what_to_do(now, before, recorded):
    if recorded is not None:
        return "replay", []
    if before is None:
        return "run", []
    return "record", [place for place in range(len(now)) if now[place] != before[place]]


# %% name="ex6-wrong-all" tags=["wrong"] kind="misconception" says="copied: expected [], got ['a', 'w']"
def what_to_do(now, before, recorded):
    if now == recorded:
        return "replay", []
    return ("run", []) if before is None else ("record", list(range(len(now))))


# %% name="ex6-wrong-none" tags=["wrong"] kind="misconception" says="'record', 'record', 'record']"
def what_to_do(now, before, recorded):
    if now == recorded:
        return "replay", []
    return ("run", []) if before is None else ("record", [])


# %% name="ex6-wrong-since" tags=["wrong"] kind="misconception" says="'record', 'record', 'replay']"
def what_to_do(now, before, recorded):
    if now == recorded:
        return "replay", []
    if before is None:
        return "run", []
    recorded = recorded or now
    return "record", [place for place in range(len(now)) if now[place] != recorded[place]]


# %% name="ex6-wrong-never" tags=["wrong"] kind="misconception" says="got ['run', 'run', 'run', 'run']"
def what_to_do(now, before, recorded):
    return "run", []


# %% name="ex6-wrong-borrowed" tags=["wrong"] kind="built-in" says="got a use of"
def what_to_do(now, before, recorded):
    from minicompile.plugins.cuda_graphs.replay import next_step

    return next_step(now, before, recorded)


# %% [markdown]
# ## Go deeper
#
# - `minicompile/codegen/wrapper.py`: the writer of what a call runs.
# - `minicompile/scheduling/memory.py`, `minicompile/scheduling/in_place.py`: whose memory, and when.
# - `minicompile/ops/build.py`: the disk cache; `minicompile/ops/toolchain.py`: what is in its key.
# - `minicompile/runtime/fast_call.c`: a cheap launch.
# - `minicompile/plugins/cuda_graphs/replay.py`: when to record; `MINICOMPILE_LOGS=cudagraphs` tells it.
# - `torch/_inductor/codegen/memory_planning.py`, `torch/_inductor/codecache.py`: theirs.
# - `torch/_inductor/cudagraph_trees.py`: CUDA graphs that share memory.
#
# **Where you are.** The whole corridor is behind you. Lesson 16 is about what to do when it fails.

# %% name="corridor"
corridor("scheduling", "codegen", "runtime")
