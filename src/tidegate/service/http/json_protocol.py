"""Writes decisions as JSON, and reads requests from JSON. docs/wire.md describes the format for users.

Writing a response costs more than the decision. So the constant parts of a policy's responses are written once, as a
template, and each response only fills in its numbers.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import MAX_INTEGER, SECOND
from tidegate.core.decision import Decision, LocalDecision, ShadowDecision
from tidegate.errors import ConfigError
from tidegate.service.decisions.decider import Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tidegate.core import Limit
    from tidegate.limiter import Usage
    from tidegate.policy import Cost

    Write = Callable[[Decision], str]

UNLIMITED: Final = (
    '{"allowed":true,"remaining":null,"retry_after":0.0,"reset_after":0.0,"violated":[],"shadow":false,"local":false,'
    '"limits":[]}'
)
HEAD: Final = '{"allowed":true,"remaining":'
MIDDLE: Final = ',"retry_after":0.0,"reset_after":'
TAIL: Final = ',"violated":[],"shadow":false,"local":false,"limits":['
MAX_TEMPLATES: Final = 4096  # sets of limits whose templates are kept
MAX_DESCRIPTOR_PAIRS: Final = 32  # pairs of a descriptor
MAX_SHOWN_NAME: Final = 50  # characters of an unknown name that are compared or shown


# ---- responses -------------------------------------------------------------------------------------------------------


class DecisionWriter:
    """Writes decisions as JSON. Each app has one."""

    def __init__(self) -> None:
        """Start without templates."""
        self._templates: dict[int, tuple[tuple[Limit, ...], Write]] = {}

    def write(self, decision: Decision | None) -> str:
        """Write a decision as JSON; None means not limited."""
        if decision.__class__ is not Decision or not decision[0]:  # by position: a fast path
            return UNLIMITED if decision is None else write_without_template(decision)
        limits = decision[2]
        found = self._templates.get(id(limits))
        if found is None or found[0] is not limits:
            found = self._add_template(limits)
        return found[1](decision)

    def _add_template(self, limits: tuple[Limit, ...]) -> tuple[tuple[Limit, ...], Write]:
        if len(self._templates) >= MAX_TEMPLATES:
            self._templates.clear()
        write = _single_limit_writer(limits[0]) if len(limits) == 1 else _multi_limit_writer(limits)
        found = self._templates[id(limits)] = (limits, write)
        return found


def _single_limit_writer(limit: Limit) -> Write:
    """Build the function that writes an allowed decision of one limit."""
    head, middle, end = HEAD, MIDDLE, "}]}"
    name, view = f"{TAIL}{_limit_prefix(limit)}", limit.view

    def write(decision: Decision) -> str:
        _, at, _, states, costs = decision  # by position: a fast path
        remaining, _, reset = states[0] if costs is None else view(states[0], limit, costs[0], at)  # type: ignore[misc]  # as Decision.views
        left, after = str(remaining), repr(reset / SECOND)
        return f"{head}{left}{middle}{after}{name}{left}{middle}{after}{end}"

    return write


def _multi_limit_writer(limits: tuple[Limit, ...]) -> Write:
    """Build the function that writes an allowed decision of several limits."""
    head, middle, tail = HEAD, MIDDLE, TAIL
    names = [_limit_prefix(limit) for limit in limits]

    def write(decision: Decision) -> str:
        views = decision.views
        left, after = min([view[0] for view in views]), max([view[2] for view in views]) / SECOND
        each = [
            f"{name}{remaining}{middle}{reset / SECOND!r}"
            for name, (remaining, _, reset) in zip(names, views, strict=True)
        ]
        return f"{head}{left}{middle}{after!r}{tail}{'},'.join(each)}}}]}}"

    return write


def _limit_prefix(limit: Limit) -> str:
    name, unit = json.dumps(limit.name), json.dumps(limit.unit)
    return f'{{"name":{name},"quota":{limit.quota},"unit":{unit},"allowed":true,"remaining":'


def write_without_template(decision: Decision) -> str:
    """Write any decision as JSON."""
    return json.dumps(describe(decision), separators=(",", ":"))


def describe(decision: Decision) -> dict[str, object]:
    """Return a decision as a JSON object."""
    return {
        "allowed": decision.allowed,
        "remaining": decision.remaining,
        "retry_after": decision.retry_after,
        "reset_after": decision.reset_after,
        "violated": list(decision.violated),
        "shadow": isinstance(decision, ShadowDecision) and not decision.within_limits,
        "local": isinstance(decision, LocalDecision),
        "limits": [
            {
                "name": limit.name,
                "quota": limit.quota,
                "unit": limit.unit,
                "allowed": not retry,
                "remaining": remaining,
                "retry_after": None if retry == NEVER else retry / SECOND,
                "reset_after": reset / SECOND,
            }
            for limit, (remaining, retry, reset) in zip(decision.policy_limits, decision.views, strict=True)
        ],
    }


def describe_usage(usage: Mapping[str, Usage]) -> dict[str, object]:
    """Return the usage of a key as a JSON object."""
    return {"limits": [{"name": name, **each._asdict()} for name, each in usage.items()]}


# ---- requests --------------------------------------------------------------------------------------------------------

SUBJECT_FIELDS: Final = ("policy", "key", "domain", "descriptor")
VERB_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "acquire": (*SUBJECT_FIELDS, "cost", "wait", "priority"),
    "peek": (*SUBJECT_FIELDS, "cost"),
    "reserve": (*SUBJECT_FIELDS, "cost", "ttl", "wait", "priority"),
    "lease": (*SUBJECT_FIELDS, "cost", "most", "ttl"),
    "commit": ("id", "cost"),
    "cancel": ("id",),
    "release": (*SUBJECT_FIELDS, "cost"),
    "usage": SUBJECT_FIELDS,
    "reset": SUBJECT_FIELDS,
    "block": (*SUBJECT_FIELDS, "seconds"),
    "unblock": SUBJECT_FIELDS,
    "batch": ("policy", "keys", "asks"),
}
ASK_FIELDS: Final = (*SUBJECT_FIELDS, "cost")


class BadFieldError(ConfigError):
    """An invalid field of a request; `pointer` is its JSON pointer (RFC 6901)."""

    def __init__(self, pointer: str, message: str) -> None:
        """Set the field and the reason."""
        super().__init__(message, field=pointer.replace("/", ".").strip(".") or None)
        self.pointer = pointer
        self.detail = message


class RequestFields(NamedTuple):
    """The fields of a JSON object in a request."""

    values: dict[str, Any]
    pointer: str = ""

    @classmethod
    def read(cls, value: object, known: tuple[str, ...], pointer: str = "") -> RequestFields:
        """Check that a value is an object with only known fields."""
        if not isinstance(value, dict):
            raise BadFieldError(pointer, f"expected an object, not {type_name(value)}")
        for name in value:
            if name not in known:
                raise BadFieldError(f"{pointer}/{escape_pointer(name)}", f"unknown field: {suggest(name, known)}")
        return cls(value, pointer)

    def error(self, name: str, message: str) -> BadFieldError:
        """Build an error about a field."""
        return BadFieldError(f"{self.pointer}/{name}", message)

    def subject(self) -> Subject:
        """Read the subject of the request."""
        values = self.values
        policy = values.get("policy")
        if policy.__class__ is str and "domain" not in values and "descriptor" not in values:
            key = values.get("key")
            if key.__class__ is str:
                return Subject(policy, key)
            if isinstance(key, list) and key and all(part.__class__ is str for part in key):
                return Subject(policy, tuple(key) if len(key) > 1 else key[0])
            raise self.error("key", f"expected a string, or a non-empty list of strings, {self._given('key')}")
        if "domain" not in values:
            if "policy" in values:
                raise self.error("policy", f"expected the name of a policy, {self._given('policy')}")
            raise self.error("policy", "missing: expected policy and key, or domain and descriptor")
        for other in ("policy", "key"):
            if other in values:
                raise self.error(other, "cannot be combined with domain")
        domain = values["domain"]
        if domain.__class__ is not str or not domain:
            raise self.error("domain", f"expected the name of a domain, {self._given('domain')}")
        return Subject(domain=domain, descriptor=self._descriptor())

    def _descriptor(self) -> tuple[tuple[str, str], ...]:
        pairs = self.values.get("descriptor")
        valid = isinstance(pairs, list) and all(
            isinstance(pair, list) and len(pair) == 2 and all(part.__class__ is str for part in pair)  # noqa: PLR2004 - a key and a value
            for pair in pairs
        )
        if not valid or not pairs or len(pairs) > MAX_DESCRIPTOR_PAIRS:
            expected = f'expected a list of 1 to {MAX_DESCRIPTOR_PAIRS} pairs such as [["path", "/login"]]'
            raise self.error("descriptor", expected if pairs else f"{expected}, {self._given('descriptor')}")
        return tuple((key, value) for key, value in pairs)

    def cost(self, default: int | None = 1) -> Cost | None:
        """Read a cost: an integer, or one for each unit."""
        cost = self.values.get("cost", default)
        if (cost.__class__ is int and 0 <= cost <= MAX_INTEGER) or (cost is None and default is None):
            return cost
        values = cost if isinstance(cost, dict) else {"": cost}
        amounts = {unit: amount for unit, value in values.items() if (amount := read_integer(value)) is not None}
        if len(amounts) < len(values):
            wrong = next(value for unit, value in values.items() if unit not in amounts)
            message = f'expected an integer from 0 to {MAX_INTEGER}, or one for each unit such as {{"tokens": 100}}'
            raise self.error("cost", f"{message}, not {describe_value(wrong)}")
        return amounts if isinstance(cost, dict) else amounts[""]

    def number(self, name: str, default: float) -> float:
        """Read a number."""
        value = self.values.get(name, default)
        if value.__class__ is int or value.__class__ is float:
            return float(min(max(value, -1e15), 1e15))
        raise self.error(name, f"expected a number, {self._given(name)}")

    def integer(self, name: str, default: int, maximum: int) -> int:
        """Read an integer from 1."""
        value = self.values.get(name, default)
        if value.__class__ is int and 1 <= value <= maximum:
            return int(value)
        raise self.error(name, f"expected an integer from 1 to {maximum}, {self._given(name)}")

    def string(self, name: str) -> str:
        """Read a required string."""
        value = self.values.get(name)
        if value.__class__ is str and value:
            return value
        raise self.error(name, f"expected a non-empty string, {self._given(name)}")

    def _given(self, name: str) -> str:
        """Return the end of an error message: what the request has instead of the expected value."""
        return f"not {describe_value(self.values[name])}" if name in self.values else "but the field is missing"


def read_integer(value: object) -> int | None:
    """Read an integer; accept 3.0: JSON has only one number type, and some languages write all numbers with a point."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER else None


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


DECODER: Final = json.JSONDecoder(parse_constant=_refuse)


def type_name(value: object) -> str:
    """Return the name of the JSON type of a value."""
    names: tuple[tuple[type, str], ...] = (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a number"),
        (str, "a string"),
        (list, "a list"),
        (dict, "an object"),
    )
    return next((name for each, name in names if isinstance(value, each)), "null")


def describe_value(value: object) -> str:
    """Return a JSON value as error messages show it: a number itself, its type otherwise."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(value)[:MAX_SHOWN_NAME]
    if isinstance(value, list) and value:
        unexpected = next((each for each in value if not isinstance(each, str)), None)
        return f"a list of {len(value)} items" if unexpected is None else f"a list with {type_name(unexpected)}"
    if isinstance(value, (str, list)) and not value:
        return f"an empty {'string' if isinstance(value, str) else 'list'}"
    return type_name(value)


def suggest(name: str, known: Sequence[str]) -> str:
    """Return advice for an unknown name: the closest known name, or all of them."""
    close = get_close_matches(name[:MAX_SHOWN_NAME], known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known)}"


def escape_pointer(name: str) -> str:
    """Escape a name as part of a JSON pointer; a long name is truncated."""
    return name[:100].replace("~", "~0").replace("/", "~1")
