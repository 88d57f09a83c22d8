"""The debug folder and its trace.jsonl, and the fresh cache."""

from __future__ import annotations

import ast
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.options import Options
from minicompile.pipeline_result import Trace
from tests.debug.documents import bash
from tests.debug.watched_script import Model, with_break


def compiled(target: Any, folder: Path, **more: Any) -> Any:
    return mc.compile(target, options={"trace": True, "debug_dir": str(folder), **more})


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"trace.jsonl"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    """A training run's folder, and a trace of the same model."""
    folder = tmp_path_factory.mktemp("dump") / "new" / "folder"
    first, _ = compiled(Model(), folder)(torch.ones(4, 8))
    first.sum().backward()
    return folder, mc.trace(Model(), torch.ones(4, 8))


def read(folder: Path, pattern: str) -> str:
    (path,) = folder.glob(pattern)
    return path.read_text(encoding="utf-8")


def test_the_folder_has_the_documented_files_and_no_others(trained: tuple[Path, Trace]) -> None:
    folder, _ = trained
    graphs = ["forward", "backward"]
    expected = {"fx_graph_readable.py", "fx_graph_transformed.py", "output_code.py"}
    expected |= {
        f"model__0__{g}_0.py" for g in [*graphs, *(f"{g}_transformed" for g in graphs), "joint"]
    }
    for when in ("", "pre_fusion_", "post_fusion_"):
        expected |= {f"ir_{when}model__0__{graph}_0.txt" for graph in graphs}
    number = r"model__\d+__"
    assert {re.sub(number, "model__0__", name) for name in names(folder)} == expected


def test_graphs_are_whole_and_tagged(trained: tuple[Path, Trace]) -> None:
    folder, trace = trained
    assert trace.aot is not None
    for name in ("joint", "forward_transformed", "backward_transformed"):
        text = read(folder, f"model__*__{name}_0.py")
        graph = getattr(trace.aot, name.removesuffix("_transformed"))
        assert text.startswith("graph():\n    %") and text.count("\n") == len(list(graph.nodes)) + 1
        for node in graph.nodes:
            if node.op == "call_function":
                printed = (
                    f"%{node.name.replace('_', '.')} : Tensor = call_function[target={node.target}]"
                )
                (line,) = (line for line in text.splitlines() if line.strip().startswith(printed))
                assert f"# is_{node.meta['phase']} " in line
    assert "%tangents.0 : Tensor = placeholder[target=tangents.0]" in text


def test_code_and_captured_graphs_are_python_and_have_it_all(trained: tuple[Path, Trace]) -> None:
    folder, trace = trained
    text = read(folder, "output_code.py")
    ast.parse(text)
    for compiled_graph in trace.graphs.values():
        assert compiled_graph.wrapper.text in text
        assert all(kernel.text in text for kernel in compiled_graph.kernels)
    ast.parse(read(folder, "fx_graph_readable.py"))
    assert str(trace.capture.graph) in read(folder, "fx_graph_readable.py")
    before, after = (read(folder, f"ir_{w}_fusion_*__forward_0.txt") for w in ("pre", "post"))
    for node in trace.schedule.before:
        assert str(node) in before
    for node in trace.schedule.nodes:
        assert str(node) in after and all(str(b) in after for b in getattr(node, "bodies", ()))
    assert str(trace.loops) in read(folder, "ir_model__*__forward_0.txt")


def test_every_event_is_a_line(trained: tuple[Path, Trace]) -> None:
    folder, _ = trained
    lines = events(folder)
    each = ["loops", "schedule", "plans", "kernels", "wrapper", "graph"]
    kinds = ["start", "capture", "aot", *each, *each, "building", "done"]
    assert [line["kind"] for line in lines] == kinds
    assert len({line["compilation"] for line in lines}) == 1 and lines[0]["function"] == "Model"
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert sum(line["took"] for line in lines) == pytest.approx(seconds[-1])
    listed = Counter(name for line in lines for name in line["files"])
    assert listed.keys() == names(folder)


def test_breaks_and_failed_guards_are_in_it(tmp_path: Path) -> None:
    function = compiled(with_break, tmp_path)
    function(torch.ones(3))
    function(torch.ones(4))
    lines = events(tmp_path)
    cut = next(line for line in lines if line["kind"] == "break")
    assert cut["id"] == "print" and "watched_script.py:" in cut["line"] and cut["reason"]
    failed = [line for line in lines if line["kind"] == "start" and line["failures"]]
    assert failed and "(3,)" in failed[0]["failures"][0] and "/1" in failed[0]["compilation"]
    found = {name for name in names(tmp_path) if "__forward_" in name and name.startswith("model")}
    functions = {name.split("__")[1] for name in found}  # of what is before and after the break
    assert len(functions) == 2 and any(name.endswith("forward_1.py") for name in found)
    code = (tmp_path / "output_code.py").read_text()
    assert (
        code.count("def call(")
        == 4
        == len(re.findall(r"^# \[\d+/\d\] .*with_break.* forward$", code, re.M))
    )


@pytest.mark.long
def test_another_process_starts_anew_and_leaves_other_files_alone(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    variables = {"MINICOMPILE_COMPILE_DEBUG": "1", "MINICOMPILE_COMPILE_DEBUG_DIR": str(folder)}
    program = "f = mc.compile(lambda x: x.sin()); [f(torch.ones(n)) for n in (2, 3)]"
    told = bash(f'python -c "import minicompile as mc, torch; {program}"', tmp_path, variables)
    assert told == "" and {"model__0__forward_0.py", "model__0__forward_1.py"} <= names(folder)
    mine = {"mine.py", "model__7__forward_0.py"}  # the second is named like one of ours
    for name in mine:
        (folder / name).write_text("kept")
    before = names(folder)
    compiled(lambda x: x.cos(), folder)(torch.ones(2))
    listed = {name for line in events(folder) for name in line["files"]}
    assert names(folder) == mine | listed and not listed >= before - mine
    assert "fused_sin" not in (folder / "output_code.py").read_text()


def test_the_environment_switches_it_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not Options().trace
    for value, on in (("1", True), ("0", False), ("", False), ("true", True), ("False", False)):
        monkeypatch.setenv("MINICOMPILE_COMPILE_DEBUG", value)
        assert Options().trace is on
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("USER", "ada")
    assert Options().debug_dir == str(tmp_path / "minicompile_ada")
    monkeypatch.delenv("USER")
    monkeypatch.delenv("USERNAME", raising=False)  # two people without a name share no folder
    assert Options().debug_dir == str(tmp_path / f"minicompile_{os.geteuid()}")
    monkeypatch.setenv("MINICOMPILE_COMPILE_DEBUG_DIR", "elsewhere")
    assert Options().debug_dir == "elsewhere"


def test_a_fresh_cache_is_empty_and_goes_away(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    seen: list[str] = []
    function = mc.compile(lambda x: x.sin() + 1, options={"cache_dir": str(usual)})
    x = torch.rand(5)
    function(x)
    kept = sorted(usual.rglob("*"))
    assert kept
    for _ in range(2):
        with mc.fresh_cache(), mc.logs("perf", file=tmp_path / "log"):
            folder = Options().cache_folder
            assert not (folder / "cpp").exists() and folder != usual
            assert torch.allclose(function(x), x.sin() + 1)
            assert list((folder / "cpp").glob("*.so"))
            seen.append(str(folder))
        assert ": 0 files were in the cache" in (tmp_path / "log").read_text()
        assert not folder.exists() and sorted(usual.rglob("*")) == kept
        assert torch.allclose(function(x), x.sin() + 1)
    assert len(set(seen)) == 2
    mc.reset()
    with mc.logs("perf", file=tmp_path / "log"):
        function(x)
    assert "1 files were in the cache" in (tmp_path / "log").read_text()
