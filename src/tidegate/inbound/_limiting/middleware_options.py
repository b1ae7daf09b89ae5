"""The type of the keyword options of the middlewares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.inbound._limiting.options import LimitsOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.inbound._limiting.category_limiter import Counts
    from tidegate.inbound._limiting.options import OnMessage
    from tidegate.inbound._limiting.plan_limiters import PlanOf
    from tidegate.inbound._limiting.route_limit import RouteLimit
    from tidegate.inbound._rules.extra_limits import OneOrMoreLimits


class Options(LimitsOptions, total=False):
    """The keyword arguments of the middlewares."""

    plan: PlanOf | None  # returns the plan of a request; None: the category's own limits
    application_limits: OneOrMoreLimits | RouteLimit | None  # limits of each client for all routes together
    default_limits: OneOrMoreLimits | RouteLimit | None  # the same for each route without limits of its own
    count: Mapping[str, Counts] | None  # by category: whether a response counts
    root_path: str  # a prefix that the application removes from paths itself
    on_message: OnMessage  # what to do with a websocket message over the limit
    admin: str | bool  # the path of the admin endpoint
    admin_token: str | None  # allows access to the admin endpoint from any address
    reload: float  # seconds between checks of the file
