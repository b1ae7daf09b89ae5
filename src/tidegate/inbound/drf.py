"""Throttle classes for Django REST Framework, with the names and settings of its own.

    REST_FRAMEWORK = {
        "DEFAULT_THROTTLE_CLASSES": ["tidegate.inbound.drf.AnonRateThrottle", "tidegate.inbound.drf.UserRateThrottle"],
        "DEFAULT_THROTTLE_RATES": {"anon": "100/day", "user": ["20/1m", "1000/day"]},
    }
    TIDEGATE = {"store": "redis://localhost"}

All throttles of a view are decided together, in one step of the store: a request that one of them denies is charged to
none. REST Framework calls `allow_request` of each throttle in turn. The first call collects what the other throttles of
the view would ask, decides, and keeps the outcomes on the request for the calls that follow. Throttles of other
packages are not part of that decision.
"""

from __future__ import annotations

import logging
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._limiter.limiter import Limiter
from tidegate._policy import Policy
from tidegate._policy.key import join_key
from tidegate._runtime.clock import ManualClock
from tidegate._runtime.flow import run
from tidegate._runtime.fork import fork_safe
from tidegate._runtime.lock import locked
from tidegate.core._algorithms import NEVER
from tidegate.core._bounds import SECOND
from tidegate.core._limit import Limit
from tidegate.errors import ConfigError
from tidegate.inbound._client.address import UNKNOWN, address_key, parse_node
from tidegate.inbound._client.request import EnvironHeaders
from tidegate.inbound._limiting.charges import UNRECORDED, RequestCharge, perform
from tidegate.inbound._limiting.decide import decide_flow
from tidegate.inbound._limiting.request_limiter import RequestLimiter
from tidegate.inbound._limiting.request_state import STATE_KEY
from tidegate.inbound._limiting.route_limit import read_exact_limits
from tidegate.inbound.django import FRAMEWORK

try:
    from django.conf import settings  # type: ignore[import-untyped]  # Django has no types
    from django.core.exceptions import ImproperlyConfigured  # type: ignore[import-untyped]  # as above
    from django.core.signals import setting_changed  # type: ignore[import-untyped]  # as above
    from rest_framework import throttling  # type: ignore[import-untyped]  # REST Framework has no types
    from rest_framework.settings import api_settings  # type: ignore[import-untyped]  # as above
except ImportError as _err:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.drf requires Django REST Framework: pip install djangorestframework") from _err

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rest_framework.request import Request  # type: ignore[import-untyped]  # it has no types
    from rest_framework.views import APIView  # type: ignore[import-untyped]  # it has no types

    from tidegate._policy import Key
    from tidegate._policy.model import OnStoreError
    from tidegate.inbound._limiting.request_state import RequestState
    from tidegate.inbound._limiting.route_limit import OneOrMoreLimits
    from tidegate.stores._base import Ask

__all__ = ["AnonRateThrottle", "ScopedRateThrottle", "SimpleRateThrottle", "UserRateThrottle"]

log: logging.Logger = logging.getLogger("tidegate.inbound")

SETTING_NAME: Final = "TIDEGATE"
OPTION_NAMES: Final = (
    "store",
    "on_store_error",
    "trusted_proxies",
    "ipv6_prefix",
    "unknown",
    "lease",
    "clock",
    "observer",
    "log_every",
    "log_burst",
)
OUTCOMES_ATTRIBUTE: Final = "_tidegate_outcomes"  # the attribute of a request that keeps the outcomes of its throttles
MAX_CACHED_RATES: Final = 1000  # a throttle may compute its rate for each request


class _Throttling:
    """The request limiter of all throttles of this process, opened at the first request from the setting TIDEGATE."""

    def __init__(self) -> None:
        self.lock: threading.Lock = fork_safe(threading.Lock())
        self._opened: tuple[RequestLimiter, OnStoreError] | None = None
        self._limiters: dict[Policy, Limiter] = {}
        self._warned = False

    def open(self) -> tuple[RequestLimiter, OnStoreError]:
        """Return the request limiter, and what decides while the store is unavailable."""
        return self._opened or self._open()

    @locked
    def _open(self) -> tuple[RequestLimiter, OnStoreError]:
        if self._opened is None:
            options = dict(getattr(settings, SETTING_NAME, None) or {})
            unknown = sorted(options.keys() - set(OPTION_NAMES))
            if unknown:
                raise ConfigError(
                    f"unknown option {unknown[0]!r}: expected {', '.join(OPTION_NAMES)}", field=SETTING_NAME
                )
            on_store_error: OnStoreError = options.pop("on_store_error", "local")
            no_categories = {"defaults": False, "unmatched": None}
            self._opened = RequestLimiter(no_categories, **options), on_store_error
        return self._opened

    def limiter(self, policy: Policy, now: float | None) -> Limiter:
        """Return the limiter of a policy; `now` replaces the time of the store."""
        request_limiter = self.open()[0]
        if now is not None:
            return Limiter(policy, store=request_limiter.store, clock=ManualClock(start=now))
        found = self._limiters.get(policy)
        if found is None or found.store is not request_limiter.store:
            if len(self._limiters) >= MAX_CACHED_RATES:
                self._limiters.clear()
            found = Limiter(policy, store=request_limiter.store, clock=request_limiter.own_clock)
            self._limiters[policy] = found
        return found

    def close(self, *, setting: str = SETTING_NAME, **_: object) -> None:
        """Close the store; the next request opens it again. Called if Django reports that the setting changed."""
        opened = self._opened
        if setting == SETTING_NAME and opened is not None:
            self._opened = None
            opened[0].flush()
            opened[0].opened_store.close()

    def warn_forwarded(self) -> None:
        """Log once that X-Forwarded-For is ignored."""
        if not self._warned:
            self._warned = True
            log.warning(
                "throttles ignore X-Forwarded-For, because clients can forge it: set NUM_PROXIES of REST_FRAMEWORK or "
                "trusted_proxies of TIDEGATE"
            )


_throttling: Final = _Throttling()
setting_changed.connect(_throttling.close)


class _Outcome(NamedTuple):
    """Whether a throttle allows the request; if not, the microseconds until it would (NEVER if it never would)."""

    allowed: bool
    retry: int = 0


class SimpleRateThrottle(throttling.SimpleRateThrottle):  # type: ignore[misc]  # it has no types
    """Base class of throttles: override `get_cache_key`, and set `rate`, or `scope` for a rate in the settings.

    A rate is a string such as "100/day" or "10/1m token_bucket burst=20", a Limit, or a list of these; None means no
    limit. Throttles with the same scope share the count of each limit that has the same name (by default, its period).
    """

    rate: OneOrMoreLimits | None
    _asks: list[Ask] | None = None  # set while another throttle collects the asks of this one
    _outcome: _Outcome = _Outcome(allowed=True)
    _is_unknown: bool = False  # the key of the request is that of clients without an address, which are not limited

    @property
    def THROTTLE_RATES(self) -> Mapping[str, OneOrMoreLimits | None]:  # noqa: N802 - the name in REST Framework
        """The rates of the settings; a subclass may replace them with a mapping."""
        return api_settings.DEFAULT_THROTTLE_RATES  # type: ignore[no-any-return]  # it has no types

    def parse_rate(self, rate: OneOrMoreLimits | None) -> tuple[int | None, float | None]:
        """Return the number of requests and the seconds of a rate; of its first limit, if it has several.

        If a subclass overrides this method, its throttles use the result as their only limit.
        """
        if rate is None:
            return None, None
        limit = _read_rate(self.scope, _hashable(rate))[0]
        return limit.quota, limit.length / SECOND

    def get_ident(self, request: Request) -> str:
        """Return the client's address (an IPv6 client: its network).

        Reads X-Forwarded-For only behind proxies: those of `trusted_proxies` in the setting TIDEGATE, or as many as
        `NUM_PROXIES` in the setting REST_FRAMEWORK. Requests without an address are limited together or not at all, as
        `unknown` in the setting TIDEGATE says.
        """
        identifier = _throttling.open()[0].client_identifier
        meta = request.META
        peer, forwarded = meta.get("REMOTE_ADDR"), meta.get("HTTP_X_FORWARDED_FOR")
        if not identifier.trusted and forwarded:
            proxies = api_settings.NUM_PROXIES
            if proxies is None:
                _throttling.warn_forwarded()
            elif proxies:
                node = parse_node(forwarded.split(",")[-proxies:][0])
                return address_key(node.text if node else peer, identifier.ipv6_prefix)
        found = address_key(identifier.find(peer, EnvironHeaders(meta)).address, identifier.ipv6_prefix)
        self._is_unknown = self._is_unknown or (found == UNKNOWN and identifier.allows_unknown)
        return found

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def allow_request(self, request: Request, view: APIView) -> bool:
        """Decide about a request, together with the other throttles of the view."""
        self._is_unknown = False
        cache_key = None if self.rate is None else self.get_cache_key(request, view)
        if cache_key is None or self._is_unknown:
            self._outcome = _Outcome(allowed=True)
            return True
        request_limiter, on_store_error = _throttling.open()
        key = request_limiter.client_identifier.make_key(cache_key, self.get_ident(request))
        asks = [(policy, key, policy.one) for policy in self._policies(on_store_error)]
        if self._asks is not None:
            self._asks += asks
            return True
        kept: _Outcomes = vars(request).setdefault(OUTCOMES_ATTRIBUTE, {})
        missing = [ask for ask in asks if not kept.get(_count_of(ask))]
        if missing:
            # Not the first call for this request: charge only what the first call did not include.
            unknown = kept and not any(_count_of(ask) in kept for ask in missing)
            together = _merge_asks(missing, [] if unknown else _collect_all(request, view))
            kept.update(_decide(request, together, self._time()))
        denials = [outcome.retry for ask in asks if not (outcome := kept[_count_of(ask)].pop()).allowed]
        self._outcome = _Outcome(not denials, NEVER if NEVER in denials else max(denials, default=0))
        return not denials

    def _collect_asks(self, request: Request, view: APIView) -> list[Ask]:
        """Return what `allow_request` would ask the store, without asking it."""
        asks: list[Ask] = []
        self._asks = asks
        try:
            self.allow_request(request, view)
        finally:
            self._asks = None
        return asks

    def wait(self) -> float | None:
        """Return the seconds after which this throttle allows the request; None if never, or if it allowed it."""
        return None if self._outcome.allowed or self._outcome.retry == NEVER else self._outcome.retry / SECOND

    def _policies(self, on_store_error: OnStoreError) -> tuple[Policy, ...]:
        rate = self.rate
        if type(self).parse_rate is not SimpleRateThrottle.parse_rate:
            rate = Limit(self.num_requests, self.duration, "sliding_log")
        return _make_policies(self.scope, _hashable(rate), on_store_error)

    def _time(self) -> float | None:
        """Return the time of the decision in seconds; None, the usual case: by the clock of the store."""
        if type(self).timer is not throttling.SimpleRateThrottle.timer:  # as tests of REST Framework replace it
            return float(self.timer())
        return None


class AnonRateThrottle(throttling.AnonRateThrottle, SimpleRateThrottle):  # type: ignore[misc]  # it has no types
    """Limits requests without a user, by address; the rate of the scope `anon`."""


class UserRateThrottle(throttling.UserRateThrottle, SimpleRateThrottle):  # type: ignore[misc]  # it has no types
    """Limits requests by user, or by address if they have no user; the rate of the scope `user`."""


class ScopedRateThrottle(throttling.ScopedRateThrottle, SimpleRateThrottle):  # type: ignore[misc]  # it has no types
    """Limits requests by user or address, with the rate of the view's `throttle_scope`.

    Views without a scope are not limited.
    """


# ---- all throttles of a view -----------------------------------------------------------------------------------------

_Count = tuple[str, "Key"]  # the name of the policy and the key
_Outcomes = dict[_Count, list[_Outcome]]  # one outcome for each call of `allow_request` that follows


def _count_of(ask: Ask) -> _Count:
    policy, key, _ = ask
    return policy.name, key


def _collect_all(request: Request, view: APIView) -> list[Ask]:
    """Return the asks of all throttles of a view that are subclasses of SimpleRateThrottle."""
    throttles = view.get_throttles() if hasattr(view, "get_throttles") else ()
    return [
        ask
        for throttle in throttles
        if isinstance(throttle, SimpleRateThrottle)
        for ask in throttle._collect_asks(request, view)  # noqa: SLF001 - of the class above
    ]


def _merge_asks(own: list[Ask], collected: list[Ask]) -> dict[_Count, tuple[Ask, int]]:
    """Return each ask once, with how often it occurs; the caller's own asks are usually among those collected.

    Throttles that share a count charge it once.
    """
    merged: dict[_Count, tuple[Ask, int]] = {}
    known = {_count_of(ask) for ask in collected}
    for ask in (*collected, *(ask for ask in own if _count_of(ask) not in known)):
        policy, _, _ = ask
        first, times = merged.get(_count_of(ask), (ask, 0))
        if first[0] != policy:
            scope, limits = policy.name.split("/")[1], f"{first[0].limits[0]} and {policy.limits[0]}"
            raise ImproperlyConfigured(
                f"two throttles of a view have the scope {scope!r} and the limits {limits}, which would share one "
                "count: use another scope, or name a limit as in '10/1m name=burst'"
            )
        merged[_count_of(ask)] = first, times + 1
    return merged


def _decide(request: Request, together: dict[_Count, tuple[Ask, int]], now: float | None) -> _Outcomes:
    """Decide about all asks together, as about other limits of a request."""
    request_limiter, mapping = _throttling.open()[0], FRAMEWORK.mapping(request)
    request_state: RequestState | None = mapping.get(STATE_KEY)
    if request_state is not None and request_state.denied is not None:  # by limits of the view, which answers it
        return {count: [_Outcome(allowed=True)] * times for count, (_, times) in together.items()}
    charges = [
        RequestCharge(_throttling.limiter(policy, now), key, 1, UNRECORDED, request_limiter)
        for (policy, key, _), _ in together.values()
    ]
    result = run(decide_flow(charges), perform)
    result.record(request.method, request.path)
    if request_state is not None:
        run(request_state.keep_flow(result), perform)
    denied = {(each.charge.policy.name, each.charge.key): each.decision.retry for each in result.denials}
    return {
        count: [_Outcome(count not in denied, denied.get(count, 0))] * times for count, (_, times) in together.items()
    }


# ---- rates -----------------------------------------------------------------------------------------------------------


def _hashable(rate: Any) -> Any:  # noqa: ANN401 - see SimpleRateThrottle
    return tuple(rate) if isinstance(rate, list) else rate


@lru_cache(MAX_CACHED_RATES)
def _read_rate(scope: str | None, rate: Any) -> tuple[Limit, ...]:  # noqa: ANN401 - see SimpleRateThrottle
    try:
        return read_exact_limits(rate)
    except ConfigError as error:
        raise ConfigError(str(error), field=f"rate of scope {scope!r}") from None


@lru_cache(MAX_CACHED_RATES)
def _make_policies(scope: str | None, rate: Any, on_store_error: OnStoreError) -> tuple[Policy, ...]:  # noqa: ANN401 - see SimpleRateThrottle
    """Make one policy for each limit of a rate, so that scope and name of the limit identify a count."""
    limits = _read_rate(scope, rate)
    return tuple(
        Policy(f"drf/{join_key(scope or '')}/{limit.name}", (limit,), on_store_error=on_store_error) for limit in limits
    )
