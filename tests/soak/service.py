"""The service under soak: its file, its processes, and what goes wrong with them."""

from __future__ import annotations

import os
import signal
import statistics
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.soak.traffic import LOWERED, POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.service.harness import RunningService

WORKERS: Final = 2
LOST: Final = b"store unavailable: "  # starts the log message of an outage
MEGABYTE: Final = 2**20
MORE_MEMORY: Final = 6 * MEGABYTE  # what a flat curve may rise by, beside a tenth
MORE_DESCRIPTORS: Final = 8
MIN_SAMPLES: Final = 9  # from which thirds of them can be compared


def settings_text(store: str, changed: dict[str, str] | None = None) -> str:
    """Write the service's file."""
    policies = {**POLICIES, **(changed or {})}
    lines = "".join(f"  {name}: {limits}\n" for name, limits in policies.items())
    return f"store: {store}\nreload_every: 200ms\nstop_within: 5s\npolicies:\n{lines}"


class Sample(NamedTuple):
    """The memory and the open descriptors of a process."""

    memory: int
    descriptors: int


class Service:
    """A running service."""

    def __init__(self, running: RunningService, folder: Path, store: str) -> None:
        self.running = running
        self._config = folder / "service.yaml"
        self._store = store
        self.first = self.workers()[0]  # never killed, so that it is as old as the service
        self._log_read = self._losses = 0
        self.faults = {"worker": self._worker, "edit": self._edit, "hangup": self._hangup, "bad file": self._bad_file}

    def workers(self) -> list[int]:
        """List the processes that serve."""
        pid = self.running.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return [int(child) for child in children if b"spawn_main" in read_command(int(child))]

    def sample(self) -> dict[str, Sample]:
        """Look at the process that started the others, and at the oldest of those."""
        pids = {"parent": self.running.process.pid, "worker": self.first}
        return {name: sample_process(pid) for name, pid in pids.items()}

    def losses(self) -> int:
        """Count how often a process has said that it lost the store."""
        with self.running.log.open("rb") as log:
            log.seek(self._log_read)
            lines = log.read().rpartition(b"\n")[0]
        self._log_read += len(lines)
        self._losses += lines.count(LOST)
        return self._losses

    @contextmanager
    def _worker(self) -> Iterator[None]:
        """Kill a process; another one takes its place after a second or more."""
        for pid in self.workers()[-1:]:
            if pid != self.first:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        yield

    @contextmanager
    def _edit(self) -> Iterator[None]:
        """Lower some limits and raise them again; the service looks at its file by itself."""
        self._config.write_text(settings_text(self._store, LOWERED), encoding="utf-8")
        yield
        self._config.write_text(settings_text(self._store), encoding="utf-8")

    @contextmanager
    def _hangup(self) -> Iterator[None]:
        """Lower some limits and raise them again; the service is told so."""
        with self._edit():
            self.running.process.send_signal(signal.SIGHUP)
            yield
        self.running.process.send_signal(signal.SIGHUP)

    @contextmanager
    def _bad_file(self) -> Iterator[None]:
        """Write a file that is refused."""
        self._config.write_text("policies: {window: many}\n", encoding="utf-8")
        self.running.process.send_signal(signal.SIGHUP)
        yield
        self._config.write_text(settings_text(self._store), encoding="utf-8")


def read_command(pid: int) -> bytes:
    """Read the command line of a process; of one that has ended it is empty."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def sample_process(pid: int) -> Sample:
    """Read the resident memory and the descriptors of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return Sample(pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path(f"/proc/{pid}/fd").iterdir())))


def rise(samples: Sequence[Sample]) -> list[str]:
    """Say what is not flat: the median of the last third may be a tenth and a little more above that of the second."""
    if len(samples) < MIN_SAMPLES:
        return []
    third = len(samples) // 3
    second, last = samples[third : 2 * third], samples[-third:]
    found = []
    for name, more in (("memory", MORE_MEMORY), ("descriptors", MORE_DESCRIPTORS)):
        before, after = (statistics.median(getattr(sample, name) for sample in part) for part in (second, last))
        if after > 1.1 * before + more:
            found.append(f"{name}: a median of {before:.0f} in the second third, of {after:.0f} in the last")
    return found
