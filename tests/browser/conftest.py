"""A JupyterLab of its own, and Chromium to drive it.

What may be missing on a reader's machine is said in a skip; under MINICOMPILE_REQUIRE_BROWSER=1 (set by
`.ci/run`) it is a failure. MINICOMPILE_SCREENSHOTS=folder keeps pictures of what was seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.browser.pages import Lab, Pages

ROOT = Path(__file__).parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
# Nothing but this machine has an address: a page that asks for more is seen, and gets nothing.
FLAGS.append("--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1")

SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false"},
}
"""Of JupyterLab: no question about news above the notebook, and cells out of sight are in the page too."""


def missing(what: str, remedy: str) -> None:
    """Skip with a notice, or fail where a browser is required."""
    told = f"the views were not tried in a browser: {what} is missing; to try them, {remedy}"
    if os.environ.get("MINICOMPILE_REQUIRE_BROWSER"):
        pytest.fail(told)
    warnings.warn(told, stacklevel=2)  # a skip's reason is not printed, a warning is
    pytest.skip(told)


@pytest.fixture(scope="package")
def pages() -> Iterator[Pages]:
    """Opens pages in Chromium and records what they ask for.

    Per package, not session: while Playwright is open no other test could run an event loop.
    """
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None:
        missing("Chromium", "apt install chromium, or on macOS brew install --cask chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("Python's playwright", "pip install playwright")
    shots = os.environ.get("MINICOMPILE_SCREENSHOTS")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield Pages(browser.new_context(viewport={"width": 1400, "height": 1100}), shots)
        browser.close()


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab on loopback that knows nothing of the user's settings, kernels and trusted notebooks."""
    home = tmp_path_factory.mktemp("lab")
    notebooks = home / "notebooks"
    notebooks.mkdir()
    command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser"]
    command.append(f"--ServerApp.root_dir={notebooks}")
    with serving(command, notebooks, home) as found:
        yield found


@pytest.fixture(scope="module")
def make_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The JupyterLab of `make lab`, its command line read from the Makefile, in a copy of the lessons.

    The page that it opens in the reader's browser is said in the file `opened` beside them.
    """
    if shutil.which("make") is None:
        missing("make", "apt install make")
    home = tmp_path_factory.mktemp("make_lab")
    copy = home / "copy"
    (copy / "notebooks").mkdir(parents=True)
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(notebook, copy / "notebooks")
    dry = ["make", "--dry-run", "--no-print-directory", "lab", f"PY={sys.executable}"]
    printed = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with serving(shlex.split(printed.splitlines()[-1]), copy, home) as found:
        found.folder = copy / "notebooks"  # the folder of the notebook that it was called with
        yield found


@contextlib.contextmanager
def serving(command: list[str], folder: Path, home: Path) -> Iterator[Lab]:
    """The JupyterLab that a command starts in a folder, on loopback, with settings of its own in `home`."""
    if find_spec("jupyterlab") is None:
        missing("JupyterLab", "pip install jupyterlab")
    folders = {
        name: str(home / name.lower())
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }
    environment: dict[str, Any] = {**os.environ, **folders, "PYTHONPATH": str(ROOT)}
    environment["BROWSER"] = f'sh -c \'echo "$0" > "{folder}/opened"\' %s'
    for name, setting in SETTINGS.items():
        file = home / "jupyter_config_dir/lab/user-settings/@jupyterlab" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".jupyterlab-settings").write_text(json.dumps(setting))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(8)
    alone = [
        *(
            "--ip=127.0.0.1",
            f"--port={port}",
            "--ServerApp.port_retries=0",
        ),
        f"--IdentityProvider.token={token}",
        *("--LabApp.news_url=None", "--LabApp.extension_manager=readonly"),
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    log = home / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [*command, *alone], cwd=folder, env=environment, stdout=out, stderr=out
        )
    try:
        found = Lab(f"http://127.0.0.1:{port}", token, folder)
        await_server(server, f"{found.url}/api?token={token}", log)
        yield found
    finally:
        server.terminate()
        server.wait(20)


def await_server(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Raises with the server's log if it does not answer in a minute."""
    for _ in range(300):
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(url).close()
            return
        except urllib.error.URLError:
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()}")
