"""Shares capacity reductions of an account between processes through the store.

Processes with the same store need no bus to share refusals: the refused process writes a notice, and the others check
for notices from time to time, after they got a permit and before they use it.

A store counts; it does not store messages. So a notice is three counters of one key: its number combined with the
capacity, the instant of the refusal, and the instant until which nothing is sent, by the store's clock. All three only
increase. A write raises them from the values read to the new values, under limits of exactly the new values: if another
process has written in between, the costs do not fit, the store denies the call, and the process reads again. The
counters expire a day after the first notice.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core import Limit
from tidegate.core.bounds import MAX_INTEGER, SECOND
from tidegate.core.decision import LocalDecision
from tidegate.errors import StoreUnavailable
from tidegate.outbound.capacity.refusals import Notice
from tidegate.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.flow import CallFlow
    from tidegate.policy import Key

    Counters = tuple[int, int, int]

NOTICE_TTL: Final = "1d"
NOTICE_FIELDS: Final = ("notice", "since", "until")
NO_NOTICE: Final = (0, 0, 0)
CAPACITY_BITS: Final = 31  # lower bits hold the capacity, upper bits the number of the notice
MAX_CAPACITY: Final = 2**CAPACITY_BITS - 1
MAX_NOTICE_NUMBER: Final = MAX_INTEGER >> CAPACITY_BITS
CHECKS_PER_PERIOD: Final = 50
MAX_CHECK_INTERVAL: Final = SECOND


class SharedNotice(NamedTuple):
    """A notice of another process, and how many microseconds ago it was written."""

    notice: Notice
    age: int


class SharedNotices:
    """The notices of one account; `apply` calls the store, awaited or not."""

    def __init__(self, domain: str, key: Key, apply: Callable[..., Any], length: int) -> None:
        """Check rarely enough to cost little; `length` is the account's period."""
        self._name = f"tidegate.capacity:{domain}"
        self._key = key
        self._apply = apply
        self._unbounded = self._policy_up_to((MAX_INTEGER,) * 3)
        self._seen: Counters = NO_NOTICE
        self._at = 0  # when it was read, by the store's clock
        self.check_interval: int = max(1, min(length // CHECKS_PER_PERIOD, MAX_CHECK_INTERVAL))

    def _policy_up_to(self, maxima: Counters) -> Policy:
        pairs = zip(NOTICE_FIELDS, maxima, strict=True)
        return Policy(
            self._name, tuple(Limit(each, NOTICE_TTL, "fixed_window", unit=part, name=part) for part, each in pairs)
        )

    def read_flow(self) -> CallFlow[Any]:
        """Return the notice that another process wrote since the last check; None: there is none."""
        decision = yield from self._store_flow("peek", self._unbounded, NO_NOTICE)
        if decision is None:
            return None
        before, self._at = self._seen, decision.at
        self._seen = counters = tuple(MAX_INTEGER - view[0] for view in decision.views)
        number, since, until = counters
        if counters == before or not number:
            return None
        return SharedNotice(Notice(number & MAX_CAPACITY, max(0, until - since)), max(0, decision.at - since))

    def write_flow(self, notice: Notice) -> CallFlow[Any]:
        """Write a notice, right after a check; returns a notice that another process wrote in between instead."""
        number, since, until = self._seen
        count = (number >> CAPACITY_BITS) + 1
        if (
            not self._at or notice.value > MAX_CAPACITY or count > MAX_NOTICE_NUMBER
        ):  # never read: the store was unavailable
            return None
        since = max(since, self._at)  # the store's clock may have been set back
        counters = (count << CAPACITY_BITS | notice.value, since, max(until, since + notice.pause))
        costs = tuple(new - old for new, old in zip(counters, self._seen, strict=True))
        written = yield from self._store_flow("acquire", self._policy_up_to(counters), costs)
        if written is None or not written.allowed:
            return (yield from self.read_flow())
        self._seen = counters
        return None

    def _store_flow(self, verb: str, policy: Policy, costs: tuple[int, ...]) -> CallFlow[Any]:
        """Call the store; None: it is unavailable, and a notice is not worth failing a request."""
        try:
            (decision,) = yield partial(self._apply, verb, ((policy, self._key, costs),))
        except StoreUnavailable:
            return None
        return None if isinstance(decision, LocalDecision) else decision
