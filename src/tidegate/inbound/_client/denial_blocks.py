"""Blocks clients that are denied too often. The store keeps the blocks, so all processes that share it apply them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from tidegate._limiter.waiting import ApplyStep
from tidegate._policy.key import show_key
from tidegate.errors import RateLimitError
from tidegate.inbound._client.temporary_list import TemporaryList
from tidegate.observe.logs import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._limiter.limiter import Limiter
    from tidegate._policy import Cost, Key, Policy
    from tidegate._runtime.flow import Flow
    from tidegate.core._decision import Decision
    from tidegate.inbound._rules.block_rule import BlockRules

log: logging.Logger = logging.getLogger("tidegate.inbound")

MAX_LISTED: Final = 1000  # blocked clients that the statistics of this process list


class DenialBlocks:
    """Counts the denials of each client, and blocks clients that have too many."""

    def __init__(self, rules: BlockRules, make_limiter: Callable[[Policy], Limiter]) -> None:
        """Block clients by these rules."""
        self._make_limiter = make_limiter
        self._blocks = make_limiter(rules.blocks)
        self.listed: TemporaryList = TemporaryList()  # blocks that this process has seen, for the statistics
        self.update(rules)

    def update(self, rules: BlockRules) -> None:
        """Use these rules from now on; the store keeps blocks and counts."""
        self._denials = [self._make_limiter(policy) for policy in rules.denials]
        self._blocks.update(rules.blocks)
        self._block_costs = [{unit: 1} for unit in rules.blocks.units]
        self._all_blocks: Cost = dict.fromkeys(rules.blocks.units, 1)

    def blocked_until_flow(self, key: Key) -> Flow[ApplyStep, int]:
        """Return until when a client is blocked; 0 if it is not, or if the store is unavailable."""
        try:
            decision = yield from _ask_flow("peek", self._blocks, key, self._all_blocks)
        except RateLimitError:
            return 0  # the limits report the outage
        return 0 if decision else self._list(key, decision.at, decision.at + decision.retry)

    def count_denial_flow(self, key: Key) -> Flow[ApplyStep, int]:
        """Count a denial; return until when the client is blocked from now on, or 0."""
        blocked = False
        try:
            for denials, cost in zip(self._denials, self._block_costs, strict=True):
                decision = yield from _ask_flow("acquire", denials, key)
                if not decision or not decision.remaining:
                    blocked = True
                    yield from _ask_flow("reset", denials, key, {})
                    yield from _ask_flow("acquire", self._blocks, key, cost)
        except RateLimitError:
            return 0
        until: int = (yield from self.blocked_until_flow(key)) if blocked else 0
        if until:
            log.warning("client blocked because it was denied too often: %s", shown(show_key(key)))
        return until

    def remove_flow(self, key: Key) -> Flow[ApplyStep, bool]:
        """Unblock a client and forget its denials; return whether it was blocked. Raises if the store fails."""
        decision = yield from _ask_flow("peek", self._blocks, key, self._all_blocks)
        for limiter in (self._blocks, *self._denials):
            yield from _ask_flow("reset", limiter, key, {})
        self.listed.remove(show_key(key))
        return not decision

    def _list(self, key: Key, now: int, until: int) -> int:
        self.listed.remove_expired(now)
        if len(self.listed) < MAX_LISTED:
            self.listed.add(show_key(key), until, now)
        return until

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies that the store keeps."""
        return (*(each.policy for each in self._denials), self._blocks.policy)


def _ask_flow(verb: str, limiter: Limiter, key: Key, cost: Cost = 1) -> Flow[ApplyStep, Decision]:
    """Apply a verb to a key of a limiter."""
    policy = limiter.policy
    asks = ((policy, key, policy.costs(cost)),)
    return (yield ApplyStep(limiter.store, verb, asks, limiter.current_time()))[0]  # type: ignore[no-any-return]  # a decision
