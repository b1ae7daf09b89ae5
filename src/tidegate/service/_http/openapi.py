"""`/openapi.json`: the OpenAPI description, for programs that generate clients, tests and documentation."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.core._bounds import MAX_INTEGER
from tidegate.service._api.problems import KINDS, PROBLEM_PREFIX
from tidegate.service._api.requests import VerbRequest
from tidegate.service._api.responses import DoneResponse, ProblemResponse, VerbResponse
from tidegate.service._api.verbs import VERBS
from tidegate.service._http.check import DENIAL_STATUSES, METHODS, PARAMETERS, REPEATABLE_PARAMETERS
from tidegate.service._http.replays import MAX_IDEMPOTENCY_KEY_LENGTH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate.service._api.verbs import ServiceVerb

    Schema = dict[str, Any]

REFERENCE: Final = "#/components/schemas/{name}"
STRING: Final = {"type": "string"}
STRINGS: Final = {"type": "array", "items": STRING}
INTEGER: Final = {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER}
MAX_QUERY_INTEGER: Final = 10**16 - 1


def schemas() -> Schema:
    """Describe all requests and responses, from their types."""
    requests: set[type] = {verb.request for verb in VERBS.values() if verb.request is not None}
    responses: set[type] = {verb.response for verb in VERBS.values()} | {DoneResponse, ProblemResponse}
    types = sorted((*requests, *responses), key=lambda each: each.__name__)
    found = msgspec.json.schema_components(types, ref_template=REFERENCE)[1]
    structs = {each.__name__: each for each in (*subclasses(VerbRequest), *subclasses(VerbResponse))}
    described = {name: refine(structs.get(name, dict), schema) for name, schema in found.items()}
    kinds = f"Problem details (RFC 9457); the type is {PROBLEM_PREFIX} and one of: {', '.join(KINDS)}."
    described[ProblemResponse.__name__] |= {"description": kinds, "additionalProperties": True}
    overview = {
        "type": "object",
        "description": "Fields may be added: see the documentation of the dashboard.",
        "required": ["at", "tick", "seconds", "total", "tracks", "latency", "policies", "store", "panels"],
    }
    return {**described, "Overview": overview}


def subclasses(kind: type[object]) -> Iterator[type[object]]:
    """Yield all subclasses of a type."""
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def refine(kind: type, schema: Schema) -> Schema:
    """Add what msgspec's schema of a type cannot express: alternative fields, and no other fields.

    Responses have no other fields, although the clients accept some: a field that is not described is noticed in tests.
    """
    closed = {**schema, "additionalProperties": False}
    alternatives = getattr(kind, "ALTERNATIVES", ())
    if not alternatives:
        return closed
    selected = {field for fields in alternatives for field in fields}
    optional = [field for field in schema["properties"] if field not in selected]
    found = [
        {
            **{name: value for name, value in closed.items() if name not in ("title", "description")},
            "properties": {name: schema["properties"][name] for name in (*fields, *optional)},
            "required": [*fields, *schema["required"]],
        }
        for fields in alternatives
    ]
    return {"title": schema["title"], "description": schema["description"], "oneOf": found}


def response(schema: str, description: str, content_type: str = "application/json") -> dict[str, Any]:
    """Describe a response."""
    content = {content_type: {"schema": {"$ref": REFERENCE.format(name=schema)}}}
    return {"description": description, "content": content}


def problems(*statuses: int) -> dict[str, Any]:
    """Describe the responses without a decision."""
    titles = {status: title for status, title in reversed(KINDS.values()) if status in statuses}
    return {
        str(status): response(ProblemResponse.__name__, titles[status], "application/problem+json")
        for status in sorted(statuses)
    }


def describe_verb(verb: ServiceVerb[Any, Any]) -> dict[str, Any]:
    """Describe a verb."""
    security: list[dict[str, list[str]]] = [{"admin": []} if verb.admin else {"decision": []}, {}]
    if verb.request is None:
        return {**get(verb.name, verb.summary, verb.response.__name__, "application/json", 401), "security": security}
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
            "content": {"application/json": {"schema": {"$ref": REFERENCE.format(name=verb.request.__name__)}}},
        },
        "responses": {
            "200": response(verb.response.__name__, "The result."),
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
        "cost": {**INTEGER, "maximum": MAX_QUERY_INTEGER},
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
    since = {"name": "since", "in": "query", "required": False, "schema": {**INTEGER, "maximum": MAX_QUERY_INTEGER},
             "description": "The tick of an earlier response: only the seconds after it are returned."}  # fmt: skip
    return {**described, "parameters": [since], "responses": {**described["responses"], **problems(422)}}


def history() -> dict[str, Any]:
    """Describe the history of the dashboard."""
    described = get("history", "The history that the dashboard shows.", "", "application/json", 401)
    time = {**INTEGER, "maximum": MAX_QUERY_INTEGER}
    fields = {"from": (time, "Milliseconds since 1970."), "to": (time, "Milliseconds since 1970."),
              "policy": (STRING, "Only this policy.")}  # fmt: skip
    parameters = [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": text}
        for name, (schema, text) in fields.items()
    ]
    return {**described, "parameters": parameters, "responses": {**described["responses"], **problems(422)}}


def key() -> dict[str, Any]:
    """Describe the report about one key."""
    described = get("key", "The data of a key in all policies.", "", "application/json", 401)
    parameter = {"name": "key", "in": "query", "required": True, "schema": STRINGS, "style": "form", "explode": True,
                 "description": "The key, once for each of its parts."}  # fmt: skip
    return {**described, "parameters": [parameter], "responses": {**described["responses"], **problems(422)}}


def document() -> bytes:
    """Write the whole description as JSON."""
    ok = DoneResponse.__name__
    paths: dict[str, Any] = {verb.path: {verb.method.lower(): describe_verb(verb)} for verb in VERBS.values()}
    paths |= {
        "/v1/check": {method.lower(): check(method) for method in METHODS},
        "/v1/overview": {"get": overview()},
        "/v1/history": {"get": history()},
        "/v1/key": {"get": key()},
        "/healthz": {"get": get("healthz", "The service is alive.", ok)},
        "/readyz": {"get": get("readyz", "The service can decide.", "")},
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
