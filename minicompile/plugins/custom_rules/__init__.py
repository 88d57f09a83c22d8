"""Rules that users write as plain functions: rewrites of graphs, gradients of operators.

    patterns   `mc.register_pattern`: a search function and its replacement become a graph pass
    matching   finds one graph in another
    vjps       `mc.register_vjp`: an operator's gradient in place of torch's formula

The decorators are there whether or not the plug-in is selected: what a user registers is the user's rule.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "custom_rules",
    "Gives users mc.register_pattern and mc.register_vjp: rewrites and gradients as plain functions.",
    (f"{__name__}.vjps",),
    decorators={
        "register_pattern": f"{__name__}.patterns",
        "register_vjp": f"{__name__}.vjps",
    },
)
