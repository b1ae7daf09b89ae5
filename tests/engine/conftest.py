"""Servers and clocks for the tests of forks and interrupts."""

import pytest

from tests.servers.valkey import ValkeyServer


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def impatient_clocks(monkeypatch):
    """Let a ManualClock move by itself soon: a call that was interrupted leaves nobody who would move it."""
    monkeypatch.setattr("tidegate._runtime.clock.IDLE_GRACE", 0.002)
