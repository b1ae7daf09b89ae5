"""Runs the Python code blocks of a Markdown page.

The blocks of a page run in order and share their names, as a reader would type them into one session. `await`
is allowed outside functions, all blocks of a page on one event loop. Nothing can be left out: what must not
run is not labelled `python`. Blocks of a recipe (```python recipe=openai) need the SDK of a vendor: tests/recipes runs
them, in an environment of their own. Blocks with a title (```python title="app.py") are files of a tutorial:
tests/docs/tutorial.py writes them.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>```+|~~~+)[ \t]*(?P<label>[^\s`]*)"
    r'(?:[ \t]+recipe=(?P<recipe>[^\s`]+))?(?:[ \t]+title="(?P<title>[^"]+)")?'
)


@dataclass(frozen=True)
class Block:
    label: str
    line: int  # of the first line of code, counted from 1
    code: str
    recipe: str | None = None  # the name of the recipe that the block belongs to
    title: str | None = None  # the name of the file that the reader saves the block as


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page; an unclosed one is an error."""
    found: list[Block] = []
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), start=1))
    for number, line in lines:
        opening = FENCE.match(line)
        if opening is None:
            continue
        body: list[str] = []
        for _, inner in lines:
            if inner.strip() == opening["ticks"]:
                break
            body.append(inner.removeprefix(opening["indent"]))
        else:
            raise AssertionError(f"{page}:{number}: this code block is never closed")
        found.append(Block(opening["label"], number + 1, "\n".join(body), opening["recipe"], opening["title"]))
    return found


def run_page(page: Path) -> int:
    """Run the page's Python blocks, except recipes and files, and count them."""
    blocks = [block for block in blocks_of(page) if block.label == "python" and not (block.recipe or block.title)]
    with asyncio.Runner() as runner:
        for result in run_blocks(page, blocks, {"__name__": "__main__"}):
            if inspect.iscoroutine(result):
                runner.run(result)
    return len(blocks)


def run_blocks(page: Path, blocks: list[Block], names: dict[str, Any]) -> Iterator[Any]:
    """Run blocks one after another, and yield the result of each: a coroutine if it uses `await`.

    What they raise carries the page's own line numbers.
    """
    for block in blocks:
        # Blank lines in front make tracebacks point into the page.
        source = "\n" * (block.line - 1) + block.code
        code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        yield eval(code, names)  # noqa: S307 - running the project's own pages is the purpose
