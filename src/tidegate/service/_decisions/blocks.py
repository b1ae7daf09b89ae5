"""Blocks keys: a blocked key is denied until a given time, whatever its limits.

A block is a value in the store, with the time to live of the block: it ends by itself, outlives the process if the
store does, and applies in every process that shares the store. Each process keeps a copy of all blocks, so a decision
does not ask the store. One more value, the version, is replaced with each change. A process reads it once a second
(`refresh`), and reads the blocks again if it is another one. A block made in another process takes effect within two
seconds, a block made in this process at once.

A store in memory is not shared: this process keeps its blocks. A store without values cannot block keys.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._limiter.limiter import seconds
from tidegate._policy import normal_key
from tidegate._runtime.clock import TaskSignal
from tidegate.core import Limit
from tidegate.core._algorithms import View
from tidegate.core._bounds import SECOND
from tidegate.core._decision import Decision
from tidegate.errors import CollectionFull, ConfigError, StoreUnavailable
from tidegate.service._decisions.shared_store import is_shared, read_time
from tidegate.stores._outage.guarded_store import OUTAGE_ERRORS
from tidegate.stores._values import MAX_LISTED, Collection, Write

if TYPE_CHECKING:
    import builtins

    from tidegate._policy import Key
    from tidegate.stores import Store

    BlockKey = tuple[str, Key]  # a policy's name and a key

MILLISECOND: Final = SECOND // 1000
BLOCKS: Final = Collection("tidegate.blocks")
VERSION: Final = "version"  # the name of a value that changes with the blocks; the names of blocks are longer
UNREAD: Final = b""  # no version
BLOCKED_LIMITS: Final = (Limit(1, "1s", "fixed_window", name="blocked"),)  # the limit that a denial names
MAX_BLOCK_SECONDS: Final = 31 * 86_400  # seconds
DEFAULT_BLOCK_SECONDS: Final = 3600.0
MAX_BLOCKS: Final = MAX_LISTED - 1
CACHE_TTL: Final = SECOND


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
        self._shared = is_shared(self._store)
        self._known: dict[BlockKey, int] = {}  # until when, in steady time
        self.latest_end: int = 0  # when the last block ends, in steady time; 0: there is none
        self._read_at = -CACHE_TTL  # when the version was last read, in steady time
        self._version: bytes | None = None  # of the blocks that are known; None: the store has none
        self._changes = 0  # made by this process

    @property
    def active(self) -> bool:
        """Whether any key is blocked, as far as this process knows."""
        return self.latest_end > 0 and self.latest_end > self._clock.steady()

    # ---- checking ----------------------------------------------------------------------------------------------------

    def known(self, policy: str, key: Key) -> Decision | bool:
        """Check the copy: returns a denial, True if the key is not blocked, False if the store has to be asked."""
        if self._is_old:
            return False
        denial = self._find_known((policy, key))
        return True if denial is None else denial

    async def find(self, policy: str, key: Key) -> Decision | None:
        """Return a denial if the key is blocked."""
        if self._is_old:
            await self.refresh()
        return self._find_known((policy, key))

    def _find_known(self, block_key: BlockKey) -> Decision | None:
        left = self._known.get(block_key, 0) - self._clock.steady()
        if block_key not in self._known or left <= 0:
            return None
        return Decision.of_views(
            self._clock.ns() // 1000, BLOCKED_LIMITS, (View((0, left, left)),), within_limits=False
        )

    # ---- changing ----------------------------------------------------------------------------------------------------

    async def block(self, policy: str, key: Key, duration: float = DEFAULT_BLOCK_SECONDS) -> float:
        """Block a key for `duration` seconds from now, replacing an earlier block; return the duration as stored."""
        millis = max(1, round(check_duration(duration) * 1000))
        self._prune()
        if len(self._known) >= MAX_BLOCKS and (policy, key) not in self._known:
            raise _too_many_blocks()
        data = encode_block((policy, key))
        await self._write(Write(BLOCKS, block_name(data), data, millis * MILLISECOND))
        self._known[policy, key] = self._clock.steady() + millis * MILLISECOND
        self._prune()
        return millis / 1000

    async def unblock(self, policy: str, key: Key) -> None:
        """Remove the block of a key."""
        await self._write(Write(BLOCKS, block_name(encode_block((policy, key))), None))
        self._known.pop((policy, key), None)
        self._prune()

    async def _write(self, write: Write) -> None:
        """Change a block in the store, and the version in the same step."""
        if not self._shared:
            if not self._store.keeps_values:
                raise ConfigError(f"{type(self._store).__name__} keeps no values: it cannot block keys", field="policy")
            return
        version = Write(BLOCKS, VERSION, secrets.token_bytes(8), (MAX_BLOCK_SECONDS + 1) * SECOND)
        try:
            await self._store.apply_async("acquire", (), None, None, (write, version))
        except CollectionFull:
            raise _too_many_blocks() from None
        except OUTAGE_ERRORS as error:
            raise StoreUnavailable("the store is unavailable: the block was not changed") from error
        self._changes += 1
        self._version = UNREAD

    def list(self) -> list[Block]:
        """List the blocks that this process knows, by the time at which they end."""
        self._prune()
        now = self._clock.steady()
        found = sorted(self._known.items(), key=lambda pair: pair[1])
        return [Block(*block_key, (until - now) / SECOND) for block_key, until in found]

    async def find_all(self) -> builtins.list[Block]:
        """List the blocks in the store, by the time at which they end."""
        if self._is_old:
            await self.refresh()
        return self.list()

    def _prune(self) -> None:
        now = self._clock.steady()
        self._known = {block_key: until for block_key, until in self._known.items() if until > now}
        self.latest_end = max(self._known.values(), default=0)

    # ---- sharing -----------------------------------------------------------------------------------------------------

    @property
    def _is_old(self) -> bool:
        """Whether the version has to be read again."""
        return self._shared and self._clock.steady() - self._read_at >= CACHE_TTL

    async def refresh(self) -> None:
        """Read the blocks if they have changed; while the store is unavailable, known blocks apply."""
        if self._shared:
            self._read_at = self._clock.steady()
            with suppress(*OUTAGE_ERRORS):
                await self._read()

    async def _read(self) -> None:
        changes = self._changes
        stored = await self._store.get_value_async(BLOCKS, VERSION)
        version = None if stored is None else stored.data
        if version == self._version:
            return
        values = await self._store.list_values_async(BLOCKS)
        time = await read_time(self._store)
        if changes != self._changes:  # by this process, meanwhile: read again the next time
            return
        now = self._clock.steady()
        found = ((decode_block(value.data), value.ends - time) for name, value in values.items() if name != VERSION)
        self._known = {block_key: now + left for block_key, left in found if block_key is not None}
        self._version = version
        self._prune()

    async def watch(self) -> None:
        """Call `refresh` once a second, until cancelled."""
        signal = TaskSignal()
        while self._shared:
            await self.refresh()
            await self._clock.wait_async(signal, self._clock.steady() + CACHE_TTL)


def block_name(data: bytes) -> str:
    """Return the name of the value of an encoded block: keys may be longer than names."""
    return blake2b(data, digest_size=16).hexdigest()


def encode_block(block_key: BlockKey) -> bytes:
    """Write the policy and the key of a block as JSON."""
    return json.dumps(block_key, separators=(",", ":")).encode()


def decode_block(data: bytes) -> BlockKey | None:
    """Read a block; None if the data is not what `encode_block` writes."""
    try:
        policy, key = json.loads(data)
        return str(policy), normal_key(key)
    except (ValueError, TypeError, ConfigError):
        return None


def _too_many_blocks() -> ConfigError:
    return ConfigError(f"{MAX_BLOCKS} keys are already blocked: lower a policy's limits instead", field="key")


def check_duration(duration: object) -> float:
    """Check how long a block lasts."""
    found = seconds("seconds", duration)
    if not 0 < found <= MAX_BLOCK_SECONDS:
        raise ConfigError(f"must be above 0 and at most {MAX_BLOCK_SECONDS} seconds, not {duration!r}", field="seconds")
    return found
