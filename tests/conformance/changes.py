"""Histories of one limit that changes repeatedly, so that states carry older windows; for every store and port."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tidegate import Limit, Policy
from tidegate.core._bounds import MAX_INTEGER, SECOND
from tidegate.testing import ReferenceStore, Vector

if TYPE_CHECKING:
    from collections.abc import Iterator

NESTED = ("year", "month", "week", "day", "hour", "minute")
PLACES = (("UTC", 0), ("UTC", 0), ("Asia/Kolkata", 0), ("America/New_York", 5))
ROLLING = ("sliding_window", "sliding_log", "concurrency", "token_bucket")
START = 1_749_999_000 * SECOND + 250_001  # 2025-06-15, shortly before an hour ends


def changing_history(seed: int, steps: int = 120) -> Iterator[Vector]:
    """Charge and correct one key, mostly by limits with shorter and shorter periods, then by the longest again."""
    random, model = Random(f"changes {seed}"), ReferenceStore()
    versions = _versions(random, seed)
    now, place, held = START, 0, [START]
    for _ in range(steps):
        now += random.choice(
            (0, 1, SECOND, 20 * SECOND, 40 * 60 * SECOND, random.choice(versions).length // 3, -SECOND)
        )
        place = random.choice((place, min(place + 1, len(versions) - 1), random.randrange(len(versions))))
        verb, cost, at = random.choice(("acquire", "acquire", "hold", "peek")), random.choice((1, 1, 2, 5, 40)), None
        if not random.randrange(4):
            verb, cost = "adjust", random.choice((-1, -3, -60, 2)) if random.randrange(20) else MAX_INTEGER
            lengths = (versions[place].length, random.choice(versions).length)
            at = random.choice((None, *held[-3:], *(now + random.choice((-1, 0, 1)) * length for length in lengths)))
        asks = ((Policy("changes", (versions[place],)), "k", (cost,)),)
        answers = model.apply(verb, asks, now, at)
        if verb in ("acquire", "hold") and answers[0].allowed:
            held.append(now)
        yield Vector(verb, asks, now, at, answers)


def _versions(random: Random, seed: int) -> list[Limit]:
    kind = ("calendar_window", "fixed_window", "calendar_window", random.choice(ROLLING))[seed % 4]
    quotas = [random.choice((100, 100, 1000, 30, MAX_INTEGER)) for _ in NESTED]
    if kind == "calendar_window":
        pairs = zip(quotas, NESTED, strict=True)
        made = []
        for quota, period in pairs:
            zone, hour = random.choice(PLACES)
            hour = 0 if period in ("hour", "minute") else hour
            made.append(Limit(quota, period, kind, name="l", timezone=zone, reset_hour=hour))
        return made
    if kind == "token_bucket":
        quotas = [min(quota, 1000) for quota in quotas]
    lengths = [86_400 * SECOND // divisor for divisor in (1, 2, 7, 24, 97, 1440)]
    if kind == "sliding_window":
        quotas = [min(quota, 1000) for quota in quotas]
    return [Limit(quota, f"{length}us", kind, name="l") for quota, length in zip(quotas, lengths, strict=True)]


def directed_histories() -> Iterator[list[Vector]]:
    """Yield short histories of cases that random ones rarely contain."""
    year, month, day, hour, minute = map(_calendar, ("year", "month", "day", "hour", "minute"))
    india = Limit(100, "day", "calendar_window", name="l", timezone="Asia/Kolkata")
    daily, hourly, minutely = (Limit(100, period, "fixed_window", name="l") for period in ("1d", "1h", "1m"))
    # An hour that has ended while a day is open counts in that day, and in another limit's day.
    yield _history(
        ("acquire", day, 10, 0), ("acquire", hour, 20, 0), ("peek", day, 71, 180), ("peek", india, 71, 180),
        ("acquire", day, 70, 180), ("peek", hour, 1, 181),
    )  # fmt: skip
    # Usage of ended hours counts again only in a window of a day.
    yield _history(
        ("acquire", day, 10, 0), ("acquire", hour, 20, 1), ("acquire", hour, 30, 61), ("peek", hour, 91, 121),
        ("acquire", hour, 1, 121), ("peek", day, 41, 122), ("acquire", day, 39, 122), ("peek", day, 1, 1439),
        ("peek", day, 1, 1440),
    )  # fmt: skip
    yield _history(
        ("acquire", daily, 10, 0), ("acquire", hourly, 20, 1), ("acquire", hourly, 30, 61),
        ("acquire", minutely, 5, 62), ("peek", hourly, 99, 63), ("peek", daily, 41, 63), ("acquire", daily, 35, 63),
        ("peek", daily, 1, 1439), ("peek", daily, 1, 1502),
    )  # fmt: skip
    # More older windows than a state carries.
    nested = [Limit(100, f"{2**power}h", "fixed_window", name="l") for power in range(8, -1, -1)]
    steps = [("acquire", limit, place + 1, place) for place, limit in enumerate(nested)]
    looks = [("peek", nested[-1], 60, 60 * 2**power + 4) for power in range(9)]
    yield _history(*steps, *looks, ("adjust", nested[-1], -7, 62, 3))
    # Corrections in an older window, in both, in one that has ended, in one to come.
    yield _history(
        ("hold", month, 60, 0), ("hold", day, 10, 600), ("adjust", day, -5, 601, 0), ("adjust", month, -20, 602, 600),
        ("adjust", day, 7, 603, 0), ("adjust", day, -5, 604, 604 + 1440), ("adjust", day, -5, 605, -1440 * 40),
        ("peek", day, 80, 606), ("adjust", day, -80, 607), ("acquire", year, 100, 608), ("adjust", hour, -9, 609, 608),
        ("adjust", day, 3, 610, 70),
    )  # fmt: skip
    # A clock that steps back behind the latest charge, in another limit's window.
    yield _history(
        ("acquire", month, 10, 0), ("acquire", day, 20, 1439), ("acquire", minute, 5, 1430), ("peek", minute, 66, 1439)
    )
    # What was refunded for an instant is not refunded for it again, nor for a later one.
    slow = Limit(10, "300d", name="l")
    yield _history(
        ("hold", slow, 3, 0), ("acquire", slow, 5, 0), ("adjust", slow, -2, 1, 0), ("adjust", slow, -2, 1, 0),
        ("peek", slow, 5, 2),
    )  # fmt: skip
    yield _history(
        ("hold", slow, 3, 0), ("hold", slow, 2, 1), ("acquire", slow, 4, 1), ("adjust", slow, -2, 2, 0),
        ("adjust", slow, -4, 2, 1), ("peek", slow, 5, 2), ("adjust", slow, 1, 2, 0), ("adjust", slow, -2, 2, 1),
        ("adjust", slow, -9, 3, 0), ("peek", slow, 5, 3),
    )  # fmt: skip
    # A cost of 0 leaves a bucket as it is, also its instant.
    bucket = Limit(100, "1h", name="l")
    yield _history(("acquire", bucket, 50, 0), ("acquire", bucket, 0, 10), ("peek", bucket, 0, 5))


def _calendar(period: str) -> Limit:
    return Limit(100, period, "calendar_window", name="l")


def _history(*steps: tuple[str, Limit, int, int] | tuple[str, Limit, int, int, int]) -> list[Vector]:
    model, vectors, midnight = ReferenceStore(), [], 1_749_945_600 * SECOND
    for verb, limit, cost, minute, *ats in steps:
        now, *at = (midnight + each * 60 * SECOND for each in (minute, *ats))
        asks = ((Policy("changes", (limit,)), "k", (cost,)),)
        vectors.append(
            Vector(verb, asks, now, at[0] if at else None, model.apply(verb, asks, now, at[0] if at else None))
        )
    return vectors
