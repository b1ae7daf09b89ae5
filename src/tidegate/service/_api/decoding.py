"""Decodes requests: one msgspec decoder for each verb, which checks types, unknown fields and bounds.

msgspec's own messages name Python types and are not parsed. If it refuses a body, the body is read again, field by
field, to report the first invalid field: its name, what was given, and what its type expects.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec
from msgspec import inspect

from tidegate.service._api.fields import BadFieldError, describe_value, escape_pointer, suggest, type_name
from tidegate.service._api.requests import VerbRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

Q = TypeVar("Q", bound=VerbRequest)
# What msgspec raises for a value that is not JSON, not of the type, has a lone surrogate, or is nested too deeply.
REFUSALS: Final = (ValueError, RecursionError)

JSON_TYPES: Final[tuple[tuple[type[inspect.Type], str, str], ...]] = (  # one of them, several of them
    (inspect.BoolType, "a boolean", "booleans"),
    (inspect.NoneType, "null", "nulls"),
    (inspect.DictType, "an object", "objects"),
    (inspect.StructType, "an object", "objects"),
    (inspect.TupleType, "an array", "arrays"),
    (inspect.ListType, "an array", "arrays"),
    (inspect.VarTupleType, "an array", "arrays"),
    (inspect.StrType, "a string", "strings"),
    (inspect.IntType, "an integer", "integers"),
    (inspect.FloatType, "a number", "numbers"),
)


class RequestDecoder(Generic[Q]):
    """Decodes the requests of one type."""

    def __init__(self, request: type[Q]) -> None:
        """Decode requests of this type."""
        self._type = request
        self._decoder = msgspec.json.Decoder(request)

    def decode(self, body: bytes) -> Q:
        """Decode and check a request; raise BadFieldError if it is invalid."""
        try:
            request = self._decoder.decode(body)
        except REFUSALS:
            request = self._decode_lenient(body)
        request.check()
        return request

    def _decode_lenient(self, body: bytes) -> Q:
        """Decode a request that the decoder refused.

        Python's parser accepts lone surrogates, which the Decider refuses for the key that has them, and 3.0 as an
        integer: JSON has only one number type, and some languages write all numbers with a point.
        """
        data = loads(body)
        try:
            return msgspec.convert(data, self._type)
        except REFUSALS:
            raise find_error(data, self._type) from None


def loads(body: bytes) -> Any:  # noqa: ANN401 - any JSON value
    """Parse JSON strictly: UTF-8 only, no NaN, no excessive nesting."""
    try:
        return DECODER.decode(body.decode("utf-8"))
    except RecursionError:
        raise BadFieldError("", "the JSON is nested too deeply") from None
    except ValueError as error:
        raise BadFieldError("", f"the body is not valid JSON: {error}") from None


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not allowed in JSON")


def _read_number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


DECODER: Final = json.JSONDecoder(parse_constant=_refuse, parse_float=_read_number)


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def find_error(data: object, request: type[msgspec.Struct]) -> BadFieldError:
    """Return the error about the first invalid field of a JSON value that is not of this type."""
    return next(find_errors(data, request, ""), BadFieldError("", "the request is invalid"))


def find_errors(data: object, request: type[msgspec.Struct], pointer: str) -> Iterator[BadFieldError]:
    """Yield an error for each invalid field; unknown fields first."""
    if not isinstance(data, dict):
        yield BadFieldError(pointer, f"expected an object, not {type_name(data)}")
        return
    for name in data:
        if name not in request.__struct_fields__:
            message = f"unknown field: {suggest(name, request.__struct_fields__)}"
            yield BadFieldError(f"{pointer}/{escape_pointer(name)}", message)
    types = {field.name: field.type for field in msgspec.structs.fields(request)}
    for field in inspect.type_info(request).fields:  # type: ignore[attr-defined]  # of a StructType
        place = f"{pointer}/{field.name}"
        if field.name not in data:
            if field.required and field.default is msgspec.NODEFAULT:
                yield BadFieldError(place, f"expected {describe_type(field.type)}, but the field is missing")
        elif not fits(data[field.name], types[field.name]):
            yield from find_errors_in_field(data[field.name], types[field.name], field.type, place)


def find_errors_in_field(value: object, kind: object, info: inspect.Type, pointer: str) -> Iterator[BadFieldError]:
    """Yield the errors of an invalid field: about the field itself, or about fields of the objects in it."""
    if (
        isinstance(value, list)
        and isinstance(info, inspect.ListType)
        and isinstance(info.item_type, inspect.StructType)
    ):
        for number, each in enumerate(value):
            if not fits(each, info.item_type.cls):
                yield from find_errors(each, info.item_type.cls, f"{pointer}/{number}")
    given = describe_value(value)
    if isinstance(value, dict) and fits({}, kind):  # an object is expected, but not with these values
        invalid = next((each for name, each in value.items() if not fits({name: each}, kind)), None)
        given = f"an object with {describe_value(invalid)}"
    yield BadFieldError(pointer, f"expected {describe_type(info)}, not {given}")


def fits(value: object, kind: object) -> bool:
    """Return whether a JSON value is of a type."""
    try:
        msgspec.convert(value, kind)
    except REFUSALS:
        return False
    return True


def convert_value(value: object, kind: object, pointer: str) -> Any:  # noqa: ANN401 - of the type `kind`
    """Convert a JSON value to a type; raise BadFieldError if it is not of that type."""
    try:
        return msgspec.convert(value, kind)
    except REFUSALS:
        raise next(find_errors_in_field(value, kind, inspect.type_info(kind), pointer)) from None


def describe_type(info: inspect.Type) -> str:
    """Return what a type expects, with the names of JSON: "an integer from 1 to 10"."""
    if isinstance(info, inspect.Metadata):
        example = (info.extra or {}).get("example")
        return describe_type(info.type) + (f" such as {example}" if example else "")
    if isinstance(info, inspect.UnionType):
        return ", or ".join(describe_type(each) for each in info.types)
    if isinstance(info, (inspect.ListType, inspect.VarTupleType)):
        return f"an array of {describe_length(info)}{name_of(info.item_type, 2)}"
    if isinstance(info, inspect.StrType):
        return f"a string of {describe_length(info)}characters" if info.max_length else describe_string(info)
    return name_of(info, 1) + (describe_bounds(info) if isinstance(info, (inspect.IntType, inspect.FloatType)) else "")


def describe_string(info: inspect.StrType) -> str:
    """Return what a string without a maximum length expects."""
    return "a non-empty string" if info.min_length else "a string"


def name_of(info: inspect.Type, position: int) -> str:
    """Return the JSON name of a type: for one value (position 1), or for several (position 2)."""
    plain = info.type if isinstance(info, inspect.Metadata) else info
    if isinstance(plain, inspect.TupleType) and len(plain.item_types) == len(("key", "value")):
        return ("a pair", "pairs")[position - 1]
    return next(
        (str(row[position]) for row in JSON_TYPES if isinstance(plain, row[0])), ("a value", "items")[position - 1]
    )


def describe_length(info: inspect.ListType | inspect.VarTupleType | inspect.StrType) -> str:
    """Return the bounds of a length, followed by a space."""
    minimum, maximum = info.min_length, info.max_length
    if maximum is None:
        return f"at least {minimum} " if minimum else ""
    return f"{minimum} to {maximum} " if minimum else f"up to {maximum} "


def describe_bounds(info: inspect.IntType | inspect.FloatType) -> str:
    """Return the bounds of a number, preceded by a space."""
    if info.ge is not None and info.le is not None:
        return f" from {info.ge} to {info.le}"
    bounds = ((info.gt, "above"), (info.ge, "of at least"), (info.lt, "below"), (info.le, "at most"))
    found = [f"{words} {bound}" for bound, words in bounds if bound is not None]
    return f" {' and '.join(found)}" if found else ""
