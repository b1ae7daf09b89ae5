"""Limits, decisions and algorithms: pure functions of integers, without a clock or I/O."""

from tidegate.core.calendar import calendar_bounds
from tidegate.core.decision import Decision, LimitDecision
from tidegate.core.limit import Limit, parse_period

__all__ = ["Decision", "Limit", "LimitDecision", "calendar_bounds", "parse_period"]
