"""Syntax colours for Python and C++: a tokenizer of one regular expression each.

It knows comments, strings, numbers, keywords and called names, which is what reading generated code needs.
Tokens that run over several lines are cut, so that each line stands alone.
"""

from __future__ import annotations

import functools
import html
import keyword
import re

KEYWORDS = {
    "python": " ".join(keyword.kwlist),
    "cpp": (
        "alignas auto bool break case char class const constexpr continue default delete do double else enum "
        "extern false float for if inline int int16_t int32_t int64_t int8_t long namespace new nullptr "
        "operator private public return short signed sizeof static static_cast reinterpret_cast struct "
        "switch template this true typedef typename uint16_t uint32_t uint64_t uint8_t union unsigned using "
        "void volatile while size_t"
    ),
}

TOKENS = {
    "python": [
        ("com", r"#[^\n]*"),
        (
            "str",
            r"[rbfuRBFU]{0,2}(?:\"\"\"[\s\S]*?\"\"\"|'''[\s\S]*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')",
        ),
        ("fn", r"@[\w.]+"),
    ],
    "cpp": [
        ("com", r"//[^\n]*|/\*[\s\S]*?\*/"),
        ("kw", r"^[ \t]*#[^\n]*"),
        ("str", r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"),
    ],
}

NUMBER = r"\b(?:0[xX][0-9a-fA-F]+|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)[uUlLfF]*\b"


@functools.cache
def pattern(language: str) -> re.Pattern[str]:
    keywords = "|".join(KEYWORDS[language].split())
    parts = [
        *TOKENS[language],
        ("num", rf"{NUMBER}(?:, {NUMBER})*"),
        ("kw", rf"\b(?:{keywords})\b"),
        ("fn", r"\b[A-Za-z_]\w*(?=\()"),
    ]
    marked = (f"(?P<{kind}{i}>{regex})" for i, (kind, regex) in enumerate(parts))
    return re.compile("|".join([*marked, r"\b[A-Za-z_]\w*"]), re.MULTILINE)


def script_patterns() -> dict[str, str]:
    """The same expressions for a browser (flags "gm"), by language."""
    found = {name: pattern(name).pattern.replace("(?P<", "(?<") for name in TOKENS}
    return {**found, "triton": found["python"]}


def highlight(source: str, language: str) -> list[str]:
    """HTML of each line of `source`. `language` is "python" (Triton's too) or "cpp"; others stay plain."""
    language = "python" if language == "triton" else language
    if language not in TOKENS:
        return html.escape(source).split("\n")
    out, position = "", 0
    for match in pattern(language).finditer(source):
        out += html.escape(source[position : match.start()], quote=False)
        position = match.end()
        token = html.escape(match.group(), quote=False)
        if match.lastgroup:
            mark = f'<span class="{match.lastgroup.rstrip("0123456789")}">'
            parts = (part and f"{mark}{part}</span>" for part in token.split("\n"))
            token = "\n".join(parts)
        out += token
    return (out + html.escape(source[position:], quote=False)).split("\n")
