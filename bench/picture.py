"""Draw a bar chart as SVG, for light and dark pages, with a text alternative for screen readers."""

from __future__ import annotations

from typing import Any, Final
from xml.sax.saxutils import escape

from bench.libraries import OURS
from bench.targets import BYTES

STYLE: Final = """
    text { font: 13px system-ui, sans-serif; fill: #1f2328; }
    .title { font-weight: 600; font-size: 15px; }
    .small { font-size: 12px; fill: #59636e; }
    .ours { fill: #0969da; }
    .peer { fill: #afb8c1; }
    .target { stroke: #cf222e; stroke-dasharray: 4 3; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc; }
      .small { fill: #9198a1; }
      .ours { fill: #4493f8; }
      .peer { fill: #656c76; }
      .target { stroke: #ff7b72; }
    }
"""
LEFT: Final = 130  # where bars begin
WIDTH: Final = 720
BAR: Final = 16
LINE: Final = 50  # from one library to the next


def memory(results: dict[str, Any]) -> str:
    """Draw the bytes that a key costs: two bars for each library, the fewest first."""
    cases = list(results["memory"].values())
    names = {each: results["libraries"][each]["name"] for each in cases[0]["bytes"]}
    order = sorted(names, key=lambda each: float(cases[0]["bytes"][each]["bytes"]))
    scale = (WIDTH - LEFT - 150) / max(each["bytes"] for case in cases for each in case["bytes"].values())
    height = 70 + LINE * len(order) + 30
    summary = "; ".join(
        f"{names[each]} " + ", ".join(f"{case['bytes'][each]['bytes']:.0f}" for case in cases) for each in order
    )
    parts = [text(20, 30, "Memory: bytes per key, without the key itself (less is better)", "title")]
    for row, each in enumerate(order):
        top = 56 + LINE * row
        parts.append(text(LEFT - 10, top + BAR + 5, names[each], anchor="end"))
        for place, case in enumerate(cases):
            size, y = case["bytes"][each]["bytes"], top + place * (BAR + 3)
            parts.append(bar(LEFT, y, size * scale, "ours" if each == OURS else "peer"))
            label = f"{size:.0f}  at {int(case['bytes'][each]['keys']):,} keys"
            parts.append(text(LEFT + max(size, BYTES) * scale + 6, y + 12, label, "small"))  # never across the line
    x, bottom = LEFT + BYTES * scale, height - 24
    parts.append(f'<line class="target" x1="{x:.1f}" y1="46" x2="{x:.1f}" y2="{bottom - 12}"/>')
    parts.append(text(x, bottom + 4, f"our limit: {BYTES} bytes", "small", anchor="middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="t d">\n'
        f'  <title id="t">Bytes per key</title>\n  <desc id="d">{escape(summary)}</desc>\n'
        f"  <style>{STYLE}  </style>\n  " + "\n  ".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Write words."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def bar(x: float, y: float, width: float, kind: str) -> str:
    """Draw a bar."""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" rx="2"/>'
