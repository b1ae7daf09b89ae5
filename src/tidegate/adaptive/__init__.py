"""Capacity that shrinks when a server says it is too much, and comes back gradually.

    capacity.py   what the capacity of one resource is, at any instant: pure, time is an argument
    update.py     what agents tell each other of it: CapacityUpdate, its JSON, its signature
    signing.py    signatures, and which signed messages are too old or were heard before
    shared.py     Capacities: the resources of one agent, joined with those of others over a Bus
    gate.py       how a limiter keeps to it: nothing while frozen, and waits that notice a recovery

The contract is in `capacity`; a face needs `Capacities` (thread-safe, with or without a bus) and tells its limiters
when `changed` is called.
"""

from tidegate.adaptive.capacities import SUBJECT, Capacities, Listener
from tidegate.adaptive.capacity import CapacityState, RecoverySettings, read_terms
from tidegate.adaptive.gated_store import GatedStore, RecoveringClock
from tidegate.adaptive.update import CapacityUpdate

__all__ = [
    "SUBJECT",
    "Capacities",
    "CapacityState",
    "CapacityUpdate",
    "GatedStore",
    "Listener",
    "RecoveringClock",
    "RecoverySettings",
    "read_terms",
]
