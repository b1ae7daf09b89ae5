"""Limits for the requests that an application RECEIVES. Requests over the limit are denied; nothing sleeps.

asgi, wsgi                          RateLimitMiddleware, for whole applications
starlette, fastapi, flask, django   limit(…), for single routes
functions                           limit(…), for plain functions
"""

from tidegate.inbound.client.address import AddressSet, Header, Headers, TrustedProxies, address_key, client_address
from tidegate.inbound.client.request import KeyOf, Request, by_address, by_api_key, by_header
from tidegate.inbound.limiting.category_limiter import Counts
from tidegate.inbound.limiting.options import OnMessage, Options, Unknown
from tidegate.inbound.limiting.route_limit import Limits, LimitsOf
from tidegate.inbound.responses.response import Denying, Response

__all__ = [
    "AddressSet",
    "Counts",
    "Denying",
    "Header",
    "Headers",
    "KeyOf",
    "Limits",
    "LimitsOf",
    "OnMessage",
    "Options",
    "Request",
    "Response",
    "TrustedProxies",
    "Unknown",
    "address_key",
    "by_address",
    "by_api_key",
    "by_header",
    "client_address",
]
