"""Reloads the configuration file when it changes; keeps the previous rules if the new file is invalid."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidegate._runtime.file_watcher import FileWatcher
from tidegate.errors import ConfigError
from tidegate.inbound._rules.config import load_rules
from tidegate.inbound._rules.extra_limits import ExtraLimits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.inbound._rules.model import Rules

log: logging.Logger = logging.getLogger("tidegate.inbound")

NO_CATEGORIES: Final = {"defaults": False, "unmatched": None}
NO_EXTRA_LIMITS: Final = ExtraLimits(None, None)


class RulesSource:
    """The source of the rules: a file, checked for changes, or a fixed mapping."""

    def __init__(self, config: str | Path | Mapping[str, object] | None, extra: ExtraLimits = NO_EXTRA_LIMITS) -> None:
        """Read the rules; raises ConfigError if they are invalid. `extra` limits are added to them."""
        self._config = NO_CATEGORIES if config is None and extra else config
        self._extra = extra
        self._path = Path(config) if isinstance(config, (str, Path)) else None
        self._watcher = FileWatcher(() if self._path is None else (self._path,))
        self.rules: Rules = extra.add_to(load_rules(self._config))
        self.error: str | None = None  # the error of the current file, if it is invalid

    @property
    def is_file(self) -> bool:
        """Whether the rules come from a file, which may change."""
        return self._path is not None

    def changed(self) -> Rules | None:
        """Return the new rules if the file has changed and is valid."""
        return self._read() if self._watcher.changed() else None

    def read(self) -> Rules | None:
        """Read the file now; return the rules if they are valid and new."""
        self._watcher.changed()
        return self._read()

    def _read(self) -> Rules | None:
        try:
            # An editor that saves a file may empty it first: the defaults could allow more than its limits.
            rules = self._extra.add_to(load_rules(self._config, may_be_empty=False))
        except ConfigError as error:
            self.reject(error)
            return None
        self.error = None
        if rules == self.rules:
            return None
        self.rules = rules
        log.warning("rules reloaded from %s", self._path)
        return rules

    def reject(self, error: ConfigError) -> None:
        """Log and keep the error of the current file."""
        self.error = str(error)
        log.error("rules not reloaded, the previous rules stay active: %s", error)
