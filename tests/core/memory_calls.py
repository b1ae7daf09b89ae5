"""Calls of a memory store that its tests share."""

from tidegate import Limit, Policy

NOW = 1_750_000_000 * 1_000_000
SECOND = 1_000_000
HOUR = 3600 * SECOND
HOURLY = Policy("hourly", (Limit(1, "1h"),))


def ask(store, key, now=NOW, policy=HOURLY, costs=(1,), verb="acquire", at=None):
    return store.apply_one(verb, policy, key, costs, now, at)
