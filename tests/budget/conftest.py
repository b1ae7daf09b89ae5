"""Budgets in virtual time, each on its own file."""

import asyncio

import pytest

from tests.budget.both_kinds import KINDS, START, BlockingBudget
from tidegate.testing import ManualClock


@pytest.fixture
def clock():
    return ManualClock(start=START)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rate_limits.db"


@pytest.fixture(params=["threads", "tasks"])
def open_budget(request, clock, path):
    """Open budgets of one kind; they are closed at the end of the test."""
    opened = []
    with asyncio.Runner() as runner:

        def start(source=None, **options):
            kind = KINDS[request.param]
            options.setdefault("clock", clock)
            if source is None:
                options.setdefault("store", path)
            make = kind if source is None else kind.from_env if "RATE_LIMIT_ENABLED" in source else kind.from_config
            arguments = () if source is None else (source,)
            if request.param == "threads":
                budget = make(*arguments, **options)
            else:
                budget = BlockingBudget(runner, lambda: make(*arguments, **options))
            opened.append(budget)
            return budget

        yield start
        for budget in opened:
            budget.close()
