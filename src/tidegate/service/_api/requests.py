"""The requests of the service: each type is the only definition of its JSON fields.

msgspec decodes and checks the fields, and writes the JSON schema. What a type cannot express is in `VerbRequest.check`:
which fields belong together (`ALTERNATIVES`). The OpenAPI description reads it. Policies, units and totals are checked
by the Decider.
"""

from itertools import chain
from typing import Annotated, Any, ClassVar, Final

from msgspec import UNSET, Meta, Struct, UnsetType

from tidegate._limiter.waiting import MAX_PRIORITY
from tidegate._policy import Cost
from tidegate.core._bounds import MAX_INTEGER
from tidegate.service._api.fields import BadFieldError
from tidegate.service._decisions.audit import MAX_REASON_LENGTH
from tidegate.service._decisions.blocks import DEFAULT_BLOCK_SECONDS, MAX_BLOCK_SECONDS
from tidegate.service._decisions.leases import MAX_LEASE_PERMITS
from tidegate.service._decisions.policy_limiters import MAX_BATCH, MAX_KEY_LENGTH, MAX_KEY_PARTS, Subject, new_tuple
from tidegate.service._decisions.reservation_ids import MAX_TTL

MAX_DESCRIPTOR_PAIRS: Final = 32  # pairs of a descriptor
MAX_TIMEOUT: Final = 1e15  # seconds: a longer timeout is shortened, and then bounded by max_wait

FieldSets = tuple[tuple[str, ...], ...]

KEY_DESCRIPTION: Final = (
    "The key that is limited: a string, or an array of parts. Different arrays are always different keys."
)

Integer = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
String = Annotated[str, Meta(min_length=1)]
PolicyName = Annotated[String, Meta(description="The name of a policy.")]
RequestKey = Annotated[
    Annotated[str, Meta(max_length=MAX_KEY_LENGTH)]
    | Annotated[list[str], Meta(min_length=1, max_length=MAX_KEY_PARTS)],
    Meta(description=KEY_DESCRIPTION),
]
Domain = Annotated[String, Meta(description="A domain of descriptors, instead of a policy.")]
ProviderTarget = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_KEY_LENGTH,
        description="The name or the domain of a provider, or a URL, instead of a policy.",
    ),
]
Descriptor = Annotated[
    tuple[tuple[str, str], ...],
    Meta(min_length=1, max_length=MAX_DESCRIPTOR_PAIRS, extra={"example": '[["path", "/login"]]'}),
]
Costs = Integer | Annotated[dict[str, Integer], Meta(extra={"example": '{"tokens": 100}'})]
Permits = Annotated[Costs, Meta(description="Permits: an integer, or one for each unit.")]
ActualCost = Annotated[Costs | None, Meta(description="The actual cost. null: the estimate.")]
Timeout = Annotated[float, Meta(description="Seconds to wait for a permit, at most max_wait.")]
Priority = Annotated[  # the Decider checks the bounds: they are a setting
    float,
    Meta(
        description="Calls with a higher priority are served first.",
        extra_json_schema={"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    ),
]
Ttl = Annotated[float, Meta(gt=0, le=MAX_TTL, description="Seconds until it expires.")]
BlockSeconds = Annotated[float, Meta(gt=0, le=MAX_BLOCK_SECONDS, description="Duration in seconds.")]
LeasePermits = Annotated[int, Meta(ge=1, le=MAX_LEASE_PERMITS, description="Permits to lease.")]
AuditText = Annotated[str, Meta(max_length=MAX_REASON_LENGTH, description="Shown in the audit log, as given.")]
ReservationIdField = Annotated[String, Meta(description="The id that reserve or lease returned.")]


class VerbRequest(Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):  # no request has cycles
    """The JSON object of a request."""

    ALTERNATIVES: ClassVar[FieldSets] = ()  # sets of required fields: a request has one of them

    def check(self) -> None:
        """Raise BadFieldError if the fields do not belong together."""
        check_alternatives(self)

    @property
    def wait_seconds(self) -> float:
        """The seconds that the call may wait for a permit."""
        return 0.0


class SubjectRequest(VerbRequest):
    """A request about a key of a policy, or about a descriptor of a domain."""

    ALTERNATIVES: ClassVar[FieldSets] = (("policy", "key"), ("domain", "descriptor"))

    policy: PolicyName | UnsetType = UNSET
    key: RequestKey | UnsetType = UNSET
    domain: Domain | UnsetType = UNSET
    descriptor: Descriptor | UnsetType = UNSET

    def check(self) -> None:
        """Raise BadFieldError if the fields do not belong together."""
        if (
            self.policy is UNSET or self.key is UNSET or self.domain is not UNSET or self.descriptor is not UNSET
        ):  # not the most common request
            check_alternatives(self)

    @property
    def subject(self) -> Subject:
        """The subject, of a request that was checked."""
        key = self.key
        if key.__class__ is str:
            return new_tuple(Subject, (self.policy, key, "", (), ""))
        if key is UNSET or self.policy is UNSET:
            return Subject(domain=self.domain or "", descriptor=self.descriptor or ())
        return Subject(self.policy, tuple(key) if len(key) > 1 else key[0])


class CostRequest(SubjectRequest):
    """A request about a subject, with a cost."""

    cost: Permits = 1


class TargetRequest(SubjectRequest):
    """A request about a subject, or about a provider."""

    ALTERNATIVES: ClassVar[FieldSets] = (*SubjectRequest.ALTERNATIVES, ("provider",))

    provider: ProviderTarget | UnsetType = UNSET

    def check(self) -> None:
        """Raise BadFieldError if the fields do not belong together."""
        if (
            self.policy is UNSET
            or self.key is UNSET
            or self.domain is not UNSET
            or self.descriptor is not UNSET
            or self.provider is not UNSET
        ):  # not the most common request
            check_alternatives(self)


class PeekRequest(TargetRequest):
    """A request about a subject or a provider, with a cost: 1 by default, or the provider's own."""

    cost: Permits | UnsetType = UNSET

    @property
    def permits(self) -> Cost:
        """The cost at a policy."""
        return 1 if self.cost is UNSET else self.cost

    @property
    def provider_permits(self) -> Cost | None:
        """The cost at a provider; None: its own."""
        return None if self.cost is UNSET else self.cost


class WaitingRequest(PeekRequest):
    """A request that may wait for a permit."""

    timeout: Timeout = 0.0
    priority: Priority = 0.0

    @property
    def wait_seconds(self) -> float:
        """The seconds that the call may wait for a permit."""
        return min(max(self.timeout, -MAX_TIMEOUT), MAX_TIMEOUT)


class AcquireRequest(WaitingRequest):
    """A request of `acquire`."""


class ReserveRequest(WaitingRequest):
    """A request of `reserve`."""

    ttl: Ttl = 60.0


class LeaseRequest(CostRequest):
    """A request of `lease`."""

    max_permits: LeasePermits = 1
    ttl: Ttl = 1.0


class AuditedRequest(SubjectRequest):
    """A request that the audit log records."""

    reason: AuditText = ""
    actor: AuditText = ""


class BlockRequest(AuditedRequest):
    """A request of `block`."""

    seconds: BlockSeconds = DEFAULT_BLOCK_SECONDS


class CancelRequest(VerbRequest):
    """A request about a reservation or a lease."""

    id: ReservationIdField


class CommitRequest(CancelRequest):
    """A request of `commit`."""

    cost: ActualCost = None


class AskRequest(CostRequest):
    """One of the asks of a batch: an unknown policy or a key that is too long gets an error as its result."""

    policy: str | UnsetType = UNSET
    key: (
        Annotated[
            str | Annotated[list[str], Meta(min_length=1)],
            Meta(description="A key. An invalid key gets an error as its result."),
        ]
        | UnsetType
    ) = UNSET


class BatchRequest(VerbRequest):
    """A request of `batch`: keys of one policy with a cost of 1 each, or asks."""

    ALTERNATIVES: ClassVar[FieldSets] = (("asks",), ("policy", "keys"))

    asks: Annotated[list[AskRequest], Meta(min_length=1, max_length=MAX_BATCH)] | UnsetType = UNSET
    policy: PolicyName | UnsetType = UNSET
    # Any value: an invalid key gets its error as its result, and the other keys are decided.
    keys: Annotated[list[Any], Meta(min_length=1, max_length=MAX_BATCH)] | UnsetType = UNSET

    def check(self) -> None:
        """Raise BadFieldError if the fields do not belong together."""
        super().check()
        number = -1
        try:
            for number, ask in enumerate(self.asks or ()):  # noqa: B007 - the error needs the number
                ask.check()
        except BadFieldError as error:
            raise BadFieldError(f"/asks/{number}{error.pointer}", error.detail) from None


def is_given(request: VerbRequest, field: str) -> bool:
    """Return whether a request has a field."""
    return getattr(request, field) is not UNSET


def check_alternatives(request: VerbRequest) -> None:
    """Check that a request has exactly one of its alternative sets of fields."""
    alternatives = request.ALTERNATIVES
    given = [field for field in dict.fromkeys(chain.from_iterable(alternatives)) if is_given(request, field)]
    if not alternatives or any(sorted(given) == sorted(fields) for fields in alternatives):
        return
    expected = ", or ".join(" and ".join(fields) for fields in alternatives)
    if not given:
        raise BadFieldError(f"/{alternatives[0][0]}", f"missing: expected {expected}")
    # The alternative that the request most likely means: a complete one, or the one of its first field.
    complete = [fields for fields in alternatives if set(fields) <= set(given)]
    chosen = complete[0] if complete else next(fields for fields in alternatives if given[0] in fields)
    for field in given:
        if field not in chosen:
            raise BadFieldError(f"/{field}", f"cannot be combined with {chosen[0]}: expected {expected}")
    missing = next(field for field in chosen if field not in given)
    raise BadFieldError(f"/{missing}", f"missing: expected {expected}")


def as_cost(cost: Cost) -> int | dict[str, int]:
    """Return a cost as a request has it."""
    return cost if isinstance(cost, int) else dict(cost)
