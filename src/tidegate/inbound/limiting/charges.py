"""Decides about all charges of a request together: all or nothing, one call for each store.

    charges of categories ─┐
    limits of the route ───┴► decide_flow ──► ChargeResult ─┬► settle_flow   when the response is known
                                                            └► refund_flow   if another limit denies it later

Limits in different slots of a Redis Cluster, or in different stores, cannot be decided in one step: they are charged
one after another; if one denies, the earlier charges are refunded. Limits in shadow mode never deny.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import RateLimitError
from tidegate.flow import complete_flow
from tidegate.inbound.responses.next_permit import with_next_permits
from tidegate.inbound.responses.response import combine_decisions
from tidegate.joint import LimiterGroup
from tidegate.reservation import ReservedCharge, apply_async, charged_at
from tidegate.stores.cancellation import corrections
from tidegate.waiting import ApplyStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidegate.core import Limit
    from tidegate.core.algorithms import View
    from tidegate.flow import Flow
    from tidegate.inbound.client.request import Request
    from tidegate.inbound.responses.response import DenialHandler, Response, ResponseWriter
    from tidegate.limiter import Limiter
    from tidegate.policy import Cost, Key, Policy
    from tidegate.stores import Store
    from tidegate.stores.base import Ask

    OnDenied = Callable[[Any, Decision], object]
    Correcting = tuple[Store, int | None, list[Ask], int | None]  # store, time, asks, time of the charge

log: logging.Logger = logging.getLogger("tidegate.inbound")

FIRST_SERVER_ERROR: Final = 500  # the status assumed if there is no response
MAX_RESPONSE_TIME: Final = 3600 * SECOND  # after this time an unsettled charge becomes final
MAX_GROUPS: Final = 1000  # limiters that are charged together, prepared; the cache is cleared when it is full


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


class Reporter(Protocol):
    """The request limiter of a charge: what it is recorded in, and what happens if the store fails."""

    observed: bool
    shows_next_permit: bool
    maintenance_due: int
    response_writer: ResponseWriter
    groups: dict[tuple[Limiter, ...], LimiterGroup]

    def now(self) -> int:
        """Return the time in microseconds since 1970."""

    def run_maintenance(self, now: int) -> None:
        """Reload the file if it has changed, and remove expired clients."""

    def notify(self, policy: Policy, key: Key, cost: Cost, decision: Decision, method: str, path: str) -> None:
        """Count a denial, and pass a decision to the log and the observer."""

    def deny_without_store(self, policy: Policy, error: Exception) -> Decision | None:
        """Log a store error; return the denial of a policy that denies meanwhile, None if requests are allowed."""


class RequestCharge(NamedTuple):
    """What a request is to be charged: one policy, of a category or of a limit of the route."""

    limiter: Limiter
    key: Key
    cost: Cost
    owner: ChargeOwner
    reporter: Reporter
    reserves: bool = False  # the response may change the cost
    native: object = None  # the framework's request, for functions of a limit

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


class ChargeResult(NamedTuple):
    """Whether a request is allowed, and the decisions about it; `denials`: those that denied it."""

    allowed: bool
    decided: list[MadeCharge]
    denials: list[MadeCharge]
    block: Decision | None = None  # the client is blocked: before the decision, or because of this denial

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
            if verb:
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


ALLOWED: Final = ChargeResult(allowed=True, decided=[], denials=[])


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


# ---- decide ----------------------------------------------------------------------------------------------------------


def decide_flow(charges: Sequence[RequestCharge], *, more: bool = False) -> Flow[Any, ChargeResult]:
    """Charge all limits of a request or none. `more`: limits that are decided later may deny the request."""
    if not charges:
        return ALLOWED
    store = charges[0].limiter.store
    if any(charge.limiter.store is not store for charge in charges):
        return (yield from _decide_stores_flow(charges))
    verb = "acquire"
    for charge in charges:
        if charge.reserves or (more and refills(charge.limiter.policy)):
            verb = "hold"
            break
    group = prepared_group(charges)
    keys, costs = [charge.key for charge in charges], None
    if any([charge.cost != 1 for charge in charges]):  # noqa: C419 - a generator costs more
        costs = [charge.cost for charge in charges]
    try:
        decisions: Sequence[Decision | None] | None = group.charge(keys, costs, verb)
        if decisions is None:
            decisions = yield from group.charge_flow(keys, costs, verb)
    except RateLimitError as error:
        return _result_without_store(charges, error)
    result = result_of(charges, decisions, verb)
    if charges[0].reporter.shows_next_permit:
        return (yield from _with_next_permits_flow(result))
    return result


def prepared_group(charges: Sequence[RequestCharge]) -> LimiterGroup:
    """Return the limiters of charges, prepared to be charged together."""
    groups = charges[0].reporter.groups
    limiters = tuple([charge.limiter for charge in charges])
    found = groups.get(limiters)
    if found is None:
        if len(groups) >= MAX_GROUPS:
            groups.clear()
        found = groups[limiters] = LimiterGroup(limiters)
    return found


def result_of(
    charges: Sequence[RequestCharge], decisions: Sequence[Decision | None], verb: str = "acquire"
) -> ChargeResult:
    """Return the result of charges that were decided together; None: not asked, because an earlier one denied."""
    decided = []
    allowed = True
    for charge, decision in zip(charges, decisions, strict=True):
        if decision is not None:
            decided.append(MadeCharge(charge, decision, verb))
            allowed = allowed and decision.allowed
    if allowed:
        return ChargeResult(True, decided, [])  # noqa: FBT003 - by position: this runs for every request
    denials = [each for each in decided if each.denies]
    return ChargeResult(allowed=False, decided=decided, denials=denials or decided)


def _decide_stores_flow(charges: Sequence[RequestCharge]) -> Flow[Any, ChargeResult]:
    """Charge store after store; if one denies, refund those before it. One that fails does not disable the others."""
    stores: dict[int, list[RequestCharge]] = {}
    for charge in charges:
        stores.setdefault(id(charge.limiter.store), []).append(charge)
    made: list[MadeCharge] = []
    try:
        for group in stores.values():
            result = yield from decide_flow(group, more=True)
            if not result.allowed:
                yield from refund_flow(made)
                return result._replace(decided=[*made, *result.decided])
            made += result.decided
    except BaseException as raised:
        if not isinstance(raised, GeneratorExit):
            yield from refund_flow(made)
        raise
    return ChargeResult(allowed=True, decided=made, denials=[])


def _result_without_store(charges: Sequence[RequestCharge], error: Exception) -> ChargeResult:
    """Return the denial of the first policy that denies requests while the store fails; otherwise allow them."""
    for charge in charges:
        denial = charge.reporter.deny_without_store(charge.policy, error)
        if denial is not None and charge.policy.mode == "enforce":
            made = [MadeCharge(charge, denial, "")]
            return ChargeResult(allowed=False, decided=made, denials=made)
    return ALLOWED


def _with_next_permits_flow(result: ChargeResult) -> Flow[Any, ChargeResult]:
    """Return a result whose decisions also say when each limit has its next permit."""
    shown: dict[int, MadeCharge] = {}
    try:
        for each in result.decided:
            decision = yield from find_next_permits_flow(each.charge, each.decision, each.charge.cost)
            shown[id(each)] = each._replace(decision=decision)
    except BaseException as raised:
        if result.allowed and not isinstance(raised, GeneratorExit):
            yield from refund_flow(result.decided)
        raise
    return result._replace(decided=[*shown.values()], denials=[shown[id(each)] for each in result.denials])


def find_next_permits_flow(charge: RequestCharge, decision: Decision, cost: Cost) -> Flow[Any, Decision]:
    """Return a decision about a cost that also says when each limit has its next permit.

    A limit that has permits left has it now, and the denial of one permit says when. For other limits without permits,
    the store is asked; if it fails, the decision is returned as it is.
    """
    policy, limiter = charge.policy, charge.limiter
    waits = list(map(_known_wait, decision.views, policy.costs(cost)))
    if None in waits:
        asks = [(policy, charge.key, (1,) * len(policy.limits))]
        try:
            (peeked,) = yield ApplyStep(limiter.store, "peek", asks, limiter.current_time())
        except RateLimitError:
            return decision
        passed = max(0, peeked.at - decision.at)
        after = (passed + view[1] for view in peeked.views)
        waits = [found if wait is None else wait for wait, found in zip(waits, after, strict=True)]
    return with_next_permits(decision, [wait or 0 for wait in waits])


def _known_wait(view: View, cost: int) -> int | None:
    """Return the time until a limit has its next permit, if its view for this cost says it."""
    remaining, retry, reset = view
    if remaining > 0:
        return 0
    if cost != 1 or not retry:
        return None
    return reset if retry == NEVER else retry  # never: a limit of 0


# ---- settle ----------------------------------------------------------------------------------------------------------


def settle_flow(made: Sequence[MadeCharge], request: object, status: int | None) -> Flow[Any, list[MadeCharge]]:
    """Correct what the response changes, and return all charges as they are now, for the headers.

    `status` is None if there is no response: the charge of a request that failed counts as that of a server error. The
    client gets its response even if the store fails.
    """
    settled = list(made)
    steps: dict[tuple[int, int | None], list[tuple[int, Ask]]] = {}
    for place, (charge, decision, _) in enumerate(made):
        if not charge.reserves:
            continue
        settled[place] = MadeCharge(charge._replace(reserves=False), decision, "")
        native = request if charge.native is None else charge.native
        for at, costs in _changes(charge, decision, native, FIRST_SERVER_ERROR if status is None else status):
            if any(costs):
                ask = charge.policy, charge.key, costs
                steps.setdefault((id(charge.limiter.store), at), []).append((place, ask))
    for (_, at), group in steps.items():
        limiter = made[group[0][0]].charge.limiter
        asks = [ask for _, ask in group]
        decisions = yield from _correct_flow(limiter.store, limiter.current_time(), asks, at)
        for (place, ask), decision in zip(group, decisions, strict=False):  # none if the store failed
            charge = settled[place].charge
            charge.owner.correct(ask[1], decision)
            shown = decision
            if charge.reporter.shows_next_permit:
                shown = yield from find_next_permits_flow(charge, decision, {})
            settled[place] = settled[place]._replace(decision=shown)
    return settled


def _changes(
    charge: RequestCharge, decision: Decision, native: object, status: int
) -> list[tuple[int | None, tuple[int, ...]]]:
    """Return the corrections of a charge, each with the instant of the charge."""
    policy = charge.policy
    actual = charge.owner.final_cost(native, status, charge.cost)
    costs = policy.costs(charge.cost)
    # A request holds a slot at most until its response is complete; after that time, the slot is free by itself.
    longest = min([limit.length for limit in policy.limits if limit.rules.holds_slots], default=MAX_RESPONSE_TIME)
    reserved = ReservedCharge(charge.limiter, policy, charge.key, costs, decision)
    expired = charge.reporter.now() - decision.at >= longest
    return reserved.changes(costs if actual is None else policy.costs(actual), None, expired=expired)


def refund_flow(made: Sequence[MadeCharge]) -> Flow[Any, None]:
    """Refund charges exactly: each step is completed even if the task is cancelled."""
    yield from complete_flow(*(_correct_flow(*each) for each in _refunds(made)))


def _refunds(made: Sequence[MadeCharge]) -> list[Correcting]:
    """Return the steps that refund charges: one for each store and time of a charge."""
    steps: dict[tuple[int, int, str], list[MadeCharge]] = {}
    for each in made:
        if each.verb and charged_at(each.decision, each.charge.policy) is not None:
            steps.setdefault((id(each.charge.limiter.store), each.decision.at, each.verb), []).append(each)
    found: list[Correcting] = []
    for (_, at, verb), group in steps.items():
        first = group[0].charge
        passed = max(0, first.reporter.now() - at)
        asks = [(each.charge.policy, each.charge.key, each.charge.policy.costs(each.charge.cost)) for each in group]
        found += [
            (first.limiter.store, first.limiter.current_time(), correction.asks, correction.at)
            for correction in corrections(verb, asks, [each.decision for each in group], passed)
        ]
    return found


def _correct_flow(store: Store, now: int | None, asks: list[Ask], at: int | None) -> Flow[Any, list[Decision]]:
    """Correct charges, and wake what waits for their permits; returns the new decisions, none if the store fails.

    The client gets its response, whatever the store raises.
    """
    try:
        return (yield ApplyStep(store, "adjust", asks, now, at))  # type: ignore[no-any-return]  # of a store
    except GeneratorExit:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        log.error("%s: could not correct a charge: %s", ", ".join(ask[0].name for ask in asks), error)  # noqa: TRY400 - the message has all details
        return []
    finally:
        store.wake(asks)


def has_slots(policy: Policy) -> bool:
    """Return whether requests hold slots of a limit until their responses are complete."""
    return holds_slots(policy.limits)


def holds_slots(limits: Iterable[Limit]) -> bool:
    """Return whether requests hold slots of one of the limits until their responses are complete."""
    return any(limit.rules.holds_slots for limit in limits)


def refills(policy: Policy) -> bool:
    """Return whether a limit of the policy refills, so that only a marked charge can be refunded exactly."""
    return any([limit.rules.refills for limit in policy.limits])  # noqa: C419 - a generator costs more
