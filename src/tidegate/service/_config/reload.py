"""Reloads the file when it changes, or at SIGHUP: either all new policies take effect, or none."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from tidegate._runtime.file_watcher import FileWatcher
from tidegate.errors import ConfigError
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions.policies import ServicePolicies

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate._runtime.clock import Clock
    from tidegate.service._config.settings import Settings

log: logging.Logger = logging.getLogger("tidegate.service")

NO_POLICIES: Final = ServicePolicies()


class ReloadTarget(Protocol):
    """What gets the policies of a reloaded file: the app of one process, or all workers."""

    @property
    def reloads(self) -> dict[str, int]:
        """The number of reloads, by outcome."""

    def update_policies(self, policies: ServicePolicies) -> None:
        """Decide by these policies from now on. Raises ConfigError if that is not possible."""

    def record_refusal(self, reason: str | None) -> None:
        """Record why the current file is refused; None if it is not."""


class Reloader:
    """Reloads the file of a running service."""

    def __init__(
        self, settings: Settings, target: ReloadTarget, clock: Clock, environment: Mapping[str, str] | None = None
    ) -> None:
        """Reload into this target."""
        self.settings: Settings = settings
        self._target = target
        self._clock = clock
        self._environment = os.environ if environment is None else environment
        self._watcher = FileWatcher(() if settings.file is None else (settings.file,))

    def request_reload(self) -> None:
        """Read the file now, whether it has changed or not (SIGHUP)."""
        self._watcher.request_reload()

    async def run(self) -> None:
        """Check the file every `reload_every` seconds, until cancelled."""
        if self.settings.file is not None:
            await self._watcher.run(self.check, self.settings.reload_every, self._clock)

    def check(self) -> bool:
        """Read the file if it has changed; return whether new policies took effect."""
        if not self._watcher.changed():
            return False
        try:
            settings = load_settings(
                self.settings.file,
                flags=self.settings.flags,
                policies=self.settings.policy_flags,
                environment=self._environment,
            )
            if not self._watcher.is_current():  # the file is being written: the next check reads it again
                return False
            if settings.policies == NO_POLICIES != self.settings.policies:
                raise ConfigError(f"{self.settings.file}: needs policies or domains")  # noqa: TRY301 - as any other mistake in it
            adopted = settings.policies != self.settings.policies
            if adopted:
                self._target.update_policies(settings.policies)
        except ConfigError as error:
            self._target.reloads["refused"] += 1
            self._target.record_refusal(str(error))
            log.error("reload refused, the previous policies stay in effect: %s", error)  # noqa: TRY400 - it says where, not a traceback
            return False
        self._target.reloads["adopted"] += adopted
        self._target.record_refusal(None)
        changed = settings.restart_needed(self.settings)
        if changed:
            log.warning("changed settings that need a restart of the service: %s", ", ".join(changed))
        if adopted:
            self.settings = replace(self.settings, policies=settings.policies)
            log.info("new policies are in effect: %s", self.settings.file)
        return adopted
