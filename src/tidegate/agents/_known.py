"""Runs that a server knows by token, so that a call of one needs no further reading."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from tidegate.agents._run import AsyncRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.stores import Store

MAX_KNOWN: Final = 4096


class KnownRuns:
    """The runs of one store, by token; those that were used last are kept. Each call still asks the store."""

    def __init__(self, store: Store, secrets: Sequence[str] = ()) -> None:
        """Verify tokens with these secrets, by default with the one that the store keeps."""
        self._store = store
        self._secrets = tuple(secrets)
        self._known: OrderedDict[bytes, AsyncRun] = OrderedDict()

    async def join(self, token: str) -> AsyncRun:
        """Return the node of a token; raises TokenError, or RunEndedError."""
        digest = sha256(token.encode("utf-8", "surrogateescape")).digest()
        found = self._known.get(digest)
        if found is None:
            found = self._known[digest] = await AsyncRun.join(token, store=self._store, secret=self._secrets)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(digest)
        return found
