"""Worker processes: how they start, how one is replaced, and how they end with their parent."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.servers.process import free_port, until
from tests.service.harness import ROOT, RunningService, is_up, serving
from tests.service.test_service_processes import log_lines
from tidegate.core._bounds import SECOND
from tidegate.service._runtime.workers import restart_pause

RULES = "policies: {api: 3/1h}\n"


def store_of(folder):
    return f"store: sqlite:///{folder / 'limits.db'}?deadline=10s\n"


@contextmanager
def starting(folder, *flags):
    """Start a service with two workers; do not wait until it is ready."""
    log, port = folder / "service.log", free_port()
    options = ["--workers", "2", "--listen", f"127.0.0.1:{port}", "--store", f"sqlite:///{folder / 'limits.db'}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tidegate", "start", *options, *flags],
            cwd=ROOT,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    running = RunningService(process, port, 0, log)
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def test_a_failed_start_prints_one_line(tmp_path):
    provider = tmp_path / "provider.yaml"
    provider.write_text("domain: x\n", encoding="utf-8")
    with starting(tmp_path, "--provider", str(provider), "--data", str(tmp_path / "data")) as service:
        assert service.process.wait(60) == 2
        assert log_lines(service, "needs a limit") == [f"tidegate: {provider}:1: needs a limit, such as limit: 300"]
        assert not service.logged("Traceback")


def test_sighup_during_the_start_ends_no_worker(tmp_path):
    with starting(tmp_path, "--policy", "api=3/1h") as service:
        number = service.process.pid
        until(Path(f"/proc/{number}/task/{number}/children").read_text, "the first worker")

        def hang_up_until_ready():
            service.process.send_signal(signal.SIGHUP)
            return is_up(service)

        until(hang_up_until_ready, "the start of the service", 60)
        assert not service.logged("ended with")
        assert service.stop() == 0


def test_restart_pauses_double_until_a_worker_keeps_running():
    pauses = [0]
    for lifetime in (90, 1, 1, 1, 30, 1, 1, 31, 1):
        pauses.append(restart_pause(pauses[-1], lifetime * SECOND))
    assert pauses[1:] == [1, 2, 4, 8, 16, 30, 30, 1, 2]


HANG_WHILE_STARTING = """
import multiprocessing, os, signal, sys
from tidegate._policy.setting_values import ListenAddress
from tidegate.service._config.settings import load_settings
from tidegate.service._runtime.server import Listeners, listen
from tidegate.service._runtime.workers import MAX_START_CHECKS, WorkerPool
from tidegate.testing import ManualClock

if __name__ == "__main__":
    clock = ManualClock(start=0)
    settings = load_settings({"store": sys.argv[1], "workers": 2})
    pool = WorkerPool(settings, Listeners(listen(ListenAddress("127.0.0.1", 0), "listen")), clock)
    pool.start()
    workers = multiprocessing.active_children()
    for process in workers:
        os.kill(process.pid, signal.SIGSTOP)
    for _ in range(MAX_START_CHECKS + 1):
        assert all(process.is_alive() for process in workers)
        clock.advance(1)
        pool.check_heartbeats()
    for process in workers:
        process.join(30)
    print([process.exitcode for process in workers])
    pool.stop()
"""


def test_a_worker_that_hangs_while_it_starts_is_killed(tmp_path):
    """It has no heartbeat yet, so it gets more time than one that has responded."""
    program = tmp_path / "program.py"
    program.write_text(HANG_WHILE_STARTING, encoding="utf-8")
    command = [sys.executable, program, f"sqlite:///{tmp_path / 'limits.db'}"]
    assert subprocess.run(command, capture_output=True, timeout=60, check=True, text=True).stdout == "[-9, -9]\n"


@pytest.mark.slow
def test_a_failing_replacement_is_retried(tmp_path):
    provider = tmp_path / "provider.yaml"
    good = "domain: x.example\nlimit: 300\nperiod: 1m\n"
    provider.write_text(good, encoding="utf-8")
    text = f"providers: {provider}\ndata: {tmp_path / 'data'}\n" + store_of(tmp_path) + RULES
    with serving(tmp_path, text, "--workers", "2") as service:
        (first,) = (each for each in process_ids(service) if runs_sources(each, tmp_path / "data"))
        provider.write_text("domain: x.example\n", encoding="utf-8")
        os.kill(first, signal.SIGKILL)
        until(lambda: service.logged("a new process starts in 2 s"), "a replacement that cannot start")
        (line,) = log_lines(service, "in 2 s")
        assert "provider.yaml:1: needs a limit" in line
        assert len(log_lines(service, f"process {first} ended with exit code -9: a new process starts in 1 s")) == 1
        assert service.post("peek", {"policy": "api", "key": "k"}).status_code == 200  # the other worker still serves
        provider.write_text(good, encoding="utf-8")
        until(lambda: len(log_lines(service, "serving on")) == 3, "a replacement")
        assert service.stop() == 0
        assert not service.logged("Traceback")


def process_ids(service):
    return [int(line.split("process ")[1].split('"')[0]) for line in log_lines(service, "serving on")]


def runs_sources(pid, data):
    """Return whether a worker has a file in the data folder open: only the first one has."""
    links = (each.readlink() for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink())
    return any(data in link.parents for link in links)


def test_workers_end_with_their_parent(tmp_path):
    with starting(tmp_path, "--policy", "api=3/1h") as service:
        until(lambda: is_up(service), "the start of the service", 60)
        service.process.kill()
        service.process.wait(10)
        until(lambda: len(log_lines(service, '"stopped"')) == 2, "the end of the workers")
        with pytest.raises(httpx.ConnectError):
            service.get("/healthz")
