"""Shares capacity reductions of an account between processes through the store.

Processes with the same store need no bus to share refusals: the refused process writes a notice, and the others check
for notices from time to time, after they got a permit and before they use it.

A store counts; it does not store messages. So a notice is three counters of one key: its number combined with the
capacity, the instant of the refusal, and the instant until which nothing is sent, by the store's clock. All three only
increase. A write raises them from the values read to the new values, under limits of exactly the new values: if another
process has written in between, the costs do not fit, the store denies the call, and the process reads again. The
counters expire a day after the first notice.

Learned quotas (`learned_quotas`) are further counters of the same key, one for each limit: a number combined with the
quota, so that a process that starts later knows them before its first request.
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

    Counters = tuple[int, ...]

NOTICE_TTL: Final = "1d"
NOTICE_FIELDS: Final = ("notice", "since", "until")
CAPACITY_BITS: Final = 31  # lower bits hold a capacity or quota, upper bits the number of the notice
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

    def __init__(
        self, domain: str, key: Key, apply: Callable[..., Any], length: int, limits: tuple[str, ...] = ()
    ) -> None:
        """Check rarely enough to cost little; `length` is the account's period, `limits` names its limits."""
        self._name = f"tidegate.capacity:{domain}"
        self._key = key
        self._apply = apply
        self._fields = (*NOTICE_FIELDS, *(f"quota-{name}" for name in limits))
        self._nothing: Counters = (0,) * len(self._fields)
        self._unbounded = self._policy_up_to((MAX_INTEGER,) * len(self._fields))
        self._seen: Counters = self._nothing
        self._at = 0  # when it was read, by the store's clock
        self.check_interval: int = max(1, min(length // CHECKS_PER_PERIOD, MAX_CHECK_INTERVAL))

    def _policy_up_to(self, maxima: Counters) -> Policy:
        pairs = zip(self._fields, maxima, strict=True)
        return Policy(
            self._name, tuple(Limit(each, NOTICE_TTL, "fixed_window", unit=part, name=part) for part, each in pairs)
        )

    def read_flow(self) -> CallFlow[Any]:
        """Return the notice that another process wrote since the last check; None: there is none."""
        decision = yield from self._store_flow("peek", self._unbounded, self._nothing)
        if decision is None:
            return None
        before, self._at = self._seen, decision.at
        self._seen = counters = tuple(MAX_INTEGER - view.remaining for view in decision.views)
        number, since, until, *_ = counters
        if counters[: len(NOTICE_FIELDS)] == before[: len(NOTICE_FIELDS)] or not number:
            return None
        return SharedNotice(Notice(number & MAX_CAPACITY, max(0, until - since)), max(0, decision.at - since))

    def write_flow(self, notice: Notice) -> CallFlow[Any]:
        """Write a notice, right after a check; returns a notice that another process wrote in between instead."""
        number, since, until, *quotas = self._seen
        count = (number >> CAPACITY_BITS) + 1
        if (
            not self._at or notice.value > MAX_CAPACITY or count > MAX_NOTICE_NUMBER
        ):  # never read: the store was unavailable
            return None
        since = max(since, self._at)  # the store's clock may have been set back
        counters = (count << CAPACITY_BITS | notice.value, since, max(until, since + notice.pause), *quotas)
        return None if (yield from self._raise_flow(counters)) else (yield from self.read_flow())

    @property
    def quotas(self) -> tuple[int, ...]:
        """The learned quotas that were last read or written, by limit; 0: none."""
        return tuple(counter & MAX_CAPACITY for counter in self._seen[len(NOTICE_FIELDS) :])

    def write_quotas_flow(self, quotas: tuple[int, ...]) -> CallFlow[Any]:
        """Write learned quotas; if another process has written in between, read what it wrote instead."""
        seen = self._seen[len(NOTICE_FIELDS) :]
        if not self._at or max(quotas, default=0) > MAX_CAPACITY:
            return
        changed = [
            old if old & MAX_CAPACITY == new else ((old >> CAPACITY_BITS) + 1) << CAPACITY_BITS | new
            for old, new in zip(seen, quotas, strict=True)
        ]
        if max(changed, default=0) <= MAX_INTEGER and not (
            yield from self._raise_flow((*self._seen[: len(NOTICE_FIELDS)], *changed))
        ):
            yield from self.read_flow()

    def _raise_flow(self, counters: Counters) -> CallFlow[bool]:
        """Raise the counters from the values read to these; returns whether no other process has written in between."""
        costs = tuple(new - old for new, old in zip(counters, self._seen, strict=True))
        maxima = tuple(new if cost else MAX_INTEGER for new, cost in zip(counters, costs, strict=True))
        written = yield from self._store_flow("acquire", self._policy_up_to(maxima), costs)
        if written is None or not written.allowed:
            return False
        self._seen = counters
        return True

    def _store_flow(self, verb: str, policy: Policy, costs: tuple[int, ...]) -> CallFlow[Any]:
        """Call the store; None: it is unavailable, and a notice is not worth failing a request."""
        try:
            (decision,) = yield partial(self._apply, verb, ((policy, self._key, costs),))
        except StoreUnavailable:
            return None
        return None if isinstance(decision, LocalDecision) else decision
