"""The graph cache: a warm start reads kernels from the disk (store.py)."""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "graph_cache",
    "Keeps compiled captures for a GPU on disk, so that the next process compiles nothing.",
    ("minicompile.plugins.graph_cache.store",),
    needs=("fast_launcher",),
    cases=("layer_norm, gpu, training, second process", "gpt2_block_training, second process"),
)
