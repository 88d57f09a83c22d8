"""`python docs/site/look.py build/site/html [PAGE ...]`: the built site in Chromium, without a network.

Of every page that is named (default: all but those of source files): nothing outside of the site is asked
for, no script fails, every picture is there, explorers light up, steppers step, text fits a phone, and
axe-core finds no breach of WCAG 2.1 AA in light and dark. `--shots FOLDER` keeps pictures at three widths. A
line for each finding, exit code 1.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-quic", "--disable-sync", "--disable-component-update"]
FLAGS.append("--host-resolver-rules=MAP * ~NOTFOUND")
NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = {"phone": 390, "tablet": 820, "desk": 1400}
RULES = {
    "light": {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]},
    "dark": {"runOnly": {"type": "rule", "values": ["color-contrast"]}},
}
"""What axe-core looks for: all of WCAG 2.1 AA, and again what depends on colours."""

PICTURES = "[...document.images].map((i) => [i.alt, i.complete && i.naturalWidth > 0])"
WIDER = "document.documentElement.scrollWidth - window.innerWidth"
EXPLORERS = """() => [...document.querySelectorAll('.mc.trace')].map((root) => {
    const panes = () => new Set(root.explorer.lit().map(([pane]) => pane)).size;
    return Boolean(root.explorer) && [...root.querySelectorAll('.pane .ln')].some((line) => {
        line.dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
        return panes() > 1;
    });
})"""
STEPPERS = """() => [...document.querySelectorAll('.mc .steps.live')].map((root) => {
    const parts = [...root.children].filter((part) => part.tagName === 'DETAILS');
    const open = () => parts.findIndex((part) => part.open), buttons = root.querySelectorAll('.bar button');
    if (parts.length < 2) return true;
    buttons[1].click();
    const second = open();
    buttons[0].click();
    return second === 1 && open() === 0;
})"""


def chromium() -> str | None:
    """Where Chromium is; Playwright looks for a build of its own where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def alive(tab: Any, counts: Counter[str]) -> Iterator[str]:
    """Of a page's pictures, explorers and steppers those that don't work."""
    for kind, script in (("explorer", EXPLORERS), ("stepper", STEPPERS)):
        works = tab.evaluate(script)
        counts[f"{kind}s"] += len(works)
        yield from (f"{kind} {number} is dead" for number, fine in enumerate(works) if not fine)
    pictures = tab.evaluate(PICTURES)
    counts["images"] += len(pictures)
    counts["views"] += tab.locator(".mc").count()
    yield from (f"an image is not there: {alt}" for alt, fine in pictures if not fine)


def fits(tab: Any, shot: str) -> Iterator[str]:
    """Widths for which a page is too wide; `shot` is where pictures are kept, "" for none."""
    for name, width in WIDTHS.items():
        tab.set_viewport_size({"width": width, "height": 900})
        if shot:
            tab.screenshot(path=f"{shot}-{name}.png")
        if (wider := tab.evaluate(WIDER)) > 0:
            yield f"{wider} pixels too wide for a {name}"


def accessible(tab: Any) -> Iterator[str]:
    for scheme, rules in RULES.items():
        tab.emulate_media(color_scheme=scheme)
        for breach in Axe().run(tab, options=rules).response["violations"]:
            node = breach["nodes"][0]
            said = node["failureSummary"].splitlines()[-1].strip()
            places = f"{len(breach['nodes'])} places, {node['target'][0]}"
            yield f"{scheme}: {breach['id']}: {places}: {said}"


def look(context: Any, file: Path, root: Path, shot: str, counts: Counter[str]) -> list[str]:
    """Everything that is wrong with a page."""
    findings: list[str] = []
    tab = context.new_page()

    def asked(request: Any) -> None:
        counts["requests"] += 1
        if not request.url.startswith((root.as_uri(), "data:")):
            findings.append(f"asks for {request.url}")

    tab.on("request", asked)
    tab.on("pageerror", lambda error: findings.append(str(error)))
    tab.goto(file.as_uri())
    findings += [*accessible(tab), *fits(tab, shot), *alive(tab, counts)]
    tab.close()
    counts["findings"] += len(findings)
    return findings


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pages", nargs="*", help='such as "lessons/0*" (default: all but sources)')
    parser.add_argument("--shots", type=Path, help="keep pictures in this folder")
    chosen = parser.parse_args(arguments)
    root = chosen.folder.resolve()
    every = sorted(page.relative_to(root).as_posix() for page in root.rglob("*.html"))
    forms = chosen.pages or ["[!s]*", "search.html"]
    pages = [page for page in every if any(fnmatch(page, form) for form in forms)]
    if chosen.shots:
        chosen.shots.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter(pages=len(pages))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        context = browser.new_context(viewport={"width": 1400, "height": 1000})
        for page in pages:
            shot = str(chosen.shots / page.replace("/", "_")) if chosen.shots else ""
            for finding in look(context, root / page, root, shot, counts):
                print(f"{page}: {finding}", flush=True)
        browser.close()
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 1 if counts["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
