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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tidegate._policy.declared_settings import PATH, PERCENTS, STRING, URL, options_of, setting
from tidegate._policy.setting_values import (
    expand_variables,
    read_milestones,
    read_path,
    read_secret,
    read_timezone,
    read_webhook,
)
from tidegate.errors import ConfigError
from tidegate.spending._monitor import DEFAULT_MILESTONES, Spending

if TYPE_CHECKING:
    from pathlib import Path

    from tidegate._policy.config_value import ConfigValue


@dataclass(frozen=True)
class SpendingSettings:
    """Where costs are recorded (None: nowhere), and which percentages of a ceiling are reported to which webhook."""

    ledger: Path | None = setting(None, read_path, "file in which costs are recorded", PATH)
    timezone: str = setting("UTC", read_timezone, "time zone of the days in the ledger")
    milestones: tuple[int, ...] = setting(
        DEFAULT_MILESTONES, read_milestones, "percentages of a ceiling that are reported", PERCENTS, shown="50, 80, 100"
    )
    webhook: str | None = setting(None, read_webhook, "URL to which warnings are posted", URL, private=True)
    secret: str | None = setting(None, read_secret, "secret that signs them", secret=True, file="file with this secret")

    def open(self) -> Spending:
        """Open the ledger; raises ConfigError if the file cannot be created."""
        options: dict[str, Any] = {"milestones": self.milestones, "webhook": self.webhook, "secret": self.secret}
        try:
            return Spending(self.ledger, timezone=self.timezone, **options)
        except ConfigError as error:
            raise ConfigError(error.detail, field="spending") from None


SPENDING_FIELDS: Final = {option.name: option for option in options_of(SpendingSettings)}
SPENDING_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        STRING.schema,
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {name: option.schema for name, option in SPENDING_FIELDS.items()},
        },
    ]
}


def read_spending(setting: ConfigValue) -> SpendingSettings:
    """Read the setting: the path of a ledger, or a mapping."""
    if not setting.is_mapping:
        return SpendingSettings(read_path(setting))
    fields = {name: expand_variables(each, os.environ) for name, each in setting.fields(*SPENDING_FIELDS).items()}
    if "secret" in fields and "secret_file" in fields:
        raise fields["secret_file"].error("cannot be combined with secret: remove one of them")
    found: dict[str, Any] = {}
    for name, each in fields.items():
        found[name.removesuffix("_file")] = SPENDING_FIELDS[name].read(each)
    if "secret" in found and "webhook" not in found:
        raise setting.error("has a secret to sign webhook requests, but no webhook: set webhook")
    return SpendingSettings(**found)
