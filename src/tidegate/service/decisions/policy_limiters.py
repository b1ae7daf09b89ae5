"""Who is asked about, and who answers: subjects, keys, and a seat for each policy at work."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core import Limit
from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import ConfigError, Denied
from tidegate.limiter import AsyncLimiter, Limiter
from tidegate.policy import Policy, join_key, normal_key
from tidegate.reservation import AsyncReservation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.observe import Observer, Record
    from tidegate.policy import Cost, Key
    from tidegate.service.decisions.idempotency import KeyedStore
    from tidegate.service.decisions.stats import DecisionCount
    from tidegate.stores import Store

MAX_BATCH: Final = 1000  # decisions in a batch
MAX_KEY_LENGTH: Final = 1024  # characters of all parts of a key
MAX_KEY_PARTS: Final = 32
ASK_STORE: Final = object()
PROBE_POLICY: Final = Policy("tidegate.ready", (Limit(1, "1s"),))


class Subject(NamedTuple):
    """Who is asked about: a key of a policy, or a descriptor of a domain."""

    policy: str = ""
    key: Key = ""
    domain: str = ""
    descriptor: tuple[tuple[str, str], ...] = ()


class ReserveResult(NamedTuple):
    """What `reserve` gives: the decision, and, where it allows, the id to settle by."""

    decision: Decision | None
    id: str | None


class PolicyLimiter:
    """A variant at work: its limiter and its counts."""

    __slots__ = ("count", "limiter", "now", "policy", "slot")

    def __init__(self, slot: str, policy: Policy, store: Store, count: DecisionCount, max_priority: float) -> None:
        """Open a limiter for the policy."""
        self.slot = slot
        self.limiter = AsyncLimiter(policy, store=store, max_priority=max_priority)
        self.count = count
        self.take(policy, store)

    def take(self, policy: Policy, store: Store) -> None:
        """Decide by this policy from now on."""
        self.policy = policy
        if self.limiter.policy is not policy:
            self.limiter.update(policy)
        # A store that answers at once needs no coroutine: the same question, a third cheaper.
        self.now: Callable[[Key, Cost], Decision] | None = None
        if store.instant:
            self.now = Limiter(policy, store=store).try_acquire

    async def charge(
        self, verb: str, key: Key, cost: Cost, wait: float | None, priority: float = 0.0, via: KeyedStore | None = None
    ) -> Decision:
        """Charge a cost, waiting for it; without a wait, decide at once, whoever else waits. `via` asks the store."""
        limiter, apply = self.limiter, None if via is None else via.apply_async
        if wait is None:
            return await limiter._ask(limiter._make_ask(verb, normal_key(key), cost), apply)  # noqa: SLF001 - as try_acquire
        try:
            return await limiter._wait_for(verb, key, cost, wait, priority, apply)  # noqa: SLF001 - as acquire
        except Denied as denied:
            return denied.decision

    def held(self, key: Key, cost: Cost, ttl: float, decision: Decision) -> AsyncReservation:
        """Make the reservation of a cost that was charged."""
        limiter = self.limiter
        policy = limiter._policy_of(decision)  # noqa: SLF001 - as reserve
        costs = policy.costs(cost)
        return AsyncReservation(limiter._settle, limiter.clock, policy, normal_key(key), costs, decision, ttl)  # noqa: SLF001 - as reserve


def tell(observers: Sequence[Observer], record: Record) -> None:
    """Tell everybody who observes."""
    for observer in observers:
        observer(record)


def lost(decision: Decision, policy: Policy) -> bool:
    """Tell whether a no only means that the store could not be asked."""
    return decision.__class__ is LocalDecision and not decision[0] and policy.on_store_error == "deny"


def check_key(key: object) -> Key:
    """Refuse a key that is none, or longer than anybody needs."""
    found = normal_key(key)
    parts = (found,) if isinstance(found, str) else found
    if sum(map(len, parts)) > MAX_KEY_LENGTH or len(parts) > MAX_KEY_PARTS:
        raise ConfigError(f"is longer than {MAX_KEY_LENGTH} characters or {MAX_KEY_PARTS} parts", field="key")
    if not all(part.isascii() or whole_text(part) for part in parts):
        raise ConfigError("has half of a character (a lone surrogate)", field="key")
    return found


def short_key(key: Key) -> Key:
    """Bound the key of a descriptor: what clients may make as long as they like is limited too, by its digest."""
    parts = (key,) if isinstance(key, str) else key
    if sum(map(len, parts)) <= MAX_KEY_LENGTH:
        return key if all(part.isascii() for part in parts) else check_key(key)
    return blake2b(join_key(key).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def whole_text(text: str) -> bool:
    """Tell whether a text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
