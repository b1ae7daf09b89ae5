"""Messages between agents: a Bus carries them, in this process or through a NATS or Redis server.

base.py      the Bus interface and its guarantees
local.py     within this process
network.py   shared by buses over a network: one thread with an event loop, reconnecting, bounded queues
inbox.py     the bounded queue of messages to handle
retained.py  validation of retained messages
nats.py      through NATS; retained messages in a JetStream key-value bucket
redis.py     through Redis or Valkey; retained messages in a hash
registry.py  opens a bus by its URL
"""

from tidegate.bus._base import Bus, Event, Handler, Retain, Subscription, Synced
from tidegate.bus._registry import open_bus

__all__ = ["Bus", "Event", "Handler", "Retain", "Subscription", "Synced", "open_bus"]
