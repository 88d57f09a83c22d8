# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 15 · What is left when kernels are fast?

# %% name="setup" tags=["setup"]
import torch

import minicompile as mc
from minicompile.lessons.exercise import checks
from minicompile.lessons.gpu import on_gpu
from minicompile.lessons.model import GPT, GPTConfig

check = checks("15")


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
        line = mc.launches(compiled, tokens).timelines[0].summary
    kernels, calls = len(schedule.kernels), len(schedule.nodes) - len(schedule.kernels)
    lines = [f"a GPT of four blocks, 2 x 32 tokens: {kernels} kernels, {calls} library calls"]
    lines += [f"{name:<36} {time:7.0f} us a call" for name, time in times.items()]
    lines.append(f"line by line, with clocks: {line}")
    return "\n".join([*lines, "replayed with other tokens in the same memory: equal to eager"])


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
        plan = mc.trace(model, tokens).schedule.memory
        compiled = mc.compile(model)
        found = {
            "planned, each buffer its own memory": plan.buffer_bytes,
            "planned, eager's operators": plan.eager_bytes,
            "measured, eager": peak(lambda: model(tokens)),
            "planned, with reuse": plan.peak_bytes,
            "measured, compiled": peak(lambda: compiled(tokens)),
        }
    return "\n".join(f"{name:<38} {count / 2**20:7.1f} MiB" for name, count in found.items())
