"""JSON schemas of the files that the service does not read itself, for editors.

The readers check more than these schemas, except those of provider and price files (see `provider_schema`).
"""

from __future__ import annotations

from typing import Any, Final, get_args

from tidegate._cli.provider_schema import prices_object, provider_object
from tidegate._policy.model import Mode, OnStoreError
from tidegate._policy.setting_values import PERMISSIONS
from tidegate.budget._settings.file import FIELDS as BUDGET_FIELDS
from tidegate.budget._settings.file import TIERS
from tidegate.budget._settings.model import SETTINGS as BUDGET_SETTINGS
from tidegate.budget._settings.values import QUOTAS
from tidegate.core._algorithms import ALGORITHMS
from tidegate.egress._settings import CALLER_FIELDS, EGRESS_FIELDS
from tidegate.inbound._rules.config import CATEGORY_FIELDS, ENDPOINT_FIELDS, SECTION_FIELDS
from tidegate.inbound._rules.config import LIMIT_FIELDS as INBOUND_LIMIT_FIELDS
from tidegate.inbound._rules.model import RESET_TIMES
from tidegate.outbound._providers.file import LIMIT_FIELDS
from tidegate.outbound._providers.profile import Charges, FailedCost, OutputCounted
from tidegate.outbound._providers.profile_file import PROFILE_FIELDS
from tidegate.spending._settings import SPENDING_SCHEMA

JsonSchema = dict[str, Any]

# As in `outbound.sources.source`, whose package needs an extra; a test compares them.
SOURCE_FIELDS: Final = (
    "name", "url", "interval", "cron", "timezone", "method", "headers", "body", "priority", "timeout", "max_bytes",
    "retries", "to",
)  # fmt: skip
STRING: Final[JsonSchema] = {"type": "string", "minLength": 1}
NUMBER: Final[JsonSchema] = {"type": "number"}
BOOLEAN: Final[JsonSchema] = {"type": "boolean"}
QUOTA: Final[JsonSchema] = {"type": "integer", "minimum": 1}
COUNT: Final[JsonSchema] = {"type": "integer", "minimum": 0}
PERIOD: Final[JsonSchema] = {"type": ["string", "number"], "description": "30s, 5m, 1h, 1d, …"}
COST: Final[JsonSchema] = {"anyOf": [COUNT, {"type": "object", "additionalProperties": COUNT}]}
STRINGS: Final[JsonSchema] = {"anyOf": [STRING, {"type": "array", "items": STRING}]}
# Settings that mean the same in several files.
COMMON: Final[dict[str, JsonSchema]] = {
    "algorithm": {"enum": list(ALGORITHMS)},
    "burst": COUNT,
    "cost": COST,
    "limit": QUOTA,
    "methods": STRINGS,
    "mode": {"enum": list(get_args(Mode))},
    "name": STRING,
    "on_store_error": {"enum": list(get_args(OnStoreError))},
    "path": STRING,
    "period": PERIOD,
    "reset_day": {"type": "integer", "minimum": 1, "maximum": 31},
    "reset_hour": {"type": "integer", "minimum": 0, "maximum": 23},
    "timezone": STRING,
    "unit": STRING,
    "window": PERIOD,
    "window_minutes": {"type": "number", "exclusiveMinimum": 0},
}


def closed(fields: tuple[str, ...], own: dict[str, JsonSchema] | None = None, **more: object) -> JsonSchema:
    """Describe an object that has only these fields; one that `own` and COMMON do not describe can be anything."""
    known = COMMON | (own or {})
    properties = {field: known.get(field, {}) for field in fields}
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def document(title: str, described: JsonSchema) -> JsonSchema:
    """Add the head of a schema."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"tidegate {title}", **described}


def limits_of(fields: tuple[str, ...], own: dict[str, JsonSchema] | None = None) -> JsonSchema:
    """Describe one limit or several: strings such as 60/1m, or objects."""
    one: JsonSchema = {"anyOf": [STRING, closed((*fields, "name"), own)]}
    return {"anyOf": [*one["anyOf"], {"type": "array", "items": one, "minItems": 1}]}


def provider_schema() -> JsonSchema:
    """Describe a provider file."""
    return document("provider", provider_object())


def prices_schema() -> JsonSchema:
    """Describe a file of prices."""
    return document("prices", prices_object())


def profile_schema() -> JsonSchema:
    """Describe a profile."""
    own: dict[str, JsonSchema] = {
        "charges": {"enum": list(get_args(Charges))},
        "output_counted": {"enum": list(get_args(OutputCounted))},
        "failed": {"enum": list(get_args(FailedCost))},
        "endpoints": {"type": "array", "items": {"type": "object", "required": ["path"]}},
        "dropped": {"anyOf": [STRING, {"type": "array", "items": STRING}]},
        "domains": {"anyOf": [STRING, {"type": "array", "items": STRING}]},
    }
    return document("profile", closed(PROFILE_FIELDS, own))


def source_schema() -> JsonSchema:
    """Describe a source file."""
    own: dict[str, JsonSchema] = {
        "url": {**STRING, "pattern": "^[Hh][Tt][Tt][Pp][Ss]?://"},
        "interval": {**PERIOD, "description": "an hour by default"},
        "cron": STRING,
        "method": STRING,
        "headers": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
        "body": {"type": ["string", "number"]},
        "priority": {"type": "integer", "minimum": -100, "maximum": 100},
        "timeout": PERIOD,
        "max_bytes": QUOTA,
        "retries": {"type": "integer", "minimum": 0, "maximum": 100},
        "to": closed(
            ("files", "sqlite", "webhook"),
            {"files": STRING, "sqlite": STRING, "webhook": STRING},
            minProperties=1,
            maxProperties=1,
        ),
    }
    return document("source", closed(SOURCE_FIELDS, own, required=["name", "url"]))


def inbound_schema() -> JsonSchema:
    """Describe the configuration of a middleware: the section `rate_limiting` of the application's file."""
    statuses: JsonSchema = {"anyOf": [{"type": ["string", "integer"]}, {"type": "array"}]}
    endpoint: JsonSchema = {"anyOf": [STRING, closed(ENDPOINT_FIELDS, required=["path"])]}
    zero: dict[str, JsonSchema] = {"limit": COUNT}  # a limit of 0 is closed
    limits = limits_of(INBOUND_LIMIT_FIELDS, zero)
    plan = closed((*INBOUND_LIMIT_FIELDS, "limits"), {**zero, "limits": limits})
    category = closed(
        CATEGORY_FIELDS,
        {
            **zero,
            "limits": limits,
            "plans": {"type": "object", "additionalProperties": {"anyOf": [plan, limits]}},
            "endpoints": {"anyOf": [endpoint, {"type": "array", "items": endpoint}]},
            "count": statuses,
            "refund": statuses,
            "penalty": {"type": "object", "additionalProperties": QUOTA},
        },
    )
    own: dict[str, JsonSchema] = {
        "enabled": BOOLEAN,
        "categories": {"type": "object", "additionalProperties": {"anyOf": [category, {"type": "null"}]}},
        "unmatched": {"type": ["string", "null"]},
        "defaults": BOOLEAN,
        **dict.fromkeys(("exempt", "exempt_methods", "exempt_clients", "blocked_clients"), STRINGS),
        "cleanup_interval_minutes": {"type": "number", "exclusiveMinimum": 0},
        "max_entries": QUOTA,
        "ipv4_prefix": {"type": "integer", "minimum": 1, "maximum": 32},
        "ipv6_prefix": {"type": "integer", "minimum": 1, "maximum": 128},
        "block_after": {"anyOf": [STRING, {"type": "object", "additionalProperties": STRING}]},
        "block_for": STRING,
        "reset_time": {"enum": list(RESET_TIMES)},
        "application_limits": limits,
        "default_limits": limits,
    }
    section = {"anyOf": [closed(SECTION_FIELDS, own), {"type": "null"}]}
    return document("inbound", {"type": "object", "properties": {"rate_limiting": section}})


def egress_schema() -> JsonSchema:
    """Describe an egress gateway file."""
    caller = closed(
        CALLER_FIELDS,
        {
            "token": STRINGS,
            "token_file": STRING,
            "providers": STRINGS,
            "limits": limits_of((*LIMIT_FIELDS, "name")),
            "max_priority": COUNT,
            "connections": QUOTA,
            "tags": STRINGS,
            "runs": BOOLEAN,
        },
    )
    periods = ("timeout", "connect_timeout", "first_byte_timeout", "whole_timeout")
    own: dict[str, JsonSchema] = {
        "listen": {"type": ["string", "integer"]},
        **dict.fromkeys(("store", "bus", "metrics_token", "access_log"), STRING),
        **dict.fromkeys(("providers", "provider_dirs", "allow_private", "run_secrets"), STRINGS),
        "permissions": {"enum": list(PERMISSIONS)},
        "spending": SPENDING_SCHEMA,
        "callers": {"type": "object", "additionalProperties": caller},
        **dict.fromkeys(("open", "telemetry"), BOOLEAN),
        "upstreams": {"type": "object", "additionalProperties": STRING},
        "tunnels": {"enum": ["allow", "refuse"]},
        **dict.fromkeys((*periods, "stop_within"), PERIOD),
        **dict.fromkeys(("max_body", "max_metered_body", "max_held_bodies", "max_header", "max_connections"), QUOTA),
    }
    return document("egress", closed(EGRESS_FIELDS, own))


def budget_schema() -> JsonSchema:
    """Describe a task budget file."""
    own: dict[str, JsonSchema] = {name: BUDGET_SETTINGS[name].schema for name in BUDGET_FIELDS if name != TIERS}
    return document("budget", closed(BUDGET_FIELDS, {TIERS: dict(QUOTAS.schema), **own}))
