"""`tidegate budget`: show how much of a task budget is used, and when it runs out.

With `--by` or `--providers` it reports money instead: see `tidegate.cli.spending`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate.budget import TaskBudget
from tidegate.budget.alerts.forecast import Forecast, forecast
from tidegate.cli import spending
from tidegate.cli.arguments import seconds
from tidegate.clock import Clock, SystemClock, ThreadSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.service.runtime.components import budget_settings

if TYPE_CHECKING:
    import argparse

    from tidegate.budget import BudgetSettings, Usage
    from tidegate.cli.output import Output

DURATION_UNITS: Final = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the storage and the display of the budget."""
    parser.description = (
        "Show the tiers of the task budget configured by RATE_LIMIT_* variables or by a file. With --by, sum the "
        "costs in a ledger; with --providers, show the spending ceilings."
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file, used instead of the variables")
    parser.add_argument(
        "--storage", metavar="PATH", help="the SQLite file or store URL, used instead of the configured one"
    )
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=seconds,
        const=1.0,
        help="update the display until interrupted, every second by default",
    )
    spending.add_options(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Show the budget once, or repeatedly."""
    if args.by is not None or args.providers:
        return spending.run(args, output)
    if args.watch is not None and not args.watch > 0:
        raise ConfigError(f"expected a number of seconds above 0, not {args.watch:g}", field="--watch")
    with TaskBudget(read_settings(args)) as budget:
        show(budget, output, SystemClock(), args.watch)
    return 0


def read_settings(args: argparse.Namespace) -> BudgetSettings:
    """Read the settings of the budget; a disabled budget is shown too."""
    settings = budget_settings(None if args.config is None else Path(args.config), args.storage)
    if "://" not in str(settings.storage) and not Path(settings.storage).exists():
        message = f"{settings.storage} does not exist: give another path; a budget creates the file at its first check"
        raise ConfigError(message, field="storage")
    return settings


def show(budget: TaskBudget, output: Output, clock: Clock, interval: float | None, rounds: int | None = None) -> None:
    """Show the budget once, or every `interval` seconds, until interrupted or for the given number of rounds."""
    shown = 0
    while True:
        usage = budget.snapshot()
        if budget.lost:
            raise StoreUnavailable(f"cannot read the storage {budget.settings.storage}")
        forecasts = forecast(budget.operations.plan, usage, budget.operations.clock.ns() // 1000)
        lines = draw(budget, usage, forecasts, output)
        if shown and output.live:
            sys.stdout.write(f"\x1b[{len(lines)}A\x1b[J")
        for line in lines:
            output.write_line(line)
        output.write_json(describe(budget, usage, forecasts))
        shown += 1
        if interval is None or shown == rounds:
            return
        clock.wait(ThreadSignal(), clock.steady() + round(interval * SECOND))


def describe(budget: TaskBudget, usage: dict[str, Usage], forecasts: dict[str, Forecast]) -> dict[str, Any]:
    """Describe the budget for JSON."""
    unused = Forecast(0.0, None)
    return {
        "budget": budget.settings.name,
        "storage": str(budget.settings.storage),
        "strategy": budget.settings.strategy,
        "tiers": {name: {**each._asdict(), **forecasts.get(name, unused)._asdict()} for name, each in usage.items()},
    }


def draw(budget: TaskBudget, usage: dict[str, Usage], forecasts: dict[str, Forecast], output: Output) -> list[str]:
    """Draw the tiers as bars."""
    settings = budget.settings
    width = max(map(len, usage))
    figures = {name: f"{each.used:,} / {each.quota:,}" for name, each in usage.items()}
    figures_width = max(map(len, figures.values()))
    lines = [output.style(f"{settings.name}, {settings.strategy} windows, in {settings.storage}", "bold")]
    for name, each in usage.items():
        percent = f"{100 * each.used / each.quota:.0f} %"
        future = output.style(describe_forecast(each, forecasts.get(name)), "dim")
        bar = output.draw_bar(each.used, each.quota)
        lines.append(f"{name:<{width}}  {bar}  {figures[name]:>{figures_width}}  {percent:>5}  {future}")
    return lines


def describe_forecast(usage: Usage, expected: Forecast | None) -> str:
    """Describe when a tier runs out."""
    if expected is None:
        return "running tasks"
    if not usage.remaining:
        return f"used up; completely reset in {format_duration(usage.reset_after)}"
    if expected.runs_out_in is None:
        return "lasts at this pace" if expected.pace else "not in use"
    return f"runs out in {format_duration(expected.runs_out_in)} at this pace"


def format_duration(seconds: float) -> str:
    """Write a duration in its two largest units."""
    left = max(1, round(seconds))
    parts: list[str] = []
    for unit, size in DURATION_UNITS:
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
    return " ".join(part for part in parts[:2] if part)
