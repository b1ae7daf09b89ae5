"""The Bus interface: publish, subscribe, and messages retained for later subscribers."""

from __future__ import annotations

import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar

from tidegate.bus._retained import MAX_KEY_BYTES, MAX_RETAINED_BYTES, MAX_VERSION
from tidegate.errors import Closed, ConfigError

if TYPE_CHECKING:
    from tidegate._runtime.clock import Clock

log: logging.Logger = logging.getLogger("tidegate.bus")
T = TypeVar("T")
MAX_SUBJECT: Final = 250  # characters
MAX_MESSAGE_BYTES: Final = 1_000_000  # NATS carries a little more by default
SUBJECT: Final = re.compile(r"[\w-]+(\.[\w-]+)*", re.ASCII)


class Event(NamedTuple):
    """A received message. `late`: it may be old, because it was retained or had to wait for a connection."""

    subject: str
    payload: bytes
    late: bool


class Retain(NamedTuple):
    """Retain a message for later subscribers, under a key, for at least `ttl` seconds (a day at most).

    A higher version replaces a lower one. The key has 1 to 512 bytes, the message at most 65,536.
    """

    key: str
    version: int
    ttl: float


Handler = Callable[[Event], object]
Synced = Callable[[Mapping[str, int]], object]


class Subscription:
    """Calls a handler for each message of a subject until it is closed."""

    def __init__(self, bus: Bus, subject: str, handler: Handler, synced: Synced | None) -> None:
        """Use `Bus.subscribe` to create one."""
        self.subject = subject
        self._bus = bus
        self._handler = handler
        self._synced = synced
        self.closed: bool = False

    def deliver(self, event: Event) -> None:
        """Call the handler; its exceptions are logged and do not affect other handlers."""
        self._call(self._handler, event)

    def sync(self, retained: Mapping[str, int]) -> None:
        """Report that all retained messages were delivered: their keys and versions."""
        if self._synced is not None:
            self._call(self._synced, retained)

    def _call(self, function: Callable[[T], object], argument: T) -> None:
        if self.closed:
            return
        try:
            function(argument)
        except Exception:
            self._bus.failed += 1
            log.exception("a subscriber of %s failed", self.subject)

    def close(self) -> None:
        """Stop delivering messages."""
        self.closed = True
        self._bus.forget(self)


class Bus(ABC):
    """Carries messages between agents.

    - Each subscriber receives each message of its subject that is published while it is subscribed, including those of
      its own bus: normally once, in the order of each publisher. Around a lost connection messages may be lost or
      arrive twice.
    - `publish` and `subscribe` never wait for a server: messages are queued, up to a maximum; when the queue is full
      the oldest is dropped and counted. A lost connection is retried without limit.
    - A new subscriber first receives the retained messages, and so does every subscriber after a reconnect, marked
      `late`. For each key the highest version is retained. Then `synced` is called with the retained versions, so that
      a subscriber with a newer version can publish it again.
    - Handlers run on the bus's thread, or on the publisher's: keep them short. Exceptions are logged.
    """

    clock: Clock
    failed: int = 0  # handlers that raised

    @abstractmethod
    def publish(self, subject: str, payload: bytes, retain: Retain | None = None, *, late: bool = False) -> None:
        """Send a message to the subscribers of a subject; `late` marks a message that is not new."""

    @abstractmethod
    def subscribe(self, subject: str, handler: Handler, synced: Synced | None = None) -> Subscription:
        """Call a handler for each message of a subject."""

    @abstractmethod
    def forget(self, subscription: Subscription) -> None:
        """Remove a subscription that was closed."""

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether messages can be sent now."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Wait until connected, at most `seconds`; returns whether it is."""

    @abstractmethod
    def metrics(self) -> dict[str, int]:
        """Return counters of messages sent, received and dropped, and of connections made."""

    @abstractmethod
    def close(self) -> None:
        """Send queued messages if connected, and close everything. A second call does nothing."""

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
    raise ConfigError(f"must be words joined by dots, such as 'ratelimit.capacity', not {subject!r}", field="subject")


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
    """Return the length of a string in UTF-8; 0 for other types and for lone surrogates."""
    try:
        return len(text.encode()) if isinstance(text, str) else 0
    except UnicodeEncodeError:
        return 0


def closed_bus() -> Closed:
    """Return the error of a closed bus."""
    return Closed("the bus is closed")
