"""Writes the JSON of decisions. If a single limit allows a call, the decision is written into a template of that limit.

A template is the encoded response itself, divided at its numbers: `responses` stays the only definition of the fields.
This takes two thirds of the time of building the response and encoding it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision
from tidegate.service.api.responses import (
    AnswerResponse,
    BatchResponse,
    DecisionResponse,
    LimitResponse,
    decision_response,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core import Limit

    Limits = tuple[Limit, ...]
    Template = tuple[Limits, bytes, bytes, bytes]  # the limits; what is before, between and after their numbers

MAX_TEMPLATES: Final = 10_000  # policies may be reloaded again and again
encode: Final = msgspec.json.Encoder().encode
# The numbers of a decision, and of its only limit. No JSON string contains these fields: its quotes are escaped.
SAMPLE: Final[dict[str, Any]] = {"remaining": -1, "retry_after": 0.0, "reset_after": -1.0}
NUMBERS: Final = b'"remaining":%d,"retry_after":0.0,"reset_after":%b'
BATCH_START, BATCH_END = (encode(BatchResponse([]))[:-2], b"]}")


class DecisionWriter:
    """Writes decisions as JSON, and keeps the templates of their limits."""

    def __init__(self) -> None:
        """Start without templates."""
        self._templates: dict[int, Template] = {}  # by the id of the limits, which a template keeps alive

    def write(self, decision: Decision) -> bytes:
        """Write a decision."""
        return b"".join(self._write_parts(decision))

    def write_batch(self, results: Sequence[Decision | AnswerResponse | None]) -> bytes:
        """Write the results of a batch: decisions (None: not limited) and errors."""
        parts = [BATCH_START]
        for result in results:
            parts += self._write_parts(result)
            parts.append(b",")
        parts[-1] = BATCH_END
        return b"".join(parts)

    def _write_parts(self, result: Decision | AnswerResponse | None) -> Sequence[bytes]:
        if result.__class__ is not Decision or not result[0] or len(result[2]) > 1:
            return (encode(result if isinstance(result, AnswerResponse) else decision_response(result)),)
        _, at, limits, states, costs = result  # by position: a fast path
        limit = limits[0]
        remaining, _, reset = states[0] if costs is None else limit.view(states[0], limit, costs[0], at)  # type: ignore[misc]  # as Decision.views
        _, start, middle, end = self._templates.get(id(limits)) or self._add_template(limits)
        numbers = NUMBERS % (max(0, remaining), encode(reset / SECOND))
        return (start, numbers, middle, numbers, end)

    def _add_template(self, limits: Limits) -> Template:
        if len(self._templates) >= MAX_TEMPLATES:
            self._templates.clear()
        template = self._templates[id(limits)] = build_template(limits)
        return template


def build_template(limits: Limits) -> Template:
    """Divide the JSON of a decision that the only limit allows."""
    limit = limits[0]
    only = LimitResponse(limit.name, limit.quota, limit.unit, allowed=True, **SAMPLE)
    response = DecisionResponse(allowed=True, **SAMPLE, violated=[], shadow=False, local=False, limits=[only])
    start, middle, end = encode(response).split(encode(SAMPLE)[1:-1])
    return limits, start, middle, end
