"""A secret: usable, but never shown, copied to disk or compared in a way that tells anything."""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NoReturn

from tidegate.errors import RateLimitError

if TYPE_CHECKING:
    from collections.abc import Callable

FINGERPRINT_LENGTH: Final = 16  # hexadecimal digits: enough to tell keys apart, far from enough to find one


class Secret:
    """Text that only `reveal` shows: not repr, str, format, vars, pickle or a copy to another process."""

    __slots__ = ("_reveal",)
    _reveal: Callable[[], str]

    def __init__(self, text: str) -> None:
        """Keep the text in memory only, out of reach of whatever prints attributes."""

        def reveal() -> str:
            return text

        self._reveal = reveal

    def reveal(self) -> str:
        """Give the text, to put it into a request."""
        return self._reveal()

    @property
    def fingerprint(self) -> str:
        """Tell this secret from others without telling what it is."""
        return fingerprint(self.reveal())

    def __eq__(self, other: object) -> bool:
        """Compare in constant time."""
        return isinstance(other, Secret) and hmac.compare_digest(self.reveal().encode(), other.reveal().encode())

    def __hash__(self) -> int:
        """Hash what may be known."""
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        """Show that there is one, not which."""
        return "<Secret>"

    def __reduce__(self) -> NoReturn:
        """Refuse to be written anywhere."""
        raise RateLimitError("a secret stays in memory: load the provider's file again in the other process")

    def __copy__(self) -> Secret:
        """Stay the same object."""
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        """Stay the same object."""
        return self


def fingerprint(text: str) -> str:
    """Tell a credential from others: the beginning of a hash that is not used for anything else."""
    return sha256(b"tidegate credential\0" + text.encode("utf-8", "surrogateescape")).hexdigest()[:FINGERPRINT_LENGTH]
