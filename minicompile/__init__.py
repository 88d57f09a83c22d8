"""minicompile: torch.compile made small enough to read.

Names are loaded on first use, so that modules without torch (bytecode, assembler) import without it.
This is the one page of the compiler that names its tools: what observes compilations, draws stage objects and
finds faults registers itself in tables of the compiler, which import it when they are first read.
"""

from __future__ import annotations

import importlib
from typing import Any

from minicompile.errors import MinicompileError
from minicompile.ops.registry import FILLED_BY

FILLED_BY.update(
    renderer=("minicompile.show",),
    method=("minicompile.show", "minicompile.debug.register"),
    observer=("minicompile.debug.register",),
    option_check=("minicompile.debug.register",),
    backend=("minicompile.debug.register",),
    code_generator=("minicompile.debug.reference",),
    kernel_loader=("minicompile.debug.reference",),
)
RULES_OF_TOOLS = {
    "log_channel": "debug.logs",
    "reduction": "debug.minify",
    "accuracy_stage": "debug.accuracy",
}

PUBLIC = {
    "compile": "api",
    "explain": "debug.history",
    "timeline": "debug.history",
    "trace": "api",
    "what_if": "debug.experiment",
    "accuracy": "debug.accuracy",
    "operator_accuracy": "debug.operator_accuracy",
    "bisect": "debug.bisect",
    "minify": "debug.minify",
    "launches": "debug.launch_times",
    "logs": "debug.logs",
    "fresh_cache": "api",
    "compare_with_torch": "debug.torch_side",
    "reset": "api",
    "mark_dynamic": "api",
    "export": "exporting.export",
    "Dim": "exporting.call",
    "aot_package": "exporting.package",
    "load_package": "exporting.load",
    "disable": "api",
    "allow_in_graph": "api",
    "register_pattern": "extension",
    "register_vjp": "extension",
    "without": "extension",
    "scoped": "extension",
    "Options": "options",
    "MinicompileError": "errors",
    "Unsupported": "errors",
    "BackendError": "errors",
    "ExportError": "errors",
}

__version__ = "0.1.0"
__all__ = [*PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return getattr(tool(PUBLIC[name]), name)
    raise AttributeError(f"module 'minicompile' has no attribute {name!r}")


def tool(module: str) -> Any:
    """Import a module of the package that may be missing. Raises MinicompileError where it is."""
    try:
        return importlib.import_module(f"minicompile.{module}")
    except ModuleNotFoundError as error:
        package, *parts = str(error.name).split(".")
        if package != __name__:
            raise
        missing = f"needs the folder {__name__}/{parts[0]}, which is not there"
        raise MinicompileError(missing) from error


def __dir__() -> list[str]:
    return sorted(__all__)
