"""The world of a capture: its operations are functions in a registry, each in the module of its subject."""

from __future__ import annotations

import ast
import pathlib
import re

import torch

import minicompile as mc
from minicompile.dynamo import opcodes
from minicompile.dynamo.world import World, operations

ROOM = pathlib.Path(opcodes.__file__).parent
PARTS = {"frames", "outside", "writes", "recorder", "rules", "root", "frame", "raised", "raised_at"}
PARTS |= {"compiling", "asked_compiling"}


def names_of_world() -> set[str]:
    """Every `world.name` in the room, also in the table of instructions."""
    found = set(re.findall(r"\bworld\.(\w+)", opcodes.EFFECTS))
    for path in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("world"):
                found.add(node.attr)
    return found


def test_what_is_called_of_the_world_is_a_part_a_method_or_an_operation():
    unknown = {n for n in names_of_world() - PARTS - {*operations} if not hasattr(World, n)}
    assert unknown == set()


def test_every_operation_is_used():
    assert {*operations} - names_of_world() == set()


def test_an_operation_can_be_given_another_meaning():
    def negated(a):
        return -a, 1 + 2

    with mc.scoped():

        @operations("unary")
        def unary(world, symbol, value):
            return world.unsupported("instruction", f"no {symbol} today")

        reasons = [stop.reason for stop in mc.explain(mc.compile(negated))(torch.ones(2)).breaks]
    assert reasons == ["no - today"]
