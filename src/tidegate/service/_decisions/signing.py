"""The keys that sign reservation ids.

Every client holds ids and a decision token, so no key may be derived from either: a client that can sign an id can
refund permits that were never charged. The keys come from the setting `reservation_secret`; its first secret signs, all
of them verify, so that secrets can be rotated. Without the setting, the first process that needs a key generates one
and stores it as a value, so that all processes and services on that store use the same.

A store in memory is not shared: this process keeps its key. A store without values (`Store.keeps_values`) cannot record
which ids are settled, so each process signs with a key of its own, even if there is a setting: no other process can
settle its ids, and no id is settled twice.
"""

from __future__ import annotations

import logging
import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from tidegate.core._bounds import SECOND
from tidegate.errors import ValueConflict
from tidegate.service._decisions.shared_store import is_shared
from tidegate.stores._outage.guarded_store import OUTAGE_ERRORS
from tidegate.stores._values import Collection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.stores import Store

log: logging.Logger = logging.getLogger("tidegate.service")

SECRET_TTL: Final = 3650 * 86_400.0  # how long a store keeps the generated secret
SECRET_BYTES: Final = 32
SECRETS: Final = Collection("tidegate.secrets", listed=False)
SECRET_NAME: Final = "reservations"  # noqa: S105 - the name of a value
REFRESH_INTERVAL: Final = 60 * SECOND  # how often the secret is read again: the store may have been emptied
RETRY_INTERVAL: Final = SECOND  # ... while the store is unavailable
DERIVATION_LABEL: Final = b"reservation id"

IN_MEMORY: Final[WeakKeyDictionary[Store, bytes]] = WeakKeyDictionary()


class SigningKeys:
    """The keys of one service: from the settings, or the one that its store keeps."""

    def __init__(self, store: Store, configured: Sequence[str] = ()) -> None:
        """Use the configured secrets, if there are any."""
        self._store = store.unleased
        self._keys = tuple(derive_key(secret.encode()) for secret in configured)
        if not store.instant and not store.keeps_values:
            log.warning(
                "%s keeps no values: it cannot block keys; idempotency keys, settled reservations, the audit log and "
                "the history are known to this process only, and only this process can settle its reservations%s",
                type(store).__name__,
                ": reservation_secret is not used" if configured else "",
            )
            self._keys = ()
        if not self._keys and not is_shared(store):
            self._keys = (IN_MEMORY.setdefault(store, secrets.token_bytes(32)),)
        self._fixed = bool(self._keys)
        self._due: int | None = None  # when the secret is read again, in steady time
        self._secret = secrets.token_bytes(SECRET_BYTES)

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
        interval = REFRESH_INTERVAL
        try:
            await self._store.put_value_async(SECRETS, SECRET_NAME, self._secret, SECRET_TTL, expected=None)
        except ValueConflict as conflict:
            self._secret = self._secret if conflict.found is None else conflict.found.data
        except OUTAGE_ERRORS:
            interval = RETRY_INTERVAL
        self._due = now + interval
        current = derive_key(self._secret)
        former = [key for key in self._keys if key != current]
        self._keys = (current, *former[:1])


def derive_key(secret: bytes) -> bytes:
    """Derive a key from a secret."""
    return blake2b(secret, digest_size=32, person=DERIVATION_LABEL).digest()
