"""Random calls to a store, each with the answer of the core.

The calls cover edge cases: few keys, policies of one to six limits that change under the same name, one limit whose
period changes repeatedly, costs around the quota, instants at, just before and just after a retry or reset, corrections
of charges that were never made, clocks that step back, numbers at the 2**53 bound.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._policy import Policy
from tidegate.core._bounds import MAX_INTEGER, SECOND
from tidegate.core._calendar import PERIODS
from tidegate.core._limit import Limit
from tidegate.errors import ConfigError
from tidegate.stores._base import Alternatives, decided_asks
from tidegate.testing._reference import ExpectedAnswer, ReferenceStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tidegate._policy import Key
    from tidegate.stores._base import Ask

START_TIME: Final = 1_704_067_200 * SECOND  # 2024-01-01; vectors begin within START_RANGE of it
START_RANGE: Final = 730 * 86_400 * SECOND
VECTORS_PER_SCENARIO: Final = 60  # steps with the same policies
KEYS: Final[tuple[Key, ...]] = ("a", "b", "a/b", ("a", "b"), ("a/b", "c"), ("a", "b/c"), "", "ключ %2F\n")
VERBS: Final = ("acquire",) * 8 + ("peek", "hold", "hold", "adjust", "adjust", "adjust", "reset")
TIME_STEPS: Final = ("now",) * 3 + ("wait",) * 3 + ("later",) * 3 + ("back",)
ALGORITHMS: Final = ("token_bucket", "token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency")
PERIOD_LENGTHS: Final = (
    1,
    7,
    1000,
    250_000,
    SECOND,
    60 * SECOND,
    3600 * SECOND,
    86_400 * SECOND,
    366 * 86_400 * SECOND,
)
CHANGING_ALGORITHMS: Final = ("calendar_window", "calendar_window", "fixed_window", "fixed_window", *ALGORITHMS[1:])
ZONES: Final = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe")


class Vector(NamedTuple):
    """One call to a store, with its instant, and the expected answer to each ask."""

    verb: str
    asks: tuple[Ask, ...]
    now: int
    at: int | None
    answers: tuple[ExpectedAnswer, ...]


def random_vectors(seed: int = 0, n: int = 1000, *, alternatives: bool = False) -> Iterator[Vector]:
    """Yield `n` vectors to replay on one empty store in this order; the same for the same seed.

    With `alternatives`, a quarter of the calls ask for the first of several alternatives (`tidegate.stores._base`).
    """
    model = ReferenceStore()
    for number in range(0, n, VECTORS_PER_SCENARIO):
        random, steps = Random(f"{seed}/{number}"), min(VECTORS_PER_SCENARIO, n - number)  # noqa: S311 - no secret
        yield from _scenario(random, model, f"p{number}", steps, alternatives=alternatives)


def _scenario(random: Random, model: ReferenceStore, name: str, steps: int, *, alternatives: bool) -> Iterator[Vector]:
    """Yield calls about a few keys of one or two policies, within one range of time."""
    versions = [_versions(random, f"{name}{which}") for which in "xy"[: random.randint(1, 2)]]
    if not random.randrange(3):
        versions = [_changing(random, name)]
    keys = random.sample(KEYS, random.randint(1, 3))
    now = high = START_TIME + random.randrange(START_RANGE)
    charged: list[tuple[Ask, int]] = []
    waits = [1]
    for _ in range(steps):
        now = _instant(random, model, high, waits, versions)
        high = max(high, now)
        verb = random.choice(VERBS)
        asks: tuple[Ask, ...] = _asks(random, versions, keys)
        at = None
        if verb == "adjust":
            asks, at = _correction(random, asks, charged, now)
        elif alternatives and verb != "reset" and not random.randrange(4):
            asks = Alternatives.of(_asks(random, versions, keys) for _ in range(random.randint(1, 4)))
        answers = model.apply(verb, asks, now, at)
        if verb in ("acquire", "hold") and answers[-1].allowed:
            charged += [(ask, now) for ask in decided_asks(asks, answers)[0]]
        waits = [wait for answer in answers for _, retry, reset in answer.views for wait in (retry, reset) if wait > 0]
        yield Vector(verb, asks, now, at, answers)


def _instant(
    random: Random, model: ReferenceStore, high: int, waits: list[int], versions: Sequence[Sequence[Policy]]
) -> int:
    """Choose the next instant: now, later, around a retry or reset, or a step back."""
    kind = random.choice(TIME_STEPS)
    if kind == "now":
        return high
    if kind == "wait" and waits:
        wait = random.choice((min(waits), random.choice(waits)))
        return high + max(0, wait + random.randint(-1, 1))
    length = random.choice(random.choice(random.choice(versions)).limits).length
    if random.randrange(3):
        length = min(limit.length for policies in versions for policy in policies for limit in policy.limits)
    if kind != "back":
        return high + random.randint(0, max(1, length // random.choice((1, 3, 30))))
    # Not before the expiry of a state that a store may have dropped by now.
    return max(high - random.randint(1, max(1, length // 4)), model.last_end(high))


def _asks(random: Random, versions: Sequence[Sequence[Policy]], keys: Sequence[Key]) -> tuple[Ask, ...]:
    """Return asks for one key, or for two different ones."""
    asks: dict[tuple[str, Key], Ask] = {}
    for _ in range(random.choice((1, 1, 1, 2))):
        policy = random.choice(random.choice(versions))
        key = random.choice(keys)
        asks[policy.name, key] = (policy, key, tuple(_cost(random, limit) for limit in policy.limits))
    return tuple(asks.values())


def _cost(random: Random, limit: Limit) -> int:
    quota = limit.burst
    usual = (0, 1, 1, 1, 1 + quota // 10, quota // 2, quota - 1, quota)
    return random.choice(usual if random.randrange(20) else (quota + 1, MAX_INTEGER))


def _correction(
    random: Random, asks: tuple[Ask, ...], charged: list[tuple[Ask, int]], now: int
) -> tuple[tuple[Ask, ...], int | None]:
    """Return a correction of the latest charges, of those at an instant, or of charges never made."""
    at = None
    if charged and random.randrange(4):
        ask, at = random.choice(charged[-8:])
        asks = (ask,)
    elif random.randrange(2):
        at = now + random.randint(-1, 1) * random.choice((0, 1, random.choice(asks[0][0].limits).length))
    share = random.choice((-1.0, -0.5, -0.1, 0.3))
    return tuple((policy, key, tuple(round(cost * share) for cost in costs)) for policy, key, costs in asks), at


def _versions(random: Random, name: str) -> list[Policy]:
    """Return a policy and changed ones of the same name: other quotas and periods, limits added and removed."""
    limits = [_limit(random, f"l{number}") for number in range(random.choice((1, 1, 2, 3, 6)))]
    versions = [Policy(name, tuple(limits))]
    for _ in range(random.choice((0, 0, 1, 2))):
        changed = [_limit(random, limit.name, limit) if random.randrange(2) else limit for limit in limits]
        random.shuffle(changed)
        kept = changed[: random.randint(1, len(changed))]
        added = [] if random.randrange(3) else [_limit(random, "added")]
        versions.append(Policy(name, (*kept, *added)))
    return versions


def _changing(random: Random, name: str) -> list[Policy]:
    """Return versions of one limit with other quotas and periods, used by the same keys in turn."""
    algorithm = random.choice(CHANGING_ALGORITHMS)
    length = random.choice(PERIOD_LENGTHS[2:-1])
    limits = []
    for _ in range(random.randint(2, 6)):
        quota = random.choice((10, 30, 100, 100, MAX_INTEGER))
        if algorithm == "calendar_window":
            limits.append(_calendar(random, quota, "l"))
            continue
        period = f"{max(1, length * random.choice((1, 1, 2, 3, 60)) // random.choice((1, 1, 2, 7)))}us"
        try:
            limits.append(Limit(quota, period, algorithm, name="l"))
        except ConfigError:
            limits.append(Limit(30, period, algorithm, name="l"))
    return [Policy(name, (limit,)) for limit in limits]


def _calendar(random: Random, quota: int, name: str) -> Limit:
    period, zone = random.choice(PERIODS), random.choice(ZONES)
    days = {"week": 7, "month": 31, "year": 31}.get(period, 1)
    hours = 0 if period in ("minute", "hour") else 23
    day, hour = random.choice((1, 1, random.randint(1, days))), random.choice((0, 0, random.randint(0, hours)))
    return Limit(quota, period, "calendar_window", name=name, timezone=zone, reset_day=day, reset_hour=hour)


def _limit(random: Random, name: str, like: Limit | None = None) -> Limit:
    """Return a random limit; if `like` is given, with its algorithm, and mostly its period."""
    while True:
        quota = random.choice(
            (1, 2, 5, 10, 100, 3600, 90_000, 10**9, random.randint(1, 1000), MAX_INTEGER, MAX_INTEGER // 60)
        )
        if not random.randrange(10) if like is None else like.calendar is not None:
            return _calendar(random, quota, name)
        length = like.length if like is not None and random.randrange(5) else random.choice(PERIOD_LENGTHS)
        algorithm = random.choice(ALGORITHMS) if like is None else like.algorithm
        burst = random.choice((0, 0, 1, quota * 2, 7)) if algorithm == "token_bucket" else 0
        try:
            return Limit(quota, f"{length}us", algorithm, burst=burst, name=name)
        except ConfigError:
            continue  # too large to be counted: try another one
