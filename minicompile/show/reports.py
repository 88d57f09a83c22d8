"""What has no picture of its own: the text of a terminal, with colours."""

from __future__ import annotations

import re

from minicompile.ops.display import Shown
from minicompile.ops.origin import SourceLine
from minicompile.show.html import box, shows, text
from minicompile.show.listing import headline, listing, stripe
from minicompile.show.palette import BAD, GOOD

VERDICTS = {
    **dict.fromkeys(("same as eager", "as accurate as eager", "close to eager", "fused"), GOOD),
    **dict.fromkeys(("far from eager", "less accurate than eager", "kept apart"), BAD),
}
WORDS = re.compile(rf"(?<!less )\b(?:{'|'.join(sorted(VERDICTS, key=len, reverse=True))})\b")
PLACE = re.compile(r"(\S+\.py|<cell>):(\d+)")


def text_line(line: str) -> str:
    """A line of a terminal: its verdicts and signs coloured, with the stripe of its source line."""
    shown = WORDS.sub(lambda m: f'<b style="color:{VERDICTS[m[0]]}">{m[0]}</b>', text(line))
    sign = line.lstrip()[:2]
    if sign in ("+ ", "- "):
        shown = f'<span style="color:{GOOD if sign == "+ " else BAD}">{shown}</span>'
    places = [SourceLine(file, int(number), "") for file, number in PLACE.findall(line)]
    return stripe(f'<span style="white-space:pre-wrap">{shown}</span>', places, title=" ")


@shows(Shown)
def text_view(obj: Shown) -> str:
    lines = str(obj).split("\n")[1:]
    return box(*headline(obj), listing(map(text_line, lines)) if lines else "")
