"""CUDA graphs: what a call launches is captured, and replayed by later calls (replay.py)."""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "cuda_graphs",
    'Captures what a call launches and replays it at once, with mode="reduce-overhead".',
    ("minicompile.plugins.cuda_graphs.replay",),
    cases=("call", "mlp", "gpt2_block", "gpt2_block_training"),
    options=(("mode", "reduce-overhead"),),
)
