"""Sphinx's settings for the site; `make site` builds it from what pages.py writes."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

from settings import PROJECT, REPOSITORY  # noqa: E402

project = PROJECT["name"]
version = release = PROJECT["version"]
author = copyright = "the minicompile authors"
extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["extra"]

# Lessons were executed before; nothing is fetched, so widgets and formulas need no script from elsewhere.
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_mime_priority_overrides = [("html", "text/html", 0)]
nb_merge_streams = True
nb_code_prompt_show = "Set up (imports)"
nb_code_prompt_hide = "Set up (imports)"
myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

# Docstrings of the package quote code in single backticks.
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries = False

html_theme = "furo"
html_title = "minicompile"
html_static_path = ["static", "../../minicompile/show/view.css"]
html_css_files = ["view.css", "site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sourcelink = False
html_baseurl = ""
html_last_updated_fmt = None
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_theme_options = {
    "source_repository": f"{REPOSITORY}/",
    "footer_icons": [],
    "top_of_page_buttons": [],
}


def keep_layout(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """A paragraph of a docstring that is laid out as a table stays as it is written."""
    paragraphs = "\n".join(lines).split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        first, *rest = paragraph.split("\n")
        if not first.startswith(" ") and any(re.match(r" {3}", line) for line in rest):
            paragraphs[number] = "::\n\n" + textwrap.indent(paragraph, "    ")
    lines[:] = "\n\n".join(paragraphs).split("\n")


def captions(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """A headline of the menu says its level, as a screen reader needs it."""
    tree = str(context.get("furo_navigation_tree", ""))
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )


def setup(app: Any) -> None:
    app.connect("html-page-context", captions, priority=900)
    app.connect(
        "config-inited", lambda app, config: config.html_extra_path.append(f"{app.srcdir}/extra")
    )
    app.connect("autodoc-process-docstring", keep_layout)
