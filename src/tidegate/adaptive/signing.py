"""Messages between agents: JSON objects, signed where a secret is shared, and then obeyed only while they are recent.

The signature is the HMAC-SHA256, in hexadecimal, of the message without it: JSON with sorted keys and no spaces, ASCII
only. A signed message carries its `timestamp` and a `nonce`, so whoever records one and sends it again gains little:

- One whose timestamp is further back than `MAX_AGE` is too old, and one that is further ahead than `MAX_CLOCK_SKEW` is
  too early: both are ignored. Nothing that an agent announces is in force for longer than `MAX_AGE`.
- One that is older than `MAX_CLOCK_SKEW` counts from its timestamp, however it comes: as much of it as would be in
  force had it been heard in time.
- One that was heard before, live or retained, is ignored when it comes again as a new one.

Messages that are not signed are not checked for their age: anybody could have written any time into them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from tidegate.adaptive.capacity import LONGEST_FREEZE
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from tidegate.clock import Clock

MAX_CLOCK_SKEW: Final = 300 * SECOND  # by which the clocks of agents that share a secret may differ
MAX_AGE: Final = LONGEST_FREEZE + MAX_CLOCK_SKEW
MAX_REMEMBERED: Final = 10_000  # signatures of messages that were heard
NONCE_BYTES: Final = 16
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Verdict = Literal["new", "old", "expired", "replayed"]


class MalformedError(ValueError):
    """A message that cannot be read, or is not from somebody who knows the secret."""


class SignedMessage(NamedTuple):
    """The fields of a message, without its signature; the signature is empty where there is no secret."""

    fields: dict[str, Any]
    signature: str


def read_secret(secret: str | bytes | None) -> bytes | None:
    """Take a shared secret; an empty one would protect nothing."""
    if secret is None:
        return None
    if not isinstance(secret, (str, bytes)) or not secret:
        raise ConfigError("must be a text that all agents share, not an empty one", field="secret")
    return secret.encode() if isinstance(secret, str) else secret


def write_signed(fields: dict[str, Any], secret: str | bytes | None) -> bytes:
    """Write a message; if there is a secret, with a nonce, and signed."""
    key = read_secret(secret)
    if key is not None:
        fields = {"nonce": secrets.token_hex(NONCE_BYTES), **fields}
        fields["signature"] = _signature(fields, key)
    return json.dumps(fields, separators=(",", ":")).encode()


def read_signed(text: bytes | str, secret: str | bytes | None, longest: int) -> SignedMessage:
    """Read a message; with a secret, only one that was signed with it."""
    if len(text) > longest:
        raise MalformedError(f"a message of {len(text)} bytes is too long")
    key = read_secret(secret)
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise MalformedError("not a JSON object")
        given = fields.pop("signature", None)
        if key is None:
            return SignedMessage(fields, "")
        right = _signature(fields, key)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not JSON: {error}" if not isinstance(error, MalformedError) else str(error)) from None
    if not isinstance(given, str) or not given.isascii() or not hmac.compare_digest(given, right):
        raise MalformedError("not signed with our secret")
    return SignedMessage(fields, right)


def _signature(fields: dict[str, Any], key: bytes) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def write_instant(micros: int) -> str:
    """Write an instant, in microseconds since 1970, as a timestamp of RFC 3339."""
    instant = EPOCH + timedelta(microseconds=micros)
    return instant.isoformat(timespec="microseconds").replace("+00:00", "Z")


def read_instant(value: object) -> datetime:
    """Read a timestamp of RFC 3339; without a zone it is in UTC."""
    try:
        instant = datetime.fromisoformat(value)  # type: ignore[arg-type]  # what is no text is refused below
        return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise MalformedError(f"timestamp must be a date and time as of RFC 3339, not {value!r}") from None


class MessageSigner:
    """Signs the messages of one agent, and judges those of others. Thread-safe."""

    def __init__(self, secret: str | bytes | None, clock: Clock) -> None:
        """Without a secret, messages are neither signed nor judged."""
        self.secret = read_secret(secret)
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[str, None] = {}

    @property
    def tag(self) -> str:
        """Tell swarms with different secrets apart without telling the secret."""
        return "" if self.secret is None else hmac.new(self.secret, b"tag", hashlib.sha256).hexdigest()[:16]

    def write(self, fields: dict[str, Any]) -> bytes:
        """Write a message of this instant."""
        if self.secret is not None:
            fields = {**fields, "timestamp": write_instant(self._clock.ns() // 1000)}
        return write_signed(fields, self.secret)

    def read_new(self, text: bytes | str, longest: int) -> dict[str, Any]:
        """Read a message that counts only while it is new."""
        fields, signature = read_signed(text, self.secret, longest)
        if self.secret is not None:
            instant = (read_instant(fields.get("timestamp")) - EPOCH) // timedelta(microseconds=1)
            verdict = self.judge(signature, instant, late=False)
            if verdict != "new":
                raise MalformedError(f"not new, but {verdict}")
        return fields

    def judge(self, signature: str, instant: int, *, late: bool) -> Verdict:
        """Tell how a message that was signed is to be taken; `late`: it is known to be no new one."""
        if self.secret is None:
            return "old" if late else "new"
        age = self._clock.ns() // 1000 - instant
        if not -MAX_CLOCK_SKEW <= age <= MAX_AGE:
            return "expired"
        with self._lock:
            known = signature in self._heard
            self._heard[signature] = None
            if len(self._heard) > MAX_REMEMBERED:
                del self._heard[next(iter(self._heard))]
        if late:
            return "old"
        if known:
            return "replayed"
        return "new" if age <= MAX_CLOCK_SKEW else "old"
