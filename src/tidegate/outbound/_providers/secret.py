"""A secret that is never shown or written to disk, and is compared in constant time."""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NoReturn

from tidegate.errors import RateLimitError

if TYPE_CHECKING:
    from collections.abc import Callable

FINGERPRINT_LENGTH: Final = 16  # hexadecimal digits: enough to distinguish keys, too few to reveal one


class Secret:
    """A string that only `reveal` returns: not repr, str, format, vars, pickle or a copy to another process."""

    __slots__ = ("_reveal",)
    _reveal: Callable[[], str]

    def __init__(self, text: str) -> None:
        """Keep the string in a closure, where code that prints attributes does not find it."""

        def reveal() -> str:
            return text

        self._reveal = reveal

    def reveal(self) -> str:
        """Return the string, to send it in a request."""
        return self._reveal()

    @property
    def fingerprint(self) -> str:
        """A hash prefix that distinguishes this secret from others without revealing it."""
        return fingerprint(self.reveal())

    def __eq__(self, other: object) -> bool:
        """Compare in constant time."""
        return isinstance(other, Secret) and hmac.compare_digest(self.reveal().encode(), other.reveal().encode())

    def __hash__(self) -> int:
        """Hash the fingerprint."""
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        """Show that this is a secret, not its value."""
        return "<Secret>"

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled."""
        raise RateLimitError("a secret cannot be pickled: load the provider's file in the other process")

    def __copy__(self) -> Secret:
        """Return the same object."""
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        """Return the same object."""
        return self


def fingerprint(text: str) -> str:
    """Return the fingerprint of a credential: the prefix of a hash with its own label."""
    return sha256(b"tidegate credential\0" + text.encode("utf-8", "surrogateescape")).hexdigest()[:FINGERPRINT_LENGTH]
