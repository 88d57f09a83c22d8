"""`torch.cond`, `while_loop`, `scan`, `associative_scan` and `map`, whose functions run once, often, or not
at all, as tensors say.

    calls              a call becomes a node that holds the graphs of its functions, the bodies
    associative_scans  an associative scan becomes a few ordinary operations for each doubling
    operators          what such a node means: its gradient, and the `if`, `while` or `for` of the wrapper

Without this plug-in the graph ends at such a call.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "control_flow",
    "Captures torch.cond, while_loop, scan and map, at whose calls the graph would end.",
    (f"{__name__}.calls", f"{__name__}.associative_scans"),
    needs=("function_graphs",),
    needs_torch=True,
)
