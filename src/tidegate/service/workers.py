"""Several processes behind one address: each serves by itself, the store makes them exact together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tidegate.service import logs, server
from tidegate.service.settings import load_settings

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess
    from multiprocessing.sharedctypes import Synchronized

    from tidegate.service.settings import Settings

log = logging.getLogger("tidegate.service")

SPAWN: Final = multiprocessing.get_context("spawn")  # threads of stores and servers do not survive a fork
ALONE: Final[dict[str, Any]] = {
    **dict.fromkeys(("providers", "provider_dirs", "sources", "source_dirs"), ()),
    "data": None,
    "bus": None,
    "budget": False,
    "swarm": None,
}
PATIENCE: Final = 5.0  # seconds beyond `stop_within` after which a process that does not end is killed


def run_workers(settings: Settings, ready: server.Ready | None = None) -> None:
    """Run processes until SIGTERM or SIGINT; one that dies is replaced."""
    crew = Crew(settings)
    previous = {number: signal.signal(number, crew.told) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        crew.start()
        crew.watch(ready)
    finally:
        crew.end()
        for number, handler in previous.items():
            signal.signal(number, handler)


class Crew:
    """The processes of one service."""

    def __init__(self, settings: Settings) -> None:
        """Prepare them."""
        self._settings = settings
        self._secret = secrets.token_bytes(32)  # all settle each other's reservations
        self._up: Synchronized[int] = SPAWN.Value("i", 0)
        self._processes: list[SpawnProcess] = []
        self._reader, self._writer = SPAWN.Pipe(duplex=False)
        self._stopping = False

    def told(self, number: int, _frame: object) -> None:
        """Pass a signal on."""
        if number == signal.SIGHUP:
            self._tell(signal.SIGHUP)
        else:
            self._stopping = True
            with contextlib.suppress(OSError):
                self._writer.send(number)  # wakes `watch`

    def _tell(self, number: int) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def start(self) -> None:
        """Start them all."""
        self._processes = [self._new(place) for place in range(self._settings.workers)]

    def _new(self, place: int) -> SpawnProcess:
        words = given(self._settings)
        process = SPAWN.Process(target=work, args=(words, self._secret, self._writer, place == 0))
        process.start()
        return process

    def watch(self, ready: server.Ready | None) -> None:
        """Wait until told to stop; replace who dies."""
        up = 0
        while not self._stopping:
            waiting: list[Any] = [self._reader, *(process.sentinel for process in self._processes)]
            for found in multiprocessing.connection.wait(waiting):
                if found is self._reader:
                    up += self._reader.recv() == "ready"
                    if up == self._settings.workers and ready is not None:
                        ready(self._settings, None)
                        ready = None
            for place, process in enumerate(self._processes):
                if not process.is_alive() and not self._stopping:
                    if up < self._settings.workers:
                        self._stopping = True  # it could not even start: so would not the next
                        break
                    log.error("process %s ended with %s: another takes its place", process.pid, process.exitcode)
                    self._processes[place] = self._new(place)

    def end(self) -> None:
        """Stop them all."""
        self._stopping = True
        self._tell(signal.SIGTERM)
        for process in self._processes:
            process.join(self._settings.stop_within + PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._reader.close()
        self._writer.close()


def given(settings: Settings) -> dict[str, Any]:
    """Word settings such that another process reads the same."""
    return {"source": settings.file, "flags": dict(settings.flags), "policies": settings.policies}


def work(words: dict[str, Any], secret: bytes, told: Any, first: bool) -> None:  # noqa: ANN401, FBT001 - a connection, and as `args`
    """Be one of the processes; the first also runs what there is one of: sources, what shows a budget or a swarm."""
    logs.set_up()
    settings = load_settings(**words, environment=os.environ)
    if not first:
        settings = replace(settings, **ALONE)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.serve(settings, lambda *_: told.send("ready"), secret=secret))
    server.leave()
