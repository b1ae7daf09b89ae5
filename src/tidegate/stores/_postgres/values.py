"""The statements that read and write small values, and their parameters and results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.errors import CollectionFull, ValueConflict
from tidegate.stores._postgres.call import encode_array, encode_name, quote
from tidegate.stores._values import MAX_LISTED, Anything, Keep, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg.pq.abc import PGresult

    from tidegate.stores._values import Collection, Write

APPLY: Final = (
    b"select * from apply_with_values($1::text[], $2::int[], $3::text[], $4::text[], $5::int[], "
    b"$6::limit_t[], $7::bigint[], $8::bigint[], $9::bigint[], $10::int, $11::text[], $12::bytea[], "
    b"$13::bytea[], $14::bigint[], $15::int[], $16::bytea[], $17::int[])"
)
GET: Final = (
    b"select data, written, ends from stored_values "
    b"where collection = $1 and name = $2::bytea and ends > coalesce($3::bigint, server_time())"
)
LIST: Final = (
    b"select name, data, written, ends from stored_values where collection = $1 and name > $2::bytea "
    b"and ends > coalesce($3::bigint, server_time()) order by name limit $4::int"
)
PAGE_SIZE: Final = 1000  # values read in one step
NO_CONDITION: Final = 0
ABSENT: Final = 1
EQUAL: Final = 2
KEEP_TTL: Final = -1  # in place of the time to live of a value that is left as it is


def encode_collection(collection: Collection) -> str:
    """Return the name of a collection as the server stores it."""
    return encode_name(collection.identity, escaped=True)


def encode_value_name(name: str) -> bytes:
    """Return the name of a value as a parameter."""
    return b"\\x" + name.encode("utf-8", "surrogatepass").hex().encode()


def encode_writes(writes: Sequence[Write]) -> list[bytes]:
    """Return the parameters that follow those of `apply`."""
    conditions = [
        NO_CONDITION if isinstance(each.expected, Anything) else ABSENT if each.expected is None else EQUAL
        for each in writes
    ]
    return [
        encode_array(quote(encode_collection(write.collection)) for write in writes),
        encode_array(quote(encode_value_name(write.name).decode()) for write in writes),
        encode_array(_bytea(write.data) for write in writes),
        encode_array(str(KEEP_TTL if isinstance(write.data, Keep) else write.ttl) for write in writes),
        encode_array(map(str, conditions)),
        encode_array(_bytea(write.expected) for write in writes),
        encode_array(str(MAX_LISTED if write.collection.listed else 0) for write in writes),
    ]


def _bytea(data: bytes | Anything | Keep | None) -> str:
    return quote(f"\\x{data.hex()}") if isinstance(data, bytes) else "NULL"


def check_written(writes: Sequence[Write], result: PGresult) -> list[int]:
    """Return the answers to the asks of a step; raise ValueConflict or CollectionFull if it was refused."""
    failed = int(result.get_value(0, 1) or 0)
    if failed < 0:
        raise CollectionFull(writes[-failed - 1])
    if failed > 0:
        raise ValueConflict(writes[failed - 1], read_value(result, 0, 2))
    answers = result.get_value(0, 0)
    return [int(number) for number in answers[1:-1].split(b",")] if answers else []


def read_value(result: PGresult, row: int, column: int = 0) -> Value | None:
    """Read a value from three columns of a row."""
    data, written, ends = (result.get_value(row, column + offset) for offset in range(3))
    return None if data is None else Value(bytes.fromhex(data[2:].decode()), int(written or 0), int(ends or 0))


def read_page(result: PGresult) -> dict[str, Value]:
    """Read the values of a page, by name."""
    found: dict[str, Value] = {}
    for row in range(result.ntuples):
        name, value = result.get_value(row, 0), read_value(result, row, 1)
        if name is not None and value is not None:
            found[bytes.fromhex(name[2:].decode()).decode("utf-8", "surrogatepass")] = value
    return found
