"""Every setting, metric, option and public name is in the guide or the reference of budgets."""

import argparse
import re
from dataclasses import fields
from pathlib import Path

from tests.cases import cases
from tidegate import budget
from tidegate._cli import COMMANDS
from tidegate._cli import budget as command
from tidegate.budget import BudgetSettings, RateLimitResult, TaskBudget, Usage
from tidegate.budget._settings.environment import CONFIG_VARIABLE, VARIABLES
from tidegate.budget.alerts import _metrics as metrics
from tidegate.budget.alerts._monitor import FALLBACK_DESCRIPTIONS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / folder / "budgets.md").read_text(encoding="utf-8") for folder in ("howto", "reference"))


def command_options():
    parser = argparse.ArgumentParser(add_help=False)
    command.add_options(parser)
    return [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001 - argparse has no public list


def metric_labels():
    """Return the labels of every metric that a budget has."""
    with TaskBudget(per_minute=1, store="memory://") as opened:
        return {
            family.name: {label for _, labels, _ in family.samples for label in labels} - {"le"}
            for family in metrics.read_metrics(opened.operations)
        }


METRICS = metric_labels()
NAMES = {
    "setting": [each.name for each in fields(BudgetSettings) if not each.name.startswith("per_")],
    "variable": [
        CONFIG_VARIABLE,
        *(name for name in VARIABLES.values() if "_PER_" not in name),
        "RATE_LIMIT_PER_MINUTE",
    ],
    "metric": list(METRICS),
    "option": command_options(),
    "choice": list(FALLBACK_DESCRIPTIONS),
    "public name": list(budget.__all__),
    "method": [name for name in dir(TaskBudget) if not name.startswith("_") and callable(getattr(TaskBudget, name))],
    "result": [each.name for each in fields(RateLimitResult) if each.name != "batch"],
    "usage": list(Usage._fields),
}


@cases(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_everything_is_documented(kind, name):
    assert f"`{name}" in PAGE, f"the {kind} {name} is in neither page"


def test_every_documented_metric_exists_with_its_labels():
    documented = {}
    for line in PAGE.splitlines():
        names, labels = (re.findall(r"`(\w+)`", cell) for cell in (line.split("|") + [""] * 3)[1:3])
        documented |= {name: set(labels) for name in names if line.startswith("| `rate_limit_")}
    assert documented == METRICS
    listed = [word for word in str(metrics.__doc__).split() if word.startswith("rate_limit_")]
    assert [word.partition("{")[0] for word in listed] == list(METRICS)


def test_the_command_is_listed_and_documented():
    assert "budget" in COMMANDS
    assert "`tidegate budget`" in PAGE
