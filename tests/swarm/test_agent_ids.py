"""The names of agents: their default, and two agents with the same one."""

import os
import re
import socket
import subprocess
import sys

import pytest

from tests.servers.nats import NatsServer
from tests.servers.process import until
from tests.servers.valkey import ValkeyServer
from tidegate.swarm import SwarmLimiter


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "tidegate.swarm" and r.levelname == "WARNING"]


@pytest.fixture
def join(face, hub, clock):
    """Makes agents, and closes them."""
    made = []

    def make(agent_id=None, **options):
        made.append(face.swarm(bus=hub(), agent_id=agent_id, clock=clock, **options))
        face.run(made[-1].set_capacity("api", 100, 60))
        return made[-1]

    yield make
    for limiter in made:
        face.run(limiter.close())


def test_agents_without_a_name_get_a_unique_readable_one(face, join):
    one, two = join(), join()
    seen = []
    face.run(two.on_capacity_change(seen.append))
    face.run(one.announce_reduced("api", "429"))
    face.run(one.on_capacity_change(seen.append))
    face.run(two.announce_reduced("api", "429"))
    names = [update.agent_id for update in seen]
    assert len(set(names)) == 2
    for name in names:
        assert re.fullmatch(rf"{re.escape(socket.gethostname())}-{os.getpid()}-[0-9a-f]{{8}}", name)


def test_two_agents_with_one_name_both_log_it_once(join, caplog):
    join("twin")
    assert warnings_of(caplog) == []
    join("twin")
    join("other")
    found = warnings_of(caplog)
    assert len(found) == 2
    form = r"two agents have the agent_id 'twin': '(.+)' \(this one\) and '(.+)'\. They ignore .*"
    (first, second), (third, fourth) = (re.fullmatch(form, line).groups() for line in found)
    assert (first, second) == (fourth, third)
    assert first != second
    caplog.clear()
    join("other")
    assert len(warnings_of(caplog)) == 2, "each name is reported"


def test_an_agent_that_starts_again_is_no_duplicate(face, hub, clock, caplog):
    for _ in range(2):
        limiter = face.swarm(bus=hub(), agent_id="again", clock=clock)
        face.run(limiter.close())
    assert warnings_of(caplog) == []


def test_the_same_name_in_another_namespace_or_with_another_secret_is_no_duplicate(join, caplog):
    join("one")
    join("one", namespace="team-b")
    join("one", namespace="team-c", secret=b"s1")
    join("one", namespace="team-c", secret=b"s2")
    assert warnings_of(caplog) == []
    join("one", namespace="team-c", secret=b"s2")
    assert len(warnings_of(caplog)) == 2


@pytest.mark.parametrize("server", [NatsServer, ValkeyServer])
def test_duplicates_are_noticed_on_a_network(server, caplog):
    with (
        server() as running,
        SwarmLimiter(running.url, agent_id="twin") as one,
        SwarmLimiter(running.url, agent_id="twin") as two,
    ):
        assert one.wait_until_synced(20)
        assert two.wait_until_synced(20)
        until(lambda: len(warnings_of(caplog)) == 2, "both warnings")


FORKED = """
import os, sys
from tidegate.bus import open_bus
from tidegate.swarm import SwarmLimiter

bus = open_bus({url!r})
limiter = SwarmLimiter(bus, agent_id={name})
limiter.set_capacity("api", 100, 60)
assert limiter.wait_until_synced(20)
child = os.fork()
if child == 0:
    import threading
    reduced = threading.Event()
    limiter.on_capacity_change(lambda update: reduced.set())
    os.write({ready}, b"ready") if bus.wait(20) else None
    print("heard" if reduced.wait(20) else "not heard", flush=True)
    os._exit(0)
os.read({waits}, 5)
limiter.announce_reduced("api", "429")
os.waitpid(child, 0)
limiter.close()
"""


def test_forked_processes_of_an_agent_without_a_name_hear_each_other():
    with ValkeyServer() as server:
        waits, ready = os.pipe()
        program = FORKED.format(url=server.url, name="None", ready=ready, waits=waits)
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            pass_fds=(waits, ready),
            check=True,
        )
    assert done.stdout == "heard\n"
