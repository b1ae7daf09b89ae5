"""Requests we SEND: providers with quotas, clients that keep to them, sources that are fetched within them.

hosts.py, secret.py                    which host a URL leads to; keys that nobody sees
provider.py, reading.py, providers.py  what a provider is, its YAML file, all of them by URL
gate.py, calls.py, costs.py            the way of a request through its provider's quota
accounts.py, account.py                all quotas in use, and one of them
ticket.py, delays.py                   a charge to a quota, and when that counts at the provider
learning.py, refusals.py, retrying.py  what answers teach, what refusals teach, sending again
pressure.py, board.py                  capacity shared with others, over a bus and through the store
tokens.py                              what a call to a language model costs
httpx.py, requests.py, aiohttp.py      the clients people already use
sources/                               what is fetched on a schedule: scheduler, workers, a service
"""

from tidegate.outbound.providers.hosts import host_of
from tidegate.outbound.providers.provider import EndpointCost, KeyLocation, Provider, Retries
from tidegate.outbound.providers.registry import Providers
from tidegate.outbound.quota.exchange import OutboundRequest, RequestOutcome, request_options
from tidegate.outbound.quota.gate import AsyncGate, Gate

__all__ = [
    "AsyncGate",
    "EndpointCost",
    "Gate",
    "KeyLocation",
    "OutboundRequest",
    "Provider",
    "Providers",
    "RequestOutcome",
    "Retries",
    "host_of",
    "request_options",
]
