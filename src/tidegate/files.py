"""Create files and folders that only their owner can read, whatever the umask is.

What is there already keeps its mode: whoever shares a file on purpose has set it. SQLite gives a database's `-wal`,
`-shm` and `-journal` files the mode of the database itself.
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
    """Create a folder and the folders above it, as far as they are missing, for their owner alone."""
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
    folder.chmod(FOLDER_MODE)  # the umask may have taken bits away


def make_private_file(path: str | os.PathLike[str]) -> None:
    """Create an empty file for its owner alone, unless there is a file of that name."""
    try:
        os.close(open_private(path, os.O_WRONLY | os.O_EXCL))
    except FileExistsError:
        return


def open_private(path: str | os.PathLike[str], flags: int, mode: int = FILE_MODE) -> int:
    """Open a file descriptor; a file that this creates gets the mode exactly: for its owner alone, unless told so."""
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | CLOSE_ON_EXEC, mode)
    except FileExistsError:
        if flags & os.O_EXCL:
            raise
        return os.open(path, flags | os.O_CREAT | CLOSE_ON_EXEC, mode)
    if hasattr(os, "fchmod"):  # not on Windows
        os.fchmod(descriptor, mode)  # the umask may have taken bits away
    return descriptor


def mode_of(path: str | os.PathLike[str]) -> int:
    """Tell who may read and write a file, for another one that belongs to it; for its owner alone if there is none."""
    try:
        return stat.S_IMODE(Path(path).stat().st_mode) & ANY_FILE
    except OSError:
        return FILE_MODE


def replace_private(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file for its owner alone, such that it is there as a whole or not at all."""
    target = Path(path)
    part = target.with_name(f"{target.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(open_private(part, os.O_WRONLY | os.O_EXCL), "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(target)
