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
from tidegate.outbound.providers.provider import EndpointCost, KeyLocation, Learn, Provider, QuotaScope, Retries
from tidegate.outbound.providers.registry import Permissions, Providers
from tidegate.outbound.providers.secret import Secret
from tidegate.outbound.quota.exchange import OutboundRequest, RequestKeywords, RequestOutcome, request_options
from tidegate.outbound.quota.gate import AsyncGate, Gate
from tidegate.outbound.quota.gate_options import CommonGateOptions, GateOptions
from tidegate.outbound.quota.pending_charge import AsyncPendingCharge, PendingCharge

__all__ = [
    "AsyncGate",
    "AsyncPendingCharge",
    "CommonGateOptions",
    "EndpointCost",
    "Gate",
    "GateOptions",
    "KeyLocation",
    "Learn",
    "OutboundRequest",
    "PendingCharge",
    "Permissions",
    "Provider",
    "Providers",
    "QuotaScope",
    "RequestKeywords",
    "RequestOutcome",
    "Retries",
    "Secret",
    "host_of",
    "request_options",
]
