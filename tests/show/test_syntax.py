"""The tokenizer colours without changing a character."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from minicompile.show.syntax import highlight


def plain(lines: list[str]) -> str:
    return html.unescape(re.sub("<.*?>", "", "\n".join(lines)))


@pytest.mark.parametrize("language", ["python", "triton", "cpp", "ptx"])
def test_colouring_keeps_the_text(language: str) -> None:
    source = (
        Path(__file__).read_text()
        + '\n/* a\n b */ #include <x>\n\'open string\n"""open docstring\n1e-5f <&>'
    )
    lines = highlight(source, language)
    assert len(lines) == source.count("\n") + 1
    assert plain(lines) == source


def test_each_line_stands_alone() -> None:
    for line in highlight('"""two\nlines"""\n/* x */', "python") + highlight(
        "/* two\nlines */", "cpp"
    ):
        assert line.count("<span") == line.count("</span>")


def test_kinds_are_told_apart() -> None:
    (line,) = highlight("for (int64_t i = 0; i < 8; ++i) y[i] = f(x[i]); // <b>", "cpp")
    assert '<span class="kw">for</span>' in line and '<span class="num">8</span>' in line
    assert '<span class="fn">f</span>' in line and '<span class="com">// &lt;b&gt;</span>' in line
    assert (
        highlight("x;\n  #pragma omp simd", "cpp")[1]
        == '<span class="kw">  #pragma omp simd</span>'
    )
    (line,) = highlight("@triton.jit  # 'x'", "triton")
    assert '<span class="fn">@triton.jit</span>' in line
