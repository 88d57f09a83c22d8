"""The code in the README and in docs/ runs as it stands, and what it says was measured was."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def blocks(section: str) -> list[str]:
    """The Python blocks of a `##` section, in order."""
    text = README.partition(f"\n## {section}")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)


def test_how_to_add_things_works_as_written(tmp_path: Path):
    code = [*blocks("Docs: how to add ..."), *blocks("Plug-ins")]
    assert len(code) == 11
    names: dict[str, object] = {"__name__": "readme"}
    file = tmp_path / "readme.py"
    file.write_text("\n".join(code), encoding="utf-8")
    exec(compile("\n".join(code), str(file), "exec"), names)


def test_how_to_use_it_works_as_written():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    inputs = torch.randn(3, 4)

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.model(x), target)

    [code] = blocks("Use")
    exec(code, {"model": Loss(), "inputs": inputs, "targets": torch.zeros(3, 4)})
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.long
def test_a_package_is_made_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    [code] = blocks("Without Python")
    exec(compile(code, "README.md", "exec"), names)
    logits, model = names["logits"], names["model"]
    assert torch.allclose(logits, model(torch.zeros(1, 64, dtype=torch.int64)), atol=1e-5)


@pytest.mark.long
def test_several_processes_train_as_written(tmp_path: Path):
    import torch

    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    [code] = blocks("Several processes")
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    [command] = re.findall(r"^torchrun (.*)$", README, flags=re.M)
    run = [sys.executable, "-m", "torch.distributed.run", *command.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def results(name: str) -> Iterator[dict[str, Any]]:
    folder = ROOT / "minicompile" / "bench" / "results"
    yield from json.loads((folder / name).read_text(encoding="utf-8"))


def test_figures_are_those_that_the_named_commands_wrote():
    told = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", README, flags=re.M)
    files = [*results("h200-models.json"), *results("h200-first-calls.json")]
    measured = {case["case"]: case["seconds"] for run in files for case in run["cases"]}
    assert len(told) >= 6
    for case, *columns in told:
        assert columns == [f"{seconds * 1e3:.2f}" for seconds in measured[case].values()]
    first = {(c["case"], c["state"]): c for run in files for c in run["first_calls"]}
    rows = re.findall(r"^\| `(\w+)`, ([\w ]+) \| \| ([\d.]+) \| ([\d.]+) \|", README, flags=re.M)
    assert {(case, state) for case, state, _, _ in rows} == set(first)
    for case, state, theirs, ours in rows:
        found = first[case, state]
        assert (theirs, ours) == (f"{found['theirs']:.1f}", f"{found['ours']:.1f}")
    for run in (run for run in files if run["cases"] or run["first_calls"]):
        assert f"`{run['command']}`" in README
