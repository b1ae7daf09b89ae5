"""Blocks for clients that are denied too often: `block_after: 20/1m`, `block_for: 10m`.

Several rules are a mapping: `block_after: {10/1m: 5m, 100/1h: 1d}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from tidegate._policy import Policy
from tidegate.core import Limit
from tidegate.core._limit import parse_period
from tidegate.errors import ConfigError

DENIALS_POLICY: Final = "tidegate-denials"  # counts the denials of each client
BLOCKS_POLICY: Final = "tidegate-blocks"  # has one permit per client and rule, taken while the client is blocked


class BlockRules(NamedTuple):
    """Blocks a client for some time after a number of denials within a period; there may be several such rules.

    `denials` and `blocks` are policies, so that the store keeps them and all processes that share it agree: the denial
    that finds no permit in one of `denials` takes the only permit of the limit of `blocks` with the same index. A
    client is blocked until all these permits are free again.
    """

    denials: tuple[Policy, ...]
    blocks: Policy  # the unit of each limit differs, so that each can be taken by itself

    def at(self, name: str) -> BlockRules:
        """Return these rules with counts of their own, for a limit whose count has this name."""
        denials = tuple(replace(policy, name=f"{name}:{policy.name}") for policy in self.denials)
        return BlockRules(denials, replace(self.blocks, name=f"{name}:{self.blocks.name}"))


def read_block(after: object, duration: object) -> BlockRules | None:
    """Read `block_after` and `block_for`; None if both are None. Raises ConfigError."""
    if after is None and duration is None:
        return None
    if after is None:
        raise ConfigError("requires block_after, the number of denials per period such as '20/1m'", field="block_for")
    if isinstance(after, Mapping):
        if duration is not None:
            raise ConfigError(
                "cannot be combined with a mapping in block_after, which has the times", field="block_for"
            )
        return _make_rules(
            [(_read_denials(each), _read_length(length, "block_after")) for each, length in after.items()]
        )
    if duration is None:
        raise ConfigError("requires block_for, a period such as '10m'", field="block_after")
    return _make_rules([(_read_denials(after), _read_length(duration, "block_for"))])


def _make_rules(rules: list[tuple[Limit, float]]) -> BlockRules:
    """Return the policies of these rules; a single one has no period in its names."""
    if not rules:
        raise ConfigError("expected a mapping such as {'20/1m': '10m'}, not an empty one", field="block_after")
    lengths = [limit.length for limit, _ in rules]
    if len(set(lengths)) < len(rules):
        raise ConfigError("expected rules with different periods: two have the same", field="block_after")
    denials, blocks = [], []
    for limit, length in rules:
        counted = Limit(limit.quota, limit.period, "sliding_log", name="block_after")
        block = Limit(1, length, "sliding_log", name="block_for")
        name = DENIALS_POLICY
        if len(rules) > 1:
            name = f"{name}:{limit.name}"
            block = replace(block, name=f"block_for:{limit.name}", unit=f"blocks-{limit.name}")
        denials.append(Policy(name, counted, on_store_error="allow"))
        blocks.append(block)
    return BlockRules(tuple(denials), Policy(BLOCKS_POLICY, tuple(blocks), on_store_error="allow"))


def _read_denials(after: object) -> Limit:
    if not isinstance(after, str):
        expected = "denials per period such as '20/1m', or a mapping such as {'20/1m': '10m'}"
        raise ConfigError(f"expected {expected}, not {after!r}", field="block_after")
    try:
        return Limit.parse(after)
    except ConfigError as error:
        raise ConfigError(f"expected denials per period such as '20/1m': {error}", field="block_after") from None


def _read_length(duration: object, field: str) -> float:
    """Return the seconds of a block."""
    try:
        return parse_period(duration) / 1_000_000  # type: ignore[arg-type]  # it checks the type
    except ConfigError as error:
        raise ConfigError(f"expected a period such as '10m': {error}", field=field) from None
