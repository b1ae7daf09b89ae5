"""Ends the reductions of a swarm on request: `tidegate swarm --clear`.

One message that `clears` is retained for a day, for one resource or for all. Agents end their reductions when they
receive it, and from then on refuse every message with an earlier epoch: also agents that join later, to which somebody
may replay a recorded message. The same message replaces each retained reduction, for agents that know only the five
fields of the design document: they ignore it, because its capacity is above every original.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from tidegate._runtime.clock import ThreadSignal
from tidegate.adaptive._capacities import (
    CLEARING_AGENT_ID,
    RETAIN_AFTER_RECOVERY,
    RETAIN_CLEARED,
    clearing_key,
    subject_in,
)
from tidegate.adaptive._signing import EPOCH, MalformedError, MessageSigner
from tidegate.adaptive._update import ALL_RESOURCES, SUBJECT, CapacityUpdate, retain_key
from tidegate.bus import Retain
from tidegate.core._bounds import MAX_INTEGER
from tidegate.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.bus import Bus, Event

REASON: Final = "cleared by an operator"


def clear_reductions(
    bus: Bus, resource: str | None = None, secret: str | bytes | None = None, namespace: str = "", timeout: float = 5.0
) -> dict[str, int]:
    """End the reductions of a resource, or of all; returns how many retained ones each resource had.

    Waits up to `timeout` seconds for the retained messages, and raises StoreUnavailable if they do not arrive.
    """
    signer = MessageSigner(secret, bus.clock)
    subject = subject_in(namespace, SUBJECT)
    found: dict[str, CapacityUpdate] = {}
    synced = ThreadSignal()

    def on_message(event: Event) -> None:
        try:
            update = CapacityUpdate.from_json(event.payload, signer.secret, subject)
        except MalformedError:
            return
        if not update.clears and resource in (None, update.resource):
            found[retain_key(update.resource, update.agent_id, signer.tag, namespace)] = update

    def on_synced(retained: Mapping[str, int]) -> None:
        for key in found.keys() - retained.keys():  # of a swarm with another secret
            del found[key]
        synced.set()

    subscription = bus.subscribe(subject, on_message, on_synced)
    try:
        if not synced.wait(timeout):
            raise StoreUnavailable("the bus did not send its retained messages: nothing was cleared")
    finally:
        subscription.close()
    now = bus.clock.ns() // 1000
    epoch = max([now, *(update.order + 1 for update in found.values())])

    instant = EPOCH + timedelta(microseconds=now)

    def message(name: str, *, clears_all: bool = False) -> bytes:
        update = CapacityUpdate(
            name, CLEARING_AGENT_ID, MAX_INTEGER, REASON, instant, epoch, clears=True, clears_all=clears_all
        )
        return update.to_json(signer.secret, subject=subject)

    place = ALL_RESOURCES if resource is None else resource
    retain = Retain(clearing_key(place, signer.tag, namespace), epoch, RETAIN_CLEARED)
    bus.publish(subject, message(place, clears_all=resource is None), retain)
    for key, update in found.items():
        bus.publish(subject, message(update.resource), Retain(key, epoch, RETAIN_AFTER_RECOVERY))
    counts = Counter(update.resource for update in found.values())
    return dict(counts) or ({} if resource is None else {resource: 0})
