"""A Reserver takes permits for calls: it waits, and returns those that should not be used."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tidegate.core.bounds import SECOND
from tidegate.errors import Denied
from tidegate.joint import acquire_flow
from tidegate.limiter import seconds
from tidegate.outbound.quota.candidates import (
    CallQueues,
    CandidatesCall,
    CandidatesChanged,
    denial,
    label_of,
)
from tidegate.outbound.quota.charge import Charge, quiet_flow

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from tidegate.clock import Signal
    from tidegate.core import Decision
    from tidegate.flow import CallFlow
    from tidegate.outbound.providers.provider import Provider
    from tidegate.outbound.quota.account import Account
    from tidegate.outbound.quota.candidates import CallCandidates, Candidate
    from tidegate.outbound.quota.exchange import OutboundRequest, RequestOptions
    from tidegate.outbound.quota.planner import CallPlanner
    from tidegate.spending import Spending
    from tidegate.stores import Store


class Reserver:
    """Takes permits: each call is one joint reservation of its account and of its ceilings."""

    def __init__(
        self,
        planner: CallPlanner,
        store: Store,
        make_signal: Callable[[], Signal],
        spending: Spending | None,
        counts: Counter[str],
    ) -> None:
        """Charge in a store; `spending` records what calls cost."""
        self.queues: CallQueues = CallQueues()
        self._planner = planner
        self._store = store
        self._clock = store.clock
        self._make_signal = make_signal
        self._spending = spending
        self._counts = counts
        store.wait_queues.add(self.queues)
        planner.on_change = self.wake_all

    def wake_all(self) -> None:
        """Let waiting calls find their candidates again: the provider files have changed."""
        self.queues.wake_all()
        for account in tuple(self._planner.accounts.values()):
            account.limiter.queues.wake_all()

    def reserve_flow(
        self,
        candidates: CallCandidates,
        options: RequestOptions,
        began: int,
        call: OutboundRequest,
        provider: Provider,
        target: object,
    ) -> CallFlow[tuple[Candidate, Charge]]:
        """Wait for permits; if the capacity turns out to be lower than known, return them and wait again.

        The same, once, if the response of the store was so slow that the request would be sent too late. If the
        candidates change while the call waits, they are found again, at the current provider of the `target`. Returns
        the candidate that is charged, and its charge.
        """
        planner = self._planner
        was_replaced = self._store.instant  # then no permit is too old
        while True:
            try:
                candidate, charge = yield from self._charge_flow(candidates, options, began)
            except CandidatesChanged:
                changes = planner.providers.changes
                found = planner.candidates(planner.find_again(provider, target), call, options)
                candidates.renew(found, changes)
                continue
            account = candidate.account
            if (yield from self._check_outdated_flow(account, charge)):
                continue
            if not self._store.instant and account.delays.is_stale(charge, checked_later=call.reports_write):
                if was_replaced:
                    account.delays.keep_stale()
                else:
                    was_replaced = True
                    yield from quiet_flow(charge.cancel_flow())
                    if charge.settled:
                        continue
            self._counts["sent"] += 1
            if candidate.provider.prices is not None:
                charge.label, charge.spending = label_of(candidate, options), self._spending
            return candidate, charge

    def _charge_flow(
        self, candidates: CallCandidates, options: RequestOptions, began: int
    ) -> CallFlow[tuple[Candidate, Charge]]:
        timeout = options.timeout
        if timeout is not None:
            timeout = max(0.0, seconds("timeout", timeout) - (self._clock.steady() - began) / SECOND)
        planner = self._planner
        check = partial(planner.are_current, candidates.changes)
        call = CandidatesCall(list(candidates), self.queues, check, planner.next_reload)
        try:
            yield from acquire_flow(call, call.verb, timeout, options.priority, self._make_signal, None, began)
        except Denied as denied:
            self._counts["denied"] += 1
            raise denial(candidates, denied.decision, timeout) from None
        return call.candidate, Charge(call.reserved(), self._clock)

    def peek_flow(self, candidates: Sequence[Candidate], times: int = 1) -> CallFlow[Decision]:
        """Peek at the first candidate with room for this many calls."""
        return CandidatesCall([each.repeated(times) for each in candidates], self.queues).ask_flow("peek")

    def waiting_for(self, candidates: Sequence[Candidate]) -> int:
        """Return the number of calls that wait in the same queue."""
        places = CandidatesCall(candidates, self.queues).places()
        return sum(queues.waiting(key) for queues, key in places.queues)

    @staticmethod
    def _check_outdated_flow(account: Account, charge: Charge) -> CallFlow[bool]:
        """Return whether the capacity is lower than known when a permit was granted.

        If it is, or if that cannot be found out, the permit is returned: the request will not be sent.
        """
        delays, outdated = account.delays, False
        expired = delays.find_expired(charge.at) if delays.in_flight else None
        try:
            if expired is not None:
                outdated = yield from account.renew_flow(expired, charge.at)
            elif account.account_capacity.is_check_due():
                outdated = yield from account.check_flow()
        except GeneratorExit:
            raise
        except BaseException:
            yield from quiet_flow(charge.cancel_flow())
            raise
        if outdated:
            yield from charge.cancel_flow()
        return outdated
