"""`tidegate swarm`: show the agents on a bus, their capacities, reductions and recoveries, live in the terminal."""

from __future__ import annotations

import math
import os
import shutil
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from tidegate.adaptive import SUBJECT, CapacityUpdate
from tidegate.adaptive.capacities import subject_in
from tidegate.adaptive.signing import MalformedError, MessageSigner, read_signed
from tidegate.adaptive.update import MAX_UPDATE_BYTES
from tidegate.bus import open_bus
from tidegate.cli.arguments import seconds
from tidegate.cli.output import Output, counted
from tidegate.clock import SystemClock, ThreadSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.policy.setting_values import read_variable
from tidegate.swarm.clearing import clear_reductions
from tidegate.swarm.presence import Agent, Watcher
from tidegate.urls import redact

if TYPE_CHECKING:
    import argparse

    from tidegate.bus import Bus, Event

MAX_UPDATES_SHOWN: Final = 8
CLEAR_SCREEN: Final = "\x1b[H\x1b[J"
CONNECT_TIMEOUT: Final = 3.0  # seconds
clean: Final = Output.clean


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the bus, and how often to refresh."""
    parser.add_argument(
        "bus", metavar="BUS", nargs="?", help="URL of the bus, nats://… or redis://… (default: TIDEGATE_BUS)"
    )
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="SECONDS", help="time between updates (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print the swarm once and exit")
    parser.add_argument("--namespace", default="", metavar="NAME", help="the namespace of the agents")
    parser.add_argument(
        "--clear", nargs="?", const="", metavar="RESOURCE", help="end the reductions of one or all resources, and exit"
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Show the swarm until interrupted."""
    url = args.bus or os.environ.get("TIDEGATE_BUS", "")
    if not url:
        raise ConfigError("expected the URL of a bus, such as: tidegate swarm nats://127.0.0.1:4222", field="bus")
    if not (math.isfinite(args.interval) and args.interval > 0):
        raise ConfigError(f"expected a number of seconds above 0, not {args.interval:g}", field="--interval")
    with open_bus(url) as bus:
        if not bus.wait(CONNECT_TIMEOUT):
            raise StoreUnavailable(f"the bus at {redact(url)} does not respond: check that its server is running")
        secret = read_variable("TIDEGATE_SWARM_SECRET", os.environ)
        if args.clear is not None:
            write_cleared(clear_reductions(bus, args.clear or None, secret, args.namespace), output)
        else:
            SwarmView(bus, secret, output, args.namespace).watch(args.interval, once=args.once)
    return 0


def write_cleared(counts: dict[str, int], output: Output) -> None:
    """Write which reductions were ended."""
    output.write_json({"cleared": counts})
    for name, count in sorted(counts.items()):
        output.write_line(f"{clean(name)}: {count} retained reduction{'' if count == 1 else 's'} cleared")
    if not counts:
        output.write_line("no reductions are retained: check the namespace, and the secret (TIDEGATE_SWARM_SECRET)")


class SwarmView:
    """The agents of a swarm and recent updates, and how they are shown."""

    def __init__(self, bus: Bus, secret: str | None, output: Output, namespace: str = "") -> None:
        """Subscribe to updates on the bus."""
        self._output = output
        self._signer = MessageSigner(secret, bus.clock)
        self._watcher = Watcher(bus, secret, namespace)
        self._updates: deque[tuple[CapacityUpdate, bool]] = deque(maxlen=MAX_UPDATES_SHOWN)
        self._totals: dict[tuple[str, str], int] = {}
        bus.subscribe(subject_in(namespace, SUBJECT), self._receive)

    def _receive(self, event: Event) -> None:
        try:
            fields, signature = read_signed(event.payload, self._signer.secret, MAX_UPDATE_BYTES)
            update = CapacityUpdate.from_fields(fields)
        except MalformedError:
            return
        verdict = self._signer.classify(signature, update.at, late=event.late)
        if verdict in ("new", "old") and not update.clears:
            self._updates.append((update, verdict == "old"))

    def watch(self, interval: float, *, once: bool) -> None:
        """Ask the agents and show their answers, once or repeatedly."""
        clock = SystemClock()
        while True:
            self._watcher.ask()
            clock.wait(ThreadSignal(), clock.steady() + round(min(interval, 1.0 if once else interval) * SECOND))
            self._show(self._watcher.agents(within=3 * interval + 1), redraw=not once)
            if once:
                return

    def _show(self, agents: list[Agent], *, redraw: bool) -> None:
        self._output.write_json(self.describe(agents))
        shown = {(agent.agent_id, name) for agent in agents for name in agent.resources}
        self._totals = {place: total for place, total in self._totals.items() if place in shown}
        lines = self.draw(agents)
        if self._output.live and redraw:
            lines = [CLEAR_SCREEN + lines[0], *lines[1:], self._output.style("Ctrl-C ends.", "dim")]
        for line in lines:
            self._output.write_line(line)

    def describe(self, agents: list[Agent]) -> dict[str, Any]:
        """Describe the swarm for JSON."""
        return {
            "agents": {
                agent.agent_id: {
                    name: {
                        "available": capacity.available,
                        "total": capacity.total,
                        "original": capacity.original,
                        "window": capacity.window,
                        "in_flight": capacity.in_flight,
                        "frozen_for": capacity.frozen_for,
                    }
                    for name, capacity in agent.resources.items()
                }
                for agent in agents
            },
            "updates": [{**_fields(update), "late": late} for update, late in self._updates],
        }

    def draw(self, agents: list[Agent]) -> list[str]:
        """Draw agents, capacities and reductions as lines of text."""
        output, width = self._output, shutil.get_terminal_size().columns
        lines = [output.style(f"swarm: {counted(len(agents), 'agent')}", "bold")]
        rows = [(name, agent, agent.resources[name]) for agent in agents for name in agent.resources]
        for resource in sorted({name for name, _, _ in rows}):
            lines += ["", output.style(clean(resource), "bold")]
            longest = max(len(clean(agent.agent_id)) for name, agent, _ in rows if name == resource)
            for name, agent, capacity in rows:
                if name != resource:
                    continue
                bar = self._draw_bar(capacity.total, capacity.original, max(10, min(30, width - 70)))
                trend = self._describe_trend(agent, name)
                lines.append(
                    f"  {clean(agent.agent_id):<{longest}}  {bar}  {capacity.total:>6}/{capacity.original}"
                    f"  free {capacity.available:<6} in flight {capacity.in_flight:<4} {trend}"
                )
        if not rows:
            lines.append("no agent responds: check that agents use this bus and this secret (TIDEGATE_SWARM_SECRET)")
        if self._updates:
            lines += ["", output.style("reductions", "bold")]
            lines += [f"  {_format(update)}" for update, _ in reversed(self._updates)]
        return lines

    def _draw_bar(self, total: int, original: int, width: int) -> str:
        filled = max(1, min(width, total * width // max(1, original)))
        colour = "green" if total >= original else "yellow" if 2 * total > original else "red"
        return self._output.style("█" * filled, colour) + self._output.style("░" * (width - filled), "dim")

    def _describe_trend(self, agent: Agent, name: str) -> str:
        """Return what happens to a resource: frozen, reduced, recovering, recovered, or nothing."""
        capacity = agent.resources[name]
        before = self._totals.get((agent.agent_id, name), capacity.total)
        self._totals[agent.agent_id, name] = capacity.total
        if capacity.frozen_for:
            return self._output.style(f"frozen for {capacity.frozen_for:.0f} s", "blue")
        if capacity.total < before:
            return self._output.style("reduced", "red")
        if capacity.total < capacity.original:
            return self._output.style("recovering", "yellow")
        return self._output.style("recovered", "green") if capacity.total > before else ""


def _fields(update: CapacityUpdate) -> dict[str, Any]:
    return {
        "resource": update.resource,
        "agent_id": update.agent_id,
        "new_capacity": update.new_capacity,
        "reason": update.reason,
        "timestamp": update.timestamp.isoformat(),
        "retry_after": update.retry_after,
    }


def _format(update: CapacityUpdate) -> str:
    pause = "" if update.retry_after is None else f", no calls for {update.retry_after:g} s"
    when, why = update.timestamp.strftime("%H:%M:%S"), clean(update.reason) or "no reason given"
    return f"{when}  {clean(update.resource)} to {update.new_capacity} by {clean(update.agent_id)}: {why}{pause}"
