"""A server that a test run started ends with the run, also if the run is killed."""

import os
import subprocess
import sys

import pytest

from tests.leftovers import VARIABLE, Run, command_of, processes_of
from tests.servers.process import until

BEGIN = """
import subprocess, sys, time
from tests.leftovers import Run
run = Run()
server = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(run.id, server.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def outside(monkeypatch):
    """Be no part of the run of these tests."""
    monkeypatch.delenv(VARIABLE)


@pytest.mark.usefixtures("outside")
def test_the_end_of_a_run_names_and_kills_what_is_left():
    run = Run()
    server = subprocess.Popen(["sleep", "60"], start_new_session=True)
    until(lambda: server.pid in processes_of(run.id), "its environment, which the kernel sets after Popen has returned")
    assert run.end() == [f"{server.pid}: sleep 60"]
    assert server.wait(10) == -9


@pytest.mark.usefixtures("outside")
def test_a_run_that_leaves_nothing_reports_nothing():
    run = Run()
    subprocess.run(["true"], check=True)
    assert run.end() == []


def test_servers_end_with_a_run_that_is_killed():
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    with subprocess.Popen([sys.executable, "-c", BEGIN], stdout=subprocess.PIPE, env=environment) as began:
        run, server = began.stdout.readline().decode().split()
        assert command_of(int(server)) == "sleep 60"
        began.kill()
    until(lambda: not list(processes_of(run)), "the end of the server")
