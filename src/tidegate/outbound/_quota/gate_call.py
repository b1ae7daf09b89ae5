"""The accounts that may send a call, and the joint call that charges one of them.

Candidate          an account, what is reserved there, and the ceilings that are charged with it
GateCall           asks the engine for the first candidate with room, all or nothing (see `_limiter.joint`); a call
                   without a pool has one
left out           accounts that are paused, because the provider refused a call, until they may be asked
changed            if the files change, or a key is rejected, while a call waits, `CandidatesChanged` ends its wait; the
                   gate finds its candidates again, and the call is queued by the time of its arrival
wait queues        a call waits for the accounts and ceilings that denied it (see `_limiter.waiting`): calls of a team
                   whose ceiling is reached do not hold up others
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from tidegate._limiter.joint import JointCall, LimiterAsk, soonest
from tidegate._limiter.waiting import Denial
from tidegate.adaptive._gated_store import retry_after_recovery
from tidegate.core._algorithms import NEVER
from tidegate.core._bounds import MAX_DURATION, SECOND
from tidegate.errors import Denied
from tidegate.outbound._quota.charge import CallLabel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate._limiter.joint import JointFlow
    from tidegate._limiter.waiting import Places, QueuePlace
    from tidegate._policy import Cost
    from tidegate.core import Decision, Limit
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._quota.account import Account
    from tidegate.outbound._quota.charge import Charge
    from tidegate.outbound._quota.cost import CallPlan
    from tidegate.outbound._quota.exchange import OutboundRequest, RequestOptions, SenderLimits
    from tidegate.outbound._quota.planner import CallPlanner


class Candidate(NamedTuple):
    """An account that a call may be charged to, and what is charged together: its cost there, and at ceilings."""

    provider: Provider
    account: Account
    plan: CallPlan
    asks: tuple[LimiterAsk, ...]

    @classmethod
    def of(cls, provider: Provider, account: Account, plan: CallPlan, ceilings: Iterable[LimiterAsk] = ()) -> Candidate:
        """Return a candidate that is charged with these ceilings."""
        return cls(provider, account, plan, (LimiterAsk(account.limiter, account.key, plan.cost), *ceilings))

    @property
    def ceilings(self) -> tuple[LimiterAsk, ...]:
        """What is charged beside the account."""
        return self.asks[1:]

    @property
    def model(self) -> str:
        """The model that the call asks for; empty: not known."""
        request = self.plan.request
        return "" if request is None else request.model or ""

    @property
    def plain(self) -> bool:
        """Whether its charge can be corrected even if it was made with `acquire` instead of `hold`."""
        if len(self.asks) == 1:
            return self.account.plain
        return self.account.plain and all(each.limiter.policy.limits[0].rules.movable for each in self.ceilings)

    def repeated(self, times: int) -> Candidate:
        """Return a candidate for this many such calls at once."""
        return self._replace(asks=tuple(each._replace(cost=_multiply(each.cost, times)) for each in self.asks))

    def recovery_wait(self) -> int | None:
        """Return when a cost that is too large for a reduced capacity may fit, in microseconds; None: never."""
        if any(cost > limit.burst for each in self.ceilings for limit, cost in _pairs(each)):
            return None
        return self.account.recovery_wait(self.asks[0].cost)


def _multiply(cost: Cost, times: int) -> Cost:
    return {unit: each * times for unit, each in cost.items()} if isinstance(cost, Mapping) else cost * times


def _pairs(asked: LimiterAsk) -> Iterable[tuple[Limit, int]]:
    policy, _, costs = asked.ask()
    return zip(policy.limits, costs, strict=True)


class CandidatesChanged(Exception):  # noqa: N818 - not an error: the call continues with other candidates
    """The candidates of a waiting call have changed."""


class GateCall(JointCall):
    """One call through a gate: what is asked for, the accounts that may send it, and what was charged.

    The candidates are in order of preference; each member is tried at most once in an attempt. `changes` is how often
    the provider files had changed when they were found, `failed` the members that could not send this call, `refused`
    those that refused it in this attempt, and `rejected` those whose accounts have responded to it with 401 or 403.
    """

    attempt: int = 1
    tries: int = 0
    sent: int = 0  # when it was last sent
    failed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    rejected: tuple[tuple[Candidate, int], ...] = ()  # with the status
    charge: Charge
    denied: Denial | None = None  # the answer to `charge_now`
    only: tuple[LimiterAsk, Decision] | None = None  # what `charge_now` has charged
    waits: bool = False  # whether it has waited: then its candidates may have changed

    def __init__(
        self,
        planner: CallPlanner,
        provider: Provider,
        request: OutboundRequest,
        options: RequestOptions,
        target: object,
        changes: int,
    ) -> None:
        """Find the candidates of a request to the provider of a `target`: a URL, domain or name. Raises Denied."""
        self._planner = planner
        self.provider: Provider = provider
        self.request: OutboundRequest = request
        self.options: RequestOptions = options
        self.target: object = target
        self.changes: int = changes
        self.began: int = planner.clock.steady()
        self._found = found = planner.candidates(provider, request, options)
        self.candidates: list[Candidate] = found
        self.candidate: Candidate = found[0]  # that was charged
        super().__init__(self._alternatives_of(found))

    # ---- candidates --------------------------------------------------------------------------------------------------

    def drop(self, candidate: Candidate) -> None:
        """Do not try a member again for this call."""
        self.failed += (candidate.provider.member,)
        self._use(self.others)

    def refuse(self, candidate: Candidate) -> None:
        """Do not try a member again in this attempt."""
        self.refused += (candidate.provider.member,)
        self._use(self.others)

    @property
    def others(self) -> list[Candidate]:
        """The candidates at other accounts than the one that was charged."""
        return [each for each in self.candidates if each.account is not self.candidate.account]

    def begin_attempt(self) -> None:
        """Try members again that have refused this call."""
        self.attempt += 1
        self.refused = ()
        self._use_found()

    def find_again(self) -> None:
        """Find the candidates again: the files have changed, or a key was suspended."""
        self.changes = self._planner.providers.changes
        provider = self._planner.find_again(self.provider, self.target)
        self._found = self._planner.candidates(provider, self.request, self.options)
        self._use_found()

    def _use_found(self) -> None:
        tried = {*self.failed, *self.refused}
        self._use([each for each in self._found if each.provider.member not in tried] or self._found)

    def _use(self, candidates: list[Candidate]) -> None:
        self.candidates = candidates
        self.alternatives = self._alternatives_of(candidates)

    def _alternatives_of(self, candidates: list[Candidate]) -> Sequence[Sequence[LimiterAsk]]:
        """Return what is asked for each of some candidates, with the limits of the sender."""
        sender = self.options.sender
        own = () if sender is None or sender.charged else sender.asks
        if len(candidates) == 1 and not own:  # the usual case
            return (candidates[0].asks,)
        return [(*candidate.asks, *own) for candidate in candidates]

    def repeat(self, times: int) -> None:
        """Ask for this many such calls at once."""
        self._use([candidate.repeated(times) for candidate in self.candidates])

    def is_overdue(self) -> bool:
        """Return whether the deadline has passed; a call that does not wait has the time of retries."""
        timeout = self.options.timeout
        if timeout is None:
            return False
        within = timeout or self.candidate.account.provider.retries.within
        return self._planner.clock.steady() - self.began > within * SECOND

    # ---- charging ----------------------------------------------------------------------------------------------------

    @property
    def verb(self) -> str:
        """The verb that charges the candidates."""
        for candidate in self.candidates:
            if not candidate.plain:
                return "hold"
        sender = self.options.sender
        return "acquire" if sender is None or sender.charged else "hold"

    def ask_flow(self, verb: str, numbers: Sequence[int] = ()) -> JointFlow:
        """Ask the store for the first of some candidates (none: all) with room; raises CandidatesChanged."""
        if self.waits and verb != "peek":
            self._check_current()
        candidates = self.candidates
        paused: list[Decision] = []
        waits_for: list[QueuePlace] = []
        open_numbers: list[int] = []
        for number in numbers or range(len(candidates)):
            candidate = candidates[number]
            account = candidate.account
            if account.is_paused():
                paused.append(account.deny_paused(candidate.asks[0].cost))
                waits_for.append((account.limiter.queues, account.key))
            else:
                open_numbers.append(number)
        if not open_numbers:
            self.denying = waits_for
            return soonest(paused)
        self.only = None
        decision = yield from super().ask_flow(verb, open_numbers)
        if decision.allowed:
            self.candidate = candidates[self.chosen]
            return decision
        self.denying += waits_for
        return soonest([*paused, self._retry_after_recovery(decision, open_numbers)])

    def charge_now(self) -> bool:
        """Charge a call that has not waited, in a store in memory; returns whether it is allowed.

        Its candidates are of one account, without anything that is charged with it. If it was not asked, because this
        is not so or because others wait for its key, `denied` is None.
        """
        candidates = self.candidates
        account, self.denied = candidates[0].account, None
        if self.waits or account.limiter.queues.occupied or account.is_paused():
            return False
        wakes = account.limiter.queues.wakes
        denials: list[Decision] = []
        for number, asks in enumerate(self.alternatives):
            if len(asks) != 1 or candidates[number].account is not account:
                return False
            limiter, key, cost, _ = asks[0]
            decision = limiter.charge_now(key, cost) if account.plain else limiter.hold_now(key, cost)
            if decision.allowed:
                self.only, self.candidate = (asks[0], decision), candidates[number]
                return True
            denials.append(self._retry_after_recovery(decision, (number,)))
        place = account.limiter.queues, account.key
        numbers = tuple(range(len(denials)))
        self.denied = Denial(soonest(denials), account.clock.steady(), wakes, (place,), numbers)
        return False

    def _retry_after_recovery(self, decision: Decision, numbers: Sequence[int]) -> Decision:
        """Return a denial; a cost that is too large for a reduced capacity may fit when that has recovered."""
        sender = self.options.sender
        if decision.retry != NEVER or not (sender is None or sender.can_fit()):
            return decision
        waits = [wait for number in numbers if (wait := self.candidates[number].recovery_wait()) is not None]
        return retry_after_recovery(decision, min(waits)) if waits else decision

    def leave_to_sender(self, charge: Charge, sender: SenderLimits) -> None:
        """Take what the sender was charged from a charge: the sender settles it, once for all attempts."""
        if not sender.charged:
            count = len(self.candidate.asks)
            charge.charges, sender.charged = charge.charges[:count], charge.charges[count:]
            self._use(self.candidates)

    def note_denied(self) -> None:
        """Note whether it was denied by the limits of its sender."""
        sender = self.options.sender
        if sender is not None:
            sender.denied = any((each.limiter.queues, each.key) in self.denying for each in sender.asks)

    def _check_current(self) -> None:
        if len(self.candidates) > 1:
            suspended = [candidate.account.key_rejected for candidate in self.candidates]
            if any(suspended) and not all(suspended):
                raise CandidatesChanged
        if not self._planner.are_current(self.changes):
            raise CandidatesChanged

    def places(self) -> Places:
        """Return the queues in which it may have to wait."""
        candidates = self.candidates
        if len(candidates) == 1 and len(self.alternatives[0]) == 1:
            return candidates[0].account.places
        return super().places()

    def max_sleep(self, _verb: str) -> int:
        """Return how long it may sleep at most: a capacity recovers, and the first waiter reads changed files."""
        account = self.candidates[0].account
        now = account.clock.steady()
        dues = [due for each in self.candidates if (due := each.account.account_capacity.due()) is not None]
        check_at = self._planner.next_reload()
        if check_at is not None:
            dues.append(max(check_at, now + SECOND))
        # Other processes may return permits, and cannot wake this one.
        most = MAX_DURATION if account.store.instant else SECOND
        return most if not dues else min(most, max(0, min(dues) - now))


def denial(call: GateCall, decision: Decision, timeout: float | None) -> Denied:
    """Return the error of a call that no candidate had room for."""
    candidates = call.candidates
    name, names = candidates[0].provider.name, ", ".join(decision.violated)
    members = len({id(each.account) for each in candidates})
    if members > 1:
        name = f"{name} (all {members} members)"
    got = "no permit" if members > 1 else f"{candidates[0].account.key!r} got no permit"
    if decision.retry == NEVER:
        message = f"the cost exceeds what {names} can ever allow"
    elif decision.retry:
        message = f"{got} within {timeout} s: {names} would allow it in {decision.retry_after} s"
    else:
        message = f"{got} within {timeout} s: other calls are ahead of it in the queue"
    return Denied(f"provider {name}: {message}", decision)


def label_of(candidate: Candidate, options: RequestOptions) -> CallLabel | None:
    """Return what the cost of a call is recorded under; None: the provider has no prices."""
    provider, request = candidate.provider, candidate.plan.request
    if provider.prices is None:
        return None
    model = (request.model if request is not None else options.model) or ""
    money = candidate.plan.money
    return CallLabel(provider.name, provider.member, model, options.team, options.tag, provider.prices.unit, money)
