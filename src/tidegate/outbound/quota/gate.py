"""How a request is sent within its provider's quota: Gate for threads, AsyncGate for tasks, one flow for both.

    find the provider      none: send the request unlimited
    reserve                wait in the queue for permits, up to the deadline
    send                   through the client library
    settle, learn          see `account`; after a refusal, it may retry from `reserve` on

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
from tidegate.flow import complete_flow, run, run_async, suppress_errors_flow
from tidegate.limiter import AsyncLimiter, Limiter, seconds
from tidegate.outbound.providers.registry import Providers
from tidegate.outbound.quota.account import Account
from tidegate.outbound.quota.accounts import Accounts
from tidegate.outbound.quota.charge import Charge, observe_money
from tidegate.outbound.quota.choice import CallCandidates, Choice, Chooser
from tidegate.outbound.quota.cost import TokenEstimates
from tidegate.outbound.quota.exchange import (
    CURRENT_OPTIONS,
    CallEstimate,
    RequestOptions,
    RequestOutcome,
    SendResult,
)
from tidegate.outbound.quota.gate_reservations import GateReservations
from tidegate.outbound.quota.gate_responses import COUNTER_NAMES, CallProgress, recharged_flow
from tidegate.outbound.quota.learned_sizes import LearnedSizes
from tidegate.outbound.quota.pending_charge import (
    AsyncPendingCharge,
    PendingCharge,
    check_money_given,
    find_target,
    read_cost,
)
from tidegate.outbound.quota.settlement import PendingSettlement
from tidegate.outbound.quota.tokenizer import load_tokenizer
from tidegate.policy import join_key
from tidegate.reservation import Reserving
from tidegate.spending import Spending
from tidegate.stores.cancellation import BackgroundTasks
from tidegate.stores.opened import OpenedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from tidegate.bus import Bus
    from tidegate.clock import Clock, Signal
    from tidegate.core import Decision
    from tidegate.flow import CallFlow
    from tidegate.observe import Observer
    from tidegate.outbound.capacity.shared_capacity import SharedCapacity
    from tidegate.outbound.providers.provider import Provider
    from tidegate.outbound.quota.choice import Candidate
    from tidegate.outbound.quota.cost import CallPlan
    from tidegate.outbound.quota.exchange import OutboundRequest, ProviderResponse
    from tidegate.policy import Cost, Key, Policy
    from tidegate.stores import Store

R = TypeVar("R")
P = TypeVar("P", PendingCharge, AsyncPendingCharge)

log: logging.Logger = logging.getLogger(__name__)

RELOAD_INTERVAL: Final = 5.0  # seconds between two checks of the provider files
RECHARGES: Final = BackgroundTasks()  # charges of requests that were written late


class _Gate(GateReservations):
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
        spending: Spending | str | None = None,
    ) -> None:
        """Enforce the quotas of these providers.

        `store` is where usage is counted: a URL, or a Store that is shared with others. A request waits up to `timeout`
        seconds for its permit (None: without limit, 0: not at all), larger `priority` first. Capacity reductions are
        shared over a `bus`. Provider files are checked every `reload` seconds (None: never). `tokenizer` counts the
        tokens of requests: a function of a string, an object with `encode`, or the name of one (`package:function`).
        `spending` records what calls cost, and warns: a Spending, or the path of its ledger.
        """
        if not isinstance(providers, Providers):
            raise ConfigError(f"must be Providers, such as Providers.load(...), not {providers!r}", field="providers")
        self.providers = providers
        self._defaults = RequestOptions(
            None if timeout is None else seconds("timeout", timeout), seconds("priority", priority)
        )
        if not isinstance(store, str) and clock is not None and clock is not store.clock:
            message = "cannot be combined with a Store, which has its own clock: give the clock to the store"
            raise ConfigError(message, field="clock")
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
        self._ceilings: dict[str, Limiter | AsyncLimiter] = {}
        self._ceiling_keys: dict[str, dict[Key, None]] = {}
        self._owns_spending = isinstance(spending, str)
        self.spending: Spending | None = Spending(spending, clock=clock) if isinstance(spending, str) else spending
        watch = None if self.spending is None else partial(observe_money, self.spending)
        observers = [each for each in (observer, watch) if each is not None]
        self._chooser = Chooser(
            self.store, self._store_apply(), self._wait, self._signal, observers, self._next_reload_at
        )
        self._wake_waiting = self._chooser.wake_all

    def _next_reload_at(self) -> int | None:
        return None if self._reload is None or not self.providers.reloads else self._next_reload

    def _make_limiter(self, policy: Policy) -> Limiter | AsyncLimiter:
        limiter: Limiter | AsyncLimiter = self._limiter(policy, store=self.store, observer=self._observer)
        return limiter

    def _make_account(self, provider: Provider, key: Key, shared_capacity: SharedCapacity) -> Account:
        limiter = partial(self._limiter, observer=self._observer)
        return Account(provider, key, join_key(key), self.store, shared_capacity, limiter, self._store_apply())

    # ---- the flow ----------------------------------------------------------------------------------------------------

    def send_flow(self, call: OutboundRequest, send: Callable[..., Any]) -> CallFlow[SendResult[Any]]:
        """Send a request within its provider's quota; `send` returns (or is awaited for) a ProviderResponse.

        It is called with the provider (None: no limits) and, if the body was changed, with the body to send instead.
        """
        changes = self.providers.changes
        provider = self.find_provider(call.url)
        if provider is None:
            self._counts["unlimited"] += 1
            response = yield partial(send, None)
            return SendResult(response.native, RequestOutcome(None), None)
        options = self._current_options()
        candidates = CallCandidates(self._candidates(provider, call, options), changes)
        began, attempt, tries = self.clock.steady(), 1, 0
        while True:
            tries += 1
            candidate, charge = yield from self._reserve_flow(candidates, options, began, call, provider, call.url)
            own, account, plan, _ = candidate
            if account.delays.has_movable:
                account.delays.track(charge)
            sent, progress = self.clock.steady(), CallProgress(began, options.timeout, attempt)
            response = yield from self._send_or_drop_flow(candidates, candidate, call, send, charge, progress)
            if response is None:
                continue
            again = yield from self._finish_try_flow(candidates, candidate, call, charge, response, (sent, progress))
            if again is None:
                settlement = None
                if account.settles and not charge.settled:
                    settlement = self._make_settlement(account, charge, response.status, plan)
                cost = charge.amounts if candidate.ceilings else plan.cost
                waited = (sent - began) / SECOND
                outcome = RequestOutcome(provider.name, waited, tries, charge.decision, cost, own.member)
                return SendResult(response.native, outcome, settlement)
            self._counts["retried"] += 1
            yield response.close
            if again.new_attempt:
                attempt += 1
                candidates.begin_attempt()
                yield partial(self._sleep, self.clock.steady() + again.pause)

    def _finish_try_flow(
        self,
        candidates: CallCandidates,
        candidate: Candidate,
        call: OutboundRequest,
        charge: Charge,
        response: ProviderResponse,
        when: tuple[int, CallProgress],
    ) -> CallFlow[Any]:
        """Learn from a response; returns how the call is sent again, or None. `when`: its instant, and its progress.

        An error is logged and counted, and the caller gets the response; a cancellation ends the call.
        """
        own, account, plan, _ = candidate
        try:
            meaning = yield from self._handle_response_flow(account, charge, response, when[0])
            again = self._next_try(candidates, candidate, call, meaning, when[1])
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

    def _send_or_drop_flow(
        self,
        candidates: CallCandidates,
        candidate: Candidate,
        call: OutboundRequest,
        send: Callable[..., Any],
        charge: Charge,
        progress: CallProgress,
    ) -> CallFlow[Any]:
        """Send; None: nothing was sent, and another member of the pool must send the call."""
        own, account, plan, _ = candidate
        if call.reports_write and account.delays.watches_writes:
            send_once = partial(send, own, plan.body, partial(self._note_written, account, charge))
        else:
            send_once = partial(send, own) if plan.body is None else partial(send, own, plan.body)
        try:
            return (yield from self._send_once_flow(account, call, send_once, charge))
        except Exception as error:
            if not own.member or len(candidates) == 1 or not call.unreached(error):
                raise
            if self._is_overdue(candidate, progress):
                raise
            candidates.drop(candidate)
            self._counts["retried"] += 1
            return None

    def _note_written(self, account: Account, charge: Charge) -> None:
        """Charge a permit again if its request was written long after it was taken."""
        if account.delays.is_late(charge):
            self._recharge_written(account, charge)

    def _recharge_written(self, account: Account, charge: Charge) -> None:
        raise NotImplementedError

    def _make_settlement(self, account: Account, charge: Charge, status: int, plan: CallPlan) -> PendingSettlement:
        return PendingSettlement(account, charge, status, plan, self._estimates.learned, self._counts)

    @staticmethod
    def _abandon_flow(account: Account, charge: Charge, response: ProviderResponse) -> CallFlow[Any]:
        """Close a response that the caller will never see; its call costs what is reserved."""
        settle = [suppress_errors_flow(response.close), recharged_flow(charge)]
        if not charge.settled:
            account.spent += charge.record_spending()
            settle.append(suppress_errors_flow(charge.commit))
        yield from complete_flow(*settle)

    def _settle_failed_flow(self, account: Account, charge: Charge, status: int, plan: CallPlan) -> CallFlow[Any]:
        """Settle a call that failed and is sent again: most providers charge nothing for it but the request."""
        if account.settles:
            yield from self._make_settlement(account, charge, status, plan).settle_flow(None)
        else:
            yield from suppress_errors_flow(charge.commit)

    def run(self, flow: Generator[Callable[[], Any], Any, R]) -> Any:  # noqa: ANN401 - a result, or a coroutine
        """Run a flow."""
        raise NotImplementedError

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
        changes = self.providers.changes
        found = find_target(self.providers, target)
        if found is None:
            self._counts["unlimited"] += 1
            return make(None, None)
        options = self._current_options().replaced(timeout, priority, read_cost(cost))
        provider, call = found
        candidates = CallCandidates(self._candidates(provider, call, options), changes)
        check_money_given(candidates[0].account, options.cost)
        began = self.clock.steady()
        try:
            candidate, charge = yield from self._reserve_flow(candidates, options, began, call, provider, target)
        except Denied as denied:
            if raises:
                raise
            return make(candidates[0].account, None, denied.decision)
        pending = make(candidate.account, charge)
        pending.owned = True
        if raises:
            candidate.account.delays.track(charge)
        else:
            charge.tracked_until = 0
        return pending

    def _current_options(self) -> RequestOptions:
        """Return the options of the gate, or those of `request_options`."""
        given = CURRENT_OPTIONS.get()
        return self._defaults if given is None else self._defaults._replace(**given)

    # ---- inspection --------------------------------------------------------------------------------------------------

    def _find_candidates(self, call: OutboundRequest) -> list[Candidate]:
        """Return the accounts that a request may be charged to; none if no provider limits it."""
        provider = self.find_provider(call.url)
        return [] if provider is None else self._candidates(provider, call, self._current_options())

    def _peek(self, candidates: list[Candidate], times: int = 1) -> Any:  # noqa: ANN401 - a Decision, or an awaitable of one
        """Peek at the first candidate with room for this many calls."""
        candidates = [candidate.repeated(times) for candidate in candidates]
        candidate = candidates[0]
        if len(candidates) == 1 and not candidate.ceilings:
            return candidate.account.limiter.peek(candidate.account.key, candidate.plan.cost)
        return Choice(candidates, self._store_apply(), ()).ask("peek")

    def metrics(self) -> dict[str, int]:
        """Return counters: sent, unlimited, denied here, refused by the provider, retried; and corrections learned."""
        waiting = sum(account.limiter.waiting for account in tuple(self._accounts.values())) + self._chooser.waiting
        return {
            **{name: self._counts[name] for name in COUNTER_NAMES},
            **({} if self.spending is None else self.spending.counts),
            "waiting": waiting,
            "accounts": len(self._accounts),
        }

    def capacities(self) -> dict[str, int]:
        """Return the current capacity of the narrowest limit of each account, by its key."""
        return {account.resource: account.capacity for account in tuple(self._accounts.values())}

    def _close(self) -> list[Account]:
        self._chooser.close()
        accounts = self._accounts.close()
        if self.bus is not None and self._owns_bus:
            self.bus.close()
        if self.spending is not None and self._owns_spending:
            self.spending.close()
        return accounts

    def _store_apply(self) -> Callable[..., Any]:
        raise NotImplementedError

    def _sleep(self, until: int) -> Any:  # noqa: ANN401 - nothing, or a coroutine
        return self._wait(self._signal(), until)

    def _wait(self, signal: Signal, until: int | None) -> Any:  # noqa: ANN401 - nothing, or a coroutine
        raise NotImplementedError

    def _signal(self) -> Signal:
        raise NotImplementedError


class Gate(_Gate):
    """Enforces the quotas of providers, for threads."""

    _limiter = Limiter
    _signal = staticmethod(ThreadSignal)

    def run(self, flow: Generator[Callable[[], Any], Any, R]) -> R:
        """Run a flow."""
        return run(flow, operator.call)

    def acquire(
        self, target: object, cost: Cost | None = None, timeout: float | None = None, priority: float | None = None
    ) -> PendingCharge:
        """Take permits for a request that you send yourself; raises Denied if there are none in time.

        `target` is a URL, a domain, or the name of a provider. None means the provider's cost, and the gate's `timeout`
        and `priority`. Settle the charge that is returned: `commit()` once the provider has responded, or `cancel()`.
        It counts as in flight until then, or until the program drops it.
        """
        return self.run(self._acquire_flow(partial(PendingCharge, self.run), target, cost, timeout, priority))

    def try_acquire(self, target: object, cost: Cost | None = None) -> PendingCharge:
        """Take permits if there are enough now; the charge that is returned says whether it is `allowed`.

        A charge that is not settled counts from now on; a slot of `concurrency` is held until it is settled.
        """
        return self.run(self._acquire_flow(partial(PendingCharge, self.run), target, cost, 0, raises=False))

    def peek(self, call: OutboundRequest, times: int = 1) -> Decision | None:
        """Return the decision for sending a request now (or `times` such requests); None: no provider limits it."""
        try:
            found = self._find_candidates(call)
        except Denied as denied:  # all members of the pool are drained
            return denied.decision
        decision: Decision | None = self._peek(found, times) if found else None
        return decision

    def close(self) -> None:
        """Refuse further requests, wake waiters with Closed, and close the store and bus that were opened here."""
        for account in self._close():
            account.limiter.close()
        self._opened.close()

    def _store_apply(self) -> Callable[..., Any]:
        return self.store.apply

    def _recharge_written(self, account: Account, charge: Charge) -> None:
        self.run(account.recharge_written_flow(charge))

    def _wait(self, signal: Signal, until: int | None) -> None:
        self.clock.wait(signal, until)


class AsyncGate(_Gate):
    """Enforces the quotas of providers, for tasks."""

    _limiter = AsyncLimiter
    _signal = staticmethod(TaskSignal)

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
        """Take permits if there are enough now, as `Gate.try_acquire`."""
        make = partial(AsyncPendingCharge, self.run)
        return await self.run(self._acquire_flow(make, target, cost, 0, raises=False))

    async def peek(self, call: OutboundRequest, times: int = 1) -> Decision | None:
        """Return the decision for sending a request now (or `times` such requests); None: no provider limits it."""
        try:
            found = self._find_candidates(call)
        except Denied as denied:  # all members of the pool are drained
            return denied.decision
        return await self._peek_async(found, times) if found else None

    async def peek_target(self, target: object, cost: Cost | None = None) -> Decision | None:
        """Return the decision that `try_acquire` would return now, without changing anything; None: not limited."""
        found = find_target(self.providers, target)
        if found is None:
            return None
        options = self._current_options()
        try:
            candidates = self._candidates(*found, options if cost is None else options._replace(cost=read_cost(cost)))
        except Denied as denied:
            return denied.decision
        return await self._peek_async(candidates)

    async def _peek_async(self, candidates: list[Candidate], times: int = 1) -> Decision:
        found = self._peek(candidates, times)
        decision: Decision = await found if hasattr(found, "__await__") else found
        return decision

    async def estimate(self, call: OutboundRequest) -> CallEstimate | None:
        """Return what a request would cost, and the decision for sending it now; None: no provider limits it."""
        candidates = self._find_candidates(call)
        if not candidates:
            return None
        _, account, plan, _ = candidates[0]
        decision = await self._peek_async(candidates)
        waiting = account.limiter.waiting + self._chooser.waiting_for(candidates)
        cost, prices = plan.cost, account.provider.prices
        if prices is not None and isinstance(cost, Mapping):
            cost = {**cost, prices.unit: plan.money}  # also if only ceilings of several accounts count it
        return CallEstimate(account.provider.name, account.resource, cost, decision, waiting)

    async def close(self) -> None:
        """Refuse further requests, wake waiters with Closed, and close the store and bus that were opened here."""
        for account in self._close():
            await account.limiter.close()
        await self._opened.close_async()

    def _store_apply(self) -> Callable[..., Any]:
        return self.store.apply_async

    def _recharge_written(self, account: Account, charge: Charge) -> None:
        """Start to charge it again; `recharged_flow` waits for that. The client library may cancel its own tasks."""
        if charge.recharging is None or charge.recharging.done():
            charge.recharging = RECHARGES.start(self.run(account.recharge_written_flow(charge)))

    async def _wait(self, signal: Signal, until: int | None) -> None:
        await self.clock.wait_async(signal, until)
