"""`python docs/site/look.py build/site/html [PAGE ...]`: the built site in Chromium, without a network.

Of every page that is named (default: the lessons, the gallery and the pages of the menu): nothing outside of the
site is asked for, no script fails, every picture is there, text fits a phone, explorers light up, steppers step,
and axe-core finds no violation in light and dark. `--shots FOLDER` keeps pictures at three widths. A line for
each finding, exit code 1.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-quic", "--disable-sync", "--disable-component-update"]
FLAGS.append("--host-resolver-rules=MAP * ~NOTFOUND")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = {"phone": 390, "tablet": 820, "desk": 1400}

BROKEN = "[...document.images].filter((i) => !i.complete || !i.naturalWidth).map((i) => i.alt)"
WIDER = "document.documentElement.scrollWidth - window.innerWidth"
LIGHT_UP = """() => [...document.querySelectorAll('.mc.trace')].map((root) => {
    const lines = [...root.querySelectorAll('.pane .ln')];
    for (const line of lines) {
        line.dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));
        line.dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
        if (root.explorer && new Set(root.explorer.lit().map(([pane]) => pane)).size > 1) return true;
    }
    return false;
})"""
STEP = """() => [...document.querySelectorAll('.mc .steps.live')].map((root) => {
    const seen = () => [...root.children].findIndex((part) => part.tagName === 'DETAILS' && part.open);
    const before = seen();
    const buttons = root.querySelectorAll('.bar button');
    if (!buttons.length) return true;
    buttons[1].click();
    const moved = seen() !== before;
    buttons[0].click();
    return moved && seen() === before;
})"""


class Look:
    """Chromium, and how many things were looked at."""

    def __init__(self, browser: Any, folder: Path, shots: Path | None) -> None:
        self.browser, self.folder, self.shots = browser, folder, shots
        self.explorers = self.steppers = self.pictures = self.requests = 0

    def open(self, context: Any, page: str, findings: list[str]) -> Any:
        tab = context.new_page()

        def asked(request: Any) -> None:
            self.requests += 1
            if not request.url.startswith((self.folder.as_uri(), "data:", "blob:")):
                findings.append(f"{page}: asks for {request.url}")

        tab.on("request", asked)
        tab.on("pageerror", lambda error: findings.append(f"{page}: {error}"))
        tab.goto((self.folder / page).as_uri())
        return tab

    def alive(self, page: str) -> Iterator[str]:
        """Pictures, explorers and steppers of a page, in a wide window."""
        context = self.browser.new_context(viewport={"width": 1400, "height": 1000})
        findings: list[str] = []
        tab = self.open(context, page, findings)
        yield from (f"{page}: no picture: {alt}" for alt in tab.evaluate(BROKEN))
        lit, stepped = tab.evaluate(LIGHT_UP), tab.evaluate(STEP)
        self.pictures += tab.evaluate("document.images.length + document.querySelectorAll('.mc').length")
        self.explorers += len(lit)
        self.steppers += len(stepped)
        yield from (f"{page}: explorer {n} does not light up" for n, on in enumerate(lit) if not on)
        yield from (f"{page}: stepper {n} does not step" for n, on in enumerate(stepped) if not on)
        context.close()
        yield from findings

    def accessible(self, page: str, scheme: str) -> Iterator[str]:
        context = self.browser.new_context(viewport={"width": 1400, "height": 1000}, color_scheme=scheme)
        tab = self.open(context, page, [])
        for violation in Axe().run(tab).response["violations"]:
            places = [node["target"][0] for node in violation["nodes"]]
            yield f"{page} ({scheme}): {violation['id']}: {len(places)} places, {places[:3]}"
        context.close()

    def fits(self, page: str) -> Iterator[str]:
        for name, width in WIDTHS.items():
            context = self.browser.new_context(viewport={"width": width, "height": 900})
            tab = self.open(context, page, [])
            if (wider := tab.evaluate(WIDER)) > 0:
                yield f"{page}: {wider} pixels too wide for a {name}"
            if self.shots:
                tab.screenshot(path=self.shots / f"{page.replace('/', '_')}-{name}.png")
            context.close()


def named(folder: Path) -> list[str]:
    """Every page but those that only show a source file."""
    pages = (page.relative_to(folder).as_posix() for page in folder.rglob("*.html"))
    return sorted(page for page in pages if not page.startswith("source/"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pages", nargs="*")
    parser.add_argument("--shots", type=Path, help="keep pictures in this folder")
    chosen = parser.parse_args(arguments)
    folder = chosen.folder.resolve()
    pages = chosen.pages or named(folder)
    if chosen.shots:
        chosen.shots.mkdir(parents=True, exist_ok=True)
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    findings: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        look = Look(browser, folder, chosen.shots)
        for page in pages:
            findings += look.alive(page)
            findings += look.fits(page)
            findings += look.accessible(page, "light")
            findings += look.accessible(page, "dark")
        browser.close()
    print(*findings, sep="\n", end="\n" * bool(findings))
    print(
        f"{len(pages)} pages, {look.pictures} pictures, {look.explorers} explorers, {look.steppers} steppers, "
        f"{look.requests} requests; {len(findings)} findings"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
