"""How stage objects look in a notebook: importing this package registers a renderer for each type.

    takes    any stage object
    gives    HTML and SVG that need nothing from elsewhere
    decides  colours (a source line has one hue in every view), what is folded, what is left out

Read html.py first, then loop_tables.py, the plainest view.

`ops.display.to_html(obj)` finds them; rooms never import this package. A view of one's own goes into the
same table: `@minicompile.ops.display.renderer(MyType)` on a function that gives HTML.
"""

from __future__ import annotations

from . import (  # noqa: F401
    aot,
    capture_tables,
    diff_tables,
    graph_pictures,
    kernel_code,
    launch_bars,
    loop_tables,
    reports,
    roofline_picture,
    schedule_pictures,
    trace,
    widgets,
)
