"""Plug-ins: found, selected, loaded; without them every answer stays right."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import minicompile as mc
from minicompile.bench import prices
from minicompile.bench.prices import SECOND, cases_of, tokens_of
from minicompile.errors import OptionError
from minicompile.extension import Registry
from minicompile.ops import plugins
from minicompile.options import Options

PACKAGE = Path(mc.__file__).parent

PROGRAM = """
import torch, minicompile as mc
from minicompile.ops.plugins import available
def f(x, w):
    return torch.softmax(x @ w, -1).sum(0)
x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
mc.compile(f)(x, w).square().sum().backward()
ours, w.grad = w.grad, None
f(x, w).square().sum().backward()
torch.testing.assert_close(ours, w.grad)
print(sorted(available()))
"""


def run(program: str, *paths: Path, **environment: str) -> str:
    """What a program prints in a new process."""
    variables = mc.options.child_environment(
        PYTHONPATH=":".join(map(str, (*paths, PACKAGE.parent))), **environment
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=variables,
        capture_output=True,
        text=True,
        cwd=paths[0] if paths else None,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_words_and_names_select():
    every = set(plugins.available())
    assert set(plugins.select("all")) == every
    assert plugins.select("none") == ()
    assert set(plugins.select("default")) == {
        p.name for p in plugins.available().values() if p.default
    }
    assert plugins.select("graph_cache") == ()  # it needs another one
    assert plugins.select("graph_cache,fast_launcher") == ("fast_launcher", "graph_cache")
    assert plugins.select("memory_arena, cuda_graphs") == ("cuda_graphs", "memory_arena")
    assert set(plugins.select("default, flash_attention")) == {
        *plugins.select("default"), "flash_attention",
    }  # fmt: skip
    assert Options(plugins=["cuda_graphs"]).plugins == ("cuda_graphs",)


@pytest.mark.parametrize("wrong", ["unheard_of", ["unheard_of"], 3])
def test_an_unknown_plugin_is_refused_with_what_exists(wrong: object):
    with pytest.raises(OptionError, match=r"graph_cache|tuple of names"):
        mc.compile(lambda x: x, options={"plugins": wrong})


def test_the_environment_selects():
    program = "from minicompile.options import Options; print(Options().plugins)"
    assert run(program, MINICOMPILE_PLUGINS="none") == "()"
    assert run(program, MINICOMPILE_PLUGINS="cuda_graphs") == "('cuda_graphs',)"


def test_a_rule_of_a_plugin_left_out_gives_way_to_the_core_s(monkeypatch: pytest.MonkeyPatch):
    table: Registry[str] = Registry("test_table", "for this test")
    exec(
        compile("table('shared', 'own')('core')", "core", "exec"),
        {"__name__": "core", "table": table},
    )
    exec(
        compile("table('shared', 'extra')('plug-in')", "plug", "exec"),
        {"__name__": "elsewhere.rules", "table": table},
    )
    assert dict(table) == {"shared": "plug-in", "own": "core", "extra": "plug-in"}
    assert table.without_modules(("elsewhere.",)) == {"shared": "core", "own": "core"}
    with table.scoped():
        table("shared")("user")
        assert table.without_modules(("elsewhere.",))["shared"] == "user"
    assert table.without_modules(("elsewhere.",))["shared"] == "core"


COMMANDS = {
    "bench": [["bench"], ["demo"], ["plugins"]],
    "lessons": [["lessons", "folder"], ["grade", "notebook"]],
}
"""Folders of tools that may be deleted from the package, and the commands that go with them."""

COPY = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
"""
"""An editable installation would find in the repository what the copy lacks."""

COMMAND = """
from minicompile.__main__ import main
sys.stderr = sys.stdout
assert main({command}) == 1
"""


@pytest.mark.long
@pytest.mark.parametrize("folders", [["plugins"], ["exporting", "bench", "lessons"]])
def test_without_folders_the_package_compiles_and_trains(folders: list[str], tmp_path: Path):
    leave_out = shutil.ignore_patterns(*folders, "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "minicompile", ignore=leave_out)
    assert (run(COPY + PROGRAM, tmp_path) == "[]") is ("plugins" in folders)
    for folder in folders:
        for command in COMMANDS.get(folder, []):
            needs = f"needs the folder minicompile/{folder}, which is not there"
            said = run(COPY + COMMAND.format(command=command), tmp_path)
            assert said == f"minicompile {command[0]}: {needs}"


PACKAGE_ELSEWHERE = {
    "loud/__init__.py": """
from minicompile.ops.plugins import Plugin
PLUGIN = Plugin("loud", "Says that it compiles.", ("loud.rules",), default=False)
""",
    "loud/rules.py": """
from minicompile.extension import around_compile
@around_compile("loud")
def loud(capture, options, compile):
    print("compiling", capture.name)
    return compile(capture, options)
""",
    "loud-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n",
    "loud-1.0.dist-info/entry_points.txt": "[minicompile.plugins]\nloud = loud:PLUGIN\n",
}


@pytest.mark.long
def test_an_installed_package_brings_a_plugin(tmp_path: Path):
    for name, text in PACKAGE_ELSEWHERE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    program = """
import torch, minicompile as mc
def f(x): return x + 1
mc.compile(f)(torch.ones(3))
with mc.scoped():
    mc.compile(f, options={"plugins": ["loud"]})(torch.ones(3))
mc.compile(f, options={"plugins": ["loud"]})(torch.ones(3))
mc.compile(f)(torch.ones(3))
"""
    assert run(program, tmp_path) == "compiling f\ncompiling f"


def test_one_that_can_t_be_imported_is_left_out_with_a_warning(tmp_path: Path):
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[minicompile.plugins]\nbroken = not_there:PLUGIN\n")
    program = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    from minicompile.ops.plugins import available
    assert "broken" not in available()
print(caught[0].message)
"""
    assert "plug-in 'broken' can't be imported" in run(program, tmp_path)


@pytest.mark.parametrize("name", sorted(plugins.available()))
def test_each_has_a_purpose_and_modules_in_its_own_folder(name: str):
    plugin = plugins.available()[name]
    assert plugin.purpose.endswith(".") and len(plugin.purpose.splitlines()) == 1
    assert all(module.startswith(f"minicompile.plugins.{name}.") for module in plugin.modules)
    assert set(plugin.needs) <= set(plugins.available())
    calls = [name for name in plugin.cases if not name.endswith(SECOND)]
    assert [case.name for case in cases_of(plugin, "cuda")] == calls


def test_tokens_leave_out_comments_docstrings_and_layout():
    source = '"""Doc."""\n\n# note\ndef f(x):\n    """Doc\n    more."""\n    return x  # note\n'
    assert tokens_of(source) == len(["def", "f", "(", "x", ")", ":", "return", "x"])
    assert tokens_of('y = f"a {x} {f(1)} b"') == 3


def test_the_page_of_prices_is_what_the_command_prints():
    page = (PACKAGE.parent / "docs" / "plugins.md").read_text(encoding="utf-8")
    assert page == prices.markdown(plugins.available().values())
