"""Running a service until a signal ends it: what `tidegate start` does."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tidegate.outbound.providers import Providers
from tidegate.outbound.sources.control import Control
from tidegate.outbound.sources.service import Service
from tidegate.outbound.sources.source import read_source, read_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tidegate.outbound.providers import Permissions
    from tidegate.outbound.sources.source import Source


def find_sources(files: Sequence[Path], directories: Sequence[Path], data: Path) -> list[Source]:
    """Read the sources that are configured and, behind these, those that were added to an earlier service."""
    found = read_sources(files, directories)
    names = {source.name for source in found}
    kept = data / "sources"
    added = [read_source(path) for path in sorted(kept.glob("*.yaml"))] if kept.is_dir() else []
    return [*found, *(source for source in added if source.name not in names)]


async def run(
    *,
    providers: Sequence[Path],
    provider_directories: Sequence[Path],
    sources: Sequence[Path],
    source_directories: Sequence[Path],
    data: Path,
    permissions: Permissions = "warn",
    stop_within: float = 10.0,
    ready: Callable[[Service], object] = lambda _service: None,
    **options: Any,  # noqa: ANN401 - those of Service
) -> None:
    """Run until SIGTERM or SIGINT; `ready` is called when everything is loaded."""
    known = Providers.load(providers, provider_directories, permissions=permissions)
    found = find_sources(sources, source_directories, data)
    async with Service(known, found, data=data, **options) as service, Control(service):
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError):  # on Windows
                loop.add_signal_handler(number, service.stop)
        ready(service)
        await service.run(stop_within)
