"""Reads policies and descriptors from the service's YAML file; errors name file, line and field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast, get_args

from tidegate._policy import Policy
from tidegate._policy.model import Mode, OnStoreError
from tidegate.core import Limit
from tidegate.core._algorithms import ALGORITHMS
from tidegate.core._limit import default_algorithm
from tidegate.errors import ConfigError
from tidegate.service._decisions.descriptors import UNIT_PERIODS, DescriptorDomain, DescriptorNode, envoy_limit
from tidegate.service._decisions.policies import FULL_ROLLOUT, ConfiguredPolicy, KeyOverride, key_parts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate._policy import Key
    from tidegate._policy.config_value import ConfigValue

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
RESERVED_PREFIX: Final = "tidegate."  # names of policies that the service uses internally


# ---- policies --------------------------------------------------------------------------------------------------------


def read_policies(section: ConfigValue) -> dict[str, ConfiguredPolicy]:
    """Read the policies, by name."""
    return {name: read_policy(name, setting) for name, setting in section.entries().items()}


def read_policy(name: str, setting: ConfigValue) -> ConfiguredPolicy:
    """Read one policy: a mapping, or only its limits."""
    if not name or name.startswith(RESERVED_PREFIX) or len(name) > 200 or not name.isprintable():  # noqa: PLR2004 - as the message says
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
        raise fields["rollout"].error("cannot be combined with mode: shadow, which enforces nothing")
    overrides = _overrides(fields["overrides"], policy) if "overrides" in fields else ()
    return ConfiguredPolicy(policy, rollout, overrides)


def _policy(name: str, place: ConfigValue, limits: tuple[Limit, ...], fields: Fields) -> Policy:
    mode = cast("Mode", fields["mode"].choice(*get_args(Mode)) if "mode" in fields else "enforce")
    on_store_error = cast("OnStoreError", _choice(fields, "on_store_error", get_args(OnStoreError), "deny"))
    with place.locate_errors(**fields):
        return Policy(name, limits, mode, on_store_error)


def _choice(fields: Fields, name: str, choices: Iterable[str], default: str) -> str:
    return fields[name].choice(*choices) if name in fields else default


def read_percent(setting: ConfigValue) -> float:
    """Read a percentage, from 0 to 100, with or without a percent sign."""
    try:
        value = float(scalar(setting).removesuffix("%"))
    except ValueError:  # a ConfigError is one
        value = -1.0
    if not 0 <= value <= FULL_ROLLOUT:
        raise setting.error(f"expected a percentage from 0 to 100, not {setting}")
    return value


def read_limits(setting: ConfigValue) -> tuple[Limit, ...]:
    """Read a limit as a string or mapping, or a list of limits."""
    if not setting.is_mapping and not setting.is_list:
        limits = tuple(_limit(setting, text) for text in setting.string().split(","))
    else:
        entries = setting.one_or_many()
        if not entries:
            raise setting.error("needs at least one limit such as 60/1m")
        limits = tuple(_limit(entry, None) for entry in entries)
    seen: set[str] = set()
    for limit in limits:
        if limit.name in seen:
            raise setting.error(f"two limits are named {limit.name!r}: rename one of them, as in '60/1m name=a'")
        seen.add(limit.name)
    return limits


def _limit(setting: ConfigValue, text: str | None) -> Limit:
    if not setting.is_mapping:
        with setting.locate_errors():
            return Limit.parse((setting.string() if text is None else text).strip())
    fields = setting.fields(*LIMIT_FIELDS)
    for needed in ("quota", "period"):
        if needed not in fields:
            raise setting.error(f"needs a {needed}, as in {{quota: 60, period: 1m}}")
    strings = {name: fields[name].string() for name in ("unit", "name", "timezone") if name in fields}
    integers = {name: fields[name].integer(0) for name in ("burst", "reset_day", "reset_hour") if name in fields}
    quota, period = fields["quota"].integer(), _read_period(fields["period"])
    algorithm = _choice(fields, "algorithm", ALGORITHMS, default_algorithm(period))
    with setting.locate_errors(**fields):
        return Limit(quota, period, algorithm, **strings, **integers)  # type: ignore[arg-type]  # by name


def _read_period(setting: ConfigValue) -> str | float:
    """Read a period: a string such as 1m, or a number of seconds."""
    try:
        return setting.number()
    except ConfigError:
        return setting.string()


def _overrides(setting: ConfigValue, policy: Policy) -> tuple[KeyOverride, ...]:
    found: list[KeyOverride] = []
    lines: dict[Key, int | None] = {}
    for entry in setting.items():
        fields = entry.fields(*OVERRIDE_FIELDS)
        for needed in OVERRIDE_FIELDS:
            if needed not in fields:
                raise entry.error(f"needs a {needed}, as in {{key: 'partner:*', limits: 1000/1m}}")
        parts = tuple(part.string() for part in fields["key"].one_or_many())
        key = parts if len(parts) > 1 else "".join(parts)
        if not parts:
            raise fields["key"].error("expected a key such as 'partner:*', not an empty list")
        if key in lines:
            raise fields["key"].error(f"is defined twice, first on line {lines[key]}")
        if found and (earlier := _find_covering(found, key)) is not None:
            message = f"is never reached: {earlier!r} on line {lines[earlier]} matches all of its keys"
            raise fields["key"].error(message)
        lines[key] = fields["key"].line
        limits = read_limits(fields["limits"])
        with entry.locate_errors():
            Policy(policy.name, limits)
        found.append(KeyOverride(key, limits))
    return tuple(found)


def _find_covering(before: list[KeyOverride], key: Key) -> Key | None:
    """Return an earlier pattern that matches all keys of this one; none for an exact key, which is matched first."""
    if not any("*" in part for part in key_parts(key)):
        return None
    return next((each.key for each in before if not each.exact and each.matches(key)), None)


# ---- descriptors -----------------------------------------------------------------------------------------------------


@dataclass
class _DomainReader:
    """Reads the descriptors of one domain."""

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
                raise entry.error(f"duplicate descriptor for {what}, first defined on line {lines[place]}")
            lines[place] = entry.line
            found.append(node)
        return tuple(found)

    def node(self, entry: ConfigValue, path: str, depth: int) -> DescriptorNode:
        """Read a descriptor and its children."""
        fields = entry.fields(*DESCRIPTOR_FIELDS)
        if "key" not in fields:
            raise entry.error("needs a key such as remote_address")
        key = fields["key"].string()
        value = scalar(fields["value"]) if "value" in fields and not fields["value"].is_null else None
        if value is not None and "*" in value[:-1]:
            raise fields["value"].error(f"'*' is only allowed at the end, not as in {value!r}")
        shared = "share_threshold" in fields and fields["share_threshold"].boolean()
        if shared and (value is None or not value.endswith("*")):
            raise fields["share_threshold"].error("is only allowed with a value that ends with *")
        name = f"{path}/{escape(key)}" if value is None else f"{path}/{escape(key)}={escape(value)}"
        limits = self.limits(fields)
        nested = fields["descriptors"] if "descriptors" in fields and not fields["descriptors"].is_null else None
        if limits is None and nested is None and "rate_limit" not in fields:
            raise entry.error("needs a rate_limit, limits or descriptors: otherwise it limits nothing")
        policy = None
        if limits is not None:
            shadow = "shadow_mode" in fields and fields["shadow_mode"].boolean()
            on_store_error = cast("OnStoreError", _choice(fields, "on_store_error", get_args(OnStoreError), "deny"))
            with entry.locate_errors(**fields):
                policy = Policy(name, limits, "shadow" if shadow else "enforce", on_store_error)
        children = self.children(nested, name, depth + 1) if nested is not None else ()
        return DescriptorNode(key, value, policy, children, shared, *self.names(fields))

    def names(self, fields: Fields) -> tuple[str, tuple[str, ...]]:
        """Read the name of a rate_limit, and the names of those that it replaces."""
        if "rate_limit" not in fields:
            return "", ()
        rate_limit = fields["rate_limit"].entries()
        name = rate_limit["name"].string() if "name" in rate_limit else ""
        found = []
        for entry in rate_limit["replaces"].items() if "replaces" in rate_limit else ():
            other = entry.fields("name").get("name")
            if other is None:
                raise entry.error("needs a name, as in {name: other}: the name of another rate_limit")
            if other.string() == name:
                raise other.error("is the name of this rate_limit: it can only replace others")
            found.append(other.string())
        return name, tuple(found)

    def limits(self, fields: Fields) -> tuple[Limit, ...] | None:
        """Read the limit of a descriptor: `rate_limit` as in Envoy's files, or `limits` as in a policy."""
        if "limits" in fields:
            if "rate_limit" in fields:
                raise fields["limits"].error("cannot be combined with rate_limit")
            return read_limits(fields["limits"])
        if "rate_limit" not in fields:
            return None
        place = fields["rate_limit"]
        rate_limit = place.fields(*RATE_LIMIT_FIELDS)
        if "unlimited" in rate_limit and rate_limit["unlimited"].boolean():
            for other in ("unit", "requests_per_unit"):
                if other in rate_limit:
                    raise rate_limit[other].error("cannot be combined with unlimited")
            return None
        for needed in ("unit", "requests_per_unit"):
            if needed not in rate_limit:
                raise place.error(f"needs a {needed}, as in {{unit: minute, requests_per_unit: 10}}")
        unit = rate_limit["unit"].string().lower()
        if unit not in UNIT_PERIODS:
            raise rate_limit["unit"].error(f"expected one of {', '.join(UNIT_PERIODS)}, not {rate_limit['unit']}")
        quota = rate_limit["requests_per_unit"].integer()
        algorithm = rate_limit["algorithm"].choice(*ALGORITHMS) if "algorithm" in rate_limit else None
        name = rate_limit["name"].string() if "name" in rate_limit else ""
        with place.locate_errors(
            quota=rate_limit["requests_per_unit"], period=rate_limit["unit"], algorithm=rate_limit.get("algorithm")
        ):
            return (envoy_limit(quota, unit, algorithm, name),)


def escape(text: str) -> str:
    """Escape a part of a policy's name, so that no two descriptors have the same name."""
    return text.replace("%", "%25").replace("/", "%2F").replace("=", "%3D")


def scalar(setting: ConfigValue) -> str:
    """Read a string that may look like a number or a boolean."""
    if isinstance(setting.raw, (bool, int, float)):
        return str(setting.raw)
    return setting.string()


def read_domains(section: ConfigValue) -> dict[str, DescriptorDomain]:
    """Read a list of domains, each in the format of Envoy's rate limit service."""
    found: dict[str, DescriptorDomain] = {}
    lines: dict[str, int | None] = {}
    for entry in section.one_or_many():
        fields = entry.fields(*DOMAIN_FIELDS)
        if "domain" not in fields:
            raise entry.error("needs a domain, the name that Envoy sends")
        name = fields["domain"].string()
        if name in found:
            raise fields["domain"].error(f"is defined twice, first on line {lines[name]}")
        lines[name] = fields["domain"].line
        children = (
            _DomainReader(name).children(fields["descriptors"], escape(name), 1) if "descriptors" in fields else ()
        )
        found[name] = DescriptorDomain(name, DescriptorNode("", None, None, children))
    return found
