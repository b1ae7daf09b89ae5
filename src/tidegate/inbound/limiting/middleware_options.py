"""The type of the keyword options of the middlewares."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tidegate.core.decision import Decision
    from tidegate.inbound.client.request import KeyOf, Request
    from tidegate.inbound.limiting.category_limiter import Counts
    from tidegate.inbound.limiting.options import OnMessage, Unknown
    from tidegate.inbound.limiting.plan_limiters import PlanOf
    from tidegate.inbound.limiting.route_limit import RouteLimit
    from tidegate.inbound.responses.response import DenialHandler
    from tidegate.inbound.rules.extra_limits import Limits
    from tidegate.inbound.rules.model import ResetTime
    from tidegate.observe import Observer
    from tidegate.stores.lease import Lease


class Options(TypedDict, total=False):
    """The keyword arguments of both middlewares; docs/howto/inbound.md has the table."""

    key: KeyOf | None  # returns the key of a request; None: limit by address
    plan: PlanOf | None  # returns the plan of a request; None: the category's own limits
    ipv4_prefix: int  # bits of an IPv4 address that identify a client
    ipv6_prefix: int  # bits of an IPv6 address that identify a client
    unknown: Unknown  # whether requests without an address are limited
    lease: bool | float | Lease | None  # lease permits from a shared store
    denied: DenialHandler | None  # returns a custom response to denied requests
    html: bool | str | Callable[[Request, Decision], str | bytes] | None  # a page for browsers whose request is denied
    exempt_when: Callable[[Request], bool] | None  # returns whether a request is exempt from all limits
    application_limits: Limits | RouteLimit | None  # limits of each client for all routes together
    default_limits: Limits | RouteLimit | None  # limits of each client for each route without limits of its own
    # Block clients after this many denials per period, such as "20/1m"; several rules: {"20/1m": "10m", …}.
    block_after: str | Mapping[str, str] | None
    block_for: str | None  # how long clients are blocked
    reset_time: ResetTime  # what X-RateLimit-Reset shows: when all permits are available, or the next
    expose: bool  # let scripts from other origins read the headers
    count: Mapping[str, Counts] | None  # by category: whether a response counts
    root_path: str  # a prefix that the application removes from paths itself
    on_message: OnMessage  # what to do with a websocket message over the limit
    admin: str | bool  # the path of the admin endpoint
    admin_token: str | None  # allows access to the admin endpoint from any address
    observer: Observer | None  # called for every decision
    log_every: int  # log every n-th check; 0: none
    log_burst: int  # denials logged per category and second
    reload: float  # seconds between checks of the file
