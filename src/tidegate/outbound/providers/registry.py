"""All providers that are known: loaded from files, found by URL, taken over anew when a file changes."""

from __future__ import annotations

import logging
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

from tidegate.errors import ConfigError
from tidegate.outbound.providers.file import read_provider
from tidegate.outbound.providers.hosts import host_of, suffixes

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping

    from tidegate.outbound.providers.provider import Provider

log = logging.getLogger(__name__)

Permissions = Literal["warn", "refuse", "ignore"]
YAML_SUFFIXES: Final = (".yaml", ".yml")
GROUP_AND_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO

Print = tuple[int, int, int, int]  # what tells that a file is another one: device, inode, size, time of change


class LoadedProvider(NamedTuple):
    """A provider and the state of the file it was read from."""

    provider: Provider
    seen: Print | None


class Providers:
    """The providers, by domain. Safe to share between threads: what is found is never half old, half new.

    `reload` looks whether a file has changed, come or gone, and takes over what is right; what is wrong leaves the old
    in force and is logged and listed in `problems`. `changes` counts what was taken over.
    """

    def __init__(self, providers: Iterable[Provider] = ()) -> None:
        """Know these providers; `load` reads them from files."""
        self._known = {provider.domain: LoadedProvider(provider, None) for provider in providers}
        self._files: tuple[Path, ...] = ()
        self._folders: tuple[Path, ...] = ()
        self._permissions: Permissions = "ignore"
        self._refused: dict[Path, Print | None] = {}
        self.problems: tuple[str, ...] = ()
        self.changes = 0

    @classmethod
    def load(
        cls,
        files: Iterable[str | os.PathLike[str]] = (),
        directories: Iterable[str | os.PathLike[str]] = (),
        *,
        permissions: Permissions = "warn",
    ) -> Providers:
        """Read one file per provider, and all of a directory that end in .yaml or .yml.

        Two files for one domain, or of one name, are refused. `permissions` says what happens to a file with a key that
        others than its owner may read: it is warned about, refused, or that is ignored.
        """
        if permissions not in get_args(Permissions):
            raise ConfigError(f"must be warn, refuse or ignore, not {permissions!r}", field="permissions")
        self = cls()
        self._files = tuple(Path(file) for file in files)
        self._folders = tuple(Path(folder) for folder in directories)
        self._permissions = permissions
        self._known = _by_domain(LoadedProvider(self._read(path), _print(path)) for path in self._paths())
        return self

    @classmethod
    def of(cls, *settings: Mapping[str, object]) -> Providers:
        """Take providers from a program instead of files, each a mapping with the fields of a file."""
        self = cls()
        self._known = _by_domain(LoadedProvider(read_provider(setting), None) for setting in settings)
        return self

    # ---- finding -----------------------------------------------------------------------------------------------------

    def match(self, url: object) -> Provider | None:
        """Find the provider of a URL: the one with the longest domain that its host is, or lies under.

        None: no provider, so no limits. A URL without a host is a ConfigError.
        """
        return self.match_host(host_of(url))

    def match_host(self, host: str) -> Provider | None:
        """Find the provider of a host that is written the normal way (see `host_of`)."""
        known = self._known
        for domain in suffixes(host):
            if domain in known:
                return known[domain].provider
        return None

    def explain(self, url: object) -> str:
        """Say whether requests to a URL will be limited, and by what."""
        provider = self.match(url)
        if provider is None:
            return f"no provider is configured for {host_of(url)}: it runs without rate limiting"
        return f"limited by provider {provider}"

    def __iter__(self) -> Iterator[Provider]:
        """Go through the providers in the order they were read."""
        return iter([known.provider for known in self._known.values()])

    def __len__(self) -> int:
        """Count them."""
        return len(self._known)

    def __repr__(self) -> str:
        """Name them."""
        return f"<Providers {', '.join(provider.name for provider in self) or 'none'}>"

    # ---- reading -----------------------------------------------------------------------------------------------------

    def reload(self) -> tuple[str, ...]:
        """Take over changed files, and give the names of the providers that changed, came or went."""
        if not self._files and not self._folders:
            return ()
        before = self._known
        by_file = {Path(known.provider.file): known for known in before.values() if known.provider.file}
        found: dict[str, LoadedProvider] = {}
        problems: list[str] = []
        for path in self._paths(problems):
            known = self._again(path, by_file.get(path), problems)
            if known is None:
                continue
            clash = _clash(found.values(), known.provider)
            if clash is None:
                found[known.provider.domain] = known
                continue
            problems.append(clash)
            log.warning("%s: the file is not taken over", clash)
            old = by_file.get(path)
            if old is not None and _clash(found.values(), old.provider) is None:
                found[old.provider.domain] = old
        self.problems = tuple(problems)
        changed = {*found, *before}
        changed = {name for name in changed if found.get(name, (None,))[0] != before.get(name, (None,))[0]}
        self._known = found
        self.changes += bool(changed)
        for domain in sorted(changed):
            log.info("provider %s %s", domain, "taken over" if domain in found else "is gone")
        return tuple(sorted(changed))

    def _again(self, path: Path, known: LoadedProvider | None, problems: list[str]) -> LoadedProvider | None:
        """Read a file again if it has changed; keep what is known if it cannot be read."""
        now = _print(path)
        if known is not None and known.seen == now and path not in self._refused:
            return known
        try:
            again = LoadedProvider(self._read(path), now)
        except ConfigError as error:
            if self._refused.get(path, ()) != now:  # said once for each state of the file
                kept = "the old one stays in force" if known else "it is left out"
                log.warning("a provider's file cannot be used, %s: %s", kept, error)
            self._refused[path] = now
            problems.append(str(error))
            return known
        self._refused.pop(path, None)
        return again

    def _paths(self, problems: list[str] | None = None) -> list[Path]:
        """List the files: those named, and those of the directories, by name."""
        paths = list(self._files)
        for folder in self._folders:
            try:
                entries = sorted(folder.iterdir())
            except OSError as error:
                wrong = ConfigError(f"cannot be listed: {error.strerror or error}", file=str(folder))
                if problems is None:
                    raise wrong from None
                problems.append(str(wrong))  # gone for a moment: what was read from it stays
                entries = [Path(known.provider.file) for known in self._known.values() if known.provider.file]
                entries = [path for path in entries if path.parent == folder]
            paths += [path for path in entries if path.suffix in YAML_SUFFIXES and not path.name.startswith(".")]
        return paths

    def _read(self, path: Path) -> Provider:
        provider = read_provider(path)
        if provider.api_key is not None and self._permissions != "ignore":
            mode = path.stat().st_mode
            if mode & GROUP_AND_OTHERS:
                message = f"holds a key and can be read by others (mode {mode & 0o777:03o}): chmod 600 {path}"
                if self._permissions == "refuse":
                    raise ConfigError(message, file=str(path))
                log.warning("%s %s", path, message)
        return replace(provider, file=str(path))


def _by_domain(providers: Iterable[LoadedProvider]) -> dict[str, LoadedProvider]:
    found: dict[str, LoadedProvider] = {}
    for known in providers:
        clash = _clash(found.values(), known.provider)
        if clash is not None:
            raise ConfigError(clash)
        found[known.provider.domain] = known
    return found


def _clash(found: Iterable[LoadedProvider], new: Provider) -> str | None:
    """Tell whether a provider is there already, by its domain or by its name."""
    for known in found:
        old = known.provider
        for what in ("domain", "name"):
            if getattr(old, what) == getattr(new, what):
                files = f"{new.file or 'this one'} and {old.file or 'an earlier one'}"
                return f"{files}: two providers with the {what} {getattr(new, what)!r}; keep one of them"
    return None


def _print(path: Path) -> Print | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
