"""Records every request of the soak when it is sent and when it ends, so that a killed client leaves its record behind.

Times are CLOCK_MONOTONIC in nanoseconds, which all processes of a machine share.

    ["sent", number, time, verb, [[policy, key, amount], …]]
    ["ended", number, time, how, [amount | null, …]]        null: the answer does not tell
    ["used", number, policy, key, cost, sent, received]     a call that a client served from its lease
"""

from __future__ import annotations

import itertools
import json
import os
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.soak.effects import Account, Effect

    Event = list[Any]

ANSWERED: Final = "answered"
HUNG_UP: Final = "hung up"  # the client closed its sending side, read until the end of the connection: no answer
GONE: Final = "gone"  # the client closed the connection at once: an answer may have been under way
BROKEN: Final = "broken"  # the connection ended without an answer, and not by the client


class Journal:
    """Hands events to `write`, numbered."""

    def __init__(self, write: Callable[[Event], object]) -> None:
        self._write = write
        self._numbers = itertools.count()
        self.ended_calls = 0

    def sent(self, verb: str, effects: Sequence[Effect]) -> int:
        """Record a request, before its first byte is sent."""
        number = next(self._numbers)
        self._write(["sent", number, time.monotonic_ns(), verb, [[*account, amount] for account, amount in effects]])
        return number

    def ended(self, number: int, how: str, amounts: Sequence[int | None] = ()) -> None:
        """Record how a request ended."""
        self.ended_calls += 1
        self._write(["ended", number, time.monotonic_ns(), how, list(amounts)])

    def used(self, account: Account, cost: int, sent: int) -> None:
        """Record a call that was allowed from permits taken ahead."""
        self._write(["used", next(self._numbers), *account, cost, sent, time.monotonic_ns()])


def file_journal(path: Path) -> Journal:
    """Open a journal in a file: each event is one write, which the kernel has before the next step is taken."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return Journal(lambda event: os.write(descriptor, json.dumps(event).encode() + b"\n"))


def read_journal(path: Path) -> list[Event]:
    """Read what a process has recorded; a line that it was killed in is no event."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines[:-1]]
