"""`CL.THROTTLE key max_burst count period [quantity]`, as in the Redis module redis-cell.

The parameters of each call define its limit: a token bucket that holds max_burst + 1 permits and refills `count`
permits every `period` seconds, which is what redis-cell's algorithm (GCRA) admits. All keys are counted under one
internal policy, so that a call with other parameters continues with the usage of its key.

The reply is as redis-cell's: 1 if limited, max_burst + 1, the remaining permits, the seconds until a retry is allowed
(-1: the call was allowed, or can never be), and the seconds until all permits are available. Seconds are rounded up.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from tidegate._policy import Policy
from tidegate.core import Limit
from tidegate.core._algorithms import NEVER
from tidegate.core._bounds import MAX_INTEGER, SECOND, ceil_div
from tidegate.service._decisions.policy_limiters import CountedPolicy, check_key
from tidegate.service._resp.arguments import ArgumentError, read_integer, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate._policy import Key
    from tidegate.core._decision import Decision
    from tidegate.service._decisions.decider import Decider

THROTTLE_POLICY: Final = "tidegate.throttle"
MAX_THROTTLE_LIMITS: Final = 1024  # sets of parameters whose limits are kept; further ones are made again
PARAMETERS: Final = ("max_burst", "count per period", "period", "quantity")
MIN_WORDS: Final = 4  # the key, max_burst, count and period
THROTTLE_USAGE: Final = "<key> <max_burst> <count per period> <period> [<quantity>]"


class Throttle:
    """Runs CL.THROTTLE over a Decider."""

    def __init__(self, decider: Decider) -> None:
        """Decide with this decider."""
        self._decider = decider
        self.instant: bool = decider.store.instant
        self._policy = lru_cache(MAX_THROTTLE_LIMITS)(self._make_policy)

    def _make_policy(self, max_burst: int, count: int, period: int) -> CountedPolicy:
        """Make the policy of these parameters."""
        limit = Limit(count, f"{period}s", burst=max_burst + 1, name="throttle")
        return CountedPolicy(Policy(THROTTLE_POLICY, (limit,)), self._decider.stats.count(THROTTLE_POLICY))

    def run_now(self, words: Sequence[str]) -> str:
        """Run a call with these arguments on a store in memory."""
        counted, key, quantity = self._read(words)
        if quantity:
            return write_throttled(self._decider.acquire_policy_now(counted, key, quantity))  # type: ignore[arg-type]  # it decides
        return write_throttled(self._decider.store.apply_one("peek", counted.policy, key, (0,)))

    async def run(self, words: Sequence[str], refunds: list[Callable[[], None]]) -> str:
        """Run a call with these arguments; add to `refunds` what refunds it."""
        if self.instant:
            return self.run_now(words)
        counted, key, quantity = self._read(words)
        if not quantity:
            return write_throttled(await self._decider.peek_policy(counted.policy, key, 0))
        decision = await self._decider.acquire_policy(counted, key, quantity)
        refunds.append(partial(self._decider.refund_abandoned, counted.policy, key, quantity, decision))
        return write_throttled(decision)

    def _read(self, words: Sequence[str]) -> tuple[CountedPolicy, Key, int]:
        """Read the policy, the key and the quantity of a call."""
        if not MIN_WORDS <= len(words) <= MIN_WORDS + 1:
            raise ArgumentError(f"wrong number of arguments; usage: CL.THROTTLE {THROTTLE_USAGE}")
        max_burst, count, period, quantity = read_parameters(words)
        return self._policy(max_burst, count, period), check_key(words[0]), quantity


def read_parameters(words: Sequence[str]) -> tuple[int, int, int, int]:
    """Read the four numbers of a call."""
    numbers = []
    for name, text, least in zip(PARAMETERS, (*words[1:], "1"), (0, 1, 1, 0), strict=False):
        number = read_integer(text)
        if number is None or not least <= number < MAX_INTEGER:
            raise ArgumentError(f"{name}: expected an integer of at least {least}, not {shorten(text)}")
        numbers.append(number)
    max_burst, count, period, quantity = numbers
    return max_burst, count, period, quantity


def write_throttled(decision: Decision) -> str:
    """Write the reply to a call; seconds are rounded up."""
    ((remaining, retry, reset),) = decision.views
    burst, limited = decision.policy_limits[0].burst, not decision.allowed
    seconds = ceil_div(retry, SECOND) if limited and retry != NEVER else -1
    return f"*5\r\n:{limited:d}\r\n:{burst}\r\n:{max(0, remaining)}\r\n:{seconds}\r\n:{ceil_div(reset, SECOND)}\r\n"
