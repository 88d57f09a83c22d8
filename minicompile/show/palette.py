"""Colours: a line of source has one hue in every view, and so has everything that came from it.

The colour is a function of the line alone, so that a graph shown today and a kernel shown tomorrow agree.
Neighbouring lines lie a golden angle apart, which keeps them easy to tell from each other. What came from
several lines has the colour of the last.
"""

from __future__ import annotations

import colorsys
import os
import zlib

from minicompile.ops.origin import Origins, SourceLine, short_file, source_lines

GOLDEN_ANGLE = 137.508
LIGHTNESS, SATURATION = (0.46, 0.54, 0.62), 0.6
FORWARD, BACKWARD, NEUTRAL = "#3b82f6", "#f97316", "#94a3b8"
THIN = 0.28
"""How much of a colour a ground has."""
GOOD, BAD = "#10b981", "#ef4444"


def line_colour(line: SourceLine) -> str:
    """The colour of a source line, as `#rrggbb`."""
    start = zlib.crc32(os.path.basename(short_file(line.file)).encode()) % 360
    hue = (start + GOLDEN_ANGLE * line.line) % 360
    lightness = LIGHTNESS[line.line % len(LIGHTNESS)]
    channels = colorsys.hls_to_rgb(hue / 360, lightness, SATURATION)
    return "#" + "".join(f"{round(255 * c):02x}" for c in channels)


def colour(origins: Origins) -> str | None:
    """The colour of the last source line among the origins; None without one."""
    lines = source_lines(origins)
    return line_colour(lines[-1]) if lines else None


def tint(colour: str) -> str:
    """A colour thinned with white: a ground that dark text can be read on."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - THIN * (255 - c)):02x}" for c in channels)
