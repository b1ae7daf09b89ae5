"""The functions of the package: they read files, and return plain data."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC
from typing import TYPE_CHECKING, Any, Final

from tidegate.core.bounds import SECOND
from tidegate.plan.logs.formats import LogOptions
from tidegate.plan.logs.stream import LogStream
from tidegate.plan.replay import Replay, Replays
from tidegate.plan.report import Names, describe_range, describe_replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import tzinfo
    from pathlib import Path

    from tidegate.plan.rules.load import RulesSpec

COARSE: Final = SECOND // 100  # a log with a coarser resolution gets a range
log: logging.Logger = logging.getLogger("tidegate")


@dataclass(frozen=True)
class ReplayOptions:
    """How to read logs and to report: see `tidegate plan replay --help`."""

    logs: LogOptions = field(default_factory=LogOptions)
    processes: int = 1
    progress: Callable[[int, int], None] = lambda _done, _total: None
    names: Names = field(default_factory=Names)
    zone: tzinfo = UTC
    retries: int = 0
    uncertainty: int | None = None  # of times, in microseconds; None: the resolution of the log

    def stream(self, paths: Iterable[str | Path]) -> LogStream:
        """Open logs."""
        return LogStream(paths, self.logs, processes=self.processes, progress=self.progress)


@contextmanager
def without_logs() -> Iterator[None]:
    """Log nothing: a replay denies what was decided long ago."""
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def replay(paths: Iterable[str | Path], rules: RulesSpec, options: ReplayOptions | None = None) -> dict[str, Any]:
    """Replay logs against rules, and return the report."""
    options = options or ReplayOptions()
    stream = options.stream(paths)
    with without_logs():
        look = stream.look()
        uncertainty = look.resolution if options.uncertainty is None else options.uncertainty
        shifts = [0, -uncertainty, uncertainty] if uncertainty > COARSE and rules.kind != "provider" else [0]
        replays = [
            Replay(rules.open(has_durations=look.has_durations, shift=shift), retries=options.retries, place=place)
            for place, shift in enumerate(shifts)
        ]
        Replays(replays).run(stream)
    report = describe_replay(replays[0], stream.summary, options.names, options.zone)
    report["range"] = None
    if len(replays) > 1:
        denied = [each.tally.denied for each in replays]
        report["range"] = describe_range(denied[1], denied[2], denied[0], uncertainty)
    return report
