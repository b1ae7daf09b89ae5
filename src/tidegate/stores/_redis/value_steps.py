"""Encodes operations on values for core.lua, and decodes what it read.

A ValueStep is the part of a call that concerns values: the writes beside its asks, or one read. core.lua describes the
format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from struct import Struct
from typing import TYPE_CHECKING, Final

from tidegate.errors import CollectionFull, ValueConflict
from tidegate.stores._values import Anything, Collection, Value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.errors import RateLimitError
    from tidegate.stores._values import Write

    KeysOf = Callable[[Collection, str], list[bytes]]

PUT, DELETE, GET, LIST, CONDITION = 1, 2, 3, 4, 5
ABSENT, ANY = -1, -2  # in place of the length of what is expected
OPERATION: Final = Struct("<6d")  # the kind, the key, the time to live; the lengths of name, expected and data
TIMES: Final = Struct("<2d")  # stored in front of the data: when it was written, and when it ends
CONFLICT: Final = 3  # the status of a call with a write whose condition does not hold
KEY_REFUSED: Final = 5  # the status of a call with a key that cannot be used
FIRST_PAGE: Final = b"0"
OPERATION_COST: Final = 2  # in units of `Algorithm.port_cost`
BYTES_PER_COST: Final = 4096
PAGE_COST: Final = 64


class Reply:
    """A reply of core.lua, as numbers and as bytes."""

    __slots__ = ("_bytes", "numbers")

    def __init__(self, data: bytes, numbers: Sequence[int]) -> None:
        """Read `data`, whose numbers were unpacked already."""
        self._bytes = data
        self.numbers: Sequence[int] = numbers

    def read_bytes(self, position: int) -> tuple[bytes, int]:
        """Return the bytes at a position, and the position after them; both count numbers."""
        length = self.numbers[position]
        start = 8 * (position + 1)
        return self._bytes[start : start + length], position + 1 + (length + 7) // 8

    def read_value(self, position: int) -> tuple[Value | None, int]:
        """Return the value at a position, and the position after it."""
        stored, position = self.read_bytes(position)
        return read_stored(stored) if stored else None, position


class ValueStep(ABC):
    """Operations on values, performed together with the asks of a call unless these are denied."""

    __slots__ = ("cost",)

    writes: Sequence[Write] = ()
    cost: int

    @abstractmethod
    def keys(self, keys_of: KeysOf) -> list[bytes]:
        """Return keys of all slots that are concerned."""

    @abstractmethod
    def encode(self, keys: list[bytes], keys_of: KeysOf) -> bytes:
        """Encode the operations; their keys are added to `keys`, which core.lua receives in reverse order."""

    def receive(self, reply: Reply, position: int) -> int:
        """Keep what was read; return the position after it."""
        del reply
        return position

    def refusal(self, reply: Reply, position: int) -> tuple[RateLimitError, int]:
        """Return the error of a step that was refused, from the answer at a position, and the position after it."""
        raise NotImplementedError


class WriteValues(ValueStep):
    """Writes, with their conditions."""

    __slots__ = ("writes",)

    def __init__(self, writes: Sequence[Write]) -> None:
        """Write these, which were checked."""
        self.writes: Sequence[Write] = writes
        size = sum(len(part) for write in writes for part in (write.data, write.expected) if isinstance(part, bytes))
        self.cost: int = OPERATION_COST * len(writes) + size // BYTES_PER_COST

    def keys(self, keys_of: KeysOf) -> list[bytes]:
        """Return the first key of each write."""
        return [keys_of(write.collection, write.name)[0] for write in self.writes]

    def encode(self, keys: list[bytes], keys_of: KeysOf) -> bytes:
        """Encode the writes."""
        places: dict[bytes, int] = {}
        parts = []
        for collection, name, data, ttl, expected in self.writes:
            own = keys_of(collection, name)
            if own[0] not in places:
                places[own[0]] = len(keys) + 1
                keys.extend(own)
            condition = ANY if isinstance(expected, Anything) else ABSENT if expected is None else expected
            field = field_of(collection, name)
            kind = DELETE if data is None else PUT if isinstance(data, bytes) else CONDITION
            content = data if isinstance(data, bytes) else b""
            parts.append(encode_operation(kind, places[own[0]], field, ttl, condition, content))
        return b"".join(parts)

    def refusal(self, reply: Reply, position: int) -> tuple[RateLimitError, int]:
        """Return a ValueConflict or CollectionFull."""
        status, number = reply.numbers[position : position + 2]
        write = self.writes[number - 1]
        if status != CONFLICT:
            return CollectionFull(write), position + 2
        found, position = reply.read_value(position + 2)
        return ValueConflict(write, found), position


class ReadValue(ValueStep):
    """Reads one value."""

    __slots__ = ("_place", "found")

    def __init__(self, collection: Collection, name: str) -> None:
        """Read this value."""
        self._place = collection, name
        self.found: Value | None = None
        self.cost: int = OPERATION_COST

    def keys(self, keys_of: KeysOf) -> list[bytes]:
        """Return the keys of the value."""
        return keys_of(*self._place)

    def encode(self, keys: list[bytes], keys_of: KeysOf) -> bytes:
        """Encode the read."""
        place = len(keys) + 1
        keys.extend(self.keys(keys_of))
        return encode_operation(GET, place, field_of(*self._place))

    def receive(self, reply: Reply, position: int) -> int:
        """Keep the value."""
        self.found, position = reply.read_value(position)
        return position


class ReadPage(ValueStep):
    """Reads some values of a listed collection; `cursor` is where the next page begins, None after the last."""

    __slots__ = ("_collection", "_cursor", "cursor", "found")

    def __init__(self, collection: Collection, cursor: bytes = FIRST_PAGE) -> None:
        """Read the page that begins at `cursor`."""
        self._collection = collection
        self._cursor = cursor
        self.cursor: bytes | None = None
        self.found: dict[str, Value] = {}
        self.cost = PAGE_COST

    def keys(self, keys_of: KeysOf) -> list[bytes]:
        """Return the keys of the collection."""
        return keys_of(self._collection, "")

    def encode(self, keys: list[bytes], keys_of: KeysOf) -> bytes:
        """Encode the read."""
        place = len(keys) + 1
        keys.extend(self.keys(keys_of))
        return encode_operation(LIST, place, self._cursor)

    def receive(self, reply: Reply, position: int) -> int:
        """Keep the values, and where the next page begins."""
        cursor, position = reply.read_bytes(position)
        self.cursor = None if cursor == FIRST_PAGE else cursor
        count, position = reply.numbers[position], position + 1
        for _ in range(count):
            name, position = reply.read_bytes(position)
            stored, position = reply.read_bytes(position)
            self.found[name.decode("utf-8", "surrogatepass")] = read_stored(stored)
        return position


def encode_operation(
    kind: int, place: int, field: bytes, ttl: int = 0, expected: bytes | int = ANY, data: bytes = b""
) -> bytes:
    """Encode one operation on the key at a place among the keys."""
    condition, length = (b"", expected) if isinstance(expected, int) else (expected, len(expected))
    return OPERATION.pack(kind, place, ttl, len(field), length, len(data)) + field + condition + data


def field_of(collection: Collection, name: str) -> bytes:
    """Return the field of a value in the hash of its collection; empty for a value that has its own key."""
    return name.encode("utf-8", "surrogatepass") if collection.listed else b""


def read_stored(stored: bytes) -> Value:
    """Return a value from its stored form."""
    written, ends = TIMES.unpack_from(stored)
    return Value(stored[TIMES.size :], int(written), int(ends))
