"""What agents tell each other: a CapacityUpdate, as JSON, signed where a secret is shared.

    {"resource": "api", "agent_id": "agent-1", "new_capacity": 50, "reason": "received 429 response",
     "timestamp": "2026-11-16T01:33:32.120000Z", "epoch": 1794792812120000, "retry_after": 12.0, "signature": "…"}

The first five are all that is needed. Without `epoch`, the timestamp stands for it. The signature is the HMAC-SHA256,
in hexadecimal, of the message without it: JSON with sorted keys and no spaces, ASCII only.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

from tidegate.core.bounds import MAX, SECOND
from tidegate.errors import ConfigError

LONGEST: Final = 20_000  # bytes of an update
LONGEST_NAME: Final = 1024
HIGHEST: Final = 2**52  # of epochs that others send: there must be room above, for ours (as a time: the year 2112)
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class MalformedError(ValueError):
    """A message that is not an update, or not from somebody who knows the secret."""


@dataclass(frozen=True, slots=True)
class CapacityUpdate:
    """Says that one agent has reduced a resource to `new_capacity`, why and when.

    `epoch` orders updates without trusting clocks (see `capacity`). `retry_after` asks for no calls at all for so many
    seconds.
    """

    resource: str
    agent_id: str
    new_capacity: int
    reason: str
    timestamp: datetime
    epoch: int | None = None
    retry_after: float | None = None

    @property
    def at(self) -> int:
        """The timestamp in microseconds since 1970."""
        return (self.timestamp - EPOCH) // timedelta(microseconds=1)

    @property
    def order(self) -> int:
        """The epoch, or the timestamp of a sender that knows none."""
        return self.epoch if self.epoch is not None else max(1, min(HIGHEST, self.at))

    @property
    def pause(self) -> int:
        """The microseconds without calls that it asks for."""
        return 0 if self.retry_after is None else round(self.retry_after * SECOND)

    def to_json(self, secret: str | bytes | None = None) -> bytes:
        """Write the message, signed if there is a secret."""
        fields: dict[str, Any] = {
            "resource": self.resource,
            "agent_id": self.agent_id,
            "new_capacity": self.new_capacity,
            "reason": self.reason,
            "timestamp": self.timestamp.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        }
        if self.epoch is not None:
            fields["epoch"] = self.epoch
        if self.retry_after is not None:
            fields["retry_after"] = self.retry_after
        return write_signed(fields, secret)

    @classmethod
    def from_json(cls, text: bytes | str, secret: str | bytes | None = None) -> Self:
        """Read a message; MalformedError says what is wrong with it. Fields that are not known are left alone."""
        fields = read_signed(text, secret, LONGEST)
        capacity, epoch, pause = fields.get("new_capacity"), fields.get("epoch"), fields.get("retry_after")
        if capacity is None or not _whole(capacity):
            raise MalformedError(f"new_capacity must be a whole number from 1, not {capacity!r}")
        if epoch is not None and not (_whole(epoch) and epoch <= HIGHEST):
            raise MalformedError(f"epoch must be a whole number from 1 to 2**52, not {epoch!r}")
        if pause is not None and not (_number(pause) and 0 <= pause <= MAX // SECOND):
            raise MalformedError(f"retry_after must be a number of seconds, not {pause!r}")
        return cls(
            resource=_text(fields, "resource"),
            agent_id=_text(fields, "agent_id"),
            new_capacity=capacity,
            reason=_text(fields, "reason", needed=False),
            timestamp=_instant(fields),
            epoch=epoch,
            retry_after=pause,
        )


def read_secret(secret: str | bytes | None) -> bytes | None:
    """Take a shared secret; an empty one would protect nothing."""
    if secret is None:
        return None
    if not isinstance(secret, (str, bytes)) or not secret:
        raise ConfigError("must be a text that all agents share, not an empty one", field="secret")
    return secret.encode() if isinstance(secret, str) else secret


def write_signed(fields: dict[str, Any], secret: str | bytes | None) -> bytes:
    """Write a message, signed if there is a secret."""
    key = read_secret(secret)
    if key is not None:
        fields = {**fields, "signature": _signature(fields, key)}
    return json.dumps(fields, separators=(",", ":")).encode()


def read_signed(text: bytes | str, secret: str | bytes | None, longest: int) -> dict[str, Any]:
    """Read a message; with a secret, only one that was signed with it."""
    if len(text) > longest:
        raise MalformedError(f"a message of {len(text)} bytes is too long")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise MalformedError("not a JSON object")
    signature = fields.pop("signature", None)
    key = read_secret(secret)
    if key is not None:
        given = signature if isinstance(signature, str) and signature.isascii() else ""
        if not hmac.compare_digest(given, _signature(fields, key)):
            raise MalformedError("not signed with our secret")
    return fields


def _signature(fields: dict[str, Any], key: bytes) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(fields: dict[str, Any], name: str, *, needed: bool = True) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str) or len(value) > LONGEST_NAME or (needed and not value):
        raise MalformedError(f"{name} must be text of up to {LONGEST_NAME} characters, not {value!r}")
    return value


def _instant(fields: dict[str, Any]) -> datetime:
    value = fields.get("timestamp")
    try:
        instant = datetime.fromisoformat(value)  # type: ignore[arg-type]  # what is no text is refused below
        return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise MalformedError(f"timestamp must be a date and time as of RFC 3339, not {value!r}") from None
