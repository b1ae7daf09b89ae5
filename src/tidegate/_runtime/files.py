"""Create files and folders that only their owner can read, whatever the umask is.

Existing files keep their mode, because an operator may share them on purpose. SQLite gives the `-wal`, `-shm` and
`-journal` files of a database the mode of the database.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
ANY_FILE: Final = 0o666
CLOSE_ON_EXEC: Final = getattr(os, "O_CLOEXEC", 0)  # not on Windows


def make_private_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder and its missing parents, accessible only to their owner."""
    folder = Path(path)
    try:
        folder.mkdir(mode=FOLDER_MODE)
    except FileNotFoundError:
        make_private_folder(folder.parent)
        make_private_folder(folder)
        return
    except FileExistsError:
        if not folder.is_dir():
            raise
        return
    folder.chmod(FOLDER_MODE)  # the umask may have removed bits


def make_private_file(path: str | os.PathLike[str]) -> None:
    """Create an empty file that only its owner can access, unless the file exists."""
    try:
        os.close(open_private(path, os.O_WRONLY | os.O_EXCL))
    except FileExistsError:
        return


def open_private(path: str | os.PathLike[str], flags: int, mode: int = FILE_MODE) -> int:
    """Open a file descriptor; a created file gets exactly this mode, by default accessible only to its owner."""
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | CLOSE_ON_EXEC, mode)
    except FileExistsError:
        if flags & os.O_EXCL:
            raise
        return os.open(path, flags | os.O_CREAT | CLOSE_ON_EXEC, mode)
    if hasattr(os, "fchmod"):  # not on Windows
        os.fchmod(descriptor, mode)  # the umask may have removed bits
    return descriptor


def mode_of(path: str | os.PathLike[str]) -> int:
    """Return the mode of a file, for related files; if the file does not exist, a mode for its owner alone."""
    try:
        return stat.S_IMODE(Path(path).stat().st_mode) & ANY_FILE
    except OSError:
        return FILE_MODE


def replace_private(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file atomically, accessible only to its owner."""
    target = Path(path)
    partial = target.with_name(f"{target.name}.part")
    partial.unlink(missing_ok=True)
    with os.fdopen(open_private(partial, os.O_WRONLY | os.O_EXCL), "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(target)
