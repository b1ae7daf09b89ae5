"""The setting `spending` of a service and of an egress gateway: where costs are recorded, and who is warned.

spending: spending.db                            # only the ledger, or a mapping:
spending:
ledger: spending.db
timezone: Europe/Berlin
milestones: [50, 80, 100]
webhook: https://example.com/hook
secret: ${HOOK_SECRET}                         # or secret_file
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from zoneinfo import ZoneInfo

from tidegate._policy.setting_values import expand_variables, read_path, read_string_file
from tidegate._runtime.urls import redact, split_url
from tidegate.errors import ConfigError
from tidegate.spending._milestones import FULL_PERCENT
from tidegate.spending._monitor import DEFAULT_MILESTONES, Spending

if TYPE_CHECKING:
    from pathlib import Path

    from tidegate._policy.config_value import ConfigValue

STRING: Final[dict[str, Any]] = {"type": "string", "minLength": 1}
PERCENT: Final[dict[str, Any]] = {"type": "integer", "minimum": 1, "maximum": FULL_PERCENT}
SPENDING_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "ledger": STRING,
    "timezone": STRING,
    "milestones": {"type": "array", "items": PERCENT},
    "webhook": STRING,
    "secret": STRING,
    "secret_file": STRING,
}
SPENDING_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [STRING, {"type": "object", "additionalProperties": False, "properties": SPENDING_FIELDS}]
}


@dataclass(frozen=True)
class SpendingSettings:
    """Where costs are recorded (None: nowhere), and which percentages of a ceiling are reported to which webhook."""

    ledger: Path | None = None
    timezone: str = "UTC"
    milestones: tuple[int, ...] = DEFAULT_MILESTONES
    webhook: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)

    def open(self) -> Spending:
        """Open the ledger; raises ConfigError if the file cannot be created."""
        options: dict[str, Any] = {"milestones": self.milestones, "webhook": self.webhook, "secret": self.secret}
        try:
            return Spending(self.ledger, timezone=self.timezone, **options)
        except ConfigError as error:
            raise ConfigError(error.detail, field="spending") from None


def read_spending(setting: ConfigValue) -> SpendingSettings:
    """Read the setting: the path of a ledger, or a mapping."""
    if not setting.is_mapping:
        return SpendingSettings(read_path(setting))
    fields = {name: expand_variables(each, os.environ) for name, each in setting.fields(*SPENDING_FIELDS).items()}
    if "secret" in fields and "secret_file" in fields:
        raise fields["secret_file"].error("cannot be combined with secret: remove one of them")
    found: dict[str, Any] = {}
    for name, each in fields.items():
        found[name.removesuffix("_file")] = READERS[name](each)
    if "secret" in found and "webhook" not in found:
        raise setting.error("has a secret to sign webhook requests, but no webhook: set webhook")
    return SpendingSettings(**found)


def _read_timezone(setting: ConfigValue) -> str:
    name = setting.string()
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise setting.error(f"unknown time zone {name!r}: use an IANA name such as 'UTC' or 'Europe/Berlin'") from None
    return name


def _read_milestones(setting: ConfigValue) -> tuple[int, ...]:
    return tuple(each.integer(1, FULL_PERCENT) for each in setting.one_or_many())


def _read_webhook(setting: ConfigValue) -> str:
    url = setting.string()
    if not url.startswith(("http://", "https://")):
        raise setting.error(f"expected an http or https URL such as https://example.com/hook, not {redact(url)!r}")
    with setting.locate_errors():
        split_url(url, "")
    return url


READERS: Final[dict[str, Any]] = {
    "ledger": read_path,
    "timezone": _read_timezone,
    "milestones": _read_milestones,
    "webhook": _read_webhook,
    "secret": lambda setting: setting.string(),
    "secret_file": read_string_file,
}
