"""Calls a limited function: decides its limits, then calls it or returns the denial; the same for all frameworks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar, Unpack

from tidegate._limiter.waiting import ApplyStep
from tidegate._runtime.entered import EnteredBlocks
from tidegate._runtime.flow import run, run_async
from tidegate.errors import ConfigError, RateLimitError
from tidegate.inbound._client.identify import RESULTS_KEY
from tidegate.inbound._client.request import is_async_callable
from tidegate.inbound._limiting.charges import ALLOWED, ChargeResult, RequestCharge, perform, perform_async
from tidegate.inbound._limiting.limited_functions import EndpointLimits, F, attach, stack_on
from tidegate.inbound._limiting.matched_route import RouteUse
from tidegate.inbound._limiting.native_requests import NativeRequests
from tidegate.inbound._limiting.request_state import STATE_KEY, RequestState
from tidegate.inbound._limiting.route_limit import RouteLimit
from tidegate.inbound._limiting.standalone import SHARED_LIMITS, BaseLimits
from tidegate.inbound._responses.response import BlockedDecision, fit_to_status

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from tidegate._policy import Cost
    from tidegate._runtime.flow import Flow
    from tidegate.core._decision import Decision
    from tidegate.inbound._client.identify import RequestClient
    from tidegate.inbound._client.request import FrameworkRequest, Request
    from tidegate.inbound._limiting.charges import Reporter
    from tidegate.inbound._limiting.limited_functions import LimitStack
    from tidegate.inbound._limiting.request_limiter import RequestLimiter
    from tidegate.inbound._limiting.route_limit import LimitsOf, OneOrMoreLimits, RouteOptions
    from tidegate.inbound._responses.response import Response


BLOCK_ATTRIBUTE: Final = "_block_limits"  # of a limit: what its blocks decide


class Framework(NativeRequests, Protocol):
    """What differs between frameworks; a module for a new framework has one of these, and `limit` and `Limits`."""

    @property
    def request_type(self) -> type[Any] | tuple[()]:
        """The type of the first argument of a function, if this is usually the request."""

    def find_request(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - a framework's
        """Return the framework's request, from the arguments of a call."""

    def make_response(self, response: Response) -> Any:  # noqa: ANN401 - as above
        """Return the framework's response."""

    def add_fields(self, response: Any, fields: list[tuple[str, str]]) -> Any:  # noqa: ANN401 - as above
        """Return the response of the function with header fields."""

    def make_error(self, response: Response, decision: Decision, native: Any) -> Exception:  # noqa: ANN401 - as above
        """Return the framework's exception for a denied request."""

    def deny_call(self, response: Response, decision: Decision, native: Any) -> Any:  # noqa: ANN401 - as above
        """Return the response to a call that its own limits deny, or raise an exception that handlers can see."""

    def error_response(self, error: Exception) -> Any:  # noqa: ANN401 - as above
        """Return the response that an exception of the function becomes; None if the application has failed."""

    def status(self, response: Any) -> int:  # noqa: ANN401 - as above
        """Return the status of the response of the function."""


class FrameworkLimit(RouteLimit):
    """A limit on the routes of one framework."""

    _framework: ClassVar[Framework]

    def own_request_limiter(self) -> Reporter:
        """Return what is used without a middleware in front: that of its `Limits`, or what all bare limits share."""
        return (self._made_by or SHARED_LIMITS.get()).request_limiter

    def __call__(self, function: F) -> F:
        """Decorate a function that handles requests: sync or async, or a method."""
        return decorate(self, function, self._framework)  # type: ignore[no-any-return]  # the same type of function

    def check(self, request: FrameworkRequest) -> LimitedBlock:
        """Limit a block: `with limit.check(request):`, or `async with`; a denial raises RateLimitExceeded."""
        return LimitedBlock(self, request, self._framework)

    def peek(self, request: FrameworkRequest, cost: Cost | None = None) -> Decision | None:
        """Return the decision that `check(request)` would make, and charge nothing; None: the limit does not apply.

        `cost` replaces the cost of the limit: with 0, `remaining` is what is left now.
        """
        self.require_plain_functions("in peek(request): use peek_async(request)")
        return run(peek_flow(self, request, self._framework, cost), perform)

    async def peek_async(self, request: FrameworkRequest, cost: Cost | None = None) -> Decision | None:
        """Return the same as `peek`, from a coroutine."""
        return await run_async(peek_flow(self, request, self._framework, cost), perform_async)


L = TypeVar("L", bound=FrameworkLimit)


class FrameworkLimits(BaseLimits, Generic[L]):
    """One limiter for an application without a middleware; `limits.limit(…)` is `limit(…)` with its store."""

    _limit: ClassVar[type[Any]]

    def limit(self, limits: OneOrMoreLimits | LimitsOf, **options: Unpack[RouteOptions]) -> L:
        """Return a limit of the framework that counts here; the options are those of `limit(…)`."""
        return self._limit(limits, **options).use(self)  # type: ignore[no-any-return]  # of this type


def use_of_scope(limit: RouteLimit, place: str) -> RouteUse:
    """Return the use of a limit that belongs to no route; raises ConfigError if it has no scope."""
    if limit.scope is None:
        raise ConfigError(f"a limit {place} needs a scope, as in limit('5/1m', scope='export')", field="scope")
    return RouteUse(limit, limit.scope)


def limits_of_block(limit: RouteLimit) -> EndpointLimits:
    """Return what a block decides, prepared once for each limit."""
    found: EndpointLimits | None = vars(limit).get(BLOCK_ATTRIBUTE)
    if found is None:
        found = vars(limit)[BLOCK_ATTRIBUTE] = EndpointLimits((use_of_scope(limit, "on a block"),))
    return found


def peek_flow(limit: RouteLimit, native: Any, framework: Framework, cost: Cost | None) -> Flow[Any, Decision | None]:  # noqa: ANN401 - any request
    """Return the decision about a request that is not charged; None if the limit does not apply to it.

    If the store fails, the result is None or, with `on_store_error="deny"`, a denial.
    """
    use = use_of_scope(limit, "that is read")
    mapping = framework.mapping(native)
    request_state: RequestState | None = mapping.get(STATE_KEY)
    request_limiter = middleware_of(request_state) or own_request_limiter(limit)
    client = find_client(request_state, request_limiter, *framework.sender(native, mapping))
    request = framework.common(native, mapping, client.address)
    if not limit.by_address:
        chosen = request_limiter.client_identifier.choose_client(request, client)
    if chosen.key is None:
        return None
    limiter = limit.request_limiter_for(middleware_of(request_state))
    charge: RequestCharge | None = yield from limit.make_charge_flow(
        request, native, limiter, client, chosen.key, use.policy_name
    )
    if charge is None:
        return None
    if charge.blocks is not None and charge.blocks.until:
        return BlockedDecision.until(charge.reporter.now(), charge.policy.limits, charge.blocks.until)
    ask = charge.policy, charge.key, charge.policy.costs(charge.cost if cost is None else cost)
    try:
        decisions = yield ApplyStep(charge.limiter.store, "peek", (ask,), charge.limiter.current_time())
    except RateLimitError as error:
        return charge.reporter.deny_without_store(charge.policy, error)
    return charge.limiter.observe("peek", ask, decisions[0])


class LimitedBlock:
    """A block inside an endpoint that is limited: `with limit.check(request):`, or `async with`.

    Entering it charges the limit, in one more step of the store. If the limit denies, everything that the request was
    charged before is refunded, and the framework's exception for a denied request is raised. Leaving it releases its
    slots of a concurrency limit. With `count=`, the response decides whether the charge remains, as on routes.
    """

    def __init__(self, limit: RouteLimit, native: FrameworkRequest, framework: Framework) -> None:
        """Limit by the scope of the limit: a block has no route."""
        self._limit = limit
        self._limits = limits_of_block(limit)
        self._native = native
        self._framework = framework
        self._checks: EnteredBlocks[RequestCheck] = EnteredBlocks()

    def __enter__(self) -> Decision | None:
        """Charge the limit, from a function; returns the decision, None if the limit does not apply."""
        self._limit.require_plain_functions("in a 'with' block: use 'async with'")
        return self._finish(run(self._check_flow(), perform))

    def __exit__(self, *_: object) -> None:
        """Leave the block."""
        run(self._leave_flow(), perform)

    async def __aenter__(self) -> Decision | None:
        """Charge the limit, from a coroutine; returns the decision, None if the limit does not apply."""
        return self._finish(await run_async(self._check_flow(), perform_async))

    async def __aexit__(self, *_: object) -> None:
        """Leave the block."""
        await run_async(self._leave_flow(), perform_async)

    def _check_flow(self) -> Flow[Any, RequestCheck]:
        framework, native = self._framework, self._native
        mapping = framework.mapping(native)
        if self._limit.counts_by_response:
            require_response(mapping.get(STATE_KEY), "count= of a limit on a block")
        if framework.is_websocket(native):
            mapping = separate_state(mapping)
        return check_flow(self._limits, native, mapping, framework)

    def _leave_flow(self) -> Flow[Any, None]:
        """Release the slots that the block holds, unless the response may change the charge."""
        check = self._checks.remove()
        if check is not None and not self._limit.counts_by_response:
            yield from check.request_state.settle_block_flow([each.charge for each in check.result.decided])

    def _finish(self, check: RequestCheck) -> Decision | None:
        if not check.result.allowed:
            raise make_error(check, self._native, self._framework)
        self._checks.add(check)
        own = [each.decision for each in check.result.decided if each.charge.owner is self._limit]
        return own[0] if own else None


def separate_state(mapping: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the mapping of a WebSocket with a new state for one block, which usually handles one message.

    A denied message refunds neither earlier messages nor the request that opened the WebSocket.
    """
    separate = dict(mapping)
    separate.pop(RESULTS_KEY, None)  # a key may depend on the message
    request_state: RequestState | None = separate.pop(STATE_KEY, None)
    if request_state is not None and not request_state.standalone:
        separate[STATE_KEY] = RequestState.of(request_state.request_limiter, request_state.client, None)
    return separate


def forget_request(mapping: MutableMapping[str, Any]) -> None:
    """Remove what was stored in a request: its object may be used again."""
    mapping.pop(STATE_KEY, None)
    mapping.pop(RESULTS_KEY, None)


class RequestCheck(NamedTuple):
    """The result of the limits of a request."""

    request_state: RequestState
    result: ChargeResult
    request: Request


def decorate(limit: RouteLimit, function: Any, framework: Framework) -> Any:  # noqa: ANN401 - the same type of function
    """Return a function that is called within its limits; sync or async, as the function is."""
    stack = stack_on(limit, function)
    wrap = _wrap_coroutine
    if not is_async_callable(stack.function):  # it may run in a thread, which cannot await
        limit.require_plain_functions("of an endpoint that is not a coroutine function (`async def`)")
        wrap = _wrap_function
    limited = wrap(stack, stack.function, framework)
    attach(stack, limited)
    return limited


def _wrap_coroutine(stack: LimitStack, inner: Any, framework: Framework) -> Any:  # noqa: ANN401 - any function
    request_type, find_request, find_mapping = framework.request_type, framework.find_request, framework.mapping
    late = bool(stack.late.uses)

    @functools.wraps(inner)
    async def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
        native = args[0] if args and isinstance(args[0], request_type) else find_request(inner, args, kwargs)
        request_state: Any = find_mapping(native).get(STATE_KEY)
        taken = request_state is not None and request_state.take(stack)
        if taken and not late and request_state.denied is None:
            return await inner(*args, **kwargs)
        step = functools.partial(inner, *args, **kwargs)
        return await run_async(limited_flow(stack, native, framework, step, taken=taken), perform_async)

    return limited


def _wrap_function(stack: LimitStack, inner: Any, framework: Framework) -> Any:  # noqa: ANN401 - any function
    request_type, find_request, find_mapping = framework.request_type, framework.find_request, framework.mapping
    late = bool(stack.late.uses)

    @functools.wraps(inner)
    def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
        native = args[0] if args and isinstance(args[0], request_type) else find_request(inner, args, kwargs)
        request_state: Any = find_mapping(native).get(STATE_KEY)
        taken = request_state is not None and request_state.take(stack)
        if taken and not late and request_state.denied is None:
            return inner(*args, **kwargs)
        step = functools.partial(inner, *args, **kwargs)
        return run(limited_flow(stack, native, framework, step, taken=taken), perform)

    return limited


def limited_flow(
    stack: LimitStack,
    native: Any,  # noqa: ANN401 - any request
    framework: Framework,
    step: Callable[[], Any],
    *,
    taken: bool,
) -> Flow[Any, Any]:
    """Decide the limits of a function, then call it (`step`) or return the denial.

    `taken`: the limits without functions were decided before.
    """
    mapping = framework.mapping(native)
    request_state: RequestState | None = mapping.get(STATE_KEY)
    try:
        check = (yield from denied_before_flow(request_state, native, framework)) if taken else None
        if check is None:
            if taken and request_state is not None and (not stack.late.uses or request_state.take(stack.marks[1])):
                return (yield step)
            limits = stack.late if taken else stack.all
            check = yield from check_flow(limits, native, mapping, framework)
        state = check.request_state
        if not check.result.allowed:
            return answer_denied(check, native, framework)
        for inner in stack.covers:
            state.cover(inner.marks)
        state.sees_response = True
        if not state.standalone or request_state is not None:
            return (yield step)
        return (yield from _call_standalone_flow(state, framework, step))
    finally:
        if request_state is None:
            forget_request(mapping)


def denied_before_flow(
    request_state: RequestState | None,
    native: Any,  # noqa: ANN401 - any request
    framework: Framework,
) -> Flow[Any, RequestCheck | None]:
    """Return the denial by the limits of the route that the middleware has decided; None if there is none."""
    denied = None if request_state is None else (yield from request_state.take_denial_flow())
    if request_state is None or denied is None:
        return None
    common = framework.common(native, framework.mapping(native), request_state.address)
    return RequestCheck(request_state, denied, common)


def _call_standalone_flow(request_state: RequestState, framework: Framework, step: Callable[[], Any]) -> Flow[Any, Any]:
    """Call the function without a middleware in front: settle what depends on the response, and add the headers."""
    try:
        response = yield step
    except Exception as error:
        failed = framework.error_response(error)
        if failed is not None:  # an HTTP error gets the headers
            yield from finish_standalone_flow(request_state, framework, failed)
        else:
            yield from request_state.settle_flow(None)
        raise
    return (yield from finish_standalone_flow(request_state, framework, response))


def finish_standalone_flow(request_state: RequestState, framework: Framework, response: Any) -> Flow[Any, Any]:  # noqa: ANN401 - any response
    """Settle what depends on the response, and add the headers."""
    yield from settle_standalone_flow(request_state, framework.status(response))
    return framework.add_fields(response, standalone_fields(request_state))


def settle_standalone_flow(request_state: RequestState, status: int) -> Flow[Any, None]:
    """Settle what depends on the response to a request that no middleware has seen."""
    if request_state.is_open:
        request_state.status = status
        yield from request_state.settle_flow(None)


def standalone_fields(request_state: RequestState, status: int = 200) -> list[tuple[str, str]]:
    """Return the header fields of a request that no middleware has seen; a middleware adds them itself."""
    return request_state.fields(status) if request_state.standalone else []


def deny(check: RequestCheck, native: Any) -> Response:  # noqa: ANN401 - any request
    """Build the response to a denied request; without a middleware in front, with the header fields."""
    state, result, request = check
    result.call_on_denied(native)
    response = result.write_denial(request, native)
    fields = fit_to_status(standalone_fields(state, response.status), response.status)
    body = b"" if request.method == "HEAD" else response.body
    return response._replace(body=body, headers=(*response.headers, *fields))


def make_error(check: RequestCheck, native: Any, framework: Framework) -> Exception:  # noqa: ANN401 - any request
    """Return the framework's exception for a denied request."""
    decision = check.result.decision
    assert decision is not None  # noqa: S101 - a denial has a decision
    return framework.make_error(deny(check, native), decision, native)


def answer_denied(check: RequestCheck, native: Any, framework: Framework) -> Any:  # noqa: ANN401 - any request
    """Return the response to a denied request; if limits of the route denied it, the framework may raise instead."""
    decision = check.result.decision
    by_route = any(each.charge.owner.limits_routes for each in check.result.denials)
    if decision is None or not (by_route or framework.is_websocket(native)):
        return framework.make_response(deny(check, native))
    return framework.deny_call(deny(check, native), decision, native)


def require_response(request_state: RequestState | None, option: str) -> None:
    """Raise a ConfigError if nothing sees the response of the request, on which a charge depends."""
    if request_state is None or not request_state.sees_response:
        message = (
            f"{option} needs a RateLimitMiddleware around the application, which sees the response: for example "
            'RateLimitMiddleware(app, {"defaults": False, "unmatched": None})'
        )
        raise ConfigError(message)


def middleware_of(request_state: RequestState | None) -> RequestLimiter | None:
    """Return the request limiter of the middleware in front; None if there is none."""
    return None if request_state is None or request_state.standalone else request_state.request_limiter


def own_request_limiter(limit: RouteLimit) -> RequestLimiter:
    """Return the request limiter that a limit of a framework uses without a middleware."""
    found: Any = limit.own_request_limiter()
    return found  # type: ignore[no-any-return]  # see FrameworkLimit


def find_client(
    request_state: RequestState | None,
    request_limiter: RequestLimiter,
    peer: str | None,
    headers: Any,  # noqa: ANN401 - of any framework
) -> RequestClient:
    """Return the client as identified by the middleware in front, or identify it."""
    known = None if request_state is None else request_state.client
    return request_limiter.client_identifier.find(peer, headers) if known is None else known


def check_flow(
    limits: EndpointLimits,
    native: Any,  # noqa: ANN401 - any request
    mapping: MutableMapping[str, Any],
    framework: Framework,
    *,
    more: bool = False,
) -> Flow[Any, RequestCheck]:
    """Decide limits of a request, together with what is pending. `more`: other limits may be decided later."""
    request_state: RequestState | None = mapping.get(STATE_KEY)
    middleware = middleware_of(request_state)
    request_limiter = middleware or own_request_limiter(limits.uses[0].limit)
    client = None if request_state is None else request_state.client
    if client is None:
        client = request_limiter.client_identifier.find(*framework.sender(native, mapping))
    request = framework.common(native, mapping, client.address)
    if request_state is None:  # no middleware has seen the request; nothing handles its response yet
        client = request_limiter.exempt_client(request, client)
        request_state = mapping[STATE_KEY] = RequestState()
        request_state.request_limiter, request_state.client = request_limiter, client
        request_state.standalone, request_state.sees_response = True, False
    chosen = request_state.chosen_client
    if chosen is None:
        identifier = request_state.request_limiter.client_identifier
        chosen = request_state.chosen_client = identifier.choose_client(request, client)
    key = chosen.key
    if key is None:  # the client is exempt
        return RequestCheck(request_state, ALLOWED, request)
    prepared = None
    if not (client.special or request_limiter.special or request_state.pending or request_state.unreached):
        prepared = limits.prepare(request_limiter, middleware, request.method, more=more)
    if prepared is not None:
        keys = prepared.keys_of(native, request.mapping, client, key)
        result = yield from prepared.decide_flow(keys, request.method, request.path)
        if result.allowed:
            request_state.add_result(result)
        else:
            yield from request_state.keep_flow(result)
        return RequestCheck(request_state, result, request)
    charges = []
    for use in limits.uses:
        limiter = use.limit.request_limiter_for(middleware)
        charge = yield from use.limit.make_charge_flow(request, native, limiter, client, key, use.policy_name)
        if charge is not None:
            charges.append(charge)
    result = yield from request_state.charge_flow(charges, request, more=more, client=client)
    return RequestCheck(request_state, result, request)
