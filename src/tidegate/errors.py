"""The exceptions of tidegate.

    RateLimitError                  base class of all exceptions that tidegate raises
    ├── ConfigError(ValueError)     an invalid limit, policy, file or argument
    ├── Denied                      no permit within the timeout; holds the last Decision
    ├── StoreUnavailable            the store could not decide
    ├── ValueConflict               a condition of a value to write did not hold; nothing was charged or written
    ├── CollectionFull              a listed collection has as many values as it may have; as above
    ├── Closed                      the limiter was closed before or during the call
    └── ResourceUnknown(KeyError)   no capacity is configured for the resource

A denial is not an error: `try_acquire` returns a Decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tidegate.core._decision import Decision
    from tidegate.stores._values import Value, Write

__all__ = [
    "Closed",
    "CollectionFull",
    "ConfigError",
    "Denied",
    "RateLimitError",
    "ResourceUnknown",
    "StoreUnavailable",
    "ValueConflict",
]


class RateLimitError(Exception):
    """Base class of all exceptions that tidegate raises."""


class ConfigError(RateLimitError, ValueError):
    """Invalid configuration or an invalid argument.

    `file`, `line` and `field` locate the error, as far as they are known; the message starts with them. `detail` is the
    message without them.
    """

    def __init__(
        self, message: str, *, file: str | None = None, line: int | None = None, field: str | None = None
    ) -> None:
        """Prefix the message with the location."""
        place = ":".join(str(part) for part in (file, line) if part is not None)
        super().__init__(": ".join(part for part in (place, field, message) if part))
        self.detail = message
        self.file = file
        self.line = line
        self.field = field


class Denied(RateLimitError):
    """No permit within the timeout; `decision.retry_after` is None if the cost can never fit.

    `node` is the node of a run that denied the call (see `tidegate.agents`); None: no run did.
    """

    def __init__(self, message: str, decision: Decision, node: str | None = None) -> None:
        """Keep the decision that denied the call."""
        super().__init__(message)
        self.decision = decision
        self.node = node

    def __reduce__(self) -> tuple[type[Denied], tuple[Any, ...]]:
        """Support pickling."""
        return type(self), (str(self), self.decision, self.node)


class StoreUnavailable(RateLimitError):
    """The store is unavailable; nothing is known to have been charged.

    `shard` is the part of the store that is unavailable (see `Store.shard`); None: all of it. If it `concerns_key`, the
    store is available, but cannot use a key of this call, and has charged nothing.
    """

    shard: Hashable = None
    concerns_key: bool = False


class ValueConflict(RateLimitError):
    """The condition of a `write` did not hold: `found` is the value that is stored, or None."""

    def __init__(self, write: Write, found: Value | None) -> None:
        """Keep both."""
        super().__init__(f"the value {write.name!r} of {write.collection.name!r} is not what the write expects")
        self.write = write
        self.found = found

    def __reduce__(self) -> tuple[type[ValueConflict], tuple[Write, Value | None]]:
        """Support pickling."""
        return type(self), (self.write, self.found)


class CollectionFull(RateLimitError):
    """A listed collection has as many values as it may have."""

    def __init__(self, write: Write) -> None:
        """Name the collection."""
        super().__init__(f"the collection {write.collection.name!r} has as many values as it may have: delete some")
        self.write = write

    def __reduce__(self) -> tuple[type[CollectionFull], tuple[Write]]:
        """Support pickling."""
        return type(self), (self.write,)


class Closed(RateLimitError):
    """The limiter is closed."""


class ResourceUnknown(RateLimitError, KeyError):
    """No capacity is configured for this resource."""

    def __str__(self) -> str:
        """Return the message unquoted (KeyError would quote it)."""
        return str(self.args[0]) if self.args else ""
