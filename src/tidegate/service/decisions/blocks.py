"""Blocks keys: a blocked key is denied until a given time, whatever its limits.

The store holds a block as a bucket of its own, which refills by one permit each millisecond and is put into debt by as
many milliseconds as the block lasts. So a block ends by itself, outlives the process if the store does, and applies in
every process that shares the store. Reading that bucket for every call would double the cost of a call. Therefore a
second bucket, in debt while any block lasts, shows whether there are blocks at all. Each process reads it once a second
(`refresh`), and caches for a second whether a key is blocked. A block made in another process takes effect within two
seconds, a block made in this process at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.clock import TaskSignal
from tidegate.core import Limit
from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.limiter import seconds
from tidegate.policy import Policy, normal_key

if TYPE_CHECKING:
    import builtins
    from collections.abc import Awaitable, Callable, Iterable

    from tidegate.policy import Key
    from tidegate.stores import Store

    BlockKey = tuple[str, Key]  # a policy's name and a key
    FindBlocks = Callable[[], Awaitable[Iterable[BlockKey]]]

MILLISECOND: Final = SECOND // 1000
# While the store is unavailable, no new block is found; keys that this process knows to be blocked stay blocked.
BLOCK_POLICY: Final = Policy("tidegate.blocked", (Limit(1000, "1s", burst=1, name="blocked"),), on_store_error="allow")
ANY_BLOCK_KEY: Final[BlockKey] = ("any", ())  # the bucket that shows whether there are blocks: no key has zero parts
BLOCKED_LIMITS: Final = (Limit(1, "1s", "fixed_window", name="blocked"),)  # the limit that a denial names
MAX_BLOCK_SECONDS: Final = 31 * 86_400  # seconds
DEFAULT_BLOCK_SECONDS: Final = 3600.0
MAX_REMEMBERED: Final = 10_000  # blocked keys, and unblocked keys, that one process caches
MAX_CHECKED: Final = 500  # blocks that the store is asked about to list them all
CACHE_TTL: Final = SECOND


class KnownBlock(NamedTuple):
    """A cached block: when it ends, and when the store was last asked about it, both in steady time."""

    until: int
    checked_at: int


class Block(NamedTuple):
    """A block, as `list` returns it."""

    policy: str
    key: Key
    seconds: float


class Blocks:
    """The blocks of one Decider."""

    def __init__(self, store: Store) -> None:
        """Keep the blocks in this store, bypassing leases."""
        self._store = store.unleased
        self._clock = self._store.clock
        self._unshared = self._store.instant  # in memory: no other process can have made a block
        self._known: dict[BlockKey, KnownBlock] = {}
        self._free: dict[BlockKey, int] = {}  # until when a key is known not to be blocked
        self._shared_until = 0  # until when there may be blocks that other processes made
        self._latest_end = 0  # when the last block ends
        self.known_elsewhere: Callable[[], Iterable[BlockKey]] = tuple  # the blocks of other workers of the service
        self.find_elsewhere: FindBlocks = _find_none  # the blocks of other services on the store

    @property
    def active(self) -> bool:
        """Whether any key may be blocked."""
        return self._latest_end > 0 and self._latest_end > self._clock.steady()

    # ---- checking ----------------------------------------------------------------------------------------------------

    def known(self, policy: str, key: Key) -> Decision | bool:
        """Check the cache: returns a denial, True if the key is not blocked, False if the store has to be asked."""
        block_key, now = (policy, key), self._clock.steady()
        found = self._known.get(block_key)
        if found is not None:
            if found.until <= now:
                del self._known[block_key]
            elif self._unshared or now - found.checked_at < CACHE_TTL:
                return self._denial(found.until - now)
            else:
                return False
        return self._unshared or self._shared_until <= now or self._free.get(block_key, 0) > now

    async def find(self, policy: str, key: Key) -> Decision | None:
        """Return a denial if the key is blocked."""
        cached = self.known(policy, key)
        if not isinstance(cached, bool):
            return cached
        return None if cached else await self._peek((policy, key))

    async def _peek(self, block_key: BlockKey) -> Decision | None:
        decision = await self._apply("peek", block_key, 1)
        now = self._clock.steady()
        if isinstance(decision, LocalDecision):
            known = self._known.get(block_key)
            return None if known is None or known.until <= now else self._denial(known.until - now)
        if decision.allowed:
            self._known.pop(block_key, None)
            if len(self._free) >= MAX_REMEMBERED:
                self._free.clear()
            self._free[block_key] = now + CACHE_TTL
            return None
        self._remember(block_key, decision.retry)
        return self._denial(decision.retry)

    def _denial(self, left: int) -> Decision:
        return Decision.of_views(self._clock.ns() // 1000, BLOCKED_LIMITS, ((0, left, left),), within_limits=False)

    # ---- changing ----------------------------------------------------------------------------------------------------

    async def block(self, policy: str, key: Key, duration: float = DEFAULT_BLOCK_SECONDS) -> float:
        """Block a key for `duration` seconds from now, replacing an earlier block; return the duration as stored."""
        duration = check_duration(duration)
        self._prune()
        if len(self._known) >= MAX_REMEMBERED:
            raise ConfigError(
                f"{MAX_REMEMBERED} keys are already blocked: lower a policy's limits instead", field="key"
            )
        millis = max(1, round(duration * 1000))
        if not self._unshared:
            left = (await self._apply_or_raise("peek", ANY_BLOCK_KEY, 1)).retry // MILLISECOND
            await self._apply_or_raise("reset", (policy, key), 0)
            await self._apply_or_raise("adjust", (policy, key), millis)
            if millis > left:  # two at once may add up: then all processes look for blocks longer than necessary
                await self._apply_or_raise("adjust", ANY_BLOCK_KEY, millis - left)
            self._shared_until = max(self._shared_until, self._clock.steady() + millis * MILLISECOND)
        self._remember((policy, key), millis * MILLISECOND)
        self._prune()
        return millis / 1000

    async def unblock(self, policy: str, key: Key) -> None:
        """Remove the block of a key."""
        if not self._unshared:
            await self._apply_or_raise("reset", (policy, key), 0)
        self._known.pop((policy, key), None)
        self._prune()

    def list(self) -> list[Block]:
        """List the blocks that this process made or found, by the time at which they end."""
        self._prune()
        now = self._clock.steady()
        found = sorted(self._known.items(), key=lambda pair: pair[1].until)
        return [Block(*block_key, (known.until - now) / SECOND) for block_key, known in found]

    async def find_all(self) -> builtins.list[Block]:
        """List the blocks that this or another worker or service knows; the store is asked whether they still last."""
        if not self._unshared:
            found = dict.fromkeys((*self._known, *self.known_elsewhere(), *await self.find_elsewhere()))
            now = self._clock.steady()
            current = {key for key, known in self._known.items() if now - known.checked_at < CACHE_TTL}
            for block_key in [each for each in found if each not in current][:MAX_CHECKED]:
                await self._peek(block_key)
        return self.list()

    def _remember(self, block_key: BlockKey, micros: int) -> None:
        now = self._clock.steady()
        self._free.pop(block_key, None)
        if block_key in self._known or len(self._known) < MAX_REMEMBERED:
            self._known[block_key] = KnownBlock(now + micros, now)

    def _prune(self) -> None:
        now = self._clock.steady()
        self._known = {block_key: known for block_key, known in self._known.items() if known.until > now}
        self._latest_end = max((self._shared_until, *(known.until for known in self._known.values())))

    # ---- sharing -----------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Check whether other processes have made blocks."""
        if self._unshared:
            return
        decision = await self._apply("peek", ANY_BLOCK_KEY, 1)
        if not isinstance(decision, LocalDecision):
            self._shared_until = 0 if decision.allowed else self._clock.steady() + decision.retry
            self._prune()

    async def watch(self) -> None:
        """Call `refresh` once a second, until cancelled."""
        signal = TaskSignal()
        while not self._unshared:
            await self.refresh()
            await self._clock.wait_async(signal, self._clock.steady() + CACHE_TTL)

    async def _apply(self, verb: str, block_key: BlockKey, cost: int) -> Decision:
        policy, key = block_key
        parts = (policy, key) if isinstance(key, str) else (policy, *key)
        return (await self._store.apply_async(verb, ((BLOCK_POLICY, normal_key(parts), (cost,)),)))[0]

    async def _apply_or_raise(self, verb: str, block_key: BlockKey, cost: int) -> Decision:
        """Apply a verb; raise if the store is unavailable."""
        decision = await self._apply(verb, block_key, cost)
        if isinstance(decision, LocalDecision):
            raise StoreUnavailable("the store is unavailable: the block was not changed")
        return decision


async def _find_none() -> Iterable[BlockKey]:
    return ()


def check_duration(duration: object) -> float:
    """Check how long a block lasts."""
    found = seconds("seconds", duration)
    if not 0 < found <= MAX_BLOCK_SECONDS:
        raise ConfigError(f"must be above 0 and at most {MAX_BLOCK_SECONDS} seconds, not {duration!r}", field="seconds")
    return found
