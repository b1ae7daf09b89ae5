"""Compare budgets of agents: many calls at once, of which each costs more than its first tokens tell.

python -m bench.run_budgets                          tidegate, and a counter that checks before and adds after
python -m bench.run_budgets --litellm PYTHON         and litellm's BudgetManager; the environment of PYTHON has litellm

The same load for each: AGENTS tasks share BUDGET and call until they are denied. A call takes a while, and costs 1 to
MOST cents, which is known afterwards. The table says what was spent, how much of it above the budget, and how much of
the budget could be used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

AGENTS: Final = 32
BUDGET: Final = 500  # cents
MOST: Final = 10  # cents of a call
SECONDS: Final = 0.03  # that a call takes at most
DENIALS: Final = 50  # in a row: nothing is left for a call
SEED: Final = 42


class Outcome(NamedTuple):
    """What was spent, in cents, and by how many calls."""

    name: str
    spent: int
    calls: int


async def spend(name: str, call: Callable[[int, float], Awaitable[bool]]) -> Outcome:
    """Let agents call until they are denied; `call` takes the real cost and the time, and says whether it was sent."""
    random, spent, calls = Random(SEED), 0, 0

    async def agent() -> None:
        nonlocal spent, calls
        denied = 0
        while denied < DENIALS:
            cost, seconds = random.randint(1, MOST), random.uniform(0, SECONDS)
            if await call(cost, seconds):
                spent, calls, denied = spent + cost, calls + 1, 0
            else:
                denied += 1
                await asyncio.sleep(0)

    await asyncio.gather(*(agent() for _ in range(AGENTS)))
    return Outcome(name, spent, calls)


async def tidegate() -> Outcome:
    """Reserve the most that a call may cost, and settle it to what it cost; a smaller call if that has no room."""
    from tidegate.agents import AsyncRun, RunDenied  # noqa: PLC0415 - the environment of litellm has no tidegate

    async with AsyncRun("bench", store="memory://", limits=[f"{BUDGET / 100}/run unit=usd"]) as run:
        children = [await run.child(f"agent-{number}") for number in range(4)]

        async def call(cost: int, seconds: float) -> bool:
            try:
                held = await children[cost % 4].reserve({"usd": f"{MOST / 100}"})
            except RunDenied:
                return False
            await asyncio.sleep(seconds)
            await held.commit({"usd": f"{cost / 100}"})
            return True

        return await spend("tidegate", call)


async def check_then_add() -> Outcome:
    """Check a counter before the call, and add its cost after it."""
    counter = 0

    async def call(cost: int, seconds: float) -> bool:
        nonlocal counter
        if counter >= BUDGET:
            return False
        await asyncio.sleep(seconds)
        counter += cost
        return True

    return await spend("check before, add after", call)


async def litellm_budget() -> Outcome:
    """Use litellm's BudgetManager as its documentation does: compare before the call, update the cost after it.

    (Its `max_budget` counts no responses of chat completions in the version that was tried, 1.106.2.)
    """
    import litellm  # type: ignore[import-not-found]  # noqa: PLC0415 - only in an environment of its own

    litellm.register_model({"openai/bench": {"input_cost_per_token": 0, "output_cost_per_token": 0.01, "mode": "chat"}})
    manager = litellm.BudgetManager(project_name="bench")
    manager.create_budget(total_budget=BUDGET / 100, user="run")

    async def call(cost: int, seconds: float) -> bool:
        if manager.get_current_cost("run") >= manager.get_total_budget("run"):
            return False
        await asyncio.sleep(seconds)
        usage = litellm.Usage(prompt_tokens=0, completion_tokens=cost, total_tokens=cost)
        manager.update_cost("run", litellm.ModelResponse(model="openai/bench", usage=usage))
        return True

    return await spend("litellm, BudgetManager", call)


def report(outcomes: list[Outcome]) -> str:
    """Write the table."""
    rows = ["| | calls | spent of $5.00 | over | used |", "|---|---|---|---|---|"]
    for name, spent, calls in outcomes:
        over, used = max(0, spent - BUDGET), min(spent, BUDGET) / BUDGET
        rows.append(f"| {name} | {calls} | ${spent / 100:.2f} | ${over / 100:.2f} | {used:.1%} |")
    return "\n".join(rows)


def main() -> None:
    """Run the contenders one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", metavar="PYTHON", help="an interpreter that has litellm")
    parser.add_argument("--only-litellm", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only_litellm:
        print(json.dumps(asyncio.run(litellm_budget())))
        return
    outcomes = [asyncio.run(tidegate()), asyncio.run(check_then_add())]
    if args.litellm:
        command = [args.litellm, __file__, "--only-litellm"]
        with TemporaryDirectory() as folder:  # where it saves the costs
            found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)  # noqa: S603 - of the user
        if found.returncode:
            sys.exit(found.stderr)
        outcomes.append(Outcome(*json.loads(found.stdout.splitlines()[-1])))
    print(report(outcomes))


if __name__ == "__main__":
    main()
