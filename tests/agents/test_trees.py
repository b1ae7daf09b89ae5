"""A tree of depth 4 with 1,000 nodes and eight processes: streams, kills, stops, carve-outs that end early.

An oracle adds up the bills of the processes. No node is ever charged above its limit, at least 97 % of the budget can
be used, and after all settlements what is charged is what was billed.
"""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.agents.tree_spender import MOST, STREAMS, Spender
from tests.servers.process import until
from tidegate.agents import Run
from tidegate.stores import open_store

QUOTA = 60_000
PROCESSES = 8
KILLED = 2


def build(run):
    """Create 1,000 nodes below and at the root; returns the leaves, and the carve-outs."""
    leaves, carved = [], []
    for first in range(9):
        branch = run.child(f"b{first}", limits=[f"{QUOTA // 6}/run unit=tokens"])
        for second in range(10):
            options = {"carve": {"tokens": 1_000}} if first < 3 and second < 2 else {}
            node = branch.child(f"n{second}", **options)
            carved += [node] if options else []
            leaves += [node.child(f"l{third}", limits=["20_000/run unit=tokens"]) for third in range(10)]
    assert 1 + 9 + 90 + len(leaves) == 1_000
    return leaves, carved


def start(url, folder, tokens, number):
    """Start a process that spends; for a store in memory, a thread."""
    bill = folder / f"bill-{number}"
    bill.touch()
    if not isinstance(url, str):
        thread = threading.Thread(target=Spender(url, tokens, bill, number).run)
        thread.start()
        return thread
    plan = folder / f"plan-{number}"
    plan.write_text(json.dumps({"url": url, "nodes": tokens, "bill": str(bill), "seed": number}))
    command = [sys.executable, "-m", "tests.agents.tree_spender", str(plan)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2])


def read_bills(folder):
    """Return for each admitted call its beginning, its node, what was reserved, and what was billed (-1: not known)."""
    calls = []
    for bill in sorted(folder.glob("bill-*")):
        own = {}
        for line in bill.read_text().splitlines():
            begun, node, most, used = line.split()
            own[begun] = (float(begun), node, int(most), int(used))
        calls += own.values()
    return calls


def add_up(calls):
    """Return what was billed at each node, and what was reserved there without a bill."""
    billed, unsettled = Counter(), Counter()
    for _, node, most, used in calls:
        path = node.split("/")
        for length in range(1, len(path) + 1):
            above = "/".join(path[:length])
            billed[above] += max(0, used)
            unsettled[above] += most if used < 0 else 0
    return billed, unsettled


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["memory", "sqlite", "redis", "postgres"])
def test_no_node_of_a_large_tree_is_ever_charged_more_than_it_may(urls, place, tmp_path, record_property):
    url = open_store(urls[place]) if place == "memory" else urls[place]
    run = Run("root", store=url, limits=[f"{QUOTA}/run unit=tokens"])
    leaves, carved = build(run)
    tokens = [(leaf.id, leaf.token()) for leaf in leaves]
    spenders = [start(url, tmp_path, tokens, number) for number in range(PROCESSES)]
    bills = [tmp_path / f"bill-{number}" for number in range(PROCESSES)]
    until(lambda: all(bill.stat().st_size > 500 for bill in bills), "all processes spend", 120)
    carved[0].close()
    stopped = {leaf.id: (leaf.stop(), time.monotonic())[1] for leaf in leaves[500:505]}
    if place != "memory":
        for process in spenders[:KILLED]:
            process.kill()
    carved[3].close()
    for spender in spenders:
        spender.join() if place == "memory" else spender.wait()
    codes = [spender.returncode for spender in spenders[KILLED:]] if place != "memory" else []
    assert set(codes) <= {0}, codes
    for node in carved[1:]:
        node.close()  # the rest of the others
    calls, usage = read_bills(tmp_path), run.usage()
    assert all(begun < stopped.get(node, begun + 1) for begun, node, _, _ in calls), "a stopped node admitted a call"
    billed, unsettled = add_up(calls)
    lost = 0 if place == "memory" else KILLED * (STREAMS + 2) * MOST
    for _, node in usage.walk():
        charged = node.used["tokens"]
        for limit in node.limits.values():
            assert limit.used <= limit.quota, f"{node.name} was charged {limit.used} of {limit.quota}"
        assert billed[node.id] <= charged <= billed[node.id] + unsettled[node.id] + lost, node.name
    assert unsettled[run.id] <= lost
    if place == "memory":
        assert usage.used["tokens"] == billed[run.id], "charged = billed"
    assert billed[run.id] + unsettled[run.id] + lost >= 0.97 * QUOTA
    assert usage.used["tokens"] >= 0.97 * QUOTA, "at least 97 % can be used"
    for name, value in (("calls", len(calls)), ("billed", billed[run.id]), ("charged", usage.used["tokens"])):
        record_property(name, value)
