"""Several processes behind one address: each serves by itself, the store makes them exact together.

Each tells the one that started it when it serves, or why it cannot, and ends when that one does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from tidegate.clock import SystemClock
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError, RateLimitError, StoreUnavailable
from tidegate.service.config.settings import load_settings
from tidegate.service.runtime import logs, server

if TYPE_CHECKING:
    import socket
    from multiprocessing.context import SpawnProcess

    from tidegate.service.config.settings import Settings

    Why = tuple[type[RateLimitError], str]

log = logging.getLogger("tidegate.service")

SPAWN_CONTEXT: Final = multiprocessing.get_context("spawn")  # threads of stores and servers do not survive a fork
FIRST_WORKER_ONLY: Final[dict[str, Any]] = {
    **dict.fromkeys(("providers", "provider_dirs", "sources", "source_dirs"), ()),
    "data": None,
    "bus": None,
    "budget": False,
    "swarm": None,
}
KILL_AFTER: Final = 5.0  # seconds beyond `stop_within` after which a process that does not end is killed
FIRST_RESTART_PAUSE: Final = 1  # seconds before a process that died is replaced
MAX_RESTART_PAUSE: Final = 30  # seconds before that at most, and how long one has to last to count as well
READY_MESSAGE: Final = "ready"
MAX_MESSAGE_LENGTH: Final = (
    900  # characters of what a process says: what it writes to the pipe must not mix with another's
)
BLOCKED_SIGNALS: Final = {signal.SIGHUP}


def run_workers(settings: Settings, listener: socket.socket, ready: server.Ready | None = None) -> None:
    """Run processes until SIGTERM or SIGINT; one that dies is replaced, unless it never came to serve."""
    crew = WorkerPool(settings, listener)
    previous = {number: signal.signal(number, crew.told) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        crew.start()
        crew.watch(ready)
    finally:
        crew.end()
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass
class WorkerSlot:
    """The place of one process, and of whoever comes after it."""

    first: bool
    process: SpawnProcess | None = None
    began: int = 0  # when the process was started, and when the next one is to be, both in steady time
    due: int = 0
    pause: int = 0  # seconds from the end of the last one


class WorkerPool:
    """The processes of one service."""

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        """Prepare them; all accept connections from this socket."""
        self._settings = settings
        self._listener = listener
        self._clock = SystemClock()
        self._places = [WorkerSlot(first=number == 0) for number in range(settings.workers)]
        self._reader, self._writer = SPAWN_CONTEXT.Pipe(duplex=False)
        self._up = 0  # how many have come to serve
        self._why: dict[int, Why] = {}  # by process: why it ended
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
        for process in self._running():
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _running(self) -> list[SpawnProcess]:
        return [place.process for place in self._places if place.process is not None]

    def start(self) -> None:
        """Start them all."""
        for place in self._places:
            self._fill(place)

    def _fill(self, place: WorkerSlot) -> None:
        """Start a process; it inherits that SIGHUP has to wait, until it knows what to do with one."""
        words = given(self._settings)
        process = SPAWN_CONTEXT.Process(target=work, args=(words, self._listener, self._writer, place.first))
        place.began = self._clock.steady()
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        try:
            process.start()
            place.process = process
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)

    def watch(self, ready: server.Ready | None) -> None:
        """Wait until told to stop; replace who dies, raise if one cannot even start."""
        while not self._stopping:
            waiting: list[Any] = [self._reader, *(process.sentinel for process in self._running())]
            multiprocessing.connection.wait(waiting, self._patience())
            ended = [place for place in self._places if place.process is not None and not place.process.is_alive()]
            self._listen()  # after that look: what a process says, it says before it ends
            if ready is not None and self._up >= self._settings.workers:
                ready(self._settings, None)
                ready = None
            for place in ended:
                if not self._stopping:
                    self._clear(place)
            for place in self._places:
                if place.process is None and place.due <= self._clock.steady() and not self._stopping:
                    self._fill(place)

    def _patience(self) -> float | None:
        """Tell how many seconds there are until the next process is due."""
        due = [place.due for place in self._places if place.process is None]
        return max(0, min(due) - self._clock.steady()) / SECOND if due else None

    def _listen(self) -> None:
        """Hear what the processes say."""
        while self._reader.poll():
            said = self._reader.recv()
            if said == READY_MESSAGE:
                self._up += 1
            elif isinstance(said, tuple):
                number, kind, text = said
                self._why[number] = kind, text

    def _clear(self, place: WorkerSlot) -> None:
        """Make room for the next process, after a pause: what ended this one may end that one, too."""
        process, place.process = place.process, None
        if process is None or process.pid is None:
            return
        number, code = process.pid, process.exitcode
        process.close()
        kind, why = self._why.pop(number, (ConfigError, f"process {number} ended with {code}"))
        if self._up < self._settings.workers:
            raise kind(why)  # it could not even start: so would not the next
        now = self._clock.steady()
        place.pause = pause_after(place.pause, now - place.began)
        place.due = now + place.pause * SECOND
        log.error(
            "%s: another takes its place in %d s; it reads the file as it is then, the others keep their rules",
            why,
            place.pause,
        )

    def end(self) -> None:
        """Stop them all."""
        self._stopping = True
        self._listener.close()  # the processes have it, too, as long as they accept connections
        self._tell(signal.SIGTERM)
        for process in self._running():
            process.join(self._settings.stop_within + KILL_AFTER)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._places.clear()
        self._reader.close()
        self._writer.close()


def pause_after(pause: int, lived: int) -> int:
    """Tell how many seconds to wait after a process that lived for so many microseconds, and the pause before it."""
    return (
        FIRST_RESTART_PAUSE
        if lived > MAX_RESTART_PAUSE * SECOND
        else max(FIRST_RESTART_PAUSE, min(MAX_RESTART_PAUSE, 2 * pause))
    )


def given(settings: Settings) -> dict[str, Any]:
    """Word settings such that another process reads the same."""
    return {"source": settings.file, "flags": dict(settings.flags), "policies": settings.policy_flags}


def work(words: dict[str, Any], listener: socket.socket, told: Any, first: bool) -> None:  # noqa: ANN401, FBT001 - a connection, and as `args`
    """Be one of the processes; the first also runs what there is one of: sources, what shows a budget or a swarm."""
    logs.set_up()
    try:
        settings = load_settings(**words, environment=os.environ)
        if not first:
            settings = replace(settings, **FIRST_WORKER_ONLY)
        with contextlib.suppress(KeyboardInterrupt):
            server.run_loop(attend(settings, listener, told))
    except RateLimitError as error:
        kind = StoreUnavailable if isinstance(error, StoreUnavailable) else ConfigError
        tell(told, (os.getpid(), kind, str(error)[:MAX_MESSAGE_LENGTH]))


async def attend(settings: Settings, listener: socket.socket, told: Any) -> None:  # noqa: ANN401 - a connection
    """Serve until told to stop, or until the process that started this one is gone."""
    loop, parent = asyncio.get_running_loop(), multiprocessing.parent_process()

    def up(*_: object) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)  # by now it is handled
        tell(told, READY_MESSAGE)

    def orphaned(sentinel: int) -> None:
        loop.remove_reader(sentinel)
        log.warning("the process that started this one is gone: stopping")
        signal.raise_signal(signal.SIGTERM)

    if parent is not None:
        loop.add_reader(parent.sentinel, orphaned, parent.sentinel)
    await server.serve(settings, listener, up)


def tell(told: Any, what: object) -> None:  # noqa: ANN401 - a connection
    """Say something to the process that started this one, if it is still there."""
    with contextlib.suppress(OSError):
        told.send(what)
