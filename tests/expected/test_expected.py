"""What every stage makes of a program is what `tests/expected/NAME.txt` says, letter by letter.

The files are for reading as well: guards, graphs at AOT's end, loops, what was fused and why not, memory
plans, kernels in both languages. After a change that is meant, `python -m tests.expected` writes them anew,
and `git diff` shows what it changes.
"""

import pytest

from tests.expected.pages import ANYWHERE, AS_WRITTEN, OF_VERSIONS, PAGES, path


@pytest.mark.parametrize("name", PAGES)
def test_every_stage_prints_what_is_expected(name: str) -> None:
    if not AS_WRITTEN and name not in ANYWHERE:
        pytest.skip(f"the pages are those of Python and torch {OF_VERSIONS}")
    assert PAGES[name]() == path(name).read_text(encoding="utf-8")


def test_every_file_is_of_a_program() -> None:
    assert {file.stem for file in path("").parent.glob("*.txt")} == set(PAGES)
