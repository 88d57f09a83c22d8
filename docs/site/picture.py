"""`python docs/site/picture.py`: the README's pictures of the explorer, from a trace made now."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from look import FLAGS, chromium
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import gallery  # noqa: E402

from minicompile.show.html import STYLE  # noqa: E402

SIZE = {"width": 1180, "height": 600}
TALL = "<style>body { margin: 0 } .mc { --tall: 270px }</style>"


def main() -> None:
    """Write docs/explorer-light.png and docs/explorer-dark.png, the softmax pinned."""
    arguments = gallery.first_inputs()
    view = gallery.explorer(gallery.first_steps, arguments, gallery.CPU)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder, "explorer.html")
        file.write_text(f"<!doctype html><meta charset=utf-8>{STYLE}{TALL}{view}", encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        for scheme in ("light", "dark"):
            tab = browser.new_page(viewport=SIZE, color_scheme=scheme)
            tab.goto(file.as_uri())
            tab.locator(".pane[data-p=source] .ln").last.click()
            tab.mouse.move(0, 0)
            tab.locator(".mc.trace").screenshot(path=HERE.parent / f"explorer-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main()
