"""Limits, decisions and algorithms: pure functions of integers, without a clock or I/O."""

from tidegate.core._calendar import Calendar, calendar_bounds
from tidegate.core._decision import VERBS, Decision, LimitDecision, LocalDecision
from tidegate.core._limit import Limit, parse_period
from tidegate.core._state import State, View

__all__ = [
    "VERBS",
    "Calendar",
    "Decision",
    "Limit",
    "LimitDecision",
    "LocalDecision",
    "State",
    "View",
    "calendar_bounds",
    "parse_period",
]
