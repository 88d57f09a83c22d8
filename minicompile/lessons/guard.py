"""What an answer may not do, read from its text: a guard against shortcuts, before anything runs.

    answer cell --refusal--> "" or "it uses eval, which reaches outside the answer"

The guard is no sandbox: an answer that gets past it runs in a process that holds no expected value and no
verdict (see `lessons/grade.py`). It is what keeps a built-in from doing the exercise under another name.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from typing import Any

from minicompile.lessons.outline import Outline

MODULES = frozenset(
    """__future__ abc ast bisect cmath collections contextlib copy dataclasses decimal dis enum fractions
    functools functorch heapq itertools math minicompile numbers numpy operator random re statistics string
    sympy textwrap time torch triton typing warnings""".split()  # noqa: SIM905 (a table of words)
)
"""Modules that an answer may import from."""

REACHING = frozenset(
    """get_ipython builtins exec eval compile open input breakpoint globals locals vars setattr delattr
    _exit modules _getframe settrace setprofile gc ctypes nbval unittest mock monkeypatch importlib inspect
    os sys io signal subprocess socket threading _thread multiprocessing pickle marshal shutil pathlib
    tempfile mmap runpy atexit linecache faulthandler asyncio site pty posix cpp_extension serialization
    attrgetter methodcaller lambdify parse_expr exercise lessons checks check In Out
    f_back f_globals f_locals f_builtins tb_frame gi_frame ag_frame cr_frame _os _sys _io
    get_overridable_functions load_library call_method from_file resolve_name generate
    Formatter get_field get_type_hints ForwardRef evaluate_forward_ref singledispatch singledispatchmethod
    sympify generated define on_generate_code set_codegen make_dataclass exec_module""".split()  # noqa: SIM905
)
"""Names by which an answer would reach outside itself."""

HARMLESS = frozenset(
    ("compile", "modules", "check", "eval", "signal", "input", "open", "call_method", "site")
)
"""Of these only the plain name is refused: `torch.compile` and `model.eval()` are other things."""

DOTTED = frozenset(
    """torch.load torch.save torch.hub torch._C torch.jit torch.package torch.classes torch.distributed
    numpy.load numpy.save np.load np.save""".split()  # noqa: SIM905
)
"""Functions of libraries that read or write files, or run what they contain."""

SPECIAL = frozenset(
    """__init__ __call__ __name__ __qualname__ __module__ __doc__ __code__ __len__ __iter__ __next__ __enter__
    __exit__ __contains__ __getitem__ __setitem__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __bool__
    __repr__ __str__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __matmul__ __truediv__ __rtruediv__
    __floordiv__ __mod__ __pow__ __neg__ __abs__ __and__ __or__ __xor__ __invert__ __lshift__ __rshift__
    __torch_function__ __torch_dispatch__ __post_init__""".split()  # noqa: SIM905
)
"""Names with double underscores that an answer may use; the others lead to the interpreter's insides."""


def bound(tree: ast.AST) -> set[str]:
    """Names that code binds at the level of the module."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(
            node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
        ):
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        if isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
        found |= bound(node)
    return found


def imports(tree: ast.AST) -> dict[str, str]:
    """Names that code imports, with what they stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                found[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def refusal(text: str, setup: Sequence[Any], exercise: Outline) -> str:
    """Why an answer is not run at all, or ""; `setup` are the cells whose names it may not take."""
    if not text:
        return "its cell is missing"
    if "NBVAL_" in text or "PYTEST_VALIDATE" in text:
        return "it holds a marker of nbval"
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        return f"line {line} is not Python: {getattr(error, 'msg', error)}"
    if used := forbidden_uses(text, exercise):
        return f"{exercise.name}: expected an answer of your own, got a use of {used[0]}"
    lesson = ast.parse("\n".join(cell.source for cell in setup))
    own, theirs = imports(tree), imports(lesson)
    reserved = bound(lesson)
    for name in sorted(bound(tree) - set(exercise.answers)):
        if hasattr(builtins, name):
            return f"it gives {name}, which is Python's, another meaning"
        if name in reserved and (name not in own or own[name] != theirs.get(name)):
            return f"it gives {name}, which is the lesson's, another meaning"
    outside = reserved | set(own)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            return "it uses global"
        if module := imported_by(node):
            return f"it imports {module}, which no answer needs"
        if name := reached_by(node):
            return f"it uses {name}, which reaches outside the answer"
        if isinstance(node, ast.Name) and node.id == "getattr" and id(node) not in called:
            return "it uses getattr without a name that can be read"
        if isinstance(node, ast.Call) and (name := unread_name(node, exercise)):
            return f"it uses {name} without a name that can be read"
        root, target = changed_by(node)
        if root in outside:
            return f"it changes {target}, which is not its own"
    return ""


def forbidden_uses(text: str, exercise: Outline) -> list[str]:
    """The names in the text of an answer that its exercise forbids, sorted."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            dotted = ast.unparse(node)
            found.update((dotted, dotted.rpartition(".")[2]))
        elif isinstance(node, ast.MatchClass):
            found.update(node.kwd_attrs)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            names = [part.value for part in node.args if isinstance(part, ast.Constant)]
            found.update(name for name in names if isinstance(name, str))
        elif isinstance(node, ast.alias):
            found.update((node.name, node.name.rpartition(".")[2]))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *node.module.split(".")))
    return sorted(found & exercise.forbidden)


def imported_by(node: ast.AST) -> str:
    """The module outside `MODULES` that a statement imports, else ""."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or "."]
        if any(alias.name == "*" for alias in node.names):
            return f"everything of {node.module}"
    return next((name for name in names if name.split(".")[0] not in MODULES), "")


NAMED_BY = {"getattr": 1, "hasattr": 1, "call_method": 0, "create_node": 1}
"""Functions and methods that find something by its name, and the place of that name among their arguments."""


def unread_name(call: ast.Call, exercise: Outline) -> str:
    """The function of `NAMED_BY` that gets a name that no text shows or no answer may use, else ""."""
    match call.func:
        case ast.Name(id="getattr" | "hasattr" as function):
            computed = exercise.computed_names
        case ast.Attribute(attr="call_method" | "create_node" as function):
            computed = False
        case _:
            return ""
    place = NAMED_BY[function]
    name = call.args[place] if len(call.args) > place else None
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        refused = refused_attribute(name.value) or name.value in exercise.forbidden
        return function if refused else ""
    shown = function == "create_node" and isinstance(name, ast.Attribute)
    return "" if computed or shown else function


def refused_attribute(name: str) -> str:
    """The name of an attribute if no answer may use it, else ""."""
    special = name.startswith("__") and name.endswith("__") and name not in SPECIAL
    return name if special or name in REACHING - HARMLESS else ""


def reached_by(node: ast.AST) -> str:
    """The name by which a piece of code reaches outside the answer, else ""."""
    match node:
        case ast.Name(id=name):
            special = name.startswith("__") and name not in SPECIAL
            return name if name in REACHING or special else ""
        case ast.Attribute(attr=name):
            dotted = ast.unparse(node)
            return dotted if dotted in DOTTED else refused_attribute(name)
        case ast.MatchClass(kwd_attrs=names):
            return next(filter(None, map(refused_attribute, names)), "")
        case ast.ImportFrom(module=str(module), names=aliases):
            whole = [f"{module}.{alias.name}" for alias in aliases]
            parts = [*module.split("."), *(alias.name for alias in aliases)]
            dotted = next((name for name in whole if name in DOTTED), "")
            return dotted or next(filter(None, map(refused_attribute, parts)), "")
        case ast.Import(names=aliases):
            parts = [part for alias in aliases for part in alias.name.split(".")]
            dotted = next((a.name for a in aliases if a.name in DOTTED), "")
            return dotted or next(filter(None, map(refused_attribute, parts)), "")
    return ""


def changed_by(node: ast.AST) -> tuple[str, str]:
    """The variable whose attribute or item a piece of code sets or deletes, and that target."""
    if not isinstance(node, ast.Attribute | ast.Subscript) or isinstance(node.ctx, ast.Load):
        return ("", "")
    root: ast.expr = node
    while isinstance(root, ast.Attribute | ast.Subscript):
        root = root.value
    return (root.id if isinstance(root, ast.Name) else "", ast.unparse(node))
