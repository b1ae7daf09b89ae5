"""Inbox: the bounded queue between the thread that receives messages and the thread that calls handlers."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from tidegate.bus._base import Event

if TYPE_CHECKING:
    from collections.abc import Callable

    Delivery = tuple[Callable[..., None], object]  # a function, and the event or the versions to call it with

MAX_INBOX_BYTES: Final = 64 * 2**20  # of messages to handle


class Inbox:
    """A queue of deliveries, bounded in number and bytes: the oldest are dropped.

    Only threads of the bus may call `put`, `take` and `close`: no signal handler runs in them, so that no exception can
    leave the condition locked.
    """

    def __init__(self) -> None:
        """Start without deliveries."""
        self._deliveries: deque[Delivery] = deque()
        self._bytes = 0
        self._closed = False
        self._arriving = threading.Condition()

    def __len__(self) -> int:
        """Return the number of deliveries."""
        return len(self._deliveries)

    def put(self, deliver: Callable[..., None], item: object, max_messages: int) -> int:
        """Add a delivery; returns how many were dropped."""
        dropped = 0
        with self._arriving:
            self._deliveries.append((deliver, item))
            self._bytes += _size(item)
            while len(self._deliveries) > max_messages or self._bytes > MAX_INBOX_BYTES:
                self._bytes -= _size(self._deliveries.popleft()[1])
                dropped += 1
            self._arriving.notify()
        return dropped

    def take(self) -> Delivery | None:
        """Wait for the next delivery; returns None when the inbox is closed and empty."""
        with self._arriving:
            while not self._deliveries:
                if self._closed:
                    return None
                self._arriving.wait()
            delivery = self._deliveries.popleft()
            self._bytes -= _size(delivery[1])
            return delivery

    def close(self) -> None:
        """Let `take` return None once the inbox is empty."""
        with self._arriving:
            self._closed = True
            self._arriving.notify_all()


def _size(item: object) -> int:
    return len(item.payload) if isinstance(item, Event) else 0
