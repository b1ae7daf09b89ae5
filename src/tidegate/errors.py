"""What can go wrong, as one tree.

    RateLimitError                  everything tidegate raises on purpose
    ├── ConfigError(ValueError)     a limit, policy, file or argument that makes no sense; says what and where
    ├── Denied                      waiting ended without a permit; carries the last Decision
    ├── StoreUnavailable            the store could not decide; says what was attempted and what to do
    ├── Closed                      the limiter was closed, before the call or while it waited
    └── ResourceUnknown(KeyError)   no capacity was ever set for this resource

A plain denial is not an error: `try_acquire` answers with a Decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.core.decision import Decision

__all__ = ["Closed", "ConfigError", "Denied", "RateLimitError", "ResourceUnknown", "StoreUnavailable"]


class RateLimitError(Exception):
    """Base of every exception that tidegate raises on purpose."""


class ConfigError(RateLimitError, ValueError):
    """Configuration or an argument that cannot be used.

    `file`, `line` and `field` say where the mistake stands when it came from a file; the message repeats them.
    """

    def __init__(
        self, message: str, *, file: str | None = None, line: int | None = None, field: str | None = None
    ) -> None:
        """Put the place, as far as it is known, in front of the message."""
        place = ":".join(str(part) for part in (file, line) if part is not None)
        super().__init__(": ".join(part for part in (place, field, message) if part))
        self.file = file
        self.line = line
        self.field = field


class Denied(RateLimitError):
    """No permit within the deadline, or never: `decision.retry_after` is None when the cost can never fit."""

    def __init__(self, message: str, decision: Decision) -> None:
        """Carry the decision that said no."""
        super().__init__(message)
        self.decision = decision

    def __reduce__(self) -> tuple[type[Denied], tuple[str, Decision]]:
        """Travel between processes."""
        return type(self), (str(self), self.decision)


class StoreUnavailable(RateLimitError):
    """The store could not be asked; nothing is known to have been charged."""


class Closed(RateLimitError):
    """The limiter is closed."""


class ResourceUnknown(RateLimitError, KeyError):
    """No capacity is configured for this resource."""

    def __str__(self) -> str:
        """Show the message as written (KeyError would quote it)."""
        return str(self.args[0]) if self.args else ""
