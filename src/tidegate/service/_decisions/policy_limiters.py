"""Subjects, keys, and one limiter for each policy in use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._limiter.limiter import AsyncLimiter, Limiter
from tidegate._policy import Policy, join_key, normal_key
from tidegate.core import Limit
from tidegate.core._decision import Decision, LocalDecision, shadow
from tidegate.errors import ConfigError, Denied, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate._limiter.limiter import AsyncApply
    from tidegate._limiter.reservation import AsyncReservation
    from tidegate._policy import Cost, Key
    from tidegate.observe import Observer, Record
    from tidegate.service._decisions.idempotency import KeyedStore
    from tidegate.service._decisions.stats import DecisionCount
    from tidegate.stores import Store

MAX_BATCH: Final = 1000  # decisions in a batch
MAX_KEY_LENGTH: Final = 1024  # characters of all parts of a key
MAX_KEY_PARTS: Final = 32
ASK_STORE: Final = object()  # marks an ask that only the store can decide
new_tuple: Final = tuple.__new__  # new_tuple(Subject, (…)) takes half the time of Subject(…)
PROBE_POLICY: Final = Policy("tidegate.ready", (Limit(1, "1s"),))


class Subject(NamedTuple):
    """What a request is about: a key of a policy, a descriptor of a domain, or a provider (name, domain or URL)."""

    policy: str = ""
    key: Key = ""
    domain: str = ""
    descriptor: tuple[tuple[str, str], ...] = ()
    provider: str = ""


class ReserveResult(NamedTuple):
    """The result of `reserve`: the decision and, if it allows the call, the id that settles the reservation.

    `member` is the member of a provider's pool that the permits belong to.
    """

    decision: Decision | None
    id: str | None
    member: str = ""


@dataclass(frozen=True, slots=True)
class CountedPolicy:
    """A policy that is decided together with others, without a limiter of its own, and its counts."""

    policy: Policy
    count: DecisionCount


class ServiceLimiter(AsyncLimiter):
    """An AsyncLimiter whose calls may use another store: one that applies a request with an idempotency key once."""

    async def charge(
        self,
        verb: str,
        key: Key,
        cost: Cost,
        timeout: float | None,  # noqa: ASYNC109 - the deadline is part of the contract
        priority: float,
        apply: AsyncApply | None = None,
    ) -> Decision:
        """Charge a cost; `apply` replaces `store.apply_async`.

        None as `timeout` decides at once, as `try_acquire` does; otherwise the call waits and raises Denied.
        """
        if timeout is None:
            return await self._ask(verb, self._make_ask(key, cost), apply=apply)
        return await self._acquire(verb, normal_key(key), cost, timeout, priority, apply)

    async def correct(self, verb: str, key: Key, cost: Cost, apply: AsyncApply | None = None) -> None:
        """Refund a cost, or release slots; `apply` replaces `store.apply_async`."""
        ask = self._refund_ask(key, cost) if verb == "refund" else self._release_ask(key, cost, None)[0]
        await self._ask("adjust", ask, None, apply)
        self.store.wait_queues.wake(ask[1])


class PolicyLimiter:
    """The limiter of one policy variant, and its counts."""

    __slots__ = ("count", "decide_now", "limiter", "policy", "slot")

    def __init__(self, slot: str, policy: Policy, store: Store, count: DecisionCount, max_priority: float) -> None:
        """Create a limiter for the policy."""
        self.slot: str = slot
        self.limiter: ServiceLimiter = ServiceLimiter(policy, store=store, max_priority=max_priority)
        self.count: DecisionCount = count
        self.update(policy, store)

    def update(self, policy: Policy, store: Store) -> None:
        """Replace the policy."""
        self.policy: Policy = policy
        if self.limiter.policy is not policy:
            self.limiter.update(policy)
        # Decides without a coroutine; None, or the result None, if only the store can decide.
        self.decide_now: Callable[[Key, Cost], Decision | None] | None = None
        if store.instant:
            self.decide_now = Limiter(policy, store=store).try_acquire
        elif store.unleased is not store and policy.mode == "enforce":
            self.decide_now = partial(decide_held, store, policy)
        if self.decide_now is not None and policy.mode == "enforce":
            self.decide_now = store.specialize(policy, self.decide_now)

    async def charge(
        self,
        verb: str,
        key: Key,
        cost: Cost,
        timeout: float | None,  # noqa: ASYNC109 - the deadline is part of the contract
        priority: float = 0.0,
        keyed_store: KeyedStore | None = None,
    ) -> Decision:
        """Charge a cost, waiting up to `timeout` seconds; None decides at once, regardless of the wait queue.

        A `keyed_store` replaces the store of the limiter.
        """
        limiter, apply = self.limiter, None if keyed_store is None else keyed_store.apply_async
        try:
            return await limiter.charge(verb, key, cost, timeout, priority, apply)
        except Denied as denied:
            return denied.decision

    def make_reservation(self, key: Key, cost: Cost, ttl: float, decision: Decision) -> AsyncReservation:
        """Build the reservation of a cost that was charged."""
        return self.limiter.make_reservation(key, cost, decision, ttl)


def decide_held(store: Store, policy: Policy, key: Key, cost: Cost) -> Decision | None:
    """Take permits that this process already holds; None if the store has to be asked."""
    return store.decide_held((policy, key, policy.one if cost == 1 and cost.__class__ is int else policy.costs(cost)))


def notify_observers(observers: Sequence[Observer], record: Record) -> None:
    """Call every observer."""
    for observer in observers:
        observer(record)


def apply_mode(policy: Policy, decision: Decision) -> Decision:
    """Make a shadow policy allow the call, as a limiter does."""
    return shadow(decision) if policy.mode == "shadow" else decision


def store_lost_error(policy: Policy) -> StoreUnavailable:
    """Build the error for a policy that denies while its store is unavailable."""
    return StoreUnavailable(f"the store of policy {policy.name!r} is unavailable, and its on_store_error is deny")


def is_store_lost(decision: Decision, policy: Policy) -> bool:
    """Return whether a denial only means that the store was unavailable."""
    return decision.__class__ is LocalDecision and not decision.within_limits and policy.on_store_error == "deny"


def check_key(key: object) -> Key:
    """Refuse an invalid key, and a key that is too long."""
    found = normal_key(key)
    parts = (found,) if isinstance(found, str) else found
    if sum(map(len, parts)) > MAX_KEY_LENGTH or len(parts) > MAX_KEY_PARTS:
        raise ConfigError(f"is longer than {MAX_KEY_LENGTH} characters or {MAX_KEY_PARTS} parts", field="key")
    if not all(part.isascii() or is_encodable(part) for part in parts):
        raise ConfigError("contains a lone surrogate, which cannot be encoded as UTF-8", field="key")
    return found


def bound_key(key: Key) -> Key:
    """Bound the length of a descriptor's key: a long key, which a client may choose, is replaced by its digest."""
    parts = (key,) if isinstance(key, str) else key
    if sum(map(len, parts)) <= MAX_KEY_LENGTH:
        return key if all(map(str.isascii, parts)) else check_key(key)
    return blake2b(join_key(key).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def is_encodable(text: str) -> bool:
    """Return whether a string can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
