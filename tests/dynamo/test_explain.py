"""`mc.explain`: counts, operators, and each capture's bytecode with its graph beside it."""

from __future__ import annotations

import torch

import minicompile as mc

x = torch.randn(3)


def scale(a: torch.Tensor) -> torch.Tensor:
    return a * 3


def cut_in_two(a: torch.Tensor) -> torch.Tensor:
    b = scale(a) + 1
    print("between")
    return b.relu() + b


def test_counts_and_operators() -> None:
    found = mc.explain(cut_in_two)(x)
    assert found.graph_count == len(found.captures) == 2 and found.op_count == 4
    assert found.operators == {"operator.add": 2, "operator.mul": 1, "relu": 1}
    text = str(found)
    assert text.startswith("explanation of cut_in_two: 2 graphs, 4 operations, ")
    assert "operators: operator.add 2, operator.mul 1, relu 1" in text
    assert "break 1: instruction ran in eager: print is called [print]" in text
    assert text.count("guards:") == 2


def test_instructions_stand_beside_the_nodes_that_they_made() -> None:
    first, second = mc.explain(cut_in_two)(x).captures
    passages = [(p.line.text, p.depth, p.nodes) for p in first.passages() if p.line is not None]
    assert passages == [
        ("b = scale(a) + 1", 0, ()),
        ("return a * 3", 1, ("mul",)),
        ("b = scale(a) + 1", 0, ("add",)),
        ('print("between")', 0, ()),
    ]
    lines = first.flow().split("\n")
    assert any("BINARY_OP *" in line and "| mul = operator.mul(a, 3)" in line for line in lines)
    assert lines[-1] == "----- cut here: print is called [print]"
    assert first.stopped_by is not None and second.stopped_by is None
    (rest,) = [passage for passage in second.passages() if passage.nodes]
    assert rest.nodes == ("relu", "add")
    assert "__stack" not in second.flow() and "cut here" not in second.flow()


def test_every_node_of_a_graph_stands_in_exactly_one_passage() -> None:
    for capture in mc.explain(cut_in_two)(x).captures:
        made = [name for passage in capture.passages() for name in passage.nodes]
        assert made == [node.name for node in capture.graph.nodes if node.op.startswith("call")]
