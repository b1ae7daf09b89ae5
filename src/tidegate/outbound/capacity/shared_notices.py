"""What one process learned of an account's capacity, left in the store for all that share it.

Processes with one store need no bus to hear of a refusal: whoever is refused writes it here, and the others look every
now and then, after they were given a permit and before they use it.

A store counts; it keeps no messages. So a notice is three counters of one key: its number together with the capacity,
since when, and until when nothing is to be sent, by the store's clock. All three only rise. Writing raises them from
what was read to what is meant, under limits of exactly that: if anybody has written in between they do not fit, the
store denies as it denies any call, and one reads again. The counters end a day after the first notice.
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

    from tidegate.outbound.quota.charge import Flow
    from tidegate.policy import Key

    Said = tuple[int, int, int]

NOTICE_TTL: Final = "1d"
NOTICE_FIELDS: Final = ("notice", "since", "until")
NO_NOTICE: Final = (0, 0, 0)
CAPACITY_BITS: Final = 31  # bits of a capacity; those above it number the notices
MAX_CAPACITY: Final = 2**CAPACITY_BITS - 1
MAX_NOTICE_NUMBER: Final = MAX_INTEGER >> CAPACITY_BITS
CHECKS_PER_PERIOD: Final = 50  # in a period
MAX_CHECK_INTERVAL: Final = SECOND  # between two looks, at most


class SharedNotice(NamedTuple):
    """What another process left: the notice, and how many microseconds ago."""

    notice: Notice
    age: int


class SharedNotices:
    """The notices of one account; `apply` asks the store, awaited or not."""

    def __init__(self, domain: str, key: Key, apply: Callable[..., Any], length: int) -> None:
        """Be looked at so seldom that it costs nothing; `length` is the account's period."""
        self._name = f"capacity:{domain}"
        self._key = key
        self._apply = apply
        self._endless = self._up_to((MAX_INTEGER,) * 3)
        self._seen: Said = NO_NOTICE
        self._at = 0  # when that was, by the store's clock
        self.every = max(1, min(length // CHECKS_PER_PERIOD, MAX_CHECK_INTERVAL))

    def _up_to(self, most: Said) -> Policy:
        pairs = zip(NOTICE_FIELDS, most, strict=True)
        return Policy(
            self._name, tuple(Limit(each, NOTICE_TTL, "fixed_window", unit=part, name=part) for part, each in pairs)
        )

    def looking(self) -> Flow:
        """Tell what another process left since the last look; None: nothing."""
        looked = yield from self._asking("peek", self._endless, NO_NOTICE)
        if looked is None:
            return None
        before, self._at = self._seen, looked.at
        self._seen = said = tuple(MAX_INTEGER - view[0] for view in looked.views)
        number, since, until = said
        if said == before or not number:
            return None
        return SharedNotice(Notice(number & MAX_CAPACITY, max(0, until - since)), max(0, looked.at - since))

    def writing(self, notice: Notice) -> Flow:
        """Leave a notice, right after a look; tells what another process left in between instead."""
        number, since, until = self._seen
        count = (number >> CAPACITY_BITS) + 1
        if (
            not self._at or notice.value > MAX_CAPACITY or count > MAX_NOTICE_NUMBER
        ):  # never seen, as the store could not be asked
            return None
        since = max(since, self._at)  # the store's clock may have been set back
        said = (count << CAPACITY_BITS | notice.value, since, max(until, since + notice.pause))
        costs = tuple(new - old for new, old in zip(said, self._seen, strict=True))
        written = yield from self._asking("acquire", self._up_to(said), costs)
        if written is None or not written.allowed:
            return (yield from self.looking())
        self._seen = said
        return None

    def _asking(self, verb: str, policy: Policy, costs: tuple[int, ...]) -> Flow:
        """Ask the store; None: it cannot be asked, and nothing here is worth a request that fails."""
        try:
            (decision,) = yield partial(self._apply, verb, ((policy, self._key, costs),))
        except StoreUnavailable:
            return None
        return None if isinstance(decision, LocalDecision) else decision
