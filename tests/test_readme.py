"""The code in the README runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(section: str) -> list[str]:
    """The Python blocks of a `##` section, in order."""
    text = README.partition(f"\n## {section}")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)


@pytest.mark.skipif(
    not (ROOT / "minicompile" / "api.py").exists(), reason="minicompile.compile is not there yet"
)
def test_how_to_add_things_works_as_written(tmp_path: Path):
    code = blocks("Docs: how to add ...")
    assert len(code) == 6
    names: dict[str, object] = {"__name__": "readme"}
    file = tmp_path / "readme.py"
    file.write_text("\n".join(code), encoding="utf-8")
    exec(compile("\n".join(code), str(file), "exec"), names)


@pytest.mark.skipif(
    not (ROOT / "minicompile" / "api.py").exists(), reason="minicompile.compile is not there yet"
)
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


def test_a_package_is_made_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    [code] = blocks("Without Python")
    exec(compile(code, "README.md", "exec"), names)
    logits, model = names["logits"], names["model"]
    assert torch.allclose(logits, model(torch.zeros(1, 64, dtype=torch.int64)), atol=1e-5)


def test_several_processes_train_as_written(tmp_path: Path):
    import torch

    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    [code] = blocks("Several processes")
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    [command] = re.findall(r"^MINICOMPILE_LOGS=ddp torchrun (.*)$", README, flags=re.M)
    run = [sys.executable, "-m", "torch.distributed.run", *command.split()]
    environment = {**os.environ, "MINICOMPILE_LOGS": "ddp", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("ddp: backward: gradients") == 2, done.stderr
