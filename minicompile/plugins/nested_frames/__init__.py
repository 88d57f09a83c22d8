"""Nested frames: functions that eager code calls are captured too, where that pays (frames.py).

Without this plug-in whatever runs in eager calls everything in eager.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "nested_frames",
    "Captures functions that eager code calls: code that a graph break or a refused frame leaves to Python.",
    (f"{__name__}.frames",),
    cases=("lesson_model_in_context_training",),
)
