"""`on_store_error: local`: deciding on this process's share of a limit, and charging that to the store afterwards.

What a share is, in permits: the limit's quota and burst times the claimed part, rounded down; nothing where that is 0.
(A bucket's burst is at most what comes back within an eighth of a term, so that something can be spent until its end.)
At first all of it counts as spent, since others may have spent the whole limit until then: a bucket starts empty, and
windows and logs admit nothing for one period (a calendar window: until the next one).

    limit                            share decided by
    token_bucket                     token_bucket
    fixed_window, sliding_log        sliding_log: at most the share in any period, whenever windows open elsewhere
    calendar_window, sliding_window  the same: their windows are the same for everybody
    concurrency                      none, calls are denied: slots that others hold cannot be seen
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import ceil_div
from tidegate.core.decision import LocalDecision
from tidegate.errors import ConfigError
from tidegate.policy import Policy
from tidegate.stores.outage.peers import WHOLE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.algorithms import View
    from tidegate.core.decision import Decision
    from tidegate.core.limit import Limit
    from tidegate.policy import Key
    from tidegate.stores.memory.store import MemoryStore
    from tidegate.stores.outage.peers import AskStore, Peers

LOCAL_ALGORITHM: Final = {"fixed_window": "sliding_log"}
REFILL_DIVISOR: Final = 8  # a bucket's share is what it refills within this part of a term
LOG_ALGORITHMS: Final = ("sliding_log", "concurrency")
MAX_KEYS: Final = 100_000  # keys whose spending is remembered; further ones are denied


class SharePolicy(NamedTuple):
    """What a process may spend of a policy: the policy of its share, and which limits that has."""

    policy: Policy
    limits: tuple[Limit | None, ...]  # None: nothing of it
    share: Policy | None
    since: int  # all of it counted as spent then
    until: int  # all of it must have come back by then


class LocalShare:
    """This process's share of one policy, from when it was cut off until what it spent is charged to the store."""

    def __init__(self, peers: Peers, margin: int) -> None:
        """Decide for the policy of these peers; `margin` is how long a call to the store may be under way."""
        self.peers = peers
        self.spent: dict[Key, dict[str, SharePolicy]] = {}  # by the name of the share
        self._margin = margin
        self._kept: dict[int, SharePolicy] = {}  # by the identity of the policy, which Terms keep alive
        self._cut = -1  # the beat posted last before this process was cut off
        self._owed: dict[Key, dict[str, int]] = {}  # permits that charging a key gave back and did not take again

    def start(self) -> int:
        """Tell from when on the share may be spent."""
        return self.peers.free_from + self._margin

    def terms(self, policy: Policy, earliest: int, latest: int) -> SharePolicy | None:
        """Tell what may be spent now; None when nothing may, yet or any more."""
        start = self.start()
        if earliest < start:
            return None
        if self._cut != self.peers.posted:
            self._cut = self.peers.posted
            self._kept.clear()  # what was decided on other terms is settled under their name, and not looked at again
        terms = self._kept.get(id(policy))
        if terms is None:
            units, until = self.peers.held(start)
            terms = self._kept[id(policy)] = divide(policy, units, start, until, self.peers.term // REFILL_DIVISOR)
        return terms if latest < terms.until else None

    def settle(self, ask: AskStore, memory: MemoryStore, now: int) -> None:
        """Charge the store with what was spent and has not come back yet.

        A key whose charge fails in the middle is charged again: too much, never too little.
        """
        for key, spent in list(self.spent.items()):
            owed = self._owed.setdefault(key, {})
            for terms in spent.values():
                charge(ask, key, terms, used_of(memory, key, terms, now), owed)
            del self.spent[key], self._owed[key]


def divide(policy: Policy, units: int, since: int, until: int, longest: int) -> SharePolicy:
    """Work out the share of a policy."""
    limits = tuple(part_of(limit, units, longest) for limit in policy.limits)
    shared = tuple(limit for limit in limits if limit is not None)
    return SharePolicy(policy, limits, Policy(f"{policy.name}@{since}", shared) if shared else None, since, until)


def part_of(limit: Limit, units: int, longest: int) -> Limit | None:
    """Give so many units of a limit; None where that is less than a permit. A bucket refills within `longest`."""
    quota, burst = limit.quota * units // WHOLE_LIMIT, limit.burst * units // WHOLE_LIMIT
    burst = min(burst, quota * longest // limit.length)
    if limit.algorithm != "token_bucket":
        burst = quota
    if limit.algorithm == "concurrency" or not quota or not burst:
        return None
    algorithm = LOCAL_ALGORITHM.get(limit.algorithm, limit.algorithm)
    try:
        return replace(limit, quota=quota, algorithm=algorithm, burst=burst if algorithm == "token_bucket" else 0)
    except ConfigError:
        return None  # too fine a fraction to be counted


def may_fit(terms: SharePolicy, costs: Sequence[int], earliest: int, latest: int) -> bool:
    """Tell whether there is a share of every limit that is asked, which would have come back in time.

    Nothing is spent while it is in doubt in which calendar window now lies.
    """
    for limit, cost in zip(terms.limits, costs, strict=True):
        if not cost:
            continue
        if limit is None or latest + lasts(limit, latest) > terms.until:
            return False
        if limit.calendar is not None and limit.calendar.window(earliest) != limit.calendar.window(latest):
            return False
    return True


def lasts(limit: Limit, now: int) -> int:
    """Tell for how long at most the limit remembers what is spent now."""
    if limit.calendar is not None:
        return limit.calendar.window(now)[1] - now
    if limit.algorithm == "token_bucket":
        return ceil_div(limit.capacity, limit.rate)
    return 2 * limit.length if limit.algorithm == "sliding_window" else limit.length


def shared_costs(terms: SharePolicy, costs: Sequence[int]) -> tuple[int, ...]:
    """Keep the costs at the limits there is a share of."""
    return tuple(cost for limit, cost in zip(terms.limits, costs, strict=True) if limit is not None)


def preload(memory: MemoryStore, key: Key, terms: SharePolicy) -> None:
    """Count the whole share as spent when it began, for a key that has no state; others refuse, and do not change."""
    if terms.share is not None:
        memory.apply_one("acquire", terms.share, key, tuple(limit.burst for limit in terms.share.limits), terms.since)


def tell(terms: SharePolicy, costs: Sequence[int], decision: Decision, wait: int) -> LocalDecision:
    """Answer with what each limit's share said; what exceeds the share is worth asking again when the store is back."""
    said = iter(decision.views)
    limits, views = [], []
    for true, limit, cost in zip(terms.policy.limits, terms.limits, costs, strict=True):
        if limit is None:
            limits.append(true)
            views.append((0, wait if cost else 0, wait))
        else:
            remaining, retry, reset = next(said)
            limits.append(limit)
            views.append((remaining, wait if retry == NEVER and cost <= true.burst else retry, reset))
    return LocalDecision((decision.allowed, decision.at, tuple(limits), views, None))


def refusal(policy: Policy, costs: Sequence[int], at: int, wait: int) -> LocalDecision:
    """Deny for so many microseconds; a cost that no limit can ever hold, for good."""
    views: list[View] = [
        (0, (NEVER if cost > limit.burst else wait) if cost else 0, wait)
        for limit, cost in zip(policy.limits, costs, strict=True)
    ]
    if not any(retry for _, retry, _ in views):  # it asks for nothing, and is denied with the rest of its batch
        views = [(0, wait, wait)] * len(views)
    return LocalDecision((False, at, policy.limits, views, None))


def permission(policy: Policy, costs: Sequence[int], at: int) -> LocalDecision:
    """Allow, as a limit would that nobody has used yet."""
    views: list[View] = [(max(0, limit.burst - cost), 0, 0) for limit, cost in zip(policy.limits, costs, strict=True)]
    return LocalDecision((True, at, policy.limits, views, None))


def used_of(memory: MemoryStore, key: Key, terms: SharePolicy, now: int) -> list[int]:
    """Tell what of each limit was spent here and has not come back yet."""
    if terms.share is None:
        return [0] * len(terms.limits)
    nothing = (0,) * len(terms.share.limits)
    views = iter(memory.apply_one("peek", terms.share, key, nothing, now).views)
    return [0 if limit is None else limit.burst - next(views)[0] for limit in terms.limits]


def charge(ask: AskStore, key: Key, terms: SharePolicy, used: Sequence[int], owed: dict[str, int]) -> None:
    """Charge what was spent elsewhere to the store, as of now, whether or not there is room for it."""
    policy = terms.policy
    plain = tuple(
        0 if limit.algorithm in LOG_ALGORITHMS else count for limit, count in zip(policy.limits, used, strict=True)
    )
    if any(plain):
        ask("adjust", policy, key, plain)
    for place, (limit, count) in enumerate(zip(policy.limits, used, strict=True)):
        if limit.algorithm in LOG_ALGORITHMS and count + owed.get(limit.name, 0):
            charge_log(ask, policy, key, place, count, owed)


def charge_log(ask: AskStore, policy: Policy, key: Key, place: int, count: int, owed: dict[str, int]) -> None:
    """Charge a log with an entry of now.

    Only a decision makes an entry, so one permit is acquired, and the entry raised. In a full log, one permit of the
    latest entry is moved: given back, and taken again now. If somebody else is faster, theirs is the entry of now.
    What is given back is owed until everything is charged, whatever gets lost in between.
    """
    limit = policy.limits[place]

    def at_this(number: int) -> tuple[int, ...]:
        return tuple(number if i == place else 0 for i in range(len(policy.limits)))

    entry = ask("acquire", policy, key, at_this(1))
    taken = int(entry.allowed)
    if not taken:
        look = ask("peek", policy, key, at_this(0))
        owed[limit.name] = owed.get(limit.name, 0) + 1
        ask("adjust", policy, key, at_this(-1), look.at + look.views[place][2] - limit.length)
        entry = ask("acquire", policy, key, at_this(1))
        taken = int(entry.allowed)
    rest = count + owed.get(limit.name, 0) - taken
    if rest:
        ask("adjust", policy, key, at_this(rest), entry.at if taken else None)
    owed.pop(limit.name, None)
