"""ShouldRateLimit: Envoy sends the descriptors of a request and gets OK or OVER_LIMIT.

All descriptors of a request are decided together: if one is over its limit, none is charged. If the store is
unavailable and the policy has `on_store_error: deny`, the status is UNAVAILABLE, so that Envoy's failure mode applies.

The server is gRPC's server with threads, which uses half the CPU time of `grpc.aio` (bench/front.py). A thread
decides common requests itself; everything else runs in the event loop of the service, which the thread waits for.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from tidegate.errors import ConfigError, RateLimitError, StoreUnavailable
from tidegate.service._decisions.descriptors import ENVOY_UNITS, request_policy
from tidegate.service._decisions.policy_limiters import ASK_STORE, bound_key
from tidegate.service._envoy.encoding import encode_response
from tidegate.service._envoy.messages import METHOD, SERVICE, read_request

try:
    import grpc  # type: ignore[import-untyped]  # grpcio has no types
except ImportError as _error:  # pragma: no cover - the development environment has it
    raise ConfigError("the gRPC service needs grpcio: pip install 'tidegate[envoy]'") from _error

if TYPE_CHECKING:
    from tidegate._policy import Key, Policy
    from tidegate.core._decision import Decision
    from tidegate.headers import Style
    from tidegate.service._config.settings import Settings
    from tidegate.service._decisions.decider import Decider
    from tidegate.service._decisions.descriptors import DescriptorNode

log: logging.Logger = logging.getLogger("tidegate.service")

MAX_DESCRIPTORS: Final = 100  # per request
MAX_CONNECTION_AGE: Final = 300_000  # milliseconds, after which a client connects again: ends calls without a message
PROBLEMS: Final = (
    (StoreUnavailable, "store-unavailable", grpc.StatusCode.UNAVAILABLE),
    (ConfigError, "bad-field", grpc.StatusCode.INVALID_ARGUMENT),
    (RateLimitError, "stopping", grpc.StatusCode.UNAVAILABLE),
)


class DescriptorAsk(NamedTuple):
    """The policy, key and cost of one descriptor. A descriptor without a policy is not limited."""

    policy: Policy | None
    key: Key = ""
    cost: int = 1
    peek: bool = False  # for a cost of 0: check whether the limit is used up, charge nothing


class RateLimitService:
    """Answers ShouldRateLimit calls with a decider."""

    def __init__(self, decider: Decider, loop: asyncio.AbstractEventLoop, style: str = "x") -> None:
        """Use this decider, which belongs to this event loop, and header fields of this style."""
        self.decider = decider
        self._loop = loop
        self._style = cast("Style", style)

    def handler(self) -> Any:  # noqa: ANN401 - gRPC has no types
        """Return the handler that a gRPC server registers."""
        # It parses the request and encodes the response itself: an error of gRPC would name our classes.
        method = grpc.unary_unary_rpc_method_handler(self.should_rate_limit)
        return grpc.method_handlers_generic_handler(SERVICE, {METHOD: method})

    def should_rate_limit(self, data: bytes, context: Any) -> bytes:  # noqa: ANN401 - gRPC has no types
        """Answer one request. Errors become a gRPC status; the details of unexpected ones are only logged."""
        try:
            request = read_request(data)
            response = self._respond_now(request)
            return self._respond_in_loop(request, context) if response is None else response
        except RateLimitError as error:
            kind, code = next(problem for error_type, *problem in PROBLEMS if isinstance(error, error_type))
            detail = str(error)
        except CancelledError:
            return b""  # the client is gone
        except Exception:
            log.exception("a gRPC request failed")
            kind, code, detail = "internal", grpc.StatusCode.INTERNAL, "see the log of the service"
        self.decider.stats.errors.add(kind)
        return context.abort(code, detail)  # type: ignore[no-any-return]  # it raises

    def _respond_now(self, request: Any) -> bytes | None:  # noqa: ANN401 - made at run time
        """Respond to a request with one descriptor if the store decides at once; None for all other requests."""
        descriptors = request.descriptors
        if len(descriptors) != 1:
            return None
        descriptor = descriptors[0]
        domain = self.decider.policies.domains.get(request.domain)
        if domain is None or descriptor.HasField("limit") or descriptor.HasField("hits_addend"):
            return None
        found = domain.match([(entry.key, entry.value) for entry in descriptor.entries])
        if found is None:
            return None
        cost = request.hits_addend or 1
        decision: Any = self.decider.acquire_in_thread(self._loop, found[0], bound_key(found[1]), cost)
        return None if decision is ASK_STORE else encode_response((decision,), self._style)

    def _respond_in_loop(self, request: Any, context: Any) -> bytes:  # noqa: ANN401 - as above
        """Respond from the event loop; if the client goes away, the call is cancelled, and the store refunds it."""
        running = asyncio.run_coroutine_threadsafe(self._respond(request), self._loop)
        if not context.add_callback(running.cancel):
            running.cancel()
        return running.result()

    async def _respond(self, request: Any) -> bytes:  # noqa: ANN401 - made at run time
        if not request.domain:
            raise ConfigError("must not be empty", field="domain")
        if not 1 <= len(request.descriptors) <= MAX_DESCRIPTORS:
            raise ConfigError(
                f"expected 1 to {MAX_DESCRIPTORS} descriptors, not {len(request.descriptors)}", field="descriptors"
            )
        domain = self.decider.policies.domains.get(request.domain)
        if domain is None:  # not limited, even by limits in the request: their state would be unbounded
            return encode_response([None] * len(request.descriptors), self._style)
        matches = [domain.find(descriptor_pairs(descriptor)) for descriptor in request.descriptors]
        replaced = {name for match in matches if match is not None for name in match[0].replaces}
        asks = [
            self._make_ask(request, descriptor, match, replaced)
            for descriptor, match in zip(request.descriptors, matches, strict=True)
        ]
        return encode_response(await self._decide(asks), self._style)

    def _make_ask(
        self,
        request: Any,  # noqa: ANN401 - made at run time
        descriptor: Any,  # noqa: ANN401 - made at run time
        match: tuple[DescriptorNode, Key] | None,
        replaced: set[str],
    ) -> DescriptorAsk:
        cost = int(request.hits_addend) or 1
        peek = False
        if descriptor.HasField("hits_addend"):
            cost = int(descriptor.hits_addend.value)
            peek = not cost
        node = None if match is None else match[0]
        policy = None if node is None or node.name in replaced else node.policy
        if descriptor.HasField("limit") and descriptor.limit.requests_per_unit:
            unit = descriptor.limit.unit
            if not 1 <= unit < len(ENVOY_UNITS):
                raise ConfigError(f"unknown unit {unit}: expected 1 to {len(ENVOY_UNITS) - 1}", field="limit.unit")
            policy = request_policy(request.domain, node, descriptor.limit.requests_per_unit, ENVOY_UNITS[unit])
        pairs = descriptor_pairs(descriptor)
        key: Key = match[1] if match is not None else (request.domain, *(part for pair in pairs for part in pair))
        return DescriptorAsk(policy, bound_key(key), max(1, cost), peek)

    async def _decide(self, asks: list[DescriptorAsk]) -> list[Decision | None]:
        """Decide on the limited descriptors, all or nothing; peek at those with a cost of 0."""
        decisions: list[Decision | None] = [None] * len(asks)
        for index, ask in enumerate(asks):
            if ask.policy is not None and ask.peek:
                decisions[index] = await self.decider.peek_policy(ask.policy, ask.key)
        to_charge = [
            (index, ask.policy, ask.key, ask.cost)
            for index, ask in enumerate(asks)
            if ask.policy is not None and not ask.peek
        ]
        if any(decision is not None and not decision.allowed for decision in decisions):
            for index, policy, key, _ in to_charge:  # the request is denied already: charge nothing
                decisions[index] = await self.decider.peek_policy(policy, key)
            return decisions
        charged = await self.decider.acquire_together([(policy, key, cost) for _, policy, key, cost in to_charge])
        for (index, *_), decision in zip(to_charge, charged, strict=True):
            decisions[index] = decision
        return decisions


def descriptor_pairs(descriptor: Any) -> tuple[tuple[str, str], ...]:  # noqa: ANN401 - made at run time
    """Return the keys and values of a descriptor."""
    return tuple((entry.key, entry.value) for entry in descriptor.entries)


class EnvoyServer:
    """A running gRPC server."""

    def __init__(self, server: Any, threads: ThreadPoolExecutor) -> None:  # noqa: ANN401 - gRPC has no types
        """Hold the server and its threads."""
        self._server = server
        self._threads = threads

    async def stop(self, grace: float | None) -> None:
        """Accept no more calls, wait up to `grace` seconds for those that are active, and cancel the others."""
        await asyncio.to_thread(self._server.stop(grace).wait)
        self._threads.shutdown(wait=False)


async def serve(decider: Decider, settings: Settings) -> EnvoyServer:
    """Start a gRPC server. Returns it; the caller stops it."""
    if settings.grpc is None:
        raise ConfigError("expected an address such as 127.0.0.1:8081", field="grpc")
    options = (
        ("grpc.so_reuseport", 1 if settings.workers > 1 else 0),
        ("grpc.max_receive_message_length", 2**20),
        # As for HTTP: close silent and idle connections, and keep below the limit on open files.
        ("grpc.server_handshake_timeout_ms", round(settings.read_timeout * 1000)),
        ("grpc.max_connection_idle_ms", round(settings.idle_timeout * 1000)),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE),
        ("grpc.max_connection_age_grace_ms", round(settings.max_wait * 1000)),
    )
    # A call holds a thread from its first byte on, so there may be as many threads as calls.
    threads = ThreadPoolExecutor(settings.max_concurrency, thread_name_prefix="tidegate-grpc")
    server = grpc.server(threads, options=options, maximum_concurrent_rpcs=settings.max_concurrency)
    service = RateLimitService(decider, asyncio.get_running_loop(), settings.headers)
    server.add_generic_rpc_handlers((service.handler(),))
    try:
        bound = server.add_insecure_port(str(settings.grpc))
    except RuntimeError:
        bound = 0
    if not bound:
        raise ConfigError(f"cannot listen on {settings.grpc}: another program may use this address", field="grpc")
    server.start()
    return EnvoyServer(server, threads)
