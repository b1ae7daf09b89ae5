"""The sources that a service runs: those configured, and those added to an earlier service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.outbound.sources.source import read_source, read_sources

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tidegate.outbound.sources.source import Source


def find_sources(files: Sequence[Path], directories: Sequence[Path], data: Path) -> list[Source]:
    """Read the configured sources, followed by those that were added to an earlier service."""
    found = read_sources(files, directories)
    names = {source.name for source in found}
    kept = data / "sources"
    added = [read_source(path) for path in sorted(kept.glob("*.yaml"))] if kept.is_dir() else []
    return [*found, *(source for source in added if source.name not in names)]
