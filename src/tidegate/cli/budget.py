"""`tidegate budget`: how much of a task budget is used, and when it runs out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate.budget import TaskBudget
from tidegate.budget.forecast import Forecast, forecast
from tidegate.clock import Clock, SystemClock, ThreadSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.service.parts import budget_settings

if TYPE_CHECKING:
    import argparse

    from tidegate.budget import BudgetSettings, Usage
    from tidegate.cli.say import Say

HELP: Final = "show how much of a task budget is used, and when it runs out"
UNITS: Final = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def options(parser: argparse.ArgumentParser) -> None:
    """Say where the budget is, and how to show it."""
    parser.description = "Show the tiers of a task budget, as RATE_LIMIT_* variables or a file describe it."
    parser.add_argument("--config", metavar="FILE", help="a YAML file, instead of the variables")
    parser.add_argument("--storage", metavar="PATH", help="the SQLite file or store URL, instead of the configured one")
    parser.add_argument(
        "--watch", metavar="SECONDS", nargs="?", type=float, const=1.0, help="show it again and again (every second)"
    )


def run(args: argparse.Namespace, say: Say) -> int:
    """Show the budget."""
    if args.watch is not None and not args.watch > 0:
        raise ConfigError(f"expected seconds above 0, not {args.watch:g}", field="--watch")
    with TaskBudget(read_settings(args)) as budget:
        watch(budget, say, SystemClock(), args.watch)
    return 0


def read_settings(args: argparse.Namespace) -> BudgetSettings:
    """Find the budget; one that is switched off can be looked at all the same."""
    settings = budget_settings(None if args.config is None else Path(args.config), args.storage)
    if "://" not in str(settings.storage) and not Path(settings.storage).exists():
        message = f"no budget is kept in {settings.storage} yet: give another path, or check a first batch"
        raise ConfigError(message, field="storage")
    return settings


def watch(budget: TaskBudget, say: Say, clock: Clock, seconds: float | None, rounds: int | None = None) -> None:
    """Show the budget once, or every so many seconds, until interrupted or as often as told."""
    shown = 0
    while True:
        usage = budget.snapshot()
        if budget.lost:
            raise StoreUnavailable(f"the storage {budget.settings.storage} cannot be read")
        ahead = forecast(budget.operations.plan, usage, budget.operations.clock.ns() // 1000)
        lines = draw(budget, usage, ahead, say)
        if shown and say.live:
            sys.stdout.write(f"\x1b[{len(lines)}A\x1b[J")
        for line in lines:
            say.line(line)
        say.data(describe(budget, usage, ahead))
        shown += 1
        if seconds is None or shown == rounds:
            return
        clock.wait(ThreadSignal(), clock.steady() + round(seconds * SECOND))


def describe(budget: TaskBudget, usage: dict[str, Usage], ahead: dict[str, Forecast]) -> dict[str, Any]:
    """Word the answer for programs."""
    nothing = Forecast(0.0, None)
    return {
        "budget": budget.settings.name,
        "storage": str(budget.settings.storage),
        "strategy": budget.settings.strategy,
        "tiers": {name: {**each._asdict(), **ahead.get(name, nothing)._asdict()} for name, each in usage.items()},
    }


def draw(budget: TaskBudget, usage: dict[str, Usage], ahead: dict[str, Forecast], say: Say) -> list[str]:
    """Draw the tiers as bars."""
    settings = budget.settings
    width = max(map(len, usage))
    figures = {name: f"{each.used:,} / {each.quota:,}" for name, each in usage.items()}
    numbers = max(map(len, figures.values()))
    lines = [say.style(f"{settings.name}, {settings.strategy} windows, in {settings.storage}", "bold")]
    for name, each in usage.items():
        percent = f"{100 * each.used / each.quota:.0f} %"
        future = say.style(outlook(each, ahead.get(name)), "dim")
        lines.append(
            f"{name:<{width}}  {say.bar(each.used, each.quota)}  {figures[name]:>{numbers}}  {percent:>5}  {future}"
        )
    return lines


def outlook(usage: Usage, ahead: Forecast | None) -> str:
    """Say what is to come of a tier."""
    if ahead is None:
        return "tasks under way"
    if not usage.remaining:
        return f"used up; all of it is back in {duration(usage.reset_after)}"
    if ahead.runs_out_in is None:
        return "lasts at this pace" if ahead.pace else "not in use"
    return f"runs out in {duration(ahead.runs_out_in)} at this pace"


def duration(seconds: float) -> str:
    """Write a time in its two largest units."""
    left = max(1, round(seconds))
    parts: list[str] = []
    for unit, size in UNITS:
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
    return " ".join(part for part in parts[:2] if part)
