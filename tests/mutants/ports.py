"""Plant faults in the lines of core.lua and core.sql that the latest commits changed, and count how many are found.

`make test-mutants` runs this with pytest, as the comparison of the ports with the core needs their servers.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.conformance.changes import changing_history, directed_histories
from tests.mutants.changed import COMMITS, changed_lines
from tests.stores.postgres.comparison import use_core
from tests.stores.postgres.conftest import binaries, server  # noqa: F401 - fixtures
from tests.stores.postgres.histories import DIRECTED
from tests.stores.postgres.test_conformance import differs, open_empty, shared_schema  # noqa: F401 - fixtures
from tests.stores.redis.test_conformance import disposable_server, found_by  # noqa: F401 - a fixture
from tidegate.stores import _postgres, _redis
from tidegate.testing import random_vectors, verify_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.valkey import ValkeyServer

LUA = Path(_redis.__file__).with_name("core.lua")
SQL = Path(_postgres.__file__).with_name("core.sql")
SAMPLE = 20  # of each port
SECONDS = 120  # for the mutants of a port: one that no history finds takes longest
FAULT_SECONDS = 60  # for each way to look for one fault
# Faults that change nothing anybody can see, by the wrong line, with the reason.
EQUIVALENT = {
    "raised[i + 1] = marks[i] < at and max(marks[i + 1], peak + credit) or marks[i + 1] + credit":
        "a mark of that very instant is the peak, so that both sums are the same",
    "insert into log (log, at, cost, sum) values (state[1], state[5], delta, state[3]);":
        "the line before makes both the same",
}  # fmt: skip
SWAPS = {" <= ": " < ", " < ": " <= ", " >= ": " > ", " > ": " >= ", " + ": " - ", " - ": " + ", " and ": " or "}


class Fault(NamedTuple):
    """One changed line, and the file with it."""

    line: int
    right: str
    wrong: str
    source: str


def all_faults(source: str, lines: set[int]) -> Iterator[Fault]:
    """Yield every small change of these lines."""
    texts = source.split("\n")
    for number in sorted(lines):
        code = texts[number - 1].partition("--")[0]
        for match in re.finditer("|".join(map(re.escape, SWAPS)) + r"|(?<![\w.])\d+(?![\w.])", code):
            old = match.group()
            new = SWAPS.get(old) or str(int(old) + 1)
            wrong = code[: match.start()] + new + code[match.end() :]
            yield Fault(number, code, wrong, "\n".join([*texts[: number - 1], wrong, *texts[number:]]))


class Figure:
    """How many of the planted faults were found. Some change nothing that can be seen, so there is no least share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._until = time.monotonic() + SECONDS
        self.tried: dict[Fault, bool] = {}

    def next_faults(self) -> Iterator[Fault]:
        """Yield a sample of the faults in the changed lines, until the time is over."""
        lines = changed_lines(self._path, int(os.environ.get("TIDEGATE_MUTANT_COMMITS", COMMITS)))
        found = list(all_faults(self._path.read_text(encoding="utf-8"), lines))
        found = [fault for fault in found if fault.wrong.strip() not in EQUIVALENT]
        for fault in random.Random(1).sample(found, min(SAMPLE, len(found))):
            if time.monotonic() < self._until:
                yield fault

    def report(self) -> None:
        """Print the figure."""
        for each, is_found in self.tried.items():
            if not is_found:
                print(f"survived: {self._path.name}:{each.line} {each.wrong.strip()}")
        print(f"{sum(self.tried.values())} of {len(self.tried)} mutants of changed lines of {self._path.name} caught")


def keeps_guarantees(valkey: ValkeyServer, source: bytes) -> bool:
    """Return whether a script passes the tests of a Store's guarantees, which include those of values."""
    command = [sys.executable, "-m", "tests.mutants.guarantees", str(valkey.port)]
    try:
        return (
            subprocess.run(command, input=source, capture_output=True, timeout=FAULT_SECONDS, check=False).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


async def is_found_in_lua(valkey: ValkeyServer, source: bytes) -> bool:
    """Return whether a fault shows; a call that is never answered, or answered nonsense, shows it too."""
    try:
        async with asyncio.timeout(FAULT_SECONDS):
            if await found_by(valkey, source) is not None or await found_by(valkey, source, together=False) is not None:
                return True
    except Exception:  # noqa: BLE001 - however it shows
        return True
    return not await asyncio.to_thread(keeps_guarantees, valkey, source)


@pytest.mark.timeout(SECONDS + 4 * FAULT_SECONDS)
async def test_changed_lines_of_the_lua_port(disposable_server):  # noqa: F811 - the fixture
    assert keeps_guarantees(disposable_server, LUA.read_bytes())
    figure = Figure(LUA)
    for fault in figure.next_faults():
        figure.tried[fault] = await is_found_in_lua(disposable_server, fault.source.encode())
        disposable_server.restart()
    figure.report()


@pytest.mark.timeout(SECONDS + 4 * FAULT_SECONDS)
def test_changed_lines_of_the_sql_port(open_empty, shared_schema):  # noqa: F811 - the fixtures
    def is_found(source: str) -> bool:
        histories = chain(
            [chain(*DIRECTED)],
            directed_histories(),
            map(changing_history, range(8)),
            (random_vectors(seed, 240, alternatives=True) for seed in range(8)),
        )
        try:
            if any(differs(use_core(open_empty(), source), shared_schema[1], vectors) for vectors in histories):
                return True
            verify_store(lambda: use_core(open_empty(), source), rounds=0)
        except Exception:  # noqa: BLE001 - however it shows
            return True
        return False

    assert not is_found(SQL.read_text(encoding="utf-8"))
    figure = Figure(SQL)
    for fault in figure.next_faults():
        figure.tried[fault] = is_found(fault.source)
    figure.report()
