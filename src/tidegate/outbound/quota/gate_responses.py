"""How a gate sends a request that is charged, and what it learns from the response: the part that does not wait."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate.flow import complete_flow, suppress_errors_flow
from tidegate.headers import Advice, read
from tidegate.outbound.capacity.learning import (
    FORBIDDEN,
    SERVICE_UNAVAILABLE,
    TOO_MANY_REQUESTS,
    effective_status,
    required_wait,
)
from tidegate.outbound.capacity.retry import IDEMPOTENT_METHODS, retry_pause
from tidegate.outbound.quota.exchange import has_rate_limit_headers
from tidegate.outbound.quota.gate_accounts import GateAccounts
from tidegate.outbound.quota.refusal_body import read_refusal_flow

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from tidegate.flow import CallFlow
    from tidegate.outbound.quota.account import Account
    from tidegate.outbound.quota.charge import Charge
    from tidegate.outbound.quota.choice import CallCandidates, Candidate
    from tidegate.outbound.quota.exchange import OutboundRequest, ProviderResponse

log: logging.Logger = logging.getLogger(__name__)

NO_ADVICE: Final = Advice()
REFUSAL_STATUSES: Final = (TOO_MANY_REQUESTS, SERVICE_UNAVAILABLE)
REJECTED_STATUSES: Final = (401, FORBIDDEN)  # of a request whose key is invalid
FIRST_ERROR_STATUS: Final = 400
COUNTER_NAMES: Final = (
    "sent",
    "unlimited",
    "denied",
    "refused",
    "rejected",
    "retried",
    "corrected",
    "topped_up",
    "cut_off",
    "overrun",
    "overrun_tokens",
    "overrun_micros",
)


class GateResponses(GateAccounts):
    """Base class of gates: sends requests and learns from their responses. The gate sets the attributes."""

    _counts: Counter[str]

    def _check_outdated_flow(self, account: Account, charge: Charge) -> CallFlow[Any]:
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
            yield from suppress_errors_flow(charge.cancel)
            raise
        if outdated:
            yield charge.cancel
        return outdated

    def _send_once_flow(
        self, account: Account, call: OutboundRequest, send: Callable[[], Any], charge: Charge
    ) -> CallFlow[Any]:
        """Send; a request that was never sent returns its permits, any other may have arrived and is charged."""
        try:
            response = yield send
        except GeneratorExit:
            raise
        except BaseException as error:
            if call.unreached(error):
                yield from complete_flow(recharged_flow(charge), suppress_errors_flow(charge.cancel))
            else:
                account.spent += charge.record_spending()
                yield from complete_flow(
                    recharged_flow(charge), account.recharge_if_late_flow(charge), suppress_errors_flow(charge.commit)
                )
            raise
        finally:
            charge.answered = True
        return response

    def _handle_response_flow(
        self,
        account: Account,
        call: OutboundRequest,
        charge: Charge,
        response: ProviderResponse,
        when: tuple[int, int, int],
    ) -> CallFlow[Any]:
        """Learn from a response; returns the pause before a retry (None: do not retry).

        `when` is the instant at which it was sent, the start of its first attempt, and the number of attempts.
        """
        if charge.recharging is not None:
            yield from recharged_flow(charge)
        sent, began, attempt = when
        advice, headers = NO_ADVICE, response.headers
        if headers and has_rate_limit_headers(headers):
            advice = read(headers, self.clock.ns() / 1e9)
        status = response.status if advice is NO_ADVICE else effective_status(response.status, advice)
        if status != TOO_MANY_REQUESTS and account.delays.has_movable:
            yield from account.recharge_if_late_flow(charge)
        if status in REFUSAL_STATUSES:
            told = yield from read_refusal_flow(account.provider.counting, response, advice)
            wait = required_wait(advice) if told.retry_after is None else told.retry_after
            yield from self._handle_refusal_flow(account, charge, sent, status, wait)
            if account.provider.learn != "off":
                self._counts["corrected"] += yield from account.learn_refused_flow(told, advice)
            spent = self.clock.steady() - began
            rules = account.provider.retries, attempt, status, call.method, spent, wait
            return retry_pause(*rules, self._jitter()) if call.replays else None
        account.account_capacity.record_success()
        if advice.limits and account.provider.learn != "off":
            self._counts["corrected"] += yield from account.learn_flow(advice)
        return None

    def _move_on_flow(
        self,
        candidates: CallCandidates,
        candidate: Candidate,
        call: OutboundRequest,
        charge: Charge,
        status: int,
    ) -> CallFlow[Any]:
        """Return 0 if another member of a pool may send a call that this one could not; None: no other may.

        A member whose key was rejected is no longer a candidate; one that was refused is frozen. A 403 may be about the
        request, so the key counts as rejected only once another member has sent the same call (or if none can).
        """
        if status in REJECTED_STATUSES and not charge.settled:
            if status == FORBIDDEN and call.replays:
                candidates.forbidden += (candidate.account,)
            else:
                self._reject_key(candidate.account, status)
            yield from suppress_errors_flow(charge.cancel)
            candidates.drop(candidate)
            return 0 if candidates and call.replays else None
        if status < FIRST_ERROR_STATUS:
            for account in candidates.forbidden:
                self._reject_key(account, FORBIDDEN)
        if not call.replays:
            return None
        if status not in REFUSAL_STATUSES or (status != TOO_MANY_REQUESTS and call.method not in IDEMPOTENT_METHODS):
            return None
        return 0 if any(each is not candidate and not each.wait() for each in candidates) else None

    def _reject_key(self, account: Account, status: int) -> None:
        account.reject_key()
        self._counts["rejected"] += 1
        message = "the key of %s was rejected (%d): it is not used until its file changes"
        log.error(message, account.provider.title, status)

    def _handle_refusal_flow(
        self, account: Account, charge: Charge, sent: int, status: int, retry_after: float | None
    ) -> CallFlow[Any]:
        """Learn from a refusal; after a 429, return the permit once other processes can know the lower capacity."""
        self._counts["refused"] += 1
        yield from account.handle_refusal_flow(status, charge, sent, retry_after)
        if status == TOO_MANY_REQUESTS:
            yield from suppress_errors_flow(charge.cancel)


def recharged_flow(charge: Charge) -> CallFlow[Any]:
    """Wait until a charge is made again, if that has begun: settling it meanwhile would correct the first charge."""
    if charge.recharging is not None:
        yield from suppress_errors_flow(partial(asyncio.shield, charge.recharging))
