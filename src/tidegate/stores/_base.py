"""The Store interface: one method, which applies a transition of the core to keys, atomically."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, TypeVar
from weakref import ref

from tidegate._policy import Cost, Key, Policy
from tidegate._runtime.clock import Clock, SystemClock
from tidegate.core._bounds import SECOND
from tidegate.core._decision import Decision
from tidegate.errors import ConfigError
from tidegate.stores._values import ANYTHING, Anything, Collection, Value, Write

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from tidegate.core._limit import Limit
    from tidegate.stores._memory.group_shares import GroupOf

Ask = tuple[Policy, Key, tuple[int, ...]]  # the policy, the key, and the cost at each limit of the policy
T = TypeVar("T")
LostCorrection = Callable[[Sequence[Ask], int | None, int | None], object]  # takes the asks, `now` and `at`
TryAcquire = Callable[[Key, Cost], Decision | T]  # T: what it may return in place of a Decision


class Alternatives(tuple[Ask, ...]):  # noqa: SLOT001 - a tuple with an attribute cannot have slots
    """The asks of several alternatives in order of preference: `Store.apply` charges the first that is allowed.

    Each alternative is one or more asks that are decided together, without the same key twice. A store decides one
    after another, in one atomic step, and stops at the first that is allowed, so the decisions end with those of the
    chosen alternative; if none is allowed, there is one for every ask. `split` groups them by alternative.
    """

    sizes: tuple[int, ...]  # the number of asks of each alternative

    @classmethod
    def of(cls, alternatives: Iterable[Sequence[Ask]]) -> Self:
        """Create them from the asks of each alternative; raises ConfigError for a key twice, or no asks."""
        groups = [tuple(asks) for asks in alternatives]
        for asks in groups:
            if not asks:
                raise ConfigError("an alternative needs at least one policy and key", field="alternatives")
            if len({(policy.name, key) for policy, key, _ in asks}) < len(asks):
                raise ConfigError("an alternative contains a key twice: add up its costs", field="alternatives")
        found = cls(ask for asks in groups for ask in asks)
        found.sizes = tuple(map(len, groups))
        return found

    def groups(self) -> list[tuple[Ask, ...]]:
        """Return the asks of each alternative."""
        return self.split(self)

    def split(self, flat: Sequence[T]) -> list[tuple[T, ...]]:
        """Divide what has one item for each ask by alternative; it may end after any alternative."""
        found, start = [], 0
        for size in self.sizes:
            if start >= len(flat):
                break
            found.append(tuple(flat[start : start + size]))
            start += size
        return found

    def replace(self, asks: Iterable[Ask]) -> Self:
        """Return alternatives of the same sizes with other asks."""
        found = type(self)(asks)
        found.sizes = self.sizes
        return found


def decide_in_turn(asks: Sequence[Ask], decide: Callable[[Sequence[Ask]], list[Decision]]) -> list[Decision]:
    """Decide asks together; of alternatives, one after another up to the first that is allowed."""
    if not isinstance(asks, Alternatives):
        return decide(asks)
    decisions: list[Decision] = []
    for alternative in asks.groups():
        decisions += decide(alternative)
        if decisions[-1].within_limits:
            break
    return decisions


def decided_asks(asks: Sequence[Ask], decisions: Sequence[T]) -> tuple[Sequence[Ask], Sequence[T]]:
    """Return the asks and decisions of the alternative that was decided last; other asks as they are."""
    if not isinstance(asks, Alternatives):
        return asks, decisions
    groups = asks.split(decisions)
    return asks.groups()[len(groups) - 1], groups[-1]


class WaitQueue(Protocol):
    """Callers that wait for permits of a store."""

    def wake(self, key: Key) -> None:
        """Wake callers that wait for the key: permits may be available."""


class WaitQueueRefs:
    """The wait queues of a store's limiters, by weak references; fast to iterate over, as every correction does."""

    __slots__ = ("_refs",)

    def __init__(self) -> None:
        """Start without queues."""
        self._refs: dict[int, ref[WaitQueue]] = {}

    def add(self, queue: WaitQueue) -> None:
        """Add a queue; it is removed when it is freed."""
        number, refs = id(queue), self._refs
        refs[number] = ref(queue, lambda _: refs.pop(number, None))

    def wake(self, key: Key) -> None:
        """Wake callers that wait for a key."""
        for reference in tuple(self._refs.values()):
            queue = reference()
            if queue is not None:
                queue.wake(key)


class Store(ABC):
    """Keeps the states of keys and decides on them.

    A store implements `apply`: it applies a verb of `tidegate.core._decision` (`acquire`, `peek`, `hold`, `adjust`,
    `reset`) to the states of the given keys, atomically. All asks of one call are decided together: if one limit
    denies, nothing is charged. Of `Alternatives`, the first that is allowed is charged (`acquire`, `hold`, `peek`).

    A store that `keeps_values` also writes small values in the same step (see `tidegate.stores._values`). It implements
    `get_value` and `list_values` in addition, and their `async` forms unless it is `instant`.
    """

    instant: ClassVar[bool] = False  # whether `apply` never blocks, so that a task may call it
    decides_alternatives: ClassVar[bool] = False  # whether `apply` accepts Alternatives
    keeps_values: ClassVar[bool] = False  # whether `apply` accepts writes
    has_fallback: ClassVar[bool] = False  # whether it decides without the store while `unavailable`
    outage_log: logging.Logger = logging.getLogger("tidegate.stores")

    def __init__(self, clock: Clock | None = None) -> None:
        """Use the given clock, by default the SystemClock."""
        self.clock: Clock = clock or SystemClock()
        # One for each limiter of this store: returned permits may serve waiters of any of them.
        self.wait_queues: WaitQueueRefs = WaitQueueRefs()
        self.lost_correction: LostCorrection | None = None

    @abstractmethod
    def apply(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply the verb to all (policy, key, costs) together; returns one Decision for each.

        `now` is the time to decide at, in microseconds. None, the usual case, means the time of the store's own clock,
        read inside the atomic operation. For `adjust`, `at` is the time of the charge to correct.

        `writes` are values to write in the same step, unless an ask is denied. Raises ValueConflict if the condition of
        one does not hold, before anything is decided. Only stores that `keeps_values` accept them.
        """

    def apply_one(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int | None = None, at: int | None = None
    ) -> Decision:
        """Apply the verb to one key: the common case, which a store may optimize."""
        return self.apply(verb, ((policy, key, costs),), now, at)[0]

    def specialize(self, policy: Policy, try_acquire: TryAcquire[T]) -> TryAcquire[T]:
        """Return a faster `try_acquire` for a policy, or the given one, the default, if the store has none.

        It decides some calls at once, without blocking, as `try_acquire` would, and passes all others to it.
        """
        del policy
        return try_acquire

    async def apply_async(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply without blocking the event loop.

        The charge of a cancelled call is refunded; corrections and resets are completed even if their task is
        cancelled: see `tidegate.stores._cancellation`. A call with writes is completed too, and keeps its charge. By
        default, a store that is not `instant` is called in a thread.
        """
        arguments = (verb, asks, now, at, writes) if writes else (verb, asks, now, at)
        if self.instant:
            return self.apply(*arguments)
        from tidegate.stores._cancellation import apply_in_thread  # noqa: PLC0415 - it imports this module

        return await apply_in_thread(self, *arguments)

    # ---- small values ------------------------------------------------------------------------------------------------

    def put_value(
        self,
        collection: Collection,
        name: str,
        data: bytes,
        ttl: float,
        expected: bytes | Anything | None = ANYTHING,
        now: int | None = None,
    ) -> None:
        """Write a value that ends after `ttl` seconds; raises ValueConflict if the condition `expected` fails."""
        self.apply("acquire", (), now, None, (Write(collection, name, data, round(ttl * SECOND), expected),))

    async def put_value_async(
        self,
        collection: Collection,
        name: str,
        data: bytes,
        ttl: float,
        expected: bytes | Anything | None = ANYTHING,
        now: int | None = None,
    ) -> None:
        """Do what `put_value` does, without blocking the event loop."""
        write = Write(collection, name, data, round(ttl * SECOND), expected)
        await self.apply_async("acquire", (), now, None, (write,))

    def delete_value(
        self,
        collection: Collection,
        name: str,
        expected: bytes | Anything | None = ANYTHING,
        now: int | None = None,
    ) -> None:
        """Delete a value, if there is one; raises ValueConflict if the condition `expected` fails."""
        self.apply("acquire", (), now, None, (Write(collection, name, None, 0, expected),))

    async def delete_value_async(
        self,
        collection: Collection,
        name: str,
        expected: bytes | Anything | None = ANYTHING,
        now: int | None = None,
    ) -> None:
        """Do what `delete_value` does, without blocking the event loop."""
        await self.apply_async("acquire", (), now, None, (Write(collection, name, None, 0, expected),))

    def get_value(self, collection: Collection, name: str, now: int | None = None) -> Value | None:
        """Read a value; None if there is none, or it has ended."""
        del collection, name, now
        raise ConfigError(f"{type(self).__name__} keeps no values: use one of tidegate's own stores", field="store")

    async def get_value_async(self, collection: Collection, name: str, now: int | None = None) -> Value | None:
        """Do what `get_value` does, without blocking the event loop."""
        return self.get_value(collection, name, now)

    def list_values(self, collection: Collection, now: int | None = None) -> dict[str, Value]:
        """Read all values of a listed collection, by name. The values may be read in several steps."""
        del collection, now
        raise ConfigError(f"{type(self).__name__} keeps no values: use one of tidegate's own stores", field="store")

    async def list_values_async(self, collection: Collection, now: int | None = None) -> dict[str, Value]:
        """Do what `list_values` does, without blocking the event loop."""
        return self.list_values(collection, now)

    def key_slots(self, asks: Sequence[Ask]) -> Sequence[int]:
        """Return the slot of the key of each ask: one step decides only asks of one slot. Most stores have one slot."""
        return (0,) * len(asks)

    # ---- traits ------------------------------------------------------------------------------------------------------

    def ask_store(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply, but never decide without the store: raises StoreUnavailable if it does not answer."""
        return self.apply(verb, asks, now, at)

    async def ask_store_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Do what `ask_store` does, without blocking the event loop."""
        return await self.apply_async(verb, asks, now, at)

    async def wait_for_shares(self, asks: Sequence[Ask]) -> bool:
        """Wait for permits that the store takes in advance; returns whether there was any to wait for."""
        del asks
        return False

    def decide_held(self, ask: Ask) -> Decision | None:
        """Decide an acquire from permits, or from a denial, that this process holds; None, the default, if it cannot.

        Call it from a task: work that follows, such as the renewal of a lease, needs the event loop.
        """
        del ask
        return None

    def shard(self, asks: Sequence[Ask], values: Sequence[tuple[Collection, str]] = ()) -> Hashable:
        """Return the part of the store that has these keys, if parts can fail separately; None, the default, if not.

        All keys of one call are in the same part.
        """
        del asks, values
        return None

    @property
    def unavailable(self) -> bool:
        """Whether calls are decided without the store now."""
        return False

    @property
    def unleased(self) -> Store:
        """The store without leases: what is written to it is visible to other processes at once."""
        return self

    def log_outages(self, logger: logging.Logger) -> None:
        """Log outages of this store, and failed corrections, with the logger of the caller."""
        self.outage_log = logger

    def report_outages(self, report: Callable[[str | None], object]) -> None:  # noqa: B027 - most stores do not notice
        """Call `report` in place of logging: with the reason when an outage starts, with None when it ends."""

    def limit_groups(self, group_of: GroupOf) -> None:  # noqa: B027 - most stores do not bound the number of keys
        """Limit the share of each group of keys, if the store bounds the number of its keys; see MemoryStore."""

    def limit_entries(self, max_entries: int) -> None:  # noqa: B027 - as above
        """Keep at most this many keys from now on, if the store bounds their number; see MemoryStore."""

    def clear(self) -> bool:
        """Forget the usage of all keys, if the store serves only this process; returns whether it did."""
        return False

    def outdated(self, *, drop: bool = False) -> dict[str, bool]:
        """Return what only older versions of tidegate use, and whether a process uses it now: then `drop` keeps it."""
        del drop
        return {}

    def handle_lost_corrections(self, handle: LostCorrection) -> None:
        """Call `handle` with the arguments of a correction whose task was cancelled, if the store has not answered it.

        The store may have made the correction. Without cancellation, the task receives StoreUnavailable instead.
        """
        self.lost_correction = handle

    def wake(self, asks: Sequence[Ask]) -> None:
        """Wake callers that wait for these keys: permits may be available."""
        for _, key, _ in asks:
            self.wait_queues.wake(key)

    def metrics(self) -> dict[str, int]:
        """Return counters for monitoring, by name."""
        return {}

    def close(self) -> None:  # noqa: B027 - most stores have nothing to close
        """Close connections and files."""

    async def close_async(self) -> None:
        """Close connections and files, without blocking the event loop."""
        self.close()


def check_ported(limit: Limit) -> None:
    """Check that a store which runs a port of the core knows the algorithm of a limit."""
    if not limit.rules.port_number:
        message = f"{limit.algorithm!r} is not available in this store: use a store in memory or SQLite"
        raise ConfigError(message, field="algorithm")
