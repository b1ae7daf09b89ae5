"""Budgets for batches of tasks: by minute, hour, day, week and month, in tasks and in what they cost.

budget         TaskBudget and AsyncTaskBudget, the public classes; they run the operations
operations     every operation of a budget, written once as flows
batch          a batch around a block
open_batch     batches that are reserved and not settled yet
short_term     the limits per minute and hour in memory, which decide while the database is unavailable
result         the result of a check
settings       settings from arguments, environment variables and YAML; tiers, schedules, and the policies of both
storage        where settlements are stored: the SQLite file with open batches and completions, or any other store
alerts         counters, log lines, forecasts and warnings
prometheus     the counters as metrics
"""

from tidegate.budget._batch import AsyncBatch, Batch
from tidegate.budget._budget import AsyncTaskBudget, TaskBudget
from tidegate.budget._result import BudgetHealth, DatabaseHealth, RateLimitResult, Usage
from tidegate.budget._settings.model import BudgetOptions, BudgetSettings, Quotas
from tidegate.budget._settings.schedule import ScheduleRule
from tidegate.budget._settings.values import BudgetFallback, Strategy

__all__ = [
    "AsyncBatch",
    "AsyncTaskBudget",
    "Batch",
    "BudgetFallback",
    "BudgetHealth",
    "BudgetOptions",
    "BudgetSettings",
    "DatabaseHealth",
    "Quotas",
    "RateLimitResult",
    "ScheduleRule",
    "Strategy",
    "TaskBudget",
    "Usage",
]
