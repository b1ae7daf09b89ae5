"""Requests we RECEIVE: who the client is, which category a request falls into; deny, never sleep.

asgi, wsgi                          RateLimitMiddleware, for whole applications
starlette, fastapi, flask, django   limit(…), for single routes; plain: for functions
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
