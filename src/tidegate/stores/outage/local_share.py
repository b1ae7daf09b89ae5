"""`on_store_error: local`: decides by this process's share of a limit, and charges it to the store afterwards.

A share is the limit's quota and burst times the claimed part, rounded down to permits; there is none if that is 0. (A
bucket's burst is at most what it refills within an eighth of a term, so that it can be spent until the end of the
term.) At first the whole share counts as spent, since other processes may have spent the whole limit before: a bucket
starts empty, and windows and logs admit nothing for one period (a calendar window: until the next one).

    limit                            share decided by
    token_bucket                     token_bucket
    fixed_window, sliding_log        sliding_log: at most the share in any period, whenever other processes open windows
    calendar_window, sliding_window  the same algorithm: all processes have the same windows
    concurrency                      none, calls are denied: the slots of other processes are unknown
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

WINDOW_ALGORITHM: Final = "sliding_log"  # counts the share of a limit with fixed windows
REFILL_DIVISOR: Final = 8  # a bucket's share is what it refills within this part of a term
MAX_KEYS: Final = 100_000  # keys whose spending is remembered; further keys are denied


class SharePolicy(NamedTuple):
    """The share of a policy that this process may spend, as a policy of its own."""

    policy: Policy
    limits: tuple[Limit | None, ...]  # None: there is no share of this limit
    share: Policy | None
    since: int  # when the whole share counted as spent
    until: int  # by when all of it must have been refilled


class LocalShare:
    """This process's share of one policy, from the start of an outage until it is charged to the store."""

    def __init__(self, peers: Peers, margin: int) -> None:
        """Share the policy of these peers. `margin` is how long a call to the store may be in flight."""
        self.peers = peers
        self.spent: dict[Key, dict[str, SharePolicy]] = {}  # by the name of the share policy
        self._margin = margin
        self._share_policies: dict[int, SharePolicy] = {}  # by the id of the policy, which the SharePolicy keeps alive
        self._last_posted = -1  # the last beat posted before the outage
        self._owed: dict[Key, dict[str, int]] = {}  # permits that charging a key has refunded and not yet taken again

    def starts_at(self) -> int:
        """Return when the share may be spent."""
        return self.peers.relied_until + self._margin

    def share_policy(self, policy: Policy, earliest: int, latest: int) -> SharePolicy | None:
        """Return the share that may be spent now; None if it is too early or too late."""
        start = self.starts_at()
        if earliest < start:
            return None
        if self._last_posted != self.peers.posted:
            self._last_posted = self.peers.posted
            self._share_policies.clear()  # earlier shares are settled under their own names
        share_policy = self._share_policies.get(id(policy))
        if share_policy is None:
            units, until = self.peers.claimed_share(start)
            share_policy = self._share_policies[id(policy)] = divide_policy(
                policy, units, start, until, self.peers.term // REFILL_DIVISOR
            )
        return share_policy if latest < share_policy.until else None

    def settle(self, ask: AskStore, memory: MemoryStore, now: int) -> None:
        """Charge to the store what was spent and has not been refilled yet.

        If charging a key fails half-way, the key is charged again: too much, never too little.
        """
        for key, spent in list(self.spent.items()):
            owed = self._owed.setdefault(key, {})
            for share_policy in spent.values():
                charge_store(ask, key, share_policy, read_usage(memory, key, share_policy, now), owed)
            del self.spent[key], self._owed[key]


def divide_policy(policy: Policy, units: int, since: int, until: int, longest: int) -> SharePolicy:
    """Compute the share of a policy."""
    limits = tuple(divide_limit(limit, units, longest) for limit in policy.limits)
    shared = tuple(limit for limit in limits if limit is not None)
    return SharePolicy(policy, limits, Policy(f"{policy.name}@{since}", shared) if shared else None, since, until)


def divide_limit(limit: Limit, units: int, longest: int) -> Limit | None:
    """Return a limit of this number of units; None if that is less than a permit. A bucket refills within `longest`."""
    quota, burst = limit.quota * units // WHOLE_LIMIT, limit.burst * units // WHOLE_LIMIT
    burst = min(burst, quota * longest // limit.length)
    if not limit.rules.refills:
        burst = quota
    if not limit.rules.leasable or not quota or not burst:
        return None
    algorithm = WINDOW_ALGORITHM if limit.rules.windowed and limit.calendar is None else limit.algorithm
    try:
        return replace(limit, quota=quota, algorithm=algorithm, burst=burst if limit.rules.refills else 0)
    except ConfigError:
        return None  # the fraction is too small to be counted


def may_fit(share_policy: SharePolicy, costs: Sequence[int], earliest: int, latest: int) -> bool:
    """Return whether there is a share of every limit that is charged, and the charge would be refilled in time.

    Nothing is spent while the current calendar window is uncertain.
    """
    for limit, cost in zip(share_policy.limits, costs, strict=True):
        if not cost:
            continue
        if limit is None or latest + max_lifetime(limit, latest) > share_policy.until:
            return False
        if limit.calendar is not None and limit.calendar.window(earliest) != limit.calendar.window(latest):
            return False
    return True


def max_lifetime(limit: Limit, now: int) -> int:
    """Return for how long, at most, the limit remembers a charge made now."""
    if limit.calendar is not None:
        return limit.calendar.window(now)[1] - now
    if limit.rules.refills:
        return ceil_div(limit.capacity, limit.rate)
    return 2 * limit.length if limit.rules.weighted else limit.length


def shared_costs(share_policy: SharePolicy, costs: Sequence[int]) -> tuple[int, ...]:
    """Return the costs for the limits that have a share."""
    return tuple(cost for limit, cost in zip(share_policy.limits, costs, strict=True) if limit is not None)


def preload(memory: MemoryStore, key: Key, share_policy: SharePolicy) -> None:
    """Charge the whole share of a new key at its start. A key that has a state denies this and stays unchanged."""
    if share_policy.share is not None:
        memory.apply_one(
            "acquire",
            share_policy.share,
            key,
            tuple(limit.burst for limit in share_policy.share.limits),
            share_policy.since,
        )


def share_decision(share_policy: SharePolicy, costs: Sequence[int], decision: Decision, wait: int) -> LocalDecision:
    """Return the decision of the share; a cost above the share may be retried after the outage."""
    shared = iter(decision.views)
    limits, views = [], []
    for original, limit, cost in zip(share_policy.policy.limits, share_policy.limits, costs, strict=True):
        if limit is None:
            limits.append(original)
            views.append((0, wait if cost else 0, wait))
        else:
            remaining, retry, reset = next(shared)
            limits.append(limit)
            views.append((remaining, wait if retry == NEVER and cost <= original.burst else retry, reset))
    return LocalDecision.of_views(decision.at, tuple(limits), views, within_limits=decision.within_limits)


def deny_locally(policy: Policy, costs: Sequence[int], at: int, wait: int) -> LocalDecision:
    """Return a denial for this number of microseconds, or permanent if a cost exceeds the burst of its limit."""
    views: list[View] = [
        (0, (NEVER if cost > limit.burst else wait) if cost else 0, wait)
        for limit, cost in zip(policy.limits, costs, strict=True)
    ]
    if not any(retry for _, retry, _ in views):  # it costs nothing, and is denied with the rest of its batch
        views = [(0, wait, wait)] * len(views)
    return LocalDecision.of_views(at, policy.limits, views, within_limits=False)


def allow_locally(policy: Policy, costs: Sequence[int], at: int) -> LocalDecision:
    """Return a permit, as from a limit that is unused."""
    views: list[View] = [(max(0, limit.burst - cost), 0, 0) for limit, cost in zip(policy.limits, costs, strict=True)]
    return LocalDecision.of_views(at, policy.limits, views, within_limits=True)


def read_usage(memory: MemoryStore, key: Key, share_policy: SharePolicy, now: int) -> list[int]:
    """Return how much of each limit was spent here and has not been refilled yet."""
    if share_policy.share is None:
        return [0] * len(share_policy.limits)
    nothing = (0,) * len(share_policy.share.limits)
    views = iter(memory.apply_one("peek", share_policy.share, key, nothing, now).views)
    return [0 if limit is None else limit.burst - next(views)[0] for limit in share_policy.limits]


def charge_store(ask: AskStore, key: Key, share_policy: SharePolicy, used: Sequence[int], owed: dict[str, int]) -> None:
    """Charge spending to the store as of now, even beyond the limit."""
    policy = share_policy.policy
    plain = tuple(0 if limit.rules.logged else count for limit, count in zip(policy.limits, used, strict=True))
    if any(plain):
        ask("adjust", policy, key, plain)
    for index, (limit, count) in enumerate(zip(policy.limits, used, strict=True)):
        if limit.rules.logged and count + owed.get(limit.name, 0):
            charge_log(ask, policy, key, index, count, owed)


def charge_log(ask: AskStore, policy: Policy, key: Key, index: int, count: int, owed: dict[str, int]) -> None:
    """Charge a log with an entry at the current time.

    Only a decision adds an entry, so one permit is acquired, and then the cost of that entry is raised. In a full log,
    one permit of the latest entry is moved: refunded, and acquired again now. If another process acquires it first, its
    entry is raised. The refunded permit is owed until everything is charged, even if a call in between fails.
    """
    limit = policy.limits[index]

    def costs_at(number: int) -> tuple[int, ...]:
        return tuple(number if i == index else 0 for i in range(len(policy.limits)))

    entry = ask("acquire", policy, key, costs_at(1))
    taken = int(entry.allowed)
    if not taken:
        peeked = ask("peek", policy, key, costs_at(0))
        owed[limit.name] = owed.get(limit.name, 0) + 1
        ask("adjust", policy, key, costs_at(-1), peeked.at + peeked.views[index][2] - limit.length)
        entry = ask("acquire", policy, key, costs_at(1))
        taken = int(entry.allowed)
    rest = count + owed.get(limit.name, 0) - taken
    if rest:
        ask("adjust", policy, key, costs_at(rest), entry.at if taken else None)
    owed.pop(limit.name, None)
