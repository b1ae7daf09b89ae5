"""The keys that sign reservation ids.

Every client holds ids and a decision token, so no key may be derived from either: a client that can sign an id can
refund permits that were never charged. The keys come from the setting `reservation_secret`; its first secret signs, all
of them verify, so that secrets can be rotated. Without the setting, the first process that needs a key generates one
and stores it (as a write-once entry, see `write_once`), so that all processes and services on that store use the same.
A store in memory is not shared: this process keeps its key.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from tidegate.core.bounds import SECOND
from tidegate.core.decision import LocalDecision
from tidegate.service.decisions.write_once import (
    NUMBER_BYTES,
    NUMBER_LIMIT,
    read_numbers,
    was_written,
    write_once_policy,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.stores import Store

SECRET_TTL: Final = 3650 * 86_400.0  # how long a store keeps the generated secret
SECRET_NUMBERS: Final = 6  # numbers that make up the secret: 288 bits
SECRET_POLICY: Final = write_once_policy("tidegate.secret", SECRET_TTL, SECRET_NUMBERS)
ENTRY_KEY: Final = "reservations"
REFRESH_INTERVAL: Final = 60 * SECOND  # how often the secret is read again: the store may have been emptied
RETRY_INTERVAL: Final = SECOND  # ... while the store is unavailable
DERIVATION_LABEL: Final = b"reservation id"

IN_MEMORY: Final[WeakKeyDictionary[Store, bytes]] = WeakKeyDictionary()


class SigningKeys:
    """The keys of one service: from the settings, or the one that its store keeps."""

    def __init__(self, store: Store, configured: Sequence[str] = ()) -> None:
        """Use the configured secrets, if there are any."""
        self._store = store
        self._keys = tuple(derive_key(secret.encode()) for secret in configured)
        if not configured and store.instant:
            self._keys = (IN_MEMORY.setdefault(store, secrets.token_bytes(32)),)
        self._fixed = bool(self._keys)
        self._due: int | None = None  # when the secret is read again, in steady time
        self._numbers = tuple(secrets.randbelow(NUMBER_LIMIT) for _ in range(SECRET_NUMBERS))

    async def all(self) -> tuple[bytes, ...]:
        """Return all keys: the first signs, each verifies."""
        now = self._store.clock.steady()
        if not self._fixed and (self._due is None or now >= self._due):
            await self._refresh(now)
        return self._keys

    async def _refresh(self, now: int) -> None:
        """Store our secret if the store has none, and use the stored one.

        A store that was emptied gets the former secret back. If the store is unavailable from the start, this process
        signs with its own secret, and later still verifies with it.
        """
        entry = (await self._store.apply_async("acquire", ((SECRET_POLICY, ENTRY_KEY, (1, *self._numbers)),)))[0]
        lost = isinstance(entry, LocalDecision)
        self._due = now + (RETRY_INTERVAL if lost else REFRESH_INTERVAL)
        if not lost and was_written(entry):
            self._numbers = read_numbers(entry)
        current = derive_key(b"".join(number.to_bytes(NUMBER_BYTES, "big") for number in self._numbers))
        former = [key for key in self._keys if key != current]
        self._keys = (current, *former[:1])


def derive_key(secret: bytes) -> bytes:
    """Derive a key from a secret."""
    return blake2b(secret, digest_size=32, person=DERIVATION_LABEL).digest()
