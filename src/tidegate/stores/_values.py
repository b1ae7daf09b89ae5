"""Small durable values: byte strings with a time to live, written in the same atomic step as a charge.

A `Collection` names values that belong together; a value has a name in it. `Store.apply` takes `Write`s beside its
asks: if a condition of a write fails, the whole step is refused with ValueConflict; if an ask is denied, nothing is
written. So an idempotency key, an open batch or the mark of a stopped run is written if and only if its call was
charged. A write with KEEP changes nothing and is only a condition: a call that is charged only while a run is open.
`Store.get_value`, `put_value`, `delete_value` and `list_values` are the simple cases.

A value ends at its time to live, by the clock of the store. Names are opaque. A `listed` collection has an index, so
that it can be read as a whole; it has at most MAX_LISTED values, and all of them are in one slot of a Redis Cluster.
The values of other collections are spread over the slots, and there may be any number of them. A step of a cluster has
one slot, so a collection whose values are written together with charges names a policy and a key: `beside`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._policy.key import Key, join_key
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BYTES: Final = 65_536  # of one value
MAX_NAME: Final = 512  # bytes of the name of a value or of a collection, in UTF-8
MAX_WRITES: Final = 64  # of one step
MAX_LISTED: Final = 10_000  # values of a listed collection
MAX_TTL: Final = 3660 * 86_400 * SECOND


class Collection(NamedTuple):
    """Values that belong together.

    `beside` is the name of a policy and a key: the values are in the same slot of a Redis Cluster as this key. It is
    part of the identity of the collection.
    """

    name: str
    beside: tuple[str, Key] | None = None
    listed: bool = True

    @property
    def identity(self) -> str:
        """The complete name, as one string; collections that differ never have the same."""
        return _identity(self)


@functools.lru_cache(1024)
def _identity(collection: Collection) -> str:
    name, beside, listed = collection
    kind = "l" if listed else "u"
    return join_key((kind, name) if beside is None else (kind, name, beside[0], join_key(beside[1])))


class Value(NamedTuple):
    """A stored value; the times are microseconds since 1970 by the clock of the store."""

    data: bytes
    written: int
    ends: int


class Anything:
    """The condition that always holds."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the name of the only instance."""
        return "ANYTHING"


ANYTHING: Final = Anything()


class Keep:
    """What a write does that only has a condition: it changes nothing."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the name of the only instance."""
        return "KEEP"


KEEP: Final = Keep()


class Write(NamedTuple):
    """A value to write in the same step as a charge.

    `data` None deletes the value; KEEP leaves it as it is, so that the write is only a condition. `expected` is the
    condition: None, that the name has no value yet; bytes, that its value has exactly these; ANYTHING, none. `ttl` is
    in microseconds.
    """

    collection: Collection
    name: str
    data: bytes | Keep | None
    ttl: int = 0
    expected: bytes | Anything | None = ANYTHING

    def holds(self, found: Value | None) -> bool:
        """Return whether the condition holds."""
        if isinstance(self.expected, Anything):
            return True
        return (None if found is None else found.data) == self.expected


def changes_values(writes: Sequence[Write]) -> bool:
    """Return whether writes change values: not if all of them only have a condition."""
    return any(not isinstance(write.data, Keep) for write in writes)


def check_writes(writes: Sequence[Write]) -> None:
    """Check the bounds of the writes of one step; raises ConfigError."""
    if len(writes) > MAX_WRITES:
        raise ConfigError(f"a step writes {len(writes)} values; at most {MAX_WRITES} are allowed", field="writes")
    if len({(write.collection, write.name) for write in writes}) < len(writes):
        raise ConfigError("a step writes the same value twice", field="writes")
    for write in writes:
        check_name(write.collection, write.name)
        if write.data is None or isinstance(write.data, Keep):
            continue
        if not (isinstance(write.data, bytes) and len(write.data) <= MAX_BYTES):
            size = f"{len(write.data)} bytes" if isinstance(write.data, bytes) else type(write.data).__name__
            raise ConfigError(f"a value is bytes, at most {MAX_BYTES}, not {size}", field=write.collection.name)
        if not 0 < write.ttl <= MAX_TTL:
            message = f"the time to live of a value is above 0 and at most {MAX_TTL} us, not {write.ttl!r}"
            raise ConfigError(message, field=write.collection.name)


def check_name(collection: Collection, name: str) -> None:
    """Check the name of a value; raises ConfigError."""
    for text in (collection.name, name):
        if not isinstance(text, str) or not 0 < len(text.encode("utf-8", "surrogatepass")) <= MAX_NAME:
            message = f"the name of a value is a string of 1 to {MAX_NAME} bytes, not {text!r:.80}"
            raise ConfigError(message, field="writes")


def check_listed(collection: Collection) -> None:
    """Check that a collection can be listed; raises ConfigError."""
    if not collection.listed:
        raise ConfigError(
            f"the collection {collection.name!r} has no index: create it with listed=True", field="values"
        )
