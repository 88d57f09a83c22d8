"""What a name in backticks may mean: code that the reader saw, Python, PyTorch, this package, or a file."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import functools
import importlib
import keyword
import math
import operator
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORD = re.compile(r"[A-Za-z_]\w*")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
COMMANDS = (
    "make",
    "python",
    "pip",
    "minicompile",
    "jupyter",
    "conda",
    "cd",
    "git",
    "g++",
    "objdump",
)
"""A span that begins so is typed into a terminal."""
FILE = re.compile(r"[\w.~$*{}/-]+")
ENDINGS = (
    ".py",
    ".h",
    ".c",
    ".cpp",
    ".cuh",
    ".js",
    ".css",
    ".md",
    ".toml",
    ".ipynb",
    ".txt",
    ".yaml",
    ".cu",
)
TORCH_ROOMS = (
    "_dynamo",
    "_inductor",
    "_functorch",
    "_higher_order_ops",
    "_subclasses",
    "_prims",
    "_decomp",
    "fx",
    "export",
    "autograd",
    "_refs",
    "_guards.py",
    "_ops.py",
    "utils",
    "_logging",
    "nn",
)
ALIASES = {
    "mc": "minicompile",
    "F": "torch.nn.functional",
    "nn": "torch.nn",
    "fx": "torch.fx",
    "aten": "torch.ops.aten",
    "prims": "torch.ops.prims",
    "np": "numpy",
    "tl": "triton.language",
    "config": "torch._inductor.config",
}
TYPES = (str, list, dict, set, tuple, int, float, bytes, type, object, type(lambda: 0))


def words(text: str) -> set[str]:
    """The identifiers in a text."""
    return set(WORD.findall(text))


def torch_folder() -> Path:
    return Path(str(importlib.import_module("torch").__file__)).parent


@functools.cache
def torch_words() -> frozenset[str]:
    """Identifiers of PyTorch's compiler that no English sentence has: with an underscore or an inner capital,
    and whatever it defines."""
    found: set[str] = set()
    for room in TORCH_ROOMS:
        place = torch_folder() / room
        for file in [place] if place.suffix else place.rglob("*.py"):
            with contextlib.suppress(OSError):
                text = file.read_text(encoding="utf-8", errors="ignore")
                found.update(re.findall(r"^\s*(?:class|def)\s+(\w+)", text, flags=re.M))
                found.update(re.findall(r"\b(?:\w+_\w+|\w*[a-z][A-Z]\w*)\b", text))
    return frozenset(found)


@functools.cache
def package_words(root: Path) -> frozenset[str]:
    """Names that this repository's package, lessons and C sources define or spell as strings."""
    found: set[str] = set()
    for file in [*root.glob("minicompile/**/*.py"), *root.glob("notebooks/*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.ClassDef() | ast.FunctionDef():
                    found.add(node.name)
                case ast.Attribute():
                    found.add(node.attr)
                case ast.arg():
                    found.add(node.arg)
                case ast.keyword(arg=str(name)):
                    found.add(name)
                case ast.alias():
                    found.update(words(node.name))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
                case ast.Constant(value=str(value)) if re.fullmatch(r"[\w.:-]{2,60}", value):
                    found.update(words(value))
        for assigned in re.findall(
            r"^(\w+)(?:: .+)? = ", file.read_text(encoding="utf-8"), flags=re.M
        ):
            found.add(assigned)
    for pattern in ("*.c", "*.h"):
        for file in root.glob(f"minicompile/**/{pattern}"):
            found.update(re.findall(r"\b\w+_\w+\b", file.read_text(encoding="utf-8")))
    return frozenset(found)


@functools.cache
def paths(root: Path) -> tuple[str, ...]:
    """Every file and folder that a lesson may send its reader to, as `/minicompile/api.py`."""
    found = [
        "/Makefile",
        "/README.md",
        "/pyproject.toml",
        "/notebooks/solutions",
        "/notebooks/GLOSSARY.md",
    ]
    for top in ("docs", "minicompile", "notebooks", "tests"):
        for file in (root / top).rglob("*"):
            if "__pycache__" not in file.parts:
                found.append("/" + file.relative_to(root).as_posix())
    for source in (root / "notebooks" / "src").glob("*.py"):
        found += [f"/notebooks/{source.stem}.ipynb", f"/notebooks/solutions/{source.stem}.ipynb"]
    return (*found, *foreign_paths())


@functools.cache
def foreign_paths() -> tuple[str, ...]:
    """The same for PyTorch and Triton."""
    found: list[str] = []
    inside = torch_folder()
    for pattern in ("**/*.py", "include/**/*.h", "**/"):
        found += [f"/torch/{file.relative_to(inside).as_posix()}" for file in inside.glob(pattern)]
    with contextlib.suppress(ImportError):
        inside = Path(str(importlib.import_module("triton").__file__)).parent
        found += [f"/triton/{file.relative_to(inside).as_posix()}" for file in inside.rglob("*.py")]
    return tuple(found)


def is_path(span: str) -> bool:
    """Whether a span is written as a file or folder."""
    if not FILE.fullmatch(span.partition(":")[0]):
        return False
    name = span.partition(":")[0]
    whole = "/" in name.strip("/") and re.search(r"[A-Za-z_]", name) is not None
    folder = name.endswith("/") and len(name) > 1
    return name.endswith(ENDINGS) or folder or (whole and name.split("/")[0] in TOPS)


TOPS = ("minicompile", "notebooks", "tests", "torch", "triton")


def path_exists(span: str, root: Path) -> bool:
    """Whether a file is there, in this repository or in PyTorch; the end of its path is enough."""
    name = span.partition(":")[0].strip("/").removeprefix("./").removesuffix("/*")
    if name.startswith(("~", "$", "tmp/")):
        return True
    name = re.sub(r"NN|\*\*?", "*", name)
    if "*" in name:
        pattern = re.compile(re.escape("/" + name).replace(r"\*", "[^/]*") + "$")
        return any(pattern.search(path) for path in paths(root))
    return any(path.endswith("/" + name) for path in paths(root))


IMPORTABLE = {
    "torch",
    "minicompile",
    "triton",
    "numpy",
    "sympy",
    "notebooks",
    *sys.stdlib_module_names,
}


def resolve(dotted: str) -> bool:
    """Whether Python finds this: `torch.fx.Node`, `mc.trace`, `aten.mm.default`."""
    first, *rest = dotted.split(".")
    whole = ALIASES.get(first, first).split(".")
    if whole[0] not in IMPORTABLE:
        return False
    parts = [*whole, *rest]
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except Exception:
            continue
        try:
            for part in parts[length:]:
                found = getattr(found, part)
        except Exception:
            return False
        return True
    return False


@functools.cache
def attributes() -> frozenset[str]:
    """Names that PyTorch and Python have at hand: of tensors, modules, operators, texts, lists."""
    torch = importlib.import_module("torch")
    functional = importlib.import_module("torch.nn.functional")
    owners = [torch, torch.Tensor, torch.nn, functional, torch.fx, torch.nn.Module, torch.ops.aten]
    owners += [torch.autograd, torch.library, math, operator, functools, builtins, *TYPES]
    found = {name for owner in owners for name in dir(owner)}
    found.update(
        str(name).split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
    )
    return frozenset(found)


GENERIC = {"x", "y", "t", "loss", "model", "tensor", "self"}
"""What an attribute is shown of: `loss.backward()`."""
PLAIN = {
    *keyword.kwlist,
    *keyword.softkwlist,
    *dir(builtins),
    *dis.opmap,
    "self",
    "cls",
    "args",
    "kwargs",
}
PLAIN |= {"inf", "nan", "fn", "mc", "minicompile", "torch", *sys.stdlib_module_names}
C_WORDS = {"auto", "bool", "char", "const", "double", "float", "int", "long", "restrict", "sizeof"}
C_WORDS |= {"static", "struct", "template", "void", "omp"}
C_WORDS |= {
    "pragma",
    "simd",
    "parallel",
    "at",
    "vec",
    "std",
    "int64_t",
    "int32_t",
    "uint8_t",
    "nullptr",
}
DTYPE = re.compile(r"[bfiuc](?:f?\d{1,3})|bf16|bool|(?:u?int|float|bfloat|complex)\d+(?:_\w+)?")


UNNAMED = re.compile(r"%\w+|\\\w|(?<!\w)\d\w*|\.\.\.\w+|\"[^\"]*\"|'[^']*'|(?<=-)-?\w+")
"""In code: formats, numbers, ends of names, texts, flags."""


def assigned_in(span: str) -> set[str]:
    """Names that a piece of code binds itself, as in `y = relu(x); u = y * 2` or `lambda v: v + 1`."""
    try:
        tree = ast.parse(span)
    except SyntaxError:
        return set(re.findall(r"\b([A-Za-z_]\w*)\s*=(?!=)", span))
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name):
                found.add(name)
    return found


def strange(span: str, seen: str, seen_words: set[str], root: Path) -> Iterator[str]:
    """The names in a span that mean nothing so far. `seen` is the code and output that the reader saw."""
    text = " ".join(span.split())
    command = " " in text and text.split()[0] in COMMANDS
    if command or text in seen:
        return
    own = assigned_in(text)
    for dotted in dict.fromkeys(DOTTED.findall(UNNAMED.sub(" ", text))):
        if dotted in own or dotted in seen_words or resolve(dotted):
            continue
        first, *rest = dotted.split(".")
        for part in rest if rest and first in GENERIC else [first, *rest]:
            alone = text.strip("()") == part
            if not (part in own or known(part, seen_words, root) or (len(part) <= 2 and not alone)):
                yield dotted
                break


def known(word: str, seen: set[str], root: Path) -> bool:
    """Whether one identifier means something."""
    return (
        word in seen
        or word in PLAIN
        or word in C_WORDS
        or word in ALIASES
        or DTYPE.fullmatch(word) is not None
        or word in attributes()
        or word in package_words(root)
        or word in torch_words()
        or word.startswith("sym_")
    )
