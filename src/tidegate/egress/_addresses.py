"""Which addresses may be connected to: public ones, and others only for hosts that the settings allow by name.

The check is made twice: after a name was resolved, and when a socket for the address is created. A name that is first
public and then private (DNS rebinding) is refused by both, because only checked addresses are connected to.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Final

from aiohttp.abc import AbstractResolver, ResolveResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    AddressInfo = tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]
    Lookup = Callable[[str, int], Awaitable[list[str]]]

NAT64: Final = IPv6Network("64:ff9b::/96")  # the last four bytes are an IPv4 address
# Addresses that `ipaddress` takes for public, at least in some versions of Python, but that no provider has.
SPECIAL_NETWORKS: Final = (
    IPv4Network("192.0.0.0/24"),  # protocol assignments; the metadata of Oracle Cloud is 192.0.0.192
    IPv4Network("168.63.129.16/32"),  # the metadata and the resolver of Azure
    IPv4Network("192.88.99.0/24"),  # relays of 6to4, no longer in use
    IPv4Network("100.64.0.0/10"),  # networks of internet providers; the metadata of Alibaba Cloud is 100.100.100.200
    IPv6Network("64:ff9b:1::/48"),  # NAT64 of the local network, with an IPv4 address inside
    IPv6Network("100::/64"),  # discarded
    IPv6Network("100:0:0:1::/64"),  # a dummy prefix
    IPv6Network("2001::/23"),  # protocol assignments: Teredo, benchmarks, identifiers of hosts
    IPv6Network("3fff::/20"),  # documentation
    IPv6Network("5f00::/16"),  # segment routing
)
MAX_PERMITTED: Final = 4096  # private addresses of allowed hosts that are remembered


class ForbiddenAddressError(OSError):
    """A host whose address may not be connected to."""


def is_public(address: str) -> bool:
    """Return whether an address is a public one; an IPv4 address inside an IPv6 address counts as that address."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, IPv6Address):
        inner = _embedded(found)
        if inner is not None:
            return _is_public(inner)
    return _is_public(found)


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    special = address.is_multicast or address.is_reserved or address.is_unspecified
    if not address.is_global or special or (isinstance(address, IPv6Address) and address.is_site_local):
        return False
    return not any(address in network for network in SPECIAL_NETWORKS)


def _embedded(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that an IPv6 address leads to: mapped, 6to4 or NAT64."""
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


async def look_up(host: str, port: int) -> list[str]:
    """Resolve a name with the resolver of the system."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


class AddressCheck(AbstractResolver):
    """Resolves names to addresses that may be connected to, and creates sockets for those only."""

    def __init__(self, allowed: Iterable[str], lookup: Lookup = look_up) -> None:
        """Allow these hosts to have addresses that are not public."""
        self._lookup = lookup
        self.use(allowed)

    def use(self, allowed: Iterable[str]) -> None:
        """Allow these hosts only from now on."""
        self._allowed = frozenset(allowed)
        # Private addresses of allowed hosts, in the order of their last use.
        self._permitted: OrderedDict[str, None] = OrderedDict((host, None) for host in sorted(self._allowed))

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host; raises ForbiddenAddressError if none may be connected to."""
        name = host.lower().removesuffix(".")
        found = [host] if _is_address(host) else await self._lookup(host, port)
        if name in self._allowed:
            for address in found:
                self._permit(address)
            return found
        public = [address for address in found if is_public(address)]
        if not public:
            raise ForbiddenAddressError(f"{host} has no public address")
        return public

    def _permit(self, address: str) -> None:
        self._permitted[address] = None
        self._permitted.move_to_end(address)
        while len(self._permitted) > MAX_PERMITTED + len(self._allowed):
            self._permitted.popitem(last=False)

    def check(self, address: str) -> None:
        """Raise ForbiddenAddressError unless an address may be connected to."""
        if not is_public(address) and address not in self._permitted:
            raise ForbiddenAddressError(f"{address} is not a public address")

    def make_socket(self, info: AddressInfo) -> socket.socket:
        """Create the socket for an address; aiohttp calls this right before it connects."""
        self.check(str(info[4][0]))
        made = socket.socket(info[0], info[1], info[2])
        made.setblocking(False)  # noqa: FBT003 - as socket has it
        return made

    # ---- as aiohttp's resolver ---------------------------------------------------------------------------------------

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Resolve a name for aiohttp."""
        results: list[ResolveResult] = []
        for address in await self.addresses(host, port):
            kind = socket.AF_INET6 if ":" in address else socket.AF_INET
            if family in (socket.AF_UNSPEC, kind):
                results.append(
                    ResolveResult(
                        hostname=host,
                        host=address,
                        port=port,
                        family=kind,
                        proto=socket.IPPROTO_TCP,
                        flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                    )
                )
        return results

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


def _is_address(host: str) -> bool:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
