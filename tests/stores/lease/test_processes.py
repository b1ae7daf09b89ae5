"""Real processes that lease from one SQLite file count exactly, even if one of them is killed with SIGKILL."""

import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tidegate import Limiter

WORKER = Path(__file__).with_name("worker.py")


@pytest.fixture
def start(tmp_path):
    started = []

    def start(rules, calls):
        counter = tmp_path / f"{len(started)}.count"
        counter.write_bytes(bytes(8))
        command = [sys.executable, str(WORKER), str(tmp_path / "limits.db"), rules, str(counter), str(calls)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, lambda: struct.unpack("q", counter.read_bytes())[0]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def start_calls(processes):
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()


def test_four_processes_use_exactly_the_quota(start, tmp_path):
    quota, rules = 40_000, "40000/1d fixed_window"
    workers = [start(rules, 15_000) for _ in range(4)]
    start_calls([process for process, _ in workers])
    for process, _ in workers:
        process.communicate("close\n", timeout=60)
        assert process.returncode == 0
    used = sum(count() for _, count in workers)
    with Limiter(rules, store=f"sqlite:///{tmp_path}/limits.db") as limiter:
        # Workers may be denied while others hold shares; permits returned later are still available.
        assert limiter.usage("k")["1d"].used == used <= quota
        assert used == quota or limiter.try_acquire("k", quota - used)
        assert not limiter.try_acquire("k")


def test_permits_of_a_killed_process_are_not_used_twice(start, tmp_path):
    quota, rules = 200_000, "200000/1d fixed_window"
    workers = [start(rules, 10_000_000), *(start(rules, 5_000) for _ in range(2))]
    start_calls([process for process, _ in workers])
    killed = workers[0][0]
    assert killed.stdout.readline() == "running\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait(10)
    for process, _ in workers[1:]:
        process.communicate("close\n", timeout=60)
    used = sum(count() for _, count in workers)
    with Limiter(rules, store=f"sqlite:///{tmp_path}/limits.db") as limiter:
        lost = limiter.usage("k")["1d"].used - used
        assert 0 <= lost < quota // 2  # at most the two shares of the killed process
        assert limiter.try_acquire("k", quota - used - lost)
        assert not limiter.try_acquire("k")


def test_a_token_bucket_is_never_exceeded_in_real_time(start):
    workers = [start("2000/1s", 100_000) for _ in range(3)]
    began = time.monotonic()
    start_calls([process for process, _ in workers])
    for process, _ in workers:
        process.communicate("close\n", timeout=60)
    passed = time.monotonic() - began
    assert 1900 <= sum(count() for _, count in workers) <= 2000 + 2000 * passed
