"""core.lua returns and stores the same as the Python core, on Valkey and Redis; the tests find inserted faults."""

from __future__ import annotations

import asyncio
from functools import cache
from random import Random
from typing import TYPE_CHECKING

import pytest
import redis

from tests.cases import cases
from tests.conformance.changes import changing_history, directed_histories
from tests.servers.valkey import ValkeyServer
from tests.stores.redis.conftest import address_of
from tests.stores.redis.stored_states import stored_states
from tidegate import Limit, Policy
from tidegate.core.codec import dump, limit_of
from tidegate.errors import RateLimitError
from tidegate.stores._redis import RedisStore
from tidegate.stores._redis.library import SOURCE
from tidegate.stores._redis.protocol import limit_id
from tidegate.testing import ReferenceStore, Vector, random_vectors, verify_store
from tidegate.testing._reference import answer_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HISTORIES = 90
STEPS = 120


def test_redis_store_passes_the_compatibility_kit(any_server: ValkeyServer) -> None:
    verify_store(lambda: RedisStore(address_of(any_server)))


@pytest.mark.parametrize("seed", range(4))
def test_stored_states_are_those_of_the_core(valkey: ValkeyServer, seed: int) -> None:
    assert_stored(valkey, random_vectors(1000 + seed, 300, alternatives=True))


@cases("seed", range(12))
def test_stored_states_of_a_changing_limit_are_those_of_the_core(valkey: ValkeyServer, seed: int) -> None:
    assert_stored(valkey, changing_history(seed))


def assert_stored(valkey: ValkeyServer, vectors: Iterable[Vector]) -> None:
    """Run vectors and compare every answer and every stored state with the core."""
    with redis.Redis(port=valkey.port) as client:
        store, model = RedisStore(address_of(valkey)), ReferenceStore()
        for step, (verb, asks, now, at, answers) in enumerate(vectors):
            decisions = store.apply(verb, asks, now, at)
            assert tuple(map(answer_of, decisions)) == answers, f"step {step}"
            model.apply(verb, asks, now, at)
            for policy, key, _ in asks:
                expected = expected_states(model, policy.name, key, now)
                found = stored_states(store, client.get, policy, key)
                assert {i: state for i, state in found.items() if i in expected} == expected, (
                    f"step {step}: {verb} {asks}"
                )
        store.close()


def expected_states(model: ReferenceStore, policy: str, key: object, now: int) -> dict[int, list[int]]:
    """Return the states of a key in the core, except expired ones, which may be dropped."""
    states = [state for step, state in model._states.items() if step[:2] == (policy, key)]  # noqa: SLF001 - ours
    live = [state for state in states if limit_of(state).rules.expires(state) > now]
    return {limit_id(limit_of(state)): dump(state) for state in live}


# ---- inserted faults: each must be found -----------------------------------------------------------------------------

FAULTS = {
    "charges every alternative": ("verb > ALTERNATIVE and status ~= 0", "false"),
    "a permit too many": ("return level >= 0 and", "return level >= -limit.scale and"),
    "the cost is not taken": ("level = level - cost * limit.scale", "level = level - limit.scale"),
    "refill without end": ("then return limit.capacity end\n    return level", "then end\n    return level"),
    "time runs backwards": ("now > state.at and now - state.at or 0", "now - state.at"),
    "division rounded up too far": ("return quotient % 1 - quotient", "return quotient % 1 - quotient + 1"),
    "retry rounded down": ("retry = seen - now + ceil_div", "retry = seen - now + floor_div"),
    "a change refills": ("min(rescale(before, scale, limit), after)", "after"),
    "an ended state of another limit lives on": ("or state.expires > now then return state", "then return state"),
    "a refund without bound": ("and free or -delta", "and -delta * limit.scale or -delta"),
    "marks are forgotten": ("limit.rules.mark(changed[i])", "changed[i]"),
    "the oldest mark goes first": ("then least = i end", "then least = 3 end"),
    "one too many in a window": ("cost <= limit.quota - used and", "cost <= limit.quota - used + 1 and"),
    "a window one microsecond too long": ("now - state.start < limit.length", "now - state.start <= limit.length"),
    "another calendar window": ("windows[i] <= instant and instant < windows[i + 1]", "windows[i] <= instant"),
    "a refund in the wrong window": ("windows[i + 1] <= at and at < windows[i + 2]", "true"),
    "a refund for a window to come": ("windows[i + 1] <= at and at < windows[i + 2]", "windows[i + 1] <= at"),
    "what outlasts a window is forgotten": ("if counted[i + 2] > ends and counted[i] > 0 then", "if false then"),
    "what has ended is forgotten": ("if back then\n", "if false then\n"),
    "what has just ended is forgotten": ("if windows[i + 2] > now or overlaps then", "if windows[i + 2] > now then"),
    "an ended window goes on": ("if windows[i + 2] > now or overlaps then", "if true then"),
    "the latest charge is forgotten": ("max(now, state.seen or state.start)", "max(now, state.start)"),
    "the previous window weighs too little": ("return ceil_div(previous * min", "return floor_div(previous * min"),
    "the previous window never ends": ("ended == 1 and count or 0", "count"),
    "an entry stays a microsecond too long": ("state.first <= now - limit.length", "state.first < now - limit.length"),
    "bisection misses by one": ("if wanted < (entry(log, middle)) then", "if wanted <= (entry(log, middle)) then"),
    "the first slot is not released": ("if base == sum then head = head + 1 end", ""),
    "later sums are not corrected": ("shifted(log, last, log.tail, change)", "shifted(log, last, log.tail, 0)"),
    "a log keeps what has left": ("log.base = sum_before(state, log.head)", ""),
    "not all or nothing": (
        "if not charged then return false, states, costs end",
        "if not charged then return false, changed, costs end",
    ),
    "peek charges": ("changed ~= states and verb ~= 2", "changed ~= states"),
    "reset only looks": ("VERBS = {acquire, peek, hold, adjust, reset}", "VERBS = {acquire, peek, hold, adjust, peek}"),
    "limits of before are dropped": ("if ask.others == EMPTY then ask.others = {} end", "ask.others = {}"),
    "the second ask is not written": (
        "for i = 1, number do\n        if verb == 5",
        "for i = 1, 1 do\n        if verb == 5",
    ),
    "the wrong clock": ("    if now == NONE then now = server_time() end", "now = server_time()"),
    "adjust forgets when": ("if at == NONE then at = nil end", "at = nil"),
    "compaction loses the base": (
        "log.head, log.tail = 0, log.tail - log.head",
        "log.head, log.tail, log.base = 0, log.tail - log.head, 0",
    ),
}

# Faults in `acquire_buckets` and `one`, found by calls that are sent one by one.
SINGLE_CALL_FAULTS = {
    "admits one too many": (
        "cost * limit.scale > level then allowed",
        "cost * limit.scale > level + limit.scale then allowed",
    ),
    "turns the clock back": ("      if now > at then\n", "      do\n"),
    "overflows": (
        "level = limit.capacity else level = level + (now - at) * limit.rate end",
        "level = level + (now - at) * limit.rate else level = level + (now - at) * limit.rate end",
    ),
    "takes another limit's state": ("if sub(value, from, from + 23) ~= limit.prefix then return false end", ""),
    "charges what costs nothing": ("if cost == 0 then return false end", ""),
    "by the wrong clock": ("  now = now or server_time()", "  now = server_time()"),
    "forgets when": ("    if at == NONE then at = nil end\n  end", "    at = nil\n  end"),
    "denies for ever": ("retry = at - now + retry % 1 - retry", "retry = -1"),
    "denies too shortly": ("retry = at - now + retry % 1 - retry", "retry = at - now - retry + retry % 1 - 1"),
    "keeps a denied charge": ("  if allowed then\n    local keep", "  do\n    local keep"),
    "loses the second limit": ("record = record .. limit", "record = limit"),
    "takes another policy": ("local policy = known[bytes]", "local policy = known[bytes] or select(2, next(known))"),
}


@cache
def histories() -> list[list[Vector]]:
    histories = [list(random_vectors(seed, STEPS)) for seed in range(HISTORIES)]
    histories += [list(random_vectors(seed, STEPS, alternatives=True)) for seed in range(HISTORIES // 6)]
    histories += [*map(list, map(long_history, range(3))), *map(list, map(changing_history, range(8)))]
    return [*histories, *directed_histories()]


def long_history(seed: int) -> Iterator[Vector]:
    """Make more reservations than a bucket has marks and more entries than a log keeps uncut; then settle them."""
    random, model = Random(seed), ReferenceStore()
    algorithms = ("token_bucket", "sliding_log", "concurrency")
    policy = Policy(
        "long",
        tuple(
            Limit(900, "1h" if algorithm == "token_bucket" else "20s", algorithm, name=algorithm)
            for algorithm in algorithms
        ),
    )
    now, reservations = 1_750_000_000_000_000, []
    for step in range(200):
        now += random.randrange(600_000)
        verb, costs, at = "hold", (random.randrange(1, 9),) * 3, None
        if step % 3 == 2 and reservations and step > 60:
            at, taken = reservations.pop(random.randrange(len(reservations)))
            verb, costs = "adjust", tuple(random.randrange(-cost, 3) or 1 for cost in taken)
        asks = ((policy, "k", costs),)
        answers = model.apply(verb, asks, now, at)
        if verb == "hold" and answers[0].allowed:
            reservations.append((now, costs))
        yield Vector(verb, asks, now, at, answers)


@pytest.fixture(scope="module")
def disposable_server() -> Iterator[ValkeyServer]:
    """Start a server for scripts that may never end."""
    with ValkeyServer() as server:
        yield server


async def found_by(server: ValkeyServer, source: bytes, *, together: bool = True) -> int | None:
    """Run histories, each at once or call by call; return the first one in which the script differs from the core.

    A call that lacked a calendar window was sent again after the others: such a history is not compared.
    """
    compared = 0
    for number, vectors in enumerate(histories()):
        store = RedisStore(address_of(server, timeout=2.0), source=source)
        calls = [store.apply_async(verb, asks, now, at) for verb, asks, now, at, _ in vectors]
        answers = []
        for batch in [calls] if together else [[call] for call in calls]:
            answers += await asyncio.gather(*batch, return_exceptions=True)
        await store.close_async()
        if store.metrics()["calls"] > len(vectors):
            continue
        compared += 1
        for vector, answer in zip(vectors, answers, strict=True):
            if isinstance(answer, BaseException):
                assert isinstance(answer, RateLimitError)
                server.restart()
                return number
            if tuple(map(answer_of, answer)) != vector.answers:
                return number
    assert compared > HISTORIES * 0.9
    return None


async def test_calls_sent_together_are_answered_one_by_one(valkey: ValkeyServer) -> None:
    assert await found_by(valkey, SOURCE) is None


@pytest.mark.slow
@cases("fault", FAULTS)
async def test_an_inserted_fault_is_found(disposable_server: ValkeyServer, fault: str) -> None:
    old, new = FAULTS[fault]
    source = SOURCE.decode()
    assert old in source, "the fault no longer fits the script"
    wrong = source.replace(old, new).encode()
    assert (await found_by(disposable_server, wrong)) is not None or (
        await found_by(disposable_server, wrong, together=False)
    ) is not None


@pytest.mark.slow
@cases("fault", SINGLE_CALL_FAULTS)
async def test_an_inserted_fault_in_single_calls_is_found(disposable_server: ValkeyServer, fault: str) -> None:
    old, new = SINGLE_CALL_FAULTS[fault]
    source = SOURCE.decode()
    assert source.count(old) == 1, "the fault no longer fits the script"
    assert await found_by(disposable_server, source.replace(old, new).encode(), together=False) is not None
