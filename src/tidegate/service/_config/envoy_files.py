"""Converts configuration files of Envoy's own rate limit service.

Both services use the same trees of descriptors, so most of a file stays as it is. A remark names each setting that has
another meaning here. A setting that would change who is limited, or by how much, is refused. Both name file, line and
field.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import yaml

from tidegate._policy.config_value import ConfigValue, load
from tidegate.errors import ConfigError
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions.descriptors import CALENDAR_UNITS, DEFAULT_ALGORITHM, UNIT_PERIODS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Converted = dict[str, Any]

DESCRIPTOR_FIELDS: Final = (
    *("key", "value", "rate_limit", "descriptors", "shadow_mode", "detailed_metric", "share_threshold"),
    *("quota_mode", "value_to_metric"),
)
RATE_LIMIT_FIELDS: Final = ("unit", "requests_per_unit", "unlimited", "name", "replaces", "unit_multiplier")
IGNORED_METRIC_FIELDS: Final = ("detailed_metric", "value_to_metric")
ENVOY_LENGTHS: Final = {"month": "30 days", "year": "365 days"}  # their lengths in Envoy's service
MAX_UINT32: Final = 2**32 - 1
PATH_PART: Final = re.compile(r"([^.\[\]]+)|\[(\d+)\]")  # of the path of a field


def convert(files: Sequence[str | Path]) -> tuple[str, list[str]]:
    """Convert files, one domain each; return our YAML, and remarks on settings that have another meaning here."""
    converter = _EnvoyConverter()
    for file in files:
        converter.add(load(file))
    domains = converter.domains()
    try:
        load_settings({"domains": domains})  # raises now if the result would be refused
    except ConfigError as error:
        raise converter.relocate(error) from None
    return yaml.safe_dump({"domains": domains}, sort_keys=False, allow_unicode=True), converter.remarks


class _EnvoyConverter:
    """Converts several files to one result, and tracks the origin of each part of the result."""

    def __init__(self) -> None:
        self.remarks: list[str] = []
        self._entries: dict[str, list[ConfigValue]] = {}  # descriptors by domain
        self._origins: dict[str, ConfigValue] = {}  # by path in the result

    def add(self, file: ConfigValue) -> None:
        """Add a file; several files may have the same domain."""
        fields = file.fields("domain", "descriptors")
        if "domain" not in fields:
            raise file.error("needs a domain, the name that Envoy sends")
        name = fields["domain"].string()
        if name in self._entries:
            self.remark(fields["domain"], f"{name} is in several files: its descriptors are merged")
        self._origins.setdefault(f"domains[{len(self._entries)}]", file)
        entries = self._entries.setdefault(name, [])
        if "descriptors" in fields and not fields["descriptors"].is_null:
            entries += fields["descriptors"].items()

    def remark(self, place: ConfigValue, message: str) -> None:
        """Add a remark on a setting."""
        self.remarks.append(str(place.error(message)))

    def domains(self) -> list[Converted]:
        """Return the result."""
        return [
            {"domain": name, "descriptors": self.descriptors(entries, f"domains[{number}]")}
            for number, (name, entries) in enumerate(self._entries.items())
        ]

    def relocate(self, error: ConfigError) -> ConfigError:
        """Turn an error in the result into an error at the origin of that part."""
        field = error.field or ""
        message = str(error).removeprefix(f"{field}: ")
        known = max((place for place in self._origins if field.startswith(place)), key=len, default=None)
        if known is None:
            return error
        place = self._origins[known]
        for name, number in PATH_PART.findall(field[len(known) :]):
            nested = dict(enumerate(place.items())).get(int(number)) if number else place.entries().get(name)
            if nested is None:
                break  # the converter added it
            place = nested
        return place.error(message)

    # ---- descriptors -------------------------------------------------------------------------------------------------

    def descriptors(self, entries: list[ConfigValue], path: str) -> list[Converted]:
        """Convert one level of a tree."""
        converted = []
        for number, entry in enumerate(entries):
            place = f"{path}.descriptors[{number}]"
            self._origins[place] = entry
            converted.append(self.descriptor(entry, place))
        self.check_order(entries, converted)
        return converted

    def descriptor(self, entry: ConfigValue, path: str) -> Converted:
        """Convert a descriptor and its children."""
        fields = {name: field for name, field in entry.fields(*DESCRIPTOR_FIELDS).items() if not field.is_null}
        converted: Converted = {name: read_string(fields[name]) for name in ("key", "value") if name in fields}
        if not converted.get("value"):
            converted.pop("value", None)  # an empty value means no value
        self.check_counterparts(fields, converted)
        for name in ("shadow_mode", "share_threshold"):
            if name in fields and fields[name].boolean():
                converted[name] = True
        if "rate_limit" in fields:
            converted |= self.rate_limit(fields["rate_limit"])
        if "descriptors" in fields:
            converted["descriptors"] = self.descriptors(fields["descriptors"].items(), path)
        if not converted.keys() & {"rate_limit", "limits", "descriptors"}:
            self.remark(
                entry, "has no limit (Envoy uses such a descriptor only to name metrics): converted to unlimited"
            )
            converted["rate_limit"] = {"unlimited": True}
        return converted

    def check_counterparts(self, fields: dict[str, ConfigValue], converted: Converted) -> None:
        """Refuse settings that are not supported; add remarks on settings that have no effect."""
        if converted.get("key", "").endswith("*") and "value" not in converted:
            raise fields["key"].error("* is not supported in a key: list each key")
        if "quota_mode" in fields and fields["quota_mode"].boolean():
            raise fields["quota_mode"].error("is not supported: remove it, or use shadow_mode")
        for name in IGNORED_METRIC_FIELDS:
            if name in fields and fields[name].boolean():
                self.remark(fields[name], "ignored: metrics of tidegate have one label per limit, and never values")

    def check_order(self, entries: list[ConfigValue], converted: list[Converted]) -> None:
        """Refuse duplicates, and a wildcard after a shorter one: Envoy uses the first match, tidegate the longest."""
        seen: list[tuple[str, str | None, ConfigValue]] = []
        for entry, each in zip(entries, converted, strict=True):
            key, value = each.get("key", ""), each.get("value")
            for other_key, other, place in seen:
                if key != other_key:
                    continue
                where = f"{place.file}:{place.line}"
                if value == other:
                    what = key if value is None else f"{key} {value}"
                    raise entry.error(f"duplicate descriptor for {what}, first defined in {where}")
                if value and value.endswith("*") and other and other.endswith("*") and value.startswith(other[:-1]):
                    message = f"{value} is never reached: {other} in {where} matches first. Remove one of them"
                    raise entry.error(message)
            seen.append((key, value, entry))

    # ---- limits ------------------------------------------------------------------------------------------------------

    def rate_limit(self, setting: ConfigValue) -> Converted:
        """Convert a limit; most stay a rate_limit."""
        fields = {name: field for name, field in setting.fields(*RATE_LIMIT_FIELDS).items() if not field.is_null}
        converted: Converted = {}
        if "unlimited" in fields and fields["unlimited"].boolean():
            converted["unlimited"] = True
        if "unit" in fields:
            unit = fields["unit"].string().lower()
            converted["unit"] = unit if unit in UNIT_PERIODS else fields["unit"].string()
            if unit in ENVOY_LENGTHS:
                self.remark(
                    fields["unit"], f"is a calendar {unit} in tidegate, {ENVOY_LENGTHS[unit]} in Envoy's service"
                )
        if "requests_per_unit" in fields and not converted.get("unlimited"):
            converted["requests_per_unit"] = fields["requests_per_unit"].integer(0, MAX_UINT32)
            if not converted["requests_per_unit"]:
                message = "0 would block everything, which is not a limit: block it in Envoy's routes"
                raise fields["requests_per_unit"].error(message)
        if "name" in fields:
            converted["name"] = read_string(fields["name"])
        if "replaces" in fields:
            converted["replaces"] = [
                {name: read_string(field) for name, field in entry.fields("name").items() if not field.is_null}
                for entry in fields["replaces"].items()
            ]
        times = fields["unit_multiplier"].integer(1, MAX_UINT32) if "unit_multiplier" in fields else 1
        return {"rate_limit": converted} if times == 1 else self.multiplied(fields, converted, times)

    def multiplied(self, fields: dict[str, ConfigValue], converted: Converted, times: int) -> Converted:
        """Convert a limit with a unit_multiplier, which needs `limits`."""
        place, unit = fields["unit_multiplier"], converted.get("unit", "")
        if unit in CALENDAR_UNITS:
            raise place.error(f"several {unit}s are not supported: use days")
        if unit not in UNIT_PERIODS or "requests_per_unit" not in converted:
            raise place.error("needs unit and requests_per_unit, as in {unit: minute, requests_per_unit: 10}")
        if "replaces" in converted:
            raise place.error("cannot be combined with replaces")
        limit = {
            "quota": converted["requests_per_unit"],
            "period": f"{times}{UNIT_PERIODS[unit][1:]}",
            "algorithm": DEFAULT_ALGORITHM,
        }
        return {"limits": {**limit, **({"name": converted["name"]} if "name" in converted else {})}}


def read_string(setting: ConfigValue) -> str:
    """Read a string that may look like a number or a boolean, and may be empty."""
    value = setting.raw.value if isinstance(setting.raw, yaml.ScalarNode) else None
    return value if value == "" else setting.string()
