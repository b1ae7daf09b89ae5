"""Budgets for batches of tasks: by minute, hour, day, week and month, in tasks and in what they cost.

face.py        TaskBudget and AsyncTaskBudget: what users hold
batch.py       a batch around a block
engine.py      what both do, as steps; what happens while the database is lost; accounts.py settles
settings.py    everything a budget is told; environment.py and config.py read it from variables and YAML
tiers.py       tiers as the limits of one policy; schedule.py changes their quotas by time of day and load
terms.py       the policies that are made of them; held.py is a batch under way
books.py       where settlements go; ledger.py is the SQLite file with its list of open batches and completions,
               owners.py tells whose processes have ended, backlog.py keeps what the database could not be told
watch.py       counts, log lines, warnings; webhook.py posts these, prometheus.py shows the counts
forecast.py    when each tier runs out at the present pace
"""

from tidegate.budget.face import AsyncTaskBudget, TaskBudget
from tidegate.budget.result import RateLimitResult, Usage
from tidegate.budget.settings import BudgetSettings

__all__ = ["AsyncTaskBudget", "BudgetSettings", "RateLimitResult", "TaskBudget", "Usage"]
