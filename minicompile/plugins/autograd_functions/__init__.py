"""Autograd functions: a call of a torch.autograd.Function becomes a node of the graph (custom.py).

Without this plug-in the graph ends at such a call.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "autograd_functions",
    "Captures forward and backward of a torch.autograd.Function, at whose call the graph would end.",
    (f"{__name__}.custom",),
    cases=("swiglu_function, large, training",),
)
