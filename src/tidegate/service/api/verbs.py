"""The verbs of the service, in one table. HTTP, OpenAPI, both clients, the command line and tests of the docs read it.

A new verb is one entry in VERBS and one method of the same name in `http.verbs.Verbs`. The method gets the parameters
of the request by name. Parameters that a request omits have the default values of the method.

A Parameter is the only definition of its JSON fields: `read` decodes and checks them, and `schemas` describes them.
"""

from __future__ import annotations

from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.service.api.fields import (
    MAX_DESCRIPTOR_PAIRS,
    BadFieldError,
    RequestFields,
    escape_pointer,
    suggest,
    type_name,
)
from tidegate.service.decisions.blocks import MAX_BLOCK_SECONDS
from tidegate.service.decisions.leases import MAX_LEASE_PERMITS
from tidegate.service.decisions.policy_limiters import MAX_BATCH, MAX_KEY_LENGTH, MAX_KEY_PARTS
from tidegate.service.decisions.reservation_ids import MAX_TTL
from tidegate.waiting import MAX_PRIORITY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Schema = dict[str, Any]

NUMBER: Final[Schema] = {"type": "number"}
STRING: Final[Schema] = {"type": "string"}
INTEGER: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
STRINGS: Final[Schema] = {"type": "array", "items": STRING}


class Parameter(NamedTuple):
    """A parameter of a request: one or several JSON fields, which are read together."""

    name: str
    schemas: Mapping[str, Schema]  # by field
    read: Callable[[RequestFields], Any]
    required: tuple[tuple[str, ...], ...] = ()  # alternative sets of required fields; without any, it is optional
    exclusive: bool = False  # only one of the fields may be given


class RequestType:
    """The JSON object of a request: its parameters, of which the first is required."""

    def __init__(self, required: Parameter, *optional: Parameter) -> None:
        """Combine these parameters."""
        parameters = self.parameters = (required, *optional)
        self._required = required
        self.fields = tuple(field for parameter in parameters for field in parameter.schemas)
        self._readers = {field: (each.name, each.read) for each in parameters for field in each.schemas}

    def read(self, value: object, pointer: str = "") -> dict[str, Any]:
        """Read a JSON value; return the parameters that it contains. `pointer` is its place in the request."""
        if not isinstance(value, dict):
            raise BadFieldError(pointer, f"expected an object, not {type_name(value)}")
        fields, readers, required = RequestFields(value, pointer), self._readers, self._required
        try:
            found = {required.name: required.read(fields)}
            for field in value:
                name, read = readers[field]
                if name not in found:
                    found[name] = read(fields)
        except (KeyError, BadFieldError):
            self._check_names(value, pointer)  # unknown fields are reported first
            raise
        return found

    def _check_names(self, value: dict[str, Any], pointer: str) -> None:
        for field in value:
            if field not in self._readers:
                message = f"unknown field: {suggest(field, self.fields)}"
                raise BadFieldError(f"{pointer}/{escape_pointer(field)}", message) from None

    def schema(self) -> Schema:
        """Describe the object as JSON Schema: one alternative for each set of required fields."""
        required = self._required.required
        optional = [field for field in self.fields if not any(field in fields for fields in required)]
        found = [self._alternative(fields, optional) for fields in required]
        return found[0] if len(found) == 1 else {"oneOf": found}

    def _alternative(self, required: tuple[str, ...], optional: list[str]) -> Schema:
        described = {field: schema for parameter in self.parameters for field, schema in parameter.schemas.items()}
        schemas = {field: described[field] for field in (*required, *optional)}
        exclusive = [list(parameter.schemas) for parameter in self.parameters if parameter.exclusive]
        return {
            "type": "object", "properties": schemas, "required": list(required), "additionalProperties": False,
            **({"not": {"required": exclusive[0]}} if exclusive else {}),
        }  # fmt: skip


class ServiceVerb(NamedTuple):
    """A verb of the service."""

    name: str
    summary: str
    request: RequestType | None  # None: a GET without parameters
    response: str  # the name of its schema: see `http.openapi`
    admin: bool = False  # needs the admin token
    idempotent: bool = False  # accepts an Idempotency-Key, so that a client can repeat it
    waits: bool = False  # may wait for a permit: is timed separately, and bounded in number

    @property
    def method(self) -> str:
        """The HTTP method."""
        return "GET" if self.request is None else "POST"

    def may_wait(self, data: object) -> bool:
        """Return whether this request asks to wait for a permit."""
        return self.waits and isinstance(data, dict) and bool(data.get("timeout") or data.get("wait"))


# ---- parameters ------------------------------------------------------------------------------------------------------

KEY: Final[Schema] = {
    "description": "The key that is limited: a string, or a list of parts. Different lists are always different keys.",
    "anyOf": [
        {"type": "string", "maxLength": MAX_KEY_LENGTH},
        {"type": "array", "items": STRING, "minItems": 1, "maxItems": MAX_KEY_PARTS},
    ],
}
PAIR: Final[Schema] = {"type": "array", "items": STRING, "minItems": 2, "maxItems": 2}
# In a batch, an invalid key gets its error as its result, and the other keys are decided.
ANY_KEY: Final[Schema] = {"description": "A key. An invalid key gets an error as its result."}
LONG_KEY: Final[Schema] = {**ANY_KEY, "anyOf": [STRING, {"type": "array", "items": STRING, "minItems": 1}]}
COSTS: Final[list[Schema]] = [INTEGER, {"type": "object", "additionalProperties": INTEGER}]

SUBJECT: Final = Parameter(
    "subject",
    {
        "policy": {"type": "string", "minLength": 1, "description": "The name of a policy."},
        "key": KEY,
        "domain": {"type": "string", "minLength": 1, "description": "A domain of descriptors, instead of a policy."},
        "descriptor": {"type": "array", "items": PAIR, "minItems": 1, "maxItems": MAX_DESCRIPTOR_PAIRS},
    },
    RequestFields.subject,
    required=(("policy", "key"), ("domain", "descriptor")),
)
# Verbs that also accept a provider: what its name, its domain or a URL selects.
LIMITED: Final = SUBJECT._replace(
    schemas={
        **SUBJECT.schemas,
        "provider": {
            "type": "string",
            "minLength": 1,
            "maxLength": MAX_KEY_LENGTH,
            "description": "The name or domain of a provider, or a URL, instead of a policy.",
        },
    },
    required=(*SUBJECT.required, ("provider",)),
)
COST: Final = Parameter(
    "cost",
    {"cost": {"description": "Permits: an integer, or one for each unit. 1 by default.", "anyOf": COSTS}},
    RequestFields.cost,
)
ACTUAL_COST: Final = Parameter(
    "cost",
    {"cost": {"description": "The actual cost. The estimate by default.", "anyOf": [*COSTS, {"type": "null"}]}},
    RequestFields.actual_cost,
)
TIMEOUT: Final = Parameter(
    "timeout",
    {
        "timeout": {**NUMBER, "description": "Seconds to wait for a permit, at most max_wait. 0 by default."},
        "wait": {**NUMBER, "deprecated": True, "description": "The older name of timeout."},
    },
    RequestFields.timeout,
    exclusive=True,
)
PRIORITY: Final = Parameter(
    "priority",
    {
        "priority": {
            **NUMBER,
            "minimum": -MAX_PRIORITY,
            "maximum": MAX_PRIORITY,
            "description": "Calls with a higher priority are served first. 0 by default.",
        }
    },
    methodcaller("number", "priority"),
)
TTL: Final = Parameter(
    "ttl",
    {"ttl": {**NUMBER, "exclusiveMinimum": 0, "maximum": MAX_TTL, "description": "Seconds until it expires."}},
    methodcaller("number", "ttl"),
)
SECONDS: Final = Parameter(
    "seconds",
    {
        "seconds": {
            **NUMBER,
            "exclusiveMinimum": 0,
            "maximum": MAX_BLOCK_SECONDS,
            "description": "Duration in seconds. 3600 by default.",
        }
    },
    methodcaller("number", "seconds"),
)
LEASE_PERMITS: Final = Parameter(
    "most",
    {
        "most": {
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_LEASE_PERMITS,
            "description": "Permits to lease. 1 by default.",
        }
    },
    methodcaller("integer", "most", MAX_LEASE_PERMITS),
)
ID: Final = Parameter(
    "id",
    {"id": {"type": "string", "minLength": 1, "description": "The id that reserve or lease returned."}},
    methodcaller("string", "id"),
    required=(("id",),),
)
BATCH: Final = Parameter(
    "batch",
    {
        "policy": {**STRING, "minLength": 1, "description": "The name of a policy."},
        "keys": {"type": "array", "items": ANY_KEY, "minItems": 1, "maxItems": MAX_BATCH},
        "asks": {"type": "array", "items": {"$ref": "#/components/schemas/Ask"}, "minItems": 1, "maxItems": MAX_BATCH},
    },
    RequestFields.batch,
    required=(("policy", "keys"), ("asks",)),
)
# One of the asks of a batch.
ASK: Final = RequestType(SUBJECT._replace(schemas={**SUBJECT.schemas, "policy": STRING, "key": LONG_KEY}), COST)

# ---- the table -------------------------------------------------------------------------------------------------------

VERBS: Final[dict[str, ServiceVerb]] = {
    verb.name: verb
    for verb in (
        ServiceVerb(
            "acquire", "Take permits, waiting if requested.",
            RequestType(LIMITED, COST, TIMEOUT, PRIORITY), "Acquired", idempotent=True, waits=True,
        ),
        ServiceVerb(
            "peek", "Return the decision that acquire would return, without changing anything.",
            RequestType(LIMITED, COST), "Decision",
        ),
        ServiceVerb(
            "reserve", "Charge an estimate. The response has the id that settles it.",
            RequestType(LIMITED, COST, TTL, TIMEOUT, PRIORITY), "Held", idempotent=True, waits=True,
        ),
        ServiceVerb(
            "lease", "Take permits in advance, to use for a while without further requests.",
            RequestType(SUBJECT, COST, LEASE_PERMITS, TTL), "Leased", idempotent=True,
        ),
        ServiceVerb(
            "commit", "Settle a reservation with its actual cost.",
            RequestType(ID, ACTUAL_COST), "Done", idempotent=True,
        ),
        ServiceVerb(
            "cancel", "Cancel a reservation and refund its estimate.", RequestType(ID), "Done", idempotent=True,
        ),
        ServiceVerb(
            "release", "Release slots of concurrency limits.", RequestType(SUBJECT, COST), "Done", idempotent=True,
        ),
        ServiceVerb(
            "batch", f"Decide on up to {MAX_BATCH} asks, each independently.",
            RequestType(BATCH), "Answers", idempotent=True,
        ),
        ServiceVerb("usage", "Return how much of each limit a key has used.", RequestType(LIMITED), "Usage"),
        ServiceVerb(
            "refund", "Give back the most recently taken permits of a key. Needs the admin token.",
            RequestType(SUBJECT, COST), "Done", admin=True, idempotent=True,
        ),
        ServiceVerb(
            "reset", "Delete the state of a key. Needs the admin token.", RequestType(SUBJECT), "Done", admin=True,
        ),
        ServiceVerb(
            "block", "Deny a key for a while, whatever its limits. Needs the admin token.",
            RequestType(SUBJECT, SECONDS), "Blocked", admin=True,
        ),
        ServiceVerb(
            "unblock", "Remove the block of a key. Needs the admin token.", RequestType(SUBJECT), "Done", admin=True,
        ),
        ServiceVerb("blocks", "List the blocks. Needs the admin token.", None, "Blocks", admin=True),
        ServiceVerb("policies", "List the policies.", None, "Policies"),
    )
}  # fmt: skip
