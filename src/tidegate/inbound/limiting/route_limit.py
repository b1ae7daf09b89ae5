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
from typing import TYPE_CHECKING, Any, Final

from tidegate.core import Limit
from tidegate.errors import ConfigError, RateLimitError
from tidegate.headers import check_style
from tidegate.inbound.client.address import UNKNOWN, TrustedProxies
from tidegate.inbound.limiting.options import OPTIONAL_FUNCTION
from tidegate.inbound.limiting.request_limiter import RequestLimiter
from tidegate.inbound.responses.response import ResponseWriter, worked_out
from tidegate.inbound.rules.config import by_default
from tidegate.limiter import AsyncLimiter, Limiter
from tidegate.policy import Policy
from tidegate.policy.model import read_limits

if TYPE_CHECKING:
    from tidegate.core.decision import Decision
    from tidegate.headers import Style
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.client.request import KeyOf, Request
    from tidegate.inbound.limiting.flow import Steps
    from tidegate.inbound.limiting.request_state import RequestState
    from tidegate.inbound.responses.response import Denying, Response
    from tidegate.policy import Cost, Key
    from tidegate.policy.model import Mode, OnStoreError
    from tidegate.stores import Store

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
        clock: Any = None,  # noqa: ANN401 - a Clock
    ) -> None:
        """Take a string such as "5/1m", a Limit, several, or a function of the request that returns one of these.

        `key` returns the key of a request, `cost` is its cost; routes with the same `scope` share a count.
        `store`, `trusted_proxies`, `headers` and `clock` are used without a middleware in front.
        """
        wrong = OPTIONAL_FUNCTION(key)
        if wrong:
            raise ConfigError(f"{wrong} such as by_header('x-tenant'), not {key!r}", field="key")
        self._limits: Limits | LimitsOf = limits if callable(limits) else exact(limits)
        Policy("route", exact("1/1s" if callable(limits) else limits), mode, on_store_error)  # raise now, not at the first request
        check_style(headers)
        self._key_of = key
        self._cost = cost
        self.scope = scope
        self._mode: Mode = mode
        self._on_store_error: OnStoreError = on_store_error
        self._own_store = store
        proxies = TrustedProxies(trusted_proxies)
        self._options: dict[str, Any] = {"trusted_proxies": proxies, "headers": headers, "clock": clock}
        self._own: RequestLimiter | None = None
        self._denied = denied
        self._limiters: dict[object, tuple[Store, Limiter | AsyncLimiter]] = {}

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def guard_of(self, visit: RequestState | None) -> RequestLimiter:
        """Return the request limiter of the middleware, or an own one if there is none."""
        if visit is not None and self._own_store is None:
            return visit.guard
        if self._own is None:
            rules = {"defaults": False, "unmatched": None}
            self._own = RequestLimiter(rules, self._own_store or "memory://", **self._options)
        return self._own

    def deciding(
        self, request: Request, visit: RequestState | None, visitor: RequestClient, route: str, *, tasks: bool = False
    ) -> Steps[Decision | None]:
        """Decide about a request to a route; None if it is not limited. `tasks`: the caller awaits the limiters."""
        guard = self.guard_of(visit)
        limits = self._limits(request) if callable(self._limits) else None
        key = self._key(request, visitor, guard)
        if key is None or (limits is None and callable(self._limits)):
            return None
        limiter = self._limiter(guard, self.scope or route, limits, tasks=tasks)
        cost = self._cost(request) if callable(self._cost) else self._cost
        try:
            decision: Decision = yield partial(limiter.try_acquire, key, cost)
        except RateLimitError as error:
            outcome = guard.lost_by(limiter.policy, error)
            if outcome.let_in or outcome.decision is None:
                return None
            decision = outcome.decision
        if guard.watched or not decision[0]:
            guard.watch(limiter.policy, key, cost, decision, request.method, request.path)
        if visit is not None:
            visit.add(decision)
        return decision

    def _key(self, request: Request, visitor: RequestClient, guard: RequestLimiter) -> Key | None:
        """Return the key of a request; None if it is not limited: exempt clients and clients without an address."""
        if visitor.key is None:
            return None
        chosen = self._key_of(request) if self._key_of is not None else None
        if chosen is None:
            return None if visitor.key is UNKNOWN and guard.clients.lets_unknown_in else visitor.key
        return guard.clients.made_key(chosen, visitor.key)

    def _limiter(
        self, guard: RequestLimiter, name: str, limits: Limits | None, *, tasks: bool
    ) -> Limiter | AsyncLimiter:
        """Return the limiter of a route, for dynamic limits or (None) for the fixed ones."""
        tasks = tasks and not guard.store.instant
        place = (id(guard.store), name, tasks, limits if limits is None else str(limits))
        found = self._limiters.get(place)
        if found is None:
            if len(self._limiters) >= MAX_CACHED_LIMITS:
                self._limiters.clear()
            policy = Policy(name, exact(limits or self._limits), self._mode, self._on_store_error)  # type: ignore[arg-type]  # None: no function
            kind = AsyncLimiter if tasks else Limiter
            # The entry keeps the store alive, so that no other store can get the same id.
            found = self._limiters[place] = (guard.store, kind(policy, store=guard.store, clock=guard.own_clock))
        return found[1]

    # ---- responses ---------------------------------------------------------------------------------------------------

    def fields(self, visit: RequestState | None, decision: Decision) -> list[tuple[str, str]]:
        """Return the header fields of a decision; none if a middleware in front adds them."""
        return [] if visit is not None else self.guard_of(visit).answers.fields(decision)

    def answer(self, request: Request, visit: RequestState | None, decision: Decision) -> Response:
        """Build the response to a denied request."""
        guard = self.guard_of(visit)
        answers = (
            ResponseWriter(guard.answers.style, denied=self._denied) if self._denied is not None else guard.answers
        )
        decision = worked_out(decision)
        policy = Policy("route", decision[2], self._mode, self._on_store_error)
        made = answers.denial(request, decision, policy)
        return made._replace(headers=(*made.headers, *self.fields(visit, decision)))


def exact(limits: Limits) -> tuple[Limit, ...]:
    """Read limits; strings that name no algorithm use sliding_log."""
    if isinstance(limits, Limit) or not isinstance(limits, Iterable):
        return read_limits(limits)
    some = [limits] if isinstance(limits, str) else limits
    return read_limits([_exact(one) if isinstance(one, str) else one for one in some])


def _exact(text: str) -> Limit:
    return by_default(Limit.parse(text), text, "sliding_log")


def name_of(function: Any) -> str:  # noqa: ANN401 - any function
    """Name a route after its function."""
    return f"{function.__module__}.{function.__qualname__}"


def visitor_of(visit: RequestState | None, guard: RequestLimiter, peer: str | None, headers: Any) -> RequestClient:  # noqa: ANN401 - of any framework
    """Return the client as identified by the middleware in front, or identify it."""
    known = visit.visitor if visit is not None else None
    return guard.clients.find(peer, headers) if known is None else known


__all__ = ["Limits", "LimitsOf", "RouteLimit", "exact", "name_of", "visitor_of"]
