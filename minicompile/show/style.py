"""The style sheet and the script that a view carries with it, from `view.css` and `view.js`.

Nothing is fetched by the reader's browser. Notebooks that aren't trusted lose both: what must survive is in
inline styles (in the forms that JupyterLab's sanitizer lets through) and titles.
"""

from __future__ import annotations

import re
from pathlib import Path


def _squeezed(file: str) -> str:
    """The file without indentation, blank lines and comment lines: it goes into every output."""
    source = Path(__file__).with_name(file).read_text(encoding="utf-8")
    source = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    lines = (line.strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


CSS = _squeezed("view.css")
SCRIPT = _squeezed("view.js")
