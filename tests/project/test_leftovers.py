"""Servers that a run starts are found at its end, also if the run is killed: by a variable of their environment."""

import os

from tests.leftovers import VARIABLE, command_of, processes_of
from tests.servers.nats import NatsServer
from tests.servers.valkey import ValkeyServer


def test_servers_of_a_run_are_found():
    for kind in (ValkeyServer, NatsServer):
        before = set(processes_of(os.environ[VARIABLE]))
        with kind() as server:
            started = set(processes_of(os.environ[VARIABLE])) - before
            assert any(str(server.port) in command_of(pid) for pid in started), kind
