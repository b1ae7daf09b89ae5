"""One agent: makes calls as fast as its limiter allows, and slows the whole swarm when it receives a 429.

python -m examples.swarm.agent BUS URL NAME CALLS RECOVERY
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import urlopen

from tidegate.bus import open_bus
from tidegate.swarm import SwarmLimiter

if TYPE_CHECKING:
    from tidegate.adaptive import CapacityUpdate, Recovery


def main(bus_url: str, url: str, name: str, calls: int, recovery: Recovery) -> None:
    """Make calls and print the result."""

    def report(update: CapacityUpdate) -> None:
        write_line(f"{name}: {update.agent_id} reduced the capacity to {update.new_capacity}")

    with (
        open_bus(bus_url) as bus,
        SwarmLimiter(
            bus, agent_id=name, namespace=f"example-{recovery}", recovery=recovery, recovery_interval=0.5, cooldown=0.5
        ) as limiter,
    ):
        bus.wait(20)
        limiter.set_capacity("api", 40, window=1)  # our assumption; all five agents together: 200 a second
        limiter.on_capacity_change(report)

        @limiter.limited("api")  # waits for a permit; a 429 is announced to all
        def call() -> int:
            with urlopen(url) as response:  # noqa: S310 - our own server
                return int(response.status)

        write_line("ready")
        sys.stdin.readline()  # all agents start together
        statuses, lowest = Counter[int](), 40
        for _ in range(calls):
            try:
                statuses[call()] += 1
            except HTTPError as error:
                statuses[error.code] += 1
            capacity = limiter.get_capacity("api")
            lowest = min(lowest, capacity.total if capacity is not None else lowest)
        write_line(json.dumps({"agent": name, "calls": calls, "refused": statuses[429], "lowest": lowest}))


def write_line(text: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(
        sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), "remember" if sys.argv[5] == "remember" else "gradual"
    )
