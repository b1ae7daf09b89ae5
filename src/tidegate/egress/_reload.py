"""Reads the egress file again when it changes, or at SIGHUP: either all new settings take effect, or none."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from tidegate._runtime.file_watcher import FileWatcher
from tidegate.egress._settings import check_names, check_open, load_egress
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tidegate._policy.setting_values import ListenAddress
    from tidegate._runtime.clock import Clock
    from tidegate.egress._settings import EgressSettings
    from tidegate.outbound._providers.registry import Providers

log: logging.Logger = logging.getLogger("tidegate.egress")

RELOAD_SECONDS: Final = 2.0  # between two checks of the file
# Settings that are used once, when the gateway starts.
RESTART_FIELDS: Final = (
    *("listen", "store", "bus", "providers", "provider_dirs", "permissions", "access_log", "telemetry"),
    *("connect_timeout", "max_header", "spending"),
)


@dataclass
class EgressRules:
    """The settings in effect, and the outcome of the reloads."""

    settings: EgressSettings
    reloads: dict[str, int] = field(default_factory=lambda: {"adopted": 0, "refused": 0})
    refused: str | None = None  # why the current file is refused
    refused_at: int | None = None  # since when, in milliseconds since 1970

    def describe(self) -> dict[str, object]:
        """Return the outcome of the reloads, for the dashboard."""
        return {**self.reloads, "error": self.refused, "since": self.refused_at}


class EgressFile:
    """The egress file of a running gateway, and the files of tokens that it names."""

    def __init__(
        self,
        rules: EgressRules,
        providers: Providers,
        clock: Clock,
        on_change: Callable[[EgressRules], object],
        listen: ListenAddress | None = None,
    ) -> None:
        """Watch the file of these settings; `listen` replaces the address in it.

        `on_change` is called with new settings, and when the file is refused or corrected.
        """
        self.rules = rules
        self._providers = providers
        self._clock = clock
        self._on_change = on_change
        self._listen = listen
        self._watcher = FileWatcher(files_of(rules.settings))

    @property
    def watched(self) -> bool:
        """Whether there is a file that can change."""
        return self.rules.settings.file is not None

    def request_reload(self) -> None:
        """Read the file now, whether it has changed or not (SIGHUP)."""
        self._watcher.request_reload()

    async def run(self, seconds: float = RELOAD_SECONDS) -> None:
        """Check the file every few seconds, until cancelled."""
        if self.watched:
            await self._watcher.run(self.check, seconds, self._clock)

    def check(self) -> bool:
        """Read the file if it has changed; return whether new settings took effect."""
        if not self._watcher.changed():
            return False
        current = self.rules.settings
        try:
            read = load_egress(current.file, self._listen)
            settings = replace(read, **{name: getattr(current, name) for name in RESTART_FIELDS})
            check_open(settings)
            self._providers.reload()
            check_names(settings, self._providers)
            adopted = settings != current
            if adopted or self.rules.refused is not None:
                counts = {**self.rules.reloads, "adopted": self.rules.reloads["adopted"] + adopted}
                rules = EgressRules(settings, counts)
                self._on_change(rules)
                self.rules = rules
                log.warning("settings reloaded from %s", current.file)
        except ConfigError as error:
            self._record_refusal(error)
            return False
        changed = [name for name in RESTART_FIELDS if getattr(read, name) != getattr(current, name)]
        if changed:
            log.warning("changed settings that need a restart of the gateway: %s", ", ".join(changed))
        self._watcher.watch(files_of(self.rules.settings))  # it may name other files of tokens now
        return adopted

    def _record_refusal(self, error: ConfigError) -> None:
        since = self.rules.refused_at or self._clock.ns() // 1_000_000
        counts = {**self.rules.reloads, "refused": self.rules.reloads["refused"] + 1}
        self.rules = EgressRules(self.rules.settings, counts, str(error), since)
        self._on_change(self.rules)
        log.error("reload refused, the previous settings of the gateway stay in effect: %s", error)


def files_of(settings: EgressSettings) -> list[str | Path]:
    """List the file of the settings, and the files of tokens that it names."""
    return [] if settings.file is None else [settings.file, *settings.token_files]
