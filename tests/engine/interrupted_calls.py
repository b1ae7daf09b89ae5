"""Calls that the tests of interruptions share, and how their effects are checked."""

from itertools import count

from tests.interrupts import each_interruption, rarely

START = 1_750_000_000
QUOTA = 10_000_000
NUMBERS = count()

BUCKET, LOG, BUCKETS, WINDOWS, SLOTS = RULES = (
    [f"{QUOTA}/1h"],
    [f"{QUOTA}/1h sliding_log"],
    [f"{QUOTA}/1h", f"{QUOTA}/2h"],
    [f"{QUOTA}/1h fixed_window", f"{QUOTA}/2h sliding_window"],
    [f"{QUOTA}/1h concurrency"],
)
# What a call does, and what it does to the permits that are used. Calls for a key of their own change nothing of "k".
CALLS = {
    "usual": (lambda limiter: limiter.try_acquire("k"), 1),
    "more": (lambda limiter: limiter.try_acquire("k", 3), 3),
    "new": (lambda limiter: limiter.try_acquire(f"new{next(NUMBERS)}"), 0),
    "more for a new key": (lambda limiter: limiter.try_acquire(f"new{next(NUMBERS)}", 3), 0),
    "peek": (lambda limiter: limiter.peek("k"), 0),
    "usage": (lambda limiter: limiter.usage("k"), 0),
    "acquire": (lambda limiter: limiter.acquire("k"), 1),
    "refund": (lambda limiter: limiter.refund("k", 2), -2),
    "reserve": (lambda limiter: limiter.reserve("k", 5), 5),
    "reset": (lambda limiter: limiter.reset("another"), 0),
}


def used(limiter, key="k"):
    return next(iter(limiter.usage(key).values())).used


def check_effects(limiter, call, effect, *, every=1, measure=used):
    """Interrupt a call at each of its instructions: it has its complete effect or none, and the next call works."""
    steps = 0

    def prepare():
        limiter.reset("k")
        for _ in range(5):
            assert limiter.try_acquire("k", 2)

    prepare()
    for step in each_interruption(lambda: call(limiter), every=rarely(every)):
        assert measure(limiter) in (10, 10 + effect), step
        prepare()
        steps += 1
    assert steps > 1
