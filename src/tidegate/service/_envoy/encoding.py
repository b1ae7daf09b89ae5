"""Builds the RateLimitResponse to a request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tidegate.core._bounds import SECOND
from tidegate.headers import PROBLEM_TYPE, problem, write
from tidegate.service._decisions.descriptors import ENVOY_UNITS, UNIT_PERIODS
from tidegate.service._envoy.messages import CODE_OK, CODE_OVER_LIMIT, message_classes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core._decision import Decision
    from tidegate.headers import Style

MAX_UINT32: Final = 2**32 - 1
UNIT_NUMBERS: Final = {
    period: number for number, name in enumerate(ENVOY_UNITS) if (period := UNIT_PERIODS.get(name)) is not None
}


def encode_response(decisions: Sequence[Decision | None], style: Style) -> bytes:
    """Encode the response to a request; the decision of a descriptor that is not limited is None."""
    response = message_classes()["RateLimitResponse"](overall_code=CODE_OK)
    worst: Decision | None = None
    worst_order: tuple[bool, int] = (False, 0)
    for each in decisions:
        status = response.statuses.add(code=CODE_OK)
        if each is None:
            continue
        decision = each.with_views()
        over = is_over(decision)
        if over:
            status.code = response.overall_code = CODE_OVER_LIMIT
        describe_tightest(decision, status)
        order = (over, -decision.remaining)
        if worst is None or order > worst_order:
            worst, worst_order = decision, order
    if worst is not None:
        denied = response.overall_code == CODE_OVER_LIMIT
        add_header = response.response_headers_to_add.add
        for name, value in write(worst, style):
            if denied or name != "Retry-After":
                add_header(key=name.lower(), value=value)
        if denied:
            add_header(key="content-type", value=PROBLEM_TYPE)
            response.raw_body = json.dumps(problem(worst)).encode()
    return response.SerializeToString()  # type: ignore[no-any-return]  # made at run time


def is_over(decision: Decision) -> bool:
    """Return whether this descriptor itself is over its limit: a denial of another descriptor denies it too."""
    return not decision.allowed and decision.retry != 0


def describe_tightest(decision: Decision, status: Any) -> None:  # noqa: ANN401 - made at run time
    """Describe the tightest limit of a descriptor."""
    limits, views = decision.policy_limits, decision.views
    tightest = min(range(len(views)), key=lambda index: (views[index][1] == 0, views[index][0]))
    limit, (remaining, _, reset) = limits[tightest], views[tightest]
    status.limit_remaining = min(MAX_UINT32, max(0, remaining))
    current, until = status.current_limit, status.duration_until_reset
    current.requests_per_unit, current.name = min(MAX_UINT32, limit.quota), limit.name
    current.unit = UNIT_NUMBERS.get(str(limit.period), 0)  # 0 if Envoy has no such unit
    until.seconds, micros = divmod(reset, SECOND)
    until.nanos = micros * 1000
