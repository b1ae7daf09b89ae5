"""Calls a running service: `Client` for threads, `AsyncClient` for tasks, with the same method names.

    with Client("http://127.0.0.1:8080", token="...") as client:
        if client.try_acquire("api", "user:42"):
            ...

The verbs have the names and parameters of Limiter, after the policy: `try_acquire` returns a decision, and `acquire`
waits and raises Denied. Mutating requests carry an idempotency key: if the connection breaks, the client retries them
without a second charge. With `lease="1s"`, `try_acquire` takes permits in advance and serves further calls from them
without a request. All limits still hold (see `decisions.leases`), and unused permits are returned.

Each method is written once, as a flow; `blocking` and `awaited` make a method of it.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar

from tidegate._runtime.clock import SystemClock
from tidegate._runtime.flow import run, run_async
from tidegate._runtime.fork import abandon, at_fork
from tidegate.errors import ConfigError, RateLimitError
from tidegate.service._api import verbs
from tidegate.service._api.requests import (
    AuditedRequest,
    BlockRequest,
    CancelRequest,
    CommitRequest,
    CostRequest,
    PeekRequest,
    TargetRequest,
    as_cost,
)
from tidegate.service.client._lease_cache import LeaseCache, read_lease_duration
from tidegate.service.client._protocol import (
    MAX_TRIES,
    ServiceDecision,
    ServiceRequest,
    batch_request,
    client_options,
    decide_flow,
    json_key,
    overview_request,
    provider_request,
    provider_reserve_request,
    raise_if_denied,
    read_batch,
    read_response,
    read_timeout,
    read_usage,
    reserve_request,
    settle_flow,
    unreachable_error,
    verb_request,
)
from tidegate.service.client._reservation import AsyncServiceReservation, ServiceReservation, ServiceReserving
from tidegate.service.client._run_flows import RunFlows

try:
    import httpx
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("the client needs httpx: pip install 'tidegate[client]'") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from tidegate._limiter.limiter import Usage
    from tidegate._policy import Cost, Key
    from tidegate._runtime.flow import Flow
    from tidegate.service._api.requests import VerbRequest
    from tidegate.service._api.responses import AuditInfo, BlockInfo, PoliciesInfo
    from tidegate.service._api.verbs import ServiceVerb

    ClientFlow = Flow[ServiceRequest[Any], "R"]

P = ParamSpec("P")
Q = TypeVar("Q", bound="VerbRequest")
R = TypeVar("R")


class ClientFlows(RunFlows):
    """The methods of both clients, as flows."""

    def __init__(self, lease_cache: LeaseCache | None) -> None:
        """Take permits from these leases, if possible."""
        self.lease_cache = lease_cache

    def call_flow(self, verb: ServiceVerb[Q, R], request: Q | None = None) -> ClientFlow[R]:
        """Send a request of any verb in `tidegate.service._api.verbs`, and return its response."""
        response: R = yield verb_request(verb, request)
        return response

    def try_acquire_flow(self, policy: str, key: Key, cost: Cost = 1) -> ClientFlow[ServiceDecision]:
        """Take permits if enough are available; never waits. Returns a decision, allowed or denied."""
        return (yield from decide_flow(self.lease_cache, policy, key, cost))

    def acquire_flow(
        self, policy: str, key: Key, cost: Cost = 1, timeout: float | None = None, priority: float = 0.0
    ) -> ClientFlow[ServiceDecision]:
        """Wait until enough permits are available, and take them; raise Denied after `timeout` seconds.

        None means 30 seconds. The service does not wait longer than its `max_wait`.
        """
        seconds = read_timeout(timeout)
        decision = yield from decide_flow(self.lease_cache, policy, key, cost, seconds, priority)
        return raise_if_denied(decision, key, seconds)

    def peek_flow(self, policy: str, key: Key, cost: Cost = 1) -> ClientFlow[ServiceDecision]:
        """Return the decision that `try_acquire` would return, without changing anything."""
        body = PeekRequest(policy=policy, key=json_key(key), cost=as_cost(cost))
        return ServiceDecision.read((yield from self.call_flow(verbs.PEEK, body)))

    def reserve_flow(
        self, policy: str, key: Key, cost: Cost, ttl: float, timeout: float | None, priority: float
    ) -> ClientFlow[ServiceDecision]:
        """Charge an estimate; raise Denied after `timeout` seconds."""
        seconds = read_timeout(timeout)
        response = yield reserve_request(policy, key, cost, ttl, seconds, priority)
        return raise_if_denied(ServiceDecision.read(response), key, seconds)

    def acquire_provider_flow(
        self, provider: str, cost: Cost | None = None, timeout: float | None = None, priority: float = 0.0
    ) -> ClientFlow[ServiceDecision]:
        """Take permits of a provider (its name, its domain or a URL); raise Denied after `timeout` seconds.

        `cost` None is the provider's own. The `id` of the decision settles it with `commit` or `cancel`.
        """
        seconds = read_timeout(timeout)
        response = yield provider_request(provider, cost, seconds, priority)
        return raise_if_denied(ServiceDecision.read(response), provider, seconds)

    def reserve_provider_flow(
        self, provider: str, cost: Cost | None, ttl: float, timeout: float | None, priority: float
    ) -> ClientFlow[ServiceDecision]:
        """Take permits of a provider that count until they are settled; raise Denied after `timeout` seconds."""
        seconds = read_timeout(timeout)
        response = yield provider_reserve_request(provider, cost, ttl, seconds, priority)
        return raise_if_denied(ServiceDecision.read(response), provider, seconds)

    def commit_flow(self, reservation: str, cost: Cost | None = None) -> ClientFlow[None]:
        """Settle a reservation with its actual cost."""
        actual = None if cost is None else as_cost(cost)
        yield from self.call_flow(verbs.COMMIT, CommitRequest(id=reservation, cost=actual))

    def cancel_flow(self, reservation: str) -> ClientFlow[None]:
        """Cancel a reservation and refund its estimate."""
        yield from self.call_flow(verbs.CANCEL, CancelRequest(id=reservation))

    def release_flow(self, policy: str, key: Key, cost: Cost = 1) -> ClientFlow[None]:
        """Release slots of concurrency limits."""
        yield from self.call_flow(verbs.RELEASE, CostRequest(policy=policy, key=json_key(key), cost=as_cost(cost)))

    def batch_flow(
        self, asks: Sequence[tuple[str, Key] | tuple[str, Key, Cost]]
    ) -> ClientFlow[list[ServiceDecision | RateLimitError]]:
        """Decide on up to a thousand (policy, key) or (policy, key, cost) tuples, each independently."""
        return read_batch((yield batch_request(asks)))

    def usage_flow(self, policy: str, key: Key) -> ClientFlow[dict[str, Usage]]:
        """Return the usage of a key at each limit, by the name of the limit."""
        return read_usage((yield from self.call_flow(verbs.USAGE, TargetRequest(policy=policy, key=json_key(key)))))

    def refund_flow(self, policy: str, key: Key, cost: Cost = 1) -> ClientFlow[None]:
        """Refund the most recently charged permits; needs the admin token."""
        yield from self.call_flow(verbs.REFUND, CostRequest(policy=policy, key=json_key(key), cost=as_cost(cost)))

    def reset_flow(self, policy: str, key: Key) -> ClientFlow[None]:
        """Delete the state of a key; needs the admin token."""
        yield from self.call_flow(verbs.RESET, AuditedRequest(policy=policy, key=json_key(key)))

    def block_flow(
        self, policy: str, key: Key, seconds: float = 3600.0, *, reason: str = "", actor: str = ""
    ) -> ClientFlow[None]:
        """Deny a key for `seconds` seconds, whatever its limits; needs the admin token."""
        body = BlockRequest(policy=policy, key=json_key(key), seconds=seconds, reason=reason, actor=actor)
        yield from self.call_flow(verbs.BLOCK, body)

    def unblock_flow(self, policy: str, key: Key, *, reason: str = "", actor: str = "") -> ClientFlow[None]:
        """Remove the block of a key; needs the admin token."""
        body = AuditedRequest(policy=policy, key=json_key(key), reason=reason, actor=actor)
        yield from self.call_flow(verbs.UNBLOCK, body)

    def blocks_flow(self) -> ClientFlow[list[BlockInfo]]:
        """List the blocks that the responding process knows; needs the admin token."""
        return (yield from self.call_flow(verbs.BLOCKS)).blocks

    def audit_flow(self) -> ClientFlow[list[AuditInfo]]:
        """List who reset, blocked or unblocked a key, the newest first; needs the admin token."""
        return (yield from self.call_flow(verbs.AUDIT)).entries

    def policies_flow(self) -> ClientFlow[PoliciesInfo]:
        """List the policies."""
        return (yield from self.call_flow(verbs.POLICIES))

    def overview_flow(self) -> ClientFlow[dict[str, object]]:
        """Return the data that the dashboard shows."""
        overview: dict[str, object] = yield overview_request()
        return overview

    def return_leases_flow(self) -> ClientFlow[None]:
        """Return unused leased permits."""
        if self.lease_cache is not None:
            yield from settle_flow(self.lease_cache, self.lease_cache.pop_all())


class BaseClient:
    """What both clients share: their options, and what a forked process must not use."""

    _open: Callable[..., Any]  # the class of the connections

    def __init__(
        self, url: str = "http://127.0.0.1:8080", *, token: str | None = None, lease: str | float | None = None
    ) -> None:
        """Call the service at this URL; with a `lease`, take permits in advance for that long."""
        self.url = url
        leases = None if lease is None else LeaseCache(read_lease_duration(lease), SystemClock.steady)
        self._flows = ClientFlows(leases)
        self._options = client_options(url, token)
        self._http: Any = self._open(**self._options)
        at_fork(child=self._reset_after_fork)

    def _reset_after_fork(self) -> None:
        """Drop the connections and the leases of the parent, in a forked process."""
        abandon(self._http)
        self._http = None
        if self._flows.lease_cache is not None:
            self._flows.lease_cache.clear()

    def _http_client(self) -> Any:  # noqa: ANN401 - one of the two clients of httpx
        if self._http is None:
            self._http = self._open(**self._options)
        return self._http


def blocking(flow: Callable[Concatenate[ClientFlows, P], ClientFlow[R]]) -> Callable[Concatenate[Client, P], R]:
    """Make a method of Client of a flow."""

    @wraps(flow)
    def method(self: Client, /, *args: P.args, **options: P.kwargs) -> R:
        return run(flow(self._flows, *args, **options), self._send)

    method.__name__ = flow.__name__.removesuffix("_flow")
    return method


def awaited(
    flow: Callable[Concatenate[ClientFlows, P], ClientFlow[R]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]:
    """Make a method of AsyncClient of a flow."""

    @wraps(flow)
    async def method(self: AsyncClient, /, *args: P.args, **options: P.kwargs) -> R:
        return await run_async(flow(self._flows, *args, **options), self._send)

    method.__name__ = flow.__name__.removesuffix("_flow")
    return method


class Client(BaseClient):
    """A client of the service for threads. A context manager."""

    _open = httpx.Client

    def _send(self, request: ServiceRequest[R]) -> R:
        method, path, _, headers, timeout, decode = request
        for tries_left in reversed(range(MAX_TRIES)):
            try:
                response = self._http_client().request(
                    method, path, content=request.content, headers=headers, timeout=timeout
                )
                return read_response(response, decode)
            except httpx.TransportError as error:
                if not tries_left or not request.repeatable:
                    raise unreachable_error(self.url, error) from None
        raise AssertionError("the last try returns or raises")

    call: Final = blocking(ClientFlows.call_flow)
    try_acquire: Final = blocking(ClientFlows.try_acquire_flow)
    acquire: Final = blocking(ClientFlows.acquire_flow)
    peek: Final = blocking(ClientFlows.peek_flow)
    acquire_provider: Final = blocking(ClientFlows.acquire_provider_flow)
    commit: Final = blocking(ClientFlows.commit_flow)
    cancel: Final = blocking(ClientFlows.cancel_flow)
    release: Final = blocking(ClientFlows.release_flow)
    batch: Final = blocking(ClientFlows.batch_flow)
    usage: Final = blocking(ClientFlows.usage_flow)
    refund: Final = blocking(ClientFlows.refund_flow)
    reset: Final = blocking(ClientFlows.reset_flow)
    block: Final = blocking(ClientFlows.block_flow)
    unblock: Final = blocking(ClientFlows.unblock_flow)
    blocks: Final = blocking(ClientFlows.blocks_flow)
    audit: Final = blocking(ClientFlows.audit_flow)
    policies: Final = blocking(ClientFlows.policies_flow)
    overview: Final = blocking(ClientFlows.overview_flow)
    runs: Final = blocking(ClientFlows.runs_flow)
    runs_create: Final = blocking(ClientFlows.runs_create_flow)
    runs_child: Final = blocking(ClientFlows.runs_child_flow)
    runs_charge: Final = blocking(ClientFlows.runs_charge_flow)
    runs_read: Final = blocking(ClientFlows.runs_read_flow)
    runs_report: Final = blocking(ClientFlows.runs_report_flow)
    runs_extend: Final = blocking(ClientFlows.runs_extend_flow)
    runs_stop: Final = blocking(ClientFlows.runs_stop_flow)
    runs_close: Final = blocking(ClientFlows.runs_close_flow)

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
        flow = self._flows.reserve_flow(policy, key, cost, ttl, timeout, priority)
        return ServiceReservation(self, run(flow, self._send))

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
        flow = self._flows.reserve_provider_flow(provider, cost, ttl, timeout, priority)
        return ServiceReservation(self, run(flow, self._send), cancels=False)

    def close(self) -> None:
        """Return unused leased permits, and close the connections."""
        run(self._flows.return_leases_flow(), self._send)
        if self._http is not None:
            self._http.close()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


class AsyncClient(BaseClient):
    """A client of the service for tasks: the methods of Client, awaited. An async context manager."""

    _open = httpx.AsyncClient

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

    call: Final = awaited(ClientFlows.call_flow)
    try_acquire: Final = awaited(ClientFlows.try_acquire_flow)
    acquire: Final = awaited(ClientFlows.acquire_flow)
    peek: Final = awaited(ClientFlows.peek_flow)
    acquire_provider: Final = awaited(ClientFlows.acquire_provider_flow)
    commit: Final = awaited(ClientFlows.commit_flow)
    cancel: Final = awaited(ClientFlows.cancel_flow)
    release: Final = awaited(ClientFlows.release_flow)
    batch: Final = awaited(ClientFlows.batch_flow)
    usage: Final = awaited(ClientFlows.usage_flow)
    refund: Final = awaited(ClientFlows.refund_flow)
    reset: Final = awaited(ClientFlows.reset_flow)
    block: Final = awaited(ClientFlows.block_flow)
    unblock: Final = awaited(ClientFlows.unblock_flow)
    blocks: Final = awaited(ClientFlows.blocks_flow)
    audit: Final = awaited(ClientFlows.audit_flow)
    policies: Final = awaited(ClientFlows.policies_flow)
    overview: Final = awaited(ClientFlows.overview_flow)
    runs: Final = awaited(ClientFlows.runs_flow)
    runs_create: Final = awaited(ClientFlows.runs_create_flow)
    runs_child: Final = awaited(ClientFlows.runs_child_flow)
    runs_charge: Final = awaited(ClientFlows.runs_charge_flow)
    runs_read: Final = awaited(ClientFlows.runs_read_flow)
    runs_report: Final = awaited(ClientFlows.runs_report_flow)
    runs_extend: Final = awaited(ClientFlows.runs_extend_flow)
    runs_stop: Final = awaited(ClientFlows.runs_stop_flow)
    runs_close: Final = awaited(ClientFlows.runs_close_flow)

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

        async def reserve() -> AsyncServiceReservation:
            flow = self._flows.reserve_flow(policy, key, cost, ttl, timeout, priority)
            return AsyncServiceReservation(self, await run_async(flow, self._send))

        return ServiceReserving(reserve)

    def reserve_provider(
        self,
        provider: str,
        cost: Cost | None = None,
        ttl: float = 60.0,
        timeout: float | None = 0.0,
        priority: float = 0.0,
    ) -> ServiceReserving:
        """Take permits of a provider: await it or use it in `async with`; see `Client.reserve_provider`."""

        async def reserve() -> AsyncServiceReservation:
            flow = self._flows.reserve_provider_flow(provider, cost, ttl, timeout, priority)
            return AsyncServiceReservation(self, await run_async(flow, self._send), cancels=False)

        return ServiceReserving(reserve)

    async def close(self) -> None:
        """Return unused leased permits, and close the connections."""
        await run_async(self._flows.return_leases_flow(), self._send)
        if self._http is not None:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()


__all__ = ["AsyncClient", "Client", "ServiceDecision"]
