"""A waterfall picture, as plain SVG text: each phase on a line of its own, where it begins and as long as it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT = 880, 190, 90
LINE, HEAD, GAP = 18, 30, 14
STYLE = """\
    .h { font-weight: 600; fill: #0f172a; }
    .p { fill: #334155; font-size: 12.5px; }
    .a { fill: #475569; font-size: 11.5px; }
    .g { stroke: #cbd5e1; }
    .b { fill: #94a3b8; }
    .w { fill: #4f46e5; }
    .s { font-weight: 600; fill: #3730a3; font-size: 12.5px; }"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One start: a heading, and seconds by phase in their order."""

    title: str
    seconds: Mapping[str, float]


def waterfall(blocks: Sequence[Block], names: Mapping[str, str], *, strong: str, title: str) -> str:
    """The picture.

    Args:
        blocks: One below the other, on one scale.
        names: What each phase is called.
        strong: The phase to be seen first.
        title: For those who do not see it.
    """
    longest_s = max(sum(block.seconds.values()) for block in blocks)
    scale = (WIDTH - LEFT - RIGHT) / longest_s
    body: list[str] = []
    y = 14
    for block in blocks:
        y += HEAD
        total_s = sum(block.seconds.values())
        body.append(_text("h", 20, y - 10, f"{block.title}: {total_s:.2f} s"))
        at_s = 0.0
        for name, seconds in block.seconds.items():
            which = ("w", "s") if name == strong else ("b", "p")
            x, width = LEFT + at_s * scale, max(seconds * scale, 1.0)
            body.append(_text(which[1], LEFT - 10, y + 13, names.get(name, name), anchor="end"))
            body.append(f'  <rect class="{which[0]}" x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{LINE - 6}" rx="2"/>')
            body.append(_text(which[1], x + width + 6, y + 13, _duration(seconds)))
            at_s += seconds
            y += LINE
        y += GAP
    axis = _axis(longest_s, scale, y)
    description = "; ".join(
        f"{block.title}: " + ", ".join(f"{names.get(name, name)} {_duration(s)}" for name, s in block.seconds.items())
        for block in blocks
    )
    height = y + 30
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="t d" '
        'font-family="system-ui, -apple-system, \'Segoe UI\', sans-serif" font-size="14">',
        f'  <title id="t">{escape(title)}</title>',
        f'  <desc id="d">{escape(description)}</desc>',
        f"  <style>\n{STYLE}\n  </style>",
        f'  <rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',  # readable on a dark page, too
    ]
    return "\n".join([*head, *axis, *body, "</svg>"]) + "\n"


def _axis(longest_s: float, scale: float, bottom: float) -> list[str]:
    step = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000) if longest_s / step <= 12)
    lines = []
    for number in range(int(longest_s / step) + 1):
        x = LEFT + number * step * scale
        lines.append(f'  <line class="g" x1="{x:.1f}" y1="24" x2="{x:.1f}" y2="{bottom:.0f}"/>')
        lines.append(_text("a", x, bottom + 16, f"{number * step:g} s", anchor="middle"))
    return lines


def _text(kind: str, x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'  <text class="{kind}" x="{x:.1f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
