"""A configuration file that is read again when it changes; a bad one is refused, and the old one stays in force."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.errors import ConfigError
from tidegate.inbound.rules.config import load_rules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.inbound.rules.model import Rules

log = logging.getLogger("tidegate.inbound")


class RulesSource:
    """Where rules come from: a file, looked at again and again, or what a program gave, once."""

    def __init__(self, config: str | Path | Mapping[str, object] | None) -> None:
        """Read for the first time: what is wrong now is refused now."""
        self._config = config
        self._path = Path(config) if isinstance(config, (str, Path)) else None
        self._seen = self._look()
        self.rules = load_rules(config)
        self.refused: str | None = None  # why the file as it stands now is not in force

    @property
    def watched(self) -> bool:
        """Whether there is a file that may change."""
        return self._path is not None

    def _look(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def changed(self) -> Rules | None:
        """Give the new rules if the file has changed and can be used."""
        seen = self._look()
        if seen == self._seen:
            return None
        return self.read(seen)

    def read(self, seen: tuple[int, int, int] | None = None) -> Rules | None:
        """Read the file now; refuse a bad one aloud, once."""
        self._seen = seen or self._look()
        try:
            rules = load_rules(self._config)
        except ConfigError as error:
            self.refuse(error)
            return None
        self.refused = None
        if rules == self.rules:
            return None
        self.rules = rules
        log.warning("new rules are read: %s", self._path)
        return rules

    def refuse(self, error: ConfigError) -> None:
        """Say that the file as it stands now cannot be used."""
        self.refused = str(error)
        log.error("refused, the former rules stay in force: %s", error)
