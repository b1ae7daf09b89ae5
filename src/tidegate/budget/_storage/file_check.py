"""Checks the path of an SQLite file before it is used: whether it can ever work. Changes nothing."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from tidegate.budget._storage.document_tables import is_document_database
from tidegate.errors import ConfigError
from tidegate.stores._sqlite.database import ADVICE, WRONG_PATH_CODES, WrongFileError, check_version, error_code

if TYPE_CHECKING:
    from pathlib import Path


def check_path(path: Path, *, creates: bool = True) -> None:
    """Raise ConfigError if a budget could never use a file at this path; `creates` is whether it creates one."""
    if path.is_dir():
        message = f"{path} is a directory: expected the path of a file, such as {path / 'rate_limits.db'}"
        raise ConfigError(message, field="store")
    if path.exists():
        _check_file(path)
    else:
        _check_folder(path.absolute(), creates=creates)


def _check_folder(path: Path, *, creates: bool) -> None:
    folder = next(each for each in path.parents if os.path.lexists(each))
    if not folder.is_dir():
        message = f"cannot create the directory {path.parent}: {folder} is not a directory"
        raise ConfigError(message, field="store")
    if creates and not os.access(folder, os.W_OK | os.X_OK):
        message = f"cannot create {path}: this user must be able to write to {folder}"
        raise ConfigError(message, field="store")


def _check_file(path: Path) -> None:
    # Without the write-ahead log: reading it would create files next to the database, maybe of another user.
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as db:
            if not is_document_database(db):
                check_version(db, path)
    except (WrongFileError, sqlite3.Error) as error:
        refuse_wrong_path(error, path)


def refuse_wrong_path(error: Exception, path: Path, *, creates: bool = True) -> None:
    """Raise ConfigError for an error of opening a file that no retry repairs; others are outages."""
    if isinstance(error, WrongFileError):
        raise ConfigError(str(error), field="store") from None
    if isinstance(error, OSError):
        raise ConfigError(f"cannot create the directory {path.parent}: {error.strerror}", field="store") from None
    if creates and isinstance(error, sqlite3.Error) and (code := error_code(error)) in WRONG_PATH_CODES:
        advice = ADVICE[code].removesuffix("; the next call retries")
        raise ConfigError(f"cannot use {path}: {advice}", field="store") from None
