"""Calls a limited function: decides its limits, then calls it or returns the denial; the same for all frameworks."""

from __future__ import annotations

import functools
from operator import call
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from tidegate.entered import EnteredBlocks
from tidegate.errors import ConfigError, RateLimitError
from tidegate.flow import run, run_async
from tidegate.inbound.client.identify import RESULTS_KEY
from tidegate.inbound.client.request import is_async_callable
from tidegate.inbound.limiting.fast_decision import decide_fast, decide_standalone
from tidegate.inbound.limiting.limited_functions import RouteUse, attach, stack_on
from tidegate.inbound.limiting.request_state import STATE_KEY, make_state
from tidegate.inbound.limiting.route_decisions import (
    decide_uses_flow,
    deny,
    find_client,
    standalone_fields,
    standalone_state,
)
from tidegate.inbound.limiting.route_limit import RouteLimit

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence

    from tidegate.core.decision import Decision
    from tidegate.flow import CallFlow
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.client.request import FrameworkRequest, Request
    from tidegate.inbound.limiting.charges import ChargeResult
    from tidegate.inbound.limiting.limited_functions import LimitStack
    from tidegate.inbound.limiting.request_state import RequestState
    from tidegate.inbound.responses.response import Response
    from tidegate.policy import Cost


class Framework(Protocol):
    """What differs between frameworks."""

    @property
    def request_type(self) -> type[Any] | tuple[()]:
        """The type of the first argument of a function, if this is usually the request."""

    def find_request(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - a framework's
        """Return the framework's request, from the arguments of a call."""

    def mapping(self, native: Any) -> MutableMapping[str, Any]:  # noqa: ANN401 - as above
        """Return the ASGI scope or WSGI environ of a request."""

    def sender(self, native: Any, mapping: Any) -> tuple[str | None, Any]:  # noqa: ANN401 - as above
        """Return the address of the peer, and the headers that name clients."""

    def common(self, native: Any, mapping: Any, client: RequestClient) -> Request:  # noqa: ANN401 - as above
        """Return the Request that is the same for all frameworks."""

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

    def report(self, native: Any, *, exceeded: bool) -> None:  # noqa: ANN401 - as above
        """Tell the function whether a limit with `block=False` is exceeded."""

    def is_websocket(self, native: Any) -> bool:  # noqa: ANN401 - as above
        """Return whether the request opens a WebSocket."""


class FrameworkLimit(RouteLimit):
    """A limit on the routes of one framework."""

    _framework: ClassVar[Framework]

    def peek(self, request: FrameworkRequest, cost: Cost | None = None) -> Decision | None:
        """Return the decision that `check(request)` would make, and charge nothing; None: the limit does not apply.

        `cost` replaces the cost of the limit: with 0, `remaining` is what is left now.
        """
        self.require_plain_functions("in peek(request): use peek_async(request)")
        return run(peek_flow(self, request, self._framework, cost, tasks=False), call)

    async def peek_async(self, request: FrameworkRequest, cost: Cost | None = None) -> Decision | None:
        """Return the same as `peek`, from a coroutine."""
        return await run_async(peek_flow(self, request, self._framework, cost, tasks=True), call)


def use_of_scope(limit: RouteLimit, place: str) -> RouteUse:
    """Return the use of a limit that belongs to no route; raises ConfigError if it has no scope."""
    if limit.scope is None:
        raise ConfigError(f"a limit {place} needs a scope, as in limit('5/1m', scope='export')", field="scope")
    return RouteUse(limit, limit.scope)


def peek_flow(
    limit: RouteLimit,
    native: Any,  # noqa: ANN401 - any request
    framework: Framework,
    cost: Cost | None,
    *,
    tasks: bool,
) -> CallFlow[Decision | None]:
    """Return the decision about a request that is not charged; None if the limit does not apply to it.

    If the store fails, the result is None or, with `on_store_error="deny"`, a denial.
    """
    use = use_of_scope(limit, "that is read")
    mapping = framework.mapping(native)
    request_state: RequestState | None = mapping.get(STATE_KEY)
    request_limiter = limit.request_limiter_for(request_state)
    client = request_state.client if request_state is not None else None
    if client is None:
        client = find_client(None, request_limiter, *framework.sender(native, mapping))
    request = framework.common(native, mapping, client)
    if not limit.by_address:
        identifier = (request_limiter if request_state is None else request_state.request_limiter).client_identifier
        client = identifier.choose_client(request, client)
    charge = yield from limit.make_charge_flow(request, native, request_limiter, client, use.policy_name, tasks=tasks)
    if charge is None:
        return None
    try:
        decision: Decision = yield functools.partial(
            charge.limiter.peek, charge.key, charge.cost if cost is None else cost
        )
    except RateLimitError as error:
        return request_limiter.handle_policy_store_error(charge.policy, error).decision
    return decision


class LimitedBlock:
    """A block inside an endpoint that is limited: `with limit.check(request):`, or `async with`.

    Entering it charges the limit, in one more step of the store. If the limit denies, everything that the request was
    charged before is refunded, and the framework's exception for a denied request is raised. Leaving it releases its
    slots of a concurrency limit. With `count=`, the response decides whether the charge remains, as on routes.
    """

    def __init__(self, limit: RouteLimit, native: FrameworkRequest, framework: Framework) -> None:
        """Limit by the scope of the limit: a block has no route."""
        self._limit = limit
        self._uses = (use_of_scope(limit, "on a block"),)
        self._native = native
        self._framework = framework
        self._checks: EnteredBlocks[RequestCheck] = EnteredBlocks()

    def __enter__(self) -> None:
        """Charge the limit, from a function."""
        self._limit.require_plain_functions("in a 'with' block: use 'async with'")
        self._finish(run(self._check_flow(tasks=False), call))

    def __exit__(self, *_: object) -> None:
        """Leave the block."""
        run(self._leave_flow(), call)

    async def __aenter__(self) -> None:
        """Charge the limit, from a coroutine."""
        self._finish(await run_async(self._check_flow(tasks=True), call))

    async def __aexit__(self, *_: object) -> None:
        """Leave the block."""
        await run_async(self._leave_flow(), call)

    def _check_flow(self, *, tasks: bool) -> CallFlow[RequestCheck]:
        framework, native = self._framework, self._native
        mapping = framework.mapping(native)
        if self._limit.counts_by_response:
            require_response(mapping.get(STATE_KEY), "count= of a limit on a block")
        if framework.is_websocket(native):
            mapping = separate_state(mapping)
        return check_flow(self._uses, native, mapping, framework, tasks=tasks)

    def _leave_flow(self) -> CallFlow[None]:
        """Release the slots that the block holds, unless the response may change the charge."""
        check = self._checks.remove()
        response_charge = None if check is None else check.request_state.response_charge
        if check is not None and response_charge is not None and not self._limit.counts_by_response:
            yield from response_charge.settle_early_flow([each.charge for each in check.result.decided])

    def _finish(self, check: RequestCheck) -> None:
        state, result, request = check
        if result.allowed:
            self._checks.add(check)
            if not self._limit.blocks:
                self._framework.report(self._native, exceeded=is_exceeded(result))
        else:
            decision = result.decision
            assert decision is not None  # noqa: S101 - a denial has a decision
            raise self._framework.make_error(deny(result, request, self._native, state), decision, self._native)


def separate_state(mapping: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the mapping of a WebSocket with a new state for one block, which usually handles one message.

    A denied message refunds neither earlier messages nor the request that opened the WebSocket.
    """
    separate = dict(mapping)
    separate.pop(RESULTS_KEY, None)  # a key may depend on the message
    request_state: RequestState | None = separate.pop(STATE_KEY, None)
    if request_state is not None and not request_state.standalone:
        separate[STATE_KEY] = make_state(request_state.request_limiter, request_state.client)
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
    stack.framework = framework
    wrap = _wrap_coroutine
    if not is_async_callable(stack.function):  # it may run in a thread, which cannot await
        limit.require_plain_functions("of an endpoint that is not a coroutine function (`async def`)")
        wrap = _wrap_function
    limited = wrap(stack, stack.function, framework)
    attach(stack, limited)
    return limited


def _wrap_coroutine(stack: LimitStack, inner: Any, framework: Framework) -> Any:  # noqa: ANN401 - any function
    request_type, find_request, find_mapping = framework.request_type, framework.find_request, framework.mapping

    @functools.wraps(inner)
    async def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
        native = args[0] if args and isinstance(args[0], request_type) else find_request(inner, args, kwargs)
        mapping = find_mapping(native)
        request_state = mapping.get(STATE_KEY)
        if request_state is not None:
            if decide_fast(stack, request_state, native):
                return await inner(*args, **kwargs)
        elif stack.is_plain:
            request_state = decide_standalone(stack, native, mapping)
            if request_state is not None:
                try:
                    response = await inner(*args, **kwargs)
                except Exception as error:
                    await run_async(fail_standalone_flow(request_state, framework, error), call)
                    raise
                finally:
                    forget_request(mapping)
                if request_state.write is not None:
                    return framework.add_fields(response, request_state.write(request_state.written))
                return await run_async(finish_standalone_flow(request_state, framework, response), call)
        step = functools.partial(inner, *args, **kwargs)
        return await run_async(limited_flow(stack, native, framework, step, tasks=True), call)

    return limited


def _wrap_function(stack: LimitStack, inner: Any, framework: Framework) -> Any:  # noqa: ANN401 - any function
    request_type, find_request, find_mapping = framework.request_type, framework.find_request, framework.mapping

    @functools.wraps(inner)
    def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
        native = args[0] if args and isinstance(args[0], request_type) else find_request(inner, args, kwargs)
        mapping = find_mapping(native)
        request_state = mapping.get(STATE_KEY)
        if request_state is not None:
            if decide_fast(stack, request_state, native):
                return inner(*args, **kwargs)
        elif stack.is_plain:
            request_state = decide_standalone(stack, native, mapping)
            if request_state is not None:
                try:
                    response = inner(*args, **kwargs)
                except Exception as error:
                    run(fail_standalone_flow(request_state, framework, error), call)
                    raise
                finally:
                    forget_request(mapping)
                if request_state.write is not None:
                    return framework.add_fields(response, request_state.write(request_state.written))
                return run(finish_standalone_flow(request_state, framework, response), call)
        step = functools.partial(inner, *args, **kwargs)
        return run(limited_flow(stack, native, framework, step, tasks=False), call)

    return limited


def limited_flow(
    stack: LimitStack,
    native: Any,  # noqa: ANN401 - any request
    framework: Framework,
    step: Callable[[], Any],
    *,
    tasks: bool,
) -> CallFlow[Any]:
    """Decide all limits of a function, then call it (`step`) or return the denial."""
    mapping = framework.mapping(native)
    request_state = mapping.get(STATE_KEY)
    if stack.is_covered(request_state):
        return (yield step)
    try:
        check = yield from check_flow(stack.uses, native, mapping, framework, tasks=tasks)
        state = check.request_state
        if not check.result.allowed:
            return answer_denied(check, native, framework)
        report_exceeded(check, stack.uses, native, framework)
        stack.cover(state)
        state.sees_response = True
        if request_state is not None and not state.standalone:
            return (yield step)
        return (yield from _call_standalone_flow(state, framework, step))
    finally:
        if request_state is None:
            forget_request(mapping)


def _call_standalone_flow(request_state: RequestState, framework: Framework, step: Callable[[], Any]) -> CallFlow[Any]:
    """Call the function without a middleware in front: settle what depends on the response, and add the headers."""
    try:
        response = yield step
    except Exception as error:
        yield from fail_standalone_flow(request_state, framework, error)
        raise
    return (yield from finish_standalone_flow(request_state, framework, response))


def fail_standalone_flow(request_state: RequestState, framework: Framework, error: Exception) -> CallFlow[None]:
    """Settle what depends on the response, after the function has raised; an HTTP error gets the headers."""
    response = framework.error_response(error)
    if response is not None:
        yield from finish_standalone_flow(request_state, framework, response)
    elif request_state.response_charge is not None:
        yield from request_state.response_charge.settle_flow()


def finish_standalone_flow(request_state: RequestState, framework: Framework, response: Any) -> CallFlow[Any]:  # noqa: ANN401 - any response
    """Settle what depends on the response, and add the headers."""
    yield from settle_standalone_flow(request_state, framework.status(response))
    return framework.add_fields(response, standalone_fields(request_state))


def settle_standalone_flow(request_state: RequestState, status: int) -> CallFlow[None]:
    """Settle what depends on the response to a request that no middleware has seen."""
    response_charge = request_state.response_charge
    if response_charge is not None:
        response_charge.status = status
        request_state.replace_decisions((yield from response_charge.settle_at_start_flow()))


def answer_denied(check: RequestCheck, native: Any, framework: Framework) -> Any:  # noqa: ANN401 - any request
    """Return the response to a denied request; if limits of the route denied it, the framework may raise instead."""
    state, result, request = check
    response, decision = deny(result, request, native, state), result.decision
    if decision is None or all(each.charge.route_limit is None for each in result.denials):
        return framework.make_response(response)
    return framework.deny_call(response, decision, native)


def report_exceeded(check: RequestCheck, uses: Sequence[RouteUse], native: Any, framework: Framework) -> None:  # noqa: ANN401 - any request
    """Tell the function whether a limit of the route with `block=False` is exceeded: this one or an earlier one."""
    if not all(use.limit.blocks for use in uses):
        state = check.request_state
        state.exceeded = state.exceeded or is_exceeded(check.result)
        framework.report(native, exceeded=state.exceeded)


def is_exceeded(result: ChargeResult) -> bool:
    """Return whether a limit with `block=False` is exceeded."""
    return any(not each.charge.blocks and not each.decision.within_limits for each in result.decided)


def require_response(request_state: RequestState | None, option: str) -> None:
    """Raise a ConfigError if nothing sees the response of the request, on which a charge depends."""
    if request_state is None or not request_state.sees_response:
        message = (
            f"{option} needs a RateLimitMiddleware around the application, which sees the response: for example "
            'RateLimitMiddleware(app, {"defaults": False, "unmatched": None})'
        )
        raise ConfigError(message)


def check_flow(
    uses: Sequence[RouteUse],
    native: Any,  # noqa: ANN401 - any request
    mapping: MutableMapping[str, Any],
    framework: Framework,
    *,
    tasks: bool,
    more: bool = False,
) -> CallFlow[RequestCheck]:
    """Decide limits of a request, with what a middleware has left pending."""
    request_state: RequestState | None = mapping.get(STATE_KEY)
    limit = uses[0].limit
    client = request_state.client if request_state is not None else None
    if client is None:
        client = find_client(None, limit.request_limiter_for(request_state), *framework.sender(native, mapping))
    if request_state is None:
        request_state = mapping[STATE_KEY] = standalone_state(limit, client)
    request = framework.common(native, mapping, client)
    result = yield from decide_uses_flow(uses, request_state, request, native, client, tasks=tasks, more=more)
    return RequestCheck(request_state, result, request)
