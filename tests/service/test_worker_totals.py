"""Several workers are one service: every worker shows the totals of all, and a worker that is killed keeps its counts.

A stopped process (SIGSTOP) accepts no connection, so while all other workers are stopped, one worker serves. That also
shows that no worker waits for another one.
"""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise

import httpx
import pytest

from tests.servers.process import until
from tests.servers.valkey import ValkeyServer
from tests.service.harness import serving
from tests.service.test_workers import process_ids
from tidegate._cli import main

POLICIES = "policies: {api: 1000000/1h, few: 2/1h fixed_window}\n"
API = {"policy": "api", "key": "k"}
FEW = {"policy": "few", "key": "k"}


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def service(valkey, tmp_path):
    valkey.ask("FLUSHALL")
    with serving(tmp_path, f"store: {valkey.url}?deadline=2s\n" + POLICIES, "--workers", "3") as running:
        yield running


def running_ids(service):
    return [pid for pid in process_ids(service) if os.path.exists(f"/proc/{pid}")]  # noqa: PTH110 - no file


@contextmanager
def only(service, pid):
    """Stop all other workers for a while, so that this one serves, and the parent process, which would replace them."""
    others = [service.process.pid, *(each for each in running_ids(service) if each != pid)]
    for each in others:
        os.kill(each, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in reversed(others):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGCONT)


def read_metrics(service):
    """Return the value of every series."""
    lines = [line for line in service.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {series: float(value) for series, _, value in (line.rpartition(" ") for line in lines)}


def counters(values):
    return {name: value for name, value in values.items() if "_total" in name or name.startswith("tidegate_request_s")}


def ask_each_worker(service):
    """Send one request more to each worker than to the one before; return how many."""
    for number, pid in enumerate(process_ids(service), start=1):
        with only(service, pid):
            for _ in range(number):
                assert service.post("acquire", API).json()["allowed"]
            service.post("acquire", FEW)
            service.post("acquire", {"policy": "none", "key": "k"})
    return sum(range(1, 1 + len(process_ids(service))))


def test_every_worker_shows_the_totals(service, capsys):
    calls = ask_each_worker(service)
    # A worker adds the duration of a request after it has sent the response, so it may have been stopped in between.
    durations = 'tidegate_request_seconds_count{verb="acquire"}'
    until(lambda: read_metrics(service)[durations] == calls + 6, "the durations of all requests")
    for pid in process_ids(service):
        with only(service, pid):
            metrics = read_metrics(service)
            assert metrics['tidegate_decisions_total{policy="api",outcome="allowed"}'] == calls
            assert metrics['tidegate_decisions_total{policy="few",outcome="allowed"}'] == 2
            assert metrics['tidegate_denials_total{policy="few",limit="1h"}'] == 1
            assert metrics['tidegate_problems_total{kind="unknown-policy"}'] == 3
            assert metrics[durations] == calls + 6
            assert metrics['tidegate_request_seconds_bucket{verb="acquire",le="+Inf"}'] == calls + 6
            overview = service.get("/v1/overview").json()
            counts = {each["name"]: (each["admitted"], each["denied"]) for each in overview["policies"]}
            assert counts == {"api": (calls, 0), "few": (2, 1)}
            assert overview["problems"] == {"unknown-policy": 3}
            assert overview["process"]["id"] == service.process.pid
            assert {each["id"] for each in overview["workers"]} == set(process_ids(service))
            assert main(["top", "--once", "--json", "--url", service.url]) == 0
            rows = json.loads(capsys.readouterr().out)["policies"]
            assert {row["name"]: (row["admitted"], row["denied"]) for row in rows} == counts
    assert main(["top", "--once", "--url", service.url]) == 0
    assert f"process {service.process.pid} with 3 workers" in capsys.readouterr().out


@pytest.mark.slow
def test_reports_of_other_workers(service):
    """Recent denials, keys near a limit, waiting calls and the history include those of other workers."""
    first, second, third = process_ids(service)
    with only(service, first):
        service.get("/v1/overview")  # from now on, every worker records keys near a limit
    with only(service, second):
        assert [service.post("acquire", FEW).json()["allowed"] for _ in range(3)] == [True, True, False]

    def shown():
        with only(service, third):
            return service.get("/v1/overview").json()

    until(lambda: shown()["denials"], "the denial of another worker")
    overview = shown()
    assert [(each["policy"], each["key"]) for each in overview["denials"]] == [("few", "k")]
    assert [(each["key"], each["remaining"]) for each in overview["near"]] == [("k", 0)]
    until(lambda: sum(shown()["tracks"]["few"][0]) == 2, "the second in the history")
    with only(service, first):
        service.post("reset", FEW)
    until(lambda: not shown()["near"], "the end of a key that another worker has reset")
    with ThreadPoolExecutor() as pool:
        assert service.post("acquire", {**FEW, "cost": 2}).json()["allowed"]
        with only(service, second):
            waiting = pool.submit(service.post, "acquire", {**FEW, "timeout": 25})
            until(lambda: read_metrics(service)["tidegate_waiting"] == 1, "a call that waits")
        until(lambda: shown()["waiting"] == 1, "a call that waits in another worker")
        assert {each["name"]: each["waiting"] for each in shown()["policies"]} == {"api": 0, "few": 1}
        os.kill(second, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            waiting.result(30)
        until(lambda: read_metrics(service)["tidegate_waiting"] == 0, "the end of its waiting calls")


def test_blocks_of_all_workers_are_listed(service):
    first, second, _ = process_ids(service)

    def listed(pid):
        with only(service, pid):
            return [(each["policy"], each["key"]) for each in service.get("/v1/blocks").json()["blocks"]]

    with only(service, first):
        service.post("block", {"policy": "api", "key": ["a", "b"], "seconds": 600})
    until(lambda: listed(second) == [("api", ["a", "b"])], "the block of another worker")
    with only(service, second):
        assert service.post("unblock", {"policy": "api", "key": ["a", "b"]}).status_code == 200
    until(lambda: not listed(first) and not listed(second), "the end of a block that another worker has removed")


def test_counters_never_decrease_while_workers_are_killed(service):
    """Every response that a client got was counted, also by workers that were killed with SIGKILL."""
    stop, answered, sent = threading.Event(), [], []

    def load():
        while not stop.is_set():
            sent.append(1)
            with suppress(httpx.HTTPError):
                if service.post("acquire", API).json()["allowed"]:
                    answered.append(1)

    def scrape():
        while not stop.is_set():
            with suppress(httpx.HTTPError):
                scrapes.append(counters(read_metrics(service)))

    scrapes = []
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(load), pool.submit(load), pool.submit(scrape)]
        try:
            for number, pid in enumerate(process_ids(service), start=1):
                before = len(answered)
                until(lambda: len(answered) > before + 20, "some calls")  # noqa: B023 - called in this iteration
                os.kill(pid, signal.SIGKILL)
                until(lambda: len(process_ids(service)) == 3 + number, "a replacement", 60)  # noqa: B023 - as above
        finally:
            stop.set()
        for each in running:
            each.result(60)
    for earlier, later in pairwise(scrapes):
        decreased = {name: (value, later.get(name)) for name, value in earlier.items() if later.get(name, -1.0) < value}
        assert not decreased
    total = read_metrics(service)['tidegate_decisions_total{policy="api",outcome="allowed"}']
    assert len(answered) <= total <= len(sent)
    transactions = read_metrics(service)['tidegate_store{name="scripts"}']
    assert transactions >= 60  # the counters of the store include those of the workers that were killed


@pytest.mark.slow
def test_a_replaced_worker_continues_the_history(service):
    _, second, _ = process_ids(service)
    assert service.post("acquire", API).json()["allowed"]

    def seconds_with_call():
        overview = service.get("/v1/overview").json()
        return overview["seconds"] if sum(overview["tracks"].get("api", [[]])[0]) == 1 else 0

    until(lambda: seconds_with_call() > 2, "some seconds of history")
    before = seconds_with_call()
    os.kill(second, signal.SIGKILL)
    until(lambda: len(process_ids(service)) == 4, "a replacement", 60)

    def seconds_of_replacement():
        with only(service, process_ids(service)[-1]):
            overview = service.get("/v1/overview").json()
            assert len(overview["workers"]) == 3
            assert second not in [each["id"] for each in overview["workers"]]
            return seconds_with_call()

    until(lambda: seconds_of_replacement() >= before, "the history of another worker, which runs between two looks")
