"""Many agents share quotas; one 429 slows all of them, and capacity comes back gradually.

model.py     Capacity, what an agent is told of a resource
engine.py    what the four limiters share: resources, their buckets, reductions and recovery
threads.py   MemoryLimiter and SwarmLimiter
tasks.py     AsyncMemoryLimiter and AsyncSwarmLimiter: the same names, awaited
calls.py     limits around tool calls, as blocks and decorators, that notice a 429
watch.py     who is there and how they stand, for `tidegate swarm`
"""

from tidegate.adaptive import CapacityUpdate
from tidegate.swarm.async_limiters import AsyncMemoryLimiter, AsyncSwarmLimiter
from tidegate.swarm.capacity import Capacity
from tidegate.swarm.sync_limiters import MemoryLimiter, SwarmLimiter

__all__ = [
    "AsyncMemoryLimiter",
    "AsyncSwarmLimiter",
    "Capacity",
    "CapacityUpdate",
    "MemoryLimiter",
    "SwarmLimiter",
]
