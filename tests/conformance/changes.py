"""Histories of one limit that changes again and again, so that older windows pile up: for every store and port."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tidegate import Limit, Policy
from tidegate.core.bounds import MAX, SECOND
from tidegate.testing import Model, Vector

if TYPE_CHECKING:
    from collections.abc import Iterator

NESTED = ("year", "month", "week", "day", "hour", "minute")
PLACES = (("UTC", 0), ("UTC", 0), ("Asia/Kolkata", 0), ("America/New_York", 5))
ROLLING = ("sliding_window", "sliding_log", "concurrency", "token_bucket")
START = 1_749_999_000 * SECOND + 250_001  # 2025-06-15, shortly before an hour ends


def changing_history(seed: int, steps: int = 120) -> Iterator[Vector]:
    """Charge and correct one key, mostly by limits with shorter and shorter periods, then by the longest again."""
    random, model = Random(f"changes {seed}"), Model()
    versions = _versions(random, seed)
    now, place, held = START, 0, [START]
    for _ in range(steps):
        now += random.choice(
            (0, 1, SECOND, 20 * SECOND, 40 * 60 * SECOND, random.choice(versions).length // 3, -SECOND)
        )
        place = random.choice((place, min(place + 1, len(versions) - 1), random.randrange(len(versions))))
        verb, cost, at = random.choice(("acquire", "acquire", "hold", "peek")), random.choice((1, 1, 2, 5, 40)), None
        if not random.randrange(4):
            verb, cost = "adjust", random.choice((-1, -3, -60, 2)) if random.randrange(20) else MAX
            at = random.choice((None, *held[-5:], now + random.choice((-1, 0, 1)) * random.choice(versions).length))
        asks = ((Policy("changes", (versions[place],)), "k", (cost,)),)
        answers = model.apply(verb, asks, now, at)
        if verb in ("acquire", "hold") and answers[0].allowed:
            held.append(now)
        yield Vector(verb, asks, now, at, answers)


def _versions(random: Random, seed: int) -> list[Limit]:
    kind = ("calendar_window", "fixed_window", "calendar_window", random.choice(ROLLING))[seed % 4]
    quotas = [random.choice((100, 100, 1000, 30, MAX)) for _ in NESTED]
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
