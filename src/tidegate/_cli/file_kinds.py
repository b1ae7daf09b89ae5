"""The kinds of configuration files: how each is recognised, checked and described, and its JSON schema."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._cli.file_schemas import (
    SOURCE_FIELDS,
    budget_schema,
    egress_schema,
    inbound_schema,
    prices_schema,
    profile_schema,
    provider_schema,
    source_schema,
)
from tidegate._cli.output import counted
from tidegate._policy.config_value import load
from tidegate._runtime.suggestions import closest
from tidegate.budget._settings.file import FIELDS as BUDGET_FIELDS
from tidegate.budget._settings.file import read_config
from tidegate.budget._settings.model import BudgetSettings
from tidegate.budget._settings.tiers import PERIODS
from tidegate.budget._storage.settlements import check_storage, locate_storage_errors
from tidegate.egress._settings import EGRESS_FIELDS, load_egress
from tidegate.inbound._rules.config import SECTION_FIELDS, load_rules
from tidegate.outbound._providers.file import LIMIT_FIELDS, PROVIDER_FIELDS, read_provider
from tidegate.outbound._providers.prices import PRICES_FIELDS, TOKEN_PRICES, read_prices
from tidegate.outbound._providers.profile_file import NO_PROFILES, PROFILE_FIELDS, read_profile
from tidegate.service._config.schema import schema as service_schema
from tidegate.service._config.settings import OPTIONS, SECTIONS, load_settings
from tidegate.spending._report import format_amount

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tidegate.service._config.settings import Settings

SIMILARITIES: Final = (1.0, 0.8, 0.6)  # of settings that a file has to those of a kind: equal ones decide first
INBOUND_SECTION: Final = "rate_limiting"  # in a file that may have other sections, for the application


class FileKind(NamedTuple):
    """A kind of file. `check` raises ConfigError, or returns a description, and more fields for `--json`."""

    title: str
    fields: frozenset[str]
    check: Callable[[str], tuple[list[str], dict[str, object]]]
    schema: Callable[[], dict[str, Any]]


def check_service(file: str) -> tuple[list[str], dict[str, object]]:
    """Check a service file."""
    settings = load_settings(file, environment=os.environ)  # as `tidegate start` reads it
    names = {"policies": sorted(settings.policies.entries), "domains": sorted(settings.policies.domains)}
    return describe_policies(settings), names  # type: ignore[return-value]  # lists are objects


def describe_policies(settings: Settings) -> list[str]:
    """Describe the policies and domains of a service."""
    lines = []
    for name, entry in settings.policies.entries.items():
        limits = ", ".join(map(str, entry.policy.limits))
        share = "" if entry.rollout >= 100 else f", enforced for {entry.rollout:g} % of keys"  # noqa: PLR2004 - percent
        mode = ", shadow" if entry.policy.mode == "shadow" else share
        more = f", {counted(len(entry.overrides), 'override')}" if entry.overrides else ""
        lines.append(f"policy {name}: {limits}{mode}{more}")
    domains = settings.policies.domains.values()
    counts = ((domain.name, sum(1 for _ in domain.variants())) for domain in domains)
    return [*lines, *(f"domain {name}: {counted(count, 'limit')}" for name, count in counts)] or ["no policies"]


def check_provider(file: str, profiles: Mapping[str, Path] = NO_PROFILES) -> tuple[list[str], dict[str, object]]:
    """Check a provider file, which may name one of these profiles."""
    provider = read_provider(file, profiles)
    lines = [f"provider {provider} for {provider.domain}"]
    if provider.api_key is not None and provider.key_location is None:
        lines.append("its api_key is never sent: set key, such as key: {header: Authorization, prefix: Bearer}")
    for member in () if provider.pool is None else provider.pool.members:
        state = ", drained" if member.drained else ""
        lines.append(f"member {member.name}: {', '.join(map(str, member.provider.limits))}{state}")
    for ceiling in provider.ceilings:
        each = f" for each {' and '.join(ceiling.per)}" if ceiling.per else ""
        lines.append(f"spending ceiling{each}: {ceiling.limit}")
    return lines, {"provider": provider.name, "domain": provider.domain, "limits": list(map(str, provider.limits))}


def check_profile(file: str) -> tuple[list[str], dict[str, object]]:
    """Check a profile."""
    profile = read_profile(file)
    counts = {unit: list(parts) for unit, parts in profile.counts.items()}
    text = "; ".join(f"{unit}: {', '.join(parts)}" for unit, parts in counts.items())
    return [f"profile {profile.name} counts {text}"], {"profile": profile.name, "counts": counts}


def check_prices(file: str) -> tuple[list[str], dict[str, object]]:
    """Check a file of prices."""
    prices = read_prices(file)
    lines = [f"prices of {prices.date} in {prices.currency}"]
    names = [*(name for name, _ in prices.models), *(["default"] if prices.default is not None else [])]
    for name, price in (*prices.models, *([("default", prices.default)] if prices.default is not None else [])):
        usual = {"cached": price.input, "cache_write": price.input, "audio": price.input, "audio_output": price.output}
        amounts = {part: getattr(price, part) for part in (*TOKEN_PRICES, "request")} | dict(price.kinds)
        listed = [
            f"{part} {format_amount(amount, price.unit)}"
            for part, amount in amounts.items()
            if amount != usual.get(part, 0)
        ]
        lines.append(f"{name}: {', '.join(listed) or 'free'}")
    if prices.default is None:
        lines.append("calls of other models are refused: there is no default")
    return lines, {"date": prices.date.isoformat(), "currency": prices.currency, "models": names}


def check_source(file: str) -> tuple[list[str], dict[str, object]]:
    """Check a source file."""
    from tidegate.outbound.sources._source import read_source  # noqa: PLC0415 - needs the extra 'sources'

    source = read_source(file)
    schedule = "at the default interval" if source.schedule is None else str(source.schedule)
    return [f"source {source.name}: fetched {schedule}"], {"source": source.name, "schedule": schedule}


def check_inbound(file: str) -> tuple[list[str], dict[str, object]]:
    """Check the configuration of the middlewares."""
    rules = load_rules(file)
    lines = [
        f"category {category.name}: {', '.join(map(str, category.policy.limits))}"
        f"{', shadow' if category.policy.mode == 'shadow' else ''}"
        for category in (*rules.categories, *rules.extra_categories)
    ]
    disabled = [] if rules.enabled else ["disabled: nothing is limited"]
    return [*disabled, *lines], {"categories": [category.name for category in rules.categories]}


def check_budget(file: str) -> tuple[list[str], dict[str, object]]:
    """Check a task budget file."""
    values = read_config(file)
    with locate_storage_errors(file=file):
        check_storage(BudgetSettings(**values | {"enabled": False}))
    tiers = {period: values[f"per_{period}"] for period in PERIODS if values.get(f"per_{period}")}
    text = ", ".join(f"{quota} per {period}" for period, quota in tiers.items()) or "no tiers"
    return [f"budget: {text}"], {"tiers": tiers}


def check_egress(file: str) -> tuple[list[str], dict[str, object]]:
    """Check an egress gateway file."""
    settings = load_egress(file)
    names = [caller.name for caller in settings.callers]
    lines = [f"egress gateway on {settings.listen}: {counted(len(names), 'caller')}"]
    lines += [f"caller {each.name}: {', '.join(map(str, each.limits)) or 'no limits'}" for each in settings.callers]
    return lines, {"callers": names}


KINDS: Final = {
    "service": FileKind(
        "a service file", frozenset({*SECTIONS, *(option.name for option in OPTIONS)}), check_service,
        service_schema,
    ),
    "budget": FileKind("a task budget file", frozenset(BUDGET_FIELDS), check_budget, budget_schema),
    "profile": FileKind("a provider profile", frozenset(PROFILE_FIELDS), check_profile, profile_schema),
    "prices": FileKind("a price file", frozenset(PRICES_FIELDS), check_prices, prices_schema),
    "source": FileKind("a source file", frozenset(SOURCE_FIELDS), check_source, source_schema),
    "provider": FileKind(
        "a provider file", frozenset({*LIMIT_FIELDS, *PROVIDER_FIELDS}), check_provider, provider_schema
    ),
    "egress": FileKind("an egress gateway file", frozenset(EGRESS_FIELDS), check_egress, egress_schema),
    "inbound": FileKind(
        "a middleware configuration", frozenset({INBOUND_SECTION, *SECTION_FIELDS}), check_inbound,
        inbound_schema,
    ),
}  # fmt: skip


def recognise(file: str) -> str:
    """Return the kind that has the most settings in common with a file, or else the most similar ones."""
    document = load(file)
    names = set() if document.is_null or not document.is_mapping else set(document.entries())
    if INBOUND_SECTION in names:
        return "inbound"

    def likeness(kind: str) -> list[int]:
        fields = KINDS[kind].fields
        return [sum(closest(name, fields, cutoff) is not None for name in names) for cutoff in SIMILARITIES]

    return max(KINDS, key=likeness)
