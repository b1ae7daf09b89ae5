"""Requests we RECEIVE: who the client is, which category a request falls into; deny, never sleep."""

from tidegate.inbound.identity import AddressSet, TrustedProxies, address_key, client_address

__all__ = ["AddressSet", "TrustedProxies", "address_key", "client_address"]
