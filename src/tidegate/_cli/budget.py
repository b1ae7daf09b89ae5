"""`tidegate budget`: show how much of a task budget is used, and when it runs out.

`add`, `refund` and `reset` correct it: see `tidegate._cli.budget_corrections`. With `--by` or `--providers` it reports
money instead: see `tidegate._cli.spending`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate._cli import budget_corrections, spending
from tidegate._cli.arguments import add_watch_option
from tidegate._cli.live import watch
from tidegate._cli.tables import TableColumn, TextTable, draw_table
from tidegate._policy.durations import format_duration
from tidegate.budget import TaskBudget
from tidegate.budget.alerts._forecast import Forecast, forecast
from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.service._runtime.components import read_budget_settings, shown_budget

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output
    from tidegate.budget import BudgetSettings, Usage

EXAMPLES: Final = (
    ("tidegate budget --config budget.yaml", "the tiers of this budget"),
    ("tidegate budget --watch 5s", "the tiers in the RATE_LIMIT_* variables, every five seconds"),
    ("tidegate budget add 50 --tier day --reason 'backfill'", "allow 50 more tasks in the tier day"),
    ("tidegate budget refund 5 --type embedding", "five tasks of this type that were counted do not count"),
    ("tidegate budget reset --tier hour", "forget what the tier hour has counted; asks for confirmation"),
    ("tidegate budget --by model,day", "what was spent, from the ledger spending.db"),
    ("tidegate budget --providers providers --store redis://cache", "how much of each spending ceiling is used"),
)
COLUMNS: Final = (
    TableColumn("tier"),
    TableColumn("", optional=True),
    TableColumn("used", right=True),
    TableColumn("of", right=True),
    TableColumn("", right=True),
    TableColumn("forecast"),
)
BAR_WIDTH: Final = 30


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the store and the display of the budget."""
    parser.description = (
        "Show the tiers (the limits per minute, hour, day, week and month) of the task budget configured by "
        "RATE_LIMIT_* variables or by a file. With --by, sum the costs in a ledger; with --providers, show the "
        "spending ceilings. With an action, correct the counts of the tiers: add, refund and reset refund tasks that "
        "were counted, the latest ones first, and write a line to the audit log in the store. They refund at most "
        "what a tier has counted, and not what running batches have reserved. So add cannot raise a limit: a tier of "
        "500 with 30 used has 500 left after 'add 50', and the output says that it refunded 30."
    )
    budget_corrections.add_options(parser)
    parser.add_argument("--config", metavar="FILE", help="a YAML file, used instead of the variables")
    parser.add_argument(
        "--store",
        metavar="PATH",
        help="the SQLite file or store URL, used instead of the configured one; with --providers, of their ceilings",
    )
    add_watch_option(parser)
    spending.add_options(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Show the budget once, or repeatedly; or correct it."""
    budget_corrections.refuse_unused_options(args)
    if args.by is not None or args.providers:
        watch(lambda: spending.show(args, output), output, args.watch)
        return 0
    spending.refuse_unused_options(args)
    settings = read_settings(args)
    with TaskBudget.to_read(replace(shown_budget(settings), milestones=())) as budget:  # a view logs nothing
        if args.action is not None:
            return budget_corrections.run(args, budget, output)
        watch(lambda: show(budget, output, enabled=settings.enabled), output, args.watch)
    return 0


def read_settings(args: argparse.Namespace) -> BudgetSettings:
    """Read the settings of the budget as they are configured; a disabled budget is shown too."""
    settings = read_budget_settings(None if args.config is None else Path(args.config), args.store)
    shown_budget(settings)
    if "://" not in str(settings.store) and not Path(settings.store).exists():
        message = f"{settings.store} does not exist: give another path; a budget creates the file at its first check"
        raise ConfigError(message, field="store")
    return settings


def show(budget: TaskBudget, output: Output, *, enabled: bool = True) -> None:
    """Show the budget once; `enabled` is whether the settings enable it."""
    usage = budget.snapshot()
    if budget.lost:
        raise StoreUnavailable(f"cannot read the store {budget.settings.shown_store}")
    forecasts = forecast(budget.operations.plan, usage, budget.operations.clock.ns() // 1000)
    output.write_lines(draw(budget, usage, forecasts, output))
    if not enabled:
        output.write_line("The settings do not enable this budget: programs that use them are not limited.", "yellow")
    output.write_json({**describe(budget, usage, forecasts), "enabled": enabled})


def describe(budget: TaskBudget, usage: dict[str, Usage], forecasts: dict[str, Forecast]) -> dict[str, Any]:
    """Describe the budget for JSON."""
    unused = Forecast(0.0, None)
    return {
        "budget": budget.settings.name,
        "store": budget.settings.shown_store,
        "strategy": budget.settings.strategy,
        "tiers": {name: {**each._asdict(), **forecasts.get(name, unused)._asdict()} for name, each in usage.items()},
    }


def draw(budget: TaskBudget, usage: dict[str, Usage], forecasts: dict[str, Forecast], output: Output) -> list[str]:
    """Draw the tiers as a table with bars."""
    settings = budget.settings
    rows = []
    for name, each in usage.items():
        future = (describe_forecast(each, forecasts.get(name)), "dim")
        figures = f"{each.used:,}", f"{each.quota:,}", f"{100 * each.used / each.quota:.0f} %"
        rows.append((name, output.bar(each.used, each.quota, BAR_WIDTH), *figures, (future,)))
    title = output.style(f"{settings.name}, {settings.strategy} windows, in {settings.shown_store}", "bold")
    return [title, *draw_table(TextTable(COLUMNS, list(rows)), output)]


def describe_forecast(usage: Usage, expected: Forecast | None) -> str:
    """Describe when a tier runs out."""
    if expected is None:
        return "running tasks"
    if not usage.remaining:
        return f"used up; completely reset in {format_duration(usage.reset_after)}"
    if expected.runs_out_in is None:
        return "lasts at this pace" if expected.pace else "not in use"
    return f"runs out in {format_duration(expected.runs_out_in)} at this pace"
