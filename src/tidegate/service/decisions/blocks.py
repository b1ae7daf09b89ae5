"""Keys that are denied whatever their limits say, until a given time.

A block is counted by the store like everything else: a bucket of its own that refills by a permit each millisecond and
is put into debt by as many milliseconds as the block lasts. So it ends by itself, outlives the process if the store
does, and holds in every process that shares the store. Asking for it with every call would double their price; another
bucket, in debt while any block lasts, tells whether there is anything to ask for. Each process looks at that once a
second (`refresh`), and remembers for a second what it was told of a key: so a block made elsewhere takes hold within
two seconds, one made here at once.
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
from tidegate.stores.lease import LeasedStore

if TYPE_CHECKING:
    from tidegate.policy import Key
    from tidegate.stores import Store

    Place = tuple[str, Key]

MILLISECOND: Final = SECOND // 1000
# A lost store blocks nobody new: whom this process knows to be blocked stays so.
BLOCK_POLICY: Final = Policy("tidegate.blocked", (Limit(1000, "1s", burst=1, name="blocked"),), on_store_error="allow")
ANY_BLOCK_KEY: Final[Place] = ("any", ())  # the bucket that tells whether there are blocks: no key is without parts
BLOCKED_LIMITS: Final = (Limit(1, "1s", "fixed_window", name="blocked"),)  # what a denial names
MAX_BLOCK_SECONDS: Final = 31 * 86_400  # seconds
DEFAULT_BLOCK_SECONDS: Final = 3600.0
MAX_REMEMBERED: Final = 10_000  # blocks, and keys that were found free, that one process remembers
FRESH_FOR: Final = SECOND


class KnownBlock(NamedTuple):
    """A block that this process knows of: when it ends, and when the store said so, both in steady time."""

    until: int
    told: int


class Block(NamedTuple):
    """A block, as it is listed."""

    policy: str
    key: Key
    seconds: float


class Blocks:
    """The blocks of one desk."""

    def __init__(self, store: Store) -> None:
        """Keep them in the store; a lease has nothing to do with them."""
        self._store = store.inner if isinstance(store, LeasedStore) else store
        self._clock = self._store.clock
        self._alone = self._store.instant  # memory: nobody else can have made one
        self._known: dict[Place, KnownBlock] = {}
        self._free: dict[Place, int] = {}  # until when a key need not be asked for again
        self._elsewhere = 0  # until when there may be blocks that others made
        self._last = 0  # when the last block ends

    @property
    def active(self) -> bool:
        """Whether anybody may be blocked."""
        return self._last > 0 and self._last > self._clock.steady()

    # ---- asking ------------------------------------------------------------------------------------------------------

    def known(self, policy: str, key: Key) -> Decision | bool:
        """Tell what is known of a key: a denial, True: it is free; False: the store has to be asked."""
        place, now = (policy, key), self._clock.steady()
        found = self._known.get(place)
        if found is not None:
            if found.until <= now:
                del self._known[place]
            elif self._alone or now - found.told < FRESH_FOR:
                return self._denial(found.until - now)
            else:
                return False
        return self._alone or self._elsewhere <= now or self._free.get(place, 0) > now

    async def find(self, policy: str, key: Key) -> Decision | None:
        """Give the denial of a key that is blocked."""
        said = self.known(policy, key)
        if not isinstance(said, bool):
            return said
        return None if said else await self._ask((policy, key))

    async def _ask(self, place: Place) -> Decision | None:
        decision = await self._apply("peek", place, 1)
        now = self._clock.steady()
        if isinstance(decision, LocalDecision):
            known = self._known.get(place)
            return None if known is None or known.until <= now else self._denial(known.until - now)
        if decision.allowed:
            self._known.pop(place, None)
            if len(self._free) >= MAX_REMEMBERED:
                self._free.clear()
            self._free[place] = now + FRESH_FOR
            return None
        self._remember(place, decision.retry)
        return self._denial(decision.retry)

    def _denial(self, left: int) -> Decision:
        return Decision((False, self._clock.ns() // 1000, BLOCKED_LIMITS, ((0, left, left),), None))

    # ---- changing ----------------------------------------------------------------------------------------------------

    async def block(self, policy: str, key: Key, lasting: float = DEFAULT_BLOCK_SECONDS) -> float:
        """Deny a key for so many seconds from now, whatever it was before; give the seconds."""
        lasting = check_lasting(lasting)
        self._tidy()
        if len(self._known) >= MAX_REMEMBERED:
            raise ConfigError(
                f"{MAX_REMEMBERED} keys are blocked already: lower a policy's limits instead", field="key"
            )
        millis = max(1, round(lasting * 1000))
        if not self._alone:
            left = (await self._told("peek", ANY_BLOCK_KEY, 1)).retry // MILLISECOND
            await self._told("reset", (policy, key), 0)
            await self._told("adjust", (policy, key), millis)
            if millis > left:  # two at once may add up: then everybody looks for a while longer
                await self._told("adjust", ANY_BLOCK_KEY, millis - left)
            self._elsewhere = max(self._elsewhere, self._clock.steady() + millis * MILLISECOND)
        self._remember((policy, key), millis * MILLISECOND)
        self._tidy()
        return millis / 1000

    async def unblock(self, policy: str, key: Key) -> None:
        """Deny a key no longer."""
        if not self._alone:
            await self._told("reset", (policy, key), 0)
        self._known.pop((policy, key), None)
        self._tidy()

    def list(self) -> list[Block]:
        """List the blocks that were made here or that somebody met here, the one that ends first at the beginning."""
        self._tidy()
        now = self._clock.steady()
        found = sorted(self._known.items(), key=lambda pair: pair[1].until)
        return [Block(*place, (known.until - now) / SECOND) for place, known in found]

    def _remember(self, place: Place, micros: int) -> None:
        now = self._clock.steady()
        self._free.pop(place, None)
        if place in self._known or len(self._known) < MAX_REMEMBERED:
            self._known[place] = KnownBlock(now + micros, now)

    def _tidy(self) -> None:
        now = self._clock.steady()
        self._known = {place: known for place, known in self._known.items() if known.until > now}
        self._last = max((self._elsewhere, *(known.until for known in self._known.values())))

    # ---- with others -------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Look whether anybody has made blocks."""
        if self._alone:
            return
        decision = await self._apply("peek", ANY_BLOCK_KEY, 1)
        if not isinstance(decision, LocalDecision):
            self._elsewhere = 0 if decision.allowed else self._clock.steady() + decision.retry
            self._tidy()

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        signal = TaskSignal()
        while not self._alone:
            await self.refresh()
            await self._clock.wait_async(signal, self._clock.steady() + FRESH_FOR)

    async def _apply(self, verb: str, place: Place, cost: int) -> Decision:
        policy, key = place
        parts = (policy, key) if isinstance(key, str) else (policy, *key)
        return (await self._store.apply_async(verb, ((BLOCK_POLICY, normal_key(parts), (cost,)),)))[0]

    async def _told(self, verb: str, place: Place, cost: int) -> Decision:
        """Ask the store, which has to be there."""
        decision = await self._apply(verb, place, cost)
        if isinstance(decision, LocalDecision):
            raise StoreUnavailable("the store cannot be told of a block now")
        return decision


def check_lasting(lasting: object) -> float:
    """Take how long a block lasts."""
    found = seconds("seconds", lasting)
    if not 0 < found <= MAX_BLOCK_SECONDS:
        raise ConfigError(f"must be above 0 and at most {MAX_BLOCK_SECONDS} seconds, not {lasting!r}", field="seconds")
    return found
