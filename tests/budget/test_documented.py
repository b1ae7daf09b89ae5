"""Every setting, metric, option and public name is in docs/budgets.md."""

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

from tidegate import budget
from tidegate.budget import BudgetSettings, RateLimitResult, TaskBudget, Usage
from tidegate.budget import prometheus as metrics
from tidegate.budget.alerts.monitor import FALLBACK_DESCRIPTIONS
from tidegate.budget.settings.environment import CONFIG_VARIABLE, VARIABLES
from tidegate.cli import COMMANDS
from tidegate.cli import budget as command

PAGE = (Path(__file__).parents[2] / "docs" / "budgets.md").read_text(encoding="utf-8")


def command_options():
    parser = argparse.ArgumentParser(add_help=False)
    command.add_options(parser)
    return [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001 - argparse has no public list


NAMES = {
    "setting": [each.name for each in fields(BudgetSettings) if not each.name.startswith("per_")],
    "variable": [
        CONFIG_VARIABLE,
        *(name for name in VARIABLES.values() if "_PER_" not in name),
        "RATE_LIMIT_PER_MINUTE",
    ],
    "metric": [word.split("{")[0] for word in str(metrics.__doc__).split() if word.startswith("rate_limit_")],
    "option": command_options(),
    "choice": list(FALLBACK_DESCRIPTIONS),
    "public name": list(budget.__all__),
    "method": [name for name in dir(TaskBudget) if not name.startswith("_") and callable(getattr(TaskBudget, name))],
    "result": [each.name for each in fields(RateLimitResult) if each.name != "batch"],
    "usage": list(Usage._fields),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_everything_is_documented(kind, name):
    assert f"`{name}" in PAGE, f"the {kind} {name} is not in docs/budgets.md"


def test_the_command_is_listed_and_documented():
    assert "budget" in COMMANDS
    assert "`tidegate budget`" in PAGE
