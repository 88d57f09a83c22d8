"""docs/ is true of the code: files exist, are as long as said, and define what is named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minicompile"
READING = (ROOT / "docs" / "reading-order.md").read_text(encoding="utf-8")
STOPS = re.findall(r"^\| \[`(\S+)`\]\(\.\./minicompile/(\S+)\) \| (\d+) \|", READING, flags=re.M)


def test_an_evening_is_as_long_as_said():
    assert len(STOPS) == READING.count("](../minicompile/") > 15
    assert all(shown == path for shown, path, _ in STOPS)
    lines = [len((PACKAGE / path).read_text(encoding="utf-8").splitlines()) for _, path, _ in STOPS]
    [told] = re.findall(r"^About ([\d,]+) lines", READING, flags=re.M)
    assert abs(sum(lines) - int(told.replace(",", ""))) <= 0.1 * sum(lines)
    far = [
        (path, count, told)
        for (_, path, told), count in zip(STOPS, lines, strict=True)
        if abs(count - int(told)) > max(0.25 * count, 20)
    ]
    assert far == []


def test_walks_lead_through_functions_that_exist():
    steps = set(re.findall(r"`([\w/]+\.py):(\w+)`", READING))
    assert len(steps) > 30
    missing = []
    for file, name in steps:
        tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
        defined = {getattr(node, "name", None) for node in ast.walk(tree)}
        missing += [f"{file}:{name}"] if name not in defined else []
    assert missing == []


def test_links_inside_the_documents_lead_somewhere():
    for page in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
