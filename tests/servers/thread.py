"""A server in a thread of its own, with its own event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Self


class ThreadServer:
    """Runs `_serve` until the end of a `with` block. It sets `_stop`, waits for it, and sets `port` and `_ready`."""

    def __init__(self) -> None:
        """Prepare the thread."""
        self.port = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._stop: asyncio.Event

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.run_until_complete(asyncio.sleep(0))  # sockets are closed by callbacks
        self._loop.close()

    def __enter__(self) -> Self:
        """Start."""
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
