"""How a gate takes permits for a request: it waits, and returns those that it should not use."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tidegate.core.bounds import SECOND
from tidegate.errors import Denied, ResourceUnknown
from tidegate.flow import suppress_errors_flow
from tidegate.limiter import seconds
from tidegate.observe import Record
from tidegate.outbound.quota.charge import CHARGE_TTL, Charge, observe_money
from tidegate.outbound.quota.choice import CallCandidates, CandidatesChanged, Chooser, label_of
from tidegate.outbound.quota.gate_responses import GateResponses

if TYPE_CHECKING:
    from tidegate.core import Decision
    from tidegate.flow import CallFlow
    from tidegate.observe import Observer
    from tidegate.outbound.providers.provider import Provider
    from tidegate.outbound.quota.account import Account
    from tidegate.outbound.quota.exchange import OutboundRequest, RequestOptions
    from tidegate.spending import Spending
    from tidegate.stores import Store


class GateReservations(GateResponses):
    """Base class of gates: takes permits. The gate sets the attributes."""

    store: Store
    spending: Spending | None
    _chooser: Chooser
    _observer: Observer | None

    def _find_again(self, provider: Provider, target: object) -> Provider:
        """Return the current provider of a URL, domain or name; the given one if it was removed."""
        try:
            return self.providers.find(target) or provider
        except ResourceUnknown:
            return provider

    def _reserve_flow(
        self,
        candidates: CallCandidates,
        options: RequestOptions,
        began: int,
        call: OutboundRequest,
        provider: Provider,
        target: object,
    ) -> CallFlow[Any]:
        """Wait for permits; if the capacity turns out to be lower than known, return them and wait again.

        The same, once, if the response of the store was so slow that the request would be sent too late. If the
        candidates change while the call waits, they are found again, at the current provider of the `target`. Returns
        the candidate that is charged, and its charge.
        """
        was_replaced = self.store.instant  # then no permit is too old
        while True:
            try:
                candidate, charge = yield from self._charge_flow(candidates, options, began)
            except CandidatesChanged:
                changes = self.providers.changes
                candidates.renew(self._candidates(self._find_again(provider, target), call, options), changes)
                continue
            account = candidate.account
            if (yield from self._check_outdated_flow(account, charge)):
                continue
            if not self.store.instant and account.delays.is_stale(charge, checked_later=call.reports_write):
                if was_replaced:
                    account.delays.keep_stale()
                else:
                    was_replaced = True
                    yield from suppress_errors_flow(charge.cancel)
                    if charge.settled:
                        continue
            self._counts["sent"] += 1
            if candidate.provider.prices is not None:
                charge.set_label(label_of(candidate, options), self.spending)
            return candidate, charge

    def _charge_flow(self, candidates: CallCandidates, options: RequestOptions, began: int) -> CallFlow[Any]:
        candidate = candidates[0]
        account, timeout = candidate.account, options.timeout
        if timeout is not None:
            timeout = max(0.0, seconds("timeout", timeout) - (self.clock.steady() - began) / SECOND)
        if len(candidates) > 1 or candidate.ceilings or candidate.provider.member:
            check = partial(self._is_current, candidates.changes)
            try:
                return (yield from self._chooser.choose_flow(candidates, options, timeout, began, check))
            except Denied:
                self._counts["denied"] += 1
                raise
        account.recover()
        limiter, key, cost = account.limiter, account.key, candidate.plan.cost
        if account.plain and self._observer is None and not limiter.has_waiting:
            decision = yield partial(limiter.try_acquire, key, cost)
            if decision.allowed:
                if self.spending is not None:
                    self._watch_account(account, decision)
                return candidate, Charge(limiter, key, cost, decision)
        try:
            reservation = yield partial(limiter.reserve, key, cost, CHARGE_TTL, timeout, options.priority)
        except Denied as denied:
            self._counts["denied"] += 1
            self._watch_account(account, denied.decision)
            raise Denied(f"provider {account.provider.name}: {denied}", denied.decision) from None
        self._watch_account(account, reservation.decision)
        return candidate, Charge(limiter, key, cost, reservation.decision, reservation)

    def _is_current(self, changes: int) -> bool:
        """Return whether the provider files have not changed since they had changed so many times."""
        self._reload_if_due()
        return self.providers.changes == changes

    def _watch_account(self, account: Account, decision: Decision) -> None:
        """Warn if an account's own money limits approach their ceiling.

        While the account is paused, because the provider refused a call, a denial says nothing about its limits.
        """
        policy = account.limiter.policy
        paused = not decision.within_limits and account.store.frozen_for(policy.name)
        if self.spending is not None and account.provider.prices is not None and not paused:
            observe_money(self.spending, Record("acquire", policy, account.key, (), decision))
