"""`/openapi.json`: the OpenAPI description, for programs that generate clients, tests and documentation."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import version
from typing import Any, Final

from tidegate.service.api.verbs import ASK, INTEGER, KEY, STRING, STRINGS, VERBS, ServiceVerb
from tidegate.service.http.check import DENIAL_STATUSES, METHODS, PARAMETERS, REPEATABLE_PARAMETERS
from tidegate.service.http.problems import KINDS, PROBLEM_PREFIX
from tidegate.service.http.replays import MAX_IDEMPOTENCY_KEY_LENGTH

BOOLEAN: Final = {"type": "boolean"}
DURATION: Final[dict[str, Any]] = {"type": "number", "minimum": 0}  # in seconds
LIMIT_FIELDS: Final[dict[str, Any]] = {
    "name": STRING, "quota": INTEGER, "unit": STRING, "allowed": BOOLEAN, "remaining": INTEGER,
    "retry_after": {"type": ["number", "null"], "minimum": 0}, "reset_after": DURATION,
}  # fmt: skip
DECISION_FIELDS: Final[dict[str, Any]] = {
    "allowed": BOOLEAN,
    "remaining": {"type": ["integer", "null"], "description": "Permits left at the tightest limit; null: not limited."},
    "retry_after": {
        "type": ["number", "null"],
        "description": "Seconds; null: never, because the cost exceeds a limit.",
    },
    "reset_after": DURATION,
    "violated": {**STRINGS, "description": "The limits that denied the call."},
    "shadow": {**BOOLEAN, "description": "Allowed only because the policy is in shadow mode."},
    "local": {**BOOLEAN, "description": "Decided without the store, which is unavailable."},
    "limits": {"type": "array", "items": {"$ref": "#/components/schemas/Limit"}},
}
PERMIT_ID: Final = {
    "type": ["string", "null"],
    "description": "Only for a provider: the id that settles the permits; null: denied, or not limited.",
}
USAGE_FIELDS: Final[dict[str, Any]] = {
    "name": STRING,
    "quota": INTEGER,
    "used": {"type": "integer"},
    "remaining": INTEGER,
    "reset_after": DURATION,
    "unit": STRING,
}
LEASE_FIELDS: Final[dict[str, Any]] = {
    "id": {"type": ["string", "null"], "description": "The id that settles the lease; null: nothing was leased."},
    "permits": {**INTEGER, "description": "Permits taken, including the call itself; 0: each call needs a request."},
    "seconds": {**DURATION, "description": "How long the permits may be used, counted from the request."},
    "decay": {**DURATION, "description": "Permits that expire each second."},
}
BLOCK_FIELDS: Final[dict[str, Any]] = {
    "policy": STRING,
    "key": KEY,
    "seconds": {**DURATION, "description": "Seconds until it ends."},
}
POLICY_FIELDS: Final[dict[str, Any]] = {
    "name": STRING, "limits": STRINGS, "mode": {"enum": ["enforce", "shadow"]}, "rollout": DURATION,
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
    requests = {request_name(verb): verb.request.schema() for verb in VERBS.values() if verb.request is not None}
    problem = {"type": STRING, "title": STRING, "status": {"type": "integer"}, "detail": STRING, "pointer": STRING}
    return {
        **requests,
        "Usage": closed_object({"limits": {"type": "array", "items": closed_object(USAGE_FIELDS)}}),
        "Ask": ASK.schema(),
        "Limit": closed_object(LIMIT_FIELDS),
        "Decision": closed_object(DECISION_FIELDS),
        "Acquired": closed_object(DECISION_FIELDS) | {"properties": {**DECISION_FIELDS, "id": PERMIT_ID}},
        "Held": closed_object({**DECISION_FIELDS, "id": {"type": ["string", "null"], "description": "null: denied."}}),
        "Leased": closed_object({**DECISION_FIELDS, **LEASE_FIELDS}),
        "Done": closed_object({"ok": {"const": True}}),
        "Blocked": closed_object({"ok": {"const": True}, "seconds": DURATION}),
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


def request_name(verb: ServiceVerb) -> str:
    """Return the name of the schema of a request."""
    return f"{verb.name.capitalize()}Request"


def response(schema: str, description: str, content_type: str = "application/json") -> dict[str, Any]:
    """Describe a response."""
    content = {content_type: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}


def problems(*statuses: int) -> dict[str, Any]:
    """Describe the responses without a decision."""
    titles = {status: title for status, title in reversed(KINDS.values()) if status in statuses}
    return {str(status): response("Problem", titles[status], "application/problem+json") for status in sorted(statuses)}


def describe_verb(verb: ServiceVerb) -> dict[str, Any]:
    """Describe a verb."""
    security: list[dict[str, list[str]]] = [{"admin": []} if verb.admin else {"decision": []}, {}]
    if verb.request is None:
        return {**get(verb.name, verb.summary, verb.response, "application/json", 401), "security": security}
    idempotency_key = {
        "name": "Idempotency-Key", "in": "header", "required": False,
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_IDEMPOTENCY_KEY_LENGTH},
        "description": "A repeated request with the same key is decided once and gets the same response.",
    }  # fmt: skip
    return {
        "operationId": verb.name,
        "summary": verb.summary,
        "security": security,
        "parameters": [idempotency_key] if verb.idempotent else [],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{request_name(verb)}"}}},
        },
        "responses": {
            "200": response(verb.response, "The result."),
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
    paths: dict[str, Any] = {f"/v1/{verb.name}": {verb.method.lower(): describe_verb(verb)} for verb in VERBS.values()}
    paths |= {
        "/v1/check": {method.lower(): check(method) for method in METHODS},
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
