"""Reads settings from environment variables, and from the YAML file that RATE_LIMIT_CONFIG may name."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final

from tidegate._policy.config_value import BOOLEANS
from tidegate._policy.declared_settings import BOOLEAN, DURATION, INTEGER
from tidegate._policy.setting_values import read_variable
from tidegate._runtime.suggestions import hint
from tidegate.budget._settings.file import read_config
from tidegate.budget._settings.model import NO_TIERS, SETTINGS, BudgetSettings, Problem, problems, refuse
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

log: logging.Logger = logging.getLogger("tidegate.budget")

VARIABLES: Final = {name: option.variable for name, option in SETTINGS.items() if option.variable}
FROM_FILES: Final = tuple(name for name in VARIABLES if f"{name}_file" in SETTINGS)  # also RATE_LIMIT_…_FILE
CONFIG_VARIABLE: Final = "RATE_LIMIT_CONFIG"
VARIABLE_PREFIX: Final = "RATE_LIMIT_"
SWITCH_WORDS: Final = {**BOOLEANS, "1": True, "0": False}


def read_environment(environ: Mapping[str, str] | None = None, *, store: str | Path | None = None) -> BudgetSettings:
    """Read the settings; one error lists every wrong variable. An empty variable counts as not set.

    `store` is a path that a program gives in place of RATE_LIMIT_STORAGE_PATH; then it is an error if no variable
    configures the budget.
    """
    environ = os.environ if environ is None else environ
    for name in unknown_variables(environ):
        known = [variable.removeprefix(VARIABLE_PREFIX) for variable in (*VARIABLES.values(), CONFIG_VARIABLE)]
        near = hint(name[len(VARIABLE_PREFIX) :].upper(), known, VARIABLE_PREFIX)
        log.warning("unknown variable %s has no effect%s", name, near)
    values, found = _read_variables(environ)
    limits = [VARIABLES[name] for name in values if SETTINGS[name].kind is INTEGER]
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
    if store is not None:
        if not (found or from_file or values.keys() - {"store"}):
            message = f"the budget has no limits: {NO_TIERS}, or RATE_LIMIT_ENABLED and RATE_LIMIT_PER_* variables"
            raise ConfigError(message, field="per_minute")
        values["store"] = store
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
    kind = SETTINGS[name].kind
    if kind is INTEGER:
        digits = text.replace("_", "")
        return int(digits) if digits.isdecimal() and len(digits) < 20 else text  # noqa: PLR2004 - beyond every quota
    if kind is BOOLEAN:
        return SWITCH_WORDS.get(text.lower(), text)
    if kind is DURATION and text.isdecimal():
        return int(text)
    return text.lower() if "enum" in kind.schema else text
