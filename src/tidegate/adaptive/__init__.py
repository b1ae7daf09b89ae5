"""Capacity that is reduced when a server refuses calls, and recovers in steps.

    capacity.py     the capacity of one resource at any instant: pure, time is an argument
    update.py       the message that agents exchange: CapacityUpdate, its JSON, its signature
    signing.py      signatures, and detection of expired and replayed messages
    capacities.py   Capacities: the resources of one agent, synchronised with other agents over a Bus
    gated_store.py  how a limiter applies it: denies everything while frozen, and wakes waiters for a recovery

`capacity` documents the rules. A limiter uses `Capacities` (thread-safe, with or without a bus) and updates its
policies when `changed` is called.
"""

from tidegate.adaptive._capacities import Capacities, CapacitySnapshot, Listener
from tidegate.adaptive._capacity import CapacityState, Reduction
from tidegate.adaptive._gated_store import GatedStore, RecoveringClock
from tidegate.adaptive._recovery import HeldLevel, Recovery, RecoverySettings, read_recovery_settings
from tidegate.adaptive._update import SUBJECT, CapacityUpdate

__all__ = [
    "SUBJECT",
    "Capacities",
    "CapacitySnapshot",
    "CapacityState",
    "CapacityUpdate",
    "GatedStore",
    "HeldLevel",
    "Listener",
    "RecoveringClock",
    "Recovery",
    "RecoverySettings",
    "Reduction",
    "read_recovery_settings",
]
