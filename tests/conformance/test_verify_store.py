"""The kit that proves stores, itself: it passes the memory store, and catches every fault planted here."""

import asyncio
import sys
from itertools import count, pairwise

import pytest

from tests.conformance.changes import changing_history
from tidegate import Limit, Policy
from tidegate.core.algorithms import ALGORITHMS
from tidegate.core.decision import VERBS, Decision, zero_costs
from tidegate.policy.key import join_key
from tidegate.stores import MemoryStore, Store
from tidegate.stores.base import merge
from tidegate.testing import ReferenceStore, random_vectors, verify_store
from tidegate.testing.reference import answer_of
from tidegate.testing.store_promises import PROMISES


class DictStore(Store):
    """The smallest store: the core over a dictionary. Faults below break one promise of it each."""

    def __init__(self):
        super().__init__()
        self.states = {}
        self.closed = False

    def place(self, policy, key, limit):
        return policy.name, key, limit.name, limit.algorithm

    def apply(self, verb, asks, now=None, at=None):
        now = self.clock.ns() // 1000 if now is None else self.instant_of(now)
        numbers, asks = self.together(asks)
        limits = [limit for policy, _, _ in asks for limit in policy.limits]
        places = [self.place(policy, key, limit) for policy, key, _ in asks for limit in policy.limits]
        costs = [cost for ask in asks for cost in ask[2]]
        states = [self.states.get(place) for place in places]
        allowed, after, left = self.decide(verb, limits, states, costs, now, at)
        views = [limit.rules.view(s, limit, c, now) for limit, s, c in zip(limits, after, left, strict=True)]
        self.keep(verb, allowed, places, after, now)
        decisions, start = [], 0
        for policy, _, _ in asks:
            end = start + len(policy.limits)
            decisions.append(Decision((allowed, now, policy.limits, views[start:end], None)))
            start = end
        return [decisions[number] for number in numbers]

    def together(self, asks):
        return merge(asks)

    def instant_of(self, now):
        return now

    def decide(self, verb, limits, states, costs, now, at):
        return VERBS[verb](limits, states, costs, now, at)

    def keep(self, verb, allowed, places, states, now):
        del allowed, now
        if verb == "reset":
            names = {place[:2] for place in places}
            self.states = {place: state for place, state in self.states.items() if place[:2] not in names}
        elif verb != "peek":
            self.states.update(zip(places, states, strict=True))

    def close(self):
        self.closed = True


@pytest.mark.parametrize("store", [MemoryStore, DictStore, lambda: MemoryStore(max_entries=100)])
def test_good_stores_pass(store):
    verify_store(store)


@pytest.mark.parametrize("seed", range(12))
def test_a_limit_that_changes_is_answered_as_by_the_core(seed):
    store = MemoryStore()
    for place, (verb, asks, now, at, answers) in enumerate(changing_history(seed)):
        assert tuple(map(answer_of, store.apply(verb, asks, now, at))) == answers, f"step {place}"


def test_other_seeds_pass_too():
    verify_store(MemoryStore, seed=2024, rounds=8)


async def test_it_runs_where_a_loop_runs_already():
    verify_store(MemoryStore, rounds=5)


def test_it_closes_what_it_opened():
    opened = []

    def open_store():
        opened.append(DictStore())
        return opened[-1]

    verify_store(open_store, rounds=5)
    assert len(opened) == len(PROMISES) + 5
    assert all(store.closed for store in opened)

    def broken():
        opened.append(ChargesDenied())
        return opened[-1]

    with pytest.raises(AssertionError):
        verify_store(broken)
    assert all(store.closed for store in opened)


def test_calls_by_default_are_a_few_thousand():
    calls = count()

    class Counting(MemoryStore):
        def apply(self, *args):
            next(calls)
            return super().apply(*args)

        def apply_one(self, *args):
            next(calls)
            return super().apply_one(*args)

    verify_store(Counting)
    assert 2000 < next(calls) < 5000


# ---- faults ----------------------------------------------------------------------------------------------------------


class ChargesDenied(DictStore):
    """Charges limit after limit, and leaves it so when a later one says no."""

    def decide(self, verb, limits, states, costs, now, at):
        if verb != "acquire":
            return super().decide(verb, limits, states, costs, now, at)
        after = [limit.charge(s, limit, c, now) if c else s for limit, s, c in zip(limits, states, costs, strict=True)]
        denied = any(c and s is None for s, c in zip(after, costs, strict=True))
        kept = [new or old for new, old in zip(after, states, strict=True)]
        return (False, kept, costs) if denied else (True, after, zero_costs(limits))


class DecidesAsksAlone(DictStore):
    """Decides the asks of a batch one by one."""

    def apply(self, verb, asks, now=None, at=None):
        return [super(DecidesAsksAlone, self).apply(verb, [ask], now, at)[0] for ask in asks]


class LastOfAKeyWins(DictStore):
    """Charges a key that stands in a batch twice only once."""

    def together(self, asks):
        return range(len(asks)), asks


class ForgetsTheCancelled(DictStore):
    """Leaves a call charged whose task was cancelled while it waited."""

    async def apply_async(self, verb, asks, now=None, at=None):
        decisions = self.apply(verb, asks, now, at)
        await asyncio.sleep(0)
        return decisions


class PeekCharges(DictStore):
    """Keeps what a look would leave."""

    def keep(self, verb, allowed, places, states, now):
        super().keep("acquire" if verb == "peek" else verb, allowed, places, states, now)


class DenialRestartsTheWindow(DictStore):
    """Lets a refused call count, as fixed-window counters do."""

    def decide(self, verb, limits, states, costs, now, at):
        allowed, after, left = super().decide(verb, limits, states, costs, now, at)
        if verb == "acquire" and not allowed:
            after = [limit.rules.adjust(s, limit, 1, now, None) for limit, s in zip(limits, states, strict=True)]
        return allowed, after, left


class JoinsKeys(DictStore):
    """Joins the parts of a key without escaping."""

    def place(self, policy, key, limit):
        return super().place(policy, key if isinstance(key, str) else "/".join(key), limit)


class ForgetsPolicies(DictStore):
    """Keeps all policies in one table."""

    def place(self, policy, key, limit):
        return ("", *super().place(policy, key, limit)[1:])


class FoldsCase(DictStore):
    """Compares keys as some databases do: without regard to case or to blanks at the end."""

    def place(self, policy, key, limit):
        return policy.name, join_key(key).casefold().rstrip(), limit.name, limit.algorithm


class RefillsOnChange(DictStore):
    """Knows a limit by its quota, so that a changed one starts afresh."""

    def place(self, policy, key, limit):
        return (*super().place(policy, key, limit), limit.quota)


class KnowsLimitsByPlace(DictStore):
    """Knows limits by their place in the policy."""

    def place(self, policy, key, limit):
        return policy.name, key, policy.limits.index(limit), limit.algorithm


class TrustsTheClock(DictStore):
    """Lets time run backwards: moves every state to an earlier now."""

    def decide(self, verb, limits, states, costs, now, at):
        states = [
            (state[0], state[1], min(state[2], now)) if limit.algorithm == "token_bucket" and state else state
            for limit, state in zip(limits, states, strict=True)
        ]
        return super().decide(verb, limits, states, costs, now, at)


class WholeSeconds(DictStore):
    """Counts time in whole seconds."""

    def instant_of(self, now):
        return now - now % 1_000_000


class RefundsTheLatest(DictStore):
    """Ignores when the charge that is corrected was made."""

    def decide(self, verb, limits, states, costs, now, at):
        return super().decide(verb, limits, states, costs, now, None)


class HoldsWithoutAMark(DictStore):
    """Charges a reservation like any call."""

    def decide(self, verb, limits, states, costs, now, at):
        return super().decide("acquire" if verb == "hold" else verb, limits, states, costs, now, at)


class KeepsAfterReset(DictStore):
    """Resets the first limit only."""

    def keep(self, verb, allowed, places, states, now):
        if verb == "reset":
            self.states.pop(places[0], None)
        else:
            super().keep(verb, allowed, places, states, now)


class ForgetsEarly(DictStore):
    """Drops states a little before their end, as a time to live in whole seconds rounded down does."""

    def decide(self, verb, limits, states, costs, now, at):
        live = [
            None if state and limit.rules.expires(state) // 1_000_000 <= now // 1_000_000 else state
            for limit, state in zip(limits, states, strict=True)
        ]
        return super().decide(verb, limits, live, costs, now, at)


class Floats(DictStore):
    """Keeps counts as single-precision would: to 24 bits."""

    def keep(self, verb, allowed, places, states, now):
        rounded = [
            (state[0], state[1] - state[1] % (1 << max(0, abs(state[1]).bit_length() - 24)), *state[2:])
            if state and isinstance(state[1], int) else state
            for state in states
        ]  # fmt: skip
        super().keep(verb, allowed, places, rounded, now)


class ReleasesTheNewest(DictStore):
    """Gives the newest slot back where the oldest is meant."""

    def decide(self, verb, limits, states, costs, now, at):
        if verb == "adjust" and at is None and limits[0].algorithm == "concurrency" and states[0]:
            at = states[0][1].times[states[0][3] - 1]
        return super().decide(verb, limits, states, costs, now, at)


class OwnClock(DictStore):
    """Decides by its own clock whatever it is told."""

    def apply(self, verb, asks, now=None, at=None):
        del now
        return super().apply(verb, asks, None, at)


class ChecksThenActs(DictStore):
    """Lets others in between the look and the charge."""

    def decide(self, verb, limits, states, costs, now, at):
        answer = super().decide(verb, limits, states, costs, now, at)
        for _ in range(3000):
            pass  # long enough for a switch of threads, with the interval that the test sets
        return answer


class AnotherAnswerAsync(MemoryStore):
    """Forgets, on the asynchronous way, that a refusal has a wait."""

    async def apply_async(self, verb, asks, now=None, at=None):
        decisions = self.apply(verb, asks, now, at)
        return [
            Decision((d.allowed, d.at, d[2], [(left, min(retry, 0), reset) for left, retry, reset in d.views], None))
            for d in decisions
        ]


class AnotherAnswerOne(MemoryStore):
    """Forgets on the short way to keep a charge of two."""

    def apply_one(self, verb, policy, key, costs, now=None, at=None):
        verb = "peek" if verb == "acquire" and max(costs) > 1 else verb
        return super().apply_one(verb, policy, key, costs, now, at)


FAULTS = {
    ChargesDenied: "all or nothing",
    DecidesAsksAlone: "a batch is decided together",
    PeekCharges: "peek changes nothing",
    DenialRestartsTheWindow: "what never fits is told so",
    JoinsKeys: "keys are separate",
    ForgetsPolicies: "policies are separate",
    FoldsCase: "keys are separate",
    RefillsOnChange: "a changed limit refills nothing",
    KnowsLimitsByPlace: "a changed policy keeps the rest",
    TrustsTheClock: "a clock that steps back credits nothing",
    WholeSeconds: "a quota is a quota",
    RefundsTheLatest: "a held charge is corrected where it was made",
    HoldsWithoutAMark: "a held charge is corrected where it was made",
    KeepsAfterReset: "reset forgets a key",
    ForgetsEarly: "a quota is a quota",
    Floats: "large costs are one entry",
    ReleasesTheNewest: "slots are released",
    OwnClock: "decided at",
    LastOfAKeyWins: "a key that is asked for twice pays both",
    ForgetsTheCancelled: "a cancelled call is charged nothing",
    AnotherAnswerAsync: "the store's answer differs from the core's: seed=0, round",
    AnotherAnswerOne: "the store's answer differs from the core's: seed=0, round",
}


# What random histories cannot show: they are asked one after another, of keys that are alike in no other way.
PROMISED_ONLY = (AnotherAnswerAsync, AnotherAnswerOne, FoldsCase, LastOfAKeyWins, ForgetsTheCancelled)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught_and_named(fault):
    with pytest.raises(AssertionError) as failure:
        verify_store(fault)
    assert FAULTS[fault] in str(failure.value)


@pytest.mark.parametrize("fault", [f for f in FAULTS if f not in PROMISED_ONLY])
def test_random_histories_alone_catch_most_faults(fault, monkeypatch):
    monkeypatch.setattr("tidegate.testing.store_kit.PROMISES", ())
    with pytest.raises(AssertionError, match=r"seed=0, round \d+, step \d+"):
        verify_store(fault, rounds=120)


@pytest.mark.usefixtures("switching")
def test_a_race_is_caught():
    with pytest.raises((AssertionError, IndexError)) as failure:  # a promise broken, or a log torn in two
        verify_often(ChecksThenActs)
    assert failure.type is IndexError or "nobody comes between" in str(failure.value)


def verify_often(store):
    """Try more than once: a race is lost by chance."""
    for _ in range(20):
        verify_store(store, rounds=0)


@pytest.fixture
def switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_failing_history_is_short(monkeypatch):
    monkeypatch.setattr("tidegate.testing.store_kit.PROMISES", ())
    with pytest.raises(AssertionError) as failure:
        verify_store(ChargesDenied)
    lines = str(failure.value).splitlines()
    assert lines[0].startswith("the store's answer differs from the core's: seed=0, round ")
    assert lines[-2].startswith("    expected ")
    assert lines[-1].startswith("    got      ")
    assert len(lines) <= 7


# ---- vectors ---------------------------------------------------------------------------------------------------------


def test_vectors_are_the_same_for_the_same_seed():
    assert list(random_vectors(5, 200)) == list(random_vectors(5, 200))
    assert list(random_vectors(5, 200)) != list(random_vectors(6, 200))
    assert len(list(random_vectors(5, 77))) == 77


def test_vectors_hold_what_hurts():
    vectors = [vector for seed in range(10) for vector in random_vectors(seed, 600)]
    algorithms = {limit.algorithm for vector in vectors for policy, _, _ in vector.asks for limit in policy.limits}
    assert algorithms == set(ALGORITHMS)
    assert {vector.verb for vector in vectors} == set(VERBS)
    denied = sum(not vector.answers[0].allowed for vector in vectors)
    assert 0.1 < denied / len(vectors) < 0.5
    assert any(len(vector.asks) > 1 for vector in vectors)
    assert any(len(policy.limits) == 6 for vector in vectors for policy, _, _ in vector.asks)
    assert any(later.now < earlier.now for earlier, later in pairwise(vectors))
    assert any(cost > 2**52 for vector in vectors for _, _, costs in vector.asks for cost in costs)


def test_the_model_is_the_core():
    """Its answers are those of a store that was proved otherwise, by the oracle."""
    policy, model, store = Policy("p", (Limit(2, "1h"),)), ReferenceStore(), MemoryStore()
    for now in (10**15, 10**15, 10**15, 10**15 + 1800 * 10**6):
        asks = [(policy, "k", (1,))]
        assert model.apply("acquire", asks, now) == tuple(map(answer_of, store.apply("acquire", asks, now)))
