"""Durations as they are written everywhere."""

import pytest

from tidegate import Limiter
from tidegate._demo import draw
from tidegate._policy.durations import format_exact_duration
from tidegate.core._limit import parse_period
from tidegate.testing import ManualClock


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0001, "1ms"),
        (0.5, "500ms"),
        (1.5, "1s500ms"),
        (30, "30s"),
        (59.9999, "1m"),
        (90_061.001, "1d1h1m1s1ms"),
    ],
)
def test_exact_durations_are_rounded_up_to_a_millisecond(seconds, text):
    assert format_exact_duration(seconds) == text
    assert seconds * 1_000_000 <= parse_period(text) < seconds * 1_000_000 + 1000


def test_no_time_at_all():
    assert format_exact_duration(0) == "0s"


def test_the_demonstration_writes_durations_in_the_same_form():
    counts = dict.fromkeys(("calm", "busy", "greedy"), 0)
    limiter = Limiter("5/1s burst=10", clock=ManualClock(start=1_728_000_000))
    titles = [next(iter(draw(limiter, second, counts, counts))) for second in (0, 2, 2.5)]
    assert [title.split()[:2] for title in titles] == [["after", "0s"], ["after", "2s"], ["after", "2s500ms"]]
    assert len({len(title) for title in titles}) == 1
