"""Outgoing requests: providers with quotas, client adapters that enforce them, and sources fetched on a schedule.

providers/     providers: YAML files, lookup by URL, secrets
quota/         how a request is charged to its provider's quota: Gate, accounts, charges, token usage
capacity/      what responses teach about a provider's capacity, and how processes share it
httpx.py       adapter for httpx
requests.py    adapter for requests
aiohttp.py     adapter for aiohttp
sources/       URLs fetched on a schedule: scheduler, workers, service
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
