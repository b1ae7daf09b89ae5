"""`/openapi.json`: what the service answers to, for programs that generate clients, tests and documentation."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import version
from typing import Any, Final

from tidegate.service.decisions.blocks import MAX_BLOCK_SECONDS as LONGEST_BLOCK
from tidegate.service.decisions.decider import MAX_BATCH, MAX_KEY_LENGTH, MAX_KEY_PARTS
from tidegate.service.decisions.leases import MAX_LEASE_PERMITS as MOST_LEASED
from tidegate.service.decisions.reservation_ids import MAX_TTL
from tidegate.service.http.check import DENIAL_STATUSES, METHODS, PARAMETERS, REPEATABLE_PARAMETERS
from tidegate.service.http.json_protocol import ASK_FIELDS, MAX_DESCRIPTOR_PAIRS, VERB_FIELDS
from tidegate.service.http.problems import KINDS, PROBLEM_PREFIX
from tidegate.service.http.replays import MAX_IDEMPOTENCY_KEY_LENGTH
from tidegate.waiting import MAX_PRIORITY

NUMBER: Final = {"type": "number"}
SECONDS: Final = {"type": "number", "minimum": 0}
STRING: Final = {"type": "string"}
INTEGER: Final = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
BOOLEAN: Final = {"type": "boolean"}
STRINGS: Final = {"type": "array", "items": STRING}
KEY: Final = {
    "description": "Whoever is limited: a text, or its parts, which never collide with another's.",
    "anyOf": [
        {"type": "string", "maxLength": MAX_KEY_LENGTH},
        {"type": "array", "items": STRING, "minItems": 1, "maxItems": MAX_KEY_PARTS},
    ],
}
COST: Final = {
    "description": "Permits: calls, or a number for each unit. 1 by default.",
    "anyOf": [INTEGER, {"type": "object", "additionalProperties": INTEGER}],
}
PAIR: Final = {"type": "array", "items": STRING, "minItems": 2, "maxItems": 2}
# Of many, what is wrong with one key is the answer to that one, so that the others are decided.
ANY_KEY: Final = {"description": "A key. What is none, or too long, is answered by an error in its place."}
LONG_KEY: Final = {**ANY_KEY, "anyOf": [STRING, {"type": "array", "items": STRING, "minItems": 1}]}
# Every field of a request.
PROPERTIES: Final[dict[str, dict[str, Any]]] = {
    "policy": {"type": "string", "minLength": 1, "description": "The name of a policy."},
    "key": KEY,
    "domain": {"type": "string", "minLength": 1, "description": "A domain of descriptors, in place of a policy."},
    "descriptor": {"type": "array", "items": PAIR, "minItems": 1, "maxItems": MAX_DESCRIPTOR_PAIRS},
    "cost": COST,
    "wait": {**NUMBER, "description": "Seconds to wait for a permit, cut to what the service allows. 0 by default."},
    "priority": {
        **NUMBER,
        "minimum": -MAX_PRIORITY,
        "maximum": MAX_PRIORITY,
        "description": "Higher priorities are served first, within max_priority (here its default). 0 by default.",
    },
    "ttl": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TTL, "description": "Seconds to settle. 60."},
    "seconds": {**NUMBER, "exclusiveMinimum": 0, "maximum": LONGEST_BLOCK, "description": "How long. 3600 by default."},
    "most": {"type": "integer", "minimum": 1, "maximum": MOST_LEASED, "description": "Permits wanted. 1 by default."},
    "id": {"type": "string", "minLength": 1, "description": "What reserve or lease gave."},
    "keys": {"type": "array", "items": ANY_KEY, "minItems": 1, "maxItems": MAX_BATCH},
    "asks": {"type": "array", "items": {"$ref": "#/components/schemas/Ask"}, "minItems": 1, "maxItems": MAX_BATCH},
}
SUMMARIES: Final = {
    "acquire": "Take permits; wait for them if asked to.",
    "peek": "Give the answer that acquire would give, and change nothing.",
    "reserve": "Charge an estimate now, to be settled by its id.",
    "lease": "Take permits ahead, to be used for a while without asking.",
    "commit": "Settle a reservation by what it really cost.",
    "cancel": "Give a reservation back.",
    "release": "Give slots of concurrency limits back.",
    "batch": f"Decide on up to {MAX_BATCH}, each by itself.",
    "usage": "Tell how much of each limit a key has used.",
    "reset": "Forget everything about a key. Needs the admin token.",
    "block": "Deny a key for a while, whatever its limits say. Needs the admin token.",
    "unblock": "Let a key be decided by its limits again. Needs the admin token.",
}
ADMIN_VERBS: Final = ("reset", "block", "unblock")
RESPONSE_SCHEMAS: Final = {
    "acquire": "Decision", "peek": "Decision", "reserve": "Held", "lease": "Leased", "commit": "Done",
    "cancel": "Done", "release": "Done", "batch": "Answers", "usage": "Usage", "reset": "Done", "block": "Blocked",
    "unblock": "Done",
}  # fmt: skip
LIMIT_FIELDS: Final = {
    "name": STRING, "quota": INTEGER, "unit": STRING, "allowed": BOOLEAN, "remaining": INTEGER,
    "retry_after": {"type": ["number", "null"], "minimum": 0}, "reset_after": SECONDS,
}  # fmt: skip
DECISION_FIELDS: Final = {
    "allowed": BOOLEAN,
    "remaining": {"type": ["integer", "null"], "description": "Permits left at the tightest limit; null: not limited."},
    "retry_after": {"type": ["number", "null"], "description": "Seconds; null: never, the cost does not fit."},
    "reset_after": SECONDS,
    "violated": {**STRINGS, "description": "The limits that said no."},
    "shadow": {**BOOLEAN, "description": "Allowed only because the policy is in shadow mode."},
    "local": {**BOOLEAN, "description": "Decided without the store, which could not be asked."},
    "limits": {"type": "array", "items": {"$ref": "#/components/schemas/Limit"}},
}
USAGE_FIELDS: Final = {
    "name": STRING,
    "quota": INTEGER,
    "used": {"type": "integer"},
    "remaining": INTEGER,
    "reset_after": SECONDS,
    "unit": STRING,
}
LEASE_FIELDS: Final = {
    "id": {"type": ["string", "null"], "description": "To settle by; null: nothing was taken ahead."},
    "permits": {**INTEGER, "description": "Taken, the call itself included; 0: each call has to be asked for."},
    "seconds": {**SECONDS, "description": "How long they may be used, from the request on."},
    "decay": {**SECONDS, "description": "Permits that become void each second."},
}
BLOCK_FIELDS: Final = {
    "policy": STRING,
    "key": KEY,
    "seconds": {**SECONDS, "description": "How long it will still last."},
}
POLICY_FIELDS: Final = {
    "name": STRING, "limits": STRINGS, "mode": {"enum": ["enforce", "shadow"]}, "rollout": SECONDS,
    "on_store_error": {"enum": ["allow", "deny", "local"]},
    "overrides": {"type": "array", "items": {"type": "object"}},
}  # fmt: skip


def whole(properties: dict[str, Any], **more: Any) -> dict[str, Any]:  # noqa: ANN401 - any part of a schema
    """Describe an object that always has all of its fields and no others."""
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False, **more,
    }  # fmt: skip


def schemas() -> dict[str, Any]:
    """Describe everything that is sent or answered."""
    found = {name.capitalize(): question(name, fields) for name, fields in VERB_FIELDS.items()}
    problem = {"type": STRING, "title": STRING, "status": {"type": "integer"}, "detail": STRING, "pointer": STRING}
    return {
        **found,
        "Usage": whole({"limits": {"type": "array", "items": whole(USAGE_FIELDS)}}),
        "UsageOf": found["Usage"],
        "Ask": question("ask", ASK_FIELDS),
        "Limit": whole(LIMIT_FIELDS),
        "Decision": whole(DECISION_FIELDS),
        "Held": whole({**DECISION_FIELDS, "id": {"type": ["string", "null"], "description": "null: nothing is held."}}),
        "Leased": whole({**DECISION_FIELDS, **LEASE_FIELDS}),
        "Done": whole({"ok": {"const": True}}),
        "Blocked": whole({"ok": {"const": True}, "seconds": SECONDS}),
        "Blocks": whole({"blocks": {"type": "array", "items": whole(BLOCK_FIELDS)}}),
        "Answers": whole({"answers": {"type": "array", "items": {"anyOf": [
            {"$ref": "#/components/schemas/Decision"}, whole({"error": {"$ref": "#/components/schemas/Problem"}}),
        ]}}}),
        "Policies": whole({"policies": {"type": "array", "items": whole(POLICY_FIELDS)}, "domains": STRINGS}),
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


def question(name: str, fields: tuple[str, ...]) -> dict[str, Any]:
    """Describe a request, in each of the ways that whoever it is about may be named."""
    if name in ("commit", "cancel"):
        return asking(fields, "id")
    ways = (("policy", "keys"), ("asks",)) if name == "batch" else (("policy", "key"), ("domain", "descriptor"))
    named = {field for way in ways for field in way}
    others = tuple(field for field in fields if field not in named)
    found = [asking((*way, *others), *way) for way in ways]
    if name == "ask":
        found[0]["properties"] |= {"policy": STRING, "key": LONG_KEY}
    return {"oneOf": found}


def asking(fields: tuple[str, ...], *needed: str) -> dict[str, Any]:
    """Describe an object that has some of these fields, and all that are needed."""
    return {
        "type": "object", "properties": {field: PROPERTIES[field] for field in fields}, "required": list(needed),
        "additionalProperties": False,
    }  # fmt: skip


def answer(schema: str, about: str, kind: str = "application/json") -> dict[str, Any]:
    """Describe an answer."""
    return {"description": about, "content": {kind: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}}


def problems(*statuses: int) -> dict[str, Any]:
    """Describe what else may be answered."""
    titles = {status: title for status, title in reversed(KINDS.values()) if status in statuses}
    return {str(status): answer("Problem", titles[status], "application/problem+json") for status in sorted(statuses)}


def post(name: str) -> dict[str, Any]:
    """Describe a verb."""
    asked = "UsageOf" if name == "usage" else name.capitalize()
    replayed = {
        "name": "Idempotency-Key", "in": "header", "required": False,
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_IDEMPOTENCY_KEY_LENGTH},
        "description": "The same key and request again get the same answer, and are decided once.",
    }  # fmt: skip
    return {
        "operationId": name,
        "summary": SUMMARIES[name],
        "security": [{"admin": []} if name in ADMIN_VERBS else {"decision": []}, {}],
        "parameters": [] if name in ("peek", "usage", *ADMIN_VERBS) else [replayed],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{asked}"}}},
        },
        "responses": {
            "200": answer(RESPONSE_SCHEMAS[name], "The answer."),
            **problems(400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 500, 503),
        },
    }


def get(name: str, about: str, schema: str, kind: str = "application/json", *more: int) -> dict[str, Any]:
    """Describe a path that is only read."""
    return {
        "operationId": name,
        "summary": about,
        "security": [{"decision": []}, {}] if more else [{}],
        "responses": {
            "200": answer(schema, "The answer.", kind) if schema
            else {"description": "The answer.", "content": {kind: {}}},
            **problems(*(401, 403, 405) if more else (405,), 500, 503),
        },
    }  # fmt: skip


def check(method: str) -> dict[str, Any]:
    """Describe the check for proxies, which is the same with every method."""
    schemas: dict[str, Any] = {
        "policy": STRING,
        **dict.fromkeys(REPEATABLE_PARAMETERS, STRINGS),
        "cost": {**INTEGER, "maximum": 10**16 - 1},
        "deny": {"enum": list(DENIAL_STATUSES)},
    }
    empty = {"description": "Pass the request on."}
    denial = {"description": "Refuse the request.", "content": {"application/problem+json": {}}}
    return {
        "operationId": "check" if method == "GET" else f"check_{method.lower()}",
        "summary": "Decide by status, for proxies.",
        "security": [{"decision": []}, {}],
        "parameters": [
            {"name": name, "in": "query", "required": name == "policy", "schema": schemas[name],
             **({"style": "form", "explode": True} if name in REPEATABLE_PARAMETERS else {})}
            for name in PARAMETERS
        ],
        "responses": {
            "200": empty,
            **problems(400, 404, 405, 422, 500),
            **dict.fromkeys(("401", "403", "429", "503"), denial),
        },
    }  # fmt: skip


def overview() -> dict[str, Any]:
    """Describe what the dashboard is told."""
    described = get("overview", "What the dashboard shows.", "Overview", "application/json", 401)
    since = {"name": "since", "in": "query", "required": False, "schema": {**INTEGER, "maximum": 10**16 - 1},
             "description": "The tick of an earlier answer: only the seconds after it are told."}  # fmt: skip
    return {**described, "parameters": [since], "responses": {**described["responses"], **problems(422)}}


@cache
def document() -> bytes:
    """Write the whole description."""
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
        "/openapi.json": {"get": get("openapi", "This description.", "", "application/json")},
    }
    bearer = {"type": "http", "scheme": "bearer"}
    return json.dumps({
        "openapi": "3.1.0",
        "info": {"title": "tidegate", "version": version("tidegate"), "description": "Rate limits, decided."},
        "paths": paths,
        "components": {"schemas": schemas(), "securitySchemes": {"decision": bearer, "admin": bearer}},
    }).encode()  # fmt: skip
