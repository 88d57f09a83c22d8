"""Shell commands of the reference documents that read logs or files do what they say, with our names.

`ours` (documents.py) is what turns a command as written into the command as run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import minicompile as mc
from minicompile.ops.nodes import is_view
from minicompile.pipeline_result import Trace
from tests.debug.documents import SCRIPT, bash, ours, python
from tests.debug.watched_script import Model

RESULTS = 2
"""Of the script's model, beside what is saved."""


class Logged(NamedTuple):
    """A command that prints logs: the channels it must show, what must be said, the files it must leave."""

    written: str
    channels: str
    said: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


COMPILING = (
    "[AOT] Compiling forward graph: model__0_forward_0",
    "[AOT] Compiling backward graph: model__0_backward_0",
)
FUSION = (
    *(
        "FusionDecision: buf",
        "(Pointwise) <- producer",
        "(Extern) <- consumer",
        "✓ Reduction Prologue",
    ),
    *("fusion: one kernel", "→ Fused into 1 kernel", "✗ Cannot fuse: ", "→ Separate kernel"),
)
JOINT, FORWARD = ("model__0__joint_0.py",), ("model__0__forward_0.py", "model__0__backward_0.py")
LATE = (*FORWARD, "model__0__forward_transformed_0.py", "model__0__backward_transformed_0.py")
GRAPHS = ("def forward(", "def backward(")

LOGGED = (
    Logged('TORCH_LOGS="all" python script.py', "dynamo aot inductor output_code guards perf"),
    Logged('TORCH_LOGS="dynamo" python script.py', "dynamo", ("captured ", "script.py:")),
    Logged('TORCH_LOGS="guards,recompiles" python script.py twice', "guards recompiles",
           ("is f32[4, 8] failed: found shape (6, 8)",)),
    Logged('TORCH_LOGS="+dynamo,+inductor" python script.py twice',
           "dynamo graph_code guards bytecode recompiles pre_grad_graphs inductor fusion schedule "
           "ir_pre_fusion ir_post_fusion output_code perf"),
    Logged('TORCH_LOGS="dynamo,graph_breaks,aot,fusion,schedule,output_code" python script.py break',
           "dynamo graph_breaks aot fusion schedule output_code",
           (*COMPILING, "in with_break: print(", "def call(", "for (")),
    Logged('TORCH_LOGS="aot,aot_graphs,aot_joint_graph" python script.py',
           "aot aot_graphs aot_joint_graph", (*GRAPHS, "# backward pass"), JOINT + FORWARD),
    Logged('TORCH_LOGS="post_grad_graphs" python script.py', "post_grad_graphs",
           ("before:", "after:", "aten.clone.default"), LATE),
    Logged('TORCH_LOGS="ir_pre_fusion,fusion,schedule" python script.py',
           "ir_pre_fusion fusion schedule", ("ops.store('buf", *FUSION),
           ("ir_pre_fusion_model__0__forward_0.txt",)),
    Logged('TORCH_LOGS="ir_post_fusion,output_code" python script.py', "ir_post_fusion output_code",
           ("var_ranges = ", "ops.load("), ("ir_post_fusion_model__0__forward_0.txt", "output_code.py")),
)  # fmt: skip
"""`twice` and `break` are arguments of our script: it recompiles, it has a graph break."""


@pytest.mark.long
@pytest.mark.parametrize("row", LOGGED, ids=lambda row: row.written)
def test_a_command_prints_what_its_channels_promise(
    row: Logged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = tmp_path / "dump"
    monkeypatch.setenv("MINICOMPILE_COMPILE_DEBUG_DIR", str(dump))
    told = python(ours(row.written), monkeypatch)
    found = dict.fromkeys(re.findall(r"^\[\d+/\d+\] (\w+):", told, re.MULTILINE))
    if '"all"' not in row.written:
        assert found.keys() == set(row.channels.split())
    assert found.keys() >= set(row.channels.split())
    for said in row.said:
        assert said in told
    names = {path.name for path in dump.glob("*")}
    assert names >= set(row.files) and bool(names) == bool(set(row.channels.split()) & FILED)


FILED = {
    "aot_graphs",
    "aot_joint_graph",
    "post_grad_graphs",
    "ir_pre_fusion",
    "ir_post_fusion",
    "output_code",
}
"""Channels that leave files."""


def test_inference_has_no_backward_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    told = python('MINICOMPILE_LOGS="aot" python script.py inference', monkeypatch)
    assert COMPILING[0] in told and "backward" not in told


class Trained(NamedTuple):
    """The folder after a training run with `MINICOMPILE_COMPILE_DEBUG=1`, and a trace of the same model."""

    folder: Path
    variables: dict[str, str]
    trace: Trace


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """In the default folder, as the documents' paths are."""
    variables = {"USER": f"test_{tmp_path_factory.getbasetemp().name}", "TMPDIR": "/tmp"}
    folder = Path(f"/tmp/minicompile_{variables['USER']}")
    shutil.rmtree(folder, ignore_errors=True)
    told = bash("MINICOMPILE_COMPILE_DEBUG=1 python watched_script.py", SCRIPT.parent, variables)
    assert told == ""
    yield Trained(folder, variables, mc.trace(Model(), torch.ones(4, 8)))
    shutil.rmtree(folder)


def names(text: str) -> list[str]:
    """The nodes that a text names, as the graph calls them."""
    return [name.replace(".", "_") for name in re.findall(r"%([\w.]+)", text)]


def finds_nothing(found: str, trained: Trained) -> None:
    assert found == ""
    script = SCRIPT.read_text()
    assert all(name in script for name in ("mul_(", "add_(", "sub_("))  # there was something


def returns_saved(found: str, trained: Trained) -> None:
    aot = trained.trace.aot
    (line,) = (line for line in found.splitlines() if "transformed" not in line)
    expected = [value.name for value in aot.partition.saved]
    assert names(line)[RESULTS:] == expected and expected


def reads_saved(found: str, trained: Trained) -> None:
    first = [line for line in found.splitlines() if "transformed" not in line]
    inputs = [names(line)[0] for line in first]
    assert inputs == [
        *(value.name for value in trained.trace.aot.partition.saved),
        "tangents_0",
        "tangents_1",
    ]


def recomputed(found: str, trained: Trained) -> None:
    """Lines of diff: `<` is in the joint graph's forward alone, `>` in the backward alone."""
    sides = [{line[2:] for line in found.splitlines() if line[0] == side} for side in "<>"]
    only_backward = {names(line)[0] for line in sides[1] - sides[0]}
    backward = [n for n in trained.trace.aot.backward.nodes if n.op == "call_function"]
    both = {n.name for n in backward if not is_view(n)} - only_backward  # a view is no work
    assert both and both == {value.name for value in trained.trace.aot.partition.recomputed}


def tagged_backward(found: str, trained: Trained) -> None:
    joint = trained.trace.aot.joint
    expected = [
        n.name for n in joint.nodes if n.op.startswith("call") and n.meta["phase"] == "backward"
    ]
    assert [names(line)[0] for line in found.splitlines()] == expected and expected


def is_graph(found: str, trained: Trained) -> None:
    assert found.startswith("graph():\n")
    inputs = re.findall(r"%([\w.]+) : \w+ = placeholder", found)
    assert [i.replace(".", "_") for i in inputs] == [
        n.name for n in trained.trace.aot.backward.nodes if n.op == "placeholder"
    ]
    assert found.splitlines()[-1].lstrip().startswith("return (")


def lacks_a_copy(found: str, trained: Trained) -> None:
    gone, new = (
        [line for line in found.splitlines() if line.startswith(side)] for side in ("<", ">")
    )
    assert any("target=aten.clone.default" in line for line in gone)
    assert len(new) == 1 and "target=aten.expand.default" in new[0]


def counts_returned(found: str, trained: Trained) -> None:
    assert int(found) == RESULTS + len(trained.trace.aot.partition.saved)


READ: tuple[tuple[str, Callable[[str, Trained], None]], ...] = (
    (r'grep "mul_\|add_\|sub_" model__*__forward_0.py', finds_nothing),
    ('grep "return" model__*__forward_*.py', returns_saved),
    ('grep "placeholder" model__*__backward_*.py', reads_saved),
    ('diff <(grep "call_function" joint.py | grep "is_forward") \\\n'
     '<(grep "call_function" backward.py)', recomputed),
    ('grep "is_backward" model__*__joint_*.py', tagged_backward),
    ("cat /tmp/torchinductor_$USER/model__*__backward_0.py", is_graph),
    ("diff model__*__forward_{0,transformed_0}.py", lacks_a_copy),
    ('grep "return" model__*__forward_0.py | grep -o "%" | wc -l', counts_returned),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("written", "holds"), READ, ids=[row[0] for row in READ])
def test_a_command_finds_in_the_folder_what_the_document_says(
    trained: Trained, written: str, holds: Callable[[str, Trained], None]
) -> None:
    holds(bash(ours(written), trained.folder, trained.variables), trained)
