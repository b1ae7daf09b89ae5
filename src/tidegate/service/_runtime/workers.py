"""Several worker processes on one address. Each serves requests by itself; the shared store keeps limits exact.

Each worker reports to its parent process when it is ready or why it failed, and ends when the parent ends. The parent
reads the file and hands the policies in effect to all workers, also to one that replaces another (`worker_link`). The
workers share their counters (`shared_memory`), so that each of them shows the values of the whole service
(`worker_status`).
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

from tidegate._runtime.clock import SystemClock
from tidegate._runtime.event_loop import run_loop
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError, RateLimitError, StoreUnavailable
from tidegate.service._config.reload import Reloader
from tidegate.service._runtime import logs, server
from tidegate.service._runtime.components import watch_egress
from tidegate.service._runtime.shared_memory import WorkerMemory
from tidegate.service._runtime.worker_link import RulesPublisher, WorkerLink

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from tidegate._runtime.clock import Clock
    from tidegate.service._config.settings import Settings

    Failure = tuple[type[RateLimitError], str]

log: logging.Logger = logging.getLogger("tidegate.service")

SPAWN_CONTEXT: Final = multiprocessing.get_context("spawn")  # threads of stores and servers do not survive a fork
KILL_AFTER: Final = 5.0  # seconds after `stop_within` until a worker that has not ended is killed
FIRST_RESTART_PAUSE: Final = 1  # seconds before a worker that died is replaced
MAX_RESTART_PAUSE: Final = 30  # seconds; a worker that ran for longer resets the pause
CHECK_INTERVAL: Final = SECOND  # between two looks at the heartbeats of the workers
MAX_SILENT_CHECKS: Final = 3  # in a row without a new heartbeat; then a worker is replaced
MAX_START_CHECKS: Final = 60  # in a row without the first heartbeat: a start may wait for a store or a slow disk
READY_MESSAGE: Final = "ready"
MAX_MESSAGE_LENGTH: Final = 900  # characters: writes of several workers to one pipe must not interleave
BLOCKED_SIGNALS: Final = {signal.SIGHUP}


def run_workers(settings: Settings, listeners: server.Listeners, ready: server.Ready | None = None) -> None:
    """Run workers until SIGTERM or SIGINT.

    Replaces a worker that dies or does not respond; raises if one fails during the first start.
    """
    pool = WorkerPool(settings, listeners)
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    previous = {number: signal.signal(number, pool.handle_signal) for number in signals}
    try:
        pool.start()
        pool.supervise(ready)
    finally:
        pool.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass
class WorkerSlot:
    """One worker process and, after it dies, its replacements."""

    number: int
    process: SpawnProcess | None = None
    started_at: int = 0  # steady time
    restart_at: int = 0  # steady time
    pause: int = 0  # seconds before the last restart
    heartbeat: int = 0  # the last one that the parent has seen, in steady time
    silent_checks: int = 0  # how often in a row there was no newer one


class WorkerPool:
    """The worker processes of one service."""

    def __init__(self, settings: Settings, listeners: server.Listeners, clock: Clock | None = None) -> None:
        """Prepare the workers; all accept connections from these sockets."""
        self._settings = settings
        self._listeners = listeners
        self._clock: Clock = SystemClock() if clock is None else clock
        self._slots = [WorkerSlot(number) for number in range(settings.workers)]
        self._memory = WorkerMemory.create(settings.workers, self._clock.ns() // 1_000_000)
        self._rules = RulesPublisher(self._memory, settings.policies)
        self._reloader = Reloader(settings, self._rules, self._clock)
        self._egress = (
            None if settings.egress is None else watch_egress(settings, self._clock, self._rules.update_egress)
        )
        self._reader, self._writer = SPAWN_CONTEXT.Pipe(duplex=False)
        self._ready_count = 0  # how many workers have reported that they are ready
        self._failures: dict[int, Failure] = {}  # by process id
        self._stopping = False
        self._stop_signal = signal.SIGTERM  # SIGINT: the workers stop without draining
        self._check_at = 0  # when to check the files, in steady time
        self._heartbeats_at = 0  # when to check the heartbeats, in steady time

    def handle_signal(self, number: int, _frame: object) -> None:
        """Reload the file at SIGHUP; stop on any other signal, at the second one without draining."""
        if number == signal.SIGHUP:
            self._reloader.request_reload()
            if self._egress is not None:
                self._egress.request_reload()
            self._check_at = 0
        elif self._stopping:
            self._send_signal(signal.SIGINT)  # ends the time for draining
        else:
            self._stopping = True
            self._stop_signal = signal.Signals(number)
        with contextlib.suppress(OSError):
            self._writer.send(number)  # wakes `supervise`

    def _send_signal(self, number: int) -> None:
        for process in self._running():
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _running(self) -> list[SpawnProcess]:
        return [slot.process for slot in self._slots if slot.process is not None]

    def start(self) -> None:
        """Start all workers."""
        for slot in self._slots:
            self._start_worker(slot)

    def _start_worker(self, slot: WorkerSlot) -> None:
        """Start a process. It inherits a blocked SIGHUP, and unblocks it once its handler is installed."""
        settings = replace(self._settings, policies=self._rules.rules.policies)
        arguments = (settings, self._listeners, self._writer, self._memory, slot.number)
        process = SPAWN_CONTEXT.Process(target=run_worker, args=arguments)
        slot.started_at = self._clock.steady()
        slot.heartbeat = slot.silent_checks = self._memory.areas[slot.number].heartbeat = 0
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        try:
            process.start()
            slot.process = process
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)

    def supervise(self, ready: server.Ready | None) -> None:
        """Replace workers that die or do not respond, until a signal stops the service.

        Raises if a worker fails during the first start.
        """
        while not self._stopping:
            waiting: list[Any] = [self._reader, *(process.sentinel for process in self._running())]
            multiprocessing.connection.wait(waiting, self._timeout())
            ended = [slot for slot in self._slots if slot.process is not None and not slot.process.is_alive()]
            self._read_messages()  # after `ended`: a worker sends its message before it ends
            if ready is not None and self._ready_count >= self._settings.workers:
                ready(self._settings, None)
                ready = None
            for slot in ended:
                self._memory.areas[slot.number].end()  # its message no longer counts
                if not self._stopping:
                    self._schedule_restart(slot)
            self._check_files()
            self.check_heartbeats()
            for slot in self._slots:
                if slot.process is None and slot.restart_at <= self._clock.steady() and not self._stopping:
                    self._start_worker(slot)

    @property
    def _has_files(self) -> bool:
        return self._settings.file is not None or (self._egress is not None and self._egress.watched)

    def _check_files(self) -> None:
        """Read the files that have changed, every `reload_every` seconds."""
        now = self._clock.steady()
        if self._has_files and now >= self._check_at:
            self._check_at = now + round(self._settings.reload_every * SECOND)
            self._reloader.check()
            if self._egress is not None:
                self._egress.check()

    def check_heartbeats(self) -> None:
        """Kill workers whose event loop does not run, for example in an endless loop; they are replaced like others.

        So is a worker that hangs before its first heartbeat, after a longer time.

        Counts checks instead of time: if the parent was stopped too, or got no processor time, its first check after
        that says nothing about the workers.
        """
        now = self._clock.steady()
        if now < self._heartbeats_at:
            return
        self._heartbeats_at = now + CHECK_INTERVAL
        for slot in self._slots:
            heartbeat = self._memory.areas[slot.number].heartbeat
            silent = slot.process is not None and heartbeat == slot.heartbeat
            slot.heartbeat, slot.silent_checks = heartbeat, slot.silent_checks + 1 if silent else 0
            most = MAX_SILENT_CHECKS if heartbeat else MAX_START_CHECKS
            if slot.silent_checks >= most and slot.process is not None and slot.process.pid is not None:
                silence = now - (heartbeat or slot.started_at)
                reason = f"process {slot.process.pid} has not responded for {silence // SECOND} s"
                self._failures[slot.process.pid] = ConfigError, reason
                slot.process.kill()

    def _timeout(self) -> float:
        """Return the seconds until the next restart, check of the files or check of the heartbeats."""
        times = [self._heartbeats_at, *(slot.restart_at for slot in self._slots if slot.process is None)]
        if self._has_files:
            times.append(self._check_at)
        return max(0, min(times) - self._clock.steady()) / SECOND

    def _read_messages(self) -> None:
        """Read the messages of the workers."""
        while self._reader.poll():
            message = self._reader.recv()
            if message == READY_MESSAGE:
                self._ready_count += 1
            elif isinstance(message, tuple):
                pid, error_type, text = message
                self._failures[pid] = error_type, text

    def _schedule_restart(self, slot: WorkerSlot) -> None:
        """Schedule a replacement after a pause: it may fail for the same reason."""
        process, slot.process = slot.process, None
        if process is None or process.pid is None:
            return
        pid, code = process.pid, process.exitcode
        process.close()
        error_type, reason = self._failures.pop(pid, (ConfigError, f"process {pid} ended with exit code {code}"))
        if self._ready_count < self._settings.workers:
            raise error_type(reason)  # failed during the first start: a replacement would fail too
        now = self._clock.steady()
        slot.pause = restart_pause(slot.pause, now - slot.started_at)
        slot.restart_at = now + slot.pause * SECOND
        log.error("%s: a new process starts in %d s, with the policies in effect", reason, slot.pause)

    def stop(self) -> None:
        """Stop all workers."""
        self._stopping = True
        self._listeners.close()  # each worker has duplicates, and closes them when it stops
        self._send_signal(self._stop_signal)
        for process in self._running():
            process.join(self._settings.drain_for + self._settings.stop_within + KILL_AFTER)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._slots.clear()
        self._memory.close()
        self._reader.close()
        self._writer.close()


def restart_pause(pause: int, lifetime: int) -> int:
    """Return the seconds before a restart, from the previous pause and the lifetime of the process in microseconds."""
    return (
        FIRST_RESTART_PAUSE
        if lifetime > MAX_RESTART_PAUSE * SECOND
        else max(FIRST_RESTART_PAUSE, min(MAX_RESTART_PAUSE, 2 * pause))
    )


def run_worker(
    settings: Settings,
    listeners: server.Listeners,
    pipe: Any,  # noqa: ANN401 - a connection
    memory: WorkerMemory,
    number: int,
) -> None:
    """Run one worker, with the settings that the parent process has read."""
    logs.set_up()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            run_loop(serve_worker(settings, listeners, pipe, WorkerLink(memory, number)))
    except RateLimitError as error:
        error_type = StoreUnavailable if isinstance(error, StoreUnavailable) else ConfigError
        send_message(pipe, (os.getpid(), error_type, str(error)[:MAX_MESSAGE_LENGTH]))


async def serve_worker(
    settings: Settings,
    listeners: server.Listeners,
    pipe: Any,  # noqa: ANN401 - a connection
    link: WorkerLink,
) -> None:
    """Serve until a signal stops the worker, or until the parent process ends."""
    loop, parent = asyncio.get_running_loop(), multiprocessing.parent_process()

    def report_ready(*_: object) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)  # its handler is installed now
        link.start_heartbeat()
        send_message(pipe, READY_MESSAGE)

    def stop_orphan(sentinel: int) -> None:
        loop.remove_reader(sentinel)
        log.warning("the parent process has ended: stopping")
        signal.raise_signal(signal.SIGTERM)

    if parent is not None:
        loop.add_reader(parent.sentinel, stop_orphan, parent.sentinel)
    await server.serve(settings, listeners, report_ready, link)


def send_message(pipe: Any, message: object) -> None:  # noqa: ANN401 - a connection
    """Send a message to the parent process, if it still runs."""
    with contextlib.suppress(OSError):
        pipe.send(message)
