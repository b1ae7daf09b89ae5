"""`tidegate swarm`: agents, capacities, reductions and recoveries on a bus, live in the terminal."""

from __future__ import annotations

import math
import os
import shutil
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from tidegate.adaptive import SUBJECT, CapacityUpdate
from tidegate.adaptive.signing import MalformedError, Signer, read_signed
from tidegate.adaptive.update import MAX_UPDATE_BYTES
from tidegate.bus import open_bus
from tidegate.cli.say import Say
from tidegate.clock import SystemClock, ThreadSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.swarm.watch import Agent, Watcher
from tidegate.urls import redact

if TYPE_CHECKING:
    import argparse

    from tidegate.bus import Bus, Event

RECENT: Final = 8  # updates shown
CLEAR: Final = "\x1b[H\x1b[J"
CONNECTING: Final = 3.0
clean: Final = Say.clean


def options(parser: argparse.ArgumentParser) -> None:
    """Take the bus, and how often to look."""
    parser.add_argument("bus", nargs="?", help="URL of the bus, nats://… or redis://… (or TIDEGATE_BUS)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="how often to look (1)")
    parser.add_argument("--once", action="store_true", help="look once and exit")


def run(args: argparse.Namespace, say: Say) -> int:
    """Watch until interrupted."""
    url = args.bus or os.environ.get("TIDEGATE_BUS", "")
    if not url:
        raise ConfigError("name the bus, such as: tidegate swarm nats://127.0.0.1:4222", field="bus")
    if not (math.isfinite(args.interval) and args.interval > 0):
        raise ConfigError(f"must be a number of seconds above 0, not {args.interval}", field="--interval")
    with open_bus(url) as bus:
        if not bus.wait(CONNECTING):
            raise StoreUnavailable(f"no answer from the bus at {redact(url)}: is the server running?")
        Board(bus, os.environ.get("TIDEGATE_SWARM_SECRET") or None, say).watch(args.interval, once=args.once)
    return 0


class Board:
    """What is known of a swarm, and how it is shown."""

    def __init__(self, bus: Bus, secret: str | None, say: Say) -> None:
        """Listen on the bus."""
        self._say = say
        self._signer = Signer(secret, bus.clock)
        self._watcher = Watcher(bus, secret)
        self._updates: deque[tuple[CapacityUpdate, bool]] = deque(maxlen=RECENT)
        self._totals: dict[tuple[str, str], int] = {}
        bus.subscribe(SUBJECT, self._hear)

    def _hear(self, event: Event) -> None:
        try:
            fields, signature = read_signed(event.payload, self._signer.secret, MAX_UPDATE_BYTES)
            update = CapacityUpdate.from_fields(fields)
        except MalformedError:
            return
        verdict = self._signer.judge(signature, update.at, late=event.late)
        if verdict in ("new", "old"):
            self._updates.append((update, verdict == "old"))

    def watch(self, interval: float, *, once: bool) -> None:
        """Ask and show, again and again."""
        clock = SystemClock()
        while True:
            self._watcher.ask()
            clock.wait(ThreadSignal(), clock.steady() + round(min(interval, 1.0 if once else interval) * SECOND))
            self._show(self._watcher.agents(within=3 * interval + 1), redraw=not once)
            if once:
                return

    def _show(self, agents: list[Agent], *, redraw: bool) -> None:
        self._say.data(self.as_data(agents))
        shown = {(agent.agent_id, name) for agent in agents for name in agent.resources}
        self._totals = {place: total for place, total in self._totals.items() if place in shown}
        text = self.lines(agents)
        if self._say.live and redraw:
            text = [CLEAR + text[0], *text[1:], self._say.style("Ctrl-C ends.", "dim")]
        for line in text:
            self._say.line(line)

    def as_data(self, agents: list[Agent]) -> dict[str, Any]:
        """Give everything for programs."""
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

    def lines(self, agents: list[Agent]) -> list[str]:
        """Draw the board."""
        say, width = self._say, shutil.get_terminal_size().columns
        count = f"{len(agents)} agent{'' if len(agents) == 1 else 's'}"
        found = [say.style(f"swarm: {count}", "bold")]
        rows = [(name, agent, agent.resources[name]) for agent in agents for name in agent.resources]
        for resource in sorted({name for name, _, _ in rows}):
            found += ["", say.style(clean(resource), "bold")]
            longest = max(len(clean(agent.agent_id)) for name, agent, _ in rows if name == resource)
            for name, agent, capacity in rows:
                if name != resource:
                    continue
                share = self._bar(capacity.total, capacity.original, max(10, min(30, width - 70)))
                found.append(
                    f"  {clean(agent.agent_id):<{longest}}  {share}  {capacity.total:>6}/{capacity.original}"
                    f"  free {capacity.available:<6} in flight {capacity.in_flight:<4} {self._trend(agent, name)}"
                )
        if not rows:
            found.append("nobody answers: are agents on this bus, and is the secret theirs (TIDEGATE_SWARM_SECRET)?")
        if self._updates:
            found += ["", say.style("reductions", "bold")]
            found += [f"  {_told(update)}" for update, _ in reversed(self._updates)]
        return found

    def _bar(self, total: int, original: int, width: int) -> str:
        filled = max(1, min(width, total * width // max(1, original)))
        colour = "green" if total >= original else "yellow" if 2 * total > original else "red"
        return self._say.style("█" * filled, colour) + self._say.style("░" * (width - filled), "dim")

    def _trend(self, agent: Agent, name: str) -> str:
        """Tell what happens to a resource: frozen, reduced, recovering, or nothing."""
        capacity = agent.resources[name]
        before = self._totals.get((agent.agent_id, name), capacity.total)
        self._totals[agent.agent_id, name] = capacity.total
        if capacity.frozen_for:
            return self._say.style(f"frozen for {capacity.frozen_for:.0f} s", "blue")
        if capacity.total < before:
            return self._say.style("reduced", "red")
        if capacity.total < capacity.original:
            return self._say.style("recovering", "yellow")
        return self._say.style("recovered", "green") if capacity.total > before else ""


def _fields(update: CapacityUpdate) -> dict[str, Any]:
    return {
        "resource": update.resource,
        "agent_id": update.agent_id,
        "new_capacity": update.new_capacity,
        "reason": update.reason,
        "timestamp": update.timestamp.isoformat(),
        "retry_after": update.retry_after,
    }


def _told(update: CapacityUpdate) -> str:
    pause = "" if update.retry_after is None else f", no calls for {update.retry_after:g} s"
    when, why = update.timestamp.strftime("%H:%M:%S"), clean(update.reason) or "no reason given"
    return f"{when}  {clean(update.resource)} to {update.new_capacity} by {clean(update.agent_id)}: {why}{pause}"
