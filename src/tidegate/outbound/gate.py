"""The way of a request through its provider's quota: Gate for threads, AsyncGate for tasks, one flow for both.

    find the provider      none: send it as it is
    reserve                wait in line for permits, up to the deadline
    send                   whatever the client does
    settle, learn          see `account`; on a refusal perhaps once more from `reserve` on

The flow is a generator of steps: functions to be called, or called and awaited. What a client library needs (how its
requests and answers look) is in `httpx`, `requests` and `aiohttp` beside this module.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from tidegate.bus import open_bus
from tidegate.clock import TaskSignal, ThreadSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import Closed, ConfigError, Denied
from tidegate.headers import Advice, read
from tidegate.limiter import AsyncLimiter, Limiter, seconds
from tidegate.outbound.account import Account, terms
from tidegate.outbound.calls import ASKED, Asked, Passage, Passed, Tail, credential
from tidegate.outbound.hosts import host_of
from tidegate.outbound.learning import REFUSED, UNAVAILABLE
from tidegate.outbound.pressure import Pressure
from tidegate.outbound.provider import EVERYTHING
from tidegate.outbound.providers import Providers
from tidegate.outbound.retrying import again
from tidegate.outbound.tokens import UNITS, estimate
from tidegate.policy import join_key
from tidegate.stores.failure import open_guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from tidegate.bus import Bus
    from tidegate.clock import Clock
    from tidegate.core import Decision
    from tidegate.observe import Observer
    from tidegate.outbound.account import Flow, Ticket
    from tidegate.outbound.calls import Call, Reply
    from tidegate.outbound.provider import Endpoint, Provider
    from tidegate.policy import Cost, Key
    from tidegate.stores import Store

R = TypeVar("R")

TTL: Final = 600.0  # seconds within which an answer has to end for its estimate to be corrected downwards
RELOAD: Final = 5.0  # seconds between two looks at the files
SPEAKING: Final = frozenset(("ratel", "x-rat", "retry", "anthr"))  # how the names of such headers begin
SILENCE: Final = Advice()
COUNTS: Final = ("sent", "unlimited", "denied", "refused", "retried", "corrected")


def speaks(headers: Iterable[tuple[str, str]]) -> bool:
    """Tell whether an answer may say anything of limits: most do not, and reading takes its time."""
    return any(name[:5].lower() in SPEAKING for name, _ in headers)


class _Gate:
    """What Gate and AsyncGate share."""

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
        chance: Callable[[], float] = random.random,
        reload: float | None = RELOAD,
    ) -> None:
        """Keep to the quotas of these providers.

        `store` says where their use is counted: a URL, or a Store that others use too. A request waits `timeout`
        seconds for its permit (None: as long as it takes, 0: not at all), larger `priority` first. Reductions of
        capacity are shared over a `bus`. Files are looked at every `reload` seconds (None: never).
        """
        if not isinstance(providers, Providers):
            raise ConfigError(f"must be Providers.load(...), not {providers!r}", field="providers")
        self.providers = providers
        self._timeout = None if timeout is None else seconds("timeout", timeout)
        self._priority = seconds("priority", priority)
        self._owns = (isinstance(store, str), isinstance(bus, str))
        self.store = open_guarded(store, clock=clock) if isinstance(store, str) else store
        self.clock = self.store.clock
        self.bus = open_bus(bus, clock=clock) if isinstance(bus, str) else bus
        self._observer = observer
        self._chance = chance
        self._agent = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._accounts: dict[tuple[str, Key], Account] = {}
        self._pressures: dict[str, Pressure] = {}
        self._reload = None if reload is None else round(seconds("reload", reload) * SECOND)
        self._look_at = self.clock.steady() + (self._reload or 0)
        self._counts: Counter[str] = Counter()
        self.closed = False

    # ---- whose quota -------------------------------------------------------------------------------------------------

    def find(self, url: object) -> Provider | None:
        """Find the provider of a URL, with its files as they are now."""
        if self._reload is not None and self.clock.steady() >= self._look_at:
            self._look_at = self.clock.steady() + self._reload
            self.providers.reload()
        return self.providers.match(url)

    def account(self, provider: Provider, call: Call) -> Account:
        """Give the account that a request is charged to."""
        key = self._key(provider, call) if provider.per else provider.domain
        return self.open(provider, key)

    def account_of(self, call: Call) -> Account | None:
        """Give the account that a request would be charged to; None: nothing limits it."""
        provider = self.find(call.url)
        return None if provider is None else self.account(provider, call)

    def open(self, provider: Provider, key: Key) -> Account:
        """Give the account of a key, opened if need be, with the provider's limits as they are now."""
        account = self._accounts.get((provider.domain, key))
        if account is None:
            account = self._open(provider, key)
        elif account.provider is not provider:
            with self._lock:
                account.take_over(provider)
        return account

    def _open(self, provider: Provider, key: Key) -> Account:
        with self._lock:
            if self.closed:
                raise Closed("the gate is closed")
            pressure = self._pressures.get(provider.domain)
            if pressure is None:
                pressure = Pressure(self._agent, terms(provider), self.clock, self.bus)
                self._pressures[provider.domain] = pressure
            account = self._accounts.get((provider.domain, key))
            if account is None:
                make = partial(self._limiter, observer=self._observer)
                account = Account(provider, key, join_key(key), self.store, pressure, make, self._applies())
                self._accounts[provider.domain, key] = account
            return account

    def _key(self, provider: Provider, call: Call) -> Key:
        parts = [provider.domain]
        if "host" in provider.per:
            parts.append(f"host={host_of(call.url)}")
        if "path" in provider.per:
            endpoint = self._endpoint(provider, call)
            parts.append(f"path={endpoint.path if endpoint else EVERYTHING}")
        if "credential" in provider.per:
            parts.append(f"credential={credential(provider.key_place, call)}")
        return tuple(parts)

    def _endpoint(self, provider: Provider, call: Call) -> Endpoint | None:
        return provider.endpoint(urlsplit(call.url).path or "/", call.method) if provider.endpoints else None

    def _cost(self, account: Account, call: Call, asked: Mapping[str, int] | None) -> Cost:
        provider = account.provider
        cost = provider.cost(self._endpoint(provider, call))
        guessed = [unit for unit in UNITS if unit in account.units and unit not in cost]
        if guessed:
            whole = estimate(call.body())
            cost = {**cost, **{unit: whole[unit] for unit in guessed}}
        if asked:
            cost = {**cost, **asked}
        return account.fit(cost)

    # ---- the flow ----------------------------------------------------------------------------------------------------

    def passing(
        self, call: Call, send: Callable[[Provider | None], Any]
    ) -> Generator[Callable[[], Any], Any, Passed[Any]]:
        """Take a request through its provider's quota; `send` sends it and gives (or is awaited for) a Reply."""
        provider = self.find(call.url)
        if provider is None:
            self._counts["unlimited"] += 1
            reply = yield partial(send, None)
            return Passed(reply.answer, Passage(None), None)
        account = self.account(provider, call)
        asked = Asked(**{"timeout": self._timeout, "priority": self._priority, **(ASKED.get() or {})})
        began, attempt = self.clock.steady(), 0
        while True:
            attempt += 1
            ticket = yield from self._reserving(account, call, asked, began)
            sent = self.clock.steady()
            waited = (sent - began) / SECOND
            reply = yield from self._sending(account, call, partial(send, provider), ticket, sent)
            retry_after = yield from self._hearing(account, ticket, sent, reply)
            pause = None
            if call.replays:
                spent = self.clock.steady() - began
                rules = provider.retries, attempt, reply.status, call.method, spent, retry_after
                pause = again(*rules, self._chance())
            if pause is None:
                tail = Tail(account, ticket, reply.status, not account.units.isdisjoint(UNITS))
                keeps = account.settles and not ticket.settled
                passage = Passage(provider.name, waited, attempt, ticket.decision)
                return Passed(reply.answer, passage, tail if keeps else None)
            self._counts["retried"] += 1
            if not ticket.settled:
                yield ticket.commit
            yield reply.close
            yield partial(self._sleep, self.clock.steady() + pause)

    def _reserving(self, account: Account, call: Call, asked: Asked, began: int) -> Flow:
        timeout = asked.timeout
        if timeout is not None:
            timeout = max(0.0, seconds("timeout", timeout) - (self.clock.steady() - began) / SECOND)
        cost = self._cost(account, call, asked.cost)
        try:
            ticket = yield partial(account.limiter.reserve, account.key, cost, TTL, timeout, asked.priority)
        except Denied as denied:
            self._counts["denied"] += 1
            raise Denied(f"provider {account.provider.name}: {denied}", denied.decision) from None
        self._counts["sent"] += 1
        return ticket

    def _sending(self, account: Account, call: Call, send: Callable[[], Any], ticket: Ticket, sent: int) -> Flow:
        """Send; a request that never left gives its permits back, of any other nobody knows: it counts."""
        try:
            reply = yield send
        except GeneratorExit:
            raise
        except BaseException as error:
            if call.unreached(error):
                yield ticket.cancel
            else:
                yield from account.moving(ticket, sent)
                yield ticket.commit
            raise
        return reply

    def _hearing(self, account: Account, ticket: Ticket, sent: int, reply: Reply) -> Flow:
        """Settle what is known, and learn from the answer."""
        advice = read(reply.headers, self.clock.ns() / 1e9) if speaks(reply.headers) else SILENCE
        if reply.status == REFUSED:
            self._counts["refused"] += 1
            yield ticket.cancel
            used = yield from account.using()
            account.refused(REFUSED, used, sent, advice.retry_after)
            return advice.retry_after
        yield from account.moving(ticket, sent)
        if reply.status == UNAVAILABLE:
            self._counts["refused"] += 1
            account.refused(UNAVAILABLE, 0, sent, advice.retry_after)
            return advice.retry_after
        account.worked()
        if advice.limits and account.provider.learn != "off":
            self._counts["corrected"] += yield from account.learning(advice)
        return None

    # ---- looking -----------------------------------------------------------------------------------------------------

    def _looking(self, call: Call, times: int) -> tuple[Account, Cost] | None:
        account = self.account_of(call)
        if account is None:
            return None
        cost = self._cost(account, call, None)
        return account, {unit: amount * times for unit, amount in cost.items()} if isinstance(cost, Mapping) else cost

    def metrics(self) -> dict[str, int]:
        """Count requests: sent, unlimited, denied here, refused by the provider, sent again; corrections learned."""
        waiting = sum(account.limiter.waiting for account in self._accounts.values())
        return {**{name: self._counts[name] for name in COUNTS}, "waiting": waiting, "accounts": len(self._accounts)}

    def capacities(self) -> dict[str, int]:
        """Tell what may be used at present of the narrowest limit of each account, by its key."""
        return {account.resource: account.capacity for account in self._accounts.values()}

    def _close(self) -> list[Account]:
        with self._lock:
            self.closed = True
            accounts = list(self._accounts.values())
            self._accounts.clear()
        for pressure in self._pressures.values():
            pressure.close()
        if self.bus is not None and self._owns[1]:
            self.bus.close()
        return accounts

    def _applies(self) -> Callable[..., Any]:
        raise NotImplementedError

    def _sleep(self, until: int) -> Any:  # noqa: ANN401 - nothing, or a coroutine
        raise NotImplementedError


class Gate(_Gate):
    """Keeps threads to the quotas of providers."""

    _limiter = Limiter

    def run(self, flow: Generator[Callable[[], Any], Any, R]) -> R:
        """Take the steps of a flow."""
        answer, error = None, None
        while True:
            try:
                step = flow.send(answer) if error is None else flow.throw(error)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # what the flow gives
            answer, error = None, None
            try:
                answer = step()
            except BaseException as failure:  # noqa: BLE001 - the flow's to judge
                error = failure

    def peek(self, call: Call, times: int = 1) -> Decision | None:
        """Tell whether a request (or several like it) could be sent now; None: nothing limits it."""
        found = self._looking(call, times)
        return None if found is None else found[0].limiter.peek(found[0].key, found[1])

    def close(self) -> None:
        """Refuse further requests, wake those that wait with Closed, and let go of what was opened here."""
        for account in self._close():
            account.limiter.close()
        if self._owns[0]:
            self.store.close()

    def _applies(self) -> Callable[..., Any]:
        return self.store.apply

    def _sleep(self, until: int) -> None:
        self.clock.wait(ThreadSignal(), until)


class AsyncGate(_Gate):
    """Keeps tasks to the quotas of providers."""

    _limiter = AsyncLimiter

    async def run(self, flow: Generator[Callable[[], Any], Any, R]) -> R:
        """Take the steps of a flow."""
        answer, error = None, None
        while True:
            try:
                step = flow.send(answer) if error is None else flow.throw(error)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # what the flow gives
            answer, error = None, None
            try:
                answer = await step()
            except BaseException as failure:  # noqa: BLE001 - the flow's to judge
                error = failure

    async def peek(self, call: Call, times: int = 1) -> Decision | None:
        """Tell whether a request (or several like it) could be sent now; None: nothing limits it."""
        found = self._looking(call, times)
        return None if found is None else await found[0].limiter.peek(found[0].key, found[1])

    async def close(self) -> None:
        """Refuse further requests, wake those that wait with Closed, and let go of what was opened here."""
        for account in self._close():
            await account.limiter.close()
        if self._owns[0]:
            await self.store.close_async()

    def _applies(self) -> Callable[..., Any]:
        return self.store.apply_async

    async def _sleep(self, until: int) -> None:
        await self.clock.wait_async(TaskSignal(), until)
