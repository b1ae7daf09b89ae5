"""All configured providers: loaded from files, found by URL, reloaded when a file changes."""

from __future__ import annotations

import logging
import stat
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeVar, get_args

from tidegate._runtime.suggestions import MAX_COMPARED_LENGTH, did_you_mean
from tidegate.errors import ConfigError, ResourceUnknown
from tidegate.outbound._providers.file import read_provider
from tidegate.outbound._providers.hosts import host_of, normal_host, suffixes
from tidegate.outbound._providers.profile_file import find_profile_files
from tidegate.outbound._providers.watched_files import WatchedFiles

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping

    from tidegate.outbound._providers.pool import Ceiling
    from tidegate.outbound._providers.provider import Provider

T = TypeVar("T")

log: logging.Logger = logging.getLogger("tidegate.outbound")

Permissions = Literal["warn", "refuse", "ignore"]
GROUP_AND_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
MAX_MATCHED: Final = 1024  # URLs, domains and names whose provider is remembered
MAX_LISTED: Final = 20  # names in the message for an unknown one
MAX_URL_LENGTH: Final = 2000  # characters of one that is remembered

# How providers that are often used take their key: what to set if it is not sent.
KNOWN_KEYS: Final = {
    "financialmodelingprep.com": "query apikey",
    "alphavantage.co": "query apikey",
    "api.openai.com": "bearer",
    "api.anthropic.com": "header x-api-key",
}


class Providers:
    """The providers, by domain. Thread-safe: a lookup never sees a partial reload.

    `reload` checks whether files were changed, added or removed, and loads the valid ones. An invalid file leaves the
    previous version in effect; it is logged and listed in `problems`. `changes` counts reloads that changed something.
    """

    def __init__(self, providers: Iterable[Provider] = ()) -> None:
        """Use these providers; `load` reads them from files."""
        self._use({provider.domain: provider for provider in providers})
        self._files: WatchedFiles[Provider] = WatchedFiles("provider", self._read)
        self._profiles: tuple[Path, ...] = ()
        self._permissions: Permissions = "ignore"
        self._unsent: set[str] = set()  # domains whose key is never sent, and warned about
        self._local: set[str] = set()  # domains that are decided without the store, and warned about
        self.problems: tuple[str, ...] = ()
        self.changes: int = 0

    @classmethod
    def load(
        cls,
        files: Iterable[str | os.PathLike[str]] = (),
        directories: Iterable[str | os.PathLike[str]] = (),
        *,
        permissions: Permissions = "warn",
        profiles: Iterable[str | os.PathLike[str]] = (),
    ) -> Providers:
        """Read one file per provider, and all files of a directory that end in .yaml or .yml.

        Two files with the same domain or name are refused, and so are ceilings of the same name that differ.
        `permissions` is the treatment of a file that contains a key and is readable by others than its owner: `warn`,
        `refuse` or `ignore`. `profiles` are files and directories of profiles that you add: a provider file names them
        by their file name without its suffix, and a profile replaces a shipped one of the same name.
        """
        if permissions not in get_args(Permissions):
            raise ConfigError(f"must be warn, refuse or ignore, not {permissions!r}", field="permissions")
        for field, paths in (("files", files), ("directories", directories), ("profiles", profiles)):
            if isinstance(paths, (str, Path)):
                raise ConfigError(f"must be a list of paths such as [{str(paths)!r}], not one path", field=field)
        self = cls()
        self._files = WatchedFiles(
            "provider", self._read, files, directories, other_files=lambda each: each.other_files
        )
        self._permissions = permissions
        self._profiles = tuple(Path(path) for path in profiles)
        self._use(_by_domain(self._files.load().values()))
        for folder in self._files.directories:
            if not any(Path(provider.file or "").parent == folder for provider in self):
                log.warning("%s contains no provider file: their names end in .yaml or .yml", folder)
        return self

    @classmethod
    def of(cls, *settings: Mapping[str, object]) -> Providers:
        """Build providers from mappings with the fields of a file."""
        self = cls()
        self._use(_by_domain(map(read_provider, settings)))
        return self

    def _use(self, providers: dict[str, Provider]) -> None:
        """Use these providers from now on, by domain."""
        self._by_domain = providers
        self._named = {each.name: each for each in providers.values()}
        self._unknown: dict[str, str] = {}  # messages for unknown names
        self._matched: dict[object, Provider | None] = {}  # by URL, domain or name; replaced last

    # ---- lookup ------------------------------------------------------------------------------------------------------

    def match(self, url: object) -> Provider | None:
        """Return the provider of a URL: the one with the longest domain that is its host or a parent of it.

        Returns None if no provider matches: then there are no limits. Raises ConfigError for a URL without a host.
        """
        matched = self._matched  # before `_by_domain` is read: `_use` replaces them in the other order
        try:
            return matched[url]
        except (KeyError, TypeError):
            return _remember(matched, url, self.match_host(host_of(url)))

    def match_host(self, host: str) -> Provider | None:
        """Return the provider of a normalised host (see `host_of`)."""
        known = self._by_domain
        for domain in suffixes(host):
            if domain in known:
                return known[domain]
        return None

    def find(self, target: object) -> Provider | None:
        """Return the provider of a URL or a domain, or with a name.

        Returns None for a URL or a domain that no provider limits. Raises ResourceUnknown for an unknown name.
        """
        matched = self._matched  # first, as in `match`
        try:
            return matched[target]
        except (KeyError, TypeError):
            pass
        text = str(target)
        if "://" in text:
            return self.match(target)
        named = self._named
        host = normal_host(text)
        found = named.get(text) or (None if host is None else self.match_host(host))
        if found is None and (host is None or "." not in host):
            raise ResourceUnknown(self._describe_unknown(text))
        return _remember(matched, target, found)

    def _describe_unknown(self, name: str) -> str:
        """Describe an unknown name, with the known one that is closest; it is compared with all of them only once."""
        unknown, shown = self._unknown, name[:MAX_COMPARED_LENGTH]
        found = unknown.get(shown)
        if found is None:
            listed = f"{', '.join(islice(self._named, MAX_LISTED)) or 'none'}{', …' * (len(self._named) > MAX_LISTED)}"
            advice = did_you_mean(name, self._named) or f"known providers are {listed}"
            found = f"there is no provider {shown!r}: {advice}"
            if len(unknown) >= MAX_MATCHED:
                unknown.clear()
            unknown[shown] = found
        return found

    def explain(self, url: object) -> str:
        """Describe whether requests to a URL are limited, and by which provider."""
        provider = self.match(url)
        if provider is None:
            return f"no provider is configured for {host_of(url)}: it runs without rate limiting"
        return f"limited by provider {provider}"

    def __iter__(self) -> Iterator[Provider]:
        """Iterate over the providers in the order they were read."""
        return iter(list(self._by_domain.values()))

    def __len__(self) -> int:
        """Return the number of providers."""
        return len(self._by_domain)

    def __repr__(self) -> str:
        """Show the names."""
        return f"<Providers {', '.join(provider.name for provider in self) or 'none'}>"

    # ---- reading files -----------------------------------------------------------------------------------------------

    @property
    def reloads(self) -> bool:
        """Whether providers were loaded from files, which may change."""
        return bool(self._files)

    def reload(self) -> tuple[str, ...]:
        """Load changed files; return the domains of the providers that were changed, added or removed."""
        if not self.reloads:
            return ()
        before = self._by_domain
        by_file = {Path(provider.file): provider for provider in before.values() if provider.file}
        problems: list[str] = []
        read = self._files.reload(problems)
        found = self._without_conflicts(read, by_file, problems)
        self.problems = tuple(problems)
        changed = {domain for domain in {*found, *before} if found.get(domain) != before.get(domain)}
        self._use(found)
        self.changes += bool(changed)
        for domain in sorted(changed):
            if domain in found:
                log.info("provider %s was loaded", domain)
            else:
                log.warning("provider %s was removed: its limits do not apply any more", domain)
        return tuple(sorted(changed))

    def _without_conflicts(
        self, read: dict[Path, Provider], previous: Mapping[Path, Provider], problems: list[str]
    ) -> dict[str, Provider]:
        """Return the providers by domain; of files that conflict, the previous versions stay in effect.

        A file that has not changed is kept, so an edit of one file never removes the provider of another.
        """
        chosen = dict(read)
        while (conflict := _first_conflict(chosen)) is not None:
            first, second, message = conflict
            old = previous.get(second)
            refused = first if old is not None and old == chosen[second] else second
            old = previous.get(refused)
            if old is None or old == chosen[refused]:
                del chosen[refused]
            else:
                chosen[refused] = old
            problems.append(message)
            if message not in self.problems:  # logged once
                kept = "the previous version stays in effect" if refused in chosen else "the file is ignored"
                log.warning("%s: %s: %s", refused, kept, message)
        return {provider.domain: provider for provider in chosen.values()}

    def _read(self, path: Path) -> Provider:
        provider = read_provider(path, find_profile_files(self._profiles))
        if provider.on_store_error == "local" and provider.domain not in self._local:
            self._local.add(provider.domain)
            log.warning(
                "provider %s has 'on_store_error: local': while the store is unavailable, up to one more quota per "
                "period is sent; 'deny' (the default) never exceeds it",
                provider.title,
            )
        for each in (provider,) if provider.pool is None else [member.provider for member in provider.pool.members]:
            self._check_key(path, each)
        return replace(provider, file=str(path))

    def _check_key(self, path: Path, provider: Provider) -> None:
        """Warn about a key that is never sent, and about one that others can read."""
        if provider.api_key is None:
            return
        if provider.key_location is None and provider.domain not in self._unsent:
            self._unsent.add(provider.domain)
            advice = KNOWN_KEYS.get(provider.domain)
            log.warning(
                "provider %s has an api_key that is never sent: add %s, or remove the api_key",
                provider.title,
                f"'key: {advice}'" if advice else "'key: bearer', 'key: header X-Api-Key' or 'key: query apikey'",
            )
        if provider.key_from is None and self._permissions != "ignore":
            mode = path.stat().st_mode
            if mode & GROUP_AND_OTHERS:
                message = f"contains a key and can be read by others (mode {mode & 0o777:03o}): chmod 600 {path}"
                if self._permissions == "refuse":
                    raise ConfigError(message, file=str(path))
                log.warning("%s %s", path, message)


def _remember(matched: dict[object, Provider | None], target: object, provider: Provider | None) -> Provider | None:
    """Remember the provider of a URL, domain or name."""
    if isinstance(target, str) and len(target) <= MAX_URL_LENGTH:
        if len(matched) >= MAX_MATCHED:
            matched.clear()
        matched[target] = provider
    return provider


def _by_domain(providers: Iterable[Provider]) -> dict[str, Provider]:
    found = dict(enumerate(providers))
    conflict = _first_conflict(found)
    if conflict is not None:
        raise ConfigError(conflict[2])
    return {provider.domain: provider for provider in found.values()}


def _first_conflict(found: Mapping[T, Provider]) -> tuple[T, T, str] | None:
    """Return the first two providers that cannot be used together, and an error message."""
    seen: dict[object, T] = {}  # the domains, names and ceilings, and the first provider that has each
    for place, provider in found.items():
        ceilings = {("ceiling", each.policy.name): each for each in provider.ceilings}
        for mark in (("domain", provider.domain), ("name", provider.name), *ceilings):
            first = seen.setdefault(mark, place)
            if first == place:
                continue
            other = found[first]
            files = f"{provider.file or 'this provider'} and {other.file or 'an earlier one'}"
            if mark not in ceilings:
                return first, place, f"{files}: two providers have the {mark[0]} {mark[1]!r}; remove one of them"
            own, others = ceilings[mark], next(each for each in other.ceilings if each.policy.name == mark[1])
            if (own.limit, own.per) != (others.limit, others.per):
                return first, place, f"{files}: {_ceiling_conflict(own, others)}"
    return None


def _ceiling_conflict(one: Ceiling, other: Ceiling) -> str:
    limits = [f"{each.limit}{''.join(f' per {scope}' for scope in each.per)}" for each in (one, other)]
    message = f"the ceiling {one.limit.name!r} has the limits '{limits[0]}' and '{limits[1]}'"
    return f"{message}: set the same limit in both, or another name in one of them"
