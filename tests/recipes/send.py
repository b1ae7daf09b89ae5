"""Runs a recipe in several processes at once: python send.py RECIPE PROCESSES CALLS."""

import asyncio
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.recipes.network import RedirectedSocket
from tests.recipes.page import call, run_recipe


async def send(name: str, calls: int) -> None:
    """Run the first block of the recipe, which makes one call, then the other calls."""
    names = await run_recipe(name, 1)
    for number in range(calls - 1):
        await call(names["ask"], f"Question {number}")


def main(name: str, processes: int, calls: int) -> int:
    """Import the SDK once, because that takes seconds; then start the processes. Return how many have failed."""
    importlib.import_module(name)
    RedirectedSocket().install()
    children = []
    for _ in range(processes):
        child = os.fork()
        if not child:
            asyncio.run(send(name, calls))
            os._exit(0)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
