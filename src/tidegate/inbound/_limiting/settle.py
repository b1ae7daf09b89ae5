"""Corrects charges: when the response is known, when another limit denies the request, when a block is left."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from tidegate._limiter.reservation import ReservedCharge, charged_at
from tidegate._limiter.waiting import ApplyStep
from tidegate._runtime.flow import complete_flow
from tidegate.core._algorithms import NEVER
from tidegate.core._bounds import SECOND
from tidegate.errors import RateLimitError
from tidegate.inbound._limiting.charges import MadeCharge, has_slots
from tidegate.inbound._responses.next_permit import with_next_permits
from tidegate.stores._cancellation import corrections

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate._policy import Cost
    from tidegate._runtime.flow import Flow
    from tidegate.core._algorithms import View
    from tidegate.core._decision import Decision
    from tidegate.inbound._limiting.charges import RequestCharge
    from tidegate.stores import Store
    from tidegate.stores._base import Ask

    Correcting = tuple[Store, int | None, list[Ask], int | None]  # store, time, asks, time of the charge

log: logging.Logger = logging.getLogger("tidegate.inbound")

FIRST_SERVER_ERROR: Final = 500  # the status assumed if there is no response
MAX_RESPONSE_TIME: Final = 3600 * SECOND  # after this time an unsettled charge becomes final


def final_costs(charges: Iterable[RequestCharge], request: object, status: int | None) -> list[Cost | None]:
    """Return the final cost of each charge; None: the response does not change it.

    `status` is None if there is no response: the charge of a request that failed counts as that of a server error.
    """
    status = FIRST_SERVER_ERROR if status is None else status
    return [
        charge.owner.final_cost(request if charge.native is None else charge.native, status, charge.cost)
        if charge.reserves
        else None
        for charge in charges
    ]


def settle_flow(made: Sequence[MadeCharge], costs: Sequence[Cost | None]) -> Flow[Any, list[MadeCharge]]:
    """Correct what the response changes to these costs, and return all charges as they are now, for the headers.

    The client gets its response even if the store fails.
    """
    settled = list(made)
    steps: dict[tuple[int, int | None], list[tuple[int, Ask]]] = {}
    for place, ((charge, decision, _), actual) in enumerate(zip(made, costs, strict=True)):
        if not charge.reserves:
            continue
        settled[place] = MadeCharge(charge._replace(reserves=False), decision, "")
        for at, changes in _changes(charge, decision, actual):
            if any(changes):
                steps.setdefault((id(charge.limiter.store), at), []).append(
                    (place, (charge.policy, charge.key, changes))
                )
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
    charge: RequestCharge, decision: Decision, actual: Cost | None
) -> list[tuple[int | None, tuple[int, ...]]]:
    """Return the corrections of a charge, each with the instant of the charge."""
    policy = charge.policy
    if actual is None and not has_slots(policy):
        return []
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


# ---- when the next permit is available -------------------------------------------------------------------------------


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
