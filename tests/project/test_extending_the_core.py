"""An algorithm is a module of the core and an entry of its table; a verb is a function and an entry. Nothing else."""

import pytest

from tests.cases import cases
from tidegate import Denied, Limit, Limiter
from tidegate.core._algorithms import ALGORITHMS, NEVER, Algorithm, View
from tidegate.core._decision import VERBS, Verb, adjust
from tidegate.errors import ConfigError
from tidegate.stores import MemoryStore
from tidegate.stores._redis import RedisStore
from tidegate.stores._sqlite import SQLiteStore
from tidegate.testing import ManualClock

START = 1_750_000_000


# ---- an algorithm: after a charge, nothing for one period ------------------------------------------------------------


def charge_pause(state, limit, cost, now):
    if cost > limit.quota or (state is not None and now < state[1]):
        return None
    return limit, now + limit.length


def view_pause(state, limit, cost, now):
    left = 0 if state is None else max(0, state[1] - now)
    retry = NEVER if cost > limit.quota else left if cost else 0
    return View((0 if left else limit.quota, retry, left))


def adjust_pause(state, limit, delta, now, at):
    del at
    return (limit, now) if delta < 0 else state


def expires_pause(state):
    return state[1]


# ---- a verb: take all permits that are left --------------------------------------------------------------------------


def drain(limits, states, costs, now, at=None):
    del costs
    left = [limit.view(state, limit, 0, now).remaining for limit, state in zip(limits, states, strict=True)]
    return adjust(limits, states, left, now, at)


STORES = {
    "memory": lambda tmp_path, clock: MemoryStore(clock=clock),
    "sqlite": lambda tmp_path, clock: SQLiteStore(tmp_path / "limits.db", clock=clock),
}


@cases("kind", STORES)
def test_a_new_algorithm(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(ALGORITHMS, "pause", Algorithm(charge_pause, view_pause, adjust_pause, expires_pause))
    clock = ManualClock(START)
    limit = Limit.parse("3/10s pause")
    limiter = Limiter([limit, "100/1h fixed_window"], store=STORES[kind](tmp_path, clock), clock=clock)
    assert limiter.try_acquire("k", 2)
    denied = limiter.try_acquire("k")
    assert [denied.allowed, denied.retry_after, denied.violated] == [False, 10.0, (limit.name,)]
    assert limiter.try_acquire("k", 4).retry_after is None
    assert limiter.peek("another", 0).remaining == 3
    clock.advance(9.999999)
    assert limiter.try_acquire("k").retry_after == 0.000001
    assert limiter.acquire("k", timeout=1)
    with pytest.raises(Denied):
        limiter.acquire("k", timeout=5)
    limiter.refund("k")
    with limiter.reserve("k", 3) as reservation:
        reservation.cancel()
    assert limiter.peek("k", 0).remaining == 3
    assert limiter.usage("k")["1h"].used == 2 + 1 - 1
    limiter.close()
    with pytest.raises(ConfigError, match="'pause' is not available in this store: use a store in memory or SQLite"):
        Limiter(limit, store=RedisStore()).try_acquire("k")


@cases("kind", STORES)
def test_a_new_verb(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(VERBS, "drain", Verb(drain))
    clock = ManualClock(START)
    limiter = Limiter(["5/10s", "7/1h sliding_log"], store=STORES[kind](tmp_path, clock), clock=clock)
    assert limiter.try_acquire("k", 2)
    assert limiter.store.apply_one("drain", limiter.policy, "k", (0, 0))
    assert [limit.remaining for limit in limiter.peek("k", 0).limits] == [0, 0]
    assert limiter.peek("another", 0).remaining == 5
    limiter.close()
