"""Several limiters charged together: all or nothing, waited for, settled together."""

import asyncio
import threading
from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate import (
    AsyncLimiter,
    Closed,
    ConfigError,
    Denied,
    Limit,
    Limiter,
    Policy,
    RateLimitError,
    StoreUnavailable,
    reserve,
    reserve_async,
    reserve_first,
    reserve_first_async,
)
from tidegate.stores import DelegatingStore, MemoryStore
from tidegate.stores._sqlite import SQLiteStore
from tidegate.testing import ManualClock

START = 1_728_000_000


class CountingStore(DelegatingStore):
    """Records the verbs of its calls."""

    def __init__(self, inner):
        super().__init__(inner)
        self.verbs = []

    def apply(self, verb, asks, now=None, at=None, writes=()):
        self.verbs.append(verb)
        return super().apply(verb, asks, now, at, writes)


@pytest.fixture
def clock():
    return ManualClock(START)


def used(limiter, key):
    return [each.used for each in limiter.usage(key).values()]


def two(store, **options):
    users = Limiter("3/1m fixed_window", name="users", store=store, **options)
    limits = ["10/1m fixed_window name=calls", "100/1m fixed_window unit=tokens name=tokens"]
    return users, Limiter(limits, name="teams", store=store, **options)


def test_all_are_charged_or_none(clock):
    users, teams = two(MemoryStore(clock=clock))
    for _ in range(3):
        reserve([(users, "u", 1), (teams, "red", {"requests": 1, "tokens": 20})]).commit()
    with pytest.raises(Denied, match=r"'u', 'red' got no permit within 0.0 s: 1m would allow it in 60.0 s") as denied:
        reserve([(users, "u", 1), (teams, "red", {"requests": 1, "tokens": 20})])
    assert denied.value.decision.violated == ("1m",)
    assert [each.name for each in denied.value.decision.limits] == ["1m", "calls", "tokens"]
    assert used(teams, "red") == [3, 60]


def test_the_usage_of_a_unit_is_settled_where_it_is_counted(clock):
    users, teams = two(MemoryStore(clock=clock))
    with reserve([(users, "u", 2), (teams, "red", {"requests": 1, "tokens": 50})], ttl=60) as held:
        assert [decision.remaining for decision in held.decisions] == [1, 9]
        assert held.decision.allowed
        held.commit({"tokens": 21})
    assert (used(users, "u"), used(teams, "red")) == ([2], [1, 21])


def test_a_block_that_raises_cancels_all(clock):
    users, teams = two(MemoryStore(clock=clock))
    with pytest.raises(KeyError), reserve([(users, "u", 1), (teams, "red", 1)]):
        raise KeyError
    assert (used(users, "u"), used(teams, "red")) == ([0], [0, 0])


def test_shrink_refunds_a_part_and_stays_open(clock):
    users, teams = two(MemoryStore(clock=clock))
    held = reserve([(users, "u", 2), (teams, "red", {"requests": 1, "tokens": 50})])
    held.shrink({"tokens": 30})
    assert used(teams, "red") == [1, 30]
    with pytest.raises(ConfigError, match="more than what is reserved"):
        held.shrink({"tokens": 31})
    held.commit({"tokens": 10})
    assert (used(users, "u"), used(teams, "red")) == ([2], [1, 10])
    with pytest.raises(RateLimitError, match="already settled"):
        held.shrink({"tokens": 1})


def test_an_expired_reservation_stays_charged(clock):
    users, teams = two(MemoryStore(clock=clock))
    held = reserve([(users, "u", 2), (teams, "red", {"requests": 1, "tokens": 50})], ttl=5)
    clock.advance(5)
    held.shrink({"tokens": 1})
    held.commit({"tokens": 60})
    assert used(teams, "red") == [1, 60]


def test_an_unknown_unit_is_an_error_with_a_suggestion(clock):
    users, teams = two(MemoryStore(clock=clock))
    held = reserve([(users, "u", 1), (teams, "red", 1)])
    with pytest.raises(ConfigError, match=r"no limit of this reservation counts 'token'.*did you mean 'tokens'"):
        held.commit({"token": 3})
    held.cancel()


def test_wrong_arguments_say_what_is_right(clock):
    users, _ = two(MemoryStore(clock=clock))
    with pytest.raises(ConfigError, match="needs at least one limiter, key and cost"):
        reserve([])
    with pytest.raises(ConfigError, match="reserve needs a Limiter, not a AsyncLimiter"):
        reserve([(AsyncLimiter("1/1s"), "k", 1)])
    users.close()
    with pytest.raises(Closed):
        reserve([(users, "u", 1)])


def test_one_store_is_asked_once_to_charge_and_once_to_settle(clock):
    store = CountingStore(MemoryStore(clock=clock))
    users, teams = two(store)
    held = reserve([(users, "u", 2), (teams, "red", {"requests": 1, "tokens": 50})])
    held.commit({"tokens": 1})
    assert store.verbs == ["hold", "adjust"]


def test_observers_see_each_limiter(clock):
    seen = []
    users, teams = two(MemoryStore(clock=clock), observer=lambda record: seen.append((record.verb, record.key)))
    reserve([(users, "u", 1), (teams, "red", 1)]).commit({"requests": 0})
    assert seen == [("hold", "u"), ("hold", "red"), ("adjust", "u"), ("adjust", "red")]


def test_a_shadow_policy_does_not_deny_and_is_not_charged_if_the_others_deny(clock):
    store = MemoryStore(clock=clock)
    hidden = Limiter(Policy("hidden", "1/1h fixed_window", mode="shadow"), store=store)
    users = Limiter("2/1h fixed_window", name="users", store=store)
    for _ in range(2):
        reserve([(hidden, "h", 1), (users, "u", 1)])
    with pytest.raises(Denied):
        reserve([(hidden, "h2", 1), (users, "u", 1)])
    assert (used(hidden, "h"), used(hidden, "h2")) == ([1], [0])


class SlottedStore(DelegatingStore):
    """A store with a slot per key, as a Redis Cluster: refuses a step over several."""

    def key_slots(self, asks):
        return [hash(key) for _, key, _ in asks]

    def apply(self, verb, asks, now=None, at=None, writes=()):
        assert len(set(self.key_slots(asks))) <= 1
        return super().apply(verb, asks, now, at, writes)


@pytest.mark.parametrize("kind", ["slots", "stores"])
def test_groups_that_cannot_be_decided_together_are_cancelled_if_one_denies(clock, tmp_path, kind):
    first = MemoryStore(clock=clock)
    second = SQLiteStore(tmp_path / "limits.db", clock=clock) if kind == "stores" else first
    if kind == "slots":
        first = second = SlottedStore(first)
    users = Limiter("10/1h", name="a-users", store=first)
    teams = Limiter("2/1h", name="b-teams", store=second)
    held = [reserve([(teams, "red", 1), (users, "u", 3)]) for _ in range(2)]
    with pytest.raises(Denied):
        reserve([(teams, "red", 1), (users, "u", 3)])
    assert (used(users, "u"), used(teams, "red")) == ([6], [2])
    held[0].cancel()
    held[1].commit()
    assert (used(users, "u"), used(teams, "red")) == ([3], [1])
    second.close()


class LostStore(DelegatingStore):
    """A store that is unavailable while `lost`."""

    lost = False

    def apply(self, verb, asks, now=None, at=None, writes=()):
        if self.lost:
            raise StoreUnavailable("lost")
        return super().apply(verb, asks, now, at, writes)


class NotedStore(DelegatingStore):
    """A store that notes which policies were charged, in which order."""

    def __init__(self, inner, noted):
        super().__init__(inner)
        self.noted = noted

    def apply(self, verb, asks, *arguments):
        self.noted.append((verb, asks[0][0].name))
        return super().apply(verb, asks, *arguments)


def test_several_stores_are_charged_in_one_order_whatever_the_order_of_the_asks(clock):
    """So of two calls that each find the last permit of one store, one gets both."""
    noted: list[tuple[str, str]] = []
    limiters = [Limiter("10/1h", name=name, store=NotedStore(MemoryStore(clock=clock), noted)) for name in "abc"]
    for order in permutations(limiters):
        reserve([(limiter, "k", 1) for limiter in order]).commit()
        assert [name for verb, name in noted if verb == "hold"] == ["a", "b", "c"]
        noted.clear()


def test_a_store_that_is_lost_leaves_the_others_uncharged(clock):
    users = Limiter("10/1h", name="a-users", store=MemoryStore(clock=clock))
    lost = LostStore(MemoryStore(clock=clock))
    teams = Limiter("10/1h", name="b-teams", store=lost)
    held = reserve([(users, "u", 1), (teams, "red", 1)])
    lost.lost = True
    with pytest.raises(StoreUnavailable):
        reserve([(users, "u", 1), (teams, "red", 1)])
    assert used(users, "u") == [1]
    with pytest.raises(StoreUnavailable):
        held.cancel()
    assert used(users, "u") == [0], "what can be settled is settled"


def test_corrections_that_were_not_made_are_made_when_it_is_settled_again(clock):
    """Found in a review: what the second store had not corrected stayed as estimated, and was not charged."""
    lost = LostStore(MemoryStore(clock=clock))
    users = Limiter("100/1h fixed_window", name="a-users", store=MemoryStore(clock=clock))
    teams = Limiter("100/1h fixed_window", name="b-teams", store=lost)
    held = reserve([(users, "u", 5), (teams, "red", 5)])
    lost.lost = True
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            held.commit(50)
        assert used(users, "u") == [50]
        assert not held.settled
    lost.lost = False
    assert used(teams, "red") == [5]
    held.commit(50)
    assert (used(users, "u"), used(teams, "red")) == ([50], [50])
    with pytest.raises(RateLimitError, match="already settled"):
        held.commit(50)


def test_the_first_alternative_with_room_is_charged_in_one_step(clock):
    store = CountingStore(MemoryStore(clock=clock))
    keys = [Limiter(f"{quota}/1h fixed_window", name=f"key-{quota}", store=store) for quota in (1, 2)]
    team = Limiter("10/1h fixed_window", name="team", store=store)
    choices = [[(limiter, "k", 1), (team, "red", 1)] for limiter in keys]
    assert [reserve_first(choices)[0] for _ in range(3)] == [0, 1, 1]
    assert store.verbs == ["hold"] * 3
    with pytest.raises(Denied):
        reserve_first(choices)
    assert used(team, "red") == [3]


def test_alternatives_in_several_stores_are_tried_in_order(clock):
    limiters = [Limiter("1/1h", name="n", store=MemoryStore(clock=clock)) for _ in range(2)]
    choices = [[(limiter, "k", 1)] for limiter in limiters]
    assert [reserve_first(choices)[0] for _ in range(2)] == [0, 1]
    clock.advance(1)
    with pytest.raises(Denied):
        reserve_first(choices, timeout=10)
    place, held = reserve_first(choices, timeout=3600)
    assert place == 0
    held.cancel()


# ---- waiting ---------------------------------------------------------------------------------------------------------


async def settle():
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_call_waits_until_all_have_room(clock):
    store = MemoryStore(clock=clock)
    a, b = AsyncLimiter("1/10s", name="a", store=store), AsyncLimiter("1/30s", name="b", store=store)
    await reserve_async([(a, "k", 1), (b, "k", 1)])
    async with reserve_async([(a, "k", 1), (b, "k", 1)], timeout=None):
        assert clock.now() == START + 30


async def test_a_call_waits_behind_those_that_wait_for_one_of_its_keys(clock):
    store = MemoryStore(clock=clock)
    a, b, c = (AsyncLimiter("1/10s", name=name, store=store) for name in "abc")
    await a.acquire("k")
    order = []

    async def call(name, *limiters):
        await reserve_async([(limiter, "k", 1) for limiter in limiters], timeout=None)
        order.append(name)

    tasks = []
    for name, limiters in {"ab": (a, b), "ac": (a, c), "b": (b,), "a": (a,)}.items():
        tasks.append(asyncio.create_task(call(name, *limiters)))
        await settle()
    assert order == ["b"], "the calls ahead of it wait for a only"
    assert (a.waiting, b.waiting, c.waiting) == (3, 0, 0)
    for expected in ("ab", "ac", "a"):
        clock.advance(10)
        await settle()
        assert order[-1] == expected
    await asyncio.gather(*tasks)


async def test_a_call_that_another_key_denies_next_is_ahead_of_those_that_arrived_later(clock):
    store = MemoryStore(clock=clock)
    a, b = AsyncLimiter("1/10s fixed_window", name="a", store=store), AsyncLimiter("1/30s", name="b", store=store)
    await a.acquire("k")
    served = {}

    async def call(name, *limiters):
        await reserve_async([(limiter, "k", 1) for limiter in limiters], timeout=None)
        served[name] = clock.now() - START

    tasks = []
    for name, limiters in {"ab": (a, b), "b": (b,), "later b": (b,), "a": (a,), "later a": (a,)}.items():
        tasks.append(asyncio.create_task(call(name, *limiters)))
        await settle()
        clock.advance(1)
    assert served == {"b": 1}
    for _ in range(70):
        clock.advance(1)
        await settle()
    # At 10 s, b denies the first call, which no longer holds up those that wait for a. From 31 s on it has both.
    assert served == {"b": 1, "a": 10, "later a": 20, "ab": 31, "later b": 61}
    await asyncio.gather(*tasks)


async def test_keys_whose_permits_come_at_different_times_do_not_starve_a_call_that_needs_both(clock):
    store = MemoryStore(clock=clock)
    a, b = (AsyncLimiter("1/1s burst=1", name=name, store=store) for name in "ab")
    await b.acquire("k")
    clock.advance(0.5)  # b has a permit half a second before a, which the second call uses now
    served = []

    async def call(name, *limiters):
        await reserve_async([(limiter, "k", 1) for limiter in limiters], timeout=None)
        served.append((name, clock.now() - START))

    tasks = []
    for name in ("both", *("a", "b") * 10):
        limiters = (a, b) if name == "both" else (a,) if name == "a" else (b,)
        tasks.append(asyncio.create_task(call(name, *limiters)))
        await settle()
    for _ in range(40):
        clock.advance(0.5)
        await settle()
    await asyncio.gather(*tasks)
    position = next(place for place, (name, _) in enumerate(served) if name == "both")
    assert position <= 2, f"each key was given to later calls while the other one denied: {served}"


async def test_a_cancelled_waiter_leaves_all_queues(clock):
    store = MemoryStore(clock=clock)
    a, b = AsyncLimiter("1/10s", name="a", store=store), AsyncLimiter("1/10s", name="b", store=store)
    c = AsyncLimiter("1/10s", name="c", store=store)
    await a.acquire("k")
    await b.acquire("k")
    asks = [(limiter, "k", 1) for limiter in (a, b, c)]
    task = asyncio.ensure_future(reserve_async(asks, timeout=None).__aenter__())
    await settle()
    assert (a.waiting, b.waiting, c.waiting) == (1, 1, 0)
    task.cancel()
    await settle()
    assert (a.waiting, b.waiting) == (0, 0)
    assert (await c.usage("k"))["10s"].used == 0


def test_threads_with_keys_in_both_orders_do_not_wait_for_each_other():
    store = MemoryStore()
    a, b = Limiter("50/100ms", name="a", store=store), Limiter("50/100ms", name="b", store=store)
    done = []

    def work(asks):
        for _ in range(100):
            reserve(asks, timeout=30).commit()
        done.append(asks)

    asks = [(a, "k", 1), (b, "k", 1)]
    several = [threading.Thread(target=work, args=(each,)) for each in (asks, asks[::-1])]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join(60)
    assert len(done) == 2


async def test_alternatives_wait_for_the_first_that_has_room(clock):
    store = MemoryStore(clock=clock)
    limiters = [AsyncLimiter(f"1/{seconds}s", name=f"n{seconds}", store=store) for seconds in (30, 10)]
    for limiter in limiters:
        await limiter.acquire("k")
    place, _ = await reserve_first_async([[(limiter, "k", 1)] for limiter in limiters], timeout=60)
    assert (place, clock.now()) == (1, START + 10)


async def test_a_waiter_of_one_alternative_does_not_hold_up_the_others(clock):
    """Found in a review: a pool was denied while its second member was free."""
    store = MemoryStore(clock=clock)
    a, b, c = (AsyncLimiter(f"{quota}/10s fixed_window", name=f"n{quota}", store=store) for quota in (1, 2, 3))
    await a.acquire("k")
    waiting = asyncio.create_task(a.acquire("k", timeout=None))
    await settle()
    choices = [[(a, "k", 1), (c, "k", 1)], [(b, "k", 1)]]
    assert [(await reserve_first_async(choices))[0] for _ in range(2)] == [1, 1]
    with pytest.raises(Denied) as denied:
        await reserve_first_async(choices)
    assert denied.value.decision.violated == ("10s",)
    assert denied.value.decision.retry_after == 10
    clock.advance(10)
    await waiting
    assert (await c.usage("k"))["10s"].used == 0


async def test_a_choice_asks_only_for_what_nobody_ahead_of_it_waits_for(clock):
    store = CountingStore(MemoryStore(clock=clock))
    store.instant = True
    a, b = (AsyncLimiter(f"1/{period}s fixed_window", name=f"n{period}", store=store) for period in (10, 25))
    for limiter in (a, b):
        await limiter.acquire("k")
    order = []

    async def choose(name, *alternatives):
        place, _ = await reserve_first_async([[(limiter, "k", 1)] for limiter in alternatives], timeout=None)
        order.append((name, place, clock.now() - START))

    tasks = []
    for call in (("first", a), ("both", a, b), ("last", b)):
        tasks.append(asyncio.create_task(choose(*call)))
        await settle()
    for _ in range(60):
        clock.advance(1)
        await settle()
    assert order == [("first", 0, 10), ("both", 0, 20), ("last", 0, 25)]
    await asyncio.gather(*tasks)


async def test_an_alternative_that_can_never_be_allowed_does_not_end_the_wait_for_others(clock):
    store = MemoryStore(clock=clock)
    a, b = AsyncLimiter("1/10s", name="a", store=store), AsyncLimiter("1/10s", name="b", store=store)
    await a.acquire("k")
    waiting = asyncio.create_task(a.acquire("k", timeout=None))
    await settle()
    task = asyncio.create_task(reserve_first_async([[(a, "k", 1)], [(b, "k", 2)]], timeout=None))
    await settle()
    assert not task.done()
    for _ in range(2):
        clock.advance(10)
        await settle()
    await waiting
    assert (await task)[0] == 0
    with pytest.raises(Denied, match="can ever allow"):
        await reserve_first_async([[(a, "k", 2)], [(b, "k", 2)]], timeout=None)


# ---- against an oracle that counts what was admitted -----------------------------------------------------------------

step = st.tuples(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from("xy"), st.integers(0, 3)), min_size=1, max_size=4),
    st.sampled_from(["keep", "commit", "cancel", "shrink"]),
    st.integers(0, 3),
)


@given(st.lists(step, max_size=30), st.sampled_from(["one", "slots", "two"]))
def test_what_is_admitted_is_what_an_oracle_admits(steps, kind):
    clock = ManualClock(START)
    store = MemoryStore(clock=clock)
    if kind == "slots":
        store = SlottedStore(store)
    stores = [store, MemoryStore(clock=clock) if kind == "two" else store, store]
    quotas = [4, 7, 9]
    limiters = [
        Limiter(Limit(quota, "1h", "fixed_window"), name=f"p{quota}", store=each)
        for quota, each in zip(quotas, stores, strict=True)
    ]
    counts = Counter()
    for asks, settlement, actual in steps:
        wanted = Counter()
        for place, key, cost in asks:
            wanted[place, key] += cost
        room = all(counts[each] + cost <= quotas[each[0]] for each, cost in wanted.items() if cost)
        try:
            held = reserve([(limiters[place], key, cost) for place, key, cost in asks])
        except Denied:
            assert not room
            continue
        assert room
        counts.update(wanted)
        final = {"keep": None, "cancel": 0, "commit": actual, "shrink": min(actual, *(cost for _, _, cost in asks), 9)}
        if settlement == "cancel":
            held.cancel()
        elif settlement != "keep":
            getattr(held, settlement)(final[settlement])
        for place, key, cost in asks if settlement != "keep" else ():
            counts[place, key] += final[settlement] - cost
        assert {(place, key): used(limiters[place], key)[0] for place in range(3) for key in "xy"} == {
            (place, key): counts[place, key] for place in range(3) for key in "xy"
        }
