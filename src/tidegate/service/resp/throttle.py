"""`CL.THROTTLE key max_burst count period [quantity]`, as the Redis module redis-cell has it.

Its parameters are a limit that is made on the spot: a token bucket that holds max_burst + 1 permits and refills `count`
permits every `period` seconds, which is what redis-cell's algorithm (GCRA) admits. All keys are counted under one
internal policy, so that a call with other parameters continues with the usage of its key.

The reply is as redis-cell's: 1 if limited, max_burst + 1, the remaining permits, the seconds until a retry is allowed
(-1: the call was allowed, or can never be), and the seconds until all permits are available. Seconds are rounded up.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from tidegate.core import Limit
from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import MAX_INTEGER, SECOND, ceil_div
from tidegate.policy import Policy
from tidegate.service.decisions.policy_limiters import check_key
from tidegate.service.resp.arguments import ArgumentError, read_integer, shorten
from tidegate.service.resp.replies import write_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.decision import Decision
    from tidegate.service.decisions.decider import Decider

THROTTLE_POLICY: Final = "tidegate.throttle"
MAX_THROTTLE_LIMITS: Final = 1024  # sets of parameters whose limits are kept; further ones are made again
PARAMETERS: Final = ("max_burst", "count per period", "period", "quantity")
MIN_WORDS: Final = 4  # the key, max_burst, count and period
USAGE_TEXT: Final = "usage: CL.THROTTLE <key> <max_burst> <count per period> <period> [<quantity>]"


class Throttle:
    """Runs CL.THROTTLE over a Decider."""

    def __init__(self, decider: Decider) -> None:
        """Decide with this decider."""
        self._decider = decider
        self._policy = lru_cache(MAX_THROTTLE_LIMITS)(throttle_policy)

    async def run(self, words: Sequence[str]) -> str:
        """Run a call with these arguments."""
        key, (max_burst, count, period, quantity) = check_key(words[0]), read_parameters(words)
        policy = self._policy(max_burst, count, period)
        if quantity:
            (decision,) = await self._decider.decide_all(((policy, key, quantity),))
        else:
            decision = await self._decider.peek_policy(policy, key, 0)
        return write_value([int(not decision.allowed), max_burst + 1, *describe(decision)])


def read_parameters(words: Sequence[str]) -> tuple[int, int, int, int]:
    """Read the four numbers of a call."""
    numbers = []
    for name, text, least in zip(PARAMETERS, (*words[1:], "1"), (0, 1, 1, 0), strict=False):
        number = read_integer(text)
        if number is None or not least <= number < MAX_INTEGER:
            raise ArgumentError(f"{name}: expected an integer from {least}, not {shorten(text)}")
        numbers.append(number)
    max_burst, count, period, quantity = numbers
    return max_burst, count, period, quantity


def throttle_policy(max_burst: int, count: int, period: int) -> Policy:
    """Build the policy of these parameters."""
    return Policy(THROTTLE_POLICY, (Limit(count, f"{period}s", burst=max_burst + 1, name="throttle"),))


def describe(decision: Decision) -> tuple[int, int, int]:
    """Return the remaining permits, and the seconds until a retry and until the reset, both rounded up."""
    ((remaining, retry, reset),) = decision.views
    limited = not decision.allowed and retry != NEVER
    return remaining, ceil_div(retry, SECOND) if limited else -1, ceil_div(reset, SECOND)
