"""How a request is sent within its provider's quota: Gate for threads, AsyncGate for tasks, one flow for both.

    find the provider      none: send the request unlimited
    reserve                wait in the queue for permits, up to the deadline
    send                   through the client library
    settle, learn          see `account`; after a refusal perhaps retry from `reserve` on

The steps of the flow are functions (see `tidegate.flow`). The adapters `httpx`, `requests` and
`aiohttp` translate the requests and responses of their libraries.
"""

from __future__ import annotations

import logging
import operator
import random
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tidegate.bus import open_bus
from tidegate.clock import TaskSignal, ThreadSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError, Denied
from tidegate.flow import run, run_async, suppress_errors_flow
from tidegate.headers import Advice, read
from tidegate.limiter import AsyncLimiter, Limiter, seconds
from tidegate.outbound.capacity.learning import SERVICE_UNAVAILABLE, TOO_MANY_REQUESTS, effective_status, required_wait
from tidegate.outbound.capacity.retry import retry_pause
from tidegate.outbound.providers.registry import Providers
from tidegate.outbound.quota.account import Account
from tidegate.outbound.quota.accounts import Accounts
from tidegate.outbound.quota.charge import CHARGE_TTL, Charge
from tidegate.outbound.quota.cost import TokenEstimates
from tidegate.outbound.quota.exchange import (
    CURRENT_OPTIONS,
    CallEstimate,
    RequestOptions,
    RequestOutcome,
    SendResult,
    has_rate_limit_headers,
)
from tidegate.outbound.quota.gate_accounts import GateAccounts
from tidegate.outbound.quota.learned_sizes import LearnedSizes
from tidegate.outbound.quota.pending_charge import (
    AsyncPendingCharge,
    PendingCharge,
    check_money_given,
    find_target,
    read_cost,
)
from tidegate.outbound.quota.refusal_body import read_refusal_flow
from tidegate.outbound.quota.settlement import PendingSettlement
from tidegate.outbound.quota.tokenizer import load_tokenizer
from tidegate.policy import join_key
from tidegate.reservation import Reserving
from tidegate.stores.opened import OpenedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from tidegate.bus import Bus
    from tidegate.clock import Clock
    from tidegate.core import Decision
    from tidegate.flow import CallFlow
    from tidegate.observe import Observer
    from tidegate.outbound.capacity.shared_capacity import SharedCapacity
    from tidegate.outbound.providers.provider import Provider
    from tidegate.outbound.quota.exchange import OutboundRequest, ProviderResponse
    from tidegate.policy import Cost, Key
    from tidegate.stores import Store

R = TypeVar("R")
P = TypeVar("P", PendingCharge, AsyncPendingCharge)

log: logging.Logger = logging.getLogger(__name__)

RELOAD_INTERVAL: Final = 5.0  # seconds between two checks of the provider files
NO_ADVICE: Final = Advice()
REFUSAL_STATUSES: Final = (TOO_MANY_REQUESTS, SERVICE_UNAVAILABLE)
COUNTER_NAMES: Final = (
    "sent",
    "unlimited",
    "denied",
    "refused",
    "retried",
    "corrected",
    "topped_up",
    "cut_off",
    "overrun",
    "overrun_tokens",
    "overrun_micros",
)


class _Gate(GateAccounts):
    """Base class of Gate and AsyncGate."""

    _limiter: Callable[..., Any]

    def __init__(
        self,
        providers: Providers,
        store: str | Store = "memory://",
        *,
        timeout: float | None = None,
        priority: float = 0,
        bus: str | Bus | None = None,
        clock: Clock | None = None,
        observer: Observer | None = None,
        jitter: Callable[[], float] = random.random,
        reload: float | None = RELOAD_INTERVAL,
        tokenizer: object = None,
    ) -> None:
        """Enforce the quotas of these providers.

        `store` is where usage is counted: a URL, or a Store that is shared with others. A request waits up to `timeout`
        seconds for its permit (None: without limit, 0: not at all), larger `priority` first. Capacity reductions are
        shared over a `bus`. Provider files are checked every `reload` seconds (None: never). `tokenizer` counts the
        tokens of requests: a function of a string, an object with `encode`, or the name of one (`package:function`).
        """
        if not isinstance(providers, Providers):
            raise ConfigError(f"must be Providers, such as Providers.load(...), not {providers!r}", field="providers")
        self.providers = providers
        self._defaults = RequestOptions(
            None if timeout is None else seconds("timeout", timeout), seconds("priority", priority)
        )
        self._opened = OpenedStore.open(store, clock=clock)
        self.store: Store = self._opened.store
        self.clock: Clock = self.store.clock
        self._owns_bus = isinstance(bus, str)
        self.bus: Bus | None = open_bus(bus, clock=clock) if isinstance(bus, str) else bus
        self._observer = observer
        self._jitter = jitter
        self._accounts = Accounts(self.clock, self.bus, self._make_account)
        self._reload = None if reload is None else round(seconds("reload", reload) * SECOND)
        self._next_reload = self.clock.steady() + (self._reload or 0)
        self._counts: Counter[str] = Counter()
        self._estimates: TokenEstimates = TokenEstimates(LearnedSizes(), load_tokenizer(tokenizer))
        self._warned: set[str] = set()  # domains whose key was not sent, and warned about

    def _make_account(self, provider: Provider, key: Key, shared_capacity: SharedCapacity) -> Account:
        limiter = partial(self._limiter, observer=self._observer)
        return Account(provider, key, join_key(key), self.store, shared_capacity, limiter, self._store_apply())

    # ---- the flow ----------------------------------------------------------------------------------------------------

    def send_flow(self, call: OutboundRequest, send: Callable[..., Any]) -> CallFlow[SendResult[Any]]:
        """Send a request within its provider's quota; `send` returns (or is awaited for) a ProviderResponse.

        It is called with the provider (None: no limits) and, if the body was changed, with the body to send instead.
        """
        provider = self.find_provider(call.url)
        if provider is None:
            self._counts["unlimited"] += 1
            response = yield partial(send, None)
            return SendResult(response.native, RequestOutcome(None), None)
        options = self._current_options()
        account, plan = self._plan(provider, call, options)
        send_once = partial(send, provider) if plan.body is None else partial(send, provider, plan.body)
        began, attempt = self.clock.steady(), 0
        while True:
            attempt += 1
            charge = yield from self._reserve_flow(account, plan.cost, options, began)
            sent = self.clock.steady()
            response = yield from self._send_once_flow(account, call, send_once, charge)
            try:
                pause = yield from self._handle_response_flow(account, call, charge, response, (sent, began, attempt))
                if pause is not None and not charge.settled:
                    yield from suppress_errors_flow(charge.commit)
            except GeneratorExit:
                raise
            except BaseException:  # the caller will never see this response
                yield from suppress_errors_flow(response.close)
                if not charge.settled:
                    yield from suppress_errors_flow(charge.commit)
                raise
            if pause is None:
                settlement = None
                if account.settles and not charge.settled:
                    learned = self._estimates.learned
                    settlement = PendingSettlement(account, charge, response.status, plan, learned, self._counts)
                outcome = RequestOutcome(provider.name, (sent - began) / SECOND, attempt, charge.decision, plan.cost)
                return SendResult(response.native, outcome, settlement)
            self._counts["retried"] += 1
            yield response.close
            yield partial(self._sleep, self.clock.steady() + pause)

    def _acquire_flow(
        self,
        make: Callable[..., P],
        target: object,
        cost: Cost | None,
        timeout: float | None,
        priority: float | None = None,
        *,
        raises: bool = True,
    ) -> CallFlow[P]:
        """Reserve for a request that the caller sends itself; `make` creates its pending charge."""
        self._reload_if_due()
        found = find_target(self.providers, target)
        if found is None:
            self._counts["unlimited"] += 1
            return make(None, None)
        given: dict[str, Any] = {"timeout": timeout, "priority": priority, "cost": read_cost(cost)}
        options = self._current_options()._replace(**{name: each for name, each in given.items() if each is not None})
        account, plan = self._plan(*found, options)
        check_money_given(account, options.cost)
        try:
            charge = yield from self._reserve_flow(account, plan.cost, options, self.clock.steady())
        except Denied as denied:
            if raises:
                raise
            return make(account, None, denied.decision)
        return make(account, charge)

    def _current_options(self) -> RequestOptions:
        """Return the options of the gate, or those of `request_options`."""
        given = CURRENT_OPTIONS.get()
        return self._defaults if given is None else self._defaults._replace(**given)

    def _reserve_flow(self, account: Account, cost: Cost, options: RequestOptions, began: int) -> CallFlow[Any]:
        """Wait for permits; if the capacity turns out to be lower than known, return them and wait again."""
        account.recover()
        while True:
            charge = yield from self._charge_flow(account, cost, options, began)
            try:
                outdated = yield from self._check_outdated_flow(account, charge)
            except GeneratorExit:
                raise
            except BaseException:  # the request will not be sent
                yield from suppress_errors_flow(charge.cancel)
                raise
            if not outdated:
                self._counts["sent"] += 1
                account.delays.track(charge)
                return charge
            yield charge.cancel

    def _charge_flow(self, account: Account, cost: Cost, options: RequestOptions, began: int) -> CallFlow[Any]:
        limiter, key, timeout = account.limiter, account.key, options.timeout
        if account.plain and self._observer is None and not limiter.waiting:
            decision = yield partial(limiter.try_acquire, key, cost)
            if decision.allowed:
                return Charge(limiter, key, cost, decision)
        if timeout is not None:
            timeout = max(0.0, seconds("timeout", timeout) - (self.clock.steady() - began) / SECOND)
        try:
            reservation = yield partial(limiter.reserve, key, cost, CHARGE_TTL, timeout, options.priority)
        except Denied as denied:
            self._counts["denied"] += 1
            raise Denied(f"provider {account.provider.name}: {denied}", denied.decision) from None
        return Charge(limiter, key, cost, reservation.decision, reservation)

    def _check_outdated_flow(self, account: Account, charge: Charge) -> CallFlow[Any]:
        """Return whether the capacity is lower than known when a permit was granted."""
        if (late := account.delays.find_expired(charge.at)) is not None:
            return (yield from account.renew_flow(late, charge.at))
        return (yield from account.account_capacity.check_flow()) if account.account_capacity.is_check_due() else False

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
                yield from suppress_errors_flow(charge.cancel)
            else:
                yield from account.recharge_if_late_flow(charge)
                yield from suppress_errors_flow(charge.commit)
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
        sent, began, attempt = when
        advice = (
            read(response.headers, self.clock.ns() / 1e9) if has_rate_limit_headers(response.headers) else NO_ADVICE
        )
        status = effective_status(response.status, advice)
        if status != TOO_MANY_REQUESTS:
            yield from account.recharge_if_late_flow(charge)
        if status in REFUSAL_STATUSES:
            told = yield from read_refusal_flow(account.provider.counting, response, advice)
            wait = required_wait(advice) if told.retry_after is None else told.retry_after
            yield from self._handle_refusal_flow(account, charge, sent, status, wait)
            if told.limits and account.provider.learn != "off":
                self._counts["corrected"] += yield from account.learn_flow(told)
            spent = self.clock.steady() - began
            rules = account.provider.retries, attempt, status, call.method, spent, wait
            return retry_pause(*rules, self._jitter()) if call.replays else None
        account.account_capacity.record_success()
        if advice.limits and account.provider.learn != "off":
            self._counts["corrected"] += yield from account.learn_flow(advice)
        return None

    def _handle_refusal_flow(
        self, account: Account, charge: Charge, sent: int, status: int, retry_after: float | None
    ) -> CallFlow[Any]:
        """Learn from a refusal; after a 429, return the permit once other processes can know the lower capacity."""
        self._counts["refused"] += 1
        yield from account.handle_refusal_flow(status, charge, sent, retry_after)
        if status == TOO_MANY_REQUESTS:
            yield from suppress_errors_flow(charge.cancel)

    # ---- inspection --------------------------------------------------------------------------------------------------

    def _peek_arguments(self, call: OutboundRequest, times: int) -> tuple[Account, Cost] | None:
        provider = self.find_provider(call.url)
        if provider is None:
            return None
        account, plan = self._plan(provider, call, self._defaults)
        cost = plan.cost
        if isinstance(cost, Mapping):
            return account, {unit: amount * times for unit, amount in cost.items()}
        return account, cost * times

    def metrics(self) -> dict[str, int]:
        """Return counters: sent, unlimited, denied here, refused by the provider, retried; and corrections learned."""
        waiting = sum(account.limiter.waiting for account in tuple(self._accounts.values()))
        return {
            **{name: self._counts[name] for name in COUNTER_NAMES},
            "waiting": waiting,
            "accounts": len(self._accounts),
        }

    def capacities(self) -> dict[str, int]:
        """Return the current capacity of the narrowest limit of each account, by its key."""
        return {account.resource: account.capacity for account in tuple(self._accounts.values())}

    def _close(self) -> list[Account]:
        accounts = self._accounts.close()
        if self.bus is not None and self._owns_bus:
            self.bus.close()
        return accounts

    def _store_apply(self) -> Callable[..., Any]:
        raise NotImplementedError

    def _sleep(self, until: int) -> Any:  # noqa: ANN401 - nothing, or a coroutine
        raise NotImplementedError


class Gate(_Gate):
    """Enforces the quotas of providers, for threads."""

    _limiter = Limiter

    def run(self, flow: Generator[Callable[[], Any], Any, R]) -> R:
        """Run a flow."""
        return run(flow, operator.call)

    def acquire(
        self, target: object, cost: Cost | None = None, timeout: float | None = None, priority: float | None = None
    ) -> PendingCharge:
        """Take permits for a request that you send yourself; raises Denied if there are none in time.

        `target` is a URL, a domain, or the name of a provider. None means the provider's cost, and the gate's `timeout`
        and `priority`. Settle the charge that is returned: `commit()` once the provider has responded, or `cancel()`.
        """
        return self.run(self._acquire_flow(partial(PendingCharge, self.run), target, cost, timeout, priority))

    def try_acquire(self, target: object, cost: Cost | None = None) -> PendingCharge:
        """Take permits if there are enough now; the charge that is returned says whether it is `allowed`."""
        return self.run(self._acquire_flow(partial(PendingCharge, self.run), target, cost, 0, raises=False))

    def peek(self, call: OutboundRequest, times: int = 1) -> Decision | None:
        """Return the decision for sending a request now (or `times` such requests); None: no provider limits it."""
        found = self._peek_arguments(call, times)
        return None if found is None else found[0].limiter.peek(found[0].key, found[1])

    def close(self) -> None:
        """Refuse further requests, wake waiters with Closed, and close the store and bus that were opened here."""
        for account in self._close():
            account.limiter.close()
        self._opened.close()

    def _store_apply(self) -> Callable[..., Any]:
        return self.store.apply

    def _sleep(self, until: int) -> None:
        self.clock.wait(ThreadSignal(), until)


class AsyncGate(_Gate):
    """Enforces the quotas of providers, for tasks."""

    _limiter = AsyncLimiter

    def run(self, flow: Generator[Callable[[], Any], Any, R]) -> Coroutine[Any, Any, R]:
        """Run a flow; to be awaited."""
        return run_async(flow, operator.call)

    def acquire(
        self, target: object, cost: Cost | None = None, timeout: float | None = None, priority: float | None = None
    ) -> Reserving[AsyncPendingCharge]:
        """Take permits for a request that you send yourself, as `Gate.acquire`: await it, or use it in `async with`."""
        make = partial(AsyncPendingCharge, self.run)
        return Reserving(lambda: self.run(self._acquire_flow(make, target, cost, timeout, priority)))

    async def try_acquire(self, target: object, cost: Cost | None = None) -> AsyncPendingCharge:
        """Take permits if there are enough now; the charge that is returned says whether it is `allowed`."""
        make = partial(AsyncPendingCharge, self.run)
        return await self.run(self._acquire_flow(make, target, cost, 0, raises=False))

    async def peek(self, call: OutboundRequest, times: int = 1) -> Decision | None:
        """Return the decision for sending a request now (or `times` such requests); None: no provider limits it."""
        found = self._peek_arguments(call, times)
        return None if found is None else await found[0].limiter.peek(found[0].key, found[1])

    async def estimate(self, call: OutboundRequest) -> CallEstimate | None:
        """Return what a request would cost, and the decision for sending it now; None: no provider limits it."""
        found = self._peek_arguments(call, 1)
        if found is None:
            return None
        account, cost = found
        decision = await account.limiter.peek(account.key, cost)
        return CallEstimate(account.provider.name, account.resource, cost, decision, account.limiter.waiting)

    async def close(self) -> None:
        """Refuse further requests, wake waiters with Closed, and close the store and bus that were opened here."""
        for account in self._close():
            await account.limiter.close()
        await self._opened.close_async()

    def _store_apply(self) -> Callable[..., Any]:
        return self.store.apply_async

    async def _sleep(self, until: int) -> None:
        await self.clock.wait_async(TaskSignal(), until)
