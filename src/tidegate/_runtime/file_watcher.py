"""Watches files for changes: configuration is read again when its file changes, or when a reload is requested.

A version is taken before a file is read, so a change while it is read is noticed by the next check.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate._runtime.clock import TaskSignal

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from tidegate._runtime.clock import Clock

    Paths = Iterable[str | os.PathLike[str]]

FileVersion = tuple[int, int, int, int]  # device, inode, size, time of change
FileVersions = tuple[FileVersion | None, ...]  # None: the file does not exist, or cannot be read


def versions_of(paths: Paths) -> FileVersions:
    """Identify the current version of each file."""
    return tuple(map(_version_of, paths))


def _version_of(path: str | os.PathLike[str]) -> FileVersion | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class FileWatcher:
    """Notices changes of files, and requests to read them again."""

    def __init__(self, paths: Paths) -> None:
        """Watch these files from now on."""
        self.paths: tuple[str | os.PathLike[str], ...] = tuple(paths)
        self._seen: FileVersions | None = versions_of(self.paths)  # None: a reload is requested
        self._signal: TaskSignal | None = None

    def watch(self, paths: Paths) -> None:
        """Watch other files; a file that was watched before keeps the version that was seen."""
        seen = dict(zip(self.paths, self._seen or (), strict=False))
        self.paths = tuple(paths)
        self._seen = tuple(seen[path] if path in seen else _version_of(path) for path in self.paths)

    def changed(self) -> bool:
        """Return whether a file has changed since the last call, or a reload was requested."""
        before, self._seen = self._seen, versions_of(self.paths)
        return self._seen != before

    def is_current(self) -> bool:
        """Return whether the files still have the versions that `changed` saw: they are not being written."""
        return self._seen == versions_of(self.paths)

    def request_reload(self) -> None:
        """Report a change at the next check, which `run` makes now."""
        self._seen = None
        if self._signal is not None:
            self._signal.set()

    async def run(self, check: Callable[[], object], seconds: float, clock: Clock) -> None:
        """Call `check`, a function or coroutine function, every few seconds, until cancelled."""
        self._signal = TaskSignal()
        while True:
            self._signal.clear()
            result = check()
            if inspect.isawaitable(result):
                await result
            await clock.wait_async(self._signal, clock.steady() + round(seconds * 1_000_000))
