"""Explains which limits of a gateway apply to a request: those of its provider, and those of its caller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate._runtime.suggestions import did_you_mean
from tidegate.errors import ConfigError
from tidegate.outbound import explain as outbound
from tidegate.outbound._providers.registry import Providers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._policy.explanation import Explanation
    from tidegate.egress._settings import EgressSettings

__all__ = ["explain_request"]


def explain_request(
    settings: EgressSettings,
    method: str,
    url: str,
    *,
    headers: Sequence[tuple[str, str]] = (),
    body: bytes | None = None,
    caller: str | None = None,
) -> Explanation:
    """Explain which limits apply to a request through this gateway, as `outbound.explain` does."""
    providers = Providers.load(settings.providers, settings.provider_dirs, permissions="ignore")
    found = outbound.explain_request(providers, method, url, headers=headers, body=body)
    callers = {each.name: each for each in settings.callers}
    if caller is None:
        if callers:
            found.notes.append(f"Callers have limits of their own; name one to add them: {', '.join(callers)}.")
    elif caller not in callers:
        known = f"expected {', '.join(callers)}" if callers else "the file has no callers"
        raise ConfigError(f"there is no caller {caller!r}: {did_you_mean(caller, callers) or known}", field="caller")
    elif callers[caller].limits:
        limits = callers[caller].limits
        cost = {limit.unit: 1 for limit in limits if limit.unit in ("requests", "concurrent-requests")}
        found.add_policy(f"caller {caller}", callers[caller].policy, cost)
        found.sort()
        if len(cost) < len(limits):
            found.notes.append(f"The limits of {caller} for tokens and money depend on the size of the request.")
    return found
