"""Measure how quickly a swarm slows down, how it settles below an unknown limit, and how much of the limit it uses.

python -m bench.swarm                    everything; the simulated day of 1,000 agents takes an hour or two
python -m bench.swarm --only reduction   20 processes on real NATS and Redis: from a 429 to all others reduced
python -m bench.swarm --only day         1,000 agents, a day, lossy bus, crashes: per-agent and shared; draws the plot
python -m bench.swarm --only leak        1,000,000 pairs of acquire and release: memory before and after

--agents and --minutes make the day smaller.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.servers.nats import NatsServer
from tests.servers.valkey import ValkeyServer
from tests.swarm.agents import Agent
from tests.swarm.simulation import Outcome, Simulation
from tidegate.bus import open_bus
from tidegate.swarm import SwarmLimiter

if TYPE_CHECKING:
    from collections.abc import Callable

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"
AGENTS: Final = 20
SHOWN: Final = 180  # minutes in the plot
STYLE: Final = """
    text { font: 12px system-ui, sans-serif; fill: #1f2328; }
    .title { font-weight: 600; font-size: 15px; }
    .sent { fill: none; stroke: #0969da; stroke-width: 1.5; }
    .refused { fill: #cf222e; opacity: .7; }
    .hidden { stroke: #57606a; stroke-dasharray: 4 3; }
    .axis { stroke: #afb8c1; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc; } .sent { stroke: #4493f8; } .refused { fill: #ff7b72; } .hidden { stroke: #9198a1; }
    }
"""


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["reduction", "day", "leak"])
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--minutes", type=int, default=1440)
    args = parser.parse_args()
    parts: dict[str, Callable[[], Any]] = {
        "reduction": reduction,
        "leak": leak,
        "day": lambda: day(args.agents, args.minutes),
    }
    for name, part in parts.items():
        if args.only in (None, name):
            print(json.dumps({name: part()}, indent=2), flush=True)


def reduction() -> dict[str, Any]:
    """From the announcement of a 429 until another process has taken it over, in milliseconds."""
    results = {}
    for kind in (NatsServer, ValkeyServer):
        with kind() as server:
            agents = [Agent(server.url, f"agent-{number}") for number in range(AGENTS)]
            try:
                for agent in agents:
                    agent.ready()
                delays = sorted(delay for number in range(10) for delay in _one_round(agents, number))
            finally:
                for agent in agents:
                    agent.close()
        results[kind.__name__] = {
            "agents": AGENTS,
            "measured": len(delays),
            "p50_ms": delays[len(delays) // 2] / 1e6,
            "p99_ms": delays[len(delays) * 99 // 100] / 1e6,
            "worst_ms": delays[-1] / 1e6,
        }
    return results


def _one_round(agents: list[Agent], number: int) -> list[int]:
    resource = f"r{number}"
    began = agents[number].ask("announce", resource)
    others = [agent for agent in agents if agent is not agents[number]]
    time.sleep(0.2)  # so that asking does not take the time that is measured
    while True:
        heard = [agent.ask("state")["heard"].get(resource) for agent in others]
        if None not in heard:
            return [instant - began for instant in heard]


def leak(pairs: int = 1_000_000) -> dict[str, Any]:
    """Blocks that Python holds, and the process's memory, before and after a million pairs; how long a pair takes."""
    with open_bus("local://leak") as bus, SwarmLimiter(bus, agent_id="agent") as limiter:
        limiter.set_capacity("api", 1000, 1)

        def run(count: int) -> None:
            for _ in range(count):
                limiter.acquire("api")
                limiter.release("api")

        run(10_000)
        gc.collect()
        blocks, memory, began = sys.getallocatedblocks(), _resident(), time.process_time()
        run(pairs)
        took = time.process_time() - began
        gc.collect()
        return {
            "pairs": pairs,
            "blocks_more": sys.getallocatedblocks() - blocks,
            "kilobytes_more": (_resident() - memory) // 1024,
            "cpu_microseconds_per_pair": round(took / pairs * 1e6, 2),
        }


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def day(agents: int, minutes: int) -> dict[str, Any]:
    """Let a swarm live for a day, each agent with a bucket of its own, then sharing one; draw the first hours."""
    results: dict[str, Any] = {}
    own = Simulation(agents, minutes, seed=1).run()
    results["per_agent"] = _told(own)
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "swarm-settling.svg").write_text(picture(own, agents), encoding="utf-8")
    print(json.dumps(results), file=sys.stderr, flush=True)
    simulation = Simulation(agents, minutes, shared=True, seed=1)
    shared = simulation.run()
    results["shared"] = {
        **_told(shared),
        "quota": simulation.hidden,
        "most_in_any_window": shared.most_in_a_window,
        "within_quota": shared.most_in_a_window <= simulation.hidden,
    }
    return results


def _told(outcome: Outcome) -> dict[str, Any]:
    return {
        "hidden_limit_per_minute": outcome.hidden,
        "minutes": len(outcome.sent),
        "calls": sum(outcome.sent),
        "settled_after_minutes": outcome.settled,
        "utilisation_after": round(outcome.utilisation, 4),
        "refused_after": round(outcome.refused_share, 5),
        "crashes": outcome.crashes,
        "messages_lost": outcome.lost,
    }


def picture(outcome: Outcome, agents: int) -> str:
    """Draw calls and refusals per minute against the hidden limit."""
    sent, refused = outcome.sent[:SHOWN], outcome.refused[:SHOWN]
    left, top, width, height = 60, 60, 640, 200
    most = max(*sent, outcome.hidden) * 1.1
    step = width / max(1, len(sent) - 1)

    def y(value: float) -> float:
        return top + height - value * height / most

    line = " ".join(f"{left + place * step:.1f},{y(value):.1f}" for place, value in enumerate(sent))
    bars = "".join(
        f'<rect class="refused" x="{left + place * step - step / 3:.1f}" y="{y(value):.1f}" width="{step * 2 / 3:.1f}" '
        f'height="{top + height - y(value):.1f}"/>'
        for place, value in enumerate(refused)
        if value
    )
    settled = "never" if outcome.settled is None else f"after {outcome.settled} minutes"
    summary = (
        f"{agents} agents, each with a bucket of its own, settle below a limit they do not know {settled}; "
        f"then {outcome.utilisation:.0%} of it is used and {outcome.refused_share:.2%} of calls are refused."
    )
    hidden = y(outcome.hidden)
    bottom = top + height
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 310" role="img" aria-labelledby="t d">
  <title id="t">A swarm settles below a hidden limit</title>
  <desc id="d">{summary}</desc>
  <style>{STYLE}  </style>
  <text class="title" x="20" y="28">{agents} agents and a limit they do not know: calls per minute</text>
  <line class="axis" x1="{left}" y1="{bottom}" x2="{left + width}" y2="{bottom}"/>
  <line class="hidden" x1="{left}" y1="{hidden:.1f}" x2="{left + width}" y2="{hidden:.1f}"/>
  <text x="{left - 6}" y="{hidden + 4:.1f}" text-anchor="end">{outcome.hidden}</text>
  <text x="{left + width}" y="{hidden - 6:.1f}" text-anchor="end">hidden limit</text>
  <text x="{left - 6}" y="{bottom}" text-anchor="end">0</text>
  {bars}
  <polyline class="sent" points="{line}"/>
  <text x="{left}" y="{bottom + 20}">start</text>
  <text x="{left + width}" y="{bottom + 20}" text-anchor="end">{len(sent)} minutes</text>
  <text x="{left + width / 2}" y="{bottom + 20}" text-anchor="middle">line: calls made; red: refused with a 429</text>
</svg>
"""


if __name__ == "__main__":
    main()
