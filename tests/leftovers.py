"""Processes that a test run started: the end of a run names those that are left and kills them.

Each process of a run has an environment variable with the id of the run, which the processes that it starts inherit. A
guardian, itself no part of the run, waits for the end of the process that began the run, however it ends (SIGKILL too),
and kills what is left then. So a server never lives longer than the run that started it. Linux only: it reads /proc.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "TIDEGATE_TEST_RUN"
ENDING = 10.0  # seconds in which a process that is ending may end: a busy machine needs some


class Run:
    """A test run that this process began."""

    def __init__(self) -> None:
        """Mark the processes that are started from now on, and start the guardian."""
        self.id = uuid.uuid4().hex
        pipe, self._held = os.pipe()  # the guardian reads the end of the file when this process ends
        self._guardian = subprocess.Popen(
            [sys.executable, "-S", __file__, self.id, str(os.getpid())],
            stdin=pipe,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(pipe)
        os.environ[VARIABLE] = self.id

    def end(self) -> list[str]:
        """Kill the processes that are left; return a line for each."""
        os.environ.pop(VARIABLE, None)
        deadline = time.monotonic() + ENDING
        while (left := list(processes_of(self.id))) and time.monotonic() < deadline:
            time.sleep(0.05)  # a real process has no virtual time
        lines = [f"{pid}: {command_of(pid)}" for pid in left]
        kill_all(self.id)
        os.close(self._held)
        self._guardian.wait()
        return lines


def processes_of(run: str) -> Iterator[int]:
    """Yield the processes that belong to a run. One that ended and waits for its parent does not count."""
    mark = f"{VARIABLE}={run}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def command_of(pid: int) -> str:
    """Return the command of a process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "ended"


def kill_all(run: str) -> None:
    """Kill the processes of a run, and what they start meanwhile."""
    deadline = time.monotonic() + ENDING
    while (left := list(processes_of(run))) and time.monotonic() < deadline:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":  # the guardian
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_all(sys.argv[1])
