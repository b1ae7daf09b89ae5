"""Read the fields `pool` and `spend` of a provider file.

    pool:
      pick: weight                       # order (the default), weight or price
      sticky: x-conversation-id
      members:
        - {name: a, api_key: ${KEY_A}, limits: [500/1m], weight: 3}
        - {name: eu, url: "https://eu.example.com/v1", api_key: ${KEY_EU}}
    spend:
      - 100/day unit=usd
      - 250/month unit=usd name=all      # shared by the files that have a ceiling of this name
      - {limit: 25, period: day, unit: usd, per: team}

Every field of a member replaces that of the file; limits are replaced together, and so is the key.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast, get_args
from urllib.parse import urlsplit

from tidegate._policy import Policy
from tidegate._policy.units import is_money
from tidegate.core._limit import WORD
from tidegate.errors import ConfigError
from tidegate.outbound._providers.hosts import host_of
from tidegate.outbound._providers.pool import MAX_MEMBERS, MAX_WEIGHT, Ceiling, CeilingScope, Member, Pick, Pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._policy.config_value import ConfigValue
    from tidegate._policy.model import OnStoreError
    from tidegate.core._limit import Limit
    from tidegate.outbound._providers.prices import Prices
    from tidegate.outbound._providers.provider import Provider

    Fields = dict[str, ConfigValue]

POOL_FIELDS: Final = ("pick", "sticky", "members")
MEMBER_FIELDS: Final = ("name", "weight", "order", "drain", "url")
# Of these, a member that has one replaces all that the file has.
KEY_FIELDS: Final = ("api_key", "api_key_file")
LIMIT_SETTINGS: Final = (
    "limit",
    "period",
    "unit",
    "algorithm",
    "burst",
    "timezone",
    "reset_day",
    "reset_hour",
    "limits",
    "concurrency",
    "models",
)
OTHER_FIELDS: Final = ("key", "price", "profile")


def read_pool(setting: ConfigValue, fields: Fields, read: Callable[[Fields, str, str], Provider]) -> Pool:
    """Read the members; `read` makes a Provider from fields, the name of the member and its URL."""
    parts = setting.fields(*POOL_FIELDS)
    if "members" not in parts:
        raise setting.error("needs members, such as members: [{name: a, api_key: …}, {name: b, api_key: …}]")
    pick = cast("Pick", parts["pick"].choice(*get_args(Pick)) if "pick" in parts else "order")
    entries = parts["members"].items()
    if not 1 <= len(entries) <= MAX_MEMBERS:
        raise parts["members"].error(f"expected from 1 to {MAX_MEMBERS} members, not {len(entries)}")
    members: list[Member] = []
    for entry in entries:
        member = _member(entry, fields, read)
        if member.name in [known.name for known in members]:
            raise entry.error(f"two members are named {member.name!r}: rename one of them")
        members.append(member._replace(provider=_share(member.provider, [known.provider for known in members])))
    if pick == "price":
        currencies = {None if each.provider.prices is None else each.provider.prices.currency for each in members}
        if None in currencies:
            raise parts["pick"].error("needs prices: add price: prices.yaml")
        if len(currencies) > 1:
            names = " and ".join(sorted(map(str, currencies)))
            raise parts["pick"].error(f"cannot compare prices in {names}: use one currency for all members")
    return Pool(tuple(members), pick, parts["sticky"].string().lower() if "sticky" in parts else "")


def _share(provider: Provider, others: list[Provider]) -> Provider:
    """Use the same objects for equal prices and profiles: then a request is read once for all members."""
    shared = {}
    for name in ("prices", "profile"):
        own = getattr(provider, name)
        shared[name] = next((getattr(each, name) for each in others if getattr(each, name) == own), own)
    return replace(provider, **shared)


def _member(entry: ConfigValue, fields: Fields, read: Callable[[Fields, str, str], Provider]) -> Member:
    own = entry.fields(*MEMBER_FIELDS, *KEY_FIELDS, *LIMIT_SETTINGS, *OTHER_FIELDS)
    if "name" not in own:
        raise entry.error("needs a name, under which its usage is counted, such as {name: eu, api_key: …}")
    inherited = {name: value for name, value in fields.items() if name not in ("pool", "name")}
    for group in (KEY_FIELDS, LIMIT_SETTINGS):
        if any(name in own for name in group):
            inherited = {name: value for name, value in inherited.items() if name not in group}
    merged = {**inherited, **{name: value for name, value in own.items() if name not in MEMBER_FIELDS}}
    name = own["name"].string()
    return Member(
        name,
        read(merged, name, _url(own["url"]) if "url" in own else ""),
        own["weight"].integer(1, MAX_WEIGHT) if "weight" in own else 1,
        own["order"].integer(0) if "order" in own else 0,
        own["drain"].boolean() if "drain" in own else False,
    )


def _url(setting: ConfigValue) -> str:
    """Read where a member is: the scheme, the host and the start of the path."""
    text = setting.string()
    try:
        host_of(text)
    except ConfigError:
        raise setting.error(f"expected a URL such as https://eu.example.com, not {setting}") from None
    parts = urlsplit(text)
    if parts.query or parts.fragment or parts.username or parts.scheme not in ("http", "https"):
        raise setting.error("expected only a scheme, a host and a path, such as https://eu.example.com/v1")
    return text.rstrip("/")


def read_ceilings(
    fields: Fields, domain: str, prices: Prices | None, on_store_error: OnStoreError, read_limit: Callable[..., Limit]
) -> tuple[Ceiling, ...]:
    """Read `spend: [100/day unit=usd, {limit: 25, period: day, unit: usd, per: team}]`."""
    if "spend" not in fields:
        return ()
    if prices is None:
        raise fields["spend"].error("needs prices: add price: prices.yaml")
    found: list[Ceiling] = []
    for entry in fields["spend"].one_or_many():
        limit = read_limit(entry, None, prices, "per")
        if not is_money(limit.unit) or limit.unit != prices.unit:
            raise entry.error(f"expected a limit in {prices.currency}, such as 25/day unit={prices.currency}")
        per = _scopes(entry)
        named = _is_named(entry)
        place = limit.name if named else f"{domain}:{'+'.join((limit.name, *per))}"
        policy = Policy(f"spend:{place}", (limit,), on_store_error=on_store_error)
        if policy.name in [known.policy.name for known in found]:
            unnamed = "two ceilings have the same period and scope: give one of them a name"
            raise entry.error(f"two ceilings are named {limit.name!r}: rename one of them" if named else unnamed)
        found.append(Ceiling(policy, per))
    return tuple(found)


def _is_named(entry: ConfigValue) -> bool:
    """Return whether a ceiling has a name of its own, which other files can use, too."""
    if entry.is_mapping:
        return "name" in entry.entries()
    return any(word.group().startswith("name=") for word in WORD.finditer(entry.string()))


def _scopes(entry: ConfigValue) -> tuple[CeilingScope, ...]:
    """Read `per: team`, or `per: [team, tag]`."""
    if not entry.is_mapping or "per" not in entry.entries():
        return ()
    found = {each.choice(*get_args(CeilingScope)) for each in entry.entries()["per"].one_or_many()}
    return cast("tuple[CeilingScope, ...]", tuple(sorted(found)))
