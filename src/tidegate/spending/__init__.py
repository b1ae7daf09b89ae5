"""What was spent: a ledger, reports by day, model or team, forecasts, and warnings before a ceiling is reached.

ledger.py       what calls and tasks have cost, in an SQLite file
report.py       sums of a ledger, as rows, CSV or JSON; forecasts
milestones.py   which warnings are due
monitor.py      Spending: records what calls cost, and warns by log, metric and webhook
settings.py     the setting `spending` of a service and of an egress gateway
webhook.py      posts warnings
"""

from tidegate.spending._ledger import Ledger, SpendingEntry
from tidegate.spending._monitor import Spending
from tidegate.spending._settings import SpendingSettings

__all__ = ["Ledger", "Spending", "SpendingEntry", "SpendingSettings"]
