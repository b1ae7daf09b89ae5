"""The responses of the service: each type is the only definition of its JSON fields.

The service encodes them, the clients decode them, and the OpenAPI description has their schemas. A client ignores
fields that it does not know, so that a newer service can add some; bounds are only described, not checked.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, TypedDict

from msgspec import UNSET, Meta, Struct, UnsetType

from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import MAX_INTEGER, SECOND
from tidegate.core.decision import Decision, LocalDecision, ShadowDecision
from tidegate.limiter import Usage

AT_LEAST_0: Final = {"minimum": 0}
Permits = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_INTEGER})]
Seconds = Annotated[float, Meta(extra_json_schema=AT_LEAST_0)]
Names = list[str]
Violated = Annotated[Names, Meta(description="The limits that denied the call.")]
RetryAfter = Annotated[float | None, Meta(description="Seconds; null: never, because the cost exceeds a limit.")]
Ok = Annotated[bool, Meta(extra_json_schema={"const": True})]


class VerbResponse(Struct, gc=False):
    """The JSON object of a response."""

    ALTERNATIVES: ClassVar[tuple[tuple[str, ...], ...]] = ()  # sets of fields, of which a response has one


class LimitResponse(VerbResponse):
    """The result for one limit."""

    name: str
    quota: Permits
    unit: str
    allowed: bool
    remaining: Permits
    retry_after: RetryAfter
    reset_after: Seconds


class DecisionResponse(VerbResponse):
    """A decision."""

    allowed: bool
    remaining: Annotated[int | None, Meta(description="Permits left at the tightest limit; null: not limited.")]
    retry_after: RetryAfter
    reset_after: Seconds
    violated: Violated
    shadow: Annotated[bool, Meta(description="Allowed only because the policy is in shadow mode.")]
    local: Annotated[bool, Meta(description="Decided without the store, which is unavailable.")]
    limits: list[LimitResponse]


class ReserveResponse(DecisionResponse):
    """A decision, and the id that settles the reservation or the lease."""

    id: Annotated[str | None, Meta(description="The id that settles it; null: there is nothing to settle.")]


class LeaseResponse(ReserveResponse):
    """A decision, and permits taken in advance."""

    permits: Annotated[
        Permits, Meta(description="Permits taken, including the call itself; 0: each call needs a request.")
    ]
    seconds: Annotated[Seconds, Meta(description="How long the permits may be used, counted from the request.")]
    decay: Annotated[Seconds, Meta(description="Permits that expire each second.")]


class DoneResponse(VerbResponse):
    """The call was executed."""

    ok: Ok


class BlockResponse(VerbResponse):
    """The key is blocked."""

    ok: Ok
    seconds: Annotated[Seconds, Meta(description="Duration in seconds, as stored.")]


class LimitUsageResponse(VerbResponse):
    """The usage of a key at one limit."""

    name: str
    quota: Permits
    used: int
    remaining: Permits
    reset_after: Seconds
    unit: str


class UsageResponse(VerbResponse):
    """The usage of a key."""

    limits: list[LimitUsageResponse]


class ProblemResponse(VerbResponse):
    """Problem details (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    pointer: str | UnsetType = UNSET


class AnswerResponse(DecisionResponse, omit_defaults=True):
    """The result for one ask of a batch: a decision, or an error."""

    ALTERNATIVES: ClassVar = (DecisionResponse.__struct_fields__, ("error",))

    allowed: bool = False
    remaining: int | None = None
    retry_after: RetryAfter = None
    reset_after: Seconds = 0.0
    violated: Violated = []
    shadow: bool = False
    local: bool = False
    limits: list[LimitResponse] = []
    error: ProblemResponse | UnsetType = UNSET


class BatchResponse(VerbResponse):
    """The results of a batch, in the order of the request."""

    answers: list[AnswerResponse]


class BlockInfo(TypedDict):
    """A block."""

    policy: str
    key: str | list[str]
    seconds: Annotated[Seconds, Meta(description="Seconds until it ends.")]


class BlocksResponse(VerbResponse):
    """The blocks that a process knows of."""

    blocks: list[BlockInfo]


class OverrideInfo(TypedDict):
    """The limits of one key of a policy."""

    key: str | list[str]
    limits: Names


class PolicyInfo(TypedDict):
    """A policy."""

    name: str
    limits: Names
    mode: Annotated[str, Meta(extra_json_schema={"enum": ["enforce", "shadow"]})]
    rollout: Seconds
    on_store_error: Annotated[str, Meta(extra_json_schema={"enum": ["allow", "deny", "local"]})]
    overrides: list[OverrideInfo]


class PoliciesInfo(TypedDict):
    """The policies and domains of a service."""

    policies: list[PolicyInfo]
    domains: Names


DONE: Final = DoneResponse(ok=True)
UNLIMITED: Final = (True, None, 0.0, 0.0, (), False, False, ())  # the fields of a decision without limits


def decision_fields(decision: Decision | None) -> tuple[object, ...]:
    """Return the fields of DecisionResponse, in order; None means not limited."""
    if decision is None:
        return UNLIMITED
    views = decision.views
    limits = [
        LimitResponse(
            limit.name, limit.quota, limit.unit, not retry, left, None if retry == NEVER else retry / SECOND, reset / SECOND
        )
        for limit, (left, retry, reset) in zip(decision[2], views, strict=True)
    ]  # fmt: skip
    if decision.__class__ is Decision and decision[0]:  # by position: a fast path
        if len(limits) == 1:
            only = limits[0]
            return True, only.remaining, 0.0, only.reset_after, (), False, False, limits
        reset_after = max([limit.reset_after for limit in limits])
        return True, min([limit.remaining for limit in limits]), 0.0, reset_after, (), False, False, limits
    return (
        decision.allowed,
        decision.remaining,
        decision.retry_after,
        decision.reset_after,
        decision.violated,
        isinstance(decision, ShadowDecision) and not decision.within_limits,
        isinstance(decision, LocalDecision),
        limits,
    )


def decision_response(decision: Decision | None) -> DecisionResponse:
    """Return a decision as a response; None means not limited."""
    return DecisionResponse(*decision_fields(decision))  # type: ignore[arg-type]  # in the order of the fields


def usage_response(usage: Mapping[str, Usage]) -> UsageResponse:
    """Return the usage of a key as a response."""
    return UsageResponse([LimitUsageResponse(name, *each) for name, each in usage.items()])
