"""The gateway: identifies the caller, finds the provider, waits for a permit, sends the call and passes it on."""

from __future__ import annotations

import asyncio
import logging
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from tidegate.core._bounds import SECOND
from tidegate.egress import _messages as messages
from tidegate.egress._access_log import AccessLog
from tidegate.egress._addresses import AddressCheck
from tidegate.egress._bodies import HeldBodies, RequestBody
from tidegate.egress._caller_limits import CallerLimits, settle_quietly
from tidegate.egress._callers import Callers, without_parameters
from tidegate.egress._calls import ProviderCall, UpstreamResponse
from tidegate.egress._deadlines import CallDeadline, CallDeadlines
from tidegate.egress._endpoints import Endpoints
from tidegate.egress._exchange import EgressExchange
from tidegate.egress._messages import EgressError, denial
from tidegate.egress._options import CallOptions, read_options
from tidegate.egress._relay import Meter, relay
from tidegate.egress._reload import EgressRules
from tidegate.egress._routes import Routes, Target
from tidegate.egress._run_tokens import EgressRuns
from tidegate.egress._stats import EgressStats
from tidegate.egress._tunnel_handler import TunnelHandler
from tidegate.egress._upstream import UpstreamClient
from tidegate.errors import Closed, Denied, RateLimitError
from tidegate.headers._cross_site import is_cross_site, is_local_host
from tidegate.observe._text_format import MetricFamily
from tidegate.outbound._quota.exchange import CURRENT_OPTIONS
from tidegate.outbound._quota.request_tokens import path_of
from tidegate.outbound._quota.unbounded import UnboundedCost
from tidegate.stores._cancellation import BackgroundTasks

if TYPE_CHECKING:
    from aiohttp import web
    from multidict import CIMultiDict, CIMultiDictProxy

    from tidegate._limiter.reservation import AsyncReservation
    from tidegate.agents import AsyncRun
    from tidegate.egress._callers import EgressCaller, Identity
    from tidegate.egress._settings import EgressSettings
    from tidegate.egress._stats import TrafficCounts
    from tidegate.egress._tracing import Tracing
    from tidegate.observe._text_format import Sample
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._quota.exchange import SenderLimits, SendResult
    from tidegate.outbound._quota.gate import AsyncGate
    from tidegate.stores import Store

log: logging.Logger = logging.getLogger("tidegate.egress")

REFUSALS: Final = (429, 503)
SWITCHING_PROTOCOLS: Final = 101
WEBSOCKET: Final = "websocket"
UPSTREAM_PROBLEMS: Final = ("upstream-failed", "upstream-timeout")
RELOADS: Final = "tidegate_egress_reloads_total"
JSON_TYPES: Final = ("application/json", "text/json")


class EgressGateway:
    """Handles the requests of one process. An async context manager."""

    def __init__(
        self,
        gate: AsyncGate,
        settings: EgressSettings,
        *,
        addresses: AddressCheck | None = None,
        stats: EgressStats | None = None,
        run_store: Store | None = None,
    ) -> None:
        """Send calls through a gate, which its owner closes. Runs are in `run_store`, by default that of the gate."""
        self.gate = gate
        gate.planner.shares_unnamed_models = True  # callers name the models
        self.rules: EgressRules = EgressRules(settings)
        self.settings = settings
        self.callers: Callers = Callers(settings.callers)
        self.limits: CallerLimits = CallerLimits(settings.callers, gate.store)
        self.routes: Routes = Routes(gate.providers, settings.upstreams)
        self.runs: EgressRuns = EgressRuns(run_store or gate.store, settings.run_secrets)
        self.stats: EgressStats = stats or EgressStats()
        self.addresses: AddressCheck = addresses or AddressCheck(settings.allow_private)
        self.endpoints: Endpoints = Endpoints(self)
        self._tunnels = TunnelHandler(self)
        self.background: BackgroundTasks = BackgroundTasks()
        self._connections: dict[str, int] = {}
        self.held: HeldBodies = HeldBodies()
        self._loopback = settings.listen.loopback
        self._last_host: str | None = None  # the Host that was accepted last: usually the next one, too
        self._log = None if settings.access_log is None else AccessLog(settings.access_log, gate.clock)
        self._tracing: Tracing | None = None
        self._client: UpstreamClient | None = None
        self._deadlines = CallDeadlines(settings.whole_timeout)

    async def __aenter__(self) -> Self:
        """Open the connections to providers."""
        settings = self.settings
        if settings.telemetry:
            from tidegate.egress._tracing import Tracing  # noqa: PLC0415 - needs opentelemetry

            self._tracing = Tracing()
        self._client = UpstreamClient(settings, self.addresses)
        return self

    def use(self, rules: EgressRules) -> None:
        """Use the settings of a file that was read again, for the next requests."""
        changed = rules.settings != self.settings
        self.rules, self.settings = rules, rules.settings
        if changed:
            settings = rules.settings
            self.callers = Callers(settings.callers)
            self.limits.update(settings.callers)
            self.routes.use(settings.upstreams)
            self._deadlines = CallDeadlines(settings.whole_timeout)
            if self._client is not None:
                self._client.use(settings)

    def use_tracing(self, tracing: Tracing | None) -> None:
        """Record spans with this object from now on; None: record none."""
        self._tracing = tracing

    async def __aexit__(self, *_: object) -> None:
        """Settle what is left, and close the connections to providers."""
        await self.background.finish()
        await self.limits.close()
        if self._client is not None:
            await self._client.close()
        if self._log is not None:
            self._log.close()

    # ---- one request -------------------------------------------------------------------------------------------------

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        exchange = EgressExchange(self.gate.clock.steady(), request.method)
        try:
            response = await self._respond(request, exchange)
            exchange.status = response.status
        except EgressError as error:
            exchange.status, exchange.problem = error.status, error.kind
            response = error.response()
        except asyncio.CancelledError:
            exchange.problem = "" if exchange.complete else "client-gone"
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, its text may contain a key, so it is not logged
            exchange.status, exchange.problem = 500, "internal"
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("the gateway failed with %s\n%s", type(error).__name__, where)  # noqa: TRY400 - as above
            response = EgressError(500, "internal", "the gateway failed: see its log").response()
        finally:
            self._end(exchange)
        return response

    async def _respond(self, request: web.BaseRequest, exchange: EgressExchange) -> web.StreamResponse:
        raw = request.raw_path
        forward = not raw.startswith("/")
        if not forward:
            self._check_site(request)
            endpoint = self.endpoints.find(request.method, raw.partition("?")[0])
            if endpoint is not None:
                return await endpoint(request)
        if request.method == "TRACE":  # its response would repeat the key of the provider
            raise EgressError(405, "method-not-allowed", "the method TRACE is not forwarded")
        identity = self.identify(request, forward=forward)
        exchange.caller = identity.caller.name
        run = await self.runs.enter(identity.run) if identity.run else None
        if run is not None and (request.method == "CONNECT" or asks_for_websocket(request.headers)):
            raise EgressError(
                403, "tunnel-not-counted", "what a tunnel or a WebSocket sends cannot be charged to a run"
            )
        if request.method == "CONNECT":
            self._connections[exchange.caller] = self._count_request(identity.caller)
            try:
                return await self._tunnels.open(request, exchange, identity.caller, raw)
            finally:
                self._connections[exchange.caller] -= 1
        target = self.routes.find_forward(raw) if forward else self.routes.find_reverse(raw)
        target = without_credentials(target, identity.tokens_in.parameters)
        self.note_target(exchange, identity.caller, target.provider, target)
        connections, name = self._connections, identity.caller.name
        connections[name] = self._count_request(identity.caller)
        try:
            with CallDeadline(self._deadlines):
                return await self._call(request, exchange, identity, target, run)
        except TimeoutError:
            raise self._end_late(request, exchange) from None
        finally:
            connections[name] -= 1

    def _end_late(self, request: web.BaseRequest, exchange: EgressExchange) -> EgressError:
        """End a call that takes too long; if its response has begun, its connection is closed."""
        if exchange.first_byte is not None and request.transport is not None:
            request.transport.abort()
        message = f"the call took longer than whole_timeout ({self.settings.whole_timeout:g} s)"
        return EgressError(504, "call-timeout", message)

    def _check_site(self, request: web.BaseRequest) -> None:
        """Refuse what a page in a browser of this machine could send, if no token is needed."""
        if self.callers.all:
            return
        headers = request.headers
        if self._loopback and (host := headers.get("Host", "")) != self._last_host:
            if not is_local_host(host):
                message = "the Host must be localhost or a loopback address, because no callers are configured"
                raise EgressError(403, "host-not-allowed", message)
            self._last_host = host
        if is_cross_site(headers.get("Sec-Fetch-Site"), headers.get("Origin"), headers.get("Host")):
            message = "requests from pages of other sites are refused, because no callers are configured"
            raise EgressError(403, "origin-not-allowed", message)

    def identify(self, request: web.BaseRequest, *, forward: bool = False) -> Identity:
        """Return who sends a request; raises EgressError if it has no valid token."""
        identity = self.callers.identify(request.headers, request.raw_path, self.routes.key_places)
        if identity is not None:
            return identity
        message = "send the token of a caller where the key of the provider would be, or as X-Tidegate-Token"
        if forward:
            raise EgressError(407, "unauthorized", message, {"Proxy-Authenticate": 'Basic realm="tidegate"'})
        raise EgressError(401, "unauthorized", message, {"WWW-Authenticate": 'Bearer realm="tidegate"'})

    def _count_request(self, caller: EgressCaller) -> int:
        """Return how many requests a caller has, including this one; refuse it if there are too many."""
        found = self._connections.get(caller.name, 0)
        if found >= caller.connections:
            message = f"caller {caller.name} has {caller.connections} concurrent requests, its maximum"
            raise EgressError(429, "too-many-connections", message, {"Retry-After": "1"})
        return found + 1

    def note_target(
        self, exchange: EgressExchange, caller: EgressCaller, provider: Provider, target: Target | None = None
    ) -> None:
        """Record the provider of a request; raises EgressError if the caller may not use it."""
        exchange.provider = provider.name
        if target is not None:
            exchange.host, exchange.path = target.url.raw_host or "", target.url.raw_path
        if not caller.may_use(provider.name):
            raise EgressError(403, "provider-not-allowed", f"caller {caller.name} may not use provider {provider.name}")
        exchange.counts = self.stats.counts(caller.name, provider.name)
        exchange.counts.active += 1

    # ---- calls -------------------------------------------------------------------------------------------------------

    async def _call(
        self,
        request: web.BaseRequest,
        exchange: EgressExchange,
        identity: Identity,
        target: Target,
        run: AsyncRun | None,
    ) -> web.StreamResponse:
        if self._client is None:
            raise Closed("the gateway has not been started")
        provider, caller = target.provider, identity.caller
        options = read_options(request.headers, self.settings, caller)
        counts_tokens = provider.profile is not None or self.limits.counts_tokens(caller)
        metered = counts_tokens or provider.reads_requests
        body = await self._receive(request, exchange, caller, target, metered=metered)
        headers = messages.request_headers(request.headers, provider, identity.tokens_in.headers, metered=metered)
        if not body.encoded:
            messages.drop(headers, ("Content-Encoding",))
        upgrade = asks_for_websocket(request.headers)
        if upgrade:
            headers["Connection"], headers["Upgrade"] = "Upgrade", WEBSOCKET
        if self._tracing is not None:
            self._tracing.start(exchange, request.headers, headers)
        call = ProviderCall(self.gate, self._client, target, request.method, headers, body, exchange.end_wait)
        own, result = await self._send(exchange, caller, call, options)
        if result.response.native.status == SWITCHING_PROTOCOLS:
            headers = self._answer_headers(exchange, result)
            return await self._tunnels.upgrade(request, exchange, headers, result, own, expected=upgrade)
        meter = None
        if counts_tokens or own is not None or result.settlement is not None:
            settled = partial(self._note_usage, exchange.counts)
            # The response to a batch, or a stored output, may report usage that is not its own.
            reads_usage = counts_tokens and (call.request is None or call.request.endpoint.counted)
            meter = Meter(
                self.gate,
                provider,
                result,
                own,
                self.background,
                settled,
                counts_tokens=reads_usage,
                expects_output=call.request is not None and call.request.endpoint.has_output,
            )
        try:
            answer = self._answer_headers(exchange, result)
            return await relay(request, result.response, answer, meter, self.settings, run)
        finally:
            if meter is not None:
                exchange.complete, exchange.parts = meter.complete, meter.parts
            exchange.problem = result.response.problem
            if exchange.problem in UPSTREAM_PROBLEMS:
                exchange.count("failed")

    async def _receive(
        self, request: web.BaseRequest, exchange: EgressExchange, caller: EgressCaller, target: Target, *, metered: bool
    ) -> RequestBody:
        """Begin to receive the body of a request; read all of it if it decides what the request costs."""
        body = exchange.body = RequestBody(request, self.settings, self.held, caller.name)
        if body.expected:
            await body.accept()
        if (target.provider.reads_requests or self.limits.counts_tokens(caller)) and is_counted(target):
            await body.read_whole()
            body.decode()
            body.check_complexity()
        elif metered and is_json(request):
            await body.read_whole()
            body.check_complexity()
        return body

    async def _send(
        self,
        exchange: EgressExchange,
        caller: EgressCaller,
        call: ProviderCall,
        options: CallOptions,
    ) -> tuple[AsyncReservation | None, SendResult[UpstreamResponse]]:
        """Wait for the permits of the caller and of the provider, and send.

        Returns the reservation of the caller's own limits, and the response.
        """
        provider = call.target.provider
        sender: SenderLimits | None = None
        exchange.begin_wait()
        try:
            call.request = self.limits.read(caller, provider, call.outbound)
            plan = self.limits.plan(caller, provider, call.outbound, call.request)
            if plan.body is not None:
                call.bound_output(plan.body)
                exchange.truncates_at = plan.output_tokens
            elif call.request is not None:  # the gate need not read it again
                call.outbound = call.outbound._replace(parsed=(provider, call.request))
            sender = self.limits.charge(caller, plan.cost)
            self.use_options(caller, options, sender)
            result = await call.run()
        except BaseException as error:  # noqa: BLE001 - also a cancellation: raised again below
            await self.settle_own(self.limits.reservation(sender), error, arrived=call.arrived)
            raise self.describe_error(error, exchange, caller, provider, sender) from None
        finally:
            exchange.end_wait()
            exchange.attempts = call.attempts
        self._note_response(exchange, result)
        return self.limits.reservation(sender), result

    @staticmethod
    def use_options(caller: EgressCaller, options: CallOptions, sender: SenderLimits | None) -> None:
        """Use the options of a call. Each request has a task, and so a context, of its own: they need not be reset."""
        timeout, priority, tag = options
        CURRENT_OPTIONS.set(
            {"timeout": timeout, "priority": priority, "tag": tag, "team": caller.name, "sender": sender}
        )

    async def settle_own(self, own: AsyncReservation | None, error: BaseException, *, arrived: bool) -> None:
        """Settle the limits of a caller after an error: what may have arrived stays charged."""
        if own is None:
            return
        settling = self.background.start(settle_quietly(own, arrived=arrived))
        if not isinstance(error, asyncio.CancelledError):
            await asyncio.shield(settling)

    def describe_error(
        self,
        error: BaseException,
        exchange: EgressExchange,
        caller: EgressCaller,
        provider: Provider,
        sender: SenderLimits | None,
    ) -> BaseException:
        """Count a call that failed, and return the answer to it."""
        if isinstance(error, Denied) and not isinstance(error, UnboundedCost):
            exchange.count("denied")
            return denial(error, provider, f"caller {caller.name}: " if sender is not None and sender.denied else "")
        if isinstance(error, EgressError):
            exchange.count("failed")
        return messages.refusal(error, provider) if isinstance(error, RateLimitError) else error

    def _note_response(self, exchange: EgressExchange, result: SendResult[UpstreamResponse]) -> None:
        exchange.first_byte = self.gate.clock.steady()
        exchange.status = result.response.native.status
        exchange.waited = result.outcome.waited
        exchange.cost = result.outcome.cost
        exchange.member = result.outcome.member or None
        counts = exchange.counts
        if counts is not None:
            counts.requests += 1
            counts.refused += exchange.status in REFUSALS
            counts.waited += round(exchange.waited * SECOND)
            counts.first_byte.add(exchange.first_byte - exchange.started)

    @staticmethod
    def _note_usage(counts: TrafficCounts | None, meter: Meter) -> None:
        if counts is not None:
            counts.input_tokens += meter.parts.get("input", 0)
            counts.output_tokens += meter.parts.get("output", 0)
            counts.cost_micros += meter.money

    def _answer_headers(self, exchange: EgressExchange, result: SendResult[UpstreamResponse]) -> CIMultiDict[str]:
        upstream, outcome = result.response, result.outcome
        headers = messages.response_headers(upstream.native.headers)
        key = upstream.key
        if key is not None and messages.contains_key("\n".join(headers.values()), key):
            # a redirect, or a link to the next page
            messages.drop(headers, [name for name, value in headers.items() if messages.contains_key(value, key)])
        headers[messages.PROVIDER] = exchange.provider
        if outcome.member:
            headers[messages.MEMBER] = outcome.member
        headers[messages.WAITED] = f"{outcome.waited:.3f}"
        headers[messages.COST] = messages.describe_cost(outcome.cost)
        bounds = [bound for bound in (outcome.truncates_at, exchange.truncates_at) if bound is not None]
        if bounds:
            headers[messages.TRUNCATES_AT] = str(min(bounds))
        if outcome.decision is not None:
            headers[messages.REMAINING] = messages.describe_remaining(outcome.decision)
        return headers

    def describe(self) -> dict[str, Any]:
        """Return the counts by caller and provider, and the outcome of reloads, for the dashboard."""
        return {"listen": str(self.settings.listen), "rows": self.stats.rows(), "rules": self.rules.describe()}

    def families(self) -> list[MetricFamily]:
        """Return the metrics of the gateway."""
        samples: list[Sample] = [(RELOADS, {"outcome": name}, n) for name, n in self.rules.reloads.items()]
        reloads = MetricFamily(RELOADS, "counter", "Reloads of the egress file, by outcome.", samples)
        return [*self.stats.families(), reloads]

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _end(self, exchange: EgressExchange) -> None:
        exchange.end_wait()
        if exchange.body is not None:
            exchange.body.release()
        if exchange.counts is not None:
            exchange.counts.active -= 1
            exchange.counts.gone += exchange.problem == "client-gone"
        if self._tracing is not None:
            self._tracing.end(exchange)
        if self._log is not None and exchange.caller:
            self._log.write(exchange)


def is_json(request: web.BaseRequest) -> bool:
    """Return whether the body of a request is JSON, which the meter reads."""
    kind = request.content_type
    return request.can_read_body and (kind in JSON_TYPES or kind.endswith("+json"))


def is_counted(target: Target) -> bool:
    """Return whether requests of a path use tokens, so that their bodies must be read; others are uploads of files."""
    reading = target.provider.counting.read_path(path_of(target.quota_url))
    return reading.endpoint.counted or bool(reading.unbounded)


def asks_for_websocket(headers: CIMultiDictProxy[str]) -> bool:
    """Return whether a request asks for a WebSocket; the gateway does not switch to other protocols, such as h2c."""
    if "Upgrade" not in headers or "upgrade" not in headers.get("Connection", "").lower():
        return False
    return headers["Upgrade"].strip().lower() == WEBSOCKET


def without_credentials(target: Target, tokens_in: tuple[str, ...]) -> Target:
    """Remove tokens of callers, what would replace the provider's key, and what hides usage from the query string."""
    query = target.url.raw_query_string
    if not query:
        return target
    location = target.provider.key_location
    dropped = [*tokens_in, *messages.hiding(target.provider)]
    if location is not None and location.kind == "query" and messages.adds_key(target.provider):
        dropped.append(location.name)
    if not dropped:
        return target
    left = without_parameters(query, dropped)
    url = target.url.with_query(None)
    quota_url = target.quota_url.partition("?")[0]
    if not left:
        return target._replace(url=url, quota_url=quota_url)
    return target._replace(url=type(url)(f"{url}?{left}", encoded=True), quota_url=f"{quota_url}?{left}")
