"""The decider: every verb, in virtual time."""

import asyncio
import base64

import pytest

from tests.service.harness import START
from tidegate import Closed, ConfigError, ResourceUnknown
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions.decider import Decider, Subject
from tidegate.service._decisions.reservation_ids import AlreadySettledError
from tidegate.service._runtime.server import open_service_store
from tidegate.stores import MemoryStore
from tidegate.stores._lease import LeasedStore
from tidegate.testing import ManualClock

SECRET = "a-secret-0123456789"  # noqa: S105 - of a test
POLICIES = {
    "api": "2/1m fixed_window",
    "tokens": {"limits": ["100/1m fixed_window unit=tokens", "10/1m fixed_window"]},
    "slots": "2/1m concurrency",
    "shadow": {"limits": "1/1m fixed_window", "mode": "shadow"},
}


@pytest.fixture
def clock():
    return ManualClock(start=START)


@pytest.fixture
def store(clock):
    return MemoryStore(clock=clock)


@pytest.fixture
def decider(store):
    return Decider(load_settings({"policies": POLICIES}).policies, store, secrets=(SECRET,))


async def used(decider, policy, key="k"):
    return {name: each.used for name, each in (await decider.usage(Subject(policy, key))).items()}


async def test_acquire_peek_usage_reset(decider):
    subject = Subject("api", "k")
    assert [(await decider.acquire(subject)).allowed for _ in range(3)] == [True, True, False]
    assert not (await decider.peek(subject)).allowed
    assert await used(decider, "api") == {"1m": 2}
    await decider.reset(subject)
    assert (await decider.peek(subject)).remaining == 1
    assert await used(decider, "api") == {"1m": 0}
    count = decider.stats.count("api")
    assert (count.allowed, count.denied) == (2, 1)
    assert [(each.policy, each.key, each.violated) for each in decider.stats.recent_denials()] == [
        ("api", "k", ("1m",))
    ]


async def test_waiting_is_served_when_permits_come_back(decider, clock):
    subject = Subject("api", "k")
    await decider.acquire(subject, 2)
    decision = await decider.acquire(subject, timeout=61)
    assert not decision.allowed  # a wait is cut to max_wait
    decider.max_wait = 100
    assert (await decider.acquire(subject, timeout=61)).allowed
    assert clock.now() == START + 60


async def test_shadow_mode_never_denies_and_is_counted(decider):
    decisions = [await decider.acquire(Subject("shadow", "k")) for _ in range(3)]
    assert all(decision.allowed for decision in decisions)
    assert [decision.violated for decision in decisions] == [(), ("1m",), ("1m",)]
    count = decider.stats.count("shadow")
    assert (count.allowed, count.shadow, count.denied) == (1, 2, 0)


async def test_a_batch_decides_each_ask_independently_and_in_order(decider):
    asks = [(Subject("api", "a"), 1)] * 3 + [
        (Subject("nope", "a"), 1),
        (Subject("api", "b"), 3),
        (Subject("api", "b"), 2),
    ]
    answers = await decider.batch(asks)
    assert [getattr(answer, "allowed", type(answer)) for answer in answers] == [
        True, True, False, ResourceUnknown, False, True,
    ]  # fmt: skip


# ---- reservations ----------------------------------------------------------------------------------------------------


async def test_a_reservation_is_settled_by_its_id(decider):
    subject = Subject("tokens", "k")
    reservation = await decider.reserve(subject, {"tokens": 60, "requests": 1})
    assert await used(decider, "tokens") == {"tokens-1m": 60, "1m": 1}
    assert not (await decider.reserve(subject, {"tokens": 50})).decision.allowed
    await decider.commit(reservation.id, {"tokens": 25})
    assert await used(decider, "tokens") == {"tokens-1m": 25, "1m": 1}
    reservation = await decider.reserve(subject, {"tokens": 75, "requests": 1})
    await decider.cancel(reservation.id)
    assert await used(decider, "tokens") == {"tokens-1m": 25, "1m": 1}


@pytest.mark.parametrize("again", ["commit", "cancel"])
async def test_a_reservation_is_settled_only_once(decider, again):
    reservation = await decider.reserve(Subject("tokens", "k"), {"tokens": 60})
    await decider.cancel(reservation.id)
    with pytest.raises(AlreadySettledError):
        await getattr(decider, again)(reservation.id)
    head, _, tail = reservation.id.partition(".")
    # The same bytes, written in another way, are the same reservation_id.
    for same in (f"{head}=.{tail}", f"{head}.{tail}==", f"{head[:4]}\n{head[4:]}.{tail}"):
        with pytest.raises((AlreadySettledError, ResourceUnknown)):
            await decider.cancel(same)
    assert await used(decider, "tokens") == {"tokens-1m": 0, "1m": 0}


async def test_an_invalid_cost_settles_nothing(decider):
    reservation = await decider.reserve(Subject("tokens", "k"), {"tokens": 60})
    with pytest.raises(ConfigError, match="no limit of policy 'tokens' counts 'usd'"):
        await decider.commit(reservation.id, {"usd": 1})
    await decider.commit(reservation.id, {"tokens": 1})
    assert await used(decider, "tokens") == {"tokens-1m": 1, "1m": 0}


async def test_a_forged_or_foreign_id_is_refused(decider, store):
    reservation = await decider.reserve(Subject("tokens", "k"), {"tokens": 60})
    head, _, tail = reservation.id.partition(".")
    result = base64.urlsafe_b64decode(head + "==")
    forged = base64.urlsafe_b64encode(result.replace(b"60", b"99")).decode().rstrip("=")
    for wrong in ("", ".", "x", "é.é", f"{forged}.{tail}", f"{head}.{tail[:-3]}AAA", "a" * 20_000):
        with pytest.raises(ResourceUnknown, match="reservation"):
            await decider.cancel(wrong)
    other = Decider(decider.policies, store, secrets=("another-secret-0123",))
    with pytest.raises(ResourceUnknown):
        await other.cancel(reservation.id)
    same = Decider(decider.policies, store, secrets=(SECRET,))  # another process, or this one after a restart
    await same.cancel(reservation.id)
    with pytest.raises(AlreadySettledError):
        await decider.cancel(reservation.id)


async def test_an_estimate_stays_charged_after_its_ttl(decider, clock):
    reservation = await decider.reserve(Subject("tokens", "k"), {"tokens": 60}, ttl=10)
    clock.advance(11)
    await decider.commit(reservation.id, {"tokens": 5})
    assert await used(decider, "tokens") == {"tokens-1m": 60, "1m": 0}
    reservation = await decider.reserve(Subject("tokens", "k"), {"tokens": 1}, ttl=10)
    clock.advance(20.1)
    with pytest.raises(ResourceUnknown, match="has expired"):
        await decider.commit(reservation.id)


async def test_slots_are_released(decider):
    subject = Subject("slots", "k")
    assert [(await decider.acquire(subject)).allowed for _ in range(3)] == [True, True, False]
    await decider.release(subject)
    assert (await decider.acquire(subject)).allowed
    with pytest.raises(ConfigError, match="no concurrency limit"):
        await decider.release(Subject("api", "k"))


# ---- other rules -----------------------------------------------------------------------------------------------------


async def test_new_policies_keep_consumed_permits_and_waiting_calls(decider, clock):
    subject = Subject("api", "k")
    await decider.acquire(subject, 2)
    waiting = asyncio.create_task(decider.acquire(subject, timeout=30))
    while not decider.waiting:
        await asyncio.sleep(0)
    decider.update_policies(load_settings({"policies": {"api": "3/1m fixed_window"}}).policies)
    assert (await waiting).allowed
    assert clock.now() == START
    assert not (await decider.acquire(subject)).allowed
    assert decider.describe_policies()[0]["limits"] == ["3/1m fixed_window"]


async def test_removing_a_policy_raises_closed_in_its_waiting_calls(decider):
    subject = Subject("api", "k")
    await decider.acquire(subject, 2)
    waiting = asyncio.create_task(decider.acquire(subject, timeout=30))
    while not decider.waiting:
        await asyncio.sleep(0)
    decider.update_policies(load_settings({"policies": {"other": "1/1m"}}).policies)
    with pytest.raises(Closed):
        await waiting
    with pytest.raises(ResourceUnknown):
        await decider.acquire(subject)


@pytest.mark.parametrize("key", ["", "k" * 1025, ("k",) * 33, "\ud800", 5, None, ()])
async def test_invalid_keys_are_refused(decider, key):
    if key == "":
        assert (await decider.acquire(Subject("api", key))).allowed  # an empty string is a valid key
        return
    with pytest.raises(ConfigError):
        await decider.acquire(Subject("api", key))


# ---- leases ----------------------------------------------------------------------------------------------------------


async def test_leases_are_returned_when_the_decider_closes(tmp_path):
    settings = {"store": f"sqlite:///{tmp_path / 'limits.db'}?deadline=10s", "policies": {"api": "100/1h fixed_window"}}
    leased = load_settings({**settings, "lease": True})
    decider = Decider(leased.policies, open_service_store(leased))
    assert isinstance(decider.store, LeasedStore)
    for _ in range(30):
        assert (await decider.acquire(Subject("api", "k"))).allowed
    assert decider.store.metrics()["lease_granted_requests"] > 0
    answers = await decider.batch(
        [(Subject("api", "k"), 1)] * 40 + [(Subject("nope", "k"), 1), (Subject("api", "k"), 40)]
    )
    assert [bool(answer) for answer in answers[:40]] == [True] * 40
    assert isinstance(answers[40], ResourceUnknown)
    assert not answers[41].allowed
    assert decider.stats.count("api").allowed == 70
    await decider.close()
    plain = load_settings(settings)
    decider = Decider(plain.policies, open_service_store(plain))
    assert await used(decider, "api") == {"1h": 70}
    await decider.close()


def test_a_store_in_memory_is_not_leased():
    assert isinstance(open_service_store(load_settings({"lease": True})), MemoryStore)
