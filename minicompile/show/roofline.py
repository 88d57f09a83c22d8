"""The roofline as a picture: arithmetic for each byte to the right, operations a second upwards."""

from __future__ import annotations

import math

from minicompile.ops.display import count_text
from minicompile.scheduling.roofline import COLUMNS, Roofline, RooflinePoint
from minicompile.show.html import box, code, shows, table, text
from minicompile.show.palette import BAD, FORWARD, colour

WIDTH, HEIGHT, MARGIN = 640, 260, 46
LEAST, MOST = -4, 10
"""Powers of two of the intensities on the axis; what lies beyond stands at its end."""
DECADES = 6
"""Powers of ten below the peak."""


def across(intensity: float) -> float:
    power = min(max(math.log2(intensity) if intensity else LEAST, LEAST), MOST)
    return MARGIN + (power - LEAST) / (MOST - LEAST) * (WIDTH - MARGIN - 12)


def up(speed: float, peak: float) -> float:
    below = min(math.log10(peak / speed) if speed else DECADES, DECADES)
    return 24 + below / DECADES * (HEIGHT - 24 - MARGIN)


def dot(point: RooflinePoint, share: float) -> str:
    """A kernel: its area is its share of the time."""
    told = "\n".join(
        f"{name}: {cell}" for name, cell in zip(COLUMNS, point.row(point.seconds / share))
    )
    fill = colour(point.origins) or FORWARD
    x, y = across(point.intensity), up(point.reached, point.spec.flops_per_second)
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 + 13 * math.sqrt(share):.1f}" fill="{fill}" '
        f'fill-opacity="0.7" stroke="currentColor" stroke-width="0.5"><title>{text(told)}</title></circle>'
    )


def picture(roof: Roofline) -> str:
    """The roof and a dot for each kernel, as an inline SVG."""
    peak, spec = roof.spec.flops_per_second, roof.spec
    low, ridge, high = 2.0**LEAST, spec.ridge, 2.0**MOST
    line = " ".join(
        f"{across(i):.1f},{up(min(peak, i * spec.bytes_per_second), peak):.1f}"
        for i in (low, ridge, high)
    )
    bottom = HEIGHT - MARGIN
    parts = [f'<polyline points="{line}" fill="none" stroke="{BAD}" stroke-width="2"/>']
    for power in range(LEAST, MOST + 1, 2):
        x = across(2.0**power)
        label = f"1/{2**-power}" if power < 0 else str(2**power)
        parts.append(
            f'<line x1="{x:.1f}" y1="24" x2="{x:.1f}" y2="{bottom}" stroke-opacity="0.15"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{label}</text>')
    for decade in range(DECADES + 1):
        y = up(peak / 10**decade, peak)
        label = f"{peak / 10**decade / 1e9:.2g}"
        parts.append(
            f'<line x1="{MARGIN}" y1="{y:.1f}" x2="{WIDTH - 12}" y2="{y:.1f}" stroke-opacity="0.15"/>'
        )
        parts.append(f'<text x="{MARGIN - 5}" y="{y + 3:.1f}" text-anchor="end">{label}</text>')
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">operations for each byte</text>'
    )
    parts.append('<text x="6" y="13">GFLOP/s</text>')
    shares = ((point, point.seconds / roof.seconds if roof.seconds else 0) for point in roof.points)
    parts += [dot(point, share) for point, share in sorted(shares, key=lambda s: -s[1]) if share]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" style="max-width:100%" '
        f'stroke="currentColor" stroke-width="0" font-size="10" fill="currentColor">'
        f'<title>roofline of {text(roof.title)}</title><g stroke-width="1">{"".join(parts)}</g></svg>'
    )


@shows(Roofline)
def roofline_view(roof: Roofline) -> str:
    rows = [
        [code(name, colour(point.origins)), *map(text, cells)]
        for point, (name, *cells) in zip(roof.points, roof.rows, strict=True)
    ]
    about = (
        f"{roof.spec} · {count_text(len(roof.points), 'kernel or call')} · "
        f"at least {roof.seconds * 1e6:,.3g} us"
    )
    numbers = tuple(range(1, len(COLUMNS) - 1))
    return box(f"roofline of {roof.title}", about, picture(roof), table(COLUMNS, rows, numbers))
