"""`python docs/site/pages.py FOLDER`: write the sources of the site, which Sphinx then makes into pages.

    notebooks/*.ipynb + outputs of notebooks/solutions  -> lessons/   (stubs, no answers)
    README.md, docs/*.md, notebooks/README.md           -> docs/      (links lead to pages of the site)
    notebooks/terms/*.toml                              -> glossary.md
    registries, stored measurements, traced models      -> operators.md, measured.md, gallery/
    every file of the repository that a page links to   -> source/

Nothing is executed but the compiler, which traces the models of the gallery; no network is needed.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import gallery  # noqa: E402
import tables  # noqa: E402
from settings import REPOSITORY  # noqa: E402

from minicompile.lessons.exercise import Verdict  # noqa: E402
from minicompile.lessons.notebook import exercise_of, tags  # noqa: E402
from notebooks.build import is_check  # noqa: E402
from notebooks.glossary import Glossary, Term, folded, read_glossary  # noqa: E402

LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCED = re.compile(r"^(```.*?^```[ \t]*$)", re.M | re.S)
ITALIC = re.compile(r"(?<![*\w`])\*([^*\n`]+(?:\n[^*\n`]+)?)\*(?![*\w])")
FRONT = re.compile(
    r"<picture>.*?</picture>\n\n|^\[!\[[^\n]*\n|^\*\*Read it in a browser.*?\n\n", re.M | re.S
)
"""Of the README: badges, the explorer's picture, and the way to the site, which stands where it leads."""
SOURCE_NAME = re.compile(r"`((?:minicompile|notebooks)/[\w/.]+\.\w+)`")
STYLE = re.compile(r"<style>\.mc \{.*?</style>", re.S)
LANGUAGES = {".py": "python", ".c": "c", ".h": "cpp", ".toml": "toml", ".js": "javascript"}
LANGUAGES |= {".css": "css", ".json": "json", ".yml": "yaml"}

PAGES = {
    "README.md": "docs/about.md",
    "CONTRIBUTING.md": "docs/contributing.md",
    "notebooks/README.md": "docs/lessons.md",
    "notebooks/GLOSSARY.md": "glossary.md",
    "minicompile/bench/results/README.md": "measured.md",
    **{f"docs/{path.name}": f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))},
    **{
        f"notebooks/{path.name}": f"lessons/{path.name}"
        for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    },
}
"""Files of the repository that are pages of the site."""

WRITTEN_HERE = {"glossary.md", "measured.md"}


@dataclass
class Site:
    """The folder that pages are written to, the files that they link to, and the course's terms."""

    folder: Path
    glossary: Glossary
    sources: set[str] = field(default_factory=set)

    def write(self, page: str, text: str) -> None:
        target = self.folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def link(self, file: str, page: str) -> str:
        """The address, seen from `page`, of the page that shows a file or folder of the repository."""
        target = PAGES.get(file)
        if target is None:
            self.sources.add(file)
            target = source_page(file)
        return os.path.relpath(target, Path(page).parent)

    def links(self, text: str, file: str, page: str) -> str:
        """Markdown of a file of the repository with its relative links led to pages of the site."""

        def lead(link: re.Match[str]) -> str:
            path = os.path.normpath(Path(file).parent / link[1])
            assert (ROOT / path).exists(), f"{file} links to {link[1]}, which is not there"
            return self.link(path, page) + (link[2] or "")

        def name(match: re.Match[str]) -> str:
            if not (ROOT / match[1]).is_file():
                return match[0]
            return f"[`{match[1]}`]({self.link(match[1], page)})"

        parts = FENCED.split(text)
        parts[::2] = [LINK.sub(lead, part) for part in parts[::2]]
        parts[::2] = [re.sub(rf"(?<!\[){SOURCE_NAME.pattern}", name, part) for part in parts[::2]]
        return "".join(parts)


def source_page(file: str) -> str:
    return f"source/{file}/index.md" if (ROOT / file).is_dir() else f"source/{file}.md"


# ------------------------------------------------------------------------------------------------- lessons


def buttons(name: str) -> str:
    """Links to open a lesson elsewhere."""
    repository = REPOSITORY.removeprefix("https://github.com/")
    colab = f"https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}"
    codespace = f"https://codespaces.new/{repository}?quickstart=1"
    return (
        '<p class="open-lesson">'
        f'<a href="../download/{name}" download>Download</a>'
        f'<a href="{colab}">Open in Colab</a><a href="{codespace}">Open in a Codespace</a></p>'
    )


def linked_terms(text: str, glossary: Glossary) -> str:
    """Markdown in which a term in italics leads to the glossary."""

    def link(italic: re.Match[str]) -> str:
        term = glossary.find(italic[1])
        words = " ".join(italic[1].split())
        return f"{{term}}`{words} <{term.name}>`" if term else italic[0]

    parts = FENCED.split(text)
    parts[::2] = [ITALIC.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def unanswered(cell: Any) -> list[dict[str, Any]]:
    """The output of an exercise's check while there is no answer."""
    verdict = Verdict(exercise_of(cell), passed=False, answered=False, says="")
    data = verdict._repr_mimebundle_()
    return [{"output_type": "display_data", "data": data, "metadata": {}}]


def plain(cell: Any, outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Outputs as the site shows them: one style sheet for all pictures, which the pages have already."""
    if is_check(cell):
        outputs = unanswered(cell)
    for output in outputs:
        data = output.get("data", {})
        if "text/html" in data:
            picture = STYLE.sub("", "".join(data["text/html"]))
            output["data"] = {"text/html": picture}
    return outputs


def lesson(name: str, site: Site) -> None:
    """A lesson as its learner opens it, with the outputs of the executed one: no answer is in it."""
    import nbformat

    opened = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    executed = nbformat.read(ROOT / "notebooks/solutions" / name, as_version=4)
    outputs = {cell["id"]: cell.get("outputs", []) for cell in executed.cells}
    page = f"lessons/{name}"
    for cell in opened.cells:
        if cell.cell_type == "markdown":
            text = site.links(cell.source, f"notebooks/{name}", page)
            cell.source = linked_terms(text, site.glossary)
        elif "answer" not in tags(cell):
            if "setup" in tags(cell):
                cell.metadata["tags"] = ["setup", "hide-input"]
            cell.outputs = [nbformat.from_dict(o) for o in plain(cell, outputs.get(cell["id"], []))]
    title, _, rest = opened.cells[0].source.partition("\n")
    opened.cells[0].source = f"{title}\n\n{buttons(name)}\n{rest}"
    site.write(page, nbformat.writes(opened))


# ------------------------------------------------------------------------------------------------ glossary


def lesson_links(numbers: list[str]) -> str:
    names = {name[10:12]: name for name in PAGES if re.match(r"notebooks/\d", name)}
    return ", ".join(f"[{number}]({PAGES[names[number]]})" for number in numbers)


def uses(site: Site) -> dict[str, list[str]]:
    """Term -> numbers of the lessons whose prose has one of its forms."""
    prose = {}
    for file in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        text = " ".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        prose[file.name[:2]] = folded(text)
    found: dict[str, list[str]] = {}
    for term in site.glossary.terms:
        forms = "|".join(re.escape(folded(form)) for form in term.forms)
        form = re.compile(rf"(?<!\w)(?:{forms})(?!\w)")
        found[term.name] = [number for number, text in prose.items() if form.search(text)]
    return found


def entry(term: Term, used: list[str], site: Site) -> Iterator[str]:
    file = term.file
    where = f"https://github.com/pytorch/pytorch/blob/main/{file}"
    where = where if file.startswith("torch/") else site.link(file, "glossary.md")
    others = [number for number in used if number != term.lesson]
    also = f" Also in {lesson_links(others)}." if others else ""
    yield term.name
    yield f"  {term.means} Explained in lesson {lesson_links([term.lesson])}.{also} [`{file}`]({where})"
    yield ""


def glossary(site: Site) -> None:
    used = uses(site)
    lines = [
        "# Glossary",
        "",
        "Each term with its meaning, the lessons that use it, and its source.",
        "",
    ]
    lines += ["````{glossary}"]
    for term in sorted(site.glossary.terms, key=lambda term: folded(term.name)):
        lines += entry(term, used[term.name], site)
    lines += ["````", "", "## Words on the views", "", "| label | meaning |", "| --- | --- |"]
    for label, meaning in sorted(site.glossary.labels.items()):
        lines.append(f"| {label} | {meaning} |".replace("\\", ""))
    site.write("glossary.md", "\n".join(lines) + "\n")


# ------------------------------------------------------------------------------------------------- sources


def sources(site: Site) -> None:
    """A page for each file and folder that is linked to, and for the folders above the files."""
    done: set[str] = set()
    for file in list(site.sources):
        site.sources |= {str(p) for p in Path(file).parents if str(p) != "."}
    while left := sorted(site.sources - done):
        for file in left:
            done.add(file)
            show = folder_page if (ROOT / file).is_dir() else file_page
            site.write(source_page(file), show(file, site))


def file_page(file: str, site: Site) -> str:
    path = ROOT / file
    head = f"---\norphan: true\nnosearch: true\n---\n\n# {file}\n\n"
    language = LANGUAGES.get(path.suffix, "text")
    include = os.path.relpath(path, (site.folder / source_page(file)).parent)
    options = f":language: {language}\n:linenos:\n:class: source-file"
    return f"{head}```{{literalinclude}} {include}\n{options}\n```\n"


def folder_page(folder: str, site: Site) -> str:
    """The files of a folder that have a page, and its folders."""
    page = source_page(folder)
    inside = sorted(name for name in site.sources if str(Path(name).parent) == folder)
    rows = "\n".join(f"- [`{name}`]({site.link(name, page)})" for name in inside)
    about = f"The rest is in [the repository]({REPOSITORY}/tree/main/{folder})."
    return f"---\norphan: true\nnosearch: true\n---\n\n# {folder}\n\n{rows}\n\n{about}\n"


# ------------------------------------------------------------------------------------------------ the site


def one_title(text: str) -> str:
    """Markdown whose first heading is the only one of its rank."""
    parts = FENCED.split(text)
    if sum(len(re.findall(r"^# ", part, re.M)) for part in parts[::2]) > 1:
        parts[::2] = [re.sub(r"^#", "##", part, flags=re.M) for part in parts[::2]]
        parts[0] = re.sub(r"^##", "#", parts[0], count=1, flags=re.M)
    return "".join(parts)


def document(file: str, site: Site) -> None:
    page = PAGES[file]
    text = one_title(FRONT.sub("", (ROOT / file).read_text(encoding="utf-8")))
    site.write(page, site.links(text, file, page))


def lesson_list() -> str:
    names = "\n".join(
        sorted(Path(page).stem for page in PAGES.values() if page.startswith("lessons/"))
    )
    about = (
        "Each page is a notebook that was executed; exercises are yours to answer in a copy of it."
    )
    return f"# The lessons, executed\n\n{about}\n\n```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n"


def reference() -> str:
    """The public names, for autodoc to fill in."""
    import minicompile
    from minicompile import extension

    public = {name: f"minicompile.{name}" for name in minicompile.PUBLIC}
    rules = [
        *re.findall(r"^\| `(\w+)\(", extension.__doc__ or "", re.M),
        "scoped",
        "without",
        "add_plugin",
    ]
    others = {name: f"minicompile.extension.{name}" for name in rules if name not in public}
    lines = ["# Reference", "", "Names of `minicompile`, from their docstrings.", ""]
    for title, names in (("Functions and classes", public), ("Extension points", others)):
        lines += [f"## {title}", ""]
        if title == "Extension points":
            lines += [
                "From `minicompile.extension`; [extending](docs/extending.md) shows each in use.",
                "",
            ]
        for name, path in names.items():
            lines += [
                f"### {name}",
                "",
                "```{eval-rst}",
                f".. {directive(path)}:: {path}",
                "```",
                "",
            ]
    return "\n".join(lines)


def directive(path: str) -> str:
    """What autodoc calls a name's kind."""
    import importlib

    module, _, name = path.rpartition(".")
    thing = getattr(importlib.import_module(module), name)
    if isinstance(thing, type):
        return "autoexception" if issubclass(thing, BaseException) else "autoclass"
    return "autofunction" if inspect.isfunction(thing) else "autodata"


def write(folder: Path) -> Site:
    """Write every page's source into `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    site = Site(folder, read_glossary(ROOT / "notebooks"))
    for file, page in PAGES.items():
        if page.startswith("lessons/"):
            lesson(Path(file).name, site)
        elif page not in WRITTEN_HERE:
            document(file, site)
    glossary(site)
    for path in sorted((HERE / "pages").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        site.write(path.name, site.links(text, f"docs/site/pages/{path.name}", path.name))
    site.write("operators.md", tables.operators(lambda file: site.link(file, "operators.md")))
    site.write("lessons/index.md", lesson_list())
    site.write("api.md", reference())
    site.write("measured.md", tables.measured())
    for name, text in gallery.pages():
        site.write(f"gallery/{name}", text)
    for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"):
        site.write(f"extra/download/{path.name}", path.read_text(encoding="utf-8"))
    sources(site)
    return site


if __name__ == "__main__":
    write(Path(sys.argv[1]))
