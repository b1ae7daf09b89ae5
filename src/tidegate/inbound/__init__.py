"""Limits for the requests that an application RECEIVES. Requests over the limit are denied; nothing sleeps.

asgi, wsgi                          RateLimitMiddleware, for whole applications
starlette, fastapi, flask, django   limit(…), for single routes
functions                           limit(…), for plain functions
"""

from tidegate.inbound.client.address import AddressSet, TrustedProxies, address_key, client_address
from tidegate.inbound.client.request import Request, by_address, by_api_key, by_header
from tidegate.inbound.responses.response import Response

__all__ = [
    "AddressSet",
    "Request",
    "Response",
    "TrustedProxies",
    "address_key",
    "by_address",
    "by_api_key",
    "by_header",
    "client_address",
]
