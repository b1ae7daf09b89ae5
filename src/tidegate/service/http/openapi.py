"""`/openapi.json`: the OpenAPI description, for programs that generate clients, tests and documentation."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import version
from typing import Any, Final

from tidegate.service.decisions.blocks import MAX_BLOCK_SECONDS
from tidegate.service.decisions.decider import MAX_BATCH, MAX_KEY_LENGTH, MAX_KEY_PARTS
from tidegate.service.decisions.leases import MAX_LEASE_PERMITS
from tidegate.service.decisions.reservation_ids import MAX_TTL
from tidegate.service.http.check import DENIAL_STATUSES, METHODS, PARAMETERS, REPEATABLE_PARAMETERS
from tidegate.service.http.json_protocol import ASK_FIELDS, MAX_DESCRIPTOR_PAIRS, VERB_FIELDS
from tidegate.service.http.problems import KINDS, PROBLEM_PREFIX
from tidegate.service.http.replays import MAX_IDEMPOTENCY_KEY_LENGTH
from tidegate.waiting import MAX_PRIORITY

NUMBER: Final = {"type": "number"}
SECONDS: Final[dict[str, Any]] = {"type": "number", "minimum": 0}
STRING: Final = {"type": "string"}
INTEGER: Final[dict[str, Any]] = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
BOOLEAN: Final = {"type": "boolean"}
STRINGS: Final[dict[str, Any]] = {"type": "array", "items": STRING}
KEY: Final[dict[str, Any]] = {
    "description": "The key that is limited: a string, or a list of parts. Different lists are always different keys.",
    "anyOf": [
        {"type": "string", "maxLength": MAX_KEY_LENGTH},
        {"type": "array", "items": STRING, "minItems": 1, "maxItems": MAX_KEY_PARTS},
    ],
}
COST: Final[dict[str, Any]] = {
    "description": "Permits: an integer, or one for each unit. 1 by default.",
    "anyOf": [INTEGER, {"type": "object", "additionalProperties": INTEGER}],
}
PAIR: Final[dict[str, Any]] = {"type": "array", "items": STRING, "minItems": 2, "maxItems": 2}
# In a batch, an invalid key gets its error as its result, and the other keys are decided.
ANY_KEY: Final = {"description": "A key. An invalid key gets an error as its result."}
LONG_KEY: Final[dict[str, Any]] = {**ANY_KEY, "anyOf": [STRING, {"type": "array", "items": STRING, "minItems": 1}]}
# Every field of a request.
PROPERTIES: Final[dict[str, dict[str, Any]]] = {
    "policy": {"type": "string", "minLength": 1, "description": "The name of a policy."},
    "key": KEY,
    "domain": {"type": "string", "minLength": 1, "description": "A domain of descriptors, instead of a policy."},
    "descriptor": {"type": "array", "items": PAIR, "minItems": 1, "maxItems": MAX_DESCRIPTOR_PAIRS},
    "cost": COST,
    "wait": {**NUMBER, "description": "Seconds to wait for a permit, at most max_wait. 0 by default."},
    "priority": {
        **NUMBER,
        "minimum": -MAX_PRIORITY,
        "maximum": MAX_PRIORITY,
        "description": "Calls with a higher priority are served first. 0 by default.",
    },
    "ttl": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TTL, "description": "Seconds until it expires."},
    "seconds": {
        **NUMBER,
        "exclusiveMinimum": 0,
        "maximum": MAX_BLOCK_SECONDS,
        "description": "Duration in seconds. 3600 by default.",
    },
    "most": {
        "type": "integer",
        "minimum": 1,
        "maximum": MAX_LEASE_PERMITS,
        "description": "Permits to lease. 1 by default.",
    },
    "id": {"type": "string", "minLength": 1, "description": "The id that reserve or lease returned."},
    "keys": {"type": "array", "items": ANY_KEY, "minItems": 1, "maxItems": MAX_BATCH},
    "asks": {"type": "array", "items": {"$ref": "#/components/schemas/Ask"}, "minItems": 1, "maxItems": MAX_BATCH},
}
SUMMARIES: Final = {
    "acquire": "Take permits, waiting if requested.",
    "peek": "Return the decision that acquire would return, without changing anything.",
    "reserve": "Charge an estimate. The response has the id that settles it.",
    "lease": "Take permits in advance, to use for a while without further requests.",
    "commit": "Settle a reservation with its actual cost.",
    "cancel": "Cancel a reservation and refund its estimate.",
    "release": "Release slots of concurrency limits.",
    "batch": f"Decide on up to {MAX_BATCH} asks, each independently.",
    "usage": "Return how much of each limit a key has used.",
    "reset": "Delete the state of a key. Needs the admin token.",
    "block": "Deny a key for a while, whatever its limits. Needs the admin token.",
    "unblock": "Remove the block of a key. Needs the admin token.",
}
ADMIN_VERBS: Final = ("reset", "block", "unblock")
RESPONSE_SCHEMAS: Final = {
    "acquire": "Decision", "peek": "Decision", "reserve": "Held", "lease": "Leased", "commit": "Done",
    "cancel": "Done", "release": "Done", "batch": "Answers", "usage": "Usage", "reset": "Done", "block": "Blocked",
    "unblock": "Done",
}  # fmt: skip
LIMIT_FIELDS: Final[dict[str, Any]] = {
    "name": STRING, "quota": INTEGER, "unit": STRING, "allowed": BOOLEAN, "remaining": INTEGER,
    "retry_after": {"type": ["number", "null"], "minimum": 0}, "reset_after": SECONDS,
}  # fmt: skip
DECISION_FIELDS: Final[dict[str, Any]] = {
    "allowed": BOOLEAN,
    "remaining": {"type": ["integer", "null"], "description": "Permits left at the tightest limit; null: not limited."},
    "retry_after": {
        "type": ["number", "null"],
        "description": "Seconds; null: never, because the cost exceeds a limit.",
    },
    "reset_after": SECONDS,
    "violated": {**STRINGS, "description": "The limits that denied the call."},
    "shadow": {**BOOLEAN, "description": "Allowed only because the policy is in shadow mode."},
    "local": {**BOOLEAN, "description": "Decided without the store, which is unavailable."},
    "limits": {"type": "array", "items": {"$ref": "#/components/schemas/Limit"}},
}
USAGE_FIELDS: Final[dict[str, Any]] = {
    "name": STRING,
    "quota": INTEGER,
    "used": {"type": "integer"},
    "remaining": INTEGER,
    "reset_after": SECONDS,
    "unit": STRING,
}
LEASE_FIELDS: Final[dict[str, Any]] = {
    "id": {"type": ["string", "null"], "description": "The id that settles the lease; null: nothing was leased."},
    "permits": {**INTEGER, "description": "Permits taken, including the call itself; 0: each call needs a request."},
    "seconds": {**SECONDS, "description": "How long the permits may be used, counted from the request."},
    "decay": {**SECONDS, "description": "Permits that expire each second."},
}
BLOCK_FIELDS: Final[dict[str, Any]] = {
    "policy": STRING,
    "key": KEY,
    "seconds": {**SECONDS, "description": "Seconds until it ends."},
}
POLICY_FIELDS: Final[dict[str, Any]] = {
    "name": STRING, "limits": STRINGS, "mode": {"enum": ["enforce", "shadow"]}, "rollout": SECONDS,
    "on_store_error": {"enum": ["allow", "deny", "local"]},
    "overrides": {"type": "array", "items": {"type": "object"}},
}  # fmt: skip


def closed_object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:  # noqa: ANN401 - any part of a schema
    """Describe an object that has exactly these fields."""
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False, **more,
    }  # fmt: skip


def schemas() -> dict[str, Any]:
    """Describe all requests and responses."""
    found = {name.capitalize(): request_schema(name, fields) for name, fields in VERB_FIELDS.items()}
    problem = {"type": STRING, "title": STRING, "status": {"type": "integer"}, "detail": STRING, "pointer": STRING}
    return {
        **found,
        "Usage": closed_object({"limits": {"type": "array", "items": closed_object(USAGE_FIELDS)}}),
        "UsageOf": found["Usage"],
        "Ask": request_schema("ask", ASK_FIELDS),
        "Limit": closed_object(LIMIT_FIELDS),
        "Decision": closed_object(DECISION_FIELDS),
        "Held": closed_object({**DECISION_FIELDS, "id": {"type": ["string", "null"], "description": "null: denied."}}),
        "Leased": closed_object({**DECISION_FIELDS, **LEASE_FIELDS}),
        "Done": closed_object({"ok": {"const": True}}),
        "Blocked": closed_object({"ok": {"const": True}, "seconds": SECONDS}),
        "Blocks": closed_object({"blocks": {"type": "array", "items": closed_object(BLOCK_FIELDS)}}),
        "Answers": closed_object({"answers": {"type": "array", "items": {"anyOf": [
            {"$ref": "#/components/schemas/Decision"},
            closed_object({"error": {"$ref": "#/components/schemas/Problem"}}),
        ]}}}),
        "Policies": closed_object(
            {"policies": {"type": "array", "items": closed_object(POLICY_FIELDS)}, "domains": STRINGS}),
        "Overview": {
            "type": "object",
            "description": "Fields may be added: see the documentation of the dashboard.",
            "required": ["at", "tick", "seconds", "tracks", "latency", "policies", "store", "panels"],
        },
        "Problem": {
            "type": "object",
            "description": f"Problem details (RFC 9457); the type is {PROBLEM_PREFIX} and one of: {', '.join(KINDS)}.",
            "properties": problem,
            "required": ["type", "title", "status", "detail"],
        },
    }  # fmt: skip


def request_schema(name: str, fields: tuple[str, ...]) -> dict[str, Any]:
    """Describe a request, with each of the alternatives for its subject."""
    if name in ("commit", "cancel"):
        return object_schema(fields, "id")
    subjects = (("policy", "keys"), ("asks",)) if name == "batch" else (("policy", "key"), ("domain", "descriptor"))
    subject_fields = {field for subject in subjects for field in subject}
    others = tuple(field for field in fields if field not in subject_fields)
    found = [object_schema((*subject, *others), *subject) for subject in subjects]
    if name == "ask":
        found[0]["properties"] |= {"policy": STRING, "key": LONG_KEY}
    return {"oneOf": found}


def object_schema(fields: tuple[str, ...], *required: str) -> dict[str, Any]:
    """Describe an object with these fields, some of them required."""
    return {
        "type": "object", "properties": {field: PROPERTIES[field] for field in fields}, "required": list(required),
        "additionalProperties": False,
    }  # fmt: skip


def response(schema: str, description: str, content_type: str = "application/json") -> dict[str, Any]:
    """Describe a response."""
    content = {content_type: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}


def problems(*statuses: int) -> dict[str, Any]:
    """Describe the responses without a decision."""
    titles = {status: title for status, title in reversed(KINDS.values()) if status in statuses}
    return {str(status): response("Problem", titles[status], "application/problem+json") for status in sorted(statuses)}


def post(name: str) -> dict[str, Any]:
    """Describe a verb."""
    request = "UsageOf" if name == "usage" else name.capitalize()
    idempotency_key = {
        "name": "Idempotency-Key", "in": "header", "required": False,
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_IDEMPOTENCY_KEY_LENGTH},
        "description": "A repeated request with the same key is decided once and gets the same response.",
    }  # fmt: skip
    return {
        "operationId": name,
        "summary": SUMMARIES[name],
        "security": [{"admin": []} if name in ADMIN_VERBS else {"decision": []}, {}],
        "parameters": [] if name in ("peek", "usage", *ADMIN_VERBS) else [idempotency_key],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{request}"}}},
        },
        "responses": {
            "200": response(RESPONSE_SCHEMAS[name], "The result."),
            **problems(400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 500, 503),
        },
    }


def get(name: str, summary: str, schema: str, content_type: str = "application/json", *more: int) -> dict[str, Any]:
    """Describe a path with GET."""
    return {
        "operationId": name,
        "summary": summary,
        "security": [{"decision": []}, {}] if more else [{}],
        "responses": {
            "200": response(schema, "The result.", content_type) if schema
            else {"description": "The result.", "content": {content_type: {}}},
            **problems(*(401, 403, 405) if more else (405,), 500, 503),
        },
    }  # fmt: skip


def check(method: str) -> dict[str, Any]:
    """Describe the check for proxies, which is the same for every method."""
    schemas: dict[str, Any] = {
        "policy": STRING,
        **dict.fromkeys(REPEATABLE_PARAMETERS, STRINGS),
        "cost": {**INTEGER, "maximum": 10**16 - 1},
        "deny": {"enum": list(DENIAL_STATUSES)},
    }
    allowed = {"description": "Forward the request."}
    denied = {"description": "Refuse the request.", "content": {"application/problem+json": {}}}
    return {
        "operationId": "check" if method == "GET" else f"check_{method.lower()}",
        "summary": "Return a decision as a status code, for proxies.",
        "security": [{"decision": []}, {}],
        "parameters": [
            {"name": name, "in": "query", "required": name == "policy", "schema": schemas[name],
             **({"style": "form", "explode": True} if name in REPEATABLE_PARAMETERS else {})}
            for name in PARAMETERS
        ],
        "responses": {
            "200": allowed,
            **problems(400, 404, 405, 422, 500),
            **dict.fromkeys(("401", "403", "429", "503"), denied),
        },
    }  # fmt: skip


def overview() -> dict[str, Any]:
    """Describe the data of the dashboard."""
    described = get("overview", "The data that the dashboard shows.", "Overview", "application/json", 401)
    since = {"name": "since", "in": "query", "required": False, "schema": {**INTEGER, "maximum": 10**16 - 1},
             "description": "The tick of an earlier response: only the seconds after it are returned."}  # fmt: skip
    return {**described, "parameters": [since], "responses": {**described["responses"], **problems(422)}}


@cache
def document() -> bytes:
    """Write the whole description as JSON."""
    ok = "Done"
    paths: dict[str, Any] = {f"/v1/{name}": {"post": post(name)} for name in SUMMARIES}
    paths |= {
        "/v1/check": {method.lower(): check(method) for method in METHODS},
        "/v1/policies": {"get": get("policies", "List the policies.", "Policies", "application/json", 401)},
        "/v1/blocks": {
            "get": {
                **get("blocks", "List the blocks.", "Blocks", "application/json", 401),
                "security": [{"admin": []}, {}],
            }
        },
        "/v1/overview": {"get": overview()},
        "/healthz": {"get": get("healthz", "The service is alive.", ok)},
        "/readyz": {"get": get("readyz", "The service can decide: the store answers.", ok)},
        "/metrics": {"get": get("metrics", "Metrics for Prometheus.", "", "text/plain", 401)},
        "/openapi.json": {"get": get("openapi", "This OpenAPI document.", "", "application/json")},
    }
    bearer = {"type": "http", "scheme": "bearer"}
    return json.dumps({
        "openapi": "3.1.0",
        "info": {"title": "tidegate", "version": version("tidegate"), "description": "A rate limit service."},
        "paths": paths,
        "components": {"schemas": schemas(), "securitySchemes": {"decision": bearer, "admin": bearer}},
    }).encode()  # fmt: skip
