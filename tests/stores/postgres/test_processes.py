"""Many processes and threads: exactly the limit is admitted, nothing deadlocks, the schema is created once."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stores.postgres.workers import KEYS, QUOTA, first_call, in_processes, spend
from tidegate import Limit, Policy

PROCESSES, THREADS = 3, 3
LOCK = "if not pg_try_advisory_xact_lock(number) then"


def spend_in_processes(server, schema):
    counts, errors = {}, []
    for admitted, failures in in_processes(PROCESSES, spend, server.url, schema, None, THREADS):
        errors += failures
        for key, count in admitted.items():
            counts[key] = counts.get(key, 0) + count
    return counts, errors


def test_overlapping_batches_admit_exactly_the_limit(server, schema, open_store):
    counts, errors = spend_in_processes(server, schema)
    assert errors == []
    assert counts == dict.fromkeys(KEYS, QUOTA)
    left = open_store().apply_one("peek", Policy("shared", (Limit(QUOTA, "1d", "fixed_window"),)), KEYS[0], (1,))
    assert (left.allowed, left.remaining) == (False, 0)


def test_missing_locks_are_detected(server, schema, open_store):
    core = open_store().schema.core.replace(LOCK, "if false then")
    counts, errors = spend(0, server.url, schema, core, 8)
    assert errors or counts != dict.fromkeys(KEYS, QUOTA)


def test_unordered_locks_are_detected(server, schema, open_store):
    """Each call locks its keys in the order given: two calls then wait for each other."""
    ordered = "select distinct", "from unnest(policies, keys) u(policy, key) order by 1"
    core = open_store().schema.core
    assert all(part in core for part in ordered)
    core = core.replace(ordered[0], "select").replace(ordered[1], ordered[1].removesuffix(" order by 1"))
    _, errors = spend(0, server.url, schema, core, 8)
    assert any("deadlock" in error for error in errors)


def test_concurrent_first_calls_create_the_schema_once(server, schema, open_store, sql):
    open_store()  # its fixture drops the schema
    with ThreadPoolExecutor(8) as threads:
        allowed = list(threads.map(lambda number: first_call(number, server.url, schema), range(8)))
    assert sum(allowed) == 4
    assert sql("select count(*) from tidegate.schema_version").fetchone() == (1,)


def test_the_isolation_level_of_the_role_is_overridden(server, schema, open_store, sql):
    """With another default, calls would decide on data from before they waited for their key."""
    open_store()
    sql("alter role tide set default_transaction_isolation = 'serializable'")
    try:
        counts, errors = spend(0, server.url, schema, None, 8)
    finally:
        sql("alter role tide reset default_transaction_isolation")
    assert errors == []
    assert counts == dict.fromkeys(KEYS, QUOTA)


FORK = """
import os, sys
from tidegate import Limiter
from tidegate.stores import open_store
limiter = Limiter("10/1d fixed_window", store=open_store(sys.argv[1]))
print(limiter.try_acquire("k").remaining, flush=True)
if os.fork() == 0:
    print(limiter.try_acquire("k").remaining, flush=True)
    os._exit(0)
os.wait()
print(limiter.try_acquire("k").remaining, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_opens_its_own_connections(server, schema, open_store):
    open_store()
    url = f"{server.url}?schema={schema}&timeout=10&connect_timeout=10"
    done = subprocess.run([sys.executable, "-c", FORK, url], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["9", "8", "7"]
