"""Image layout: convolutions get and give images whose channels lie side by side (channels_last.py)."""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "image_layout",
    "Lays images out channels-last between convolutions, which the library computes faster so.",
    (f"{__name__}.channels_last",),
    needs_torch=True,
    cases=("cnn", "cnn_training"),
)
