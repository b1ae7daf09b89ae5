"""From the configuration files of Envoy's own rate limit service to ours.

Its trees of descriptors are ours, so most of a file stays as it is. What we have no use for is left out, with a remark
that says so; what would change who is limited is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import yaml

from tidegate.policy.settings import Setting, load
from tidegate.service.domains import PERIODS
from tidegate.service.reading import scalar
from tidegate.service.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DESCRIPTOR: Final = (
    *("key", "value", "rate_limit", "descriptors", "shadow_mode", "detailed_metric", "share_threshold"),
    *("quota_mode", "value_to_metric"),
)
RATE_LIMIT: Final = ("unit", "requests_per_unit", "unlimited", "name", "replaces", "unit_multiplier")
WITHOUT_EFFECT: Final = {
    "detailed_metric": "metrics here have one label for each limit",
    "value_to_metric": "metrics here have one label for each limit",
}


def convert(files: Sequence[str | Path]) -> tuple[str, list[str]]:
    """Convert files, one domain each; gives our YAML, and remarks on what was left out."""
    remarks: list[str] = []
    domains = []
    for file in files:
        fields = load(file).fields("domain", "descriptors")
        domain: dict[str, Any] = {}
        if "domain" in fields:
            domain["domain"] = fields["domain"].text()
        if "descriptors" in fields and not fields["descriptors"].is_nothing:
            domain["descriptors"] = [_descriptor(entry, remarks) for entry in fields["descriptors"].items()]
        domains.append(domain)
    load_settings({"domains": domains})  # what we would refuse is refused now
    return yaml.safe_dump({"domains": domains}, sort_keys=False, allow_unicode=True), remarks


def _descriptor(entry: Setting, remarks: list[str]) -> dict[str, Any]:
    fields = entry.fields(*DESCRIPTOR)
    found: dict[str, Any] = {name: scalar(fields[name]) for name in ("key", "value") if name in fields}
    if "quota_mode" in fields and fields["quota_mode"].flag():
        raise fields["quota_mode"].error("has no counterpart here: limit in the policy itself, or leave it out")
    for name, why in WITHOUT_EFFECT.items():
        if name in fields:
            remarks.append(f"{fields[name].error(f'left out: {why}')}")
    for name in ("shadow_mode", "share_threshold"):
        if name in fields and fields[name].flag():
            found[name] = True
    if "rate_limit" in fields and not fields["rate_limit"].is_nothing:
        found["rate_limit"] = _rate_limit(fields["rate_limit"])
    if "descriptors" in fields and not fields["descriptors"].is_nothing:
        found["descriptors"] = [_descriptor(child, remarks) for child in fields["descriptors"].items()]
    if "rate_limit" not in found and "descriptors" not in found:
        remarks.append(f"{entry.error('has no limit, which Envoy takes as a name for metrics: kept as unlimited')}")
        found["rate_limit"] = {"unlimited": True}
    return found


def _rate_limit(setting: Setting) -> dict[str, Any]:
    fields = setting.fields(*RATE_LIMIT)
    if "replaces" in fields:
        raise fields["replaces"].error("has no counterpart here: use nested descriptors, of which the deepest applies")
    if "unit_multiplier" in fields and fields["unit_multiplier"].whole() != 1:
        raise fields["unit_multiplier"].error(
            "has no counterpart here: write limits such as 10/5m in place of rate_limit"
        )
    if "unlimited" in fields and fields["unlimited"].flag():
        return {"unlimited": True}
    found: dict[str, Any] = {}
    if "unit" in fields:
        unit = fields["unit"].text().lower()
        found["unit"] = unit if unit in PERIODS else fields["unit"].text()
    if "requests_per_unit" in fields:
        found["requests_per_unit"] = fields["requests_per_unit"].whole(0)
        if not found["requests_per_unit"]:
            raise fields["requests_per_unit"].error(
                "0 blocks everything, which is no limit: let Envoy's routes do that"
            )
    if "name" in fields:
        found["name"] = fields["name"].text()
    return found
