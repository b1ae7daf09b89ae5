"""A ResponseHandler sends requests that are charged, learns from their responses, and decides what is sent again."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._runtime.flow import complete_flow, suppress_errors_flow
from tidegate.core._bounds import SECOND
from tidegate.headers import Advice, read
from tidegate.outbound._capacity.learning import (
    FORBIDDEN,
    SERVICE_UNAVAILABLE,
    TOO_MANY_REQUESTS,
    effective_status,
    required_wait,
)
from tidegate.outbound._providers.provider import REQUESTS_UNIT
from tidegate.outbound._quota.charge import quiet_flow
from tidegate.outbound._quota.exchange import has_rate_limit_headers
from tidegate.outbound._quota.key_trouble import DOUBT, MAX_MODEL_NAME
from tidegate.outbound._quota.refusal_body import read_refusal_flow
from tidegate.outbound._quota.settlement import PendingSettlement, log_unsettled

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import CallFlow
    from tidegate.outbound._providers.provider import Retries
    from tidegate.outbound._quota.account import Account
    from tidegate.outbound._quota.charge import Charge
    from tidegate.outbound._quota.cost import CallPlan
    from tidegate.outbound._quota.exchange import OutboundRequest, ProviderResponse
    from tidegate.outbound._quota.gate_call import Candidate, GateCall
    from tidegate.outbound._quota.learned_sizes import LearnedSizes

log: logging.Logger = logging.getLogger("tidegate.outbound")

NO_ADVICE: Final = Advice()
REFUSAL_STATUSES: Final = (TOO_MANY_REQUESTS, SERVICE_UNAVAILABLE)
UNAUTHORIZED: Final = 401
REJECTED_STATUSES: Final = (UNAUTHORIZED, FORBIDDEN)  # of a request whose key is invalid, or may not send it
FIRST_ERROR_STATUS: Final = 400
# Sent twice, they have the same effect as sent once.
IDEMPOTENT_METHODS: Final = ("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE")
FIRST_PAUSE: Final = 250_000  # microseconds, the average of the first pause; it doubles
MAX_PAUSE: Final = 30 * SECOND

COUNTER_NAMES: Final = (
    "sent",
    "unlimited",
    "denied",
    "refused",
    "rejected",
    "retried",
    "corrected",
    "truncated",
    "overrun",
    "overrun_tokens",
    "overrun_micros",
    "unsettled",
)


class ResponseMeaning(NamedTuple):
    """How a response is understood: 429 for a 403 that is a refusal; how many seconds a refusal asks to wait."""

    status: int
    retry_after: float | None = None


class NextTry(NamedTuple):
    """The microseconds before a call is sent again, and whether all members are tried again."""

    pause: int
    new_attempt: bool


class ResponseHandler:
    """Sends charged requests and handles what comes back."""

    def __init__(
        self,
        clock: Clock,
        counts: Counter[str],
        learned: LearnedSizes,
        jitter: Callable[[], float],
        recharge_written: Callable[[Account, Charge], None],
    ) -> None:
        """Count in `counts`; `recharge_written` charges a permit again, whose request was written late."""
        self.clock = clock
        self._counts = counts
        self._learned = learned
        self._jitter = jitter
        self._recharge_written = recharge_written

    def send_flow(self, call: GateCall, send: Callable[..., Any]) -> CallFlow[Any]:
        """Send; returns the response, or how the call is sent again because there is none."""
        (own, account, plan, _), charge = call.candidate, call.charge
        delays = account.delays
        if delays.has_movable:
            delays.track(charge)
        if call.request.reports_write and delays.watches_writes:
            send_once = partial(send, own, plan.body, partial(self._note_written, account, charge))
        else:
            send_once = partial(send, own) if plan.body is None else partial(send, own, plan.body)
        call.tries += 1
        call.sent = self.clock.steady()
        try:
            return (yield from self._send_once_flow(account, call.request, send_once, charge))
        except Exception as error:
            again = self._try_after_error(call, error)
            if again is None:
                raise
            return again

    def _try_after_error(self, call: GateCall, error: Exception) -> NextTry | None:
        """Return how a call without a response is sent again: by another member, or in another attempt; None: not."""
        request, own = call.request, call.candidate.provider
        unreached = request.unreached(error)
        if own.member and unreached and call.others and not call.is_overdue():
            call.drop(call.candidate)
            return NextTry(0, new_attempt=False)
        if not request.retries(error) or not (unreached or request.method.upper() in IDEMPOTENT_METHODS):
            return None
        pause = retry_pause(*self._retries(call), None, self._jitter() if unreached else 0)
        return None if pause is None else NextTry(pause, new_attempt=True)

    def _retries(self, call: GateCall) -> tuple[Retries, int, int]:
        """Return how often a call is sent again, its number of attempts, and the microseconds since it began."""
        retries = call.candidate.account.provider.retries
        if call.options.timeout is not None:
            retries = retries._replace(within=min(retries.within, call.options.timeout))
        return retries, call.attempt, self.clock.steady() - call.began

    def _note_written(self, account: Account, charge: Charge) -> None:
        """Charge a permit again if its request was written long after it was taken."""
        if account.delays.is_late(charge):
            self._recharge_written(account, charge)

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
                yield from complete_flow(recharged_flow(charge), quiet_flow(charge.cancel_flow()))
            else:
                account.spent += charge.record_spending()
                yield from complete_flow(
                    recharged_flow(charge), account.recharge_if_late_flow(charge), quiet_flow(charge.commit_flow())
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

    def _next_try(self, call: GateCall, meaning: ResponseMeaning) -> NextTry | None:
        """Return how the call is sent again: by another member, or in another attempt; None: it is not.

        Each member is tried once in an attempt. After the deadline, nothing is sent again.
        """
        status, request = meaning.status, call.request
        if call.candidate.provider.member:
            self._note_member(call, status)
            if request.replays and self._may_move_on(call, status):
                return NextTry(0, new_attempt=False)
        # A 429 was not processed, so every method is retried; a 503 may have been.
        repeats = status == TOO_MANY_REQUESTS or request.method.upper() in IDEMPOTENT_METHODS
        if status not in REFUSAL_STATUSES or not request.replays or not repeats:
            return None
        pause = retry_pause(*self._retries(call), meaning.retry_after, self._jitter())
        return None if pause is None else NextTry(pause, new_attempt=True)

    def _note_member(self, call: GateCall, status: int) -> None:
        """Note what a response says about the key of a member.

        A 401 or 403 may be about the call, see `key_trouble`.
        """
        candidate = call.candidate
        account = candidate.account
        if status in REJECTED_STATUSES:
            if status == UNAUTHORIZED and not account.key_accepted:
                account.doubt_key(candidate.model)
            call.rejected += ((candidate, status),)
            call.drop(candidate)
        elif status in REFUSAL_STATUSES:
            call.refuse(candidate)
        elif status < FIRST_ERROR_STATUS:
            account.accept_key(candidate.model)
            for other, rejected_with in call.rejected:
                self._note_rejected(other, rejected_with)

    @staticmethod
    def _may_move_on(call: GateCall, status: int) -> bool:
        """Return whether another member, not tried yet, may send a call that this one could not."""
        if call.is_overdue():
            return False
        if status in REJECTED_STATUSES:
            return bool(call.candidates)
        repeats = status == TOO_MANY_REQUESTS or call.request.method.upper() in IDEMPOTENT_METHODS
        return status in REFUSAL_STATUSES and repeats and any(not each.account.is_paused() for each in call.candidates)

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
            yield from charge.commit_flow(unused or None)

    def finish_flow(self, call: GateCall, response: ProviderResponse) -> CallFlow[NextTry | None]:
        """Learn from a response; returns how the call is sent again, or None.

        An error is logged and counted, and the caller gets the response; a cancellation ends the call.
        """
        (own, account, plan, _), charge = call.candidate, call.charge
        try:
            meaning = yield from self._handle_response_flow(account, charge, response, call.sent)
            again = self._next_try(call, meaning)
            if again is not None and not charge.settled:
                yield from self._settle_failed_flow(account, charge, response.status, plan)
        except GeneratorExit:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a store raises
            self.note_unsettled(own.title, error)
            return None
        except BaseException:
            yield from self._abandon_flow(account, charge, response)
            raise
        return again

    def make_settlement(self, account: Account, charge: Charge, status: int, plan: CallPlan) -> PendingSettlement:
        """Return what settles a charge at the end of its response."""
        return PendingSettlement(account, charge, status, plan, self._learned, self._counts)

    @staticmethod
    def _abandon_flow(account: Account, charge: Charge, response: ProviderResponse) -> CallFlow[Any]:
        """Close a response that the caller will never see; its call costs what is reserved."""
        settle = [suppress_errors_flow(response.close), recharged_flow(charge)]
        if not charge.settled:
            account.spent += charge.record_spending()
            settle.append(quiet_flow(charge.commit_flow()))
        yield from complete_flow(*settle)

    def _settle_failed_flow(self, account: Account, charge: Charge, status: int, plan: CallPlan) -> CallFlow[Any]:
        """Settle a call that failed and is sent again: most providers charge nothing for it but the request."""
        if account.settles:
            yield from self.make_settlement(account, charge, status, plan).settle_flow()
        else:
            yield from quiet_flow(charge.commit_flow())

    def note_unsettled(self, name: str, error: Exception) -> None:
        """Count and log that something failed after a response had arrived: the caller still gets the response."""
        self._counts["unsettled"] += 1
        log_unsettled(name, error)


def recharged_flow(charge: Charge) -> CallFlow[Any]:
    """Wait until a charge is made again, if that has begun: settling it meanwhile would correct the first charge."""
    if charge.recharging is not None:
        yield from suppress_errors_flow(partial(asyncio.shield, charge.recharging))


def retry_pause(retries: Retries, attempt: int, spent: int, retry_after: float | None, jitter: float) -> int | None:
    """Return how many microseconds after Retry-After to retry; None: do not retry.

    `spent` microseconds have passed since the first attempt, `jitter` is a random number below 1.
    """
    if attempt > retries.max_retries:
        return None
    pause = round(jitter * 2 * min(MAX_PAUSE, FIRST_PAUSE << (attempt - 1)))
    wait = 0 if retry_after is None else round(retry_after * SECOND)
    return pause if spent + wait + pause <= retries.within * SECOND else None
