"""Reports as Markdown, for a pull request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.plan._sections import Section

SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~#])")


def escape(text: object) -> str:
    """Escape a string for Markdown; names come from logs, which anybody can write to."""
    return SPECIAL.sub(r"\\\1", str(text).replace("\n", " "))


def to_markdown(sections: Iterable[Section]) -> str:
    """Return a report; charts are left out."""
    lines: list[str] = []
    for section in sections:
        if section.title and not section.rows:
            lines += [f"**{escape(section.title)}**", ""]
        if section.text:
            lines += [escape(section.text), ""]
        if section.rows:
            lines += table(section.head, section.rows)
        if section.changes:
            lines += ["```diff", *section.changes, "```", ""]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a table: its first column to the left, the others to the right."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return [*lines, *(f"| {' | '.join(map(escape, row))} |" for row in rows), ""]
