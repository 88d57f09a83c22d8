"""minicompile: torch.compile made small enough to read.

Names are loaded on first use, so that modules without torch (bytecode, assembler) import without it.
This is also where stage objects meet their pictures: `show/` is imported when the first one is displayed.
"""

from __future__ import annotations

import importlib
from typing import Any

from minicompile.ops.display import renderer

renderer.modules.append("minicompile.show")

PUBLIC = {
    "compile": "api",
    "explain": "api",
    "timeline": "api",
    "trace": "api",
    "what_if": "debug.experiment",
    "accuracy": "debug.accuracy",
    "operator_accuracy": "debug.operators",
    "bisect": "debug.bisect",
    "minify": "debug.minify",
    "launches": "debug.launches",
    "logs": "debug.logs",
    "fresh_cache": "api",
    "compare_with_torch": "debug.torch_side",
    "reset": "api",
    "mark_dynamic": "api",
    "export": "exporting.export",
    "Dim": "exporting.call",
    "load_export": "exporting.saved",
    "aot_package": "exporting.package",
    "load_package": "exporting.load",
    "disable": "api",
    "allow_in_graph": "api",
    "register_pattern": "passes.patterns",
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
        return getattr(importlib.import_module(f"minicompile.{PUBLIC[name]}"), name)
    raise AttributeError(f"module 'minicompile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext minicompile` calls: registers %%stages, %%kernel and %%compile_diff."""
    from minicompile.show.magics import Magics

    Magics(shell)
