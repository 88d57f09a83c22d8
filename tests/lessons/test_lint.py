"""The lint of the lessons finds each fault that is planted in a clean lesson, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from notebooks import glossary, lint
from notebooks.build import read_source
from notebooks.reading import read_course

for module in ("jupytext", "spellchecker"):
    pytest.importorskip(module, reason="the extras `lessons` and `dev` are not installed")

SOURCE = """# %% [markdown]
# # 00 · What is a clean lesson?
#
# After this lesson you can
#
# - say what a guard is,
# - follow [a link](../minicompile/rule.py).

# %% name="setup" tags=["setup"]
from minicompile.lessons.exercise import checks

check = checks("00")

# %% [markdown]
# A *guard* is a condition; all guards are checked at each call. Read `minicompile/rule.py`.
# **Predict, then run.** How many are there?

# %% name="first-picture"
guard_count = 3
print(guard_count)

# %% [markdown]
# There are 3 of them in `guard_count`. **Break it.** Take them away, as <https://pytorch.org> says.

# %% name="second-picture"
broken = None

# %% [markdown]
# > **In torch.compile.** It has them too: `torch/_dynamo/guards.py`.

# %% name="torch-compile"
import torch

# %% [markdown]
# ## Recap
#
# 1. A guard is a condition.
# 2. It stands in a table.
# 3. It is checked at each call, as in `torch.compile`.
# 4. It may fail.
# 5. That costs time.

# %% [markdown]
# ## Exercises
#
# **Exercise 1 · Read** (easy, 1 point). Write `one()`.

EXERCISES
# %% [markdown]
# ## Go deeper
#
# - `minicompile/rule.py`, then `torch/_dynamo/guards.py`

# %% [markdown]
# **Where you are.** In the first room.

# %% name="strip"
from minicompile.lessons.pictures import corridor

corridor("dynamo")
"""

EXERCISE = """# %% [markdown]
# **You will need**
#
# - `print`: shows a value. `print("one")` is an example.

# %% [markdown]
# <details><summary>Hint 1 of 2</summary>
#
# It is easy.
#
# </details>
#
# <details><summary>Hint 2 of 2</summary>
#
# Give one.
#
# </details>

# %% name="exN-answer" tags=["answer"]
def one():
    ### BEGIN SOLUTION
    return 1
    ### END SOLUTION

# %% name="exN-check" tags=["nbval-check-output"]
check("exN")

# %% name="exN-wrong-two" tags=["wrong"] kind="misconception" says="got 2"
def one():
    return 2

# %% name="exN-wrong-three" tags=["wrong"] kind="visible-only" says="got 3"
def one():
    return 3

# %% name="exN-wrong-int" tags=["wrong"] kind="built-in" says="a use of int"
def one():
    return int("1")

"""

CHECKS = """from minicompile.lessons.exercise import Lesson

lesson = Lesson("00")
for name, level in zip(("ex1", "ex2", "ex3", "ex4"), ("read", "construct", "implement", "real")):

    @lesson.exercise(name, points=1, level=level, visible=[1], hidden=[2])
    def number_one(run, one):
        return "one"
"""

TERMS = """words = ["softmaxes"]

[[term]]
name = "guard"
also = ["guards"]
means = "A condition that must hold, unlike softmaxes."
file = "minicompile/rule.py"
"""

VIEW = """<style>.x{}</style><div class="mc "><div class="head"><b>guards</b> <small>7</small></div>
<table><thead><tr><th>guard</th><th>why</th></tr></thead><tbody></tbody></table>
<details><summary>bytes read <small>9</small></summary>hidden</details></div>"""

FILES = {
    "notebooks/src/00_clean.py": SOURCE.replace(
        "EXERCISES\n",
        "# %% [markdown]\n# **Exercise 2 · Next** (solid, 1 point). Once more.\n\n".join(
            EXERCISE.replace("exN", f"ex{n}") for n in (1, 2)
        )
        + "".join(
            f"# %% [markdown]\n# **Exercise {n} · Next** ({level}, 1 point). Once more.\n\n"
            + EXERCISE.replace("exN", f"ex{n}")
            for n, level in ((3, "solid"), (4, "hard"))
        ),
    ),
    "notebooks/checks/lesson_00.py": CHECKS,
    "notebooks/terms/00.toml": TERMS,
    "notebooks/terms/words.txt": "",
    "notebooks/terms/labels.toml": '"bytes read" = "how much a kernel loads"\n',
    "minicompile/rule.py": "def rule(): ...\n",
    "notebooks/README.md": "| 00 **c** | What? | 5 | 1 easy, 2 solid, 1 hard | one |\n",
    "view": VIEW,
}
README = "notebooks/README.md"
LESSON, TOML, CHECK, VIEWS = (
    "notebooks/src/00_clean.py",
    "notebooks/terms/00.toml",
    "notebooks/checks/lesson_00.py",
    "view",
)


def write(root: Path, files: dict[str, str]) -> Path:
    """A checkout with one lesson and its solution, the view in the cells called picture."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content, encoding="utf-8")
    source = next((root / "notebooks/src").glob("00_*.py"))
    picture = {"output_type": "display_data", "data": {"text/html": files["view"]}, "metadata": {}}
    cells = [
        {**cell, "outputs": [picture] * cell["id"].endswith("picture")}
        for cell in read_source(source).cells
    ]
    solution = root / "notebooks/solutions" / f"{source.stem}.ipynb"
    solution.parent.mkdir(exist_ok=True)
    solution.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    return root / "notebooks"


def findings(root: Path, files: dict[str, str]) -> list[str]:
    course = read_course(write(root, files))
    return [*map(str, lint.findings(course)), *map(str, lint.shared_faults(course))]


FAULTS = {
    LESSON: {
        "no question": ("a clean lesson?", "a clean lesson.", "A question"),
        "no goals": ("After this lesson you can", "You will", "After this lesson|used before"),
        "no setup": (' tags=["setup"]', "", 'must be tagged "setup"'),
        "no prediction": ("**Predict, then run.** ", "", "Predict, then run"),
        "nothing broken": ("**Break it.** ", "", "Break it"),
        "no box": ("> **In torch.compile.** ", "", "In torch.compile"),
        "short recap": ("# 5. That costs time.\n", "", "4 numbered sentences"),
        "nothing deeper": ("## Go deeper", "## More", "has no `Go deeper`"),
        "no place": ("Where you are", "Here", "has no `Where you are`"),
        "no strip": ('corridor("dynamo")', "corridor", "must light the room"),
        "wall of text": ("# It is easy.\n", "# It is easy.\n" * 13, "14 lines of text, allowed 12"),
        "late picture": (
            'name="first-picture"',
            'name="first"',
            "picture within the first three|1 interactive|README",
        ),
        "nothing that is needed": ("**You will need**", "**Notes**", "You will need"),
        "another difficulty": (
            "(easy, 1 point)",
            "(hard, 1 point)",
            "says hard, 1 point, its check easy, 1 point",
        ),
        "no statement": ("**Exercise 3 · Next**", "**Three**", "no text begins `\\*\\*Exercise 3"),
        "no check cell": ('check("ex2")', 'check("ex1")', "no cell tagged"),
        "few wrong answers": (
            '# %% name="ex4-wrong-int" tags=["wrong"]',
            '# %% name="extra"',
            "2 wrong answers",
        ),
        "typing error": ("It may fail", "It may faill", "spelling: faill"),
        "dead link": ("../minicompile/rule.py", "../minicompile/gone.py", "leads nowhere"),
        "no address": ("(../minicompile/rule.py)", "(https://pytorch)", "is no web address"),
        "no file here": (
            "Read `minicompile/rule.py`",
            "Read `minicompile/gone.py`",
            "there is no file",
        ),
        "no file in torch": (
            "too: `torch/_dynamo/guards.py`",
            "too: `torch/_dynamo/gard.py`",
            "there is no file",
        ),
        "number from nowhere": ("There are 3 of", "There are 1,234 of", "1,234 is neither"),
        "claim in code": ("It is easy.", "It is `1 + 4 = 5`.", "5 is neither"),
        "unexplained term": (
            "A *guard* is",
            "A guard is",
            "never in italics|used before it is explained|label 'guards?'",
        ),
        "term before its explanation": (
            "# After this lesson",
            "# Guards matter.\n#\n# After this lesson",
            "'Guards' is used before",
        ),
        "unknown term": ("It may fail", "It may *diverge*", "'diverge' is in italics, but no term"),
        "unknown name": ("in `guard_count`", "in `guard_counts`", "`guard_counts` is no name"),
        "early name": (
            "A *guard* is",
            "In `broken`, a *guard* is",
            "`broken` is used before a cell shows it",
        ),
    },
    VIEWS: {
        "views that stand still": ("details", "div", "0 interactive views"),
        "unknown label": ("<th>why</th>", "<th>speed</th>", "label 'speed' is not explained"),
    },
    README: {
        "stale minutes": ("| 5 |", "| 30 |", "lesson 00: says 30 . 1 easy, 2 solid, 1 hard"),
    },
    CHECK: {
        "three exercises": (
            '("ex1", "ex2", "ex3", "ex4")',
            '("ex1", "ex2", "ex3")',
            "3 exercises|fewer than two|README",
        ),
        "falling levels": (
            '"construct", "implement"',
            '"implement", "construct"',
            "levels don't rise|its check (easy|solid)",
        ),
        "nothing to implement": (
            '"implement", "real"',
            '"construct", "construct"',
            "fewer than two implement|its check solid|README",
        ),
    },
    TOML: {
        "typing error in a meaning": (
            "must hold",
            "must hould",
            "spelling in the meaning of 'guard': hould",
        ),
        "term without a file": (
            "minicompile/rule.py",
            "minicompile/gone.py",
            "the file of 'guard' is not there",
        ),
    },
    "notebooks/terms/words.txt": {
        "unused word": ("", "zyzzyva\n", "'zyzzyva' is used nowhere"),
        "needless word": ("", "condition\n", "need not be listed"),
    },
}
"""By file and name: a change of the clean lesson (old and new text), and what every finding must say."""


def test_a_clean_lesson_passes(tmp_path: Path) -> None:
    assert findings(tmp_path, FILES) == []


@pytest.mark.parametrize(("file", "name"), [(f, name) for f in FAULTS for name in FAULTS[f]])
def test_a_planted_fault_is_found_and_nothing_else(file: str, name: str, tmp_path: Path) -> None:
    old, new, says = FAULTS[file][name]
    assert old in FILES[file]
    found = findings(tmp_path, {**FILES, file: FILES[file].replace(old, new, 1) if old else new})
    assert found
    assert all(re.search(says, line) for line in found), found


def test_a_term_of_a_later_lesson_is_found_where_it_is_used_too_early(tmp_path: Path) -> None:
    later = FILES[LESSON].replace("00", "01")
    files = {
        **FILES,
        "notebooks/src/01_later.py": later.replace(
            "A *guard* is", "A *cache* keeps guards; a guard is"
        ),
        "notebooks/checks/lesson_01.py": CHECKS.replace("00", "01"),
        "notebooks/terms/01.toml": TERMS.replace("guard", "cache").replace("softmaxes", "words"),
    }
    files["notebooks/terms/01.toml"] = files["notebooks/terms/01.toml"].replace(
        'words = ["words"]\n', ""
    )
    write(tmp_path, files)
    early = files[LESSON].replace("It may fail", "It may miss the cache")
    found = findings(tmp_path, {**files, LESSON: early})
    assert [line for line in found if "'cache' is used before it is explained" in line]
    everyday = files["notebooks/terms/01.toml"] + "everyday = true\n"
    assert not [
        line
        for line in findings(
            tmp_path, {**files, LESSON: early, "notebooks/terms/01.toml": everyday}
        )
        if "'cache'" in line
    ]


def test_the_glossary_links_term_lesson_and_file_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = '\n[[term]]\nname = "Alias"\nmeans = "Another name."\nfile = "torch/_dynamo/guards.py"\n'
    folder = write(tmp_path, {**FILES, "notebooks/terms/00.toml": TERMS + more})
    assert glossary.main(["--root", str(tmp_path), "--check"]) == 1
    assert glossary.main(["--root", str(tmp_path)]) == 0
    assert glossary.main(["--root", str(tmp_path), "--check"]) == 0
    text = (folder / "GLOSSARY.md").read_text(encoding="utf-8")
    row = (
        "| guard | A condition that must hold, unlike softmaxes. | [00](00_clean.ipynb) "
        "| [minicompile/rule.py](../minicompile/rule.py) |"
    )
    assert row in text
    assert text.index("| Alias |") < text.index("| guard |") < text.index("| bytes read |")
    assert "(https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/guards.py)" in text
