"""The history of a day: its tiers, its bounds, its episodes of denials, and how it survives a restart."""

from __future__ import annotations

import asyncio
import json
import tracemalloc

import pytest

from tests.service.harness import START, InProcessService
from tidegate.errors import StoreUnavailable
from tidegate.service._dashboard import history
from tidegate.service._dashboard.history import MAX_POLICIES, MAX_TOP_BYTES, DecisionHistory
from tidegate.service._dashboard.recent_denials import describe_recent, last_episode
from tidegate.service._dashboard.stored_history import (
    MAX_MINUTE_BYTES,
    StoredHistory,
    decode_minute,
    describe_minute,
    encode_minute,
)
from tidegate.service._decisions import denied_keys
from tidegate.service._decisions.denied_keys import DeniedKeys
from tidegate.service._decisions.stats import Stats
from tidegate.stores._sqlite import SQLiteStore
from tidegate.stores._values import Collection
from tidegate.testing import ManualClock

SECOND = 1_000_000


class Source:
    """Counters that a test sets."""

    def __init__(self):
        self.stats = Stats()
        self.top = []
        self.lost = False

    def totals(self):
        return self.stats.totals()

    def waiting_by_policy(self):
        return {}

    def top_denied(self):
        return self.top

    def store_lost(self):
        return self.lost

    def add(self, policy, admitted, denied):
        self.stats.count(policy).allowed += admitted
        self.stats.count(policy).denied += denied


@pytest.fixture
def clock():
    return ManualClock(start=START)


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def recorded(source, clock):
    return DecisionHistory(source, clock)


def run(recorded, clock, seconds, step=1):
    for _ in range(0, seconds, step):
        clock.advance(step)
        recorded.sample()


def row(key, denied, policy="login"):
    return {"policy": policy, "key": key, "limits": ["1m"], "denied": denied, "this_minute": 0, "last_at": 0}


def top_of(recorded, clock, seconds):
    now = clock.ns() // 1_000_000
    return recorded.top_between(now - seconds * 1000, now, recorded.source.top_denied())


# ---- tiers and bounds ------------------------------------------------------------------------------------------------


def test_each_tier_has_the_calls_of_its_steps(recorded, source, clock):
    for _ in range(120):
        source.add("api", 2, 1)
        run(recorded, clock, 1)
    seconds, tens, minutes = recorded.tiers
    assert seconds.policies["api"].admitted.last(3) == [2, 2, 2]
    assert set(tens.policies["api"].admitted.last(10)) == {20}
    assert sum(minutes.total.denied.values) == 60 * minutes.steps
    assert minutes.steps == 2


@pytest.mark.slow
def test_a_day_of_many_policies_is_bounded_in_memory(source, clock):
    for number in range(MAX_POLICIES + 50):
        source.add(f"policy-{number}", 10**9, 10**9)
    tracemalloc.start()
    recorded = DecisionHistory(source, clock)
    clock.advance(2 * 86_400)
    recorded.sample()
    for minute in range(1500):
        rows = [row("\N{KEY}" * 95 + f"{minute}-{number}", 5, f"policy-{number}") for number in range(20)]
        recorded.add_top(minute, json.loads(json.dumps(rows)))  # no string is shared
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 16_000_000
    assert [tier.steps for tier in recorded.tiers] == [length for _, length in history.TIERS]
    assert len(recorded.minutes.policies) == MAX_POLICIES
    assert recorded.byte_size < 6_000_000
    assert sum(len(each["key"].encode()) for _, rows in recorded.tops for each in rows) <= MAX_TOP_BYTES


def test_a_lost_store_is_part_of_the_history(recorded, source, clock):
    run(recorded, clock, 2)
    source.lost = True
    run(recorded, clock, 2)
    source.lost = False
    run(recorded, clock, 1)
    assert recorded.seconds.state.last(5) == [1, 1, 3, 3, 1]


def test_a_copy_continues_in_another_process(recorded, source, clock):
    source.add("api", 5, 5)
    source.top = [row("bad", 5)]
    recorded.add_mark("rules", "api: 1/1m → 2/1m")
    run(recorded, clock, 70)
    other = DecisionHistory(source, clock)
    other.restore(DecisionHistory.read_dump(recorded.dump()))
    run(other, clock, 1)
    assert other.seconds.steps == 71
    assert sum(other.seconds.policies["api"].admitted.values) == 5
    assert top_of(other, clock, 300)[0]["key"] == "bad"
    assert other.marks[0].text == "api: 1/1m → 2/1m"


# ---- episodes --------------------------------------------------------------------------------------------------------


def test_the_start_of_an_episode_is_found(recorded, source, clock):
    for second in range(400):
        source.add("api", 10, 10 if second >= 200 else 0)
        run(recorded, clock, 1)
        if second == 209:
            assert describe_recent(recorded)["share"] == 0.5  # without the calls before the episode
    found = describe_recent(recorded)
    assert (found["admitted"], found["denied"], found["share"]) == (600, 600, 0.5)
    assert abs(found["since"] - (START + 200) * 1000) <= 1000


def test_the_start_of_a_long_episode_is_found_in_a_coarser_tier(recorded, source, clock):
    for minute in range(180):
        for _ in range(6):
            source.add("api", 10, 10 if minute >= 60 else 0)
            run(recorded, clock, 10, step=10)
    assert abs(describe_recent(recorded)["since"] - (START + 3600) * 1000) <= 120_000


def test_what_is_usual_is_the_median_of_the_day_without_the_last_minutes(recorded, source, clock):
    for minute in range(60):
        source.add("api", 90, 10 if minute < 56 else 900)
        run(recorded, clock, 60, step=60)
    assert describe_recent(recorded)["usual"] == 0.1


def test_a_short_pause_does_not_end_an_episode():
    assert last_episode([0, 9, 9, 0], [5, 0, 0, 5], 0.5, 3) == 4
    assert last_episode([0, 9, 9, 0], [5, 0, 0, 5], 0.5, 1) == 1
    assert last_episode([9, 9], [0, 0], 0.5, 2) == 0


# ---- denied keys -----------------------------------------------------------------------------------------------------


def test_the_most_denied_keys_of_the_last_minute():
    keys = DeniedKeys()
    start = START * SECOND
    for second in range(30):
        for _ in range(3):
            keys.record("login", "attacker", ("1m",), start + second * SECOND)
        keys.record("login", f"other-{second}", ("1m",), start + second * SECOND)
    now = start + 30 * SECOND
    first, second, *_ = keys.top(now, 0)
    assert (first.key, first.denied, first.limits, second.denied) == ("attacker", 90, ("1m",), 1)
    assert keys.count_by_policy(now) == {"login": (120, 31)}
    assert keys.top(start + 100 * SECOND, 0) == []
    assert keys.count_by_policy(start + 100 * SECOND) == {}


def test_a_flood_of_different_keys_does_not_hide_the_most_denied_one():
    keys = DeniedKeys()
    for number in range(20 * denied_keys.MAX_SLOT_KEYS):
        keys.record("login", f"random-{number}", ("1m",), START * SECOND)
        if number % 10 == 0:
            keys.record("login", "attacker", ("1m",), START * SECOND)
    top = keys.top(START * SECOND, 0)
    assert (top[0].key, top[0].denied) == ("attacker", 2 * denied_keys.MAX_SLOT_KEYS)
    assert len(keys._counts) <= denied_keys.MAX_SLOT_KEYS  # noqa: SLF001 - the bound
    assert len(keys._last) <= denied_keys.MAX_SLOT_KEYS  # noqa: SLF001 - as above
    total, _ = keys.count_by_policy(START * SECOND)["login"]
    assert total == 22 * denied_keys.MAX_SLOT_KEYS


@pytest.mark.parametrize("phase", [0, 3, 5, 8, 9.9])
def test_every_denial_is_counted_in_one_minute(source, phase):
    """The minutes of the history start at full minutes of the steady clock, whatever the time of day."""
    clock = ManualClock(start=START + phase)
    recorded, keys = DecisionHistory(source, clock), DeniedKeys()
    keys.align(clock.ns() // 1000, clock.steady())

    def top():
        return [each._asdict() for each in keys.top(clock.ns() // 1000, clock.steady())]

    source.top_denied = top
    for second in range(150):
        for _ in range(10):
            keys.record("login", "attacker", ("1m",), clock.ns() // 1000)
        clock.advance(1)
        recorded.sample()
        assert top_of(recorded, clock, 86_400)[0]["denied"] == 10 * (second + 1)


def test_the_denied_keys_of_a_zoomed_part_are_those_of_its_minutes(recorded, source, clock):
    for minute in range(4):
        source.top = [row(f"key-{minute}", 5)]
        run(recorded, clock, 60)
    source.top = [row("key-now", 9) | {"this_minute": 7}]
    clock.advance(30)
    start = START * 1000

    def found(begin, end, policy=""):
        rows = recorded.top_between(start + begin * 1000, start + end * 1000, source.top, policy)
        return [(each["key"], each["denied"]) for each in rows]

    assert found(70, 100) == [("key-1", 5)]
    assert found(100, 130) == [("key-1", 5), ("key-2", 5)]
    assert found(245, 260) == [("key-now", 7)]
    assert found(245, 260, "other") == []


def test_a_policy_with_many_denied_keys_does_not_hide_those_of_another():
    keys = DeniedKeys()
    for number in range(400):
        for _ in range(5):
            keys.record("login", f"attacker-{number}", ("1m",), START * SECOND)
    keys.record("api", "user", ("1m",), START * SECOND)
    top = keys.top(START * SECOND, 0)
    assert (len(top), top[-1].policy, top[-1].key) == (denied_keys.MAX_TOP, "api", "user")


async def test_one_key_does_not_fill_the_list_of_denials():
    policies = {"login": "1/1m", "api": "1/1m"}
    async with InProcessService(policies=policies) as site:
        await site.post("batch", {"policy": "api", "keys": ["user"] * 2})
        for number in range(100):
            await site.post("batch", {"policy": "login", "keys": [f"attacker-{number}"] * 5})
        denials = (await site.http.get("/v1/overview")).json()["denials"]
        assert len({each["key"] for each in denials}) == len(denials) == 50
        assert "user" in {each["key"] for each in denials}


async def test_a_shadow_denial_is_not_counted():
    async with InProcessService(policies={"trial": {"limits": "1/1m", "mode": "shadow"}}) as site:
        for _ in range(3):
            await site.post("acquire", {"policy": "trial", "key": "a"})
        data = (await site.http.get("/v1/overview")).json()
        assert (data["recent"]["keys"], len(data["denials"])) == ([], 1)


# ---- in the store ----------------------------------------------------------------------------------------------------


async def test_the_history_outlives_the_process_where_the_store_does(tmp_path, source, clock):
    store = SQLiteStore(tmp_path / "limits.db", clock=clock)
    recorded = DecisionHistory(source, clock)
    stored = StoredHistory(store, recorded, "host:8080")
    for minute in range(5):
        source.add("api", 10 * minute, minute)
        source.top = [row(["tenant", "user"], minute + 1)]
        if minute == 3:
            recorded.add_mark("rules", "api: 1/1m → 2/1m")
        clock.advance(60)
        assert await stored.write()
        assert not await stored.write()  # once
    clock.advance(120)  # the service is down for two minutes
    after = DecisionHistory(Source(), clock)
    restored = StoredHistory(store, after, "host:8080")
    clock.advance(60)
    after.sample()
    assert await restored.restore() == 5
    minutes = after.minutes
    assert list(minutes.policies["api"].admitted.values) == [0, 10, 20, 30, 40, 0, 0, 0]
    assert list(minutes.total.denied.values) == [0, 1, 2, 3, 4, 0, 0, 0]
    assert list(minutes.state.values) == [1, 1, 1, 1, 1, 0, 0, 1]
    assert [mark.text for mark in after.marks] == ["api: 1/1m → 2/1m"]
    assert top_of(after, clock, 86_400)[0]["denied"] == 15
    other = DecisionHistory(Source(), clock)
    assert await StoredHistory(store, other, "other:8080").restore() == 0
    store.close()


async def test_a_minute_of_many_policies_fits(recorded, source, clock):
    for number in range(MAX_POLICIES):
        source.add(f"a-policy-with-a-long-name-that-does-not-compress-{number * 7919}", number, number)
    source.top = [row("k" * 1000, 9), row("short", 8)]
    run(recorded, clock, 60, step=60)
    data = encode_minute({**describe_minute(recorded), "minute": 7})
    fields = decode_minute(data, 7)
    assert len(data) <= MAX_MINUTE_BYTES
    assert decode_minute(data, 8) is None  # that of another day
    assert fields["total"][:2] == [sum(range(MAX_POLICIES))] * 2
    assert len(fields["policies"]) > 20
    assert [each["key"] for each in fields["top"]] == ["short"]


async def test_a_minute_takes_few_bytes(recorded, source, clock):
    for number in range(20):
        source.add(f"policy-{number}", 7919 * number, 101 * number)
    source.top = [row(f"user:{number}", 9 * number, f"policy-{number}") for number in range(5)]
    run(recorded, clock, 60, step=60)
    assert len(encode_minute({**describe_minute(recorded), "minute": 28_800_000})) < 400


async def test_processes_of_one_name_add_up_their_minutes(tmp_path, clock):
    store = SQLiteStore(tmp_path / "limits.db", clock=clock)
    sources = [Source(), Source()]
    histories = [DecisionHistory(each, clock) for each in sources]
    stored = [StoredHistory(store, each, "edge") for each in histories]
    for minute in range(3):
        for number, each in enumerate(sources, start=1):
            each.add("api", number * (minute + 1), number)
            each.add(f"only-{number}", 1, 0)
        clock.advance(60)
        assert [await each.write() for each in stored] == [1, 1]
    after = DecisionHistory(Source(), clock)
    assert await StoredHistory(store, after, "edge").restore() == 3
    assert list(after.minutes.policies["api"].admitted.values) == [3, 6, 9]
    assert list(after.minutes.total.denied.values) == [3, 3, 3]
    assert set(after.minutes.policies) == {"api", "only-1", "only-2"}
    store.close()


async def test_many_processes_of_one_name_lose_no_minute(tmp_path, clock):
    """Each process replaces the value that it has read; all write at the same second."""
    store = SQLiteStore(tmp_path / "limits.db", clock=clock)
    stored = []
    for _ in range(30):
        source = Source()
        stored.append(StoredHistory(store, DecisionHistory(source, clock), "edge"))
        source.add("api", 5, 1)
    clock.advance(60)
    assert await asyncio.gather(*(each.write() for each in stored)) == [1] * 30
    after = DecisionHistory(Source(), clock)
    assert await StoredHistory(store, after, "edge").restore() == 1
    assert list(after.minutes.policies["api"].admitted.values) == [150]
    assert list(after.minutes.total.denied.values) == [30]
    store.close()


async def test_minutes_of_an_outage_are_written_when_it_has_ended(tmp_path, source, clock, monkeypatch):
    store = SQLiteStore(tmp_path / "limits.db", clock=clock)
    stored = StoredHistory(store, DecisionHistory(source, clock), "edge")

    async def fail(*_arguments, **_options):
        raise StoreUnavailable("for a test")

    with monkeypatch.context() as patch:
        patch.setattr(store, "get_value_async", fail)
        for minute in range(3):
            source.add("api", minute + 1, 0)
            clock.advance(60)
            assert await stored.write() == 0
    source.add("api", 4, 0)
    clock.advance(60)
    assert await stored.write() == 4
    after = DecisionHistory(Source(), clock)
    assert await StoredHistory(store, after, "edge").restore() == 4
    assert list(after.minutes.policies["api"].admitted.values) == [1, 2, 3, 4]
    store.close()


async def test_a_day_is_a_ring(tmp_path, source, clock):
    store = SQLiteStore(tmp_path / "limits.db", clock=clock)
    stored = StoredHistory(store, DecisionHistory(source, clock), "edge")
    for _ in range(50):
        source.add("api", 1, 0)
        clock.advance(1800)
        assert await stored.write() == 30
    assert len(await store.list_values_async(Collection("tidegate.history.edge"))) == 1440
    store.close()


@pytest.mark.parametrize("data", [b"", b"x", b"\x78\x9c", json.dumps({"total": [1]}).encode()])
def test_an_invalid_minute_is_ignored(data):
    assert decode_minute(data, 7) is None
