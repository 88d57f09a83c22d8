"""How stage objects look in a notebook: importing this package registers a renderer for each type.

`ops.display.to_html(obj)` finds them; rooms never import this package. A view of one's own goes into the
same table: `@minicompile.ops.display.renderer(MyType)` on a function that gives HTML.
"""

from __future__ import annotations

from . import (  # noqa: F401
    accuracy,
    aot,
    bisect,
    capture,
    diff,
    exports,
    fusion,
    graphs,
    kernels,
    launches,
    loops,
    minify,
    operators,
    roofline,
    schedule,
    torch_side,
    trace,
    widgets,
)
