"""Limits for the requests that an application receives. Requests over the limit are denied; nothing waits.

asgi, wsgi, aiohttp                 RateLimitMiddleware, for whole applications
starlette, fastapi, flask, django   limit(…), for single routes; also in aiohttp
drf                                 throttle classes for Django REST Framework
functions                           limit(…), for plain functions
explain                             explain_request(…): which limits apply to a request, and why
testing                             limits_disabled(…) and reset_limits(…), for the tests of an application
"""

from tidegate.inbound._client.address import AddressSet, Header, Headers, TrustedProxies, address_key, client_address
from tidegate.inbound._client.request import FrameworkRequest, KeyOf, Request, by_address, by_api_key, by_header
from tidegate.inbound._limiting.category_limiter import Counts
from tidegate.inbound._limiting.limited_call import LimitedBlock
from tidegate.inbound._limiting.native_requests import common_request, current_limits, limited
from tidegate.inbound._limiting.options import LimitsOptions, OnMessage, Options, Unknown
from tidegate.inbound._limiting.plan_limiters import PlanOf
from tidegate.inbound._limiting.route_limit import LimitsOf, OneOrMoreLimits, RouteLimit, RouteOptions
from tidegate.inbound._limiting.standalone import BaseLimits
from tidegate.inbound._responses.exceeded import RateLimitExceeded
from tidegate.inbound._responses.response import BlockedDecision, DenialHandler, Response
from tidegate.inbound._rules.model import ResetTime

__all__ = [
    "AddressSet",
    "BaseLimits",
    "BlockedDecision",
    "Counts",
    "DenialHandler",
    "FrameworkRequest",
    "Header",
    "Headers",
    "KeyOf",
    "LimitedBlock",
    "LimitsOf",
    "LimitsOptions",
    "OnMessage",
    "OneOrMoreLimits",
    "Options",
    "PlanOf",
    "RateLimitExceeded",
    "Request",
    "ResetTime",
    "Response",
    "RouteLimit",
    "RouteOptions",
    "TrustedProxies",
    "Unknown",
    "address_key",
    "by_address",
    "by_api_key",
    "by_header",
    "client_address",
    "common_request",
    "current_limits",
    "limited",
]
