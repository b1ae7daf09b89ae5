"""The capacity of each resource of a swarm over the last 24 hours, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_RESOURCES: Final = 12
MAX_POINTS: Final = 300  # of a resource
HISTORY_MILLISECONDS: Final = 86_400_000


class CapacityPoint(NamedTuple):
    """The capacity of a resource from a time on, until the next point; the last point is the last sample."""

    at: int  # milliseconds since 1970
    total: int
    original: int


class CapacityHistory:
    """A point for each change of the capacity. If there are too many, old points are merged to the lowest capacity."""

    def __init__(self) -> None:
        """Start without samples."""
        self.resources: dict[str, list[CapacityPoint]] = {}

    def add(self, at: int, capacities: Mapping[str, tuple[int, int]]) -> None:
        """Add a sample: the total and the original capacity of each resource."""
        for name in [name for name, points in self.resources.items() if points[-1].at <= at - HISTORY_MILLISECONDS]:
            del self.resources[name]
        for name, (total, original) in capacities.items():
            points = self.resources.get(name)
            if points is None:
                if len(self.resources) >= MAX_RESOURCES:
                    continue
                points = self.resources[name] = []
            _add_point(points, CapacityPoint(at, total, original))


def _add_point(points: list[CapacityPoint], point: CapacityPoint) -> None:
    if len(points) > 1 and points[-1][1:] == points[-2][1:] == point[1:]:
        points[-1] = point
    else:
        points.append(point)
    while len(points) > 1 and points[1].at <= point.at - HISTORY_MILLISECONDS:
        del points[0]
    if len(points) > MAX_POINTS:
        half = MAX_POINTS // 2
        points[:half] = [
            CapacityPoint(first.at, min(first.total, second.total), max(first.original, second.original))
            for first, second in zip(points[:half:2], points[1:half:2], strict=True)
        ]
