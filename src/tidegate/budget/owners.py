"""Who is alive: a lock on a file of one's own, which the operating system lets go when a process ends, however it does.

Every budget that reserves on an SQLite file keeps a lock on a small file beside it. Whoever can take the lock of
another knows that it is dead, and what it left open can be given back at once. Where there are no such locks (Windows,
some network file systems), nobody is known to be dead, and what is open is given back when it is overdue.

Both methods are called within write transactions on the database, so nobody is asked about while it takes its lock.
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
    fcntl = None  # type: ignore[assignment]  # looked for before it is used


class Owner:
    """One's own lock, and the question about those of others."""

    def __init__(self, database: Path, number: int) -> None:
        """Be known by this number among those who use the database; `live` takes the lock."""
        self._database = database
        self._number = number
        self._file: int | None = None
        self._tried = False

    @property
    def is_new(self) -> bool:
        """Whether nobody can see yet that this one is alive."""
        return not self._tried

    def dead(self) -> list[int]:
        """Tell who of those that left their files has ended."""
        start = f"{self._database.name}-owner-"
        names = (path.name.removeprefix(start) for path in self._database.parent.glob(f"{glob.escape(start)}*"))
        numbers = [int(name, 16) for name in names if set(name) <= set(string.hexdigits)]
        return [number for number in numbers if self.is_dead(number)]

    def live(self) -> None:
        """Take the lock, once."""
        if self._tried:
            return
        self._tried = True
        if fcntl is None:  # pragma: no cover - Windows
            return
        with suppress(OSError):  # without it, one is never known to be dead
            # Whoever may use the database must be able to ask for the lock.
            file = open_private(self._path(self._number), os.O_RDWR, mode_of(self._database))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # the file system has no locks
                os.close(file)
                self._path(self._number).unlink(missing_ok=True)
            else:
                self._file = file

    def is_dead(self, number: int) -> bool:
        """Tell whether another is known to have ended."""
        if fcntl is None or number == self._number:
            return False
        try:
            file = os.open(self._path(number), os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # it had no lock to begin with
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(file)

    def forget(self, number: int) -> None:
        """Remove the file of one who has ended, once what it left open is known to be overdue."""
        with suppress(OSError):
            self._path(number).unlink()

    def end(self) -> None:
        """Let the lock go."""
        if self._file is not None:
            with suppress(OSError):
                self._path(self._number).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None
        self._tried = False

    def leave(self) -> None:
        """Let go of what was inherited by a fork: the lock is the parent's, and stays with it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _path(self, number: int) -> Path:
        return self._database.with_name(f"{self._database.name}-owner-{number:x}")
