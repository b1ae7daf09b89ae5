"""What a Bus is: publish and subscribe, and the messages that a late joiner still needs."""

from __future__ import annotations

import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from tidegate.bus.retained import MAX_KEY_BYTES, MAX_RETAINED_BYTES, MAX_VERSION
from tidegate.errors import Closed, ConfigError

if TYPE_CHECKING:
    from tidegate.clock import Clock

log = logging.getLogger(__name__)
MAX_SUBJECT: Final = 250  # characters
MAX_MESSAGE_BYTES: Final = 1_000_000  # NATS carries a little more by default
SUBJECT: Final = re.compile(r"[\w-]+(\.[\w-]+)*", re.ASCII)


class Event(NamedTuple):
    """A message that arrived. `late`: it may be old, since it was retained or had to wait for a connection."""

    subject: str
    payload: bytes
    late: bool


class Retain(NamedTuple):
    """Keep a message for those who join later, under a key, for at least `ttl` seconds (a day at most).

    A higher version replaces a lower. The key has 1 to 512 bytes, the message at most 65,536.
    """

    key: str
    version: int
    ttl: float


Handler = Callable[[Event], object]
Synced = Callable[[Mapping[str, int]], object]


class Subscription:
    """Calls a handler for each message of a subject until it is closed."""

    def __init__(self, bus: Bus, subject: str, handler: Handler, synced: Synced | None) -> None:
        """Made by `Bus.subscribe`."""
        self.subject = subject
        self._bus = bus
        self._handler = handler
        self._synced = synced
        self.closed = False

    def deliver(self, event: Event) -> None:
        """Call the handler; one that raises harms nobody else."""
        if self.closed:
            return
        try:
            self._handler(event)
        except Exception:
            self._bus.failed += 1
            log.exception("a subscriber of %s failed", self.subject)

    def sync(self, retained: Mapping[str, int]) -> None:
        """Tell that all retained messages were delivered: their keys and versions."""
        if self.closed or self._synced is None:
            return
        try:
            self._synced(retained)
        except Exception:
            self._bus.failed += 1
            log.exception("a subscriber of %s failed", self.subject)

    def close(self) -> None:
        """Deliver nothing more."""
        self.closed = True
        self._bus.forget(self)


class Bus(ABC):
    """Carries messages between agents.

    - Each subscriber gets each message of its subject that is published while it is there, the publisher's own
      included: at most once in the usual course, in the order of each publisher. Around a lost connection messages may
      be missed or come twice.
    - `publish` and `subscribe` never wait for a server: messages stand in a bounded queue, the oldest is dropped
      (counted) when it is full. A connection is tried again for ever.
    - A new subscriber first gets the retained messages, and so does everyone after a reconnect, marked `late`. Of one
      key the highest version is retained. Then `synced` is called with what was retained, so that somebody who knows
      more can publish it again.
    - Handlers run on the bus's thread, or on the publisher's: they should be quick. One that raises is logged.
    """

    clock: Clock
    failed: int = 0  # handlers that raised

    @abstractmethod
    def publish(self, subject: str, payload: bytes, retain: Retain | None = None, *, late: bool = False) -> None:
        """Send a message to the subscribers of a subject; `late` marks one that is not new."""

    @abstractmethod
    def subscribe(self, subject: str, handler: Handler, synced: Synced | None = None) -> Subscription:
        """Have a handler called for each message of a subject."""

    @abstractmethod
    def forget(self, subscription: Subscription) -> None:
        """Drop a subscription that was closed."""

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether messages can be sent right now."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Wait until connected, so many seconds at most; tell whether it is."""

    @abstractmethod
    def metrics(self) -> dict[str, int]:
        """Count what was sent, received, dropped, and how often a connection was made."""

    @abstractmethod
    def close(self) -> None:
        """Send what is queued if that is possible at once, and let go of everything. A second time does nothing."""

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def check_subject(subject: object) -> str:
    """Refuse a subject that not every bus can carry."""
    if isinstance(subject, str) and len(subject) <= MAX_SUBJECT and SUBJECT.fullmatch(subject):
        return subject
    raise ConfigError(f"must be words joined by dots such as 'ratelimit.capacity', not {subject!r}", field="subject")


def check_message(payload: bytes, retain: Retain | None) -> None:
    """Refuse a message that not every bus can carry, or retain."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ConfigError(f"must be at most {MAX_MESSAGE_BYTES} bytes, not {len(payload)}", field="payload")
    if retain is None:
        return
    if len(payload) > MAX_RETAINED_BYTES:
        message = f"must be at most {MAX_RETAINED_BYTES} bytes to be retained, not {len(payload)}"
        raise ConfigError(message, field="payload")
    key, version, ttl = retain
    if not 1 <= _utf8_bytes(key) <= MAX_KEY_BYTES:
        raise ConfigError(f"must be a string of 1 to {MAX_KEY_BYTES} bytes in UTF-8", field="key")
    if not isinstance(version, int) or not 1 <= version <= MAX_VERSION:
        raise ConfigError(f"must be an integer from 1 to {MAX_VERSION}, not {version!r}", field="version")
    if not isinstance(ttl, (int, float)) or not (math.isfinite(ttl) and ttl > 0):
        raise ConfigError(f"must be a positive number of seconds, not {ttl!r}", field="ttl")


def _utf8_bytes(text: object) -> int:
    """Count the bytes of a string in UTF-8; 0 for what is no string, or has a lone surrogate."""
    try:
        return len(text.encode()) if isinstance(text, str) else 0
    except UnicodeEncodeError:
        return 0


def closed_bus() -> Closed:
    """Say that the bus is closed."""
    return Closed("the bus is closed")
