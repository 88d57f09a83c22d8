"""The roofline as a picture: operations for each byte to the right, operations a second upwards."""

from __future__ import annotations

import math
from operator import attrgetter

from minicompile.debug.roofline import COLUMNS, Roofline, RooflinePoint
from minicompile.ops.display import count_text
from minicompile.show.html import box, code, drawing, shows, table, text
from minicompile.show.palette import BAD, FORWARD, colour

LEFT, RIGHT, TOP, BOTTOM = 52, 628, 24, 214
LEAST, MOST = -4, 10
"""Powers of two on the horizontal axis; what lies beyond stands at its end."""
DECADES = 4
"""Powers of ten below the peak."""


def across(power: float) -> float:
    """Where a power of two stands."""
    return LEFT + (min(max(power, LEAST), MOST) - LEAST) / (MOST - LEAST) * (RIGHT - LEFT)


def up(power: float) -> float:
    """Where a speed stands that is a (negative) power of ten of the peak."""
    return TOP - min(max(power, -DECADES), 0) / DECADES * (BOTTOM - TOP)


def on_the_roof(intensity: float, ridge: float) -> tuple[float, float]:
    """The place of a kernel that is as fast as it can be."""
    power = max(math.log2(intensity), LEAST) if intensity else LEAST
    return across(power), up(math.log10(min(2**power / ridge, 1)))


def dot(roof: Roofline, point: RooflinePoint) -> str:
    """A kernel: its area is its share of the time."""
    told = "\n".join(map(": ".join, zip(COLUMNS, roof.row(point), strict=True)))
    x, y = on_the_roof(point.cost.intensity, roof.spec.ridge)
    radius = 3 + 12 * math.sqrt(point.seconds / roof.seconds)
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill-opacity="0.7" '
        f'fill="{colour(point.origins) or FORWARD}"><title>{text(told)}</title></circle>'
    )


def picture(roof: Roofline) -> str:
    """The roof and a dot for each kernel, as an inline SVG."""
    corners = (on_the_roof(i, roof.spec.ridge) for i in (2**LEAST, roof.spec.ridge, 2**MOST))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    grid, labels = "", '<text x="6" y="13">GFLOP/s</text>'
    for power in range(LEAST, MOST + 1, 2):
        x = across(power)
        grid += f"M{x:.1f} {TOP}V{BOTTOM}"
        label = f"1/{2**-power}" if power < 0 else 2**power
        labels += f'<text x="{x:.1f}" y="{BOTTOM + 14}" text-anchor="middle">{label}</text>'
    for power in range(-DECADES, 1):
        y, speed = up(power), roof.spec.flops_per_second * 10.0 ** (power - 9)
        grid += f"M{LEFT} {y:.1f}H{RIGHT}"
        labels += f'<text x="{LEFT - 5}" y="{y + 3:.1f}" text-anchor="end">{speed:,.3g}</text>'
    labels += (
        f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 30}" text-anchor="middle">{COLUMNS[3]}</text>'
    )
    largest_first = sorted(filter(attrgetter("seconds"), roof.points), key=lambda p: -p.seconds)
    dots = "".join(dot(roof, point) for point in largest_first)
    content = (
        f'<path d="{grid}" stroke="currentColor" stroke-opacity="0.15"/>{labels}'
        f'<polyline points="{line}" fill="none" stroke="{BAD}" stroke-width="2"/>{dots}'
    )
    return drawing(f"roofline of {roof.title}", 640, 250, content)


@shows(Roofline)
def roofline_view(roof: Roofline) -> str:
    rows = []
    for point in roof.points:
        name, *cells = roof.row(point)
        rows.append([code(name, colour(point.origins)), *map(text, cells)])
    count = count_text(len(roof.points), "kernel") + " and calls"
    about = f"{roof.spec} · {count}, {roof.seconds * 1e6:,.1f} us at least"
    content = picture(roof), table(COLUMNS, rows, range(1, len(COLUMNS) - 1))
    return box(f"roofline of {roof.title}", about, *content)
