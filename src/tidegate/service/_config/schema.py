"""The JSON schema of the service's file, for editors: names, types and descriptions of all settings.

# yaml-language-server: $schema=service.schema.json      (written by: tidegate validate --schema)
"""

from __future__ import annotations

from typing import Any, Final, get_args

from tidegate._policy.model import Mode, OnStoreError
from tidegate.core._algorithms import ALGORITHMS
from tidegate.service._config.settings import OPTIONS
from tidegate.service._decisions.descriptors import UNIT_PERIODS

STRING: Final[dict[str, Any]] = {"type": "string", "minLength": 1}
INTEGER: Final[dict[str, Any]] = {"type": "integer", "minimum": 1}
LIMIT_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["quota", "period"],
    "properties": {
        "quota": INTEGER,
        "period": {"type": ["string", "number"], "description": "1m, 1h, 1d, month, …"},
        "algorithm": {"enum": list(ALGORITHMS)},
        "unit": STRING,
        "burst": INTEGER,
        "name": STRING,
        "timezone": STRING,
        "reset_day": INTEGER,
        "reset_hour": {"type": "integer", "minimum": 0, "maximum": 23},
    },
}
ONE_LIMIT: Final = {"anyOf": [{"type": "string", "description": "as in 60/1m"}, {"$ref": "#/$defs/limit"}]}
LIMITS_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [*ONE_LIMIT["anyOf"], {"type": "array", "minItems": 1, "items": ONE_LIMIT}]
}
REPLACES_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {"name": STRING},
}
ON_STORE_ERROR_SCHEMA: Final[dict[str, Any]] = {
    "enum": list(get_args(OnStoreError)),
    "description": "the decision while the store is unavailable",
}


def schema() -> dict[str, Any]:
    """Build the schema."""
    settings = {option.name: {**option.kind.schema, "description": option.help} for option in OPTIONS}
    limits = {"$ref": "#/$defs/limits"}
    override = {
        "type": "object",
        "additionalProperties": False,
        "required": ["key", "limits"],
        "properties": {
            "key": {
                "anyOf": [STRING, {"type": "array", "minItems": 1, "items": STRING}],
                "description": "* matches any characters",
            },
            "limits": limits,
        },
    }
    policy = {
        "type": "object",
        "additionalProperties": False,
        "required": ["limits"],
        "properties": {
            "limits": limits,
            "mode": {"enum": list(get_args(Mode))},
            "rollout": {
                "type": ["string", "number"],
                "description": "percentage of keys for which the policy is enforced",
            },
            "on_store_error": ON_STORE_ERROR_SCHEMA,
            "overrides": {"type": "array", "items": override},
        },
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tidegate service",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **settings,
            "policies": {"type": "object", "additionalProperties": {"anyOf": [limits, policy]}},
            "domains": {"type": "array", "items": {"$ref": "#/$defs/domain"}},
        },
        "$defs": {
            "limit": LIMIT_SCHEMA,
            "limits": LIMITS_SCHEMA,
            "domain": _domain(),
            "descriptor": _descriptor(limits),
        },
    }


def _domain() -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["domain"],
        "properties": {
            "domain": STRING,
            "descriptors": {"type": "array", "items": {"$ref": "#/$defs/descriptor"}},
        },
    }


def _descriptor(limits: dict[str, str]) -> dict[str, Any]:
    rate_limit = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "unit": {"enum": [*UNIT_PERIODS, *(unit.upper() for unit in UNIT_PERIODS)]},
            "requests_per_unit": INTEGER,
            "algorithm": {"enum": list(ALGORITHMS)},
            "name": STRING,
            "unlimited": {"type": "boolean"},
            "replaces": {"type": "array", "items": REPLACES_SCHEMA},
        },
    }
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["key"],
        "properties": {
            "key": STRING,
            "value": {"type": ["string", "number", "boolean"], "description": "a * at the end matches any characters"},
            "rate_limit": rate_limit,
            "limits": limits,
            "shadow_mode": {"type": "boolean"},
            "share_threshold": {
                "type": "boolean",
                "description": "all values that the wildcard matches share one count",
            },
            "on_store_error": ON_STORE_ERROR_SCHEMA,
            "detailed_metric": {
                "type": "boolean",
                "description": "a setting of Envoy's own service; has no effect here",
            },
            "descriptors": {"type": "array", "items": {"$ref": "#/$defs/descriptor"}},
        },
    }
