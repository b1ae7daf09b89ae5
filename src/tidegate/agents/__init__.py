"""Budgets for trees of agents: a run, its sub-agents and their tools, stopped before the call that would exceed one.

    with Run("research-42", store="sqlite:///runs.db", limits=["0.20/run unit=usd"]) as run:
        planner = run.child("planner", limits=["0.05/run unit=usd"])
        with planner.reserve({"usd": "0.01"}) as call:
            call.commit({"usd": "0.0072"})

A call is charged to its node and to every node above, in one atomic step, before it is sent, and settled afterwards.
"""

from tidegate.agents._charged import charged
from tidegate.agents._credits import AsyncCredits, CreditBalance, CreditCost, Credits
from tidegate.agents._errors import RunDenied, RunEndedError, RunRightError, TokenError
from tidegate.agents._exhausted import AskWebhook, Exhausted, OnExhausted
from tidegate.agents._limits import Amount, RunCost
from tidegate.agents._listing import RunListing, list_runs, list_runs_async
from tidegate.agents._payments import RunCosts
from tidegate.agents._reports import ReportRow, sum_rows
from tidegate.agents._reservation import AsyncRunReservation, RunReservation
from tidegate.agents._run import AsyncRun, Run, current_run
from tidegate.agents._usage import LimitUsage, NodeUsage

__all__ = [
    "Amount",
    "AskWebhook",
    "AsyncCredits",
    "AsyncRun",
    "AsyncRunReservation",
    "CreditBalance",
    "CreditCost",
    "Credits",
    "Exhausted",
    "LimitUsage",
    "NodeUsage",
    "OnExhausted",
    "ReportRow",
    "Run",
    "RunCost",
    "RunCosts",
    "RunDenied",
    "RunEndedError",
    "RunListing",
    "RunReservation",
    "RunRightError",
    "TokenError",
    "charged",
    "current_run",
    "list_runs",
    "list_runs_async",
    "sum_rows",
]
