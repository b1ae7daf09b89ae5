"""The responses of the service: each type is the only definition of its JSON fields.

The service encodes them, the clients decode them, and the OpenAPI description has their schemas. A client ignores
fields that it does not know, so that a newer service can add some; bounds are only described, not checked.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, TypedDict

from msgspec import UNSET, Meta, Struct, UnsetType

from tidegate._limiter.limiter import Usage
from tidegate.core._algorithms import NEVER
from tidegate.core._bounds import MAX_INTEGER, SECOND
from tidegate.core._decision import Decision, LocalDecision, ShadowDecision

AT_LEAST_0: Final = {"minimum": 0}
Permits = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_INTEGER})]
Seconds = Annotated[float, Meta(extra_json_schema=AT_LEAST_0)]
Names = list[str]
Violated = Annotated[Names, Meta(description="The limits that denied the call.")]
RetryAfter = Annotated[float | None, Meta(description="Seconds; null: never, because the cost exceeds a limit.")]
Ok = Annotated[bool, Meta(extra_json_schema={"const": True})]


class VerbResponse(Struct, gc=False):  # no response has cycles
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


SettlingId = Annotated[str | None, Meta(description="The id that settles it; null: there is nothing to settle.")]


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


class AcquireResponse(DecisionResponse):
    """A decision; for a provider, with the id that settles its permits."""

    id: (
        Annotated[str | None, Meta(description="Only for a provider: the id that settles it; null: nothing to settle.")]
        | UnsetType
    ) = UNSET
    member: Annotated[str, Meta(description="Only for a pool: the member whose key to use.")] | UnsetType = UNSET


class ReserveResponse(DecisionResponse):
    """A decision, and the id that settles the reservation."""

    id: SettlingId
    member: Annotated[str, Meta(description="Only for a pool: the member whose key to use.")] | UnsetType = UNSET


class LeaseResponse(DecisionResponse):
    """A decision, permits taken in advance, and the id that settles the lease."""

    id: SettlingId
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

    ALTERNATIVES: ClassVar[tuple[tuple[str, ...], ...]] = (DecisionResponse.__struct_fields__, ("error",))

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


class AuditInfo(TypedDict):
    """An entry of the audit log."""

    at: Annotated[int, Meta(description="Milliseconds since 1970.")]
    action: Annotated[str, Meta(extra_json_schema={"enum": ["reset", "block", "unblock", "add", "refund"]})]
    policy: str
    key: str | list[str]
    seconds: Annotated[float | None, Meta(description="Duration of a block.")]
    actor: str
    address: str
    reason: str


class AuditResponse(VerbResponse):
    """The latest entries of the audit log, the newest first."""

    entries: list[AuditInfo]


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


NO_NAMES: Final[Names] = []
DONE: Final = DoneResponse(ok=True)
UNLIMITED: Final = (True, None, 0.0, 0.0, NO_NAMES, False, False, ())  # the fields of a decision without limits


def decision_response(decision: Decision | None) -> DecisionResponse:
    """Return a decision as a response; None means not limited."""
    if decision.__class__ is not Decision or not decision[0]:
        return DecisionResponse(*decision_fields(decision))  # type: ignore[arg-type]  # in the order of the fields
    _, at, limits, results, costs = decision  # an allowed decision, by position: a fast path
    if len(limits) > 1:
        return DecisionResponse(*decision_fields(decision))  # type: ignore[arg-type]  # as above
    limit = limits[0]
    left, _, reset = results[0] if costs is None else limit.view(results[0], limit, costs[0], at)  # type: ignore[misc]  # as Decision.views
    remaining, after = left if left > 0 else 0, reset / SECOND  # noqa: FURB136 - max() costs 5 % of a batch
    only = LimitResponse(limit.name, limit.quota, limit.unit, True, remaining, 0.0, after)  # noqa: FBT003 - by position: half the cost
    return DecisionResponse(True, remaining, 0.0, after, NO_NAMES, False, False, [only])  # noqa: FBT003 - as above


def decision_fields(decision: Decision | None) -> tuple[object, ...]:
    """Return the fields of DecisionResponse, in order; None means not limited."""
    if decision is None:
        return UNLIMITED
    limits = [
        LimitResponse(
            limit.name,
            limit.quota,
            limit.unit,
            not retry,
            max(0, remaining),
            None if retry == NEVER else retry / SECOND,
            reset / SECOND,
        )
        for limit, (remaining, retry, reset) in zip(decision.policy_limits, decision.views, strict=True)
    ]
    return (
        decision.allowed,
        min([limit.remaining for limit in limits]),
        decision.retry_after,
        max([limit.reset_after for limit in limits]),
        [limit.name for limit in limits if not limit.allowed],
        isinstance(decision, ShadowDecision) and not decision.within_limits,
        isinstance(decision, LocalDecision),
        limits,
    )


def usage_response(usage: Mapping[str, Usage]) -> UsageResponse:
    """Return the usage of a key as a response."""
    return UsageResponse([LimitUsageResponse(name, *each) for name, each in usage.items()])
