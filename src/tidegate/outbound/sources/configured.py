"""The sources that a service runs: those configured, and those added to an earlier service."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tidegate.outbound.sources.source import read_source, read_sources

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tidegate.outbound.sources.source import Source


log: logging.Logger = logging.getLogger(__name__)


def find_sources(files: Sequence[Path], directories: Sequence[Path], data: Path) -> list[Source]:
    """Read the configured sources, followed by those that were added to an earlier service.

    An added source replaces a configured one of the same name, as it did when it was added.
    """
    found = {source.name: source for source in read_sources(files, directories)}
    kept = data / "sources"
    for path in sorted(kept.glob("*.yaml")) if kept.is_dir() else ():
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
