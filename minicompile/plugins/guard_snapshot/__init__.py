"""Guard snapshot: guards on what a cache entry holds are checked all at once, by a C extension (facts.py).

Without this plug-in they are evaluated one by one on every call.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "guard_snapshot",
    "Checks in C whether anything changed that guards read, instead of evaluating them at every call.",
    (f"{__name__}.held",),
    cases=("call", "gpt2_block"),
)
