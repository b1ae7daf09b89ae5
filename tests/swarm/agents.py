"""Agents in separate processes, controlled over a pipe. Used by tests and by the benchmark."""

from __future__ import annotations

import multiprocessing
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tidegate import Closed
from tidegate.adaptive import SUBJECT
from tidegate.bus import open_bus
from tidegate.swarm import SwarmLimiter

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ROUNDS = 10
PATIENCE = 40.0


class AgentProcess:
    """The code of an agent's process: a limiter that recovers in a second, and one that takes hours."""

    def __init__(self, url: str, name: str) -> None:
        self.bus = open_bus(url)
        self.heard: dict[str, int] = {}
        self.fast = SwarmLimiter(self.bus, agent_id=name, recovery_interval=1.0, recovery_factor=2)
        self.slow = SwarmLimiter(self.bus, agent_id=f"{name}-slow", recovery_interval=3600)
        self.fast.on_capacity_change(lambda update: self.heard.setdefault(update.resource, time.monotonic_ns()))
        for number in range(ROUNDS):
            self.fast.set_capacity(f"r{number}", 100, 60)
        self.fast.set_capacity("work", 5, 0.25)
        self.slow.set_capacity("slow", 100, 60)
        self.done = 0
        self.errors: list[str] = []
        joined = threading.Event()
        self.bus.subscribe(SUBJECT, lambda _: None, lambda _: joined.set())  # the last one: then all are there
        self.workers = [threading.Thread(target=self.work) for _ in range(2)]
        for worker in self.workers:
            worker.start()
        if not joined.wait(PATIENCE):
            self.errors.append("never connected")

    def work(self) -> None:
        """Make calls, waiting for each, until closed."""
        with suppress(Closed):
            try:
                while True:
                    self.fast.acquire("work", timeout=PATIENCE)
                    self.fast.release("work", return_token=False)
                    self.done += 1
            except Closed:
                raise
            except Exception as error:  # noqa: BLE001 - told to the test
                self.errors.append(repr(error))

    def announce(self, resource: str) -> int:
        """Announce a 429; give the instant before."""
        limiter = self.slow if resource == "slow" else self.fast
        instant = time.monotonic_ns()
        limiter.announce_reduced(resource, "received 429 response")
        return instant

    def totals(self) -> dict[str, int]:
        """Give the capacities."""
        names = [*(f"r{number}" for number in range(ROUNDS)), "slow"]
        found = {name: (self.slow if name == "slow" else self.fast).get_capacity(name) for name in names}
        return {name: capacity.total for name, capacity in found.items() if capacity is not None}

    def state(self) -> dict[str, Any]:
        """Tell everything."""
        return {
            "heard": dict(self.heard),
            "totals": self.totals(),
            "done": self.done,
            "errors": self.errors,
            "connected": self.bus.connected,
            "bus": self.bus.metrics(),
            "updates": self.slow.metrics(),
        }

    def close(self) -> None:
        """End in order."""
        self.fast.close()
        self.slow.close()
        self.bus.close()
        for worker in self.workers:
            worker.join(PATIENCE)


def main(url: str, name: str, connection: Connection) -> None:
    """Run an agent: each command is a method's name and arguments; its result is sent back."""
    inside = AgentProcess(url, name)
    connection.send("ready")
    with suppress(EOFError):
        while True:
            command, *arguments = connection.recv()
            connection.send(getattr(inside, command)(*arguments))
            if command == "close":
                return
    inside.close()


class Agent:
    """An agent as seen from outside."""

    # Forked by a process that has imported everything and has no threads.
    context = multiprocessing.get_context("forkserver")

    def __init__(self, url: str, name: str) -> None:
        self.context.set_forkserver_preload(["__main__", __name__, "tidegate.bus._nats", "tidegate.bus._redis"])
        self.name = name
        self.connection, theirs = self.context.Pipe()
        self.process = self.context.Process(target=main, args=(url, name, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it has joined the bus."""
        assert self.answer() == "ready"

    def answer(self) -> Any:
        """Wait for the result of the last command."""
        if not self.connection.poll(PATIENCE):
            raise AssertionError(f"{self.name} does not answer")
        return self.connection.recv()

    def ask(self, *command: Any) -> Any:
        """Have a command done."""
        self.connection.send(command)
        return self.answer()

    def kill(self) -> None:
        """Kill -9."""
        self.process.kill()
        self.process.join(PATIENCE)
        self.connection.close()

    def close(self) -> None:
        """End in order, or by force."""
        if self.process.is_alive():
            with suppress(OSError, EOFError, AssertionError):
                self.ask("close")
            self.process.join(PATIENCE)
        self.kill()
