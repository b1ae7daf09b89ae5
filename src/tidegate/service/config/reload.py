"""The file is read again when it changes, or when told to: the new rules come into force all at once, or not at all."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tidegate.clock import TaskSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.service.config.settings import load_settings
from tidegate.service.decisions.policies import ServicePolicies

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.clock import Clock
    from tidegate.service.config.settings import Settings
    from tidegate.service.http import App

log = logging.getLogger("tidegate.service")

NO_POLICIES: Final = ServicePolicies()


class Reloader:
    """Looks after the file of a running service."""

    def __init__(
        self, settings: Settings, app: App, clock: Clock, environment: Mapping[str, str] | None = None
    ) -> None:
        """Reload into this app."""
        self.settings = settings
        self._app = app
        self._clock = clock
        self._environment = os.environ if environment is None else environment
        self._signal: TaskSignal | None = None
        self._seen = self._look()

    def _look(self) -> tuple[int, int, int] | None:
        try:
            stat = self.settings.file.stat() if self.settings.file is not None else None
        except OSError:
            return None
        return None if stat is None else (stat.st_mtime_ns, stat.st_size, stat.st_ino)

    def ask(self) -> None:
        """Read the file now, whether it has changed or not (SIGHUP)."""
        self._seen = (0, 0, 0)
        if self._signal is not None:
            self._signal.set()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        if self.settings.file is None:
            return
        self._signal = TaskSignal()
        while True:
            self._signal.clear()
            self.check()
            await self._clock.wait_async(
                self._signal, self._clock.steady() + round(self.settings.reload_every * SECOND)
            )

    def check(self) -> bool:
        """Read the file if it has changed; tell whether new rules came into force."""
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            settings = load_settings(
                self.settings.file,
                flags=self.settings.flags,
                policies=self.settings.policies,
                environment=self._environment,
            )
            if self._look() != seen:
                self._seen = None  # somebody is writing it: look again
                return False
            if settings.rules == NO_POLICIES != self.settings.rules:
                raise ConfigError(f"{self.settings.file}: has neither policies nor domains")  # noqa: TRY301 - as any other mistake in it
        except ConfigError as error:
            self._app.reloads["refused"] += 1
            self._app.refused = str(error)
            log.error("refused, the former rules stay in force: %s", error)  # noqa: TRY400 - it says where, not a traceback
            return False
        self._app.refused = None
        waiting = settings.restart_needed(self.settings)
        if waiting:
            log.warning("changed, but only read at the start of the service: %s", ", ".join(waiting))
        if settings.rules == self.settings.rules:
            return False
        self._app.desk.adopt(settings.rules)
        self._app.reloads["adopted"] += 1
        self.settings = replace(self.settings, rules=settings.rules)
        log.info("new rules are in force: %s", self.settings.file)
        return True
