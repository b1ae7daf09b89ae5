"""Calls a running service: `Client` for threads, `AsyncClient` for tasks, with the same method names.

    with Client("http://127.0.0.1:8080", token="...") as client:
        if client.try_acquire("api", "user:42"):
            ...

The verbs have the names and parameters of Limiter, after the policy: `try_acquire` returns a decision, and `acquire`
waits and raises Denied. Mutating requests carry an idempotency key: if the connection breaks, the client retries them
without a second charge. With `lease="1s"`, `try_acquire` takes permits in advance and serves further calls from them
without a request. All limits still hold (see `decisions.leases`), and unused permits are returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar

from tidegate.clock import SystemClock
from tidegate.errors import ConfigError, RateLimitError
from tidegate.flow import run, run_async
from tidegate.fork import abandon, at_fork
from tidegate.service.api.requests import (
    BlockRequest,
    CancelRequest,
    CommitRequest,
    as_cost,
)
from tidegate.service.api.verbs import (
    AUDIT,
    BLOCK,
    BLOCKS,
    CANCEL,
    COMMIT,
    PEEK,
    POLICIES,
    REFUND,
    RELEASE,
    RESET,
    UNBLOCK,
    USAGE,
)
from tidegate.service.client.lease_cache import LeaseCache, read_lease_duration
from tidegate.service.client.protocol import (
    MAX_TRIES,
    ServiceDecision,
    ServiceRequest,
    acquire_flow,
    audited_body,
    batch_request,
    client_options,
    cost_body,
    decide_flow,
    json_key,
    overview_request,
    peek_body,
    provider_request,
    provider_reserve_request,
    raise_if_denied,
    read_batch,
    read_response,
    read_timeout,
    read_usage,
    reserve_request,
    settle_flow,
    target_body,
    unreachable_error,
    verb_request,
)
from tidegate.service.client.reservation import AsyncServiceReservation, ServiceReservation, ServiceReserving

try:
    import httpx
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("the client needs httpx: pip install 'tidegate[client]'") from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.flow import Flow
    from tidegate.limiter import Usage
    from tidegate.policy import Cost, Key
    from tidegate.service.api.requests import VerbRequest
    from tidegate.service.api.responses import AuditInfo, BlockInfo, PoliciesInfo
    from tidegate.service.api.verbs import ServiceVerb

Q = TypeVar("Q", bound="VerbRequest")
R = TypeVar("R")


class Client:
    """A client of the service for threads. A context manager."""

    def __init__(
        self, url: str = "http://127.0.0.1:8080", *, token: str | None = None, lease: str | float | None = None
    ) -> None:
        """Call the service at this URL; with a `lease`, take permits in advance for that long."""
        self.url = url
        self._lease_cache = None if lease is None else LeaseCache(read_lease_duration(lease), SystemClock.steady)
        self._options = client_options(url, token)
        self._http: httpx.Client | None = httpx.Client(**self._options)
        at_fork(child=self._reset_after_fork)

    def _reset_after_fork(self) -> None:
        """Drop the connections and the leases of the parent, in a forked process."""
        abandon(self._http)
        self._http = None
        if self._lease_cache is not None:
            self._lease_cache.clear()

    def _http_client(self) -> httpx.Client:
        if self._http is None:
            self._http = httpx.Client(**self._options)
        return self._http

    def _drive(self, flow: Flow[ServiceRequest[Any], R]) -> R:
        return run(flow, self._send)

    def _send(self, request: ServiceRequest[R]) -> R:
        method, path, _, headers, timeout, decode = request
        for tries_left in reversed(range(MAX_TRIES)):
            try:
                http = self._http_client()
                response = http.request(method, path, content=request.content, headers=headers, timeout=timeout)
                return read_response(response, decode)
            except httpx.TransportError as error:
                if not tries_left or not request.repeatable:
                    raise unreachable_error(self.url, error) from None
        raise AssertionError("the last try returns or raises")

    def call(self, verb: ServiceVerb[Q, R], request: Q | None = None) -> R:
        """Send a request of any verb in `tidegate.service.api.verbs`, and return its response."""
        return self._send(verb_request(verb, request))

    def try_acquire(self, policy: str, key: Key, cost: Cost = 1) -> ServiceDecision:
        """Take permits if enough are available; never waits. Returns a decision, allowed or denied."""
        return self._drive(decide_flow(self._lease_cache, policy, key, cost))

    def acquire(
        self,
        policy: str,
        key: Key,
        cost: Cost = 1,
        timeout: float | None = None,
        priority: float = 0.0,
    ) -> ServiceDecision:
        """Wait until enough permits are available, and take them; raise Denied after `timeout` seconds.

        None means 30 seconds. The service does not wait longer than its `max_wait`.
        """
        return self._drive(acquire_flow(self._lease_cache, policy, key, cost, timeout, priority))

    def peek(self, policy: str, key: Key, cost: Cost = 1) -> ServiceDecision:
        """Return the decision that `try_acquire` would return, without changing anything."""
        return ServiceDecision.read(self.call(PEEK, peek_body(policy, key, cost)))

    def reserve(
        self,
        policy: str,
        key: Key,
        cost: Cost = 1,
        ttl: float = 60.0,
        timeout: float | None = 0.0,
        priority: float = 0.0,
    ) -> ServiceReservation:
        """Charge an estimate now and settle it later: `commit` the actual cost, or `cancel`.

        As a context manager, the reservation commits the estimate at the end of the block, or cancels after an
        exception, unless it was settled before. If it is not settled within `ttl` seconds, the estimate stays charged.
        Waits up to `timeout` seconds, then raises Denied.
        """
        seconds = read_timeout(timeout)
        response = self._send(reserve_request(policy, key, cost, ttl, seconds, priority))
        return ServiceReservation(self, raise_if_denied(ServiceDecision.read(response), key, seconds))

    def acquire_provider(
        self, provider: str, cost: Cost | None = None, timeout: float | None = None, priority: float = 0.0
    ) -> ServiceDecision:
        """Take permits of a provider (its name, its domain or a URL); raise Denied after `timeout` seconds.

        `cost` None is the provider's own. The `id` of the decision settles it with `commit` or `cancel`.
        """
        seconds = read_timeout(timeout)
        response = self._send(provider_request(provider, cost, seconds, priority))
        return raise_if_denied(ServiceDecision.read(response), provider, seconds)

    def reserve_provider(
        self,
        provider: str,
        cost: Cost | None = None,
        ttl: float = 60.0,
        timeout: float | None = 0.0,
        priority: float = 0.0,
    ) -> ServiceReservation:
        """Take permits of a provider that count until they are settled, or for `ttl` seconds; see `reserve`.

        A block commits at its end, after an exception too: the request may have arrived. `cancel` if it was not sent.
        """
        seconds = read_timeout(timeout)
        response = self._send(provider_reserve_request(provider, cost, ttl, seconds, priority))
        decision = raise_if_denied(ServiceDecision.read(response), provider, seconds)
        return ServiceReservation(self, decision, cancels=False)

    def commit(self, reservation: str, cost: Cost | None = None) -> None:
        """Settle a reservation with its actual cost."""
        self.call(COMMIT, CommitRequest(id=reservation, cost=None if cost is None else as_cost(cost)))

    def cancel(self, reservation: str) -> None:
        """Cancel a reservation and refund its estimate."""
        self.call(CANCEL, CancelRequest(id=reservation))

    def release(self, policy: str, key: Key, cost: Cost = 1) -> None:
        """Release slots of concurrency limits."""
        self.call(RELEASE, cost_body(policy, key, cost))

    def batch(self, asks: Sequence[tuple[str, Key] | tuple[str, Key, Cost]]) -> list[ServiceDecision | RateLimitError]:
        """Decide on up to a thousand (policy, key) or (policy, key, cost) tuples, each independently."""
        return read_batch(self._send(batch_request(asks)))

    def usage(self, policy: str, key: Key) -> dict[str, Usage]:
        """Return the usage of a key at each limit, by the name of the limit."""
        return read_usage(self.call(USAGE, target_body(policy, key)))

    def refund(self, policy: str, key: Key, cost: Cost = 1) -> None:
        """Refund the most recently charged permits; needs the admin token."""
        self.call(REFUND, cost_body(policy, key, cost))

    def reset(self, policy: str, key: Key) -> None:
        """Delete the state of a key; needs the admin token."""
        self.call(RESET, audited_body(policy, key))

    def block(self, policy: str, key: Key, seconds: float = 3600.0, *, reason: str = "", actor: str = "") -> None:
        """Deny a key for `seconds` seconds, whatever its limits; needs the admin token."""
        body = BlockRequest(policy=policy, key=json_key(key), seconds=seconds, reason=reason, actor=actor)
        self.call(BLOCK, body)

    def unblock(self, policy: str, key: Key, *, reason: str = "", actor: str = "") -> None:
        """Remove the block of a key; needs the admin token."""
        self.call(UNBLOCK, audited_body(policy, key, reason, actor))

    def blocks(self) -> list[BlockInfo]:
        """List the blocks that the responding process knows; needs the admin token."""
        return self.call(BLOCKS).blocks

    def audit(self) -> list[AuditInfo]:
        """List who reset, blocked or unblocked a key, the newest first; needs the admin token."""
        return self.call(AUDIT).entries

    def overview(self) -> dict[str, object]:
        """Return the data that the dashboard shows."""
        return self._send(overview_request())

    def policies(self) -> PoliciesInfo:
        """List the policies."""
        return self.call(POLICIES)

    def close(self) -> None:
        """Return unused leased permits, and close the connections."""
        if self._lease_cache is not None:
            self._drive(settle_flow(self._lease_cache, self._lease_cache.pop_all()))
        if self._http is not None:
            self._http.close()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


class AsyncClient:
    """A client of the service for tasks: the methods of Client, awaited. An async context manager."""

    def __init__(
        self, url: str = "http://127.0.0.1:8080", *, token: str | None = None, lease: str | float | None = None
    ) -> None:
        """Call the service at this URL; with a `lease`, take permits in advance for that long."""
        self.url = url
        self._lease_cache = None if lease is None else LeaseCache(read_lease_duration(lease), SystemClock.steady)
        self._options = client_options(url, token)
        self._http: httpx.AsyncClient | None = httpx.AsyncClient(**self._options)
        at_fork(child=self._reset_after_fork)

    def _reset_after_fork(self) -> None:
        """Drop the connections and the leases of the parent, in a forked process."""
        abandon(self._http)
        self._http = None
        if self._lease_cache is not None:
            self._lease_cache.clear()

    def _http_client(self) -> httpx.AsyncClient:
        if self._http is None:
            self._http = httpx.AsyncClient(**self._options)
        return self._http

    async def _drive(self, flow: Flow[ServiceRequest[Any], R]) -> R:
        return await run_async(flow, self._send)

    async def _send(self, request: ServiceRequest[R]) -> R:
        method, path, _, headers, timeout, decode = request
        for tries_left in reversed(range(MAX_TRIES)):
            try:
                http = self._http_client()
                response = await http.request(method, path, content=request.content, headers=headers, timeout=timeout)
                return read_response(response, decode)
            except httpx.TransportError as error:
                if not tries_left or not request.repeatable:
                    raise unreachable_error(self.url, error) from None
        raise AssertionError("the last try returns or raises")

    async def call(self, verb: ServiceVerb[Q, R], request: Q | None = None) -> R:
        """Send a request of any verb in `tidegate.service.api.verbs`, and return its response."""
        return await self._send(verb_request(verb, request))

    async def try_acquire(self, policy: str, key: Key, cost: Cost = 1) -> ServiceDecision:
        """Take permits if enough are available; never waits. Returns a decision, allowed or denied."""
        return await self._drive(decide_flow(self._lease_cache, policy, key, cost))

    async def acquire(
        self,
        policy: str,
        key: Key,
        cost: Cost = 1,
        timeout: float | None = None,  # noqa: ASYNC109 - the deadline is part of the contract
        priority: float = 0.0,
    ) -> ServiceDecision:
        """Wait until enough permits are available, and take them; raise Denied after `timeout` seconds.

        None means 30 seconds. The service does not wait longer than its `max_wait`.
        """
        return await self._drive(acquire_flow(self._lease_cache, policy, key, cost, timeout, priority))

    async def peek(self, policy: str, key: Key, cost: Cost = 1) -> ServiceDecision:
        """Return the decision that `try_acquire` would return, without changing anything."""
        return ServiceDecision.read(await self.call(PEEK, peek_body(policy, key, cost)))

    def reserve(
        self,
        policy: str,
        key: Key,
        cost: Cost = 1,
        ttl: float = 60.0,
        timeout: float | None = 0.0,
        priority: float = 0.0,
    ) -> ServiceReserving:
        """Charge an estimate now and settle it later: await it or use it in `async with`; see `Client.reserve`."""
        return ServiceReserving(lambda: self._reserve(policy, key, cost, ttl, read_timeout(timeout), priority))

    async def _reserve(
        self,
        policy: str,
        key: Key,
        cost: Cost,
        ttl: float,
        timeout: float,  # noqa: ASYNC109 - as above
        priority: float,
    ) -> AsyncServiceReservation:
        response = await self._send(reserve_request(policy, key, cost, ttl, timeout, priority))
        return AsyncServiceReservation(self, raise_if_denied(ServiceDecision.read(response), key, timeout))

    async def acquire_provider(
        self,
        provider: str,
        cost: Cost | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
        priority: float = 0.0,
    ) -> ServiceDecision:
        """Take permits of a provider (its name, its domain or a URL); see `Client.acquire_provider`."""
        seconds = read_timeout(timeout)
        response = await self._send(provider_request(provider, cost, seconds, priority))
        return raise_if_denied(ServiceDecision.read(response), provider, seconds)

    def reserve_provider(
        self,
        provider: str,
        cost: Cost | None = None,
        ttl: float = 60.0,
        timeout: float | None = 0.0,
        priority: float = 0.0,
    ) -> ServiceReserving:
        """Take permits of a provider: await it or use it in `async with`; see `Client.reserve_provider`."""
        seconds = read_timeout(timeout)

        async def reserve() -> AsyncServiceReservation:
            response = await self._send(provider_reserve_request(provider, cost, ttl, seconds, priority))
            decision = raise_if_denied(ServiceDecision.read(response), provider, seconds)
            return AsyncServiceReservation(self, decision, cancels=False)

        return ServiceReserving(reserve)

    async def commit(self, reservation: str, cost: Cost | None = None) -> None:
        """Settle a reservation with its actual cost."""
        await self.call(COMMIT, CommitRequest(id=reservation, cost=None if cost is None else as_cost(cost)))

    async def cancel(self, reservation: str) -> None:
        """Cancel a reservation and refund its estimate."""
        await self.call(CANCEL, CancelRequest(id=reservation))

    async def release(self, policy: str, key: Key, cost: Cost = 1) -> None:
        """Release slots of concurrency limits."""
        await self.call(RELEASE, cost_body(policy, key, cost))

    async def batch(
        self, asks: Sequence[tuple[str, Key] | tuple[str, Key, Cost]]
    ) -> list[ServiceDecision | RateLimitError]:
        """Decide on up to a thousand (policy, key) or (policy, key, cost) tuples, each independently."""
        return read_batch(await self._send(batch_request(asks)))

    async def usage(self, policy: str, key: Key) -> dict[str, Usage]:
        """Return the usage of a key at each limit, by the name of the limit."""
        return read_usage(await self.call(USAGE, target_body(policy, key)))

    async def refund(self, policy: str, key: Key, cost: Cost = 1) -> None:
        """Refund the most recently charged permits; needs the admin token."""
        await self.call(REFUND, cost_body(policy, key, cost))

    async def reset(self, policy: str, key: Key) -> None:
        """Delete the state of a key; needs the admin token."""
        await self.call(RESET, audited_body(policy, key))

    async def block(self, policy: str, key: Key, seconds: float = 3600.0, *, reason: str = "", actor: str = "") -> None:
        """Deny a key for `seconds` seconds, whatever its limits; needs the admin token."""
        body = BlockRequest(policy=policy, key=json_key(key), seconds=seconds, reason=reason, actor=actor)
        await self.call(BLOCK, body)

    async def unblock(self, policy: str, key: Key, *, reason: str = "", actor: str = "") -> None:
        """Remove the block of a key; needs the admin token."""
        await self.call(UNBLOCK, audited_body(policy, key, reason, actor))

    async def blocks(self) -> list[BlockInfo]:
        """List the blocks that the responding process knows; needs the admin token."""
        return (await self.call(BLOCKS)).blocks

    async def audit(self) -> list[AuditInfo]:
        """List who reset, blocked or unblocked a key, the newest first; needs the admin token."""
        return (await self.call(AUDIT)).entries

    async def overview(self) -> dict[str, object]:
        """Return the data that the dashboard shows."""
        return await self._send(overview_request())

    async def policies(self) -> PoliciesInfo:
        """List the policies."""
        return await self.call(POLICIES)

    async def close(self) -> None:
        """Return unused leased permits, and close the connections."""
        if self._lease_cache is not None:
            await self._drive(settle_flow(self._lease_cache, self._lease_cache.pop_all()))
        if self._http is not None:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()


__all__ = ["AsyncClient", "Client", "ServiceDecision"]
