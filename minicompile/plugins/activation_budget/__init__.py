"""Activation budget: how many bytes of activations training may keep, by `options={"memory_budget": 0.5}`.

Without this plug-in the option changes nothing: nothing expensive is computed again.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "activation_budget",
    "Computes products again in the backward, as many as a memory budget asks for: memory_budget=0.5.",
    (f"{__name__}.knapsack",),
    cases=("gpt2_block_training",),
    options=(("memory_budget", 0.0),),
)
