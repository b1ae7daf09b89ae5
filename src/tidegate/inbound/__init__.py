"""Requests we RECEIVE: who the client is, which category a request falls into; deny, never sleep.

asgi, wsgi                          RateLimitMiddleware, for whole applications
starlette, fastapi, flask, django   limit(…), for single routes; plain: for functions
"""

from tidegate.inbound.answers import Answer
from tidegate.inbound.identity import AddressSet, TrustedProxies, address_key, client_address
from tidegate.inbound.request import Request, by_address, by_api_key, by_header

__all__ = [
    "AddressSet",
    "Answer",
    "Request",
    "TrustedProxies",
    "address_key",
    "by_address",
    "by_api_key",
    "by_header",
    "client_address",
]
