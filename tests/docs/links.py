"""Finds the links of a Markdown page and the anchors that a link to it can use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
HEADING = re.compile(r"#{1,6} +(.+)")
CODE = re.compile(r"(?P<fence>```+|~~~+).*?(?P=fence)|`[^`\n]*`", re.DOTALL)
FENCE = re.compile(r"^ *(?P<ticks>```+|~~~+).*?^ *(?P=ticks) *$", re.DOTALL | re.MULTILINE)


def anchor_of(heading: str) -> str:
    """The anchor of a heading, as GitHub writes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub writes them."""
    found: dict[str, int] = {}
    anchors = set()
    for line in FENCE.sub("", page.read_text(encoding="utf-8")).splitlines():
        if heading := HEADING.fullmatch(line):
            anchor = anchor_of(heading[1])
            count = found[anchor] = found.get(anchor, -1) + 1
            anchors.add(f"{anchor}-{count}" if count else anchor)
    return anchors


def links_of(page: Path) -> Iterator[str]:
    """The targets of a page's links, except those in code."""
    return (link[1] for link in LINK.finditer(CODE.sub("", page.read_text(encoding="utf-8"))))


def problem_of(page: Path, target: str) -> str | None:
    """Why a relative link of a page is broken; None if it is not, or leads to another site."""
    if re.match(r"[a-z]+:", target):
        return None
    path, _, anchor = target.partition("#")
    linked = (page.parent / path).resolve() if path else page
    if not linked.exists():
        return f"{page.name}: {target}: there is no such file"
    if anchor and anchor not in anchors_of(linked):
        return f"{page.name}: {target}: the page has no such heading"
    return None
