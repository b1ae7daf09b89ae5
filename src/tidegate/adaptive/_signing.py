"""Messages between agents: JSON objects, signed if a secret is shared, and then accepted only while recent.

The signature is the hexadecimal HMAC-SHA256 of the message without it: JSON with sorted keys and no spaces, ASCII only.
A signed message contains its `timestamp`, `subject` and a `nonce`, so replaying a recorded message has little effect:

- A message that was signed for another subject, and so for another namespace, is refused.

- A message whose timestamp is older than `MAX_AGE`, or further ahead than `MAX_CLOCK_SKEW`, is ignored. Nothing that an
  agent announces is in force for longer than `MAX_AGE`.
- A message older than `MAX_CLOCK_SKEW` counts from its timestamp, however it was delivered: it has the effect that it
  would have now, had it been received in time.
- A message that was received before, live or retained, is ignored when it arrives again as a new one.

The age of unsigned messages is not checked: any client could have written any timestamp.

Unknown fields are ignored, so later versions of tidegate can add some. A message without the field `version` has
version 1. If a later version changes the meaning of fields, its messages have a higher one, and are refused.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from tidegate._runtime.fork import fork_safe
from tidegate.adaptive._capacity import MAX_FREEZE
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from tidegate._runtime.clock import Clock

MAX_CLOCK_SKEW: Final = 300 * SECOND  # between agents that share a secret
MAX_AGE: Final = MAX_FREEZE + MAX_CLOCK_SKEW
MAX_REMEMBERED: Final = 10_000  # signatures of received messages
NONCE_BYTES: Final = 16
MESSAGE_VERSION: Final = 1  # the highest that is read
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

MessageAge = Literal["new", "old", "expired", "replayed"]


class MalformedError(ValueError):
    """A message that cannot be parsed, or is not signed with the secret."""


class SignedMessage(NamedTuple):
    """The fields of a message without its signature; the signature is empty if there is no secret."""

    fields: dict[str, Any]
    signature: str


def read_secret(secret: str | bytes | None) -> bytes | None:
    """Return a shared secret as bytes; an empty one is refused."""
    if secret is None:
        return None
    if not isinstance(secret, (str, bytes)) or not secret:
        raise ConfigError("must be a non-empty string or bytes that all agents share", field="secret")
    return secret.encode() if isinstance(secret, str) else secret


def write_signed(fields: dict[str, Any], secret: str | bytes | None, subject: str) -> bytes:
    """Write a message for a subject; with a secret, add the subject, a nonce and a signature."""
    key = read_secret(secret)
    if key is not None:
        fields = {"nonce": secrets.token_hex(NONCE_BYTES), **fields, "subject": subject}
        fields["signature"] = _signature(fields, key)
    return json.dumps(fields, separators=(",", ":")).encode()


def read_signed(text: bytes | str, secret: str | bytes | None, max_bytes: int, subject: str) -> SignedMessage:
    """Read a message that arrived on a subject; with a secret, it must be signed with it, for this subject."""
    if len(text) > max_bytes:
        raise MalformedError(f"the message has {len(text)} bytes, more than {max_bytes}")
    key = read_secret(secret)
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise MalformedError("the message is not a JSON object")
        if fields.get("version", MESSAGE_VERSION) != MESSAGE_VERSION:
            raise MalformedError(
                f"the message has version {fields['version']!r}, from a newer tidegate; "
                f"this tidegate reads version {MESSAGE_VERSION}: upgrade it"
            )
        given = fields.pop("signature", None)
        if key is None:
            return SignedMessage(fields, "")
        expected = _signature(fields, key)
    except (ValueError, RecursionError) as error:
        raise MalformedError(
            f"the message is not JSON: {error}" if not isinstance(error, MalformedError) else str(error)
        ) from None
    if not isinstance(given, str) or not given.isascii() or not hmac.compare_digest(given, expected):
        raise MalformedError("the message is not signed with the shared secret")
    if fields.get("subject") != subject:
        raise MalformedError(f"the message was signed for the subject {fields.get('subject')!r}, not for {subject!r}")
    return SignedMessage(fields, expected)


def _signature(fields: dict[str, Any], key: bytes) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def write_instant(micros: int) -> str:
    """Write an instant, in microseconds since 1970, as an RFC 3339 timestamp."""
    instant = EPOCH + timedelta(microseconds=micros)
    return instant.isoformat(timespec="microseconds").replace("+00:00", "Z")


def read_instant(value: object) -> datetime:
    """Read an RFC 3339 timestamp; without a zone it is UTC."""
    try:
        instant = datetime.fromisoformat(value)  # type: ignore[arg-type]  # a TypeError is handled below
        return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise MalformedError(f"timestamp must be an RFC 3339 date and time, not {value!r}") from None


class MessageSigner:
    """Signs the messages of one agent, and checks the age of received ones. Thread-safe."""

    def __init__(self, secret: str | bytes | None, clock: Clock) -> None:
        """Without a secret, messages are neither signed nor checked."""
        self.secret: bytes | None = read_secret(secret)
        self._clock = clock
        self._lock = fork_safe(threading.Lock())
        self._received: dict[str, None] = {}

    @property
    def tag(self) -> str:
        """A hash that distinguishes swarms with different secrets without revealing the secret."""
        return "" if self.secret is None else hmac.new(self.secret, b"tag", hashlib.sha256).hexdigest()[:16]

    def write(self, fields: dict[str, Any], subject: str) -> bytes:
        """Write a message for a subject, with the current time."""
        if self.secret is not None:
            fields = {**fields, "timestamp": write_instant(self._clock.ns() // 1000)}
        return write_signed(fields, self.secret, subject)

    def read_new(self, text: bytes | str, max_bytes: int, subject: str) -> dict[str, Any]:
        """Read a message that arrived on a subject and is valid only while it is new."""
        fields, signature = read_signed(text, self.secret, max_bytes, subject)
        if self.secret is not None:
            instant = (read_instant(fields.get("timestamp")) - EPOCH) // timedelta(microseconds=1)
            age_class = self.classify(signature, instant, late=False)
            if age_class != "new":
                raise MalformedError(f"the message is {age_class}")
        return fields

    def classify(self, signature: str, instant: int, *, late: bool) -> MessageAge:
        """Classify a signed message by its age; `late`: it is known to be old."""
        if self.secret is None:
            return "old" if late else "new"
        age = self._clock.ns() // 1000 - instant
        if not -MAX_CLOCK_SKEW <= age <= MAX_AGE:
            return "expired"
        with self._lock:
            known = signature in self._received
            self._received[signature] = None
            if len(self._received) > MAX_REMEMBERED:
                del self._received[next(iter(self._received))]
        if late:
            return "old"
        if known:
            return "replayed"
        return "new" if age <= MAX_CLOCK_SKEW else "old"
