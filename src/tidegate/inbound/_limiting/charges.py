"""What a request is charged, and the result of the decision about it: the types that deciding and settling share.

charges of categories ─┐
limits of the route ───┴► decide_flow ──► ChargeResult ─┬► settle_flow   when the response is known
                          (`decide`)                    └► refund_flow   if another limit denies it later
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tidegate._limiter.reservation import apply_async
from tidegate._limiter.waiting import ApplyStep
from tidegate.core._decision import Decision, LocalDecision
from tidegate.inbound._responses.response import combine_decisions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidegate._limiter.limiter import Limiter
    from tidegate._policy import Cost, Key, Policy
    from tidegate._runtime.clock import Clock
    from tidegate.core import Limit
    from tidegate.inbound._client.denial_blocks import DenialBlocks
    from tidegate.inbound._client.identify import ClientIdentifier
    from tidegate.inbound._client.request import FrameworkRequest, Request
    from tidegate.inbound._responses.response import DenialHandler, Response, ResponseWriter
    from tidegate.inbound._rules.model import Rules
    from tidegate.stores import Store

    OnDenied = Callable[[Any, Decision], object]

log: logging.Logger = logging.getLogger("tidegate.inbound")

NO_CHARGES: Final[tuple[Any, ...]] = ()


def perform(step: Any) -> Any:  # noqa: ANN401 - a step of any flow
    """Perform a step in this thread: a call of a store, or any other call."""
    return step.apply() if step.__class__ is ApplyStep else step()


def perform_async(step: Any) -> Any:  # noqa: ANN401 - as above
    """Perform a step in a task; the result may be awaitable."""
    return apply_async(step) if step.__class__ is ApplyStep else step()


class ChargeOwner(Protocol):
    """What a charge belongs to: a category, or a limit of a route."""

    limits_routes: bool  # whether it is a limit of a route

    @property
    def denied(self) -> DenialHandler | None:
        """Returns a custom response to a denied request."""

    @property
    def on_denied(self) -> OnDenied | None:
        """Called for each denial."""

    def record(self, key: Key, decision: Decision) -> None:
        """Count a decision, for the statistics."""

    def correct(self, key: Key, decision: Decision) -> None:
        """Replace the last decision about a client, whose charge was corrected."""

    def final_cost(self, request: Any, status: int, cost: Cost) -> Cost | None:  # noqa: ANN401 - a framework's
        """Return the final cost of a request, given the status of its response; None: the estimated cost."""


class UnrecordedOwner:
    """An owner of charges that has no statistics, and whose charges the response does not change."""

    limits_routes: bool = True
    denied: DenialHandler | None = None
    on_denied: Callable[[FrameworkRequest, Decision], object] | None = None

    def record(self, key: Key, decision: Decision) -> None:
        """Count nothing: the statistics are about categories."""

    def correct(self, key: Key, decision: Decision) -> None:
        """Count nothing."""

    def final_cost(self, request: object, status: int, cost: Cost) -> Cost | None:
        """Return None: the response changes nothing."""


UNRECORDED: Final = UnrecordedOwner()


class Reporter(Protocol):
    """The request limiter of a charge: what it is recorded in, and what happens if the store fails."""

    observed: bool
    shows_next_permit: bool
    maintenance_due: int
    own_clock: Clock | None
    raw: bool
    response_writer: ResponseWriter
    client_identifier: ClientIdentifier
    rules: Rules
    store: Store

    def now(self) -> int:
        """Return the time in microseconds since 1970."""

    def run_maintenance(self, now: int) -> None:
        """Reload the file if it has changed, and remove expired clients."""

    def notify(self, policy: Policy, key: Key, cost: Cost, decision: Decision, method: str, path: str) -> None:
        """Count a denial, and pass a decision to the log and the observer."""

    def deny_without_store(self, policy: Policy, error: Exception) -> Decision | None:
        """Log a store error; return the denial of a policy that denies meanwhile, None if requests are allowed."""


class LimitBlocks(NamedTuple):
    """The blocks of one limit, and until when they block the client of a charge (0: it is not blocked)."""

    denial_blocks: DenialBlocks
    until: int


class RequestCharge(NamedTuple):
    """What a request is to be charged: one policy, of a category or of a limit of the route."""

    limiter: Limiter
    key: Key
    cost: Cost
    owner: ChargeOwner
    reporter: Reporter
    reserves: bool = False  # the response may change the cost
    native: object = None  # the framework's request, for functions of a limit
    blocks: LimitBlocks | None = None  # if the limit blocks clients that it has denied too often

    def at(self, key: Key) -> RequestCharge:
        """Return the same charge of another key."""
        return RequestCharge(self[0], key, *self[2:])  # a fourth of the time of `_replace`

    @property
    def policy(self) -> Policy:
        """The policy that is charged."""
        return self.limiter.policy


class MadeCharge(NamedTuple):
    """A charge and the decision about it."""

    charge: RequestCharge
    decision: Decision
    verb: str = "acquire"  # empty: nothing can be refunded

    @property
    def denies(self) -> bool:
        """Whether this is one of the limits that denied the request."""
        return (
            self.charge.limiter.policy.mode == "enforce"
            and not self.decision.within_limits
            and any(view[1] for view in self.decision.views)
        )


class PreparedCharges(Protocol):
    """What `decide.ChargeSet` is for a result: the charges that requests to one target have in common."""

    charges: tuple[RequestCharge, ...]
    reserves: bool
    holds_slots: bool
    verb: str

    def write(self, decisions: Sequence[Decision]) -> list[Any]:
        """Return the header fields of an allowed request."""

    def write_after(self, before: Any, decisions: Sequence[Decision]) -> list[Any]:  # noqa: ANN401 - of the same kind
        """Return the header fields of a request that was charged others before; `decisions` are about both."""


class ChargeResult:
    """Whether a request is allowed, and the decisions about it; `denials`: those that denied it.

    The result of prepared charges keeps only keys and decisions; most requests need no more.
    """

    # Attributes of the class cost nothing for each request.
    allowed: bool = True
    denials: Sequence[MadeCharge] = NO_CHARGES
    block: Decision | None = None  # the client is blocked: before the decision, or because of this denial
    prepared: PreparedCharges | None = None  # what was charged, at these keys
    keys: Sequence[Key] = NO_CHARGES
    decisions: Sequence[Decision] = NO_CHARGES
    before: ChargeResult | None = None  # of prepared charges that the request was charged in an earlier step
    _decided: Sequence[MadeCharge] | None = None

    @classmethod
    def of(
        cls,
        decided: Sequence[MadeCharge],
        denials: Sequence[MadeCharge] | None = None,
        block: Decision | None = None,
    ) -> ChargeResult:
        """Return the result of several decisions; with `denials`, the request is denied."""
        result = cls()
        result._decided = decided
        if denials is not None:
            result.allowed, result.denials, result.block = False, denials, block
        return result

    @classmethod
    def of_block(cls, charge: RequestCharge, decision: Decision) -> ChargeResult:
        """Return the denial of a client that is blocked; the headers show the limits of this charge."""
        return cls.of([], [MadeCharge(charge, decision, "")], decision)

    @property
    def decided(self) -> Sequence[MadeCharge]:
        """All charges that were decided."""
        if self._decided is None:
            prepared = self.prepared
            if prepared is None:
                return NO_CHARGES
            rows = zip(prepared.charges, self.keys, self.decisions, strict=True)
            verb = prepared.verb
            self._decided = [MadeCharge(charge.at(key), decision, verb) for charge, key, decision in rows]
        return self._decided

    def write(self) -> list[Any]:
        """Return the header fields of a request that prepared charges have allowed."""
        prepared, before = self.prepared, self.before
        assert prepared is not None  # noqa: S101 - see above
        if before is None:
            return prepared.write(self.decisions)
        return prepared.write_after(before.prepared, [*before.decisions, *self.decisions])

    def replace(self, *, decided: Sequence[MadeCharge] | None = None, block: Decision | None = None) -> ChargeResult:
        """Return this result with other decisions, or a block."""
        denials = None if self.allowed else self.denials
        return ChargeResult.of(self.decided if decided is None else decided, denials, block)

    @property
    def decision(self) -> Decision | None:
        """All decisions combined, or the block of the client; None if nothing was decided."""
        if self.block is not None:
            return self.block
        if not self.decided:
            return None
        decision = combine_decisions([each.decision for each in self.decided])
        lost = any(isinstance(each.decision, LocalDecision) for each in self.denials)
        return LocalDecision(decision) if lost else decision

    @property
    def by_route(self) -> bool:
        """Whether limits of the route are among those that denied the request: the endpoint answers it."""
        return any(each.charge.owner.limits_routes for each in self.denials)

    def record(self, method: str, path: str) -> None:
        """Record the decisions of an allowed request; of a denied one, those that denied it."""
        for charge, decision, verb in self.decided if self.allowed else self.denials:
            if verb or decision is self.block:
                record(charge, decision, method, path)

    def write_denial(self, request: Request, native: object) -> Response:
        """Build the response to a denied request; `native` is the framework's request, for functions of limits.

        The first denying limit that has a function `denied` chooses the response, otherwise the middleware does.
        """
        charge = self.denials[0].charge
        writer = charge.reporter.response_writer
        for each in self.denials:
            denied = each.charge.owner.denied
            if denied is not None:
                writer = writer.with_denied(partial(_call_with_native, denied, native))
                break
        decision = self.decision
        assert decision is not None  # noqa: S101 - a denial has a decision
        return writer.write_denial(request, decision.with_views(), charge.policy)

    def call_on_denied(self, native: object) -> None:
        """Call the functions `on_denied` of limits. The client gets its 429 even if a function fails."""
        for each in self.denials:
            on_denied = each.charge.owner.on_denied
            if on_denied is not None:
                try:
                    on_denied(native, each.decision)
                except Exception:
                    log.exception("%s: the function on_denied failed", each.charge.policy.name)


ALLOWED: Final = ChargeResult()


def _call_with_native(denied: DenialHandler, native: object, request: Request, decision: Decision) -> Any:  # noqa: ANN401 - see DenialHandler
    """Call the function of a limit, which receives the framework's own request."""
    del request
    return denied(native, decision)


def record(charge: RequestCharge, decision: Decision, method: str, path: str) -> None:
    """Record a decision in the statistics, the log and the observer."""
    charge.owner.record(charge.key, decision)
    reporter = charge.reporter
    if reporter.observed or not decision[0]:
        reporter.notify(charge.policy, charge.key, charge.cost, decision, method, path)
    if decision[1] >= reporter.maintenance_due:
        reporter.run_maintenance(decision[1])


def has_slots(policy: Policy) -> bool:
    """Return whether requests hold slots of a limit until their responses are complete."""
    return holds_slots(policy.limits)


def holds_slots(limits: Iterable[Limit]) -> bool:
    """Return whether requests hold slots of one of the limits until their responses are complete."""
    return any(limit.rules.holds_slots for limit in limits)


def refills(policy: Policy) -> bool:
    """Return whether a limit of the policy refills, so that only a marked charge can be refunded exactly."""
    return any([limit.rules.refills for limit in policy.limits])  # noqa: C419 - a generator costs more
