"""From the configuration files of Envoy's own rate limit service to ours.

Its trees of descriptors are ours, so most of a file stays as it is. What means something else here is said by a remark;
what would change who is limited, or by how much, is refused. Both name file, line and field.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import yaml

from tidegate.errors import ConfigError
from tidegate.policy.config_value import ConfigValue, load
from tidegate.service.config.settings import load_settings
from tidegate.service.decisions.descriptors import CALENDAR_UNITS, DEFAULT_ALGORITHM, UNIT_PERIODS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Made = dict[str, Any]

DESCRIPTOR_FIELDS: Final = (
    *("key", "value", "rate_limit", "descriptors", "shadow_mode", "detailed_metric", "share_threshold"),
    *("quota_mode", "value_to_metric"),
)
RATE_LIMIT_FIELDS: Final = ("unit", "requests_per_unit", "unlimited", "name", "replaces", "unit_multiplier")
IGNORED_METRIC_FIELDS: Final = ("detailed_metric", "value_to_metric")
ENVOY_LENGTHS: Final = {"month": "30 days", "year": "365 days"}  # what they are in Envoy's service
MAX_UINT32: Final = 2**32 - 1
PATH_PART: Final = re.compile(r"([^.\[\]]+)|\[(\d+)\]")  # of the path of a field


def convert(files: Sequence[str | Path]) -> tuple[str, list[str]]:
    """Convert files, one domain each; gives our YAML, and remarks on what means something else here."""
    conversion = _Conversion()
    for file in files:
        conversion.take(load(file))
    domains = conversion.domains()
    try:
        load_settings({"domains": domains})  # what we would refuse is refused now
    except ConfigError as error:
        raise conversion.blamed(error) from None
    return yaml.safe_dump({"domains": domains}, sort_keys=False, allow_unicode=True), conversion.remarks


class _Conversion:
    """Files that are converted together, and where everything in the result came from."""

    def __init__(self) -> None:
        self.remarks: list[str] = []
        self._entries: dict[str, list[ConfigValue]] = {}  # descriptors by domain
        self._places: dict[str, ConfigValue] = {}  # by their place in the result

    def take(self, file: ConfigValue) -> None:
        """Read a file; several may have the same domain."""
        fields = file.fields("domain", "descriptors")
        if "domain" not in fields:
            raise file.error("needs a domain, the name that Envoy sends")
        name = fields["domain"].text()
        if name in self._entries:
            self.remark(fields["domain"], f"{name} is in several files: its descriptors are put together")
        self._places.setdefault(f"domains[{len(self._entries)}]", file)
        entries = self._entries.setdefault(name, [])
        if "descriptors" in fields and not fields["descriptors"].is_nothing:
            entries += fields["descriptors"].items()

    def remark(self, place: ConfigValue, message: str) -> None:
        """Say what is different."""
        self.remarks.append(str(place.error(message)))

    def domains(self) -> list[Made]:
        """Give the result."""
        return [
            {"domain": name, "descriptors": self.descriptors(entries, f"domains[{number}]")}
            for number, (name, entries) in enumerate(self._entries.items())
        ]

    def blamed(self, error: ConfigError) -> ConfigError:
        """Give an error in the result the place that it came from."""
        field = error.field or ""
        message = str(error).removeprefix(f"{field}: ")
        known = max((place for place in self._places if field.startswith(place)), key=len, default=None)
        if known is None:
            return error
        place = self._places[known]
        for name, number in PATH_PART.findall(field[len(known) :]):
            below = dict(enumerate(place.items())).get(int(number)) if number else place.entries().get(name)
            if below is None:
                break  # it was made here
            place = below
        return place.error(message)

    # ---- descriptors -------------------------------------------------------------------------------------------------

    def descriptors(self, entries: list[ConfigValue], path: str) -> list[Made]:
        """Convert one level of a tree."""
        made = []
        for number, entry in enumerate(entries):
            place = f"{path}.descriptors[{number}]"
            self._places[place] = entry
            made.append(self.descriptor(entry, place))
        self.check_order(entries, made)
        return made

    def descriptor(self, entry: ConfigValue, path: str) -> Made:
        """Convert a descriptor and those below it."""
        fields = {name: field for name, field in entry.fields(*DESCRIPTOR_FIELDS).items() if not field.is_nothing}
        made: Made = {name: words(fields[name]) for name in ("key", "value") if name in fields}
        if not made.get("value"):
            made.pop("value", None)  # an empty one is none
        self.check_counterparts(fields, made)
        for name in ("shadow_mode", "share_threshold"):
            if name in fields and fields[name].flag():
                made[name] = True
        if "rate_limit" in fields:
            made |= self.rate_limit(fields["rate_limit"])
        if "descriptors" in fields:
            made["descriptors"] = self.descriptors(fields["descriptors"].items(), path)
        if not made.keys() & {"rate_limit", "limits", "descriptors"}:
            self.remark(entry, "has no limit, which Envoy takes as a name for metrics: kept as unlimited")
            made["rate_limit"] = {"unlimited": True}
        return made

    def check_counterparts(self, fields: dict[str, ConfigValue], made: Made) -> None:
        """Refuse what we cannot do; say what has no effect."""
        if made.get("key", "").endswith("*") and "value" not in made:
            raise fields["key"].error("a star in a key has no counterpart here: write each key out")
        if "quota_mode" in fields and fields["quota_mode"].flag():
            raise fields["quota_mode"].error("has no counterpart here: leave it out, or use shadow_mode")
        for name in IGNORED_METRIC_FIELDS:
            if name in fields and fields[name].flag():
                self.remark(fields[name], "left out: metrics here have one label for each limit, and never values")

    def check_order(self, entries: list[ConfigValue], made: list[Made]) -> None:
        """Refuse what comes twice, and a wildcard behind a shorter one: there the first counts, here the longest."""
        seen: list[tuple[str, str | None, ConfigValue]] = []
        for entry, each in zip(entries, made, strict=True):
            key, value = each.get("key", ""), each.get("value")
            for other_key, other, place in seen:
                if key != other_key:
                    continue
                where = f"{place.file}:{place.line}"
                if value == other:
                    what = key if value is None else f"{key} {value}"
                    raise entry.error(f"a second descriptor for {what}, the first is in {where}")
                if value and value.endswith("*") and other and other.endswith("*") and value.startswith(other[:-1]):
                    message = f"{value} is never reached: {other} in {where} matches first. Leave one of them out"
                    raise entry.error(message)
            seen.append((key, value, entry))

    # ---- limits ------------------------------------------------------------------------------------------------------

    def rate_limit(self, setting: ConfigValue) -> Made:
        """Convert a limit: mostly it stays a rate_limit."""
        fields = {name: field for name, field in setting.fields(*RATE_LIMIT_FIELDS).items() if not field.is_nothing}
        made: Made = {}
        if "unlimited" in fields and fields["unlimited"].flag():
            made["unlimited"] = True
        if "unit" in fields:
            unit = fields["unit"].text().lower()
            made["unit"] = unit if unit in UNIT_PERIODS else fields["unit"].text()
            if unit in ENVOY_LENGTHS:
                self.remark(fields["unit"], f"a {unit} of the calendar here, {ENVOY_LENGTHS[unit]} in Envoy's service")
        if "requests_per_unit" in fields and not made.get("unlimited"):
            made["requests_per_unit"] = fields["requests_per_unit"].whole(0, MAX_UINT32)
            if not made["requests_per_unit"]:
                message = "0 blocks everything, which is no limit: let Envoy's routes do that"
                raise fields["requests_per_unit"].error(message)
        if "name" in fields:
            made["name"] = words(fields["name"])
        if "replaces" in fields:
            made["replaces"] = [
                {name: words(field) for name, field in entry.fields("name").items() if not field.is_nothing}
                for entry in fields["replaces"].items()
            ]
        times = fields["unit_multiplier"].whole(1, MAX_UINT32) if "unit_multiplier" in fields else 1
        return {"rate_limit": made} if times == 1 else self.multiplied(fields, made, times)

    def multiplied(self, fields: dict[str, ConfigValue], made: Made, times: int) -> Made:
        """Write a limit for several units of time in our words."""
        place, unit = fields["unit_multiplier"], made.get("unit", "")
        if unit in CALENDAR_UNITS:
            raise place.error(f"several {unit}s have no counterpart here: write days")
        if unit not in UNIT_PERIODS or "requests_per_unit" not in made:
            raise place.error(
                "needs a unit and requests_per_unit beside it, as in {unit: minute, requests_per_unit: 10}"
            )
        if "replaces" in made:
            raise place.error("has no counterpart here beside replaces: leave one of them out")
        limit = {
            "quota": made["requests_per_unit"],
            "period": f"{times}{UNIT_PERIODS[unit][1:]}",
            "algorithm": DEFAULT_ALGORITHM,
        }
        return {"limits": {**limit, **({"name": made["name"]} if "name" in made else {})}}


def words(setting: ConfigValue) -> str:
    """Read text that may look like a number or a flag, and may be empty."""
    value = setting.raw.value if isinstance(setting.raw, yaml.ScalarNode) else None
    return value if value == "" else setting.text()
