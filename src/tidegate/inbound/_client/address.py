"""Finds the address of the client: the peer's address, or the address that trusted proxies forward.

Any client can send X-Forwarded-For. The header is read only if the peer is a trusted proxy, and from right to left:
each proxy appends the address of its own peer. So our peer wrote the rightmost address, the proxy before it the next
one, and so on while these proxies are trusted too. The first address that is not a trusted proxy is the client;
everything to the left of it was written by the client. A hop that cannot be parsed (malformed, empty, `unknown`,
obfuscated) ends the search, and the result is the last address that a trusted proxy wrote. So a client can appear
under its proxy's address, never under the address of another client.

X-Forwarded-For and Forwarded (RFC 7239) are both supported. Most proxies write one of them and forward the other as the
client sent it. If both are present and disagree, neither is trusted, and the result is the peer. To read only the
header that your proxies write, name it: `TrustedProxies(…, header="x-forwarded-for")`. Another header that they set can
be named, too, such as `header="x-real-ip"`; it is read as X-Forwarded-For is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.errors import ConfigError
from tidegate.inbound._client.request import EnvironHeaders

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Text = str | bytes
Headers = Iterable[tuple[Text, Text]] | Mapping[str, str] | Mapping[bytes, bytes]
Network = IPv4Network | IPv6Network
Header = str  # "both" (X-Forwarded-For and Forwarded), or the name of one header

UNKNOWN: Final = "unknown"  # the key of clients without an address
UNIX_PEERS: Final = ("unix", "unix:")  # entries that mean peers on a Unix socket
MAX_HOPS: Final = 32  # hops that are read; further hops are ignored
MAX_NODE_LENGTH: Final = 256  # longer hops are not parsed
MAX_PREFIXES: Final = {"ipv4_prefix": 32, "ipv6_prefix": 128}  # bits of an address that identify a client
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HOST_NAME = re.compile(r"[A-Za-z0-9_.-]{1,253}")

# RFC 7239: name=token or name="quoted string". Unquoted ports and IPv6 addresses are invalid but common, so accepted.
PAIR = re.compile(r"""([!#$%&'*+.^_`|~0-9A-Za-z-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s",;=\\]+))""", re.DOTALL)
SEPARATOR = re.compile(r"[ \t]*(?:;[ \t]*)+|\Z")
QUOTED_OR_COMMA = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|,', re.DOTALL)


class ClientAddress(NamedTuple):
    """An address: its normalized string, IP version, and integer value for comparison with networks."""

    text: str
    version: int
    number: int


class AddressSet:
    """An immutable set of addresses and networks (`10.0.0.0/8`), validated when it is created.

    `*` (or a network with prefix length 0) matches every address. It is rejected unless it is listed twice.
    """

    __slots__ = ("_matches_all", "_networks", "_unix", "given")
    wildcard_risk = ""  # appended to the error for a single '*'

    def __init__(self, addresses: Iterable[str] | str = (), *, field: str = "addresses") -> None:
        """Parse addresses, networks, and `unix` for peers on Unix sockets; errors name `field`."""
        if isinstance(addresses, str):
            addresses = addresses.split(",")
        self.given: tuple[str, ...] = tuple(str(entry).strip() for entry in addresses)
        self._unix = any(entry in UNIX_PEERS for entry in self.given)
        networks = [parse_network(entry, field) for entry in self.given if entry not in UNIX_PEERS]
        wildcards = sum(network is None or not network.prefixlen for network in networks)
        if wildcards == 1:
            message = (
                f"'*' matches every address{self.wildcard_risk}: list addresses and networks such as '10.0.0.0/8', "
                "or write ['*', '*'] to confirm"
            )
            raise ConfigError(message, field=field)
        self._matches_all = wildcards > 0
        # By IP version: (network address, mask) of each network.
        self._networks: dict[int, list[tuple[int, int]]] = {4: [], 6: []}
        for network in networks:
            if network is not None:
                self._networks[network.version].append((int(network.network_address), int(network.netmask)))

    def __contains__(self, address: object) -> bool:
        """Return whether an address is in the set; None and non-addresses count as peers on a Unix socket."""
        if self._matches_all:
            return True
        found = parse_address(address) if isinstance(address, str) else address
        if not isinstance(found, ClientAddress):
            return self._unix
        for network, mask in self._networks[found.version]:  # noqa: SIM110 - three times as fast as any()
            if found.number & mask == network:
                return True
        return False

    def __bool__(self) -> bool:
        """Return whether the set has entries."""
        return bool(self.given)

    def __eq__(self, other: object) -> bool:
        """Compare the entries as given."""
        return isinstance(other, AddressSet) and repr(other) == repr(self)

    def __hash__(self) -> int:
        """Hash consistently with `__eq__`."""
        return hash(repr(self))

    def __repr__(self) -> str:
        """Show the entries as given."""
        return f"{type(self).__name__}({list(self.given)})"


class TrustedProxies(AddressSet):
    """The proxies that may report the client's address, and the header that they report it in.

    `unix` trusts peers on Unix sockets. `*` trusts every peer, including clients; it is rejected unless listed twice.
    """

    __slots__ = ("header", "headers")
    wildcard_risk = ", so any client could impersonate any other by sending a header"

    def __init__(self, addresses: Iterable[str] | str = (), *, header: Header = "both") -> None:
        """Trust these addresses and networks.

        `header` is `x-forwarded-for`, `forwarded`, `both` of these, or another header that they set: `x-real-ip`.
        """
        super().__init__(addresses, field="trusted_proxies")
        if not isinstance(header, str) or not HEADER_NAME.fullmatch(header):
            expected = "both, x-forwarded-for, forwarded, or the name of another header such as 'x-real-ip'"
            raise ConfigError(f"must be {expected}, not {header!r}", field="header")
        self.header: str = header.lower()
        self.headers: tuple[str, ...] = tuple(HEADER_PARSERS) if self.header == "both" else (self.header,)

    def __repr__(self) -> str:
        """Show the entries as given."""
        return f"{type(self).__name__}({list(self.given)}, header={self.header!r})"


def client_address(peer: str | None, headers: Headers = (), trusted: TrustedProxies | Iterable[str] = ()) -> str | None:
    """Return the client's normalized address, or None if it has none.

    `peer` is the address of the other end of the connection (None or empty on a Unix socket), `headers` are the
    request's headers, `trusted` the addresses and networks of trusted proxies. Pass a TrustedProxies to validate them
    only once. Input sent by a client never raises.

    IPv6 zones are removed, and IPv4-mapped IPv6 addresses become IPv4 addresses. A peer that is a host name, as test
    clients use, is returned unchanged.
    """
    if not isinstance(trusted, TrustedProxies):
        trusted = TrustedProxies(trusted)
    address = parse_address(peer) if peer else None
    direct = address.text if address else _host_name(peer)
    if not trusted or (address or peer) not in trusted:
        return direct
    addresses = {
        _follow_hops(direct, HEADER_PARSERS.get(name, _x_forwarded_for_hops)(values), trusted)
        for name, values in forwarding_values(headers, trusted.headers).items()
        if any(values)
    }
    return addresses.pop() if len(addresses) == 1 else direct


def address_key(address: str | None, ipv6_prefix: int = 64, ipv4_prefix: int = 32) -> str:
    """Return the rate limit key of an address.

    An IPv6 client usually has a whole network, so the key is its network of `ipv6_prefix` bits. The key of an IPv4
    address, IPv4-mapped or not, is the address itself, or its network if `ipv4_prefix` is below 32. Without an address
    the key is `unknown`.
    """
    check_prefix("ipv6_prefix", ipv6_prefix)
    check_prefix("ipv4_prefix", ipv4_prefix)
    if not address:
        return UNKNOWN
    return _key(address, ipv6_prefix, ipv4_prefix) if len(address) <= MAX_NODE_LENGTH else UNKNOWN


def check_prefix(name: str, bits: object) -> None:
    """Raise ConfigError if a value is not a prefix length of `ipv4_prefix` or `ipv6_prefix`."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= MAX_PREFIXES[name]:
        raise ConfigError(f"must be an integer from 1 to {MAX_PREFIXES[name]}, not {bits!r}", field=name)


@lru_cache(maxsize=4096)
def _key(address: str, ipv6_prefix: int, ipv4_prefix: int) -> str:
    found = parse_address(address)
    if found is None:
        return _host_name(address) or UNKNOWN
    if found.version == 4:  # noqa: PLR2004 - IP version
        return found.text if ipv4_prefix == 32 else str(IPv4Network((found.number, ipv4_prefix), strict=False))  # noqa: PLR2004 - bits
    return found.text if ipv6_prefix == 128 else str(IPv6Network((found.number, ipv6_prefix), strict=False))  # noqa: PLR2004 - bits


@lru_cache(maxsize=4096)
def address_group(key: str, ipv6_prefix: int = 64, ipv4_prefix: int = 32) -> str | None:
    """Return the network, likely of one owner, that an address key belongs to; None if the key is not an address.

    An IPv4 /24 or an IPv6 /48; if keys are larger networks than a /32 or a /64, a network that contains 256 or 65,536
    keys.
    """
    found = parse_address(key.partition("/")[0])
    if found is None:
        return None
    if found.version == 4:  # noqa: PLR2004 - of IP
        return str(IPv4Network((found.number, max(1, min(24, ipv4_prefix - 8))), strict=False))
    return str(IPv6Network((found.number, max(1, min(48, ipv6_prefix - 16))), strict=False))


def parse_address(text: str) -> ClientAddress | None:
    """Parse an address without its zone; an IPv4-mapped IPv6 address becomes IPv4. None if it is not an address."""
    return _parse(text) if len(text) <= MAX_NODE_LENGTH else None


@lru_cache(maxsize=4096)
def _parse(text: str) -> ClientAddress | None:
    try:
        address = ip_address(text.partition("%")[0] if ":" in text else text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    return ClientAddress(str(address), address.version, int(address))


def parse_network(entry: str, field: str) -> Network | None:
    """Parse an address or network of a configuration; None means every address."""
    if entry == "*":
        return None
    try:
        network = ip_network(entry)
    except ValueError:
        try:
            hint = f"did you mean '{ip_network(entry, strict=False)}'?"  # it has host bits set
        except ValueError:
            hint = "use addresses and networks such as '10.0.0.0/8' or '::1'"
        raise ConfigError(f"{entry!r} is not an address or network: {hint}", field=field) from None
    mapped = network.network_address.ipv4_mapped if isinstance(network, IPv6Network) else None
    if mapped is not None and network.prefixlen >= 96:  # noqa: PLR2004 - the IPv4 addresses are ::ffff:0:0/96
        return IPv4Network((int(mapped), network.prefixlen - 96))
    return network


# ---- forwarding headers ----------------------------------------------------------------------------------------------


def _follow_hops(seen: str | None, hops: Iterator[str | None], trusted: TrustedProxies) -> str | None:
    """Follow the hops, rightmost first, while they are valid addresses of trusted proxies."""
    for hop in islice(hops, MAX_HOPS):
        address = parse_node(hop) if hop is not None else None
        if address is None:
            break
        seen = address.text
        if address not in trusted:
            break
    return seen


def parse_node(node: str) -> ClientAddress | None:
    """Parse a hop: an address, optionally quoted, in brackets, with a port. None if it is not an address."""
    node = node.strip(" \t")
    if len(node) > 1 and node[0] == node[-1] == '"':
        node = node[1:-1].strip(" \t")
    if node.startswith("["):
        node, bracket, port = node[1:].partition("]")
        if not bracket or ":" not in node or (port and not _is_port(port)):
            return None
    elif node.count(":") == 1:
        node, _, port = node.partition(":")
        if not _is_port(f":{port}"):
            return None
    return parse_address(node)


def _is_port(text: str) -> bool:
    """Return whether a string is a colon and a port: a number, or obfuscated (RFC 7239)."""
    return re.fullmatch(r":(?:[0-9]{1,5}|_[A-Za-z0-9._-]+)", text) is not None


def _x_forwarded_for_hops(values: Sequence[str]) -> Iterator[str | None]:
    """Yield the hops of X-Forwarded-For from right to left.

    Empty hops are not skipped: they end the search, because the client may have written what is left of them.
    """
    for value in reversed(values):
        end = len(value)
        while end >= 0:
            start = value.rfind(",", 0, end)
            yield value[start + 1 : end]
            end = start if start >= 0 else -1


def _forwarded_hops(values: Sequence[str]) -> Iterator[str | None]:
    """Yield the `for` of each element of Forwarded, from right to left; None if it is malformed or missing.

    Each field line is split separately, so an unclosed quote of a client cannot hide parts of a later line.
    """
    for value in reversed(values):
        commas = [match.start() for match in QUOTED_OR_COMMA.finditer(value) if match[0] == ","]
        for start, end in reversed(list(zip([-1, *commas], [*commas, len(value)], strict=True))):
            yield _parse_for(value[start + 1 : end])


def _parse_for(element: str) -> str | None:
    """Parse the `for` parameter of one element strictly: a malformed or repeated parameter makes it None."""
    found: dict[str, str] = {}
    position = 0
    element = element.strip(" \t")
    while position < len(element):
        match = PAIR.match(element, position)
        if match is None or match[1].lower() in found:
            return None
        found[match[1].lower()] = match[3] if match[2] is None else re.sub(r"\\(.)", r"\1", match[2])
        separator = SEPARATOR.match(element, match.end())
        if separator is None:
            return None
        position = separator.end()
    return found.get("for")


HEADER_PARSERS: Final = {"x-forwarded-for": _x_forwarded_for_hops, "forwarded": _forwarded_hops}
FORWARDING_FIELDS: Final[frozenset[object]] = frozenset((*HEADER_PARSERS, *(name.encode() for name in HEADER_PARSERS)))


def is_forwarded(headers: Iterable[tuple[object, object]]) -> bool:
    """Return whether a proxy, or a client, has named the address of a client in the headers of an ASGI scope."""
    for name, _ in headers:  # noqa: SIM110 - half the time of any()
        if name in FORWARDING_FIELDS:
            return True
    return False


def forwarding_values(headers: Headers, names: Iterable[str] = HEADER_PARSERS) -> dict[str, list[str]]:
    """Return the values of all field lines of headers, in order; the names are in lower case."""
    if isinstance(headers, EnvironHeaders):
        return {name: list(filter(None, [headers.find(name)])) for name in names}
    values: dict[str, list[str]] = {name: [] for name in names}
    lengths = set(map(len, values))
    for name, value in headers.items() if isinstance(headers, Mapping) else headers:
        if len(name) in lengths and (wanted := values.get(_text(name).lower())) is not None:
            wanted.append(_text(value))
    return values


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else bytes(value).decode("latin-1")


def _host_name(peer: str | None) -> str | None:
    """Return a peer that is a host name; None for socket paths and the like."""
    return peer if peer and HOST_NAME.fullmatch(peer) else None
