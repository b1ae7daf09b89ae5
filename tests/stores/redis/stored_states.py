"""Reads the states that the script has stored, in the form of `core.codec`."""

from __future__ import annotations

from itertools import pairwise
from struct import unpack
from typing import TYPE_CHECKING

from tidegate.core._algorithms import ALGORITHMS
from tidegate.stores._redis.protocol import FORMAT, limit_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._policy import Key, Policy
    from tidegate.core._limit import Limit
    from tidegate.stores._redis import RedisStore

    Ask = Callable[..., object]

LOGS = [rules.port_number for rules in ALGORITHMS.values() if rules.logged]


def stored_states(
    store: RedisStore, get: Callable[[bytes], bytes | None], policy: Policy, key: Key
) -> dict[int, list[int]]:
    """Return the states of a key as `codec.dump` returns them, by the id of their limit."""
    name = store.protocol.encode_policy(policy).key(key)
    value = get(name) or b""
    numbers = [int(number) for number in unpack(f"<{len(value) // 8}d", value)]
    states, position = {}, 0
    while position < len(numbers):
        count, limit = numbers[position] - FORMAT, numbers[position + 1]
        state = list(numbers[position + 4 : position + 4 + count])
        if limit % 8 == ALGORITHMS["token_bucket"].port_number:
            del state[3:5]  # rate and capacity of the limit that wrote it
        elif limit % 8 in LOGS:
            head, tail, base = state[:3]
            log = get(name + b"%%l%x" % limit) or b""
            rows = unpack(f"<{2 * (tail - head)}q", log[head * 16 : tail * 16])
            sums = [base, *rows[1::2]]
            costs = [after - before for before, after in pairwise(sums)]
            assert state[3:] == [rows[0], rows[-2], rows[-1]], "first, last and total must match the log"
            state = [number for row in zip(rows[::2], costs, strict=True) for number in row]
        states[limit] = state
        position += 4 + count
    return states


def id_of(limit: Limit) -> int:
    return limit_id(limit)
