"""For tests, yours and ours: a clock that stands still, and a proof for stores."""

from tidegate.clock import ManualClock

__all__ = ["ManualClock"]
