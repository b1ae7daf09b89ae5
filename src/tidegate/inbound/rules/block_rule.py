"""Blocks for clients that are denied too often: `block_after: 20/1m`, `block_for: 10m`."""

from __future__ import annotations

from typing import Final, NamedTuple

from tidegate.core import Limit
from tidegate.core.limit import parse_period
from tidegate.errors import ConfigError
from tidegate.policy import Policy

DENIALS_POLICY: Final = "tidegate-denials"  # counts the denials of each client
BLOCKS_POLICY: Final = "tidegate-blocks"  # has one permit per client, taken while the client is blocked


class BlockRule(NamedTuple):
    """Blocks a client for some time after a number of denials within a period.

    `denials` and `blocks` are policies, so that the store keeps them and all processes that share it agree: the denial
    that finds no permit in `denials` takes the only permit of `blocks`, and a client is blocked until that permit is
    free again.
    """

    denials: Policy
    blocks: Policy


def read_block(after: object, duration: object) -> BlockRule | None:
    """Read `block_after` and `block_for`; None if both are None. Raises ConfigError."""
    if after is None and duration is None:
        return None
    if after is None:
        raise ConfigError("requires block_after, the number of denials per period such as '20/1m'", field="block_for")
    if duration is None:
        raise ConfigError("requires block_for, a period such as '10m'", field="block_after")
    if not isinstance(after, str):
        raise ConfigError(f"expected denials per period such as '20/1m', not {after!r}", field="block_after")
    try:
        limit = Limit.parse(after)
    except ConfigError as error:
        raise ConfigError(f"expected denials per period such as '20/1m': {error}", field="block_after") from None
    try:
        length = parse_period(duration)  # type: ignore[arg-type]  # it checks the type
    except ConfigError as error:
        raise ConfigError(f"expected a period such as '10m': {error}", field="block_for") from None
    denials = Limit(limit.quota, limit.period, "sliding_log", name="block_after")
    blocks = Limit(1, length / 1_000_000, "sliding_log", name="block_for")
    return BlockRule(
        Policy(DENIALS_POLICY, denials, on_store_error="allow"), Policy(BLOCKS_POLICY, blocks, on_store_error="allow")
    )
