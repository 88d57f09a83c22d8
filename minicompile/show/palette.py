"""Colours: a line of source has one hue in every view, and so has everything that came from it.

The colour is a function of the line alone, so that a graph shown today and a kernel shown tomorrow agree.
Neighbouring lines lie a golden angle apart, which keeps them easy to tell from each other. What came from
several lines has the colour of the last.
"""

from __future__ import annotations

import functools
import math
import os
import zlib

from minicompile.ops.origin import Origins, SourceLine, short_file, source_lines

GOLDEN_ANGLE = 137.508
LIGHTNESS = (0.6, 0.68, 0.76)
FORWARD, BACKWARD, NEUTRAL = "#3b82f6", "#f97316", "#94a3b8"
GOOD, BAD = "#10b981", "#ef4444"


def line_colour(line: SourceLine) -> str:
    """The colour of a source line, as `#rrggbb`."""
    start = zlib.crc32(os.path.basename(short_file(line.file)).encode()) % 360
    lightness = LIGHTNESS[line.line % len(LIGHTNESS)]
    return oklch(lightness, 0.14, (start + GOLDEN_ANGLE * line.line) % 360)


def colour(origins: Origins) -> str | None:
    """The colour of the last source line among the origins; None without one."""
    lines = source_lines(origins)
    return line_colour(lines[-1]) if lines else None


@functools.cache
def oklch(lightness: float, chroma: float, hue: float) -> str:
    """A colour of even perceived lightness, clipped to sRGB (B. Ottosson, "OKLab", 2020)."""
    a = chroma * math.cos(math.radians(hue))
    b = chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    red = 4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short
    green = -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short
    blue = -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short
    return "#" + "".join(f"{_channel(c):02x}" for c in (red, green, blue))


def tint(colour: str, amount: float = 0.28) -> str:
    """A colour thinned with white: a ground that dark text can be read on."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - amount * (255 - c)):02x}" for c in channels)


def _channel(linear: float) -> int:
    linear = min(max(linear, 0.0), 1.0)
    gamma = 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
    return round(255 * gamma)
