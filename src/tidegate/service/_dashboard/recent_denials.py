"""The share of denied calls in the last minute, the usual share, and since when it is higher than usual.

An episode that began within the last minute has a share of its own, without the calls before it.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any, Final

from tidegate.service._dashboard.findings import MIN_SHARE, UNUSUAL_FACTOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.service._dashboard.history import DecisionHistory, HistoryTier

RECENT_SECONDS: Final = 60
IGNORED_MINUTES: Final = 5  # the latest minutes are not part of what is usual
MIN_USUAL_MINUTES: Final = 10  # with calls; with fewer, no share is usual
MAX_GAP_SECONDS: Final = 60  # an episode of denials may pause this long


def describe_recent(history: DecisionHistory) -> dict[str, Any]:
    """Return the calls of the last minute, the usual share of denials, and since when it is exceeded."""
    seconds = history.seconds
    steps = min(RECENT_SECONDS, seconds.steps)
    admitted, denied = (sum(column.last(steps)) for column in seconds.total.columns[:2])
    usual = usual_share(history.minutes)
    threshold = max(MIN_SHARE, UNUSUAL_FACTOR * usual) / 2
    episode = min(steps, episode_steps(seconds, threshold))
    good, bad = (sum(column.last(episode)) for column in seconds.total.columns[:2])
    return {
        "seconds": steps,
        "admitted": admitted,
        "denied": denied,
        "share": round(bad / (good + bad), 4) if bad else 0.0,
        "usual": round(usual, 4),
        "since": find_start(history, threshold),
    }


def usual_share(minutes: HistoryTier) -> float:
    """Return the median share of denied calls in the minutes of the last day, without the latest ones."""
    admitted, denied, _ = (column.last(minutes.steps)[:-IGNORED_MINUTES] for column in minutes.total.columns)
    shares = [bad / (good + bad) for good, bad in zip(admitted, denied, strict=True) if good + bad]
    return median(shares) if len(shares) >= MIN_USUAL_MINUTES else 0.0


def find_start(history: DecisionHistory, threshold: float) -> int | None:
    """Return when the current episode of denials above a share began, in milliseconds since 1970."""
    start = None
    for tier in history.tiers:
        steps = episode_steps(tier, threshold)
        if steps:
            began = history.end_of(tier) - steps * tier.step * 1000
            start = began if start is None else min(start, began)
        if steps < tier.steps:
            break  # the episode began within this tier; otherwise a coarser one may know more
    return start


def episode_steps(tier: HistoryTier, threshold: float) -> int:
    """Return for how many of the last steps the share of denied calls has been above a threshold, with short gaps."""
    admitted, denied, _ = (column.last(tier.steps) for column in tier.total.columns)
    gap = max(1, MAX_GAP_SECONDS // tier.step)
    return last_episode(admitted[::-1], denied[::-1], threshold, gap)


def last_episode(admitted: Sequence[int], denied: Sequence[int], threshold: float, gap: int) -> int:
    """Return the length of the episode at the start of these values, the latest first."""
    length = 0
    for place, (good, bad) in enumerate(zip(admitted, denied, strict=True)):
        if bad and bad >= threshold * (good + bad):
            length = place + 1
        elif place - length >= gap:
            break
    return length
