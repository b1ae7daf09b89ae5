"""Decisions as JSON, and JSON as questions. docs/wire.md describes it for users.

Writing an answer costs more than deciding, so what never changes about a policy's answers is written once, as a
template, and an answer fills in its numbers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import MAX_INTEGER, SECOND
from tidegate.core.decision import Decision, LocalDecision, ShadowDecision
from tidegate.errors import ConfigError
from tidegate.service.decisions.decider import Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


# ---- answers ---------------------------------------------------------------------------------------------------------


class DecisionWriter:
    """Writes decisions. One for each app."""

    def __init__(self) -> None:
        """Know no limits yet."""
        self._known: dict[int, tuple[tuple[Limit, ...], Write]] = {}

    def write(self, decision: Decision | None) -> str:
        """Write a decision as JSON; None: not limited."""
        if decision.__class__ is not Decision or not decision[0]:
            return UNLIMITED if decision is None else denied_text(decision)
        limits = decision[2]
        found = self._known.get(id(limits))
        if found is None or found[0] is not limits:
            found = self._learn(limits)
        return found[1](decision)

    def _learn(self, limits: tuple[Limit, ...]) -> tuple[tuple[Limit, ...], Write]:
        if len(self._known) >= MAX_TEMPLATES:
            self._known.clear()
        found = self._known[id(limits)] = (limits, _one(limits[0]) if len(limits) == 1 else _several(limits))
        return found


def _one(limit: Limit) -> Write:
    """Build what writes that a single limit allowed a call."""
    head, middle, end = HEAD, MIDDLE, "}]}"
    name, view = f"{TAIL}{_name(limit)}", limit.rules.view

    def write(decision: Decision) -> str:
        _, at, _, told, costs = decision
        remaining, _, reset = told[0] if costs is None else view(told[0], limit, costs[0], at)  # type: ignore[misc]  # as Decision.views
        left, after = str(remaining), repr(reset / SECOND)
        return f"{head}{left}{middle}{after}{name}{left}{middle}{after}{end}"

    return write


def _several(limits: tuple[Limit, ...]) -> Write:
    """Build what writes that several limits allowed a call."""
    head, middle, tail = HEAD, MIDDLE, TAIL
    names = [_name(limit) for limit in limits]

    def write(decision: Decision) -> str:
        views = decision.views
        left, after = min([view[0] for view in views]), max([view[2] for view in views]) / SECOND
        each = [
            f"{name}{remaining}{middle}{reset / SECOND!r}"
            for name, (remaining, _, reset) in zip(names, views, strict=True)
        ]
        return f"{head}{left}{middle}{after!r}{tail}{'},'.join(each)}}}]}}"

    return write


def _name(limit: Limit) -> str:
    name, unit = json.dumps(limit.name), json.dumps(limit.unit)
    return f'{{"name":{name},"quota":{limit.quota},"unit":{unit},"allowed":true,"remaining":'


def denied_text(decision: Decision) -> str:
    """Write any decision, a denial for one."""
    return json.dumps(describe(decision), separators=(",", ":"))


def describe(decision: Decision) -> dict[str, object]:
    """Word a decision for a program."""
    return {
        "allowed": decision.allowed,
        "remaining": decision.remaining,
        "retry_after": decision.retry_after,
        "reset_after": decision.reset_after,
        "violated": list(decision.violated),
        "shadow": isinstance(decision, ShadowDecision) and not decision[0],
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
            for limit, (remaining, retry, reset) in zip(decision[2], decision.views, strict=True)
        ],
    }


def describe_usage(usage: Mapping[str, Usage]) -> dict[str, object]:
    """Word what a key has used, limit by limit."""
    return {"limits": [{"name": name, **each._asdict()} for name, each in usage.items()]}


# ---- questions -------------------------------------------------------------------------------------------------------

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
    """A field of a request that cannot be used; `pointer` says which, as RFC 6901 does."""

    def __init__(self, pointer: str, message: str) -> None:
        """Say which field and why."""
        super().__init__(message, field=pointer.replace("/", ".").strip(".") or None)
        self.pointer = pointer
        self.detail = message


class RequestFields(NamedTuple):
    """A JSON object of a request, read field by field."""

    values: dict[str, Any]
    pointer: str = ""

    @classmethod
    def read(cls, value: object, known: tuple[str, ...], pointer: str = "") -> RequestFields:
        """Take an object with some of the known fields and no others."""
        if not isinstance(value, dict):
            raise BadFieldError(pointer, f"expected an object, not {kind(value)}")
        for name in value:
            if name not in known:
                raise BadFieldError(f"{pointer}/{escaped(name)}", f"unknown field: known are {', '.join(known)}")
        return cls(value, pointer)

    def error(self, name: str, message: str) -> BadFieldError:
        """Word an error about a field."""
        return BadFieldError(f"{self.pointer}/{name}", message)

    def subject(self) -> Subject:
        """Read who is asked about."""
        values = self.values
        policy = values.get("policy")
        if policy.__class__ is str and "domain" not in values and "descriptor" not in values:
            key = values.get("key")
            if key.__class__ is str:
                return Subject(policy, key)
            if isinstance(key, list) and key and all(part.__class__ is str for part in key):
                return Subject(policy, tuple(key) if len(key) > 1 else key[0])
            raise self.error("key", "expected a text, or a list of texts, that names whoever is limited")
        if "domain" not in values:
            if "policy" in values or "key" in values:
                raise self.error("policy", "expected the name of a policy")
            raise self.error("policy", "needs a policy and a key, or a domain and a descriptor")
        for other in ("policy", "key"):
            if other in values:
                raise self.error(other, "stands beside domain: leave one of them out")
        domain = values["domain"]
        if domain.__class__ is not str or not domain:
            raise self.error("domain", "expected the name of a domain")
        return Subject(domain=domain, descriptor=self._descriptor())

    def _descriptor(self) -> tuple[tuple[str, str], ...]:
        pairs = self.values.get("descriptor")
        texts = isinstance(pairs, list) and all(
            isinstance(pair, list) and len(pair) == 2 and all(part.__class__ is str for part in pair)  # noqa: PLR2004 - a key and a value
            for pair in pairs
        )
        if not texts or not pairs or len(pairs) > MAX_DESCRIPTOR_PAIRS:
            raise self.error("descriptor", f'expected 1 to {MAX_DESCRIPTOR_PAIRS} pairs such as [["path", "/login"]]')
        return tuple((key, value) for key, value in pairs)

    def cost(self, default: int | None = 1) -> Cost | None:
        """Read a cost: a whole number, or one for each unit."""
        cost = self.values.get("cost", default)
        if (cost.__class__ is int and 0 <= cost <= MAX_INTEGER) or (cost is None and default is None):
            return cost
        asked = cost if isinstance(cost, dict) else {"": cost}
        amounts = {unit: amount for unit, value in asked.items() if (amount := whole(value)) is not None}
        if len(amounts) < len(asked):
            message = f'expected a whole number from 0 to {MAX_INTEGER}, or one for each unit such as {{"tokens": 100}}'
            raise self.error("cost", message)
        return amounts if isinstance(cost, dict) else amounts[""]

    def number(self, name: str, default: float) -> float:
        """Read a number of seconds, or the like."""
        value = self.values.get(name, default)
        if value.__class__ is int or value.__class__ is float:
            return float(min(max(value, -1e15), 1e15))
        raise self.error(name, "expected a number")

    def whole(self, name: str, default: int, most: int) -> int:
        """Read a whole number from 1."""
        value = self.values.get(name, default)
        if value.__class__ is int and 1 <= value <= most:
            return int(value)
        raise self.error(name, f"expected a whole number from 1 to {most}")

    def text(self, name: str) -> str:
        """Read a text that has to be there."""
        value = self.values.get(name)
        if value.__class__ is str and value:
            return value
        raise self.error(name, "expected a text")


def whole(value: object) -> int | None:
    """Read a whole number; 3.0 is one: JSON has one kind of number, and some languages write all of them like that."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER else None


def loads(body: bytes) -> Any:  # noqa: ANN401 - whatever was sent
    """Read JSON, strictly: no NaN, no duplicate meaning by encoding, nothing too deep."""
    try:
        return DECODER.decode(body.decode("utf-8"))
    except RecursionError:
        raise BadFieldError("", "is nested too deeply") from None
    except ValueError as error:
        raise BadFieldError("", f"is not JSON: {error}") from None


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


DECODER: Final = json.JSONDecoder(parse_constant=_refuse)


def kind(value: object) -> str:
    """Name the kind of a JSON value."""
    kinds: tuple[tuple[type, str], ...] = (
        (bool, "a flag"),
        (int, "a number"),
        (float, "a number"),
        (str, "a text"),
        (list, "a list"),
        (dict, "an object"),
    )
    return next((name for each, name in kinds if isinstance(value, each)), "nothing")


def escaped(name: str) -> str:
    """Write a name as part of a JSON pointer, not longer than anybody needs."""
    return name[:100].replace("~", "~0").replace("/", "~1")
