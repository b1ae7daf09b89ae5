"""Whose turn it is: the lock of the leased store, of the kind that the memory store has."""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Final

from tidegate.clock import yield_thread

PATIENCE: Final = 1000  # how often a thread yields to the one whose turn it is before it sleeps


class Turn:
    """A token in a deque, whose `pop` and `append` are atomic by contract; who finds it taken yields (see MemoryStore).

    Held for a few instructions only, never while a store is asked.
    """

    __slots__ = ("_token", "give", "take")

    def __init__(self) -> None:
        """Start with nobody's turn."""
        self._token = deque([None])
        self.take = self._token.pop
        self.give = self._token.append

    def contend(self) -> None:
        """Take the token that another thread holds, letting that thread run; sleep if that does not help soon."""
        for attempt in count():
            yield_thread(0 if attempt < PATIENCE else 0.0001)
            try:
                self.take()
            except IndexError:
                continue
            return

    def renew(self) -> None:
        """Forget who holds it: in a child process, whoever did is not here."""
        self._token.clear()
        self._token.append(None)

    def __enter__(self) -> None:
        """Take the turn."""
        try:
            self.take()
        except IndexError:
            self.contend()

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self.give(None)
