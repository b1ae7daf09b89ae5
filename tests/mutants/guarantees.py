"""Check the guarantees of a Store, with those of values, on a Valkey server with another core.lua.

A process of its own, so that `ports.py` can end it: a call may wait for ever for a reply that cannot be read.

    python -m tests.mutants.guarantees PORT < core.lua
"""

from __future__ import annotations

import sys

from redis import Redis

from tidegate.stores import RedisStore
from tidegate.stores._redis.address import read_url
from tidegate.testing import verify_store


def main(port: int, source: bytes) -> None:
    """Raise AssertionError if a guarantee does not hold."""

    def open_store() -> RedisStore:
        with Redis(port=port) as client:
            client.flushall()
        return RedisStore(read_url(f"redis://127.0.0.1:{port}?timeout=2"), source=source)

    verify_store(open_store, rounds=0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.stdin.buffer.read())
