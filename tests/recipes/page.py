"""The recipes of docs/howto/llm.md: what a test runs is what the page shows."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from tests.docs.blocks import Block, blocks_of, run_blocks

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "llm.md"


def recipe_blocks(name: str, label: str = "python") -> list[Block]:
    """Return the blocks of a recipe."""
    return [block for block in blocks_of(PAGE) if block.recipe == name and block.label == label]


def write_providers(**replaced: str) -> None:
    """Write the provider files of the page to the current folder; `replaced` has other limits, by name of the file."""
    for block in blocks_of(PAGE):
        if block.label == "yaml" and block.recipe is not None:
            path = Path(block.code.split("\n", 1)[0].removeprefix("# "))
            path.parent.mkdir(exist_ok=True)
            lines = block.code.split("\n")
            limits = replaced.get(path.stem)
            if limits is not None:
                lines = [f"limits: {limits}" if line.startswith("limits:") else line for line in lines]
            path.write_text("\n".join(lines), encoding="utf-8")


async def run_recipe(name: str, count: int | None = None) -> dict[str, Any]:
    """Run the Python blocks of a recipe (the first `count` of them) in the current folder, and return their names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for result in run_blocks(PAGE, recipe_blocks(name)[:count], names):
        if inspect.iscoroutine(result):
            await result
    return names


async def call(function: Any, *arguments: Any) -> Any:
    """Call a function or a coroutine function."""
    result = function(*arguments)
    return await result if inspect.iscoroutine(result) else result


def denial_table() -> dict[str, str]:
    """Return the class of the error that a denied call raises, by SDK, as the page says."""
    rows = (line.split("|") for line in PAGE.read_text(encoding="utf-8").split("\n") if line.startswith("| "))
    return {row[1].strip(): row[2].split("`")[1].rpartition(".")[2] for row in rows if "Denied" in row[2]}
