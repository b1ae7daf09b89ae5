"""How commands find a running service: by `control.json` in its data folder, which only its owner can read."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import StoreUnavailable

if TYPE_CHECKING:
    from pathlib import Path

CONTROL_FILE: Final = "control.json"


def read_control_file(data: Path) -> dict[str, Any]:
    """Read where the service of a data folder listens; raises StoreUnavailable if there is none."""
    try:
        found = json.loads((data / CONTROL_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise no_service_error(data, error) from None
    if not isinstance(found, dict):
        raise no_service_error(data, f"{CONTROL_FILE} is not a mapping")
    return found


def has_own_control_file(data: Path) -> bool:
    """Return whether a data folder has a control file of this user: a token may be sent to where it says."""
    try:
        owner = (data / CONTROL_FILE).stat().st_uid
    except OSError:
        return False
    user: int = getattr(os, "geteuid", lambda: owner)()  # not on Windows
    return owner == user


def no_service_error(data: Path, why: object) -> StoreUnavailable:
    """Build the error for a data folder that no running service uses."""
    return StoreUnavailable(
        f"no service responds for the data folder {data} ({why}): start one with 'tidegate start --data {data}', "
        "or use --data with the folder of a running one"
    )
