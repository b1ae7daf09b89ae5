"""The messages of Envoy's rate limit service v3, as far as we read or write them, described in code.

Only names of the service, numbers and types of fields are on the wire; those are Envoy's. The descriptions live in a
pool of their own, so that they get in nobody's way who has Envoy's own in the same process.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from tidegate.errors import ConfigError

try:
    from google.protobuf import (  # type: ignore[import-untyped]  # it has no types
        descriptor_pb2,
        descriptor_pool,
        duration_pb2,
        message_factory,
        wrappers_pb2,
    )
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # as above
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("the service for Envoy needs protobuf: pip install 'tidegate[service]'") from error

PACKAGE: Final = "envoy.service.ratelimit.v3"
SERVICE: Final = f"{PACKAGE}.RateLimitService"
METHOD: Final = "ShouldRateLimit"
CODE_OK: Final = 1
CODE_OVER_LIMIT: Final = 2

_FIELD: Final = descriptor_pb2.FieldDescriptorProto
_KINDS: Final = {
    "uint32": _FIELD.TYPE_UINT32,
    "enum": _FIELD.TYPE_INT32,  # the same on the wire, and a number that we do not know is no error
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
}
# message: fields as (name, number, kind or message, repeated)
MESSAGES: Final[dict[str, tuple[tuple[str, int, str, bool], ...]]] = {
    "Entry": (("key", 1, "string", False), ("value", 2, "string", False)),
    "Override": (("requests_per_unit", 1, "uint32", False), ("unit", 2, "enum", False)),
    "Descriptor": (
        ("entries", 1, f".{PACKAGE}.Entry", True),
        ("limit", 2, f".{PACKAGE}.Override", False),
        ("hits_addend", 3, ".google.protobuf.UInt64Value", False),
    ),
    "RateLimitRequest": (
        ("domain", 1, "string", False),
        ("descriptors", 2, f".{PACKAGE}.Descriptor", True),
        ("hits_addend", 3, "uint32", False),
    ),
    "RateLimit": (("requests_per_unit", 1, "uint32", False), ("unit", 2, "enum", False), ("name", 3, "string", False)),
    "Status": (
        ("code", 1, "enum", False),
        ("current_limit", 2, f".{PACKAGE}.RateLimit", False),
        ("limit_remaining", 3, "uint32", False),
        ("duration_until_reset", 4, ".google.protobuf.Duration", False),
    ),
    "HeaderValue": (("key", 1, "string", False), ("value", 2, "string", False)),
    "RateLimitResponse": (
        ("overall_code", 1, "enum", False),
        ("statuses", 2, f".{PACKAGE}.Status", True),
        ("response_headers_to_add", 3, f".{PACKAGE}.HeaderValue", True),
        ("request_headers_to_add", 4, f".{PACKAGE}.HeaderValue", True),
        ("raw_body", 5, "bytes", False),
    ),
}


def read_request(sent: bytes) -> Any:  # noqa: ANN401 - made at run time
    """Read a request; the error names nothing of the inside."""
    try:
        return classes()["RateLimitRequest"].FromString(sent)
    except DecodeError:
        raise ConfigError("the message cannot be read: it is no request of Envoy's rate limit service v3") from None


@cache
def classes() -> dict[str, Any]:
    """Make a class for each message."""
    pool = descriptor_pool.DescriptorPool()
    for known in (duration_pb2, wrappers_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(name="tidegate/ratelimit.proto", package=PACKAGE, syntax="proto3")
    file.dependency.extend([duration_pb2.DESCRIPTOR.name, wrappers_pb2.DESCRIPTOR.name])
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            described = message.field.add(name=field, number=number, label=label)
            if kind in _KINDS:
                described.type = _KINDS[kind]
            else:
                described.type, described.type_name = _FIELD.TYPE_MESSAGE, kind
    pool.AddSerializedFile(file.SerializeToString())
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{PACKAGE}.{name}")) for name in MESSAGES}
