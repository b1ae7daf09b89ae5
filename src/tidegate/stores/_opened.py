"""OpenedStore: how every interface opens the store that it is given, and whether it closes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tidegate.stores._base import Store
from tidegate.stores._lease import LeasedStore, read_lease
from tidegate.stores._outage import open_guarded

if TYPE_CHECKING:
    from tidegate._runtime.clock import Clock
    from tidegate.stores._lease import Lease


class OpenedStore(NamedTuple):
    """A store, and whether it is closed together with its user: not if it was passed as an object."""

    store: Store
    owned: bool

    @classmethod
    def open(
        cls,
        store: str | Store,
        *,
        clock: Clock | None = None,
        lease: bool | float | Lease | None = None,
    ) -> OpenedStore:
        """Open a URL as a guarded store, or use a Store as it is; with `lease`, take permits in advance from either.

        A store in memory that is opened here serves this process only, so it needs no leases. A LeasedStore is always
        owned: closing it returns its permits, and closes the underlying store only if that was opened here.
        """
        terms = read_lease(lease)
        if isinstance(store, Store):
            opened = cls(store, owned=False)
        else:
            opened = cls(open_guarded(store, clock=clock), owned=True)
        if terms is None or (opened.owned and opened.store.instant):
            return opened
        return cls(LeasedStore(opened.store, terms, owns=opened.owned), owned=True)

    def close(self) -> None:
        """Close the store if it is owned."""
        if self.owned:
            self.store.close()

    async def close_async(self) -> None:
        """Close the store if it is owned, without blocking the event loop."""
        if self.owned:
            await self.store.close_async()
