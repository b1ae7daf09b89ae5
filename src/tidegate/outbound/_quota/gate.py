"""How a request is sent within its provider's quota: Gate for threads, AsyncGate for tasks, one flow for both.

    find the provider      none: send the request unlimited
    reserve                wait in the queue for permits, up to the deadline
    send                   through the client library
    settle, learn          see `account`; after a refusal, it may retry from `reserve` on

The steps of the flow are functions (see `tidegate._runtime.flow`). The adapters `httpx`, `requests` and
`aiohttp` translate the requests and responses of their libraries.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tidegate._limiter.limiter import AsyncLimiter, Limiter, seconds
from tidegate._limiter.reservation import Reserving, apply_async
from tidegate._limiter.waiting import ApplyStep, CallStep, ReadStep, Sleep
from tidegate._policy import join_key
from tidegate._runtime.clock import TaskSignal, ThreadSignal
from tidegate._runtime.flow import run, run_async
from tidegate.bus import open_bus
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError, Denied
from tidegate.outbound._capacity.shared_notices import StoreCalls
from tidegate.outbound._providers.registry import Providers
from tidegate.outbound._quota.account import Account
from tidegate.outbound._quota.accounts import Accounts
from tidegate.outbound._quota.charge import observe_money
from tidegate.outbound._quota.cost import TokenEstimates
from tidegate.outbound._quota.exchange import (
    CURRENT_OPTIONS,
    CallEstimate,
    RequestOptions,
    RequestOutcome,
    SendResult,
)
from tidegate.outbound._quota.gate_call import GateCall
from tidegate.outbound._quota.learned_sizes import LearnedSizes
from tidegate.outbound._quota.pending_charge import (
    AsyncPendingCharge,
    PendingCharge,
    check_money_given,
    find_target,
    read_cost,
)
from tidegate.outbound._quota.planner import CallPlanner
from tidegate.outbound._quota.reserver import Reserver
from tidegate.outbound._quota.responses import COUNTER_NAMES, NextTry, ResponseHandler
from tidegate.outbound._quota.tokenizer import load_tokenizer
from tidegate.spending import Spending
from tidegate.stores._cancellation import BackgroundTasks
from tidegate.stores._opened import OpenedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from tidegate._limiter.waiting import Step, Waiter
    from tidegate._policy import Cost, Key, Policy
    from tidegate._runtime.clock import Clock, Signal
    from tidegate._runtime.flow import CallFlow
    from tidegate.bus import Bus
    from tidegate.core import Decision
    from tidegate.observe import Observer, Record
    from tidegate.outbound._capacity.shared_capacity import SharedCapacity
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._quota.charge import Charge
    from tidegate.outbound._quota.exchange import OutboundRequest
    from tidegate.stores import Store

R = TypeVar("R")
P = TypeVar("P", PendingCharge, AsyncPendingCharge)

RELOAD_INTERVAL: Final = 5.0  # seconds between two checks of the provider files
RECHARGES: Final = BackgroundTasks()  # charges of requests that were written late


class _Gate:
    """Base class of Gate and AsyncGate: the flow of a call through planner, reserver and response handler."""

    _limiter: Callable[..., Any]
    _signal: Callable[[], Signal]

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
        self._defaults = RequestOptions(
            None if timeout is None else seconds("timeout", timeout), seconds("priority", priority)
        )
        self._at_once = self._defaults._replace(timeout=0)
        if not isinstance(store, str) and clock is not None and clock is not store.clock:
            message = "cannot be combined with a Store, which has its own clock: give the clock to the store"
            raise ConfigError(message, field="clock")
        self._opened = OpenedStore.open(store, clock=clock)
        self.store: Store = self._opened.store
        self.clock: Clock = self.store.clock
        self._owns_bus = isinstance(bus, str)
        self.bus: Bus | None = open_bus(bus, clock=clock) if isinstance(bus, str) else bus
        self._counts: Counter[str] = Counter()
        self._owns_spending = isinstance(spending, str)
        self.spending: Spending | None = Spending(spending, clock=clock) if isinstance(spending, str) else spending
        self._observer = both_observers(observer, self.spending)
        self._accounts = Accounts(self.clock, self.bus, self._make_account)
        self._estimates: TokenEstimates = TokenEstimates(LearnedSizes(), load_tokenizer(tokenizer))
        self.planner: CallPlanner = CallPlanner(
            providers,
            self._accounts,
            self.clock,
            self._make_limiter,
            self._estimates,
            jitter,
            None if reload is None else round(seconds("reload", reload) * SECOND),
        )
        self._reserver = Reserver(self.planner, self.store, self._signal, self.spending, self._counts)
        self._responses = ResponseHandler(
            self.clock, self._counts, self._estimates.learned, jitter, self._recharge_written
        )
        self.note_unsettled: Callable[[str, Exception], None] = self._responses.note_unsettled

    def _make_limiter(self, policy: Policy) -> Limiter | AsyncLimiter:
        limiter: Limiter | AsyncLimiter = self._limiter(policy, store=self.store, observer=self._observer)
        return limiter

    def _make_account(self, provider: Provider, key: Key, shared_capacity: SharedCapacity) -> Account:
        limiter = self._make_limiter(provider.policy)
        return Account(provider, key, join_key(key), self.store, shared_capacity, limiter, self._store_calls())

    # ---- the flow ----------------------------------------------------------------------------------------------------

    def send_flow(self, call: OutboundRequest, send: Callable[..., Any]) -> CallFlow[SendResult[Any]]:
        """Send a request within its provider's quota; `send` returns (or is awaited for) a ProviderResponse.

        It is called with the provider (None: no limits) and, if the body was changed, with the body to send instead.
        """
        planner, handler = self.planner, self._responses
        changes = planner.providers.changes
        provider = planner.find_provider(call.url)
        if provider is None:
            self._counts["unlimited"] += 1
            response = yield partial(send, None)
            return SendResult(response.native, RequestOutcome(None), None)
        options = self._current_options()
        gate_call = GateCall(planner, provider, call, options, call.url, changes)
        while True:
            charge = yield from self._reserver.reserve_flow(gate_call)
            response = yield from handler.send_flow(gate_call, send)
            if isinstance(response, NextTry):
                again: NextTry | None = response
            else:
                again = yield from handler.finish_flow(gate_call, response)
            if again is None:
                own, account, plan, asks = gate_call.candidate
                settlement = None
                if account.settles and not charge.settled:
                    settlement = handler.make_settlement(account, charge, response.status, plan)
                cost = charge.amounts if len(asks) > 1 else plan.cost
                waited = (gate_call.sent - gate_call.began) / SECOND
                outcome = RequestOutcome(
                    provider.name, waited, gate_call.tries, charge.decision, cost, own.member, plan.truncates_at
                )
                return SendResult(response.native, outcome, settlement)
            self._counts["retried"] += 1
            if response is not again:
                yield response.close
            if again.new_attempt:
                gate_call.begin_attempt()
                yield Sleep(self._signal(), self.clock.steady() + again.pause)

    def _recharge_written(self, account: Account, charge: Charge) -> None:
        raise NotImplementedError

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
        planner = self.planner
        planner.reload_if_due()
        providers = planner.providers
        changes = providers.changes
        found = find_target(providers, target)
        if found is None:
            self._counts["unlimited"] += 1
            return make(None, None)
        if cost is None and priority is None and timeout == 0 and CURRENT_OPTIONS.get() is None:
            options = self._at_once
        else:
            options = self._current_options().replaced(timeout, priority, read_cost(cost))
        provider, call = found
        gate_call = GateCall(planner, provider, call, options, target, changes)
        if provider.limits_money:
            check_money_given(gate_call.candidate.account, options.cost)
        try:
            charge = yield from self._reserver.reserve_flow(gate_call)
        except Denied as denied:
            if raises:
                raise
            return make(gate_call.candidate.account, None, denied.decision)
        account = gate_call.candidate.account
        pending = make(account, charge)
        if raises:
            pending.owned = True
            account.delays.track(charge)
        else:
            pending.owned = account.holds_slots
            charge.tracked_until = 0
        return pending

    def _current_options(self) -> RequestOptions:
        """Return the options of the gate, or those of `request_options`."""
        given = CURRENT_OPTIONS.get()
        return self._defaults if given is None else self._defaults._replace(**given)

    # ---- inspection --------------------------------------------------------------------------------------------------

    @property
    def providers(self) -> Providers:
        """The providers whose quotas are enforced."""
        return self.planner.providers

    @property
    def accounts(self) -> tuple[Account, ...]:
        """The accounts that are open."""
        return tuple(self._accounts.values())

    @property
    def ceilings(self) -> tuple[Limiter | AsyncLimiter, ...]:
        """The limiters of ceilings that calls were charged to."""
        return self.planner.ceilings

    def account_of(self, call: OutboundRequest) -> Account | None:
        """Return the account that a request would be charged to; None: no provider limits it."""
        provider = self.planner.find_provider(call.url)
        return None if provider is None else self.planner.account(provider, call)

    def _open_call(self, call: OutboundRequest) -> GateCall | None:
        """Return a call to inspect; None: no provider limits it. Raises Denied if its pool is drained."""
        planner, changes = self.planner, self.planner.providers.changes
        provider = planner.find_provider(call.url)
        if provider is None:
            return None
        return GateCall(planner, provider, call, self._current_options(), call.url, changes)

    def _peek_flow(self, call: OutboundRequest, times: int) -> CallFlow[Decision | None]:
        """Return the decision for sending a request now (or several such requests); None: no provider limits it."""
        try:
            found = self._open_call(call)
        except Denied as denied:  # all members of the pool are drained
            return denied.decision
        if found is None:
            return None
        found.repeat(times)
        return (yield from found.ask_flow("peek"))

    def _peek_target_flow(self, target: object, cost: Cost | None) -> CallFlow[Decision | None]:
        planner, changes = self.planner, self.planner.providers.changes
        found = find_target(planner.providers, target)
        if found is None:
            return None
        options = self._current_options().replaced(None, None, read_cost(cost))
        try:
            call = GateCall(planner, *found, options, target, changes)
        except Denied as denied:
            return denied.decision
        return (yield from call.ask_flow("peek"))

    def _estimate_flow(self, call: OutboundRequest) -> CallFlow[CallEstimate | None]:
        found = self._open_call(call)
        if found is None:
            return None
        _, account, plan, _ = found.candidates[0]
        decision = yield from found.ask_flow("peek")
        cost, prices = plan.cost, account.provider.prices
        if prices is not None and isinstance(cost, Mapping):
            cost = {**cost, prices.unit: plan.money}  # also if only ceilings of several accounts count it
        return CallEstimate(account.provider.name, account.resource, cost, decision, found.places().waiting)

    def metrics(self) -> dict[str, int]:
        """Return counters: sent, unlimited, denied here, refused by the provider, retried; and corrections learned."""
        waiting: set[Waiter] = set()
        for limiter in self.planner.limiters:
            waiting |= limiter.queues.waiters()
        return {
            **{name: self._counts[name] for name in COUNTER_NAMES},
            **({} if self.spending is None else self.spending.counts),
            "waiting": len(waiting),
            "accounts": len(self._accounts),
        }

    def capacities(self) -> dict[str, int]:
        """Return the current capacity of the narrowest limit of each account, by its key."""
        return {account.resource: account.capacity for account in self.accounts}

    def _close(self) -> None:
        for limiter in (*(account.limiter for account in self._accounts.close()), *self.planner.ceilings):
            limiter.reject_calls()
        if self.bus is not None and self._owns_bus:
            self.bus.close()
        if self.spending is not None and self._owns_spending:
            self.spending.close()

    def _store_calls(self) -> StoreCalls:
        raise NotImplementedError


def both_observers(observer: Observer | None, spending: Spending | None) -> Observer | None:
    """Return an observer that also warns of spending."""
    if spending is None:
        return observer

    def observe(record: Record) -> None:
        if observer is not None:
            observer(record)
        observe_money(spending, record)

    return observe


class Gate(_Gate):
    """Enforces the quotas of providers, for threads."""

    _limiter = Limiter
    _signal = staticmethod(ThreadSignal)

    def run(self, flow: Generator[Callable[[], Any], Any, R]) -> R:
        """Run a flow."""
        return run(flow, self.perform)

    def perform(self, step: Step | Callable[[], object]) -> object:
        """Execute a step of a flow."""
        if isinstance(step, ApplyStep):
            return step.apply()
        if isinstance(step, (ReadStep, CallStep)):
            return step.read()
        if isinstance(step, Sleep):
            self.clock.wait(*step)
            return None
        return step()

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
        return self.run(self._peek_flow(call, times))

    def close(self) -> None:
        """Refuse further requests, wake waiters with Closed, and close the store and bus that were opened here."""
        self._close()
        self._opened.close()

    def _store_calls(self) -> StoreCalls:
        return StoreCalls(self.store, self.store.apply, self.store.get_value)

    def _recharge_written(self, account: Account, charge: Charge) -> None:
        self.run(account.recharge_written_flow(charge))


class AsyncGate(_Gate):
    """Enforces the quotas of providers, for tasks."""

    _limiter = AsyncLimiter
    _signal = staticmethod(TaskSignal)

    def run(self, flow: Generator[Callable[[], Any], Any, R]) -> Coroutine[Any, Any, R]:
        """Run a flow; to be awaited."""
        return run_async(flow, self.perform)

    def perform(self, step: Step | Callable[[], object]) -> object:
        """Execute a step of a flow."""
        if isinstance(step, ApplyStep):
            return apply_async(step)
        if isinstance(step, (ReadStep, CallStep)):
            return step.read_async()
        return self.clock.wait_async(*step) if isinstance(step, Sleep) else step()

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
        return await self.run(self._peek_flow(call, times))

    async def peek_target(self, target: object, cost: Cost | None = None) -> Decision | None:
        """Return the decision that `try_acquire` would return now, without changing anything; None: not limited."""
        return await self.run(self._peek_target_flow(target, cost))

    async def estimate(self, call: OutboundRequest) -> CallEstimate | None:
        """Return what a request would cost, and the decision for sending it now; None: no provider limits it."""
        return await self.run(self._estimate_flow(call))

    async def close(self) -> None:
        """Refuse further requests, wake waiters with Closed, and close the store and bus that were opened here."""
        self._close()
        await self._opened.close_async()

    def _store_calls(self) -> StoreCalls:
        return StoreCalls(self.store, self.store.apply_async, self.store.get_value_async)

    def _recharge_written(self, account: Account, charge: Charge) -> None:
        """Start to charge it again; `recharged_flow` waits for that. The client library may cancel its own tasks."""
        if charge.recharging is None or charge.recharging.done():
            charge.recharging = RECHARGES.start(self.run(account.recharge_written_flow(charge)))
