"""Many agents share quotas; one 429 slows all of them, and the capacity recovers in steps.

capacity.py        Capacity: the state of a resource
resources.py       shared by the four limiters: resources, their buckets, reductions and recovery
arguments.py       reads and checks the arguments of limiters: windows, waits, names of agents
bus_sync.py        waits until an agent that joins has read the reductions in effect
sync_limiters.py   MemoryLimiter and SwarmLimiter
async_limiters.py  AsyncMemoryLimiter and AsyncSwarmLimiter: the same methods as coroutines
limited_calls.py   limits around tool calls, as blocks and decorators, that detect a 429
presence.py        lists the agents and their resources, for `tidegate swarm`
clearing.py        ends the reductions of a swarm, for `tidegate swarm --clear`
"""

from tidegate.adaptive import CapacityUpdate
from tidegate.swarm._arguments import Window
from tidegate.swarm._async_limiters import AsyncMemoryLimiter, AsyncSwarmLimiter
from tidegate.swarm._capacity import Capacity
from tidegate.swarm._limited_calls import AsyncLimitedCall, LimitedCall
from tidegate.swarm._sync_limiters import MemoryLimiter, SwarmLimiter

__all__ = [
    "AsyncLimitedCall",
    "AsyncMemoryLimiter",
    "AsyncSwarmLimiter",
    "Capacity",
    "CapacityUpdate",
    "LimitedCall",
    "MemoryLimiter",
    "SwarmLimiter",
    "Window",
]
