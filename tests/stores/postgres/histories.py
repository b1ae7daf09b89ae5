"""Short histories for cases that random ones seldom reach; each is run by core.sql and by the Python core."""

from tidegate import Limit, Policy
from tidegate.core._bounds import MAX_INTEGER, SECOND
from tidegate.testing import Vector

NOW = 1_750_000_000 * SECOND


def history(name, *steps):
    """Return calls on one key: (verb, limit, cost, seconds since NOW), and the seconds of the charge to correct."""
    vectors = []
    for verb, limit, cost, seconds, *at in steps:
        policy = Policy(name, (limit,))
        instants = [NOW + round(second * SECOND) for second in (seconds, *at)]
        vectors.append(Vector(verb, ((policy, "k", (cost,)),), instants[0], instants[1] if at else None, ()))
    return vectors


def bucket(quota, period, burst=0):
    return Limit(quota, period, burst=burst, name="l")


HOURLY, MINUTELY = Limit(5, "1h", "fixed_window", name="l"), Limit(5, "1m", "fixed_window", name="l")
TEN, WIDE = bucket(10, "1m"), bucket(7, "13s", 50)
LOG = Limit(9, "1m", "sliding_log", name="l")
SLOTS = Limit(9, "1m", "concurrency", name="l")

DIRECTED = [
    # The largest debt, then other limits.
    history(
        "debt", ("adjust", TEN, MAX_INTEGER, 0), ("adjust", TEN, 1, 1), ("acquire", TEN, 1, 2), ("peek", WIDE, 1, 3)
    ),
    history("debt of a fraction", ("acquire", TEN, 10, 0), ("adjust", TEN, 15, 0.250001), ("peek", WIDE, 1, 0.750007),
            ("adjust", WIDE, 1, 0.750007), ("adjust", TEN, -1, 1.1)),
    # A window ends at exactly its end, also under a limit with a shorter period.
    history("shorter", ("acquire", HOURLY, 1, 0), ("peek", MINUTELY, 5, 59.999999), ("acquire", MINUTELY, 5, 60)),
    history("correct the window before", ("acquire", HOURLY, 3, 0), ("adjust", MINUTELY, -1, 61, 0),
            ("peek", HOURLY, 1, 61)),
    # Corrections in the middle of a log.
    history("middle", *(("acquire", LOG, 1 + number % 2, number) for number in range(6)), ("adjust", LOG, -1, 6, 1),
            ("adjust", LOG, -2, 7, 3), ("adjust", LOG, 3, 8, 4), ("peek", LOG, 9, 9), ("adjust", LOG, -3, 10),
            ("acquire", LOG, 2, 11), ("peek", LOG, 9, 60.5)),
    history("slots", *(("acquire", SLOTS, 2, number) for number in range(4)), ("adjust", SLOTS, -3, 4),
            ("adjust", SLOTS, -1, 5, 3), ("peek", SLOTS, 9, 6), ("adjust", SLOTS, -9, 7), ("acquire", SLOTS, 9, 8)),
    # Alternating limits of one name: each keeps its own state.
    history("turns", ("acquire", TEN, 3, 0), ("acquire", LOG, 2, 1), ("peek", TEN, 1, 2), ("acquire", SLOTS, 1, 2),
            ("acquire", HOURLY, 4, 3), ("peek", LOG, 9, 4), ("acquire", TEN, 1, 5), ("peek", HOURLY, 1, 6)),
    # Two reservations at the same instant.
    history("same instant", ("hold", TEN, 1, 0), ("hold", TEN, 1, 0), ("adjust", TEN, -1, 3, 0)),
    # Fractions of a permit that do not fit the next limit.
    history("slow", ("acquire", bucket(1, "366d"), 1, 0), ("peek", WIDE, 1, 99_999), ("adjust", WIDE, 1, 99_999)),
    # Counts that are too large for the weights of the next limit.
    history("heavy", ("adjust", Limit(10**9, "1d", "sliding_window", name="l"), MAX_INTEGER, 0),
            ("peek", Limit(100_000, "1d", "sliding_window", name="l"), 1, 0)),
    # More reservations than there are marks.
    history("marks", *(("hold", bucket(100, "1h"), 1 + number % 3, number / 7) for number in range(20)),
            *(("adjust", bucket(100, "1h"), -1, 5, number / 7) for number in range(20))),
]  # fmt: skip
