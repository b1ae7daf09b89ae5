"""How a gate sends a request that is charged, and what it learns from the response: the part that does not wait."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.bounds import SECOND
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
from tidegate.outbound.providers.provider import REQUESTS_UNIT
from tidegate.outbound.quota.exchange import has_rate_limit_headers
from tidegate.outbound.quota.gate_accounts import GateAccounts
from tidegate.outbound.quota.key_trouble import DOUBT, MAX_MODEL_NAME
from tidegate.outbound.quota.refusal_body import read_refusal_flow
from tidegate.outbound.quota.settlement import log_unsettled

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
UNAUTHORIZED: Final = 401
REJECTED_STATUSES: Final = (UNAUTHORIZED, FORBIDDEN)  # of a request whose key is invalid, or may not send it
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
    "unsettled",
)


class ResponseMeaning(NamedTuple):
    """How a response is understood: 429 for a 403 that is a refusal; how many seconds a refusal asks to wait."""

    status: int
    retry_after: float | None = None


class CallProgress(NamedTuple):
    """When a call arrived, how many seconds it may take (None: any), and the number of the current attempt."""

    began: int
    timeout: float | None
    attempt: int


class NextTry(NamedTuple):
    """The microseconds before a call is sent again, and whether all members are tried again."""

    pause: int
    new_attempt: bool


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
        charge: Charge,
        response: ProviderResponse,
        sent: int,
    ) -> CallFlow[Any]:
        """Learn from a response to a request that was `sent` at that instant; returns how it is understood."""
        if charge.recharging is not None:
            yield from recharged_flow(charge)
        advice, headers = NO_ADVICE, response.headers
        if headers and has_rate_limit_headers(headers):
            advice = read(headers, self.clock.ns() / 1e9)
        status = response.status if advice is NO_ADVICE else effective_status(response.status, advice)
        if account.delays.has_movable:
            yield from account.recharge_if_late_flow(charge)
        if status in REFUSAL_STATUSES:
            told = yield from read_refusal_flow(account.provider.counting, response, advice)
            wait = required_wait(advice) if told.retry_after is None else told.retry_after
            yield from self._handle_refusal_flow(account, charge, sent, status, wait)
            if account.provider.learn != "off":
                self._counts["corrected"] += yield from account.learn_refused_flow(told, advice)
            return ResponseMeaning(status, wait)
        account.account_capacity.record_success()
        if advice.limits and account.provider.learn != "off":
            self._counts["corrected"] += yield from account.learn_flow(advice)
        return ResponseMeaning(status)

    def _next_try(
        self,
        candidates: CallCandidates,
        candidate: Candidate,
        call: OutboundRequest,
        meaning: ResponseMeaning,
        progress: CallProgress,
    ) -> NextTry | None:
        """Return how the call is sent again: by another member, or in another attempt; None: it is not.

        Each member is tried once in an attempt. After the deadline, nothing is sent again.
        """
        status = meaning.status
        if candidate.provider.member:
            self._note_member(candidates, candidate, status)
            if call.replays and self._may_move_on(candidates, candidate, call, status, progress):
                return NextTry(0, new_attempt=False)
        if status not in REFUSAL_STATUSES or not call.replays:
            return None
        retries, spent = candidate.account.provider.retries, self.clock.steady() - progress.began
        if progress.timeout is not None:
            retries = retries._replace(within=min(retries.within, progress.timeout))
        rules = retries, progress.attempt, status, call.method, spent, meaning.retry_after
        pause = retry_pause(*rules, self._jitter())
        return None if pause is None else NextTry(pause, new_attempt=True)

    def _note_member(self, candidates: CallCandidates, candidate: Candidate, status: int) -> None:
        """Note what a response says about the key of a member.

        A 401 or 403 may be about the call, see `key_trouble`.
        """
        account = candidate.account
        if status in REJECTED_STATUSES:
            if status == UNAUTHORIZED and not account.key_accepted:
                account.doubt_key(candidate.model)
            candidates.rejected += ((candidate, status),)
            candidates.drop(candidate)
        elif status in REFUSAL_STATUSES:
            candidates.refuse(candidate)
        elif status < FIRST_ERROR_STATUS:
            account.accept_key(candidate.model)
            for other, rejected_with in candidates.rejected:
                self._note_rejected(other, rejected_with)

    def _may_move_on(
        self,
        candidates: CallCandidates,
        candidate: Candidate,
        call: OutboundRequest,
        status: int,
        progress: CallProgress,
    ) -> bool:
        """Return whether another member, not tried yet, may send a call that this one could not."""
        if self._is_overdue(candidate, progress):
            return False
        if status in REJECTED_STATUSES:
            return bool(candidates)
        repeats = status == TOO_MANY_REQUESTS or call.method.upper() in IDEMPOTENT_METHODS
        return status in REFUSAL_STATUSES and repeats and any(not each.wait() for each in candidates)

    def _is_overdue(self, candidate: Candidate, progress: CallProgress) -> bool:
        """Return whether the deadline of a call has passed; a call that does not wait has the time of retries."""
        timeout = progress.timeout
        if timeout is None:
            return False
        within = timeout or candidate.account.provider.retries.within
        return self.clock.steady() - progress.began > within * SECOND

    def _note_rejected(self, candidate: Candidate, status: int) -> None:
        """Note that another member could send a call that this one was rejected for."""
        account, title = candidate.account, candidate.account.provider.title
        if status == UNAUTHORIZED and (pause := account.suspend_key()):
            self._counts["rejected"] += 1
            message = "the key of %s was rejected (%d), another member could send the call: it is not used for %d s"
            log.error(message, title, status, pause // SECOND)
        elif account.doubt_key(candidate.model):
            message = "%s rejected a call of model %r (%d), another member could send it: others are preferred for %d s"
            log.warning(message, title, candidate.model[:MAX_MODEL_NAME], status, DOUBT // SECOND)

    def _handle_refusal_flow(
        self, account: Account, charge: Charge, sent: int, status: int, retry_after: float | None
    ) -> CallFlow[Any]:
        """Learn from a refusal. After a 429, once other processes can know the lower capacity, only the request counts.

        It has arrived, so its permit stays charged: many providers count refused requests, too.
        """
        self._counts["refused"] += 1
        yield from account.handle_refusal_flow(status, charge, sent, retry_after)
        if status == TOO_MANY_REQUESTS:
            unused = {unit: 0 for unit in charge.units if unit != REQUESTS_UNIT}
            yield partial(charge.commit, unused or None)

    def note_unsettled(self, name: str, error: Exception) -> None:
        """Count and log that something failed after a response had arrived: the caller still gets the response."""
        self._counts["unsettled"] += 1
        log_unsettled(name, error)


def recharged_flow(charge: Charge) -> CallFlow[Any]:
    """Wait until a charge is made again, if that has begun: settling it meanwhile would correct the first charge."""
    if charge.recharging is not None:
        yield from suppress_errors_flow(partial(asyncio.shield, charge.recharging))
