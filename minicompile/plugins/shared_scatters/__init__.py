"""Shared scatters: threads of a CPU share additions to elements that loaded indices name (scatters.py)."""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "shared_scatters",
    "On CPUs, shares scattered additions among threads that can't meet.",
    ("minicompile.plugins.shared_scatters.scatters",),
    cases=("embedding_sum, large, training",),
)
