"""What the tests of capture share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minicompile as mc
from minicompile.api import find_backend
from minicompile.debug.history import Explanation
from minicompile.dynamo.dispatch import Dispatcher
from minicompile.dynamo.result import Capture
from minicompile.errors import Unsupported
from minicompile.options import make_options
from tests.comparing import equal as equal


def compiled(function: Any, **options: Any) -> Any:
    """Compiled with the captured graph as it is; a frame that can't be captured is an error."""
    return mc.compile(function, **{"backend": "eager", "fullgraph": True, **options})


def frames_of(run: Any) -> Any:
    """Return what captures the functions that eager code of a compiled function calls (nested_frames)."""
    [frames] = dispatcher(run).watchers
    return frames


def lenient(function: Any, **options: Any) -> Any:
    """The same, but frames may run in eager."""
    return compiled(function, fullgraph=False, **options)


def in_eager(function: Any, backend: str = "eager", **options: Any) -> Any:
    """Compiled with a backend that refuses graphs with `frac`: such a frame runs in eager as a whole."""
    chosen = make_options(None, options)
    inner = find_backend(backend, chosen)

    def compile_with(capture: Capture) -> Any:
        if "frac" in capture.graph.gm.code:
            raise Unsupported(f"the test wants {capture.name} in eager")
        return inner(capture)

    made = mc.compile(function, backend="eager", options=chosen)
    dispatcher(made).backend = compile_with
    return made


def dispatcher(target: Any) -> Dispatcher:
    found = target._minicompile
    assert isinstance(found, Dispatcher)
    return found


def explained(target: Any) -> Explanation:
    return dispatcher(target).explanation()


def graphs(target: Any) -> int:
    return explained(target).graph_count


def outcome(function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """What a call gives: its value, or its exception."""
    try:
        return "value", function(*args)
    except Exception as error:
        return "raised", (type(error), str(error))
