"""Two versions of tidegate on one store, as during a rolling upgrade: decisions are those of one limiter.

The older one is the commit from which stored formats are stable: later versions can share a store with it. A
change of a format raises its number (`docs/howto/upgrading.md`), and moves BASE to the commit that makes it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pytest

from tests.servers.valkey import ValkeyServer

pytestmark = pytest.mark.once("redis")

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
BASE = "ad8d4dacd37be20b2849849146b83946ea104b7a"
PATIENT = "?deadline=30s"  # a loaded machine is not an outage
START = 1_728_000_000_000_000
LIMITS = {
    "bucket": ["10/1m"],
    "burst": ["7/1m token_bucket burst=20"],
    "fixed": ["10/1m fixed_window"],
    "sliding": ["10/1m sliding_window"],
    "log": ["10/1m sliding_log"],
    "calendar": ["10/minute calendar_window"],
    "slots": ["5/1m concurrency"],
    "several": ["3/1s", "10/1m sliding_log", "50/1h fixed_window"],
}


class Command(NamedTuple):
    name: str
    limits: list[str]
    verb: str = "try_acquire"
    key: str = "k"
    cost: int = 1
    actual: int = 0
    calls: int = 0
    at: int = 0  # microseconds; 0 is the clock of the store


class Process:
    """A process that decides with the package at a path."""

    def __init__(self, url: str, package: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(package)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("decide.py")), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def ask(self, command: Command) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command._asdict()) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the package of the older version."""
    folder = tmp_path_factory.mktemp("older")
    archive = subprocess.run(["git", "archive", BASE, "src"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        missing = f"the history of this checkout does not have {BASE}: {archive.stderr.decode().strip()}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as source:
        source.extractall(folder, filter="data")
    return folder / "src"


@pytest.fixture(scope="module", params=["sqlite", "redis", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('sqlite')}/limits.db{PATIENT}"
    elif request.param == "redis":
        with ValkeyServer() as server:
            yield f"{server.url}{PATIENT}&timeout=30"
    else:
        yield f"{request.getfixturevalue('postgres_url')}{PATIENT}&timeout=30&connect_timeout=30"


@pytest.mark.parametrize("first", ["new", "old"])
def test_calls_of_both_versions_are_decided_as_by_one_limiter(url, older, first):
    """Random calls of random processes; `first` made the first call, so it has created the tables or keys."""
    chance, at = random.Random(first), START
    packages = {"new": ROOT / "src", "old": older}
    second = "old" if first == "new" else "new"
    with (
        Process(url, packages[first]) as one,
        Process(url, packages[second]) as other,
        Process("memory://", ROOT / "src") as expected,
    ):
        for number in range(400):
            at += chance.choice([0, 1000, chance.randrange(5_000_000), chance.randrange(30_000_000)])
            name = chance.choice(list(LIMITS))
            verb = chance.choice(["try_acquire"] * 6 + ["reserve", "refund"])
            command = Command(
                name=f"{name} {first}",
                limits=LIMITS[name],
                verb="try_acquire" if name == "slots" else verb,
                key=chance.choice("ab"),
                cost=chance.randrange(1, 4),
                actual=chance.randrange(5),
                at=at,
            )
            process = one if not number else chance.choice([one, other])
            assert process.ask(command) == expected.ask(command), (number, process is one, command)


def test_concurrent_processes_of_both_versions_admit_no_more_than_the_limit(url, older):
    command = Command("spend", ["100/1h fixed_window", "100/2h sliding_log"], verb="spend", calls=80)
    with Process(url, ROOT / "src") as new, Process(url, older) as old, ThreadPoolExecutor() as pool:
        assert sum(pool.map(lambda process: process.ask(command), [new, old])) == 100
