"""What an answer may not do, read from its text: a guard against shortcuts, before anything runs.

    answer cell --refusal--> "" or "it uses eval, which reaches outside the answer"

The guard is no sandbox: an answer that gets past it runs in a process that holds no expected value and no
verdict (see `lessons/grade.py`). It is what keeps a built-in from doing the exercise under another name.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    sympify generated define on_generate_code set_codegen make_dataclass exec_module *""".split()  # noqa: SIM905
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


NAMED_BY = {"getattr": 1, "hasattr": 1, "call_method": 0, "create_node": 1}
"""Functions and methods that find something by its name, and the place of that name among their arguments."""


@dataclass(frozen=True)
class Terms:
    """What the answer to an exercise is called, and what it may not do."""

    name: str
    answers: tuple[str, ...]
    """The names that the answer cell defines: the parameters of the check after the run."""
    forbidden: frozenset[str]
    """Names that an answer may not use: the built-in way to have the result."""
    computed_names: bool
    """Whether an answer may look up attributes whose names its text doesn't show, as a graph's methods."""


def bound(text: str) -> set[str]:
    """Names that code binds at the level of the module."""
    symbols = symtable.symtable(text, "answer", "exec").get_symbols()
    return {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}


def imports(tree: ast.AST) -> dict[str, str]:
    """Names that code imports, with what they stand for."""
    imported = {}
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            root = alias.name.split(".")[0]
            whole = alias.name if alias.asname else root
            imported[alias.asname or root] = f"{getattr(node, 'module', '')}:{whole}"
    return imported


def uses(node: ast.AST) -> list[str]:
    """The names by which a piece of code reaches something: plain, dotted, and with a dot in front those of
    attributes and of the parts of modules."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(attr=name):
            return [ast.unparse(node), f".{name}"]
        case ast.MatchClass(kwd_attrs=names):
            return [f".{name}" for name in names]
        case ast.Call(args=args) if named_by(node):
            return [f".{arg.value!s}" for arg in args if isinstance(arg, ast.Constant)]
        case ast.Import(names=aliases):
            dotted = [alias.name for alias in aliases]
        case ast.ImportFrom(module=module, names=aliases):
            dotted = [str(module), *(f"{module}.{alias.name}" for alias in aliases)]
        case _:
            return []
    return [*dotted, *(f".{part}" for name in dotted for part in name.split("."))]


def named_by(call: ast.Call) -> str:
    """The function of `NAMED_BY` that is called, else ""."""
    name = ast.unparse(call.func).rpartition(".")[2]
    return name if name in NAMED_BY else ""


def refused(use: str) -> bool:
    """Is it a name (of `uses`) that no answer may use?"""
    name = use.removeprefix(".")
    special = name.startswith("__") and name.endswith("__") and name not in SPECIAL
    return special or use in DOTTED or name in (REACHING - HARMLESS if use != name else REACHING)


def forbidden_uses(text: str, terms: Terms) -> list[str]:
    """The names in the text of an answer that its exercise forbids, sorted."""
    try:
        nodes = ast.walk(ast.parse(text))
    except SyntaxError:
        return []
    return sorted({use.removeprefix(".") for n in nodes for use in uses(n)} & terms.forbidden)


def refusal(text: str, setup: Sequence[Any], terms: Terms) -> str:
    """Why an answer is not run at all, or ""; `setup` are the cells whose names it may not take."""
    if not text:
        return "its cell is missing"
    try:
        tree, names = ast.parse(text), bound(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        return f"line {line} is not Python: {getattr(error, 'msg', error)}"
    if used := forbidden_uses(text, terms):
        return f"{terms.name}: expected an answer of your own, got a use of {used[0]}"
    lesson = "\n".join(cell.source for cell in setup)
    reserved, own, theirs = bound(lesson), imports(tree), imports(ast.parse(lesson))
    for name in sorted(names - set(terms.answers)):
        if hasattr(builtins, name):
            return f"it gives {name}, which is Python's, another meaning"
        if name in reserved and (name not in own or own[name] != theirs.get(name)):
            return f"it gives {name}, which is the lesson's, another meaning"
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            return "it uses global"
        if module := imported_by(node):
            return f"it imports {module}, which no answer needs"
        if name := next(filter(refused, uses(node)), ""):
            return f"it uses {name.removeprefix('.')}, which reaches outside the answer"
        if hides_a_name(node, called, terms):
            return f"it uses {ast.unparse(node)[:60]}, whose name the text does not show"
        root, target = changed_by(node)
        if root in reserved or root in own:
            return f"it changes {target}, which is not its own"
    return ""


def imported_by(node: ast.AST) -> str:
    """The module outside `MODULES` that a statement imports, else ""."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or "."]
    return next((name for name in names if name.split(".")[0] not in MODULES), "")


def hides_a_name(node: ast.AST, called: set[int], terms: Terms) -> bool:
    """Does code find something by a name that it computes? `called`: what the answer calls, by id."""
    if isinstance(node, ast.Name) and node.id == "getattr":
        return id(node) not in called
    if not isinstance(node, ast.Call) or not (function := named_by(node)):
        return False
    name = dict(enumerate(node.args)).get(NAMED_BY[function])
    if isinstance(name, ast.Constant) or (terms.computed_names and function.endswith("attr")):
        return False
    return not (function == "create_node" and isinstance(name, ast.Attribute))


def changed_by(node: ast.AST) -> tuple[str, str]:
    """The variable whose attribute or item a piece of code sets or deletes, and that target."""
    if not isinstance(node, ast.Attribute | ast.Subscript) or isinstance(node.ctx, ast.Load):
        return ("", "")
    root: ast.expr = node
    while isinstance(root, ast.Attribute | ast.Subscript):
        root = root.value
    return (root.id if isinstance(root, ast.Name) else "", ast.unparse(node))
