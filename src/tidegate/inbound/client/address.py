"""Who the client is: the peer's address, or what trusted proxies say of it.

Anybody can send X-Forwarded-For. It is looked at only when the peer is a trusted proxy, and read from right to left:
each proxy adds on the right what it saw, so the rightmost address was seen by our peer, the next by the proxy before
it, and so on while these are trusted too. The first address that is not a trusted proxy's is the client's; left of it
stands what the client wrote. A hop that cannot be read (malformed, empty, `unknown`, obfuscated) ends the walk: the
answer is the last address that somebody trusted saw. So a client can put itself under its proxy's address, never under
another's.

X-Forwarded-For and Forwarded (RFC 7239) are both understood. Most proxies write one of them and pass the other on as
the client sent it. Where both are present and disagree, neither can be believed, and the answer is the peer. Name the
header that your proxies write (`TrustedProxies(…, header="x-forwarded-for")`) and only that is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Text = str | bytes
    Headers = Iterable[tuple[Text, Text]] | Mapping[Text, Text]

Network = IPv4Network | IPv6Network
Header = Literal["both", "x-forwarded-for", "forwarded"]

UNKNOWN: Final = "unknown"  # the key of clients without an address
UNIX_PEERS: Final = ("unix", "unix:")  # in a list of trusted proxies: peers that came over a Unix socket
MAX_HOPS: Final = 32  # proxies that are walked past; a longer way is not believed
MAX_NODE_LENGTH: Final = 256  # characters of a hop that are worth reading
HOST_NAME = re.compile(r"[A-Za-z0-9_.-]{1,253}")

# RFC 7239: name=token or name="quoted string". Unquoted ports and IPv6 addresses are wrong, common and unambiguous.
PAIR = re.compile(r"""([!#$%&'*+.^_`|~0-9A-Za-z-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s",;=\\]+))""", re.DOTALL)
SEPARATOR = re.compile(r"[ \t]*(?:;[ \t]*)+|\Z")
QUOTED_OR_COMMA = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|,', re.DOTALL)


class ClientAddress(NamedTuple):
    """An address in its normal form, and as the number that networks are compared with."""

    text: str
    version: int
    number: int


class AddressSet:
    """A set of addresses, given as addresses and networks (`10.0.0.0/8`); validated once, asked often.

    `*` (or a network of all addresses) is everybody. That is refused unless it is written twice.
    """

    __slots__ = ("_everybody", "_networks", "_unix", "given")
    danger = ""  # why everybody is too many

    def __init__(self, addresses: Iterable[str] | str = (), *, field: str = "addresses") -> None:
        """Read addresses, networks, `unix` for peers on Unix sockets; `field` names them in errors."""
        if isinstance(addresses, str):
            addresses = addresses.split(",")
        self.given = tuple(str(entry).strip() for entry in addresses)
        self._unix = any(entry in UNIX_PEERS for entry in self.given)
        networks = [network_of(entry, field) for entry in self.given if entry not in UNIX_PEERS]
        everybody = sum(network is None or not network.prefixlen for network in networks)
        if everybody == 1:
            message = (
                f"'*' means everybody{self.danger}: name addresses and networks such as '10.0.0.0/8', "
                "or write '*' twice if everybody is what you mean"
            )
            raise ConfigError(message, field=field)
        self._everybody = everybody > 0
        # By version: (address & mask, mask) of each network.
        self._networks: dict[int, list[tuple[int, int]]] = {4: [], 6: []}
        for network in networks:
            if network is not None:
                self._networks[network.version].append((int(network.network_address), int(network.netmask)))

    def __contains__(self, address: object) -> bool:
        """Tell whether an address is in the set; None, or anything that is no address, is a peer on a Unix socket."""
        if self._everybody:
            return True
        found = parse_address(address) if isinstance(address, str) else address
        if not isinstance(found, ClientAddress):
            return self._unix
        for network, mask in self._networks[found.version]:  # noqa: SIM110 - a third of the time of any()
            if found.number & mask == network:
                return True
        return False

    def __bool__(self) -> bool:
        """Tell whether anybody is in the set."""
        return bool(self.given)

    def __eq__(self, other: object) -> bool:
        """Compare what was given."""
        return isinstance(other, AddressSet) and repr(other) == repr(self)

    def __hash__(self) -> int:
        """Go with equality."""
        return hash(repr(self))

    def __repr__(self) -> str:
        """Show what was given."""
        return f"{type(self).__name__}({list(self.given)})"


class TrustedProxies(AddressSet):
    """The proxies whose word is taken for who the client is, and the header they speak by.

    `unix` trusts peers on Unix sockets. `*` trusts every peer, and with it every client: refused unless written twice.
    """

    __slots__ = ("header",)
    danger = ", so that any client could pretend to be any other by sending a header"

    def __init__(self, addresses: Iterable[str] | str = (), *, header: Header = "both") -> None:
        """Trust these addresses and networks; `header` is `x-forwarded-for`, `forwarded` or `both`."""
        super().__init__(addresses, field="trusted_proxies")
        if header not in get_args(Header):
            raise ConfigError(f"must be one of {', '.join(get_args(Header))}, not {header!r}", field="header")
        self.header = header

    def __repr__(self) -> str:
        """Show what was given."""
        return f"{type(self).__name__}({list(self.given)}, header={self.header!r})"


def client_address(peer: str | None, headers: Headers = (), trusted: TrustedProxies | Iterable[str] = ()) -> str | None:
    """Tell the client's address in its normal form, or None if there is none.

    `peer` is the address of the other end of the connection (None or empty on a Unix socket), `headers` the request's,
    `trusted` the proxies whose word is taken: addresses and networks. Made into TrustedProxies once, they are not
    validated at each request. Never raises for anything a client sends.

    IPv6 zones are dropped, IPv4 addresses mapped into IPv6 are IPv4 addresses. A peer that is a name (test clients have
    such) stays one.
    """
    if not isinstance(trusted, TrustedProxies):
        trusted = TrustedProxies(trusted)
    address = parse_address(peer) if peer else None
    direct = address.text if address else _name(peer)
    if not trusted or (address or peer) not in trusted:
        return direct
    lines = _lines(headers)
    told = {
        _walk(direct, hops_of(lines[name]), trusted)
        for name, hops_of in HEADERS.items()
        if any(lines[name]) and trusted.header in ("both", name)
    }
    return told.pop() if len(told) == 1 else direct


def address_key(address: str | None, ipv6_prefix: int = 64) -> str:
    """Give the key under which an address is limited.

    An IPv6 client has a whole network at its disposal, so that is what is limited: its first `ipv6_prefix` bits. IPv4
    addresses stand for themselves, mapped into IPv6 or not. No address is the key `unknown`.
    """
    if not isinstance(ipv6_prefix, int) or isinstance(ipv6_prefix, bool) or not 1 <= ipv6_prefix <= 128:  # noqa: PLR2004 - bits
        raise ConfigError(f"must be a number of bits from 1 to 128, not {ipv6_prefix!r}", field="ipv6_prefix")
    if not address:
        return UNKNOWN
    return _key(address, ipv6_prefix) if len(address) <= MAX_NODE_LENGTH else UNKNOWN


@lru_cache(maxsize=4096)
def _key(address: str, ipv6_prefix: int) -> str:
    found = parse_address(address)
    if found is None:
        return _name(address) or UNKNOWN
    if found.version == 4 or ipv6_prefix == 128:  # noqa: PLR2004 - an address as a whole
        return found.text
    return str(IPv6Network((found.number, ipv6_prefix), strict=False))


def address_group(key: str, ipv6_prefix: int = 64) -> str | None:
    """Tell the network that one party may own as a whole, which the key of an address belongs to; None: no address.

    For IPv4 its /24, for IPv6 its /48; where keys are networks larger than a /64, one that holds 65,536 of them.
    """
    found = parse_address(key.partition("/")[0])
    if found is None:
        return None
    if found.version == 4:  # noqa: PLR2004 - of IP
        return f"{found.text.rpartition('.')[0]}.0/24"
    bits = max(1, min(48, ipv6_prefix - 16))
    return str(IPv6Network((found.number >> (128 - bits) << (128 - bits), bits)))


def parse_address(text: str) -> ClientAddress | None:
    """Read an address, without its zone; an IPv4 address mapped into IPv6 is that IPv4 address."""
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


def network_of(entry: str, field: str) -> Network | None:
    """Read an address or network of a configuration; None is everybody."""
    if entry == "*":
        return None
    try:
        network = ip_network(entry)
    except ValueError as error:
        hint = "use addresses and networks such as '10.0.0.0/8' or '::1'"
        if "host bits" in str(error):
            hint = f"the network is {ip_network(entry, strict=False)}"
        raise ConfigError(f"{entry!r} is no address or network: {hint}", field=field) from None
    mapped = network.network_address.ipv4_mapped if isinstance(network, IPv6Network) else None
    if mapped is not None and network.prefixlen >= 96:  # noqa: PLR2004 - the IPv4 addresses are ::ffff:0:0/96
        return IPv4Network((int(mapped), network.prefixlen - 96))
    return network


# ---- the walk --------------------------------------------------------------------------------------------------------


def _walk(seen: str | None, hops: Iterator[str | None], trusted: TrustedProxies) -> str | None:
    """Go from proxy to proxy, rightmost first, as long as they are trusted and readable."""
    for hop in islice(hops, MAX_HOPS):
        address = parse_node(hop) if hop is not None else None
        if address is None:
            break
        seen = address.text
        if address not in trusted:
            break
    return seen


def parse_node(node: str) -> ClientAddress | None:
    """Read a hop: an address, perhaps quoted, in brackets, with a port. Not an address: None."""
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
    """Tell whether text is a colon and a port, by number or (RFC 7239) obfuscated."""
    return re.fullmatch(r":(?:[0-9]{1,5}|_[A-Za-z0-9._-]+)", text) is not None


def _forwarded_for(values: Sequence[str]) -> Iterator[str | None]:
    """Give the hops of X-Forwarded-For from right to left.

    An empty one is a hop that says nothing, not one to be skipped: left of it stands what the client wrote.
    """
    for value in reversed(values):
        end = len(value)
        while end >= 0:
            start = value.rfind(",", 0, end)
            yield value[start + 1 : end]
            end = start if start >= 0 else -1


def _forwarded(values: Sequence[str]) -> Iterator[str | None]:
    """Give the `for` of each element of Forwarded, from right to left; None where it is malformed or missing.

    Each field line is split on its own, so that a quote which a client leaves open swallows nothing of a later line.
    """
    for value in reversed(values):
        commas = [match.start() for match in QUOTED_OR_COMMA.finditer(value) if match[0] == ","]
        for start, end in reversed(list(zip([-1, *commas], [*commas, len(value)], strict=True))):
            yield _for(value[start + 1 : end])


def _for(element: str) -> str | None:
    """Read the `for` parameter of one element, strictly: one malformed or repeated parameter spoils it."""
    found: dict[str, str] = {}
    place = 0
    element = element.strip(" \t")
    while place < len(element):
        match = PAIR.match(element, place)
        if match is None or match[1].lower() in found:
            return None
        found[match[1].lower()] = match[3] if match[2] is None else re.sub(r"\\(.)", r"\1", match[2])
        separator = SEPARATOR.match(element, match.end())
        if separator is None:
            return None
        place = separator.end()
    return found.get("for")


HEADERS: Final = {"x-forwarded-for": _forwarded_for, "forwarded": _forwarded}
HEADER_LENGTHS: Final = {len(name) for name in HEADERS}


def _lines(headers: Headers) -> dict[str, list[str]]:
    """Give the values of every field line of the headers that speak of addresses, in order."""
    lines: dict[str, list[str]] = {name: [] for name in HEADERS}
    for name, value in headers.items() if isinstance(headers, Mapping) else headers:
        if len(name) in HEADER_LENGTHS and (wanted := lines.get(_text(name).lower())) is not None:
            wanted.append(_text(value))
    return lines


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else bytes(value).decode("latin-1")


def _name(peer: str | None) -> str | None:
    """Keep a peer that is the name of a host; paths of sockets and the like are no address."""
    return peer if peer and HOST_NAME.fullmatch(peer) else None
