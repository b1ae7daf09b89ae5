"""Messages between agents: a Bus carries them, in this process or through a NATS or Redis server.

base.py    what a Bus promises; LocalBus is the shortest one that keeps it
local.py   within this process
linked.py  what buses over a network share: one thread with an event loop, reconnecting for ever, bounded queues
retained.py  what servers retain, as far as it can be used
nats.py    through NATS; retained messages in a JetStream key-value bucket
redis.py   through Redis or Valkey; retained messages in a hash
"""

from tidegate.bus.base import Bus, Event, Handler, Retain, Subscription
from tidegate.bus.registry import open_bus

__all__ = ["Bus", "Event", "Handler", "Retain", "Subscription", "open_bus"]
