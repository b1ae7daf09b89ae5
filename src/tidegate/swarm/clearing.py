"""Ends the reductions of a swarm on request: `tidegate swarm --clear`.

A message that `clears` replaces each retained reduction. Running agents end their reductions when they receive it;
agents that join later ignore it. So do agents that know only the five fields of the design document, because the
capacity in the message is above every original.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from tidegate.adaptive.capacities import RETAIN_AFTER_RECOVERY, SUBJECT, subject_in
from tidegate.adaptive.signing import EPOCH, MalformedError, MessageSigner
from tidegate.adaptive.update import CapacityUpdate, retain_key
from tidegate.bus import Retain
from tidegate.clock import ThreadSignal
from tidegate.core.bounds import MAX_INTEGER
from tidegate.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.bus import Bus, Event

AGENT_ID: Final = "tidegate swarm --clear"
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
            update = CapacityUpdate.from_json(event.payload, signer.secret)
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

    def message(name: str) -> bytes:
        instant = EPOCH + timedelta(microseconds=now)
        update = CapacityUpdate(name, AGENT_ID, MAX_INTEGER, REASON, instant, epoch, clears=True)
        return update.to_json(signer.secret)

    for key, update in found.items():
        bus.publish(subject, message(update.resource), Retain(key, epoch, RETAIN_AFTER_RECOVERY))
    counts = Counter(update.resource for update in found.values())
    if resource is not None and not counts:  # agents may have reductions that the bus does not retain
        bus.publish(subject, message(resource))
        counts[resource] = 0
    return dict(counts)
