"""A Pool: several keys, accounts, regions or deployments behind one provider; a call is sent by one of its members."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import inf, log
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from tidegate._policy.key import normal_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate._policy import Key, Policy
    from tidegate.core import Limit
    from tidegate.outbound._providers.provider import Provider

Pick = Literal["order", "weight", "price"]
CeilingScope = Literal["team", "tag"]
MAX_MEMBERS: Final = 200
MAX_WEIGHT: Final = 1000
HASH_BITS: Final = 53


class Member(NamedTuple):
    """A member of a pool: a Provider with its own limits and key.

    Members with a smaller `order` are always preferred. A member that is `drained` gets no more calls.
    """

    name: str
    provider: Provider
    weight: int = 1
    order: int = 0
    drained: bool = False


@dataclass(frozen=True, slots=True)
class Pool:
    """The members of a provider, and which of them is preferred.

    `pick` decides between members of the same order: by their position (`order`), at random in proportion to their
    weights (`weight`), or the one for which a call is cheapest (`price`). Calls with the same value of the header
    `sticky` prefer the same member instead.
    """

    members: tuple[Member, ...]
    pick: Pick = "order"
    sticky: str = ""

    def arrange(
        self, members: Sequence[Member], conversation: str | None, chance: Callable[[], float], prices: Sequence[int]
    ) -> list[int]:
        """Return the indices of members, the preferred one first.

        `conversation` is the value of the header; `chance` returns a random number below 1; `prices` are what the call
        may cost at each member.
        """

        def rank(index: int) -> float:
            member = members[index]
            if conversation is not None:
                return -_score(member, _fraction(member.name, conversation))
            if self.pick == "weight":
                return -_score(member, chance())
            return prices[index] if self.pick == "price" else 0

        return sorted(range(len(members)), key=lambda index: (members[index].order, rank(index)))


def _score(member: Member, fraction: float) -> float:
    """Return a score from a uniform random number: the highest wins in proportion to the weights."""
    return -inf if fraction <= 0.0 else log(fraction) / member.weight


def _fraction(name: str, conversation: str) -> float:
    """Return a number from 0 to 1 that depends on a member and a conversation only (rendezvous hashing).

    If a member is added or removed, only the conversations that prefer this member move.
    """
    digest = blake2b(f"{len(name)}:{name}:{conversation}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    number = int.from_bytes(digest, "big") >> (64 - HASH_BITS)
    return float(number + 1) / 2.0**HASH_BITS


class Ceiling(NamedTuple):
    """A money limit that several accounts share, or that each team or tag has; a policy with this limit."""

    policy: Policy
    per: tuple[CeilingScope, ...] = ()

    @property
    def limit(self) -> Limit:
        """Its only limit."""
        return self.policy.limits[0]

    def key(self, team: str, tag: str) -> Key:
        """Return the key of a call's team and tag."""
        names = {"team": team, "tag": tag}
        return normal_key(tuple(f"{scope}={names[scope]}" for scope in self.per) or "all")
