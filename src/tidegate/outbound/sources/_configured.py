"""The sources that a service runs: those in files, which may change, and those added with `tidegate add`.

An added source replaces one of the same name in a file, whatever happens to the file, until it is removed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from tidegate.outbound._providers.watched_files import WatchedFiles
from tidegate.outbound.sources._source import check_names, describe_conflict, read_source

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tidegate.outbound.sources._runner import SourceRunner
    from tidegate.outbound.sources._source import Source


log: logging.Logger = logging.getLogger("tidegate.outbound")


class SourceChanges(NamedTuple):
    """The sources to add or replace, and the names of those to remove."""

    changed: list[Source]
    removed: list[str]


class ConfiguredSources:
    """The files of sources. `load` reads all of them; `reload` returns what has changed since."""

    def __init__(self, files: Sequence[Path], directories: Sequence[Path], data: Path) -> None:
        """Read these files, and those that `tidegate add` stored in the data folder."""
        self._files = WatchedFiles("source", read_source, files, directories)
        self._added = data / "sources"
        self._in_effect: dict[Path, Source] = {}
        self.problems: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there is a file or directory that may change."""
        return bool(self._files)

    def load(self) -> list[Source]:
        """Read the sources; raises ConfigError if a file is invalid, or two have the same name."""
        self._in_effect = self._files.load()
        check_names(self._in_effect)
        found = {source.name: source for source in self._in_effect.values()}
        for path in sorted(self._added.glob("*.yaml")) if self._added.is_dir() else ():
            source = read_source(path)
            if source != found.get(source.name, source):
                log.warning(
                    "source %s: the version that 'tidegate add' stored in %s replaces the configured one; "
                    "'tidegate remove %s' and a restart restore that",
                    source.name,
                    path,
                    source.name,
                )
            found[source.name] = source
        return list(found.values())

    def reload(self) -> SourceChanges:
        """Read the files that have changed; an invalid one is logged, and its previous version stays in effect."""
        problems: list[str] = []
        before = {source.name: source for source in self._in_effect.values()}
        self._in_effect = self._without_conflicts(self._files.reload(problems), problems)
        self.problems = tuple(problems)
        now = {source.name: source for source in self._in_effect.values()}
        changed = [source for name, source in now.items() if source != before.get(name)]
        return SourceChanges(
            [source for source in changed if not self._is_replaced(source.name)],
            [name for name in before if name not in now and not self._is_replaced(name)],
        )

    def apply(self, changes: SourceChanges, runner: SourceRunner) -> None:
        """Let a runner use what has changed."""
        for name in changes.removed:
            if name in runner.scheduler.sources:
                runner.remove(name)
        for source in changes.changed:
            runner.add(source)
        runner.problems = self.problems

    def _is_replaced(self, name: str) -> bool:
        """Return whether an added source has this name, and log that it stays."""
        path = self._added / f"{name}.yaml"
        if not path.exists():
            return False
        log.warning(
            "source %s: the file has changed, but the version that 'tidegate add' stored in %s stays in effect",
            name,
            path,
        )
        return True

    def _without_conflicts(self, read: dict[Path, Source], problems: list[str]) -> dict[Path, Source]:
        """Return sources with different names. A file that takes the name of another one keeps its previous version."""
        before = self._in_effect
        kept = [path for path in read if path in before and before[path].name == read[path].name]
        chosen: dict[Path, Source] = {}
        names: dict[str, Path] = {}
        for path in (*kept, *(path for path in read if path not in kept)):
            source = read[path]
            if names.setdefault(source.name, path) == path:
                chosen[path] = source
                continue
            message = describe_conflict(path, names[source.name], source.name)
            problems.append(message)
            if path in before and names.setdefault(before[path].name, path) == path:
                chosen[path] = before[path]
            if message not in self.problems:  # logged once
                state = "the previous version stays in effect" if path in chosen else "the file is ignored"
                log.warning("%s: %s: %s", path, state, message)
        return chosen
