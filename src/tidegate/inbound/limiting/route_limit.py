"""Limits on single routes: the part of `limit(…)` that all frameworks share.

    @limit("5/1m")                                      5 per minute for each client of this route
    @limit(["5/1m", "50/1d"], key=by_api_key())         per API key; requests without one by address
    @limit(lambda request: plan_of(request))            dynamic: a string, a Limit, several; None: no limit
    uploads = limit("100/1h", scope="uploads")          one count shared by all routes that use it

Behind a RateLimitMiddleware they use its store, its clients and its headers; otherwise their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tidegate.core import Limit
from tidegate.errors import ConfigError, RateLimitError
from tidegate.headers import check_style
from tidegate.inbound.client.address import UNKNOWN, TrustedProxies
from tidegate.inbound.limiting.options import OPTIONAL_FUNCTION
from tidegate.inbound.limiting.request_limiter import RequestLimiter
from tidegate.inbound.responses.response import ResponseWriter, fit_to_status
from tidegate.inbound.rules.config import with_default_algorithm
from tidegate.limiter import AsyncLimiter, Limiter
from tidegate.policy import Policy
from tidegate.policy.model import read_limits

if TYPE_CHECKING:
    from tidegate.clock import Clock
    from tidegate.core.decision import Decision
    from tidegate.flow import CallFlow
    from tidegate.headers import Style
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.client.request import KeyOf, Request
    from tidegate.inbound.limiting.request_state import RequestState
    from tidegate.inbound.responses.response import Denying, Response
    from tidegate.policy import Cost, Key
    from tidegate.policy.model import Mode, OnStoreError
    from tidegate.stores import Store

F = TypeVar("F", bound=Callable[..., object])  # a function that is decorated
Limits = str | Limit | Iterable[str | Limit]
LimitsOf = Callable[["Request"], "Limits | None"]
MAX_CACHED_LIMITS: Final = 1000  # a function may return any number of different limits


class RouteLimit:
    """A limit on routes. Subclasses adapt it to the requests and responses of a framework."""

    def __init__(
        self,
        limits: Limits | LimitsOf,
        *,
        key: KeyOf | None = None,
        cost: Cost | Callable[[Request], Cost] = 1,
        scope: str | None = None,
        mode: Mode = "enforce",
        on_store_error: OnStoreError = "local",
        store: str | Store | None = None,
        trusted_proxies: Iterable[str] = (),
        headers: Style = "x",
        denied: Denying | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Take a string such as "5/1m", a Limit, several, or a function of the request that returns one of these.

        `key` returns the key of a request, `cost` is its cost; routes with the same `scope` share a count.
        `store`, `trusted_proxies`, `headers` and `clock` are used without a middleware in front.
        """
        problem = OPTIONAL_FUNCTION(key)
        if problem:
            raise ConfigError(f"{problem} such as by_header('x-tenant'), not {key!r}", field="key")
        self._limits: Limits | LimitsOf = limits if callable(limits) else read_exact_limits(limits)
        fixed_limits = read_exact_limits("1/1s" if callable(limits) else limits)
        Policy("route", fixed_limits, mode, on_store_error)  # raises now, not at the first request
        check_style(headers)
        self._key_of = key
        self._cost = cost
        self.scope = scope
        self._mode: Mode = mode
        self._on_store_error: OnStoreError = on_store_error
        self._own_store = store
        proxies = TrustedProxies(trusted_proxies)
        self._options: dict[str, Any] = {"trusted_proxies": proxies, "headers": headers, "clock": clock}
        self._request_limiter: RequestLimiter | None = None
        self._denied = denied
        self._limiters: dict[object, tuple[Store, Limiter | AsyncLimiter]] = {}

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def request_limiter_for(self, request_state: RequestState | None) -> RequestLimiter:
        """Return the request limiter of the middleware, or an own one if there is none."""
        if request_state is not None and self._own_store is None:
            return request_state.request_limiter
        if self._request_limiter is None:
            rules = {"defaults": False, "unmatched": None}
            self._request_limiter = RequestLimiter(rules, self._own_store or "memory://", **self._options)
        return self._request_limiter

    def decide_flow(
        self,
        request: Request,
        request_state: RequestState | None,
        client: RequestClient,
        route: str,
        *,
        tasks: bool = False,
    ) -> CallFlow[Decision | None]:
        """Decide about a request to a route; None if it is not limited. `tasks`: the caller awaits the limiters."""
        request_limiter = self.request_limiter_for(request_state)
        limits = self._limits(request) if callable(self._limits) else None
        key = self._key(request, client, request_limiter)
        if key is None or (limits is None and callable(self._limits)):
            return None
        limiter = self._limiter(request_limiter, self.scope or route, limits, tasks=tasks)
        cost = self._cost(request) if callable(self._cost) else self._cost
        try:
            decision: Decision = yield partial(limiter.try_acquire, key, cost)
        except RateLimitError as error:
            outcome = request_limiter.handle_policy_store_error(limiter.policy, error)
            if outcome.allowed or outcome.decision is None:
                return None
            decision = outcome.decision
        if request_limiter.observed or not decision.within_limits:
            request_limiter.notify(limiter.policy, key, cost, decision, request.method, request.path)
        if request_state is not None:
            request_state.add(decision)
        return decision

    def _key(self, request: Request, client: RequestClient, request_limiter: RequestLimiter) -> Key | None:
        """Return the key of a request; None if it is not limited: exempt clients and clients without an address."""
        if client.key is None:
            return None
        chosen = self._key_of(request) if self._key_of is not None else None
        if chosen is None:
            return None if client.key is UNKNOWN and request_limiter.client_identifier.allows_unknown else client.key
        return request_limiter.client_identifier.make_key(chosen, client.key)

    def _limiter(
        self, request_limiter: RequestLimiter, name: str, limits: Limits | None, *, tasks: bool
    ) -> Limiter | AsyncLimiter:
        """Return the limiter of a route, for dynamic limits or (None) for the fixed ones."""
        tasks = tasks and not request_limiter.store.instant
        cache_key = (id(request_limiter.store), name, tasks, limits if limits is None else str(limits))
        found = self._limiters.get(cache_key)
        if found is None:
            if len(self._limiters) >= MAX_CACHED_LIMITS:
                self._limiters.clear()
            policy = Policy(name, read_exact_limits(limits or self._limits), self._mode, self._on_store_error)  # type: ignore[arg-type]  # None: no function
            kind = AsyncLimiter if tasks else Limiter
            # The entry keeps the store alive, so that no other store can get the same id.
            found = self._limiters[cache_key] = (
                request_limiter.store,
                kind(policy, store=request_limiter.store, clock=request_limiter.own_clock),
            )
        return found[1]

    # ---- responses ---------------------------------------------------------------------------------------------------

    def fields(self, request_state: RequestState | None, decision: Decision) -> list[tuple[str, str]]:
        """Return the header fields of a decision; none if a middleware in front adds them."""
        if request_state is not None:
            return []
        return self.request_limiter_for(None).response_writer.fields(decision)

    def write_denial(self, request: Request, request_state: RequestState | None, decision: Decision) -> Response:
        """Build the response to a denied request."""
        request_limiter = self.request_limiter_for(request_state)
        writer = (
            ResponseWriter(request_limiter.response_writer.style, denied=self._denied)
            if self._denied is not None
            else request_limiter.response_writer
        )
        decision = decision.with_views()  # a denial reads them several times
        policy = Policy("route", decision.policy_limits, self._mode, self._on_store_error)
        response = writer.write_denial(request, decision, policy)
        fields = fit_to_status(self.fields(request_state, decision), response.status)
        return response._replace(headers=(*response.headers, *fields))


def read_exact_limits(limits: Limits) -> tuple[Limit, ...]:
    """Read limits; strings that name no algorithm use sliding_log."""
    if isinstance(limits, Limit) or not isinstance(limits, Iterable):
        return read_limits(limits)
    several = [limits] if isinstance(limits, str) else limits
    return read_limits([_read_exact_limit(one) if isinstance(one, str) else one for one in several])


def _read_exact_limit(text: str) -> Limit:
    return with_default_algorithm(Limit.parse(text), text, "sliding_log")


def route_name(function: Any) -> str:  # noqa: ANN401 - any function
    """Name a route after its function."""
    return f"{function.__module__}.{function.__qualname__}"


def find_client(
    request_state: RequestState | None,
    request_limiter: RequestLimiter,
    peer: str | None,
    headers: Any,  # noqa: ANN401 - of any framework
) -> RequestClient:
    """Return the client as identified by the middleware in front, or identify it."""
    known = request_state.client if request_state is not None else None
    return request_limiter.client_identifier.find(peer, headers) if known is None else known


__all__ = ["Limits", "LimitsOf", "RouteLimit", "find_client", "read_exact_limits", "route_name"]
