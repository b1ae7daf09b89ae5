"""Four processes of fifty tasks each share one quota: the server refuses nothing, and nearly all of it is used.

How much is used in real time depends on how busy the machine is, so by default every task sends once, refusals are
judged here, and use in virtual time. TIDEGATE_WINDOWS=10 sends for ten windows and wants 97 % of them: for an idle
machine.
"""

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.outbound.server import QuotaServer
from tests.servers.valkey import ValkeyServer
from tidegate._runtime.clock import TaskSignal
from tidegate.outbound import AsyncGate, OutboundRequest, Providers
from tidegate.outbound._quota.exchange import ProviderResponse
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

PROGRAM = Path(__file__).parent / "programs.py"
WINDOWS = int(os.environ.get("TIDEGATE_WINDOWS", "0"))
PROCESSES = 4
LIMIT = 100
PERIOD = 3.0  # longer than a busy machine takes to answer


def run_together(words):
    """Start the processes, let them begin at once, and wait until all have ended."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, PROGRAM, "send", *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            for _ in range(PROCESSES)
        ]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            process.communicate()


@pytest.mark.once
@pytest.mark.parametrize("kind", ["redis", "sqlite"])
def test_a_shared_quota_is_never_exceeded_and_nearly_all_used(kind, tmp_path):
    with ExitStack() as stack:
        redis = kind == "redis"
        store = stack.enter_context(ValkeyServer()).url if redis else f"sqlite:///{tmp_path}/quota.db"
        server = stack.enter_context(QuotaServer(LIMIT, PERIOD))
        seconds = WINDOWS * PERIOD + 0.5 if WINDOWS else 0
        run_together([server.url, f"{store}?deadline=5s", str(LIMIT), str(PERIOD), "50", str(seconds)])
        assert set(server.statuses) == {200}
        assert server.most_within(PERIOD) <= LIMIT
        assert len(server.let_through) >= PROCESSES * 50
        first = server.let_through[0]
        used = sum(at - first < WINDOWS * PERIOD for at in server.let_through)
        assert used >= 0.97 * WINDOWS * LIMIT


async def test_in_virtual_time_at_least_97_percent_are_used():
    """Four gates on one store, with answers that take a quarter of a second: ten windows, each of them full."""
    clock = ManualClock(1_728_000_000)
    store = MemoryStore(clock=clock)
    gates = [AsyncGate(Providers.of({"domain": "x.example", "limit": 20, "period": "1m"}), store) for _ in range(4)]
    call = OutboundRequest("GET", "https://x.example/", {}.get, lambda: None, True, lambda _error: False)
    received = []

    async def send(_provider):
        await clock.wait_async(TaskSignal(), clock.steady() + 100_000)  # on its way
        received.append(clock.now() - 1_728_000_000)
        await clock.wait_async(TaskSignal(), clock.steady() + 150_000)  # and back
        return ProviderResponse(200, (), lambda: None, None)

    async def work(gate):
        while clock.now() < 1_728_000_000 + 600:
            await gate.run(gate.send_flow(call, send))

    tasks = [asyncio.create_task(work(gate)) for gate in gates for _ in range(8)]
    while clock.now() < 1_728_000_000 + 700:
        for _ in range(10):
            await asyncio.sleep(0)
        clock.advance(0.05)
    await asyncio.gather(*tasks)
    for gate in gates:
        await gate.close()
    windows = [sum(i * 60 <= at < (i + 1) * 60 for at in received) for i in range(10)]
    assert sum(windows) >= 0.97 * 200
    assert all(later - earlier >= 60 for earlier, later in zip(received, received[20:], strict=False))
