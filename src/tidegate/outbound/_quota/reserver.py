"""A Reserver takes permits for calls: it waits, and returns those that should not be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate._limiter.joint import acquire_flow
from tidegate._limiter.limiter import seconds
from tidegate._limiter.waiting import Denial
from tidegate._runtime.ambient import CURRENT_RUN
from tidegate.core._bounds import SECOND
from tidegate.errors import Denied
from tidegate.outbound._quota.charge import Charge, quiet_flow
from tidegate.outbound._quota.gate_call import CandidatesChanged, denial, label_of

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from tidegate._runtime.clock import Signal
    from tidegate._runtime.flow import CallFlow
    from tidegate.outbound._quota.account import Account
    from tidegate.outbound._quota.gate_call import GateCall
    from tidegate.outbound._quota.planner import CallPlanner
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
        self._planner = planner
        self._store = store
        self._clock = store.clock
        self._make_signal = make_signal
        self._spending = spending
        self._counts = counts
        planner.on_change = self.wake_all

    def wake_all(self) -> None:
        """Let waiting calls find their candidates again: the provider files have changed."""
        for limiter in self._planner.limiters:
            limiter.queues.wake_all()

    def reserve_flow(self, call: GateCall) -> CallFlow[Charge]:  # noqa: C901 - one path, without calls for its branches
        """Wait for permits; if the capacity turns out to be lower than known, return them and wait again.

        The same, once, if the response of the store was so slow that the request would be sent too late. If the
        candidates change while the call waits, they are found again.
        """
        store = self._store
        was_replaced = False
        while True:
            if not (store.instant and call.charge_now()):
                try:
                    yield from self._charge_flow(call)
                except CandidatesChanged:
                    call.find_again()
                    continue
            candidate = call.candidate
            account = candidate.account
            only = call.only
            charge = Charge(call.reserved() if only is None else (), self._clock, only=only)
            delays = account.delays
            expired = delays.find_expired(charge.at) if delays.in_flight else None
            if (expired is not None or account.account_capacity.is_check_due()) and (
                yield from self._check_outdated_flow(account, charge, expired)
            ):
                continue
            if not store.instant and delays.is_stale(charge, checked_later=call.request.reports_write):
                if not was_replaced:
                    was_replaced = True
                    yield from quiet_flow(charge.cancel_flow())
                    if charge.settled:
                        continue
                delays.keep_stale()
            if candidate.provider.prices is not None:
                charge.label, charge.spending = label_of(candidate, call.options), self._spending
            if CURRENT_RUN.get() is not None:
                yield from charge.charge_run_flow(call.request.identify)
            if call.options.sender is not None:
                call.leave_to_sender(charge, call.options.sender)
            self._counts["sent"] += 1
            call.charge = charge
            return charge

    def _charge_flow(self, call: GateCall) -> CallFlow[None]:
        """Ask at once, unless other calls wait for the same permits; then wait."""
        denied = call.denied  # at once, by a store in memory
        verb = call.verb
        if denied is None:
            places = call.places()
            numbers = places.open_to(None)
            if numbers:
                wakes = places.wakes
                decision = yield from call.ask_flow(verb, numbers)
                if decision.allowed:
                    return
                denied = Denial(decision, self._clock.steady(), wakes, call.denying, numbers)
        call.waits = True
        timeout, priority = call.options.timeout, call.options.priority
        if timeout is not None:
            timeout = max(0.0, seconds("timeout", timeout) - (self._clock.steady() - call.began) / SECOND)
        try:
            yield from acquire_flow(call, verb, timeout, priority, self._make_signal, denied, call.began)
        except Denied as error:
            self._counts["denied"] += 1
            call.note_denied()
            raise denial(call, error.decision, timeout) from None

    @staticmethod
    def _check_outdated_flow(account: Account, charge: Charge, expired: Charge | None) -> CallFlow[bool]:
        """Return whether the capacity is lower than known when a permit was granted.

        That is so if a request in flight, whose permit has `expired`, is charged again, or if other processes were
        refused. If it is, or if that cannot be found out, the permit is returned: the request will not be sent.
        """
        try:
            if expired is not None:
                outdated: bool = yield from account.renew_flow(expired, charge.at)
            else:
                outdated = yield from account.check_flow(charge.at)
        except GeneratorExit:
            raise
        except BaseException:
            yield from quiet_flow(charge.cancel_flow())
            raise
        if outdated:
            yield from charge.cancel_flow()
        return outdated
