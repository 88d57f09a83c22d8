"""`python -m tests.compat.losing [PATH ...]`: take each private name away, one at a time, in a fresh process.

Every process compiles a GPT block forward and backward and a function with a break, explains and traces. The
table says of each name: the part that it belongs to, what went into graphs, and the reason of what did not.
Exit code 1 if anything raised, differed from eager, or ran in eager without a reason.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

PRIVATE = Path(__file__).parents[2] / "minicompile" / "compat" / "private.py"


def hide(path: str) -> None:
    """Make a private name count as gone, before anything of the package asks for it."""
    spec = importlib.util.spec_from_file_location("minicompile.compat.private", PRIVATE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.HIDDEN.add(path)


def try_without(path: str) -> dict[str, Any]:
    """What happens in this process without a name: {"graphs": n, "reasons": [ids], "named": bool}."""
    hide(path)
    import torch

    import minicompile as mc
    from minicompile.compat.private import NAMES
    from minicompile.lessons.model import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_embd=32))
    tokens = torch.randint(0, GPTConfig.vocab_size, (2, 8))
    expected = model(tokens)
    expected.square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    compiled = mc.compile(model)
    result = compiled(tokens)
    result.square().mean().backward()
    torch.testing.assert_close(result, expected)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(found, gradients)

    def breaks(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * 2
        print("between", end="\r")
        return y.cos() + 1

    x = torch.randn(5)
    broken = mc.compile(breaks)
    torch.testing.assert_close(broken(x), breaks(x))
    mc.explain(breaks)(x)
    stages = 0
    with contextlib.suppress(mc.Unsupported):  # a trace of what can't be compiled is a refusal
        trace = mc.trace(model, tokens)
        stages = len(trace.stages)
        str(trace)
    explained = [mc.explain(compiled)(tokens), mc.explain(broken)(x)]
    reasons = {found.id for one in explained for found in one.breaks} - {"print"}
    return {
        "part": NAMES[path].part if path in NAMES else "",
        "graphs": sum(one.graph_count for one in explained),
        "stages": stages,
        "reasons": sorted(reasons),
    }


def names() -> list[str]:
    """Every private name that the package takes, in the order of the files; asked in another process."""
    ask = "from minicompile.compat.private import all_names; print(*all_names())"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return done.stdout.split()


def in_fresh_process(path: str) -> dict[str, Any]:
    """What `try_without` gives in a process that has only imported torch, or {"raised": the error}."""
    import torch  # noqa: F401  (the child then needn't)

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        warnings.simplefilter("ignore")
        try:
            answer = try_without(path)
        except BaseException as error:
            answer = {"raised": repr(error), "where": traceback.format_exc()}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    answer = json.loads(text or b'{"raised": "the process ended"}')
    return answer


def main(arguments: list[str]) -> int:
    wrong = 0
    print(f"{'part':<16} {'graphs':>6} {'stages':>6}  name: reasons")
    for path in arguments or names():
        answer = in_fresh_process(path)
        if "raised" in answer:
            wrong += 1
            print(f"{path}: RAISED {answer['raised']}\n{answer.get('where', '')}", flush=True)
            continue
        print(
            f"{answer['part']:<16} {answer['graphs']:>6} {answer['stages']:>6}  "
            f"{path}: {', '.join(answer['reasons'])}",
            flush=True,
        )
        wrong += answer["graphs"] < 3 and not answer["reasons"]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
