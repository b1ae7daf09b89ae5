"""Generated traffic: arrivals over time, of one of several kinds, from a seed.

    poisson rate=50/1s                     calls that do not know of each other
    bursts size=200 every=1m               as many calls at once, again and again
    day rate=50/1s low=10%                 a day: few calls at night, `rate` at the busiest time
    herd size=500 outage=10m rate=5/1s     an outage that ends: who waited calls at once, then as before

Each kind has `clients=N`, who share the calls, and `busiest=P`, the share of the first client (even shares by default).
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._runtime.suggestions import hint
from tidegate.core import parse_period
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Times = Iterator[int]  # in microseconds from the start, rising

DAY: Final = 86_400 * SECOND
RUSH: Final = SECOND  # how long a burst or a herd takes to arrive
FIELDS: Final = {
    "poisson": ("rate",),
    "bursts": ("size", "every"),
    "day": ("rate", "low"),
    "herd": ("size", "outage", "rate"),
}  # of each kind
SHARED_FIELDS: Final = ("clients", "busiest")
MAX_CALLS: Final = 5_000_000  # of a simulation


class Arrival(NamedTuple):
    """A call: when it is made, in microseconds from the start, and by which client."""

    at: int
    client: int


class Traffic(NamedTuple):
    """A kind of traffic with its numbers; `text` is how it was given."""

    kind: str
    text: str
    rate: float = 10.0  # calls per second
    size: int = 100
    every: int = 60 * SECOND
    low: float = 0.1
    outage: int = 600 * SECOND
    clients: int = 10
    busiest: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Traffic:
        """Read traffic such as `poisson rate=50/1s clients=20`; raises ConfigError."""
        kind, *words = text.split() or [""]
        if kind not in FIELDS:
            raise ConfigError(
                f"unknown traffic {kind!r}: expected {', '.join(FIELDS)}{hint(kind, FIELDS)}", field="--traffic"
            )
        allowed = (*FIELDS[kind], *SHARED_FIELDS)
        values: dict[str, float | int] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if name not in allowed or not equals:
                raise ConfigError(
                    f"{text!r}: expected {', '.join(f'{each}=…' for each in allowed)}, not {word!r}"
                    f"{hint(name, allowed)}",
                    field="--traffic",
                )
            try:
                values[name] = READERS[name](value)
            except (ValueError, ZeroDivisionError, OverflowError) as error:
                expected = EXPECTED[name]
                raise ConfigError(f"{text!r}: {name}: expected {expected}, not {value!r}", field="--traffic") from error
        return cls(kind, text, **values)  # type: ignore[arg-type]  # each reader returns the type of its field

    def expected_calls(self, duration: int) -> float:
        """Return about how many calls there are in this time, in microseconds."""
        seconds = duration / SECOND
        if self.kind == "bursts":
            return self.size * (duration // self.every + 1)
        if self.kind == "herd":
            return self.size + self.rate * seconds
        return self.rate * seconds

    def arrivals(self, duration: int, seed: int) -> Iterator[Arrival]:
        """Yield the calls of this time; the same seed yields the same calls."""
        chance = random.Random(f"{self.text} {seed}")  # noqa: S311 - no secret
        if self.expected_calls(duration) > MAX_CALLS:
            raise ConfigError(
                f"{self.text!r} for {duration // SECOND:,} s has more than {MAX_CALLS:,} calls: choose a shorter time",
                field="--duration",
            )
        for at in KINDS[self.kind](self, duration, chance):
            first = chance.random() < self.busiest
            alone = first or self.clients == 1
            yield Arrival(at, 0 if alone else chance.randrange(1 if self.busiest else 0, self.clients))


def poisson_times(traffic: Traffic, duration: int, chance: random.Random) -> Times:
    """Yield independent calls at a constant rate."""
    at = 0.0
    while (at := at + chance.expovariate(traffic.rate) * SECOND) < duration:
        yield int(at)


def burst_times(traffic: Traffic, duration: int, chance: random.Random) -> Times:
    """Yield bursts: all calls of one arrive within a second."""
    for start in range(0, duration, traffic.every):
        yield from rush(start, traffic.size, min(RUSH, traffic.every), duration, chance)


def day_times(traffic: Traffic, duration: int, chance: random.Random) -> Times:
    """Yield a day, which is quietest at its start: calls at the highest rate, some of which are left out."""
    for at in poisson_times(traffic, duration, chance):
        busy = (1 - math.cos(2 * math.pi * (at % DAY) / DAY)) / 2
        if chance.random() < traffic.low + (1 - traffic.low) * busy:
            yield at


def herd_times(traffic: Traffic, duration: int, chance: random.Random) -> Times:
    """Yield an outage without calls, then all who waited at once, with the usual calls."""
    later = (traffic.outage + at for at in poisson_times(traffic, duration - traffic.outage, chance))
    yield from sorted([*rush(traffic.outage, traffic.size, RUSH, duration, chance), *later])


def rush(start: int, size: int, length: int, duration: int, chance: random.Random) -> Times:
    """Yield calls that arrive within a short time."""
    yield from (at for at in sorted(start + chance.randrange(length) for _ in range(size)) if at < duration)


KINDS: Final[dict[str, Callable[[Traffic, int, random.Random], Times]]] = {
    "poisson": poisson_times,
    "bursts": burst_times,
    "day": day_times,
    "herd": herd_times,
}


def read_rate(text: str) -> float:
    """Read calls per second from a rate such as 50/1s or 3000/1m."""
    calls, _, period = text.partition("/")
    return positive(float(calls) / (parse_period(period) / SECOND))


def read_count(text: str) -> int:
    """Read a positive integer."""
    return int(positive(int(text.replace("_", ""))))


def read_part(text: str) -> float:
    """Read a share such as 10% or 0.1."""
    found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= found <= 1:
        raise ValueError(text)
    return found


def positive(number: float) -> float:
    """Return a number that is above 0; raises ValueError."""
    if not 0 < number < math.inf:
        raise ValueError(number)
    return number


READERS: Final[dict[str, Callable[[str], float | int]]] = {
    "rate": read_rate,
    "size": read_count,
    "every": parse_period,
    "low": read_part,
    "outage": parse_period,
    "clients": read_count,
    "busiest": read_part,
}
EXPECTED: Final = {
    "rate": "calls per period, such as 50/1s",
    "size": "a positive integer",
    "every": "a period, such as 1m",
    "low": "a share, such as 10%",
    "outage": "a period, such as 10m",
    "clients": "a positive integer",
    "busiest": "a share, such as 80%",
}
