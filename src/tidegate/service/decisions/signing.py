"""The keys that sign reservation ids.

Every client holds ids and a decision token, so no key may follow from either: whoever can sign an id can give permits
back that nobody has taken. The keys come from the setting `reservation_secret`; its first secret signs, all of them
verify, so that secrets can be rotated. Without the setting, the first process that needs a key generates one and keeps
it in the store (as a mark, see `marks`), where every process and service on that store finds it. A store in memory is
not shared: its key is kept beside it, in this process.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from tidegate.core.bounds import SECOND
from tidegate.core.decision import LocalDecision
from tidegate.service.decisions.write_once import NUMBER_BYTES, NUMBER_LIMIT, is_repeated, mark_policy, numbers_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.stores import Store

SECRET_TTL: Final = 3650 * 86_400.0  # how long a store keeps the generated secret
SECRET_NUMBERS: Final = 6  # of the secret: 288 bits
SECRET_POLICY: Final = mark_policy("tidegate.secret", SECRET_TTL, SECRET_NUMBERS)
MARK_KEY: Final = "reservations"
REFRESH_INTERVAL: Final = 60 * SECOND  # how often the store is asked again: it may have been emptied
RETRY_INTERVAL: Final = SECOND  # ... while it is lost
DERIVATION_LABEL: Final = b"reservation id"

IN_MEMORY: Final[WeakKeyDictionary[Store, bytes]] = WeakKeyDictionary()


class SigningKeys:
    """Finds the keys of one service: those of the settings, or the one that its store keeps."""

    def __init__(self, store: Store, configured: Sequence[str] = ()) -> None:
        """Use the configured secrets, if there are any."""
        self._store = store
        self._keys = tuple(derive_key(secret.encode()) for secret in configured)
        if not configured and store.instant:
            self._keys = (IN_MEMORY.setdefault(store, secrets.token_bytes(32)),)
        self._fixed = bool(self._keys)
        self._due: int | None = None  # when the store is asked again, in steady time
        self._numbers = tuple(secrets.randbelow(NUMBER_LIMIT) for _ in range(SECRET_NUMBERS))

    async def all(self) -> tuple[bytes, ...]:
        """Give all keys: the first signs, each verifies."""
        now = self._store.clock.steady()
        if not self._fixed and (self._due is None or now >= self._due):
            await self._refresh(now)
        return self._keys

    async def _refresh(self, now: int) -> None:
        """Keep our secret in the store if it has none, and use the one that it has.

        A store that was emptied gets the former secret back. While a store is lost that was never asked, this process
        signs with its own secret, and goes on verifying with it.
        """
        mark = (await self._store.apply_async("acquire", ((SECRET_POLICY, MARK_KEY, (1, *self._numbers)),)))[0]
        lost = isinstance(mark, LocalDecision)
        self._due = now + (RETRY_INTERVAL if lost else REFRESH_INTERVAL)
        if not lost and is_repeated(mark):
            self._numbers = numbers_of(mark)
        current = derive_key(b"".join(number.to_bytes(NUMBER_BYTES, "big") for number in self._numbers))
        former = [key for key in self._keys if key != current]
        self._keys = (current, *former[:1])


def derive_key(secret: bytes) -> bytes:
    """Derive a key from a secret."""
    return blake2b(secret, digest_size=32, person=DERIVATION_LABEL).digest()
