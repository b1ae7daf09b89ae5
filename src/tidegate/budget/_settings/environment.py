"""Reads settings from environment variables, and from the YAML file that RATE_LIMIT_CONFIG may name."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final

from tidegate._policy.config_value import BOOLEANS
from tidegate._policy.setting_values import read_variable
from tidegate._runtime.suggestions import hint
from tidegate.budget._settings.file import read_config
from tidegate.budget._settings.model import NO_TIERS, BudgetSettings, Problem, problems, refuse
from tidegate.budget._settings.tiers import PERIODS
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

log: logging.Logger = logging.getLogger("tidegate.budget")

VARIABLES: Final = {
    **{f"per_{period}": f"RATE_LIMIT_PER_{period.upper()}" for period in PERIODS},
    "concurrency": "CONCURRENCY_LIMIT",
    "storage": "RATE_LIMIT_STORAGE_PATH",
    "enabled": "RATE_LIMIT_ENABLED",
    "strategy": "RATE_LIMIT_STRATEGY",
    "timezone": "RATE_LIMIT_TIMEZONE",
    "batch_ttl": "RATE_LIMIT_BATCH_TTL",
    "on_database_error": "RATE_LIMIT_ON_DATABASE_ERROR",
    "webhook_url": "RATE_LIMIT_WEBHOOK_URL",
    "webhook_secret": "RATE_LIMIT_WEBHOOK_SECRET",
}
FROM_FILES: Final = ("storage", "webhook_url", "webhook_secret")  # also read from files: RATE_LIMIT_…_FILE
CONFIG_VARIABLE: Final = "RATE_LIMIT_CONFIG"
VARIABLE_PREFIX: Final = "RATE_LIMIT_"
SWITCH_WORDS: Final = {**BOOLEANS, "1": True, "0": False}
NUMERIC_SETTINGS: Final = (*(f"per_{period}" for period in PERIODS), "concurrency")


def read_environment(environ: Mapping[str, str] | None = None, *, storage: str | Path | None = None) -> BudgetSettings:
    """Read the settings; one error lists every wrong variable. An empty variable counts as not set.

    `storage` is a path that a program gives in place of RATE_LIMIT_STORAGE_PATH; then it is an error if no variable
    configures the budget.
    """
    environ = os.environ if environ is None else environ
    for name in unknown_variables(environ):
        known = [variable.removeprefix(VARIABLE_PREFIX) for variable in (*VARIABLES.values(), CONFIG_VARIABLE)]
        near = hint(name[len(VARIABLE_PREFIX) :].upper(), known, VARIABLE_PREFIX)
        log.warning("unknown variable %s has no effect%s", name, near)
    values, found = _read_variables(environ)
    limits = [VARIABLES[name] for name in NUMERIC_SETTINGS if name in values]
    if limits and "enabled" not in values:
        log.warning(
            "RATE_LIMIT_ENABLED is not set, so these variables limit nothing: %s; set it to true", ", ".join(limits)
        )
    from_file: dict[str, Any] = {}
    if path := environ.get(CONFIG_VARIABLE, "").strip():
        try:
            from_file = read_config(path)
        except ConfigError as error:
            found.append((CONFIG_VARIABLE, str(error)))
    if storage is not None:
        if not (found or from_file or values.keys() - {"storage"}):
            message = f"the budget has no limits: {NO_TIERS}, or RATE_LIMIT_ENABLED and RATE_LIMIT_PER_* variables"
            raise ConfigError(message, field="per_minute")
        values["storage"] = storage
    values = {"enabled": False, **from_file, **values}
    for name, message in problems(values):
        variable = VARIABLES.get(name, name)
        if message.endswith(NO_TIERS):
            message = "the budget is enabled but has no limits: set at least one of RATE_LIMIT_PER_*"  # noqa: PLW2901 - names the variables
            if found:  # the file that may set them could not be read
                continue
        found.append((variable, message))
    refuse(found)
    return BudgetSettings(**values)


def _read_variables(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the settings in the environment by name, and the files that cannot be read."""
    values: dict[str, Any] = {}
    found: list[Problem] = []
    for name, variable in VARIABLES.items():
        try:
            text = read_variable(variable, environ) if name in FROM_FILES else environ.get(variable, "").strip()
        except ConfigError as error:
            found.append((error.field or variable, error.detail))
            continue
        if text:
            values[name] = _read_value(name, text)
    return values, found


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """List the unknown variables that begin with the prefix of a budget's variables."""
    known = {*VARIABLES.values(), *(f"{VARIABLES[name]}_FILE" for name in FROM_FILES), CONFIG_VARIABLE}
    return sorted(name for name in environ if name.upper().startswith(VARIABLE_PREFIX) and name not in known)


def _read_value(name: str, text: str) -> object:
    """Convert the text of a variable to its type. Text that cannot be converted is returned, and refused later."""
    if name in NUMERIC_SETTINGS:
        digits = text.replace("_", "")
        return int(digits) if digits.isdecimal() and len(digits) < 20 else text  # noqa: PLR2004 - beyond every quota
    if name == "enabled":
        return SWITCH_WORDS.get(text.lower(), text)
    if name == "batch_ttl" and text.isdecimal():
        return int(text)
    return text.lower() if name in ("strategy", "on_database_error") else text
