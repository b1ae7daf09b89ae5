"""Limiter and AsyncLimiter: their methods, and that both return the same decisions."""

import asyncio
import inspect
import pickle
import signal
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tidegate import AsyncLimiter, Closed, ConfigError, Decision, Denied, Limit, Limiter, Policy
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock
from tidegate.testing._reference import answer_of

START = 1_728_000_000


@pytest.fixture
def clock():
    return ManualClock(START)


def test_first_example_of_the_contract(clock):
    limiter = Limiter("100/1m", clock=clock)
    decision = limiter.try_acquire("user:42", cost=3)
    assert isinstance(decision, Decision)
    assert decision
    assert decision.allowed is True
    assert (decision.remaining, decision.retry_after, decision.reset_after) == (97, 0.0, 1.8)
    (view,) = decision.limits
    assert (view.name, view.quota, view.remaining, view.retry_after, view.allowed) == ("1m", 100, 97, 0.0, True)
    assert decision.violated == ()


def test_a_denial_names_its_limits_and_the_wait(clock):
    limiter = Limiter(["2/1s", Limit(3, "1m", name="minute", algorithm="fixed_window")], clock=clock)
    assert [limiter.try_acquire("k").allowed for _ in range(2)] == [True, True]
    clock.advance(0.5)
    assert limiter.try_acquire("k").allowed
    denied = limiter.try_acquire("k")
    assert not denied
    assert denied.violated == ("1s", "minute")
    assert denied.retry_after == 59.5
    assert [view.retry_after for view in denied.limits] == [0.5, 59.5]
    assert [view.allowed for view in denied.limits] == [False, False]
    assert "minute" in repr(denied)


def test_a_decision_combines_its_limits(clock):
    decision = Limiter(["10/1m fixed_window", "3/1h fixed_window", "5/1s fixed_window"], clock=clock).try_acquire("k")
    assert decision.remaining == 2, "of the limit that has the fewest"
    assert decision.reset_after == 3600, "of the limit that takes longest"
    assert [view.reset_after for view in decision.limits] == [60, 3600, 1]


def test_a_call_denied_by_one_limit_is_charged_to_none(clock):
    limiter = Limiter(["1/1m", "5/1h"], clock=clock)
    assert limiter.try_acquire("k")
    for _ in range(10):
        refused = limiter.try_acquire("k")
        assert refused.violated == ("1m",)
        assert refused.limits[1].remaining == 4
    clock.advance(60)
    assert limiter.try_acquire("k").limits[1].remaining == 3


def test_peek_gives_the_same_answer_and_changes_nothing(clock):
    limiter = Limiter("3/1m", clock=clock)
    for _ in range(4):
        looked = limiter.peek("k", cost=2)
        assert limiter.peek("k", cost=2) == looked
        took = limiter.try_acquire("k", cost=2)
        assert (looked.allowed, looked.limits) == (took.allowed, took.limits)


def test_impossible_costs_have_no_retry_after(clock):
    decision = Limiter("3/1m", clock=clock).try_acquire("k", cost=4)
    assert decision.allowed is False
    assert decision.retry_after is None
    assert decision.limits[0].retry_after is None


def test_usage_refund_and_reset(clock):
    limiter = Limiter(["5/1m", Limit(100, "1h", unit="tokens", algorithm="fixed_window")], clock=clock)
    limiter.try_acquire("k", cost={"requests": 2, "tokens": 30})
    usage = limiter.usage("k")
    assert (usage["1m"].used, usage["1m"].remaining, usage["1m"].quota) == (2, 3, 5)
    assert (usage["tokens-1h"].used, usage["tokens-1h"].unit, usage["tokens-1h"].reset_after) == (30, "tokens", 3600)
    limiter.refund("k", cost={"tokens": 10})
    assert limiter.usage("k")["tokens-1h"].used == 20
    limiter.refund("k")
    assert limiter.usage("k")["1m"].used == 1
    limiter.reset("k")
    assert {name: view.used for name, view in limiter.usage("k").items()} == {"1m": 0, "tokens-1h": 0}


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (-1, "cost: must be an integer from 0 to 2**53 - 1, not -1"),
        (1.5, "cost: must be an integer or a mapping of units to integers, not 1.5"),
        (2**53, "cost: must be an integer from 0 to 2**53 - 1"),
        ({"tokens": 1}, "cost: no limit of policy 'default' counts 'tokens': its limits count requests"),
        ({"requests": "1"}, "cost.requests: must be an integer"),
        ("1", "cost: must be an integer or a mapping"),
    ],
)
def test_invalid_costs_are_rejected(cost, message):
    with pytest.raises(ConfigError, match="^" + message.replace("*", r"\*").replace("(", r"\(")):
        Limiter("3/1m").try_acquire("k", cost=cost)


@pytest.mark.parametrize("key", [42, None, b"k", (), ("a", 1), ["a", 2], object()])
def test_invalid_keys_are_rejected(key):
    limiter = Limiter("3/1m")
    for ask in (limiter.try_acquire, limiter.peek, limiter.usage, limiter.reset, limiter.refund, limiter.acquire):
        with pytest.raises(ConfigError, match="a key is a string or a tuple of strings"):
            ask(key)


def test_keys_of_several_parts_never_collide(clock):
    limiter = Limiter("1/1m", clock=clock)
    keys = [("a/b", "c"), ("a", "b/c"), "a/b/c", ("a", "b", "c"), ("a%2Fb", "c"), ("a", "b%2Fc"), "", ("", "")]
    assert all(limiter.try_acquire(key) for key in keys)
    assert not any(limiter.try_acquire(key) for key in keys)
    assert not limiter.try_acquire(["a", "b", "c"])
    assert limiter.try_acquire(("x",))
    assert not limiter.try_acquire("x")


def test_integer_costs_count_calls():
    limiter = Limiter([Limit(10, "1m"), Limit(1000, "1m", unit="tokens"), Limit(2, "1m", "concurrency", name="slots")])
    assert [view.remaining for view in limiter.try_acquire("k").limits] == [9, 1000, 1]
    tokens = Limiter(Limit(1000, "1m", unit="tokens"))
    assert tokens.try_acquire("k", 400).remaining == 600
    mixed = Limiter([Limit(10, "1m", unit="tokens"), Limit(10, "1m", unit="usd_micros")])
    with pytest.raises(ConfigError, match="ambiguous in a policy with the units tokens, usd_micros"):
        mixed.try_acquire("k")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([], "limits: a policy needs at least one limit"),
        (None, "limits: expected a limit such as '60/1m'"),
        (["1/1s", "2/1s"], "limits: two limits are named '1s'"),
        ([3], "limit: expected a string such as '60/1m', not 3"),
    ],
)
def test_invalid_rules_are_rejected(rules, message):
    with pytest.raises(ConfigError, match="^" + message):
        Limiter(rules)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere", "store: expected a URL such as 'memory://', not 'nowhere'"),
        ("nowhere://", "store: unknown scheme nowhere://: expected one of memory://"),
        ("memory://host", "store: memory:// takes no host or path"),
        ("memory://?size=3", "store: unknown option 'size': expected one of max_entries, overflow"),
        ("memory://?max_entries=x", "max_entries: must be an integer of at least 1, not 'x'"),
        ("memory://?overflow=forget", "overflow: must be 'share' or 'deny', not 'forget'"),
    ],
)
def test_invalid_stores_are_rejected(url, message):
    with pytest.raises(ConfigError) as error:
        Limiter("1/1s", store=url)
    assert str(error.value).startswith(message)


def test_policies_are_checked():
    with pytest.raises(ConfigError, match="mode: must be one of enforce, shadow, not 'dry'"):
        Policy("p", ("1/1s",), mode="dry")
    with pytest.raises(ConfigError, match="on_store_error: must be one of allow, deny, local"):
        Policy("p", ("1/1s",), on_store_error="panic")


def test_shadow_mode_allows_and_reports(clock):
    seen = []
    limiter = Limiter(Policy("p", ("1/1m",), mode="shadow"), clock=clock, observer=seen.append)
    assert limiter.try_acquire("k").violated == ()
    shadowed = limiter.try_acquire("k")
    assert shadowed.allowed
    assert shadowed.retry_after == 0.0
    assert shadowed.violated == ("1m",)
    assert limiter.acquire("k", timeout=0).violated == ("1m",)
    assert [bool(record.decision.violated) for record in seen] == [False, True, True]


def test_observers_see_every_decision(clock):
    seen = []
    limiter = Limiter("1/1m", clock=clock, name="api", observer=seen.append)
    limiter.try_acquire("k")
    limiter.try_acquire("k")
    limiter.refund("k")
    assert [(r.verb, r.policy.name, r.key, r.costs, r.decision.allowed) for r in seen] == [
        ("acquire", "api", "k", (1,), True),
        ("acquire", "api", "k", (1,), False),
        ("adjust", "api", "k", (-1,), True),
    ]


def test_changing_limits_never_refills(clock):
    windows = Limiter("100/1m fixed_window", clock=clock)
    windows.try_acquire("k", cost=60)
    windows.update("30/1m fixed_window")
    assert windows.peek("k", cost=0).remaining == 0
    assert not windows.try_acquire("k")
    bucket = Limiter("100/1m", clock=clock)
    bucket.try_acquire("k", cost=50)
    bucket.update("30/1m")
    assert bucket.peek("k", cost=0).remaining == 30
    bucket.try_acquire("k")
    bucket.update("1000/1m")
    assert bucket.peek("k", cost=0).remaining == 29


def test_limiters_with_the_same_store_and_policy_name_share_usage(clock):
    store = MemoryStore(clock=clock)
    first, second = Limiter("2/1m", store=store), Limiter("2/1m", store=store)
    other = Limiter("2/1m", store=store, name="other")
    assert [first.try_acquire("k").allowed, second.try_acquire("k").allowed] == [True, True]
    assert not first.try_acquire("k")
    assert not second.try_acquire("k")
    assert other.try_acquire("k")
    first.close()
    assert other.try_acquire("k"), "a store that was passed in stays open"


def test_a_closed_limiter_raises_closed(clock):
    with Limiter("5/1m", clock=clock) as limiter:
        limiter.try_acquire("k")
    for ask in (limiter.try_acquire, limiter.peek, limiter.usage, limiter.reset, limiter.refund, limiter.acquire):
        with pytest.raises(Closed):
            ask("k")
    with pytest.raises(Closed):
        limiter.reserve("k")


def test_concurrency_holds_slots_until_released_or_the_lease_ends(clock):
    limiter = Limiter(Limit(2, "30s", algorithm="concurrency"), clock=clock)
    first = limiter.try_acquire("k")
    clock.advance(10)
    second = limiter.try_acquire("k")
    assert limiter.try_acquire("k").retry_after == 20
    limiter.release("k", decision=second)
    assert limiter.try_acquire("k")
    clock.advance(20)  # the first holder has crashed: its lease ends
    assert limiter.try_acquire("k")
    limiter.release("k", decision=first)  # already expired: no other slot is released
    assert not limiter.try_acquire("k")
    limiter.release("k")
    assert limiter.try_acquire("k")
    with pytest.raises(ConfigError, match="has no concurrency limit, so it has no slots to release"):
        Limiter("1/1s").release("k")


def test_a_bound_method_follows_updates(clock):
    limiter = Limiter("5/1m", clock=clock)
    limiter.try_acquire("k")
    held = limiter.try_acquire
    assert held.__name__ == "try_acquire"
    assert held.__doc__ == Limiter.try_acquire.__doc__
    limiter.update("1/1m")
    assert held("k").remaining == 0
    assert not held("k")
    limiter.close()
    with pytest.raises(Closed):
        held("k")


def test_an_overridden_try_acquire_is_called(clock):
    class Counting(Limiter):
        asked = 0

        def try_acquire(self, key, cost=1):
            self.asked += 1
            return super().try_acquire(key, cost)

    limiter = Counting("5/1m", clock=clock)
    limiter.try_acquire("k")
    limiter.try_acquire("k")
    assert limiter.asked == 2
    assert limiter.usage("k")["1m"].used == 2


def test_denied_can_be_pickled(clock):
    with pytest.raises(Denied) as denied:
        Limiter("1/1m", clock=clock).acquire("k", cost=2)
    twin = pickle.loads(pickle.dumps(denied.value))  # noqa: S301 - our own
    assert (str(twin), twin.decision) == (str(denied.value), denied.value.decision)


@pytest.mark.parametrize("timeout", ["5", float("nan"), True, [5]])
def test_invalid_timeouts_are_rejected_before_anything_is_charged(timeout):
    limiter = Limiter("5/1m")
    for ask in (
        lambda: limiter.acquire("k", timeout=timeout),
        lambda: limiter.acquire("k", priority=timeout),
        lambda: limiter.reserve("k", ttl=timeout),
    ):
        with pytest.raises(ConfigError, match=r"must be a number( of seconds)?, not"):
            ask()
    assert limiter.usage("k")["1m"].used == 0


@pytest.mark.parametrize("priority", [100.5, -101, 10**9, float("inf"), float("-inf")])
def test_a_priority_beyond_the_bound_is_rejected(clock, priority):
    limiter = Limiter("5/1m", clock=clock)
    for ask in (limiter.acquire, limiter.reserve):
        with pytest.raises(ConfigError, match="priority: must be from -100 to 100"):
            ask("k", priority=priority)
    assert limiter.usage("k")["1m"].used == 0
    assert Limiter("5/1m", clock=clock, max_priority=10**9).acquire("k", priority=-(10**9))


@cases("wrong", [-1, float("inf"), "high", None])
@cases("setting", ["max_priority", "ageing"])
def test_ageing_and_max_priority_must_not_be_negative(setting, wrong):
    with pytest.raises(ConfigError, match=setting):
        Limiter("5/1m", **{setting: wrong})


def test_infinite_timeouts_and_timedeltas_are_accepted(clock):
    limiter = Limiter("1/10s", clock=clock)
    limiter.acquire("k", timeout=float("inf"))
    limiter.acquire("k", timeout=timedelta(minutes=1))
    assert clock.now() == START + 10
    assert not limiter.reserve("other", ttl=float("inf")).expired


def test_a_signal_never_loses_the_lock():
    """A signal handler may raise at any instruction; the store stays usable."""

    class InterruptError(Exception):
        pass

    def interrupt(*_):
        raise InterruptError

    limiter = Limiter(["1000000000/1s"])
    limiter.try_acquire("k")
    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0001)
                while True:
                    limiter.try_acquire("k")
            except InterruptError:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted == 300
    assert limiter.try_acquire("k")


def test_both_limiters_have_the_same_names_and_parameters():
    public = [name for name in dir(Limiter) if not name.startswith("_")]
    assert public == [name for name in dir(AsyncLimiter) if not name.startswith("_")]
    for name in public:
        sync, other = getattr(Limiter, name), getattr(AsyncLimiter, name)
        if callable(sync):
            assert list(inspect.signature(sync).parameters) == list(inspect.signature(other).parameters), name


moves = st.one_of(
    st.tuples(st.just("advance"), st.integers(0, 40)),
    st.tuples(st.sampled_from(["try_acquire", "peek", "refund"]), st.integers(0, 4)),
    st.tuples(st.sampled_from(["reset", "usage", "acquire", "reserve"]), st.none()),
)


@given(st.lists(moves, max_size=30), st.sampled_from(["5/30s", "3/10s sliding_log", "4/20s fixed_window"]))
def test_sync_and_async_answer_alike(schedule, rule):
    async def outcome(limiter, verb, args):
        try:
            result = getattr(limiter, verb)(*args)
            result = await result if inspect.isawaitable(result) else result
        except Denied as error:
            return str(error), answer_of(error.decision)
        result = result.decision if verb == "reserve" else result
        return answer_of(result) if isinstance(result, Decision) else result

    async def both():
        sync_clock, task_clock = ManualClock(START), ManualClock(START)
        plain, tasks = Limiter(rule, clock=sync_clock), AsyncLimiter(rule, clock=task_clock)
        for verb, amount in schedule:
            if verb == "advance":
                sync_clock.advance(amount)
                task_clock.advance(amount)
                continue
            args = ["k"] if amount is None else ["k", amount]
            if verb in ("acquire", "reserve"):
                args += [1, 0] if verb == "acquire" else [2, 60, 0]
            result = await outcome(plain, verb, args)
            assert await outcome(tasks, verb, args) == result

    asyncio.run(both())
