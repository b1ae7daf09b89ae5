"""Files of one kind, given by path or found in directories, that are read again when they change."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from tidegate._runtime.file_watcher import versions_of
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from tidegate._runtime.file_watcher import FileVersions

T = TypeVar("T")

log: logging.Logger = logging.getLogger("tidegate.outbound")

YAML_SUFFIXES: Final = (".yaml", ".yml")


class ReadFile(NamedTuple, Generic[T]):
    """What a file contains, and the version that was read."""

    content: T
    versions: FileVersions  # of the file, and of the files that it names


class WatchedFiles(Generic[T]):
    """The files given by path, and those of directories that end in .yaml or .yml, by name.

    An invalid file keeps its previous content, if it had one. It is logged once for each version of the file.
    """

    def __init__(
        self,
        kind: str,
        read: Callable[[Path], T],
        files: Iterable[str | os.PathLike[str]] = (),
        directories: Iterable[str | os.PathLike[str]] = (),
        *,
        other_files: Callable[[T], Iterable[str]] = lambda _content: (),
    ) -> None:
        """Read each file with `read`; `other_files` returns the files that a content was also read from."""
        self._kind = kind
        self._read_file = read
        self._other_files = other_files
        self.files: tuple[Path, ...] = tuple(map(Path, files))
        self.directories: tuple[Path, ...] = tuple(map(Path, directories))
        self._found: dict[Path, ReadFile[T]] = {}
        self._refused: dict[Path, FileVersions] = {}

    def __bool__(self) -> bool:
        """Return whether there is a file or directory that may change."""
        return bool(self.files or self.directories)

    def load(self) -> dict[Path, T]:
        """Read all files; raises ConfigError if one is invalid."""
        self._found = {path: self._read(path) for path in self._paths()}
        return self._contents()

    def reload(self, problems: list[str]) -> dict[Path, T]:
        """Read the files that have changed; what is wrong is added to `problems`."""
        found = {path: self._reread(path, problems) for path in self._paths(problems)}
        self._found = {path: read for path, read in found.items() if read is not None}
        self._refused = {path: versions for path, versions in self._refused.items() if path in found}
        return self._contents()

    def _contents(self) -> dict[Path, T]:
        return {path: read.content for path, read in self._found.items()}

    def _reread(self, path: Path, problems: list[str]) -> ReadFile[T] | None:
        """Read a file again if it has changed; keep the previous version if it is invalid."""
        found = self._found.get(path)
        now = versions_of((path, *(() if found is None else self._other_files(found.content))))
        if found is not None and found.versions == now and path not in self._refused:
            return found
        try:
            again = self._read(path)
        except ConfigError as error:
            if self._refused.get(path, ()) != now:  # logged once for each version of the file
                kept = "it is ignored" if found is None else "the previous version stays in effect"
                log.warning("a %s file is invalid, %s: %s", self._kind, kept, error)
            self._refused[path] = now
            problems.append(str(error))
            return found
        self._refused.pop(path, None)
        return again

    def _read(self, path: Path) -> ReadFile[T]:
        version, content = versions_of((path,)), self._read_file(path)
        others = versions_of(self._other_files(content))
        if others:  # these files may have changed before their versions were taken
            content = self._read_file(path)
        return ReadFile(content, version + others)

    def _paths(self, problems: list[str] | None = None) -> list[Path]:
        """List the files; a directory that cannot be listed raises, or is a problem and keeps its files."""
        paths = list(self.files)
        for folder in self.directories:
            try:
                entries = sorted(folder.iterdir())
            except OSError as error:
                wrong = ConfigError(f"cannot be listed: {error.strerror or error}", file=str(folder))
                if problems is None:
                    raise wrong from None
                problems.append(str(wrong))  # it may be temporary
                entries = [path for path in self._found if path.parent == folder]
            paths += [path for path in entries if path.suffix in YAML_SUFFIXES and not path.name.startswith(".")]
        return paths
