"""Plant defects in different packages, one at a time, and report whether the tests of `make test` find them.

Each is planted in a temporary copy of the package, which goes before the checkout on PYTHONPATH; twelve are races. It
shows the power of the tests after they were made fewer or faster, and is run by hand: it takes about five minutes.

    python tests/mutants/planted.py [--only 3]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tidegate"


class Defect(NamedTuple):
    """A defect: what it is, its file, the line as it is and as it is planted, and the tests that look for it."""

    what: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


DEFECTS: Final = (
    Defect(
        "a week begins on Sunday",
        "core/_calendar.py",
        "timedelta(days=day.isoweekday() - kind.day)",
        "timedelta(days=day.isoweekday() % 7 - kind.day + 1)",
        ("tests/core/test_calendar.py",),
    ),
    Defect(
        "a log entry counts a microsecond longer in Redis",
        "stores/_redis/core.lua",
        "if state.first <= now - limit.length then",
        "if state.first < now - limit.length then",
        ("tests/stores/redis/test_conformance.py",),
    ),
    Defect(
        "a share of a sliding window outlasts the window",
        "stores/_lease/terms.py",
        "length = min(length, reset - limit.length)",
        "length = min(length, reset)",
        ("tests/stores/lease/test_never_over_admits.py",),
    ),
    Defect(
        "X-Forwarded-For: the header lines are read from the first",
        "inbound/_client/address.py",
        "    for value in reversed(values):\n        end = len(value)",
        "    for value in values:\n        end = len(value)",
        ("tests/inbound/test_client_address.py",),
    ),
    Defect(
        "Retry-After is rounded down",
        "headers/_writer.py",
        "str(max(1, ceil_div(max(waits), SECOND)))",
        "str(max(1, max(waits) // SECOND))",
        ("tests/headers",),
    ),
    Defect(
        "the gateway passes hop-by-hop fields of responses on",
        "egress/_messages.py",
        "RESPONSE_FILTER: Final = HeaderFilter(HOP_BY_HOP)",
        "RESPONSE_FILTER: Final = HeaderFilter(frozenset())",
        ("tests/egress",),
    ),
    Defect(
        "of two reductions the smaller one holds",
        "adaptive/_capacity.py",
        "return min(values) if values else",
        "return max(values) if values else",
        ("tests/swarm",),
    ),
    Defect(
        "a long output keeps its first reservation beside the second",
        "outbound/_quota/settlement.py",
        "            yield from self.account.shrink_flow(self.charge, self._output_units(first))\n",
        "            yield from ()\n",
        ("tests/outbound/test_streamed_outputs.py",),
    ),
    Defect(
        "race: two threads that settle tasks of one batch",
        "budget/_open_batch.py",
        "        with self._lock:  # several threads may record tasks of one batch\n",
        "        if True:\n",
        ("tests/budget/test_concurrency.py",),
    ),
    Defect(
        "race: two threads that count the first decision of a policy",
        "observe/_counters.py",
        "            with self._lock:\n                rows = ",
        "            if True:\n                rows = ",
        ("tests/service/test_sampling.py",),
    ),
    Defect(
        "race: counters are read while threads of gRPC add policies",
        "observe/_counters.py",
        "        with self._lock:  # threads may add rows meanwhile\n"
        "            return self._rows.get(kind.name, {}).copy()\n",
        "        rows = self._rows.get(kind.name, {})\n        return {labels: row for labels, row in rows.items()}\n",
        ("tests/service/test_sampling.py",),
    ),
    Defect(
        "race: the counters of 300 policies do not fit into the shared memory",
        "service/_runtime/shared_memory.py",
        "COUNTER_BYTES: Final = 16 * 2**20",
        "COUNTER_BYTES: Final = 2**13",
        ("tests/service/test_sampling.py",),
    ),
    Defect(
        "race: a read of the audit log that failed once is not repeated",
        "service/_decisions/audit.py",
        "                values = await self._store.list_values_async(entries_of(day))\n",
        "                self._days.setdefault(day, [])\n"
        "                values = await self._store.list_values_async(entries_of(day))\n",
        ("tests/service/test_sampling.py",),
    ),
    Defect(
        "race: a worker stopped by SIGSTOP is not replaced",
        "service/_runtime/workers.py",
        "if slot.silent_checks >= most and",
        "if slot.silent_checks >= 100 * most and",
        ("tests/service/test_hung_workers.py",),
    ),
    Defect(
        "race: the first call of each worker is decided without the store",
        "stores/_outage/guarded_store.py",
        "        if self._is_simple(asks) and not writes:\n",
        "        if self._tries > 1:\n"
        "            self._tries = 1\n"
        "            return self._fallback.decide(verb, asks, now, at)\n"
        "        if self._is_simple(asks) and not writes:\n",
        ("tests/inbound/test_worker_bursts.py",),
    ),
    Defect(
        "race: while the store answers, a process admits its part of the limit only; another was killed",
        "stores/_outage/guarded_store.py",
        "                return await self.store.apply_async(verb, asks, now, at)\n",
        "                if self._counts_processes:\n"
        "                    return self._fallback.decide(verb, asks, now, at)\n"
        "                return await self.store.apply_async(verb, asks, now, at)\n",
        ("tests/inbound/test_worker_bursts.py",),
    ),
    Defect(
        "race: a file is removed while it is in use",
        "stores/_sqlite/store.py",
        "        if self._inode == (0, 0):\n            return\n        try:\n",
        "        if True:\n            return\n        try:\n",
        ("tests/stores/sqlite/test_faults.py",),
    ),
    Defect(
        "race: a process that stood still after a denial waits for it a second time",
        "_limiter/waiting.py",
        "again = denied.received + ",
        "again = steady() + ",
        ("tests/engine/test_waiting.py",),
    ),
    Defect(
        "race: two stores are charged in the order of the asks",
        "_limiter/joint.py",
        "    if len(found) > 1:\n        found.sort(",
        "    if len(found) > 99:\n        found.sort(",
        ("tests/engine/test_joint.py",),
    ),
    Defect(
        "the part of a lost process is used by others before its large burst is back",
        "stores/_outage/local_share.py",
        "        return ceil_div(limit.capacity, limit.rate)\n",
        "        return limit.length\n",
        ("tests/outage/test_local_share.py",),
    ),
    Defect(
        "a caller of the gateway gets back a permit whose request may have arrived",
        "egress/_gateway.py",
        "error, arrived=call.arrived)",
        "error, arrived=False)",
        ("tests/egress/test_hostile.py",),
    ),
    Defect(
        "a carve-out below a closed node is not returned if the process that closed it was killed",
        "agents/_carving.py",
        "for length in range(1, len(path) + 1):",
        "for length in range(len(path), len(path) + 1):",
        ("tests/agents/test_runs.py",),
    ),
    Defect(
        "a message that is sent again replaces the retained one",
        "bus/_redis.py",
        ">= tonumber(ARGV[2]) then return 0",
        "> tonumber(ARGV[2]) then return 0",
        ("tests/bus/test_guarantees.py",),
    ),
    Defect(
        "race: a batch that begins while another process looks for ended ones is returned",
        "budget/_storage/open_values.py",
        "        values: Values = yield ListValues(self._open)  # before the owners: these are written with their first batch\n"
        "        if not values:\n            return []\n"
        "        owners: Values = yield ListValues(self._owners)\n",
        "        owners: Values = yield ListValues(self._owners)\n"
        "        values: Values = yield ListValues(self._open)\n",
        ("tests/budget/test_ended_processes.py",),
    ),
    Defect(
        "a late denial refunds what the bucket has refilled meanwhile",
        "inbound/_limiting/settle.py",
        "        passed = max(0, first.reporter.now() - at)\n",
        "        passed = 0\n",
        ("tests/inbound/test_limited_blocks.py",),
    ),
)


def plant(defect: Defect, source: Path) -> None:
    """Write the defect into a copy of the package; fails if the line is not there exactly once."""
    path = source / "tidegate" / defect.file
    text = path.read_text(encoding="utf-8")
    if text.count(defect.right) != 1:
        sys.exit(f"{defect.file} has changed: it has {text.count(defect.right)} times {defect.right!r}")
    path.write_text(text.replace(defect.right, defect.wrong), encoding="utf-8")


def find(defect: Defect) -> str:
    """Run the tests on a copy with the defect; return the first that failed, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        shutil.copytree(PACKAGE, source / "tidegate", ignore=shutil.ignore_patterns("__pycache__"))
        plant(defect, source)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow"]
        done = subprocess.run(
            [*command, "--hypothesis-profile=quick", *defect.tests],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(source), "CI": "true"},
            capture_output=True,
            text=True,
            check=False,
        )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failed:
        sys.exit(f"the tests could not be run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[0].split(" - ")[0] if failed else ""


def main() -> int:
    """Plant each, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, action="append", help="the number of a defect (may be repeated)")
    chosen = parser.parse_args().only or range(1, 1 + len(DEFECTS))
    missed = 0
    for number in chosen:
        defect, began = DEFECTS[number - 1], time.monotonic()
        found = find(defect)
        missed += not found
        verdict = found or f"NOT FOUND by {' '.join(defect.tests)}"
        print(f"{number:2} {defect.what} ({defect.file}): {verdict}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
