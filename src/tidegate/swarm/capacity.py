"""What an agent is told of a resource."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Capacity:
    """How a resource stands: permits available now, of how many in total per window, and the calls in progress.

    `total` is the capacity as it is now, reduced or not; `original` what it was set to. `window` and `frozen_for` are
    in seconds; while a resource is frozen nothing is available.
    """

    resource: str
    available: int
    total: int
    window: float
    in_flight: int
    original: int = field(default=0, compare=False)
    frozen_for: float = field(default=0.0, compare=False)
