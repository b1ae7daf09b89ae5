"""The state of a resource."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Capacity:
    """The state of a resource: permits available now, total permits per window, and calls in progress.

    `total` is the current capacity, reduced or not; `original` is the value that was set. `window` and `frozen_for` are
    in seconds; while a resource is frozen nothing is available.
    """

    resource: str
    available: int
    total: int
    window: float
    in_flight: int
    original: int = field(default=0, compare=False)
    frozen_for: float = field(default=0.0, compare=False)
