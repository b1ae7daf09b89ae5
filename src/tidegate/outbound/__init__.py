"""Outgoing requests: providers with quotas, client adapters that enforce them, and sources fetched on a schedule.

providers/     providers: YAML files, lookup by URL, secrets, profiles of language models
profiles/      the profiles that are part of the package, as YAML
quota/         how a request is charged to its provider's quota: Gate, accounts, charges, token usage
capacity/      learns a provider's capacity from its responses, and shares it between processes
adapters/      logic shared by the adapters of several client libraries
httpx.py       adapter for httpx
httpx2.py      adapter for httpx2, the library of the current SDKs of OpenAI, Anthropic, Google and Mistral
requests.py    adapter for requests
aiohttp.py     adapter for aiohttp
explain.py     which limits apply to a request, and why
sources/       URLs fetched on a schedule: scheduler, workers, service
"""

from tidegate.outbound._adapters.denials import find_denied
from tidegate.outbound._providers.hosts import host_of
from tidegate.outbound._providers.pool import Ceiling, CeilingScope, Member, Pick, Pool
from tidegate.outbound._providers.prices import ModelPrice, Prices
from tidegate.outbound._providers.provider import (
    EndpointCost,
    KeyLocation,
    Learn,
    ModelLimits,
    OutputReserve,
    Provider,
    QuotaScope,
    Retries,
)
from tidegate.outbound._providers.registry import Permissions, Providers
from tidegate.outbound._providers.secret import Secret
from tidegate.outbound._quota.exchange import (
    CallEstimate,
    OutboundRequest,
    RequestKeywords,
    RequestOutcome,
    request_options,
)
from tidegate.outbound._quota.gate import AsyncGate, Gate
from tidegate.outbound._quota.gate_options import CommonGateOptions, GateOptions
from tidegate.outbound._quota.pending_charge import AsyncPendingCharge, PendingCharge
from tidegate.outbound._quota.unbounded import UnboundedCost

__all__ = [
    "AsyncGate",
    "AsyncPendingCharge",
    "CallEstimate",
    "Ceiling",
    "CeilingScope",
    "CommonGateOptions",
    "EndpointCost",
    "Gate",
    "GateOptions",
    "KeyLocation",
    "Learn",
    "Member",
    "ModelLimits",
    "ModelPrice",
    "OutboundRequest",
    "OutputReserve",
    "PendingCharge",
    "Permissions",
    "Pick",
    "Pool",
    "Prices",
    "Provider",
    "Providers",
    "QuotaScope",
    "RequestKeywords",
    "RequestOutcome",
    "Retries",
    "Secret",
    "UnboundedCost",
    "find_denied",
    "host_of",
    "request_options",
]
