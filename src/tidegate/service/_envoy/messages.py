"""The protobuf messages of Envoy's rate limit service v3, with the fields that tidegate reads or writes.

The service name and the numbers and types of the fields are Envoy's. The descriptors are in a separate pool, so that
they do not conflict with Envoy's own descriptors in the same process.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from tidegate.errors import ConfigError

try:
    from google.protobuf import (  # type: ignore[import-untyped]  # protobuf has no types
        descriptor_pb2,
        descriptor_pool,
        duration_pb2,
        message_factory,
        wrappers_pb2,
    )
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # as above
except ImportError as _error:  # pragma: no cover - the development environment has it
    raise ConfigError("the gRPC service needs protobuf: pip install 'tidegate[envoy]'") from _error

PACKAGE: Final = "envoy.service.ratelimit.v3"
SERVICE: Final = f"{PACKAGE}.RateLimitService"
METHOD: Final = "ShouldRateLimit"
CODE_OK: Final = 1
CODE_OVER_LIMIT: Final = 2

_FIELD: Final = descriptor_pb2.FieldDescriptorProto
_FIELD_TYPES: Final = {
    "uint32": _FIELD.TYPE_UINT32,
    "enum": _FIELD.TYPE_INT32,  # encoded like an enum; an unknown number is no error
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
}
# message: fields as (name, number, type or message, repeated)
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


def read_request(data: bytes) -> Any:  # noqa: ANN401 - made at run time
    """Parse a request. The error contains no internal names."""
    try:
        return message_classes()["RateLimitRequest"].FromString(data)
    except DecodeError:
        raise ConfigError(
            "cannot parse the message: expected a RateLimitRequest of Envoy's rate limit service v3"
        ) from None


@cache
def message_classes() -> dict[str, Any]:
    """Create a class for each message."""
    pool = descriptor_pool.DescriptorPool()
    for module in (duration_pb2, wrappers_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(name="tidegate/ratelimit.proto", package=PACKAGE, syntax="proto3")
    file.dependency.extend([duration_pb2.DESCRIPTOR.name, wrappers_pb2.DESCRIPTOR.name])
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, field_type, repeated in fields:
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            field = message.field.add(name=field_name, number=number, label=label)
            if field_type in _FIELD_TYPES:
                field.type = _FIELD_TYPES[field_type]
            else:
                field.type, field.type_name = _FIELD.TYPE_MESSAGE, field_type
    pool.AddSerializedFile(file.SerializeToString())
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{PACKAGE}.{name}")) for name in MESSAGES}
