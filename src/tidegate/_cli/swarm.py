"""`tidegate swarm`: show the agents on a bus, their capacities, reductions and recoveries, live in the terminal."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from tidegate._cli.arguments import DEFAULT_INTERVAL, positive_duration
from tidegate._cli.durations import METAVAR
from tidegate._cli.live import watch
from tidegate._cli.output import Output, counted
from tidegate._cli.tables import Spans, TableColumn, TextTable, draw_table
from tidegate._policy.durations import format_duration
from tidegate._policy.setting_values import read_variable
from tidegate._runtime.clock import SystemClock, ThreadSignal
from tidegate._runtime.urls import redact
from tidegate.adaptive import SUBJECT, CapacityUpdate
from tidegate.adaptive._capacities import subject_in
from tidegate.adaptive._signing import MalformedError, MessageSigner, read_signed
from tidegate.adaptive._update import MAX_UPDATE_BYTES
from tidegate.bus import open_bus
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.swarm._clearing import clear_reductions
from tidegate.swarm._presence import Agent, Watcher

if TYPE_CHECKING:
    import argparse

    from tidegate.bus import Bus, Event

MAX_UPDATES_SHOWN: Final = 8
EXAMPLES: Final = (
    ("tidegate swarm nats://127.0.0.1:4222", "the agents on this bus, live; q quits"),
    ("tidegate swarm redis://cache --once --json", "their capacities, once and as JSON"),
    ("tidegate swarm nats://127.0.0.1:4222 --clear api", "end the capacity reductions of the resource api"),
)
COLUMNS: Final = (
    TableColumn("agent", shrinks=True),
    TableColumn("", optional=True),
    TableColumn("capacity", right=True),
    TableColumn("free", right=True),
    TableColumn("in flight", right=True),
    TableColumn("state"),
)
BAR_WIDTH: Final = 20
CONNECT_TIMEOUT: Final = 3.0  # seconds
clean: Final = Output.clean


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the bus, and how often to refresh."""
    parser.add_argument(
        "bus", metavar="BUS", nargs="?", help="URL of the bus, nats://… or redis://… (default: TIDEGATE_BUS)"
    )
    parser.add_argument(
        "--interval",
        type=positive_duration,
        default=DEFAULT_INTERVAL,
        metavar=METAVAR,
        help="time between updates (default: 1s)",
    )
    parser.add_argument("--once", action="store_true", help="print the swarm once and exit")
    parser.add_argument("--namespace", default="", metavar="NAME", help="the namespace of the agents")
    parser.add_argument(
        "--clear",
        nargs="?",
        const="",
        metavar="RESOURCE",
        help="end the capacity reductions of one resource, or of all resources, and exit",
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Show the swarm until interrupted."""
    url = args.bus or os.environ.get("TIDEGATE_BUS", "")
    if not url:
        raise ConfigError("expected the URL of a bus, such as: tidegate swarm nats://127.0.0.1:4222", field="bus")
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
        self._subject = subject_in(namespace, SUBJECT)
        bus.subscribe(self._subject, self._receive)

    def _receive(self, event: Event) -> None:
        try:
            fields, signature = read_signed(event.payload, self._signer.secret, MAX_UPDATE_BYTES, self._subject)
            update = CapacityUpdate.from_fields(fields)
        except MalformedError:
            return
        verdict = self._signer.classify(signature, update.at, late=event.late)
        if verdict in ("new", "old") and not update.clears:
            self._updates.append((update, verdict == "old"))

    def watch(self, interval: float, *, once: bool) -> None:
        """Ask the agents and show their answers, once or repeatedly."""
        self._ask(min(interval, 1.0))
        within = 3 * interval + 1

        def show() -> None:
            self._show(self._watcher.agents(within))
            self._watcher.ask()  # the answers are shown at the next update

        watch(show, self._output, None if once else interval)

    def _ask(self, seconds: float) -> None:
        clock = SystemClock()
        self._watcher.ask()
        clock.wait(ThreadSignal(), clock.steady() + round(seconds * SECOND))

    def _show(self, agents: list[Agent]) -> None:
        self._output.write_json(self.describe(agents))
        shown = {(agent.agent_id, name) for agent in agents for name in agent.resources}
        self._totals = {place: total for place, total in self._totals.items() if place in shown}
        self._output.write_lines(self.draw(agents))

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
        output = self._output
        lines = [output.style(f"swarm: {counted(len(agents), 'agent')}", "bold")]
        rows = [(name, agent, agent.resources[name]) for agent in agents for name in agent.resources]
        for resource in sorted({name for name, _, _ in rows}):
            cells = []
            for name, agent, capacity in rows:
                if name == resource:
                    total = f"{capacity.total:,}/{capacity.original:,}"
                    counts = total, f"{capacity.available:,}", f"{capacity.in_flight:,}"
                    bar, trend = draw_capacity(capacity.total, capacity.original), self._describe_trend(agent, name)
                    cells.append((clean(agent.agent_id), bar, *counts, (trend,)))
            lines += ["", output.style(clean(resource), "bold"), *draw_table(TextTable(COLUMNS, list(cells)), output)]
        if not rows:
            lines.append("no agent responds: check that agents use this bus and this secret (TIDEGATE_SWARM_SECRET)")
        if self._updates:
            lines += ["", output.style("reductions", "bold")]
            lines += [f"  {_format(update)}" for update, _ in reversed(self._updates)]
        return lines

    def _describe_trend(self, agent: Agent, name: str) -> tuple[str, str]:
        """Return what happens to a resource (frozen, reduced, recovering, recovered, or nothing), and its colour."""
        capacity = agent.resources[name]
        before = self._totals.get((agent.agent_id, name), capacity.total)
        self._totals[agent.agent_id, name] = capacity.total
        if capacity.frozen_for:
            return f"frozen for {format_duration(capacity.frozen_for)}", "blue"
        if capacity.total < before:
            return "reduced", "red"
        if capacity.total < capacity.original:
            return "recovering", "yellow"
        return ("recovered", "green") if capacity.total > before else ("", "")


def draw_capacity(total: int, original: int) -> Spans:
    """Draw how much of the original capacity is left."""
    filled = max(1, min(BAR_WIDTH, total * BAR_WIDTH // max(1, original)))
    colour = "green" if total >= original else "yellow" if 2 * total > original else "red"
    return ("█" * filled, colour), ("░" * (BAR_WIDTH - filled), "dim")


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
    pause = "" if update.retry_after is None else f", no calls for {format_duration(update.retry_after)}"
    when, why = update.timestamp.strftime("%H:%M:%S"), clean(update.reason) or "no reason given"
    return f"{when}  {clean(update.resource)} to {update.new_capacity} by {clean(update.agent_id)}: {why}{pause}"
