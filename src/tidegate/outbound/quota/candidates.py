"""The accounts that may send a call, and the joint call that charges one of them.

Candidate          an account, what is reserved there, and the ceilings that are charged with it
CallCandidates     the candidates of one call, the preferred one first; a call without a pool has one
CandidatesCall     asks the engine for the first candidate with room, all or nothing (see `tidegate.joint`)
left out           accounts that are paused, because the provider refused a call, until they may be asked
changed            if the files change, or a key is rejected, while a call waits, `CandidatesChanged` ends its wait; the
                   gate finds its candidates again, and the call is queued by the time of its arrival
wait queues        a call with one key waits in the queue of its account. A call with several waits in a queue for this
                   set of keys: calls of a team whose ceiling is reached do not hold up others
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from tidegate.adaptive.gated_store import retry_after_recovery
from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import MAX_DURATION, SECOND
from tidegate.errors import Denied
from tidegate.joint import JointCall, LimiterAsk, soonest
from tidegate.outbound.quota.charge import CallLabel
from tidegate.policy.key import join_key
from tidegate.waiting import Places, WaitQueues

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidegate.core import Decision, Limit
    from tidegate.joint import JointFlow
    from tidegate.outbound.providers.provider import Provider
    from tidegate.outbound.quota.account import Account
    from tidegate.outbound.quota.cost import CallPlan
    from tidegate.outbound.quota.exchange import RequestOptions
    from tidegate.policy import Cost, Key


class Candidate(NamedTuple):
    """An account that a call may be charged to, with what is reserved there and at the `ceilings`."""

    provider: Provider
    account: Account
    plan: CallPlan
    ceilings: tuple[LimiterAsk, ...] = ()

    @property
    def model(self) -> str:
        """The model that the call asks for; empty: not known."""
        request = self.plan.request
        return "" if request is None else request.model or ""

    @property
    def asks(self) -> tuple[LimiterAsk, ...]:
        """What is charged together."""
        account = self.account
        return (LimiterAsk(account.limiter, account.key, self.plan.cost), *self.ceilings)

    @property
    def plain(self) -> bool:
        """Whether its charge can be corrected even if it was made with `acquire` instead of `hold`."""
        return self.account.plain and all(each.limiter.policy.limits[0].rules.movable for each in self.ceilings)

    def repeated(self, times: int) -> Candidate:
        """Return a candidate for this many such calls at once."""
        ceilings = tuple(each._replace(cost=_multiply(each.cost, times)) for each in self.ceilings)
        return self._replace(plan=self.plan._replace(cost=_multiply(self.plan.cost, times)), ceilings=ceilings)

    def recovery_wait(self) -> int | None:
        """Return when a cost that is too large for a reduced capacity may fit, in microseconds; None: never."""
        if any(cost > limit.burst for each in self.ceilings for limit, cost in _pairs(each)):
            return None
        return self.account.recovery_wait(self.plan.cost)


def _multiply(cost: Cost, times: int) -> Cost:
    return {unit: each * times for unit, each in cost.items()} if isinstance(cost, Mapping) else cost * times


def _pairs(asked: LimiterAsk) -> Iterable[tuple[Limit, int]]:
    policy, _, costs = asked.ask()
    return zip(policy.limits, costs, strict=True)


class CallCandidates(list[Candidate]):
    """The candidates of one call, the preferred one first.

    Each member is tried at most once in an attempt. `changes` is how often the provider files had changed when they
    were found, `failed` the members that could not send this call, `refused` those that refused it in this attempt, and
    `rejected` those whose accounts have responded to it with 401 or 403.
    """

    __slots__ = ("_found", "changes", "failed", "refused", "rejected")

    def __init__(self, found: list[Candidate], changes: int) -> None:
        """Start with the candidates that were found."""
        super().__init__(found)
        self._found = found
        self.changes: int = changes
        self.failed: tuple[str, ...] = ()
        self.refused: tuple[str, ...] = ()
        self.rejected: tuple[tuple[Candidate, int], ...] = ()  # with the status

    def drop(self, candidate: Candidate) -> None:
        """Do not try a member again for this call."""
        self.remove(candidate)
        self.failed += (candidate.provider.member,)

    def refuse(self, candidate: Candidate) -> None:
        """Do not try a member again in this attempt."""
        self.remove(candidate)
        self.refused += (candidate.provider.member,)

    def begin_attempt(self) -> None:
        """Try members again that have refused this call."""
        self.refused = ()
        self.renew(self._found, self.changes)

    def renew(self, found: list[Candidate], changes: int) -> None:
        """Replace them: the files have changed, or a key was suspended."""
        tried = {*self.failed, *self.refused}
        self[:] = [each for each in found if each.provider.member not in tried] or found
        self._found, self.changes = found, changes


class CandidatesChanged(Exception):  # noqa: N818 - not an error: the call continues with other candidates
    """The candidates of a waiting call have changed."""


class CallQueues(WaitQueues):
    """The wait queues of calls with several keys, one for each set of keys: permits of any of them wake it."""

    def queue_of(self, asked: Iterable[LimiterAsk]) -> Key:
        """Return the name of the queue of a call."""
        return tuple(sorted({join_key(each.key) for each in asked}))

    def wake(self, key: Key) -> None:
        """Wake the first waiter of each queue that waits for the key."""
        self.wakes += 1
        if self._queues:
            name = join_key(key)
            for queue in tuple(self._queues):
                if name in queue:
                    super().wake(queue)


class CandidatesCall(JointCall):
    """A call that charges the first of its candidates with room."""

    __slots__ = ("_candidates", "_check", "_next_check", "_queues", "_ready")

    def __init__(
        self,
        candidates: Sequence[Candidate],
        queues: CallQueues,
        check: Callable[[], bool] | None = None,
        next_check: Callable[[], int | None] | None = None,
    ) -> None:
        """Choose between candidates, in order of preference.

        `check` returns whether the candidates are still those of the files, `next_check` when the files are read next,
        by steady time (None: never).
        """
        super().__init__([candidate.asks for candidate in candidates])
        self._candidates = candidates
        self._ready = candidates
        self._queues = queues
        self._check = check
        self._next_check = next_check

    @property
    def verb(self) -> str:
        """The verb that charges them."""
        return "acquire" if all(candidate.plain for candidate in self._candidates) else "hold"

    @property
    def candidate(self) -> Candidate:
        """The candidate that was charged."""
        return self._ready[self.chosen]

    def ask_flow(self, verb: str) -> JointFlow:
        """Ask the store for the first candidate with room; raises CandidatesChanged."""
        candidates = self._candidates
        if self._check is not None:
            suspended = [candidate.account.key_rejected for candidate in candidates]
            if (any(suspended) and not all(suspended)) or not self._check():
                raise CandidatesChanged
        paused: list[Decision] = []
        self._ready = ready = []
        for candidate in candidates:
            account = candidate.account
            account.recover()
            if account.paused_for():
                paused.append(account.deny_paused(candidate.plan.cost))
            else:
                ready.append(candidate)
        if not ready:
            return soonest(paused)
        if paused or len(ready) != len(self.alternatives):
            self.alternatives = [candidate.asks for candidate in ready]
        decision: Decision = yield from super().ask_flow(verb)
        if decision.allowed:
            return decision
        if decision.retry == NEVER:
            waits = [wait for each in ready if (wait := each.recovery_wait()) is not None]
            decision = retry_after_recovery(decision, min(waits)) if waits else decision
        return soonest([*paused, decision])

    def places(self) -> Places:
        """Return the queue in which it waits."""
        asked = [each for candidate in self._candidates for each in candidate.asks]
        if len(asked) == 1:
            return Places(((asked[0].limiter.queues, self._candidates[0].account.key),))
        return Places(((self._queues, self._queues.queue_of(asked)),))

    def max_sleep(self, _verb: str) -> int:
        """Return how long it may sleep at most: a capacity recovers, and the first waiter reads changed files."""
        clock = self._candidates[0].account.clock
        now = clock.steady()
        dues = [due for each in self._candidates if (due := each.account.account_capacity.due()) is not None]
        check_at = None if self._next_check is None else self._next_check()
        if check_at is not None:
            dues.append(max(check_at, now + SECOND))
        # Other processes may return permits, and cannot wake this one.
        most = MAX_DURATION if self._candidates[0].account.store.instant else SECOND
        return most if not dues else min(most, max(0, min(dues) - now))


def denial(candidates: Sequence[Candidate], decision: Decision, timeout: float | None) -> Denied:
    """Return the error of a call that no candidate had room for."""
    name, names = candidates[0].provider.name, ", ".join(decision.violated)
    if len(candidates) > 1:
        name = f"{name} (all {len(candidates)} members)"
    whose = "" if len(candidates) > 1 else f"{candidates[0].account.key!r} "
    if decision.retry == NEVER:
        message = f"the cost exceeds what {names} can ever allow"
    elif decision.retry:
        message = f"{whose}got no permit within {timeout} s: {names} would allow it in {decision.retry_after} s"
    else:
        message = f"{whose}got no permit within {timeout} s: other calls are ahead of it in the queue"
    return Denied(f"provider {name}: {message}", decision)


def label_of(candidate: Candidate, options: RequestOptions) -> CallLabel | None:
    """Return what the cost of a call is recorded under; None: the provider has no prices."""
    provider, request = candidate.provider, candidate.plan.request
    if provider.prices is None:
        return None
    model = (request.model if request is not None else options.model) or ""
    money = candidate.plan.money
    return CallLabel(provider.name, provider.member, model, options.team, options.tag, provider.prices.unit, money)
