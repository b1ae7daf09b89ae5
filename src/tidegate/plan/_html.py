"""Reports as one self-contained HTML page with charts as SVG, and a single chart as an SVG file.

The page loads nothing. Its colours and the form of its charts are those of the dashboard.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.plan._sections import Chart, Section, Series

WIDTH, HEIGHT, LEFT, TOP, FLOOR = 960, 240, 70, 34, 200  # of a chart, in its own units
STYLE: Final = """
:root { color-scheme: light dark; --back: light-dark(#f3f5f7, #0e1319); --panel: light-dark(#fff, #161d26);
  --border: light-dark(#dfe5ea, #27323f); --text: light-dark(#18212b, #e7edf4); --muted: light-dark(#55626f, #9fadbd);
  --admitted: light-dark(#0b6b7f, #4fc3d9); --denied: light-dark(#b4400a, #ffa267); }
body { margin: 0 auto; padding: 2rem; max-width: 62rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
section { margin: 0 0 1rem; padding: 1rem 1.3rem; border: 1px solid var(--border); border-radius: 14px;
  background: var(--panel); overflow-x: auto; }
h1 { font-size: 1.25rem; } h2 { margin: 0 0 .5rem; font-size: 1rem; } p { margin: .3rem 0; color: var(--muted); }
table { width: 100%; border-collapse: collapse; font-size: .9rem; }
th, td { padding: .35rem .5rem; border-top: 1px solid var(--border); text-align: right;
  font-variant-numeric: tabular-nums; }
th { border: 0; color: var(--muted); font-weight: 550; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
pre { margin: .5rem 0 0; font-size: .85rem; } .added { color: var(--admitted); } .removed { color: var(--denied); }
"""
CHART_STYLE: Final = """
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
text { fill: var(--muted, #55626f); } .title { fill: var(--text, #18212b); font-weight: 600; }
.axis { stroke: var(--border, #dfe5ea); } path { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.admitted { stroke: var(--admitted, #0b6b7f); } .denied { stroke: var(--denied, #b4400a); }
.waiting { stroke: var(--muted, #55626f); stroke-dasharray: 2 3; }
"""


def to_html(title: str, sections: Sequence[Section]) -> str:
    """Return a report as a page."""
    body = "\n".join(map(section_html, sections))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{CHART_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def section_html(section: Section) -> str:
    """Return a section."""
    parts = [f"<h2>{escape(section.title)}</h2>"] if section.title else []
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    if section.chart is not None:
        parts.append(draw(section.chart))
    if section.rows:
        parts += ["<table><thead>", row_html("th", section.head), "</thead><tbody>"]
        parts += [*(row_html("td", row) for row in section.rows), "</tbody></table>"]
    if section.changes:
        kinds = {"+": "added", "-": "removed"}
        lines = (f'<span class="{kinds.get(line[0], "kept")}">{escape(line)}</span>' for line in section.changes)
        parts.append("<pre>" + "\n".join(lines) + "</pre>")
    return "<section>\n" + "\n".join(parts) + "\n</section>" if parts else ""


def row_html(tag: str, cells: Iterable[object]) -> str:
    """Return a row of a table."""
    return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"


def to_svg(sections: Iterable[Section]) -> str:
    """Return the charts of a report, one above the other; raises ConfigError if there is none."""
    charts = [section.chart for section in sections if section.chart is not None and is_drawn(section.chart)]
    if not charts:
        raise ConfigError("the report has no chart: it needs at least two steps of time", field="--svg")
    height = HEIGHT * len(charts)
    groups = "".join(f'<g transform="translate(0 {HEIGHT * n})">{marks(chart)}</g>' for n, chart in enumerate(charts))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<style>{CHART_STYLE}</style>{groups}</svg>\n"
    )


def is_drawn(chart: Chart) -> bool:
    """Return whether a chart has enough values for a line."""
    return max((len(series.values) for series in chart.series), default=0) > 1


def draw(chart: Chart) -> str:
    """Return a chart as an element of a page."""
    if not is_drawn(chart):
        return ""
    name = escape(chart.title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{marks(chart)}</svg>'


def marks(chart: Chart) -> str:
    """Return what is drawn of a chart."""
    highest = max((max(series.values, default=0) for series in chart.series), default=0) or 1
    parts = [
        f'<text class="title" x="{LEFT}" y="16">{escape(chart.title)}</text>',
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH}" y1="{FLOOR}" y2="{FLOOR}"/>',
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH}" y1="{TOP}" y2="{TOP}"/>',
        f'<text x="{LEFT - 8}" y="{TOP + 4}" text-anchor="end">{highest:,.6g}</text>',
        f'<text x="{LEFT - 8}" y="{FLOOR + 4}" text-anchor="end">0</text>',
        f'<text x="{LEFT}" y="{FLOOR + 20}">{escape(chart.first)}</text>',
        f'<text x="{WIDTH}" y="{FLOOR + 20}" text-anchor="end">{escape(chart.last)}</text>',
    ]
    parts += [line(series, highest) for series in chart.series]
    place = WIDTH
    for series in reversed(chart.series):
        parts.append(f'<text x="{place}" y="16" text-anchor="end">{escape(series.name)}</text>')
        place -= 8 * len(series.name) + 12
        parts.append(f'<path class="{series.style}" d="M{place - 14} 12h20"/>')
        place -= 30
    return "".join(parts)


def line(series: Series, highest: float) -> str:
    """Return the line of a series."""
    width = (WIDTH - LEFT) / max(1, len(series.values) - 1)
    points = (
        f"{LEFT + n * width:.1f} {FLOOR - (FLOOR - TOP) * value / highest:.1f}" for n, value in enumerate(series.values)
    )
    return f'<path class="{series.style}" d="M{"L".join(points)}"/>'
