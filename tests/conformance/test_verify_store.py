"""verify_store: it passes for correct stores, and fails for every fault planted here."""

import asyncio
import threading
from contextlib import nullcontext
from itertools import count, pairwise

import pytest

from tests.cases import cases
from tests.conformance.changes import changing_history
from tidegate import Limit, Policy
from tidegate._policy.key import join_key
from tidegate.core._algorithms import ALGORITHMS
from tidegate.core._decision import VERBS, Decision, zero_costs
from tidegate.stores import MemoryStore, Store
from tidegate.stores._merged_asks import MergedAsks, merge
from tidegate.stores._values import ANYTHING
from tidegate.testing import ReferenceStore, random_vectors, verify_store
from tidegate.testing._reference import answer_of
from tidegate.testing._store_guarantees import GUARANTEES


class DictStore(Store):
    """The smallest store: the core over a dictionary. Faults below break one guarantee of it each."""

    def __init__(self):
        super().__init__()
        self.states = {}
        self.lock = threading.Lock()
        self.closed = False

    def place(self, policy, key, limit):
        return policy.name, key, limit.name, limit.algorithm

    def apply(self, verb, asks, now=None, at=None):
        now = self.clock.ns() // 1000 if now is None else self.instant_of(now)
        merged = self.together(asks)
        asks = merged.asks
        limits = [limit for policy, _, _ in asks for limit in policy.limits]
        places = [self.place(policy, key, limit) for policy, key, _ in asks for limit in policy.limits]
        costs = [cost for ask in asks for cost in ask[2]]
        with self.lock:
            states = [self.states.get(place) for place in places]
            allowed, after, left = self.decide(verb, limits, states, costs, now, at)
            self.keep(verb, allowed, places, after, now)
        decision = Decision.of_states(now, tuple(limits), after, left, within_limits=allowed)
        views = decision.views
        decisions, start = [], 0
        for policy, _, _ in asks:
            end = start + len(policy.limits)
            decisions.append(Decision.of_views(now, policy.limits, views[start:end], within_limits=allowed))
            start = end
        return merged.split(decisions)

    def together(self, asks):
        return merge(asks)

    def instant_of(self, now):
        return now

    def decide(self, verb, limits, states, costs, now, at):
        return VERBS[verb].decide(limits, states, costs, now, at)

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
def test_correct_stores_pass(store):
    verify_store(store)


@cases("seed", range(12))
def test_a_changed_limit_is_answered_like_the_core(seed):
    store = MemoryStore()
    for place, (verb, asks, now, at, answers) in enumerate(changing_history(seed)):
        assert tuple(map(answer_of, store.apply(verb, asks, now, at))) == answers, f"step {place}"


def test_other_seeds_pass_too():
    verify_store(MemoryStore, seed=2024, rounds=8)


async def test_it_runs_inside_an_event_loop():
    verify_store(MemoryStore, rounds=5)


def test_it_closes_the_stores_it_opened():
    opened = []

    def open_store():
        opened.append(DictStore())
        return opened[-1]

    verify_store(open_store, rounds=5)
    assert len(opened) == len(GUARANTEES) + 5
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
    """Charges limit after limit, and keeps the charges if a later limit denies."""

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


class ChargesARepeatedKeyOnce(DictStore):
    """Charges a key that is twice in a batch only once."""

    def together(self, asks):
        return MergedAsks(asks, range(len(asks)), asks)


class MergesEqualPoliciesOnly(DictStore):
    """Adds up the costs of equal policies, and not of policies of the same name."""

    def together(self, asks):
        if len({policy for policy, _, _ in asks}) > 1:
            return MergedAsks(asks, range(len(asks)), asks)
        return merge(asks)


class DoesNotRefundCancelledCalls(DictStore):
    """Does not refund a call whose task was cancelled while it waited."""

    async def apply_async(self, verb, asks, now=None, at=None, writes=()):
        decisions = self.apply(verb, asks, now, at)
        await asyncio.sleep(0)
        return decisions


class PeekCharges(DictStore):
    """Stores the states of a peek."""

    def keep(self, verb, allowed, places, states, now):
        super().keep("acquire" if verb == "peek" else verb, allowed, places, states, now)


class DenialRestartsTheWindow(DictStore):
    """Counts denied calls, like simple fixed-window counters."""

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
    """Compares keys like some databases: ignores case and trailing blanks."""

    def place(self, policy, key, limit):
        return policy.name, join_key(key).casefold().rstrip(), limit.name, limit.algorithm


class RefillsOnChange(DictStore):
    """Identifies a limit by its quota, so that a changed one starts from zero."""

    def place(self, policy, key, limit):
        return (*super().place(policy, key, limit), limit.quota)


class IdentifiesLimitsByIndex(DictStore):
    """Identifies limits by their index in the policy."""

    def place(self, policy, key, limit):
        return policy.name, key, policy.limits.index(limit), limit.algorithm


class TrustsTheClock(DictStore):
    """Lets time run backwards: moves every state to an earlier now."""

    def decide(self, verb, limits, states, costs, now, at):
        states = [
            (state[0], state[1], min(state[2], now), state[3]) if limit.algorithm == "token_bucket" and state else state
            for limit, state in zip(limits, states, strict=True)
        ]
        return super().decide(verb, limits, states, costs, now, at)


class WholeSeconds(DictStore):
    """Counts time in whole seconds."""

    def instant_of(self, now):
        return now - now % 1_000_000


class RefundsTheLatest(DictStore):
    """Ignores the instant of the charge to correct."""

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
    """Drops states slightly too early, like a TTL rounded down to seconds."""

    def decide(self, verb, limits, states, costs, now, at):
        live = [
            None if state and limit.rules.expires(state) // 1_000_000 <= now // 1_000_000 else state
            for limit, state in zip(limits, states, strict=True)
        ]
        return super().decide(verb, limits, live, costs, now, at)


class Floats(DictStore):
    """Keeps counts in single precision: 24 bits."""

    def keep(self, verb, allowed, places, states, now):
        rounded = [
            (state[0], state[1] - state[1] % (1 << max(0, abs(state[1]).bit_length() - 24)), *state[2:])
            if state and isinstance(state[1], int) else state
            for state in states
        ]  # fmt: skip
        super().keep(verb, allowed, places, rounded, now)


class ReleasesTheNewest(DictStore):
    """Releases the newest slot instead of the oldest."""

    def decide(self, verb, limits, states, costs, now, at):
        if verb == "adjust" and at is None and limits[0].algorithm == "concurrency" and states[0]:
            at = states[0][1].times[states[0][3] - 1]
        return super().decide(verb, limits, states, costs, now, at)


class OwnClock(DictStore):
    """Decides by its own clock and ignores the given instant."""

    def apply(self, verb, asks, now=None, at=None):
        del now
        return super().apply(verb, asks, None, at)


class ChecksThenActs(DictStore):
    """Has no lock, and lets other threads run between the check and the charge."""

    def __init__(self):
        super().__init__()
        self.lock = nullcontext()

    def decide(self, verb, limits, states, costs, now, at):
        answer = super().decide(verb, limits, states, costs, now, at)
        for _ in range(3000):
            pass  # long enough for a thread switch, with the interval that the test sets
        return answer


class AnotherAnswerAsync(MemoryStore):
    """Returns a denial without a wait in apply_async."""

    async def apply_async(self, verb, asks, now=None, at=None, writes=()):
        decisions = self.apply(verb, asks, now, at, writes)
        return [
            Decision((d.allowed, d.at, d[2], [(left, min(retry, 0), reset) for left, retry, reset in d.views], None))
            for d in decisions
        ]


class AnotherAnswerOne(MemoryStore):
    """Does not store a charge of two in apply_one."""

    def apply_one(self, verb, policy, key, costs, now=None, at=None):
        verb = "peek" if verb == "acquire" and max(costs) > 1 else verb
        return super().apply_one(verb, policy, key, costs, now, at)


class IgnoresConditions(MemoryStore):
    """Writes values whatever is stored."""

    def apply(self, verb, asks, now=None, at=None, writes=()):
        return super().apply(verb, asks, now, at, [write._replace(expected=ANYTHING) for write in writes])


class WritesDeniedCalls(MemoryStore):
    """Writes the values of a call that is denied."""

    def apply(self, verb, asks, now=None, at=None, writes=()):
        decisions = super().apply(verb, asks, now, at, writes)
        if writes and decisions and not decisions[-1].within_limits:
            super().apply(verb, (), now, at, writes)
        return decisions


class ChargesBeforeConditions(MemoryStore):
    """Charges a call whose condition fails."""

    def apply(self, verb, asks, now=None, at=None, writes=()):
        decisions = super().apply(verb, asks, now, at) if asks else []
        if not decisions or decisions[-1].within_limits:
            super().apply(verb, (), now, at, writes)
        return decisions


class WritesOneByOne(MemoryStore):
    """Writes each value of a step by itself."""

    def apply(self, verb, asks, now=None, at=None, writes=()):
        for write in writes[:-1] if not asks else ():
            super().apply(verb, (), now, at, (write,))
        return super().apply(verb, asks, now, at, writes[-1:] if not asks else writes)


class KeepsValuesTooLong(MemoryStore):
    """Returns a value at its end."""

    def get_value(self, collection, name, now=None):
        return super().get_value(collection, name, None if now is None else now - 1)


class MixesCollections(MemoryStore):
    """Ignores what a collection is beside."""

    def apply(self, verb, asks, now=None, at=None, writes=()):
        writes = [write._replace(collection=write.collection._replace(beside=None)) for write in writes]
        return super().apply(verb, asks, now, at, writes)

    def get_value(self, collection, name, now=None):
        return super().get_value(collection._replace(beside=None), name, now)


FAULTS = {
    ChargesDenied: "all or nothing",
    DecidesAsksAlone: "a batch is decided together",
    PeekCharges: "peek changes nothing",
    DenialRestartsTheWindow: "exactly the quota is admitted",
    JoinsKeys: "keys are separate",
    ForgetsPolicies: "policies are separate",
    FoldsCase: "keys are separate",
    RefillsOnChange: "a changed limit refills nothing",
    IdentifiesLimitsByIndex: "a changed policy keeps its other limits",
    TrustsTheClock: "a clock that steps back credits nothing",
    WholeSeconds: "exactly the quota is admitted",
    RefundsTheLatest: "a held charge is corrected at its instant",
    HoldsWithoutAMark: "a held charge is corrected at its instant",
    KeepsAfterReset: "reset clears a key",
    ForgetsEarly: "exactly the quota is admitted",
    Floats: "large costs are one entry",
    ReleasesTheNewest: "slots are released",
    OwnClock: "decided at",
    ChargesARepeatedKeyOnce: "a key twice in a batch pays both costs",
    MergesEqualPoliciesOnly: "policies of one name in a batch pay all costs",
    DoesNotRefundCancelledCalls: "a cancelled call is refunded",
    AnotherAnswerAsync: "the result of the store differs from that of the core: seed=0, round",
    AnotherAnswerOne: "the result of the store differs from that of the core: seed=0, round",
    IgnoresConditions: "a value ends at its time to live",
    WritesDeniedCalls: "a charge and its values are one step",
    ChargesBeforeConditions: "a charge and its values are one step",
    WritesOneByOne: "of several writes all are made or none",
    KeepsValuesTooLong: "a value ends at its time to live",
    MixesCollections: "a collection is listed",
}


# Random histories do not catch these: they make one call after another, with keys that differ in more than case.
PROMISED_ONLY = (
    AnotherAnswerAsync,
    AnotherAnswerOne,
    FoldsCase,
    ChargesARepeatedKeyOnce,
    MergesEqualPoliciesOnly,
    DoesNotRefundCancelledCalls,
    IgnoresConditions,
    WritesDeniedCalls,
    ChargesBeforeConditions,
    WritesOneByOne,
    KeepsValuesTooLong,
    MixesCollections,
)


@cases("fault", FAULTS)
def test_a_planted_fault_is_reported_by_the_name_of_the_guarantee(fault):
    with pytest.raises(AssertionError) as failure:
        verify_store(fault)
    assert FAULTS[fault] in str(failure.value)


@pytest.mark.parametrize("fault", [f for f in FAULTS if f not in PROMISED_ONLY])
def test_random_histories_alone_catch_most_faults(fault, monkeypatch):
    monkeypatch.setattr("tidegate.testing._store_kit.GUARANTEES", ())
    with pytest.raises(AssertionError, match=r"seed=0, round \d+, step \d+"):
        verify_store(fault, rounds=120)


@pytest.mark.usefixtures("switching")
def test_a_race_is_caught():
    with pytest.raises((AssertionError, IndexError)) as failure:  # a broken guarantee, or a corrupted log
        verify_often(ChecksThenActs)
    assert failure.type is IndexError or "the store violates a guarantee" in str(failure.value)  # of several, the first


def verify_often(store):
    """Try several times: a race happens by chance."""
    for _ in range(200):
        verify_store(store, rounds=0)


def test_a_failing_history_is_short(monkeypatch):
    monkeypatch.setattr("tidegate.testing._store_kit.GUARANTEES", ())
    with pytest.raises(AssertionError) as failure:
        verify_store(ChargesDenied)
    lines = str(failure.value).splitlines()
    assert lines[0].startswith("the result of the store differs from that of the core: seed=0, round ")
    assert lines[-2].startswith("    expected ")
    assert lines[-1].startswith("    got      ")
    assert len(lines) <= 7


# ---- vectors ---------------------------------------------------------------------------------------------------------


def test_vectors_are_the_same_for_the_same_seed():
    assert list(random_vectors(5, 200)) == list(random_vectors(5, 200))
    assert list(random_vectors(5, 200)) != list(random_vectors(6, 200))
    assert len(list(random_vectors(5, 77))) == 77


def test_vectors_cover_all_algorithms_verbs_and_edge_cases():
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


def test_the_reference_store_answers_like_the_core():
    """The memory store is tested by the oracle."""
    policy, model, store = Policy("p", (Limit(2, "1h"),)), ReferenceStore(), MemoryStore()
    for now in (10**15, 10**15, 10**15, 10**15 + 1800 * 10**6):
        asks = [(policy, "k", (1,))]
        assert model.apply("acquire", asks, now) == tuple(map(answer_of, store.apply("acquire", asks, now)))
