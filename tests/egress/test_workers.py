"""The gateway in a service of several workers: every worker serves it, and shows the counts of all."""

import json
import os
import signal
from contextlib import contextmanager

import httpx
import pytest

from tests.egress.harness import OTHER_TOKEN, TOKEN
from tests.outbound.server import QuotaServer, as_json
from tests.servers.process import free_port, until
from tests.service.harness import serving
from tests.service.test_worker_totals import only, read_metrics, running_ids
from tests.service.test_workers import process_ids

LABELS = '{caller="a",provider="up"}'


@pytest.fixture(scope="module")
def upstream():
    with QuotaServer(respond=lambda request: as_json({"path": request.path})) as server:
        yield server


def write_egress(folder, upstream, **fields):
    settings = {"upstreams": {"up": upstream.url}, "allow_private": ["127.0.0.1"]}
    (folder / "egress.yaml").write_text(json.dumps({"callers": {"a": {"token": TOKEN}}, **settings, **fields}))


@contextmanager
def workers(folder, upstream, provider=""):
    """Run a service with two workers; yields it, and a function that sends a call over a connection of its own."""
    (folder / "up.yaml").write_text(f"domain: 127.0.0.1\nname: up\nlimits: [100000/1h]\n{provider}")
    write_egress(folder, upstream)
    port = free_port()
    text = (
        f"store: sqlite:///{folder}/quota.db\npolicies: {{api: 5/1m}}\nproviders: {folder}/up.yaml\nreload_every: 1h\n"
        f"egress: 127.0.0.1:{port}\negress_config: {folder}/egress.yaml\n"
    )

    def call(token=TOKEN, seconds=60):
        url, headers = f"http://127.0.0.1:{port}/up/v1/chat/completions", {"Authorization": f"Bearer {token}"}
        body = {"model": "m", "max_tokens": 9}
        return httpx.post(url, json=body, headers=headers, timeout=seconds, trust_env=False).status_code

    with serving(folder, text, "--workers", "2") as service:
        yield service, call


def answered(call, count=12):
    """Return how many calls are answered while a worker is stopped: those that the system gives to the other one."""
    found = 0
    for _ in range(count):
        try:
            found += call(seconds=0.5) == 200
        except httpx.TimeoutException:
            continue
    return found


def test_every_worker_serves_calls_and_shows_the_counts_of_all(upstream, tmp_path):
    with workers(tmp_path, upstream) as (service, call):
        for pid in process_ids(service):
            with only(service, pid):
                until(lambda: answered(call, 4), "a call in this worker", 60)
        for _ in range(20):
            assert call() == 200
        pids = process_ids(service)

        def counts():
            found = []
            for pid in running_ids(service):
                with only(service, pid):
                    values = read_metrics(service)
                    (row,) = service.get("/v1/overview").json()["panels"]["egress"]["rows"]
                found.append(
                    (
                        values[f"tidegate_egress_requests_total{LABELS}"],
                        values[f"tidegate_egress_first_byte_seconds_count{LABELS}"],
                        values[f"tidegate_egress_active{LABELS}"],
                        row["requests"],
                    )
                )
            return found

        sent = len(upstream.requests)
        until(lambda: counts() == [(sent, sent, 0, sent)] * 2, "the same counts in both workers")
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: len(process_ids(service)) > len(pids), "a replacement", 60)
        assert counts() == [(sent, sent, 0, sent)] * 2  # what the killed worker counted is kept
        assert service.stop() == 0
        assert not service.logged("Traceback")


@pytest.mark.slow
def test_every_worker_shows_the_cost_of_pool_members_in_all_workers(tmp_path):
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    price = "{date: 2026-11-01, models: {m: {input: 10, output: 50}}}"
    pool = f"profile: openai\nprice: {price}\npool: {{members: [{{name: first}}]}}\n"
    with (
        QuotaServer(respond=lambda _request: as_json(usage)) as upstream,
        workers(tmp_path, upstream, pool) as (service, call),
    ):
        assert {call() for _ in range(30)} == {200}  # each worker gets some of these connections

        def costs():
            found = []
            for pid in running_ids(service):
                with only(service, pid):
                    (member,) = service.get("/v1/overview").json()["panels"]["pools"]
                found.append(member["cost_micros"])
            return found

        until(lambda: costs() == [30 * 230] * 2, "the cost of all calls in both workers")
        pids = process_ids(service)
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: len(process_ids(service)) > len(pids), "a replacement", 60)
        assert costs() == [30 * 230] * 2  # what the killed worker counted is kept
        assert service.stop() == 0
        assert not service.logged("Traceback")


@pytest.mark.slow
def test_all_workers_use_the_file_that_was_accepted_last(upstream, tmp_path):
    with workers(tmp_path, upstream) as (service, call):
        write_egress(tmp_path, upstream, callers={"a": {"token": TOKEN}, "b": {"token": OTHER_TOKEN}})
        service.process.send_signal(signal.SIGHUP)
        until(lambda: {call(OTHER_TOKEN) for _ in range(8)} == {200}, "the new caller in all workers")
        write_egress(tmp_path, upstream, callers={"a": {"token": TOKEN, "limit": 5}})
        service.process.send_signal(signal.SIGHUP)
        until(lambda: service.logged("reload refused"), "the refusal")
        pids = process_ids(service)
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: len(process_ids(service)) > len(pids), "a replacement", 60)
        for pid in running_ids(service):
            with only(service, pid):
                until(
                    lambda: read_metrics(service)['tidegate_egress_reloads_total{outcome="refused"}'] == 1, "the count"
                )
                overview = service.get("/v1/overview").json()
                rules = overview["panels"]["egress"]["rules"]
                assert (rules["adopted"], rules["refused"]) == (1, 1)
                assert "egress.yaml:1: callers.a.limit: unknown" in rules["error"]
                assert "Egress file refused" in {each["title"] for each in overview["findings"]}
        assert {call(token) for token in (TOKEN, OTHER_TOKEN) for _ in range(8)} == {200}
        assert service.stop() == 0
        assert not service.logged("Traceback")
