"""Names the extras that a command needs and that are not installed, before anything starts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from tidegate.service._config.settings import Settings

HTTP_MODULES: Final = ("httptools", "msgspec")


def check_installed(what: str, extra: str, *modules: str) -> None:
    """Raise ConfigError if a module is not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}: pip install 'tidegate[{extra}]'")


def check_service(settings: Settings) -> None:
    """Check everything that a service with these settings needs."""
    check_installed("tidegate start", "sources" if settings.runs_sources else "service", *HTTP_MODULES)
    if settings.runs_sources:
        check_installed("fetching sources", "sources", "cronsim", "httpx")
    if settings.grpc is not None:
        check_installed("the setting 'grpc'", "envoy", "grpc")
    if settings.egress is not None:
        check_installed("the setting 'egress'", "egress", "aiohttp")
    if settings.telemetry:
        check_installed("the setting 'telemetry'", "otel", "opentelemetry")
