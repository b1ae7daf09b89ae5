"""Writes decisions as JSON, and parses requests as JSON. docs/wire.md describes the format for users.

Writing a response costs more than the decision. So the constant parts of a policy's responses are written once, as a
template, and each response only fills in its numbers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision, ShadowDecision
from tidegate.service.api.fields import BadFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tidegate.core import Limit
    from tidegate.limiter import Usage

    Write = Callable[[Decision], str]

UNLIMITED: Final = (
    '{"allowed":true,"remaining":null,"retry_after":0.0,"reset_after":0.0,"violated":[],"shadow":false,"local":false,'
    '"limits":[]}'
)
HEAD: Final = '{"allowed":true,"remaining":'
MIDDLE: Final = ',"retry_after":0.0,"reset_after":'
TAIL: Final = ',"violated":[],"shadow":false,"local":false,"limits":['
MAX_TEMPLATES: Final = 4096  # sets of limits whose templates are kept


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
