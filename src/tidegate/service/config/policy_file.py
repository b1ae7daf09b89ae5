"""Reads policies and descriptors from the service's YAML; every mistake is refused with file, line and field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast, get_args

from tidegate.core import Limit
from tidegate.core.algorithms import ALGORITHMS
from tidegate.errors import ConfigError
from tidegate.policy import Policy
from tidegate.policy.model import Mode, OnStoreError
from tidegate.service.decisions.descriptors import UNIT_PERIODS, DescriptorDomain, DescriptorNode, limit_of
from tidegate.service.decisions.policies import FULL_ROLLOUT, ConfiguredPolicy, KeyOverride, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.policy import Key
    from tidegate.policy.config_value import ConfigValue

    Fields = dict[str, ConfigValue]

POLICY_FIELDS: Final = ("limits", "mode", "rollout", "on_store_error", "overrides")
OVERRIDE_FIELDS: Final = ("key", "limits")
LIMIT_FIELDS: Final = ("quota", "period", "algorithm", "unit", "burst", "name", "timezone", "reset_day", "reset_hour")
DOMAIN_FIELDS: Final = ("domain", "descriptors")
DESCRIPTOR_FIELDS: Final = (
    *("key", "value", "rate_limit", "limits", "shadow_mode", "share_threshold", "on_store_error"),
    *("descriptors", "detailed_metric"),
)
RATE_LIMIT_FIELDS: Final = ("unit", "requests_per_unit", "algorithm", "name", "unlimited", "replaces")
MAX_DEPTH: Final = 16  # levels of descriptors
RESERVED_PREFIX: Final = "tidegate."  # names of policies that the service itself counts by


# ---- policies --------------------------------------------------------------------------------------------------------


def read_entries(section: ConfigValue) -> dict[str, ConfiguredPolicy]:
    """Read the policies, by name."""
    return {name: read_entry(name, setting) for name, setting in section.entries().items()}


def read_entry(name: str, setting: ConfigValue) -> ConfiguredPolicy:
    """Read one policy: a mapping, or just its limits."""
    if not name or name.startswith(RESERVED_PREFIX) or len(name) > 200 or not name.isprintable():  # noqa: PLR2004 - as told
        message = f"expected a name of 1 to 200 printable characters that does not begin with {RESERVED_PREFIX!r}"
        raise setting.error(message)
    if not setting.is_mapping or "quota" in setting.entries():
        return ConfiguredPolicy(_policy(name, setting, read_limits(setting), {}))
    fields = setting.fields(*POLICY_FIELDS)
    if "limits" not in fields:
        raise setting.error("needs limits such as 60/1m, or a list of them")
    policy = _policy(name, setting, read_limits(fields["limits"]), fields)
    rollout = read_percent(fields["rollout"]) if "rollout" in fields else FULL_ROLLOUT
    if policy.mode == "shadow" and rollout < FULL_ROLLOUT:
        raise fields["rollout"].error("stands beside mode shadow, which enforces nothing: leave one of them out")
    overrides = _overrides(fields["overrides"], policy) if "overrides" in fields else ()
    return ConfiguredPolicy(policy, rollout, overrides)


def _policy(name: str, place: ConfigValue, limits: tuple[Limit, ...], fields: Fields) -> Policy:
    mode = cast("Mode", fields["mode"].choice(*get_args(Mode)) if "mode" in fields else "enforce")
    lost = cast("OnStoreError", _choice(fields, "on_store_error", get_args(OnStoreError), "deny"))
    with place.blame(**fields):
        return Policy(name, limits, mode, lost)


def _choice(fields: Fields, name: str, choices: Iterable[str], default: str) -> str:
    return fields[name].choice(*choices) if name in fields else default


def read_percent(setting: ConfigValue) -> float:
    """Read a percentage, from 0 to 100, with or without its sign."""
    try:
        value = float(scalar(setting).removesuffix("%"))
    except ValueError:  # a ConfigError is one
        value = -1.0
    if not 0 <= value <= FULL_ROLLOUT:
        raise setting.error(f"expected a percentage from 0 to 100, not {setting}")
    return value


def read_limits(setting: ConfigValue) -> tuple[Limit, ...]:
    """Read a limit as text or mapping, or a list of them."""
    if not setting.is_mapping and not setting.is_list:
        limits = tuple(_limit(setting, text) for text in setting.text().split(","))
    else:
        entries = setting.one_or_many()
        if not entries:
            raise setting.error("needs at least one limit such as 60/1m")
        limits = tuple(_limit(entry, None) for entry in entries)
    seen: set[str] = set()
    for limit in limits:
        if limit.name in seen:
            raise setting.error(f"two limits are called {limit.name!r}: give one of them a name, as in '60/1m name=a'")
        seen.add(limit.name)
    return limits


def _limit(setting: ConfigValue, text: str | None) -> Limit:
    if not setting.is_mapping:
        with setting.blame():
            return Limit.parse((setting.text() if text is None else text).strip())
    fields = setting.fields(*LIMIT_FIELDS)
    for needed in ("quota", "period"):
        if needed not in fields:
            raise setting.error(f"needs a {needed}, as in {{quota: 60, period: 1m}}")
    words = {name: fields[name].text() for name in ("unit", "name", "timezone") if name in fields}
    numbers = {name: fields[name].whole(0) for name in ("burst", "reset_day", "reset_hour") if name in fields}
    quota, period = fields["quota"].whole(), _text(fields["period"])
    calendar = period in ("month", "year")
    algorithm = _choice(fields, "algorithm", ALGORITHMS, "calendar_window" if calendar else "token_bucket")
    with setting.blame(**fields):
        return Limit(quota, period, algorithm, **words, **numbers)  # type: ignore[arg-type]  # by name


def _text(setting: ConfigValue) -> str | float:
    """Read a period: text such as 1m, or a number of seconds."""
    try:
        return setting.number()
    except ConfigError:
        return setting.text()


def _overrides(setting: ConfigValue, policy: Policy) -> tuple[KeyOverride, ...]:
    found: list[KeyOverride] = []
    lines: dict[Key, int | None] = {}
    for entry in setting.items():
        fields = entry.fields(*OVERRIDE_FIELDS)
        for needed in OVERRIDE_FIELDS:
            if needed not in fields:
                raise entry.error(f"needs a {needed}, as in {{key: 'partner:*', limits: 1000/1m}}")
        parts = tuple(part.text() for part in fields["key"].one_or_many())
        key = parts if len(parts) > 1 else "".join(parts)
        if not parts:
            raise fields["key"].error("expected a key such as 'partner:*', not an empty list")
        if key in lines:
            raise fields["key"].error(f"comes twice, first in line {lines[key]}")
        if found and (shadowing := _covering(found, key)) is not None:
            message = f"is never reached: {shadowing!r} in line {lines[shadowing]} matches all of its keys"
            raise fields["key"].error(message)
        lines[key] = fields["key"].line
        limits = read_limits(fields["limits"])
        with entry.blame():
            Policy(policy.name, limits)
        found.append(KeyOverride(key, limits))
    return tuple(found)


def _covering(before: list[KeyOverride], key: Key) -> Key | None:
    """Find an earlier pattern that matches whatever this pattern matches; exact keys are looked up first, so never."""
    if not any("*" in part for part in parts_of(key)):
        return None
    return next((each.key for each in before if not each.exact and each.matches(key)), None)


# ---- descriptors -----------------------------------------------------------------------------------------------------


@dataclass
class _Tree:
    """Reads one domain."""

    domain: str

    def children(self, setting: ConfigValue, path: str, depth: int) -> tuple[DescriptorNode, ...]:
        """Read a list of descriptors."""
        if depth > MAX_DEPTH:
            raise setting.error(f"is nested more than {MAX_DEPTH} levels deep")
        found: list[DescriptorNode] = []
        lines: dict[tuple[str, str | None], int | None] = {}
        for entry in setting.items():
            node = self.node(entry, path, depth)
            place = (node.key, node.value)
            if place in lines:
                what = node.key if node.value is None else f"{node.key} {node.value}"
                raise entry.error(f"a second descriptor for {what}, the first is in line {lines[place]}")
            lines[place] = entry.line
            found.append(node)
        return tuple(found)

    def node(self, entry: ConfigValue, path: str, depth: int) -> DescriptorNode:
        """Read a descriptor and those below it."""
        fields = entry.fields(*DESCRIPTOR_FIELDS)
        if "key" not in fields:
            raise entry.error("needs a key such as remote_address")
        key = fields["key"].text()
        value = scalar(fields["value"]) if "value" in fields and not fields["value"].is_nothing else None
        if value is not None and "*" in value[:-1]:
            raise fields["value"].error(f"a star may only stand at the end, not as in {value}")
        shared = "share_threshold" in fields and fields["share_threshold"].flag()
        if shared and (value is None or not value.endswith("*")):
            raise fields["share_threshold"].error("is for a value that ends with *")
        name = f"{path}/{escaped(key)}" if value is None else f"{path}/{escaped(key)}={escaped(value)}"
        limits = self.limits(fields)
        below = fields["descriptors"] if "descriptors" in fields and not fields["descriptors"].is_nothing else None
        if limits is None and below is None and "rate_limit" not in fields:
            raise entry.error("has neither a rate_limit nor descriptors: it would limit nothing")
        policy = None
        if limits is not None:
            shadow = "shadow_mode" in fields and fields["shadow_mode"].flag()
            lost = cast("OnStoreError", _choice(fields, "on_store_error", get_args(OnStoreError), "deny"))
            with entry.blame(**fields):
                policy = Policy(name, limits, "shadow" if shadow else "enforce", lost)
        children = self.children(below, name, depth + 1) if below is not None else ()
        return DescriptorNode(key, value, policy, children, shared, *self.names(fields))

    def names(self, fields: Fields) -> tuple[str, tuple[str, ...]]:
        """Read the name of a rate_limit, and of those that do not count where it does."""
        if "rate_limit" not in fields:
            return "", ()
        words = fields["rate_limit"].entries()
        name = words["name"].text() if "name" in words else ""
        found = []
        for entry in words["replaces"].items() if "replaces" in words else ():
            other = entry.fields("name").get("name")
            if other is None:
                raise entry.error("needs a name, as in {name: other}: the name of another rate_limit")
            if other.text() == name:
                raise other.error("is the name of this rate_limit itself: it can only replace others")
            found.append(other.text())
        return name, tuple(found)

    def limits(self, fields: Fields) -> tuple[Limit, ...] | None:
        """Read the limit of a descriptor: in Envoy's words, or `limits` in ours."""
        if "limits" in fields:
            if "rate_limit" in fields:
                raise fields["limits"].error("stands beside rate_limit: leave one of them out")
            return read_limits(fields["limits"])
        if "rate_limit" not in fields:
            return None
        place = fields["rate_limit"]
        words = place.fields(*RATE_LIMIT_FIELDS)
        if "unlimited" in words and words["unlimited"].flag():
            for other in ("unit", "requests_per_unit"):
                if other in words:
                    raise words[other].error("stands beside unlimited: leave one of them out")
            return None
        for needed in ("unit", "requests_per_unit"):
            if needed not in words:
                raise place.error(f"needs a {needed}, as in {{unit: minute, requests_per_unit: 10}}")
        unit = words["unit"].text().lower()
        if unit not in UNIT_PERIODS:
            raise words["unit"].error(f"expected {', '.join(UNIT_PERIODS)}, not {words['unit']}")
        quota = words["requests_per_unit"].whole()
        algorithm = words["algorithm"].choice(*ALGORITHMS) if "algorithm" in words else None
        name = words["name"].text() if "name" in words else ""
        with place.blame(quota=words["requests_per_unit"], period=words["unit"], algorithm=words.get("algorithm")):
            return (limit_of(quota, unit, algorithm, name),)


def escaped(text: str) -> str:
    """Write a part of a policy's name such that no two descriptors get the same."""
    return text.replace("%", "%25").replace("/", "%2F").replace("=", "%3D")


def scalar(setting: ConfigValue) -> str:
    """Read a text that may look like a number or a flag."""
    if isinstance(setting.raw, (bool, int, float)):
        return str(setting.raw)
    return setting.text()


def read_domains(section: ConfigValue) -> dict[str, DescriptorDomain]:
    """Read a list of domains, each written as a file of Envoy's rate limit service."""
    found: dict[str, DescriptorDomain] = {}
    lines: dict[str, int | None] = {}
    for entry in section.one_or_many():
        fields = entry.fields(*DOMAIN_FIELDS)
        if "domain" not in fields:
            raise entry.error("needs a domain, the name that Envoy sends")
        name = fields["domain"].text()
        if name in found:
            raise fields["domain"].error(f"comes twice, first in line {lines[name]}")
        lines[name] = fields["domain"].line
        children = _Tree(name).children(fields["descriptors"], escaped(name), 1) if "descriptors" in fields else ()
        found[name] = DescriptorDomain(name, DescriptorNode("", None, None, children))
    return found
