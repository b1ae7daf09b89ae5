"""Five agents against a server with a hidden limit for 30 minutes of virtual time, with each way of recovery.

python -m examples.swarm.virtual [MINUTES]

`run.py` shows the same with processes and a real bus, for a few seconds: too short for a difference between the ways of
recovery. Here nothing waits, so half an hour with the default interval (30 s) takes a few seconds.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from examples.swarm.agent import write_line
from tidegate import Limiter
from tidegate.bus import open_bus
from tidegate.stores import MemoryStore
from tidegate.swarm import SwarmLimiter
from tidegate.testing import ManualClock

if TYPE_CHECKING:
    from tidegate.adaptive import Recovery

AGENTS = 5
HIDDEN = 50  # calls a second
ASSUMED = 40  # calls a second, of each agent
TICK = 0.02  # seconds between two attempts of an agent


def run(recovery: Recovery, minutes: int) -> dict[str, float | str]:
    """Let the agents call as often as their limiters allow; count the calls of the second half."""
    clock = ManualClock()
    server = Limiter(f"{HIDDEN}/1s burst=20", store=MemoryStore(clock=clock))
    bus = open_bus(f"local://example-{recovery}")
    agents = [
        SwarmLimiter(bus, agent_id=f"agent-{number}", recovery=recovery, cooldown=2.0, clock=clock)
        for number in range(AGENTS)
    ]
    for agent in agents:
        agent.set_capacity("api", ASSUMED, window=1)
    served = refused = 0
    ticks = round(minutes * 60 / TICK)
    for tick in range(ticks):
        if tick == ticks // 2:
            served = refused = 0
        clock.advance(TICK)
        began = clock.steady() / 1_000_000
        for agent in agents:
            if agent.try_acquire("api"):
                agent.release("api", return_token=False)
                if server.try_acquire("all"):
                    served += 1
                else:
                    refused += 1
                    agent.announce_reduced("api", "received 429 response", began=began)
    for agent in agents:
        agent.close()
    bus.close()
    calls = served + refused
    used, denied = 100 * served / (HIDDEN * minutes * 30), 100 * refused / calls
    return {"recovery": recovery, "used_percent": round(used, 1), "refused_percent": round(denied, 2), "calls": calls}


def main() -> None:
    """Run each recovery, and print the results."""
    minutes = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    ways: tuple[Recovery, ...] = ("gradual", "remember")
    for recovery in ways:
        write_line(json.dumps(run(recovery, minutes)))


if __name__ == "__main__":
    main()
