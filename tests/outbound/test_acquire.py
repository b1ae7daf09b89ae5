"""Permits asked for by URL, domain or name, for requests that the program sends itself."""

import pytest

from tests.cases import cases
from tests.outbound.flows import CALL, START, Failing, answer, limited, providers, used
from tidegate import ConfigError, Denied, RateLimitError, ResourceUnknown, StoreUnavailable
from tidegate.outbound import AsyncGate, Gate, Providers, request_options
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

URL = "https://x.example/"


@pytest.fixture
def clock():
    return ManualClock(START)


@pytest.fixture
def store(clock):
    return MemoryStore(clock=clock)


def named(**more):
    return Providers.of({"domain": "x.example", "name": "x", "limit": 3, "period": "1m", **more})


@pytest.mark.parametrize("target", ["x", "x.example", "API.X.example", URL, "https://api.x.example/v1?a=b"])
def test_a_permit_is_asked_for_by_name_domain_or_url(target, store):
    known = named()
    gate = Gate(known, store, timeout=0)
    charge = gate.acquire(target)
    assert (charge.allowed, charge.limited, charge.provider, charge.decision.remaining) == (True, True, "x", 2)
    assert used(store, known) == [1]
    assert answer(gate).outcome.decision.remaining == 1  # a request of a transport shares the count
    charge.commit()
    assert (charge.settled, used(store, known)) == (True, [2])
    gate.close()


def test_acquire_raises_and_try_acquire_returns_a_denial(store):
    gate = Gate(named(), store)
    assert [bool(gate.try_acquire("x")) for _ in range(4)] == [True, True, True, False]
    denied = gate.try_acquire("x")
    assert (denied.allowed, denied.settled, denied.provider, denied.decision.retry_after) == (False, True, "x", 60.0)
    denied.commit()
    denied.arrived()
    denied.cancel()
    with pytest.raises(Denied, match="provider x: ") as raised:
        gate.acquire("x", 1, 0)
    assert raised.value.decision.retry_after == 60.0
    assert gate.metrics()["denied"] == 3
    gate.close()


def test_a_cancelled_charge_is_returned(store):
    known = named()
    gate = Gate(known, store)
    charge = gate.acquire("x", 2)
    assert used(store, known) == [2]
    charge.cancel()
    assert used(store, known) == [0]
    with pytest.raises(RateLimitError, match="already settled"):
        charge.commit()
    gate.close()


def test_a_block_commits_even_after_an_error(store):
    known = named()
    gate = Gate(known, store)
    with pytest.raises(ZeroDivisionError), gate.acquire("x") as charge:
        _ = 1 / 0
    assert (charge.settled, used(store, known)) == (True, [1])
    with gate.acquire("x") as charge:
        charge.cancel()
    assert used(store, known) == [1]
    gate.close()


def test_a_slow_request_counts_from_its_arrival(store, clock):
    gate = Gate(providers(1), store, timeout=0)
    charge = gate.acquire("x.example")
    clock.advance(40)
    charge.arrived()
    clock.advance(50)  # more than a period after the charge, but not after the arrival
    assert not gate.try_acquire("x.example")
    charge.commit()
    clock.advance(10)
    assert gate.try_acquire("x.example")
    gate.close()


@pytest.mark.parametrize("algorithm", ["sliding_log", "fixed_window", "calendar_window"])
def test_a_request_in_flight_for_more_than_a_period_still_counts(algorithm, store, clock):
    gate = Gate(limited(f"2/1m {algorithm}"), store, timeout=0)
    charge = gate.acquire("x.example")
    clock.advance(61)
    assert [bool(gate.try_acquire("x.example")) for _ in range(2)] == [True, False]
    charge.commit()
    gate.close()


def test_tokens_and_slots_are_settled(store):
    known = limited("500/1m", "2000/1m unit=tokens", concurrency=1)
    gate = Gate(known, store)
    charge = gate.acquire("x.example", {"tokens": 800})
    assert used(store, known) == [1, 800, 1]
    assert gate.try_acquire("x.example").decision.violated == ("concurrency",)
    charge.arrived()
    assert used(store, known)[2] == 1  # the slot is held until the response has ended
    charge.commit({"tokens": 42, "other": 3})
    assert used(store, known) == [1, 42, 0]
    gate.close()


def test_an_endpoint_has_its_own_cost(store):
    known = Providers.of(
        {"domain": "x.example", "limit": 10, "period": "1m", "endpoints": [{"path": "/batch/*", "cost": 5}]}
    )
    gate = Gate(known, store)
    gate.acquire("https://x.example/batch/1")
    assert used(store, known) == [5]
    gate.acquire("https://x.example/batch/1", 1)
    assert used(store, known) == [6]
    gate.close()


def test_without_a_provider_nothing_is_limited_and_an_unknown_name_is_an_error(store):
    gate = Gate(named(), store)
    for target in ("https://y.example/a", "y.example"):
        charge = gate.acquire(target)
        assert (charge.allowed, charge.limited, charge.provider, charge.settled) == (True, False, None, True)
        charge.commit()
    assert gate.metrics()["unlimited"] == 2
    with pytest.raises(ResourceUnknown, match="there is no provider 'xx': did you mean 'x'"):
        gate.acquire("xx")
    with pytest.raises(ResourceUnknown, match="known providers are x"):
        gate.try_acquire("fmp !")
    with pytest.raises(ConfigError, match="cost"):
        gate.acquire("x", -1)
    gate.close()


def test_options_of_the_gate_and_of_a_block_apply(store, clock):
    gate = Gate(named(), store, timeout=90)
    for _ in range(4):
        charge = gate.acquire("x")
        charge.commit()
    assert clock.now() == START + 60
    assert charge.decision.remaining == 2
    gate.acquire("x", 2)
    with request_options(timeout=0), pytest.raises(Denied):
        gate.acquire("x")
    gate.close()


def test_a_settlement_can_be_tried_again_after_the_store_was_lost(clock):
    store, known = Failing(clock=clock), named()
    gate = Gate(known, store)
    charge = gate.acquire("x")
    store.fail = True
    with pytest.raises(StoreUnavailable):
        charge.cancel()
    assert not charge.settled
    store.fail = False
    charge.cancel()
    assert used(store, known) == [0]
    gate.close()


async def test_the_asynchronous_gate_has_the_same_methods(store, clock):
    known = named(concurrency=2)
    gate = AsyncGate(known, store, timeout=0)
    async with gate.acquire("x") as charge:
        assert used(store, known) == [1, 1]
        await charge.arrived()
    assert (charge.settled, used(store, known)) == (True, [1, 0])
    charge = await gate.acquire(URL, 1)
    await charge.cancel()
    assert used(store, known) == [1, 0]
    kept = [await gate.try_acquire("x.example") for _ in range(3)]
    assert [each.allowed for each in kept] == [True, True, False]
    clock.advance(50)
    await kept[0].commit()
    clock.advance(15)
    await kept[1].commit()
    assert used(store, known) == [2, 0]
    assert (await gate.peek(CALL)).allowed
    with pytest.raises(Denied):
        await gate.acquire("x", 4)
    await gate.close()


@cases("verb", ["try_acquire", "acquire"])
@cases("algorithm", ["sliding_log", "fixed_window", "calendar_window"])
@cases("kind", [Gate, AsyncGate])
async def test_a_worker_that_settles_nothing_has_the_whole_limit_in_every_period(kind, algorithm, verb, store, clock):
    gate = kind(limited(f"5/1m {algorithm}"), store, timeout=0)

    async def worker():
        try:
            charge = getattr(gate, verb)("x.example")
            return bool(await charge if kind is AsyncGate else charge)
        except Denied:
            return False

    for _ in range(4):
        assert [await worker() for _ in range(7)] == [True] * 5 + [False] * 2
        clock.advance(60)
    await gate.close() if kind is AsyncGate else gate.close()


def test_permits_of_try_acquire_count_from_when_they_were_taken_even_if_they_are_kept(store, clock):
    gate, kept = Gate(limited("5/1m fixed_window"), store), []
    for _ in range(3):
        kept += [gate.try_acquire("x.example") for _ in range(6)]
        clock.advance(60)
    assert sum(map(bool, kept)) == 15
    assert not gate.account_of(CALL).delays.busy
    gate.close()


@pytest.mark.parametrize("algorithm", ["sliding_log", "fixed_window"])
async def test_a_permit_of_try_acquire_is_in_flight_in_a_block(algorithm, store, clock):
    gate = Gate(limited(f"2/1m {algorithm}"), store)
    with gate.try_acquire("x.example"):
        clock.advance(61)
        assert [bool(gate.try_acquire("x.example")) for _ in range(2)] == [True, False]
    gate.close()
    other = AsyncGate(limited(f"2/1m {algorithm}"), MemoryStore(clock=clock))
    async with await other.try_acquire("x.example"):
        clock.advance(61)
        assert [bool(await other.try_acquire("x.example")) for _ in range(2)] == [True, False]
    await other.close()


def test_a_settled_permit_of_try_acquire_counts_from_a_slow_response(store, clock):
    gate = Gate(providers(1), store)
    charge = gate.try_acquire("x.example")
    clock.advance(40)
    charge.commit()
    clock.advance(50)
    assert not gate.try_acquire("x.example")
    gate.close()


def test_a_slot_that_nobody_releases_is_named_once_in_a_warning(store, clock, caplog):
    gate = Gate(named(limit=30, concurrency={"limit": 4, "lease": "30s"}), store)
    with gate.try_acquire("x"):
        pass
    gate.try_acquire("x").cancel()
    assert not caplog.messages
    for _ in range(2):
        gate.try_acquire("x")
    (message,) = caplog.messages
    assert message == (
        "a permit of provider x was not settled: its slot of 'concurrency' stays taken until its lease ends (30s). "
        "Call commit() or cancel(), or use the permit in a with block"
    )
    clock.advance(30)
    assert [bool(gate.try_acquire("x")) for _ in range(5)] == [True] * 4 + [False]
    gate.close()
