from __future__ import annotations

import random

from tidegate.service._dashboard.capacity_history import (
    HISTORY_MILLISECONDS,
    MAX_POINTS,
    MAX_RESOURCES,
    CapacityHistory,
)

SECOND = 1000


def capacity_at(points, at):
    """Return the capacity that the points show at a time."""
    return [point for point in points if point.at <= at][-1].total


def test_equal_samples_are_two_points():
    history = CapacityHistory()
    for at in range(0, 3600 * SECOND, SECOND):
        history.add(at, {"api": (100, 100)})
    assert history.resources["api"] == [(0, 100, 100), (3599 * SECOND, 100, 100)]


def test_every_change_is_a_point():
    history = CapacityHistory()
    samples = [(at * SECOND, 50 if 20 <= at < 30 else 100) for at in range(60)]
    for at, total in samples:
        history.add(at, {"api": (total, 100)})
    assert all(capacity_at(history.resources["api"], at) == total for at, total in samples)
    assert len(history.resources["api"]) == 6


def test_many_changes_keep_the_low_points_and_the_new_ones():
    generator = random.Random(7)
    history = CapacityHistory()
    samples = [(at * SECOND, generator.randrange(20, 100)) for at in range(5000)]
    samples[100] = (100 * SECOND, 1)
    for at, total in samples:
        history.add(at, {"api": (total, 100)})
    points = history.resources["api"]
    assert len(points) <= MAX_POINTS
    assert min(point.total for point in points) == 1
    assert points[0].at == 0
    assert all(capacity_at(points, at) == total for at, total in samples[-100:])
    assert all(capacity_at(points, at) <= total for at, total in samples)


def test_points_and_resources_are_forgotten_after_a_day():
    history = CapacityHistory()
    for number in range(MAX_RESOURCES):
        history.add(0, {f"old-{number}": (1, 1)})
    history.add(SECOND, {"new": (1, 1)})
    assert "new" not in history.resources  # too many
    for hour in range(30):
        history.add(hour * 3600 * SECOND, {"old-0": (hour, 30)})
    history.add(30 * 3600 * SECOND, {"new": (1, 1)})
    assert set(history.resources) == {"old-0", "new"}
    assert history.resources["old-0"][1].at > 29 * 3600 * SECOND - HISTORY_MILLISECONDS
