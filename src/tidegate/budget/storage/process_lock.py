"""Detects processes that ended, by a lock file for each process.

Every budget that reserves in an SQLite file holds a lock on a small file next to it. The operating system releases the
lock when the process ends, for whatever reason. Another process that can take the lock knows that the owner has ended,
and that its open batches can be returned at once. Where such locks do not exist (Windows, some network file systems),
no owner is known to have ended, and open batches are returned when they expire.

`acquire` and `has_ended` are called within write transactions on the database, so that no process tests the lock of
another one while that one takes it.
"""

from __future__ import annotations

import glob
import os
import string
from contextlib import suppress
from typing import TYPE_CHECKING

from tidegate.files import mode_of, open_private

if TYPE_CHECKING:
    from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]  # checked before it is used


class ProcessLock:
    """The lock of this process, and tests of the locks of others."""

    def __init__(self, database: Path, number: int) -> None:
        """Identify this owner by a number among those that use the database; `acquire` takes its lock."""
        self._database = database
        self._number = number
        self._file: int | None = None
        self._tried = False

    @property
    def is_new(self) -> bool:
        """Whether `acquire` was not called yet."""
        return not self._tried

    def find_ended(self) -> list[int]:
        """List the owners that left a lock file and have ended."""
        prefix = f"{self._database.name}-owner-"
        names = (path.name.removeprefix(prefix) for path in self._database.parent.glob(f"{glob.escape(prefix)}*"))
        numbers = [int(name, 16) for name in names if set(name) <= set(string.hexdigits)]
        return [number for number in numbers if self.has_ended(number)]

    def acquire(self) -> None:
        """Take the lock of this process, once."""
        if self._tried:
            return
        self._tried = True
        if fcntl is None:  # pragma: no cover - Windows
            return
        with suppress(OSError):  # without a lock, this owner is never known to have ended
            # Every user of the database must be able to test the lock.
            file = open_private(self._path(self._number), os.O_RDWR, mode_of(self._database))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # the file system has no locks
                os.close(file)
                self._path(self._number).unlink(missing_ok=True)
            else:
                self._file = file

    def has_ended(self, number: int) -> bool:
        """Return whether another owner is known to have ended."""
        if fcntl is None or number == self._number:
            return False
        try:
            file = os.open(self._path(number), os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # it never had a lock
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(file)

    def remove_file(self, number: int) -> None:
        """Remove the lock file of an owner that ended, after its open batches were marked as expired."""
        with suppress(OSError):
            self._path(number).unlink()

    def release(self) -> None:
        """Release the lock and remove its file."""
        if self._file is not None:
            with suppress(OSError):
                self._path(self._number).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None
        self._tried = False

    def close_inherited(self) -> None:
        """Close the file that a fork inherited: the lock belongs to the parent process, which keeps it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _path(self, number: int) -> Path:
        return self._database.with_name(f"{self._database.name}-owner-{number:x}")
