"""Limits on single routes: the part of `limit(…)` that all frameworks share.

    @limit("5/1m")                                      5 per minute for each client of this route
    @limit(["5/1m", "50/1d"], key=by_api_key())         per API key; requests without one by address
    @limit(lambda request: plan_of(request))            dynamic: a string, a Limit, several; None: no limit
    uploads = limit("100/1h", scope="uploads")          one count shared by all routes that use it

Behind a RateLimitMiddleware they use its store, its clients and its headers; otherwise those of the `Limits` that made
them, or of one object in memory that all others share. All limits that apply to a request, the middleware's and those
of its route, are decided together: a denied request is charged to none.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, Self, TypedDict

from tidegate._limiter.limiter import Limiter
from tidegate._policy import Policy
from tidegate.errors import ConfigError
from tidegate.inbound._client.address import UNKNOWN
from tidegate.inbound._client.denial_blocks import DenialBlocks
from tidegate.inbound._client.identify import key_results
from tidegate.inbound._client.request import METHOD_COUNTS, FrameworkRequest, by_address, is_async_callable
from tidegate.inbound._limiting.charges import LimitBlocks, RequestCharge, UnrecordedOwner, holds_slots
from tidegate.inbound._limiting.route_options import (
    check_combinations,
    check_fixed_cost,
    check_functions,
    check_texts,
    read_count,
    read_methods,
    take_request,
)
from tidegate.inbound._rules.block_rule import read_block
from tidegate.inbound._rules.extra_limits import (
    OneOrMoreLimits,
    has_own_name,
    limits_text,
    named_after,
    read_exact_limits,
)
from tidegate.inbound._rules.model import Category

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

    from tidegate._policy import Cost, Key
    from tidegate._policy.model import Mode, OnStoreError
    from tidegate._runtime.flow import CallFlow
    from tidegate.core import Limit
    from tidegate.core._decision import Decision
    from tidegate.inbound._client.identify import RequestClient
    from tidegate.inbound._client.request import KeyOf, Request
    from tidegate.inbound._limiting.charges import Reporter
    from tidegate.inbound._responses.response import DenialHandler
    from tidegate.stores import Store

LimitsOf = Callable[[FrameworkRequest], "OneOrMoreLimits | Awaitable[OneOrMoreLimits | None] | None"]
FALLBACK_LIMIT: Final = "60/1m"  # replaces an invalid dynamic limit if there is no valid one
MAX_CACHED_LIMITS: Final = 1000  # a function may return any number of different limits

log: logging.Logger = logging.getLogger("tidegate.inbound")


class LimitsObject(Protocol):
    """A `Limits`, which has made a limit."""

    @property
    def request_limiter(self) -> Reporter:
        """What its limits share."""


class RouteOptions(TypedDict, total=False):
    """The options of `limit(…)`; docs/reference/inbound.md says what each does."""

    key: KeyOf | None
    cost: Cost | Callable[[FrameworkRequest], Cost | Awaitable[Cost]]
    scope: str | None
    name: str | None
    methods: Collection[str] | None
    per_method: bool
    exempt_when: Callable[[FrameworkRequest], bool | Awaitable[bool]] | None
    count: Collection[int | str] | Callable[[FrameworkRequest, int], bool] | None
    on_denied: Callable[[FrameworkRequest, Decision], object] | None
    override_defaults: bool
    as_default: bool
    mode: Mode
    on_store_error: OnStoreError
    denied: DenialHandler | None
    block_after: str | Mapping[str, str] | None
    block_for: str | None


class RouteLimit(UnrecordedOwner):
    """A limit on routes. Subclasses adapt it to the requests and responses of a framework.

    The functions `key`, `cost`, `limits`, `denied`, `count`, `exempt_when` and `on_denied` receive the framework's own
    request; `tidegate.inbound.common_request(request)` returns the Request that is the same for all frameworks.
    """

    limits_blueprints: ClassVar[bool] = False  # whether the framework has blueprints
    category: Category | None = None  # of a copy that a middleware uses for `application_limits` or `default_limits`

    def __init__(
        self,
        limits: OneOrMoreLimits | LimitsOf,
        *,
        key: KeyOf | None = None,
        cost: Cost | Callable[[FrameworkRequest], Cost | Awaitable[Cost]] = 1,
        scope: str | None = None,
        name: str | None = None,
        methods: Collection[str] | None = None,
        per_method: bool = False,
        exempt_when: Callable[[FrameworkRequest], bool | Awaitable[bool]] | None = None,
        count: Collection[int | str] | Callable[[FrameworkRequest, int], bool] | None = None,
        on_denied: Callable[[FrameworkRequest, Decision], object] | None = None,
        override_defaults: bool = True,
        as_default: bool = False,
        mode: Mode = "enforce",
        on_store_error: OnStoreError = "local",
        denied: DenialHandler | None = None,
        block_after: str | Mapping[str, str] | None = None,
        block_for: str | None = None,
    ) -> None:
        """Take a string such as "5/1m", a Limit, several, or a function of the request that returns one of these.

        `key` returns the key of a request, `cost` is its cost; routes with the same `scope` share a count. The `name`
        separates the limits of a route; by default it is made of the key function and the periods. A function that
        returns an invalid limit is logged once; the last valid one applies, at first 60/1m. Only requests
        with one of the `methods` are limited, and none for which `exempt_when` returns true; `per_method` counts each
        method separately. `count` are statuses that count, or a function of request and status; other responses are
        refunded. `on_denied` is called for each denial.
        With `mode="shadow"`, it denies nothing: `tidegate.inbound.limited(request)` says whether it is exceeded.
        `block_after` and `block_for` block a client at these limits that they have denied too often, as the options of
        a middleware block it everywhere.
        The `default_limits` of a middleware apply in addition only with `override_defaults=False`; so do limits of its
        blueprint that are given `as_default`.
        """
        key, exempt_when = take_request(key, scope), take_request(exempt_when, scope)
        limits, cost = take_request(limits, scope), take_request(cost, scope)
        check_functions({"key": key, "exempt_when": exempt_when}, "request", coroutines=True)
        dynamic: dict[str, object] = {
            field: each for field, each in (("limits", limits), ("cost", cost)) if callable(each)
        }
        check_functions(dynamic, "request", coroutines=True)
        check_functions({"denied": denied, "on_denied": on_denied}, "request", "decision")
        check_texts(scope=scope, name=name)
        fixed = None if callable(limits) else named_limits(read_exact_limits(limits), name)
        check_fixed_cost(cost, fixed)
        self._limits_of: LimitsOf | None = limits if callable(limits) else None
        # The limits that apply if there is no function, or if it returns invalid ones.
        self._valid: tuple[Limit, ...] | None = fixed
        Policy("route", fixed or ("1/1s",), mode, on_store_error)  # raises now, not at the first request
        self._key_of = key
        self._cost = cost
        self.scope = scope
        self._methods = read_methods(methods)
        self.name: str = name or default_name(key, fixed, methods=self._methods)
        self._block_rules = read_block(block_after, block_for)
        for_denials: dict[str, object] = {"denied": denied, "on_denied": on_denied, "block_after": block_after}
        check_combinations(mode, for_denials, self._methods, per_method=per_method)
        self._per_method = per_method
        self._exempt_when = exempt_when
        self.count: Callable[[FrameworkRequest, int], bool] | None = read_count(count)
        self.on_denied = on_denied
        self.override_defaults: bool = override_defaults
        if as_default and not self.limits_blueprints:
            raise ConfigError("only limits of blueprints, of Flask and Quart, can be defaults", field="as_default")
        self.as_default: bool = as_default
        self._mode: Mode = mode
        self._on_store_error: OnStoreError = on_store_error
        self._made_by: LimitsObject | None = None
        self.denied = denied
        self._parsed: dict[object, tuple[Limit, ...]] = {}
        self._limiters: dict[object, tuple[Store, Limiter]] = {}
        self._denial_blocks: dict[object, tuple[Store, DenialBlocks]] = {}
        # Whether it calls functions that may need what the application adds to the request: then only the endpoint
        # can charge it; a middleware charges all others.
        self.has_functions: bool = any(
            callable(each) and not getattr(each, "reads_headers", False)
            for each in (self._limits_of, key, cost, exempt_when, count)
        )
        # The coroutine functions among these, by option: only async frameworks can call them.
        functions = {"limits": limits, "key": key, "cost": cost, "exempt_when": exempt_when}
        self._coroutines = frozenset(option for option, each in functions.items() if is_async_callable(each))
        self.counts_by_response: bool = count is not None
        self.reserves: bool = holds_slots(fixed or ()) or self.counts_by_response
        self._fixed_cost: Cost | None = None if fixed is None or callable(cost) else cost  # checked above
        self._logged: set[str] = set()
        self.has_key: bool = key is not None
        self.by_address: bool = key is by_address  # not by the key of the middleware
        # Whether what a request is charged is known before it arrives, but for its key.
        self.is_fixed: bool = (
            fixed is not None and not callable(cost) and exempt_when is None and not callable(count)
        ) and not (self._coroutines or self._block_rules)

    def for_middleware(self, name: str, *, coroutines: bool) -> RouteLimit:
        """Return a copy for the option `application_limits` or `default_limits`; raises ConfigError.

        The middleware has its own store and responses, so options that would replace these are rejected.
        """
        if not coroutines:
            self.require_plain_functions("of a WSGI middleware")
        given = {
            "scope": self.scope,
            "store": self._made_by,
            "denied": self.denied,
            "on_denied": self.on_denied,
            "block_after": self._block_rules,
        }
        rejected = [option for option, value in given.items() if value is not None]
        if rejected:
            raise ConfigError(
                f"a limit of the middleware cannot have the option {rejected[0]!r}: remove it", field=name
            )
        copied = copy.copy(self)
        limits = named_after(name, self._valid or read_exact_limits(FALLBACK_LIMIT))
        copied.category = Category(name, Policy(name, limits, self._mode, self._on_store_error))
        copied.name, copied._limiters = name, {}  # noqa: SLF001 - of its own class
        return copied

    def require_plain_functions(self, where: str) -> None:
        """Raise ConfigError if an option is a coroutine function, which nothing can await there."""
        for option in sorted(self._coroutines):
            message = f"must be a plain function {where}: only coroutines can await it"
            raise ConfigError(message, field=option)

    @property
    def text(self) -> str:
        """The limits, such as `5/1m, 100/1h`, and what else decides whether a request is limited."""
        if self._limits_of is None:
            words = [limits_text(self._valid or ())]
        else:
            words = [f"by {getattr(self._limits_of, '__name__', type(self._limits_of).__name__)}"]
        noted = {
            "shadow": self._mode == "shadow",
            "per method": self._per_method,
            "exempt_when": self._exempt_when is not None,
            "block_after": self._block_rules is not None,
        }
        return "; ".join([*words, *(word for word, holds in noted.items() if holds)])

    @property
    def limiters(self) -> tuple[Limiter, ...]:
        """The limiters that requests have used so far."""
        return tuple(limiter for _, limiter in self._limiters.values())

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def use(self, limits: LimitsObject) -> Self:
        """Count in the store of these limits, also behind a middleware."""
        self._made_by = limits
        return self

    def request_limiter_for(self, request_limiter: Reporter | None) -> Reporter:
        """Return the request limiter of the middleware, unless there is none or a `Limits` has made this limit."""
        if request_limiter is None or self._made_by is not None:
            return self.own_request_limiter()
        return request_limiter

    def own_request_limiter(self) -> Reporter:
        """Return the request limiter of the `Limits` that made this limit; frameworks have one for bare limits."""
        if self._made_by is None:
            raise ConfigError("needs a RateLimitMiddleware, or the `limit` of a framework", field="limit")
        return self._made_by.request_limiter

    def make_charge_flow(
        self,
        request: Request,
        native: object,
        request_limiter: Reporter,
        client: RequestClient,
        key: Key,
        name: str,
    ) -> CallFlow[RequestCharge | None]:
        """Return what a request is to be charged under the name of a policy; None if it is not limited.

        `key` is the one that the middleware has chosen for the client.
        """
        if not request_limiter.rules.enabled or not self.applies_to(request.method):
            return None
        if self._exempt_when is not None and (yield from self._call_flow("exempt_when", self._exempt_when, native)):
            return None
        if self._key_of is not None:
            yield from self._call_key_flow(native, request.mapping)
        found = self.choose_key(native, request.mapping, client, key, request_limiter)
        if found is None:
            return None
        limits = None
        if self._limits_of is not None:
            limits = yield from self._read_dynamic_flow(native)
            if limits is None:
                return None
        limiter = self._limiter(request_limiter, self._count_name(name, request.method), limits)
        cost = self._fixed_cost
        if cost is None:
            cost = yield from self._read_cost_flow(native, limiter.policy)
        reserves = self.reserves or (limits is not None and holds_slots(limits))
        blocks = None
        if self._block_rules is not None:
            denial_blocks = self._blocks_at(request_limiter, limiter.policy.name)
            blocks = LimitBlocks(denial_blocks, (yield from denial_blocks.blocked_until_flow(found)))
        # The request holds the state, which holds the charge: only those that need the request make a reference cycle.
        return RequestCharge(
            limiter, found, cost, self, request_limiter, reserves, native if reserves else None, blocks
        )

    def prepare_charge(self, request_limiter: Reporter, name: str, method: str) -> RequestCharge | None:
        """Return what requests with a method are charged, without their keys; None if they are not limited.

        Only for a limit that calls no functions but `key`.
        """
        if not self.applies_to(method):
            return None
        limiter = self._limiter(request_limiter, self._count_name(name, method), None)
        assert self._fixed_cost is not None  # noqa: S101 - only functions have no fixed cost
        return RequestCharge(limiter, UNKNOWN, self._fixed_cost, self, request_limiter, self.reserves)

    def choose_key(
        self,
        native: object,
        mapping: object,
        client: RequestClient,
        key: Key,
        request_limiter: Reporter,
    ) -> Key | None:
        """Return the key of a request; None if it is not limited: exempt clients and clients without an address.

        The key function is called once per request; None from it limits by `key`, that of the client.
        """
        identifier = request_limiter.client_identifier
        if client.key is None:
            return None
        if self.by_address:
            key = client.key
        elif self._key_of is not None:
            results = key_results(mapping)
            if id(self) not in results:
                results[id(self)] = self._key_of(native)
            chosen = results[id(self)]
            if chosen is not None:
                return identifier.make_key(chosen, key)
        return None if key is UNKNOWN and identifier.allows_unknown else key

    def _count_name(self, name: str, method: str) -> str:
        """Return the name of a policy; with `per_method`, each method has its own count."""
        return f"{name}:{METHOD_COUNTS.get(method.upper(), 'other')}" if self._per_method else name

    def applies_to(self, method: str) -> bool:
        """Return whether requests with this method are limited."""
        return self._methods is None or method.upper() in self._methods

    def final_cost(self, request: FrameworkRequest, status: int, cost: Cost) -> Cost | None:
        """Return the final cost of a request, given the status of its response; None: the estimated cost."""
        del cost
        count = self.count
        if count is None:
            return None
        return None if count(request, status) else 0

    def _call_flow(self, option: str, function: Callable[..., Any], native: object) -> CallFlow[Any]:
        """Call a function of the application, which may be a coroutine function."""
        if option in self._coroutines:
            return (yield functools.partial(function, native))
        return function(native)

    def _call_key_flow(self, native: object, mapping: object) -> CallFlow[None]:
        """Call a key function that is a coroutine function; `choose_key` then uses its result."""
        if "key" in self._coroutines and self._key_of is not None:
            results = key_results(mapping)
            if id(self) not in results:
                results[id(self)] = yield functools.partial(self._key_of, native)

    def _read_dynamic_flow(self, native: object) -> CallFlow[tuple[Limit, ...] | None]:
        """Return the limits that the function chooses; None: no limit. The last valid ones replace invalid ones.

        Without a valid one, FALLBACK_LIMIT applies: an invalid limit neither fails requests nor leaves a route without
        a limit.
        """
        try:
            chosen = yield from self._call_flow("limits", self._limits_of, native)  # type: ignore[arg-type]  # called only if there is one
            if chosen is None:
                return None
            self._valid = self._parse(chosen)
        except ConfigError as error:
            then = "the last valid limit applies" if self._valid else f"{FALLBACK_LIMIT} applies"
            if self._is_first_time("limits"):
                log.error("%s: the limit function returned an invalid limit, %s: %s", self.name, then, error)  # noqa: TRY400 - the message has all details
        return self._valid or read_exact_limits(FALLBACK_LIMIT)

    def _read_cost_flow(self, native: object, policy: Policy) -> CallFlow[Cost]:
        """Return the cost of a request; 1 replaces an invalid one, so that it neither fails requests nor admits all."""
        cost: Cost = (yield from self._call_flow("cost", self._cost, native)) if callable(self._cost) else self._cost
        try:
            policy.costs(cost)
        except ConfigError as error:
            if self._is_first_time("cost"):
                log.error("%s: a request has an invalid cost, a cost of 1 applies: %s", self.name, error)  # noqa: TRY400 - as above
            return dict.fromkeys(policy.units, 1)
        return cost

    def _is_first_time(self, invalid: str) -> bool:
        """Return whether this is the first invalid result of a function, which is logged."""
        first = invalid not in self._logged
        self._logged.add(invalid)
        return first

    def _parse(self, chosen: OneOrMoreLimits) -> tuple[Limit, ...]:
        """Read limits that a function has chosen; the last ones are cached."""
        cache_key = chosen if isinstance(chosen, str) or not isinstance(chosen, Iterable) else tuple(chosen)
        try:
            found = self._parsed.get(cache_key)
        except TypeError:  # something that cannot be hashed is no limit: this raises a ConfigError
            return read_exact_limits(cache_key)
        if found is None:
            if len(self._parsed) >= MAX_CACHED_LIMITS:
                self._parsed.clear()
            found = self._parsed[cache_key] = read_exact_limits(cache_key)
        return found

    def _limiter(self, request_limiter: Reporter, name: str, limits: tuple[Limit, ...] | None) -> Limiter:
        """Return the limiter of a route, for dynamic limits or (None) for the fixed ones."""
        cache_key = (id(request_limiter.store), name, limits)
        found = self._limiters.get(cache_key)
        if found is None:
            if len(self._limiters) >= MAX_CACHED_LIMITS:
                self._limiters.clear()
            chosen = limits or self._valid or ()
            if self.category is not None:
                chosen = named_after(self.category.name, chosen)
            policy = Policy(name, chosen, self._mode, self._on_store_error)
            # The entry keeps the store alive, so that no other store can get the same id.
            found = self._limiters[cache_key] = (
                request_limiter.store,
                Limiter(policy, store=request_limiter.store, clock=request_limiter.own_clock),
            )
        return found[1]

    def _blocks_at(self, request_limiter: Reporter, name: str) -> DenialBlocks:
        """Return what blocks clients at the count with this name."""
        store, clock = request_limiter.store, request_limiter.own_clock
        found = self._denial_blocks.get((id(store), name))
        if found is None:
            assert self._block_rules is not None  # noqa: S101 - the caller checks it
            blocks = DenialBlocks(self._block_rules.at(name), lambda policy: Limiter(policy, store=store, clock=clock))
            found = self._denial_blocks[id(store), name] = store, blocks  # the entry keeps the store alive
        return found[1]


def default_name(
    key: Callable[..., object] | None,
    limits: Sequence[Limit] | None,
    without_key: str = "by_address",
    methods: Collection[str] | None = None,
) -> str:
    """Name a limit after its key function, periods and methods; a changed quota keeps the name, and so the count."""
    function = without_key if key is None else getattr(key, "__name__", type(key).__name__)
    names = f"{function}/{'dynamic' if limits is None else '+'.join(limit.name for limit in limits)}"
    return names if methods is None else f"{names} {'+'.join(sorted(methods))}"


def named_limits(limits: tuple[Limit, ...], name: str | None) -> tuple[Limit, ...]:
    """Give a single limit the name of the route limit, which headers and responses show."""
    if name is None or len(limits) != 1:
        return limits
    (limit,) = limits
    return limits if has_own_name(limit) else (replace(limit, name=name),)


__all__ = ["LimitsOf", "OneOrMoreLimits", "RouteLimit", "RouteOptions", "read_exact_limits"]
