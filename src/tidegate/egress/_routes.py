"""Which provider and which URL a request is for.

    /to/api.openai.com/v1/models      reverse: the host of a provider
    /openai/v1/models                 reverse: the name of a provider
    http://api.example.com/v1/quotes  forward: as a proxy (HTTP_PROXY)
    api.openai.com:443                a tunnel (CONNECT)

Only hosts of configured providers can be reached, on the usual ports and those of `upstreams`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

from yarl import URL

from tidegate._runtime.suggestions import closest
from tidegate.egress._callers import key_places
from tidegate.egress._messages import EgressError, bracketed
from tidegate.egress._settings import HTTP_PORTS, Upstream
from tidegate.outbound._providers.hosts import normal_host

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.egress._callers import KeyPlaces
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._providers.registry import Providers

HOST_PREFIX: Final = "to"
MAX_KNOWN: Final = 1024  # targets that are remembered
MAX_KNOWN_LENGTH: Final = 200  # characters of a path whose target is remembered
MAX_SHOWN: Final = 80  # characters of a path or a host in an error
DOT_SEGMENT = re.compile(r"(?:^|[/\\])\.{1,2}(?:[/\\;]|$)")
AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@\\]+)(?::([0-9]{1,5}))?")


class Target(NamedTuple):
    """Where a request goes: its provider, the URL that is sent, and the URL by which the gate finds the quota."""

    provider: Provider
    url: URL
    quota_url: str


class Routes:
    """Finds the target of a request."""

    def __init__(self, providers: Providers, upstreams: Mapping[str, Upstream]) -> None:
        """Reach these providers, at their domains or their `upstreams`."""
        self._providers = providers
        self._known: dict[str, Target] = {}  # of recently used paths
        self._changes = -1
        self._key_places = providers.changes, key_places(providers)
        self.use(upstreams)

    @property
    def key_places(self) -> KeyPlaces:
        """Where clients of the providers send a key."""
        changes = self._providers.changes
        if self._key_places[0] != changes:
            self._key_places = changes, key_places(self._providers)
        return self._key_places[1]

    def use(self, upstreams: Mapping[str, Upstream]) -> None:
        """Send the requests of these providers to other URLs from now on."""
        self._upstreams = upstreams
        self._origins = {(each.scheme, each.host, each.port) for each in upstreams.values()}
        self._known.clear()

    def set_upstream(self, name: str, upstream: Upstream) -> None:
        """Send the requests of one provider to another URL from now on."""
        self.use({**self._upstreams, name: upstream})

    def find_reverse(self, raw_path: str) -> Target:
        """Return the target of `/to/HOST/…` or `/NAME/…`."""
        known = self._known.get(raw_path)
        if known is not None and self._changes == self._providers.changes:
            return known
        target = self._find_reverse(raw_path)
        if len(raw_path) <= MAX_KNOWN_LENGTH:
            if len(self._known) >= MAX_KNOWN or self._changes != self._providers.changes:
                self._known.clear()
                self._changes = self._providers.changes
            self._known[raw_path] = target
        return target

    def _find_reverse(self, raw_path: str) -> Target:
        path, mark, query = raw_path.partition("?")
        _, name, rest = path.split("/", 2) if path.count("/") > 1 else (*path.split("/", 1), "")
        if name == HOST_PREFIX:
            authority, _, rest = rest.partition("/")
            host, port = read_authority(authority, 443)
            scheme = "http" if ("http", host, port) in self._origins else "https"
            return self._to_host(Upstream(scheme, host, port), f"/{rest}{mark}{query}")
        provider = self._find_named(unquote(name))
        upstream = self.upstream_of(provider)
        return self.to_upstream(provider, upstream, f"/{rest}{mark}{query}")

    def find_forward(self, target: str) -> Target:
        """Return the target of an absolute URL, as a client sends it to a proxy."""
        scheme, _, rest = target.partition("://")
        authority, slash, path = rest.partition("/")
        scheme = scheme.lower()
        if scheme not in HTTP_PORTS or "?" in authority or "#" in authority:
            raise EgressError(400, "bad-target", "expected an http URL with a path")
        host, port = read_authority(authority.rpartition("@")[2], HTTP_PORTS[scheme])
        return self._to_host(Upstream(scheme, host, port), f"{slash or '/'}{path}")

    def find_tunnel(self, authority: str) -> tuple[Provider, str, int]:
        """Return the provider, the host and the port of a CONNECT."""
        host, port = read_authority(authority, 443)
        provider = self._match(host)
        self._check_port(Upstream("https", host, port))
        return provider, host, port

    def _find_named(self, name: str) -> Provider:
        provider = next((each for each in self._providers if each.name == name), None)
        if provider is None:
            shown = name[:MAX_SHOWN]
            near = closest(shown, [each.name for each in self._providers])
            hint = f"did you mean /{near}?" if near else "send to /NAME/path or /to/HOST/path"
            raise EgressError(404, "unknown-provider", f"there is no provider {shown!r}: {hint}")
        return provider

    def upstream_of(self, provider: Provider) -> Upstream:
        """Return where the requests of a provider are sent."""
        return self._upstreams.get(provider.name) or Upstream("https", provider.domain, 443)

    def to_upstream(self, provider: Provider, upstream: Upstream, path: str) -> Target:
        """Return the target of a path of a provider."""
        check_path(path)
        whole = upstream.path + path
        url = URL(upstream.origin + whole, encoded=True)
        own = upstream.host == provider.domain or upstream.host.endswith(f".{provider.domain}")
        return Target(provider, url, str(url) if own else f"https://{bracketed(provider.domain)}{whole}")

    def _to_host(self, upstream: Upstream, path: str) -> Target:
        provider = self._match(upstream.host)
        self._check_port(upstream)
        return self.to_upstream(provider, upstream, path)

    def _match(self, host: str) -> Provider:
        provider = self._providers.match_host(host)
        if provider is None:
            raise EgressError(403, "host-not-allowed", f"no provider is configured for {host[:MAX_SHOWN]}")
        return provider

    def _check_port(self, upstream: Upstream) -> None:
        if upstream.port == HTTP_PORTS[upstream.scheme]:
            return
        if not any((scheme, upstream.host, upstream.port) in self._origins for scheme in HTTP_PORTS):
            message = f"port {upstream.port} of {upstream.host[:MAX_SHOWN]} is not allowed: name it in upstreams"
            raise EgressError(403, "port-not-allowed", message)


def read_authority(text: str, default_port: int) -> tuple[str, int]:
    """Return the normalised host and the port of `HOST` or `HOST:PORT`."""
    match = AUTHORITY.fullmatch(unquote(text))
    host = None if match is None else normal_host(match[1].strip("[]"))
    if match is None or host is None:
        raise EgressError(400, "bad-target", f"expected a host such as api.example.com, not {text[:MAX_SHOWN]!r}")
    return host, int(match[2] or default_port)


def check_path(path: str) -> None:
    """Refuse a path with dot segments: the provider could read it as another path than the one that was counted."""
    if "." in path or "%" in path:
        bare = unquote(unquote(path.partition("?")[0]))
        if DOT_SEGMENT.search(bare):
            raise EgressError(400, "bad-target", "the path must not contain the segments . and ..")
