"""Sources, a swarm and their buses in a service of several workers: every worker shows and checks them."""

import os
import signal
from contextlib import ExitStack, closing

import httpx
import pytest

from tests.outbound.test_sharing import answer, providers
from tests.servers.process import until
from tests.servers.valkey import ValkeyServer
from tests.service.harness import serving
from tests.service.test_worker_totals import only
from tests.service.test_workers import process_ids, runs_sources
from tidegate.bus import open_bus
from tidegate.outbound import Gate
from tidegate.swarm import SwarmLimiter

PROVIDER = "domain: x.example\nname: example\nlimit: 10\nperiod: 1m\n"
SOURCE = "name: prices\nurl: http://localhost:9/prices\ninterval: 1h\n"


@pytest.fixture(scope="module")
def store():
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def bus():
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def start(store, tmp_path):
    """Start a service with two workers; return it, and a connection to each worker."""
    store.ask("FLUSHALL")
    (tmp_path / "provider.yaml").write_text(PROVIDER)
    (tmp_path / "source.yaml").write_text(SOURCE)
    files = f"providers: {tmp_path}/provider.yaml\nsources: {tmp_path}/source.yaml\ndata: {tmp_path}/data\n"
    with ExitStack() as stack:

        def begin(text):
            text = f"store: {store.url}?deadline=20s\npolicies: {{api: 2/1h}}\n{files}{text}"
            service = stack.enter_context(serving(tmp_path, text, "--workers", "2"))
            workers = []
            for pid in process_ids(service):
                workers.append(stack.enter_context(httpx.Client(base_url=service.url, timeout=60, trust_env=False)))
                with only(service, pid):  # the connection stays with the worker that accepts it
                    workers[-1].get("/healthz")
            return service, workers

        yield begin


def panels(worker):
    return worker.get("/v1/overview").json()["panels"]


def shows_all(worker):
    """Return whether a worker shows the sources, the agents and the bus."""
    found = panels(worker)
    assert set(found) == {"sources", "swarm", "bus"}
    return (
        [each["name"] for each in found["sources"].get("sources", ())] == ["prices"]
        and [each["name"] for each in found["sources"]["providers"]] == ["example"]
        and [each["id"] for each in found["swarm"].get("agents", ())] == ["agent-1"]
        and found["bus"].get("connected") is True
    )


@pytest.mark.slow
def test_every_worker_shows_the_panels_of_the_first(start, bus, tmp_path):
    service, workers = start(f"swarm: {bus.url}\n")
    (first,) = (each for each in process_ids(service) if runs_sources(each, tmp_path / "data"))
    position = process_ids(service).index(first)
    with open_bus(bus.url) as connected, SwarmLimiter(bus=connected, agent_id="agent-1") as agent:
        agent.set_capacity("api", 100, window=60)
        for worker in workers:
            until(lambda worker=worker: shows_all(worker), "the panels in each worker")
        charts = [panels(worker)["swarm"]["resources"]["api"] for worker in workers]
        assert len({chart[0][0] for chart in charts}) == 1  # the same chart in each worker
        # A worker that hangs, or is replaced, has no panels; the others say so, and still show the rest.
        del workers[position]
        service.process.send_signal(signal.SIGSTOP)  # it would replace the worker
        os.kill(first, signal.SIGSTOP)
        missing = "no response within 2 s"
        for worker in workers:
            until(lambda worker=worker: panels(worker)["sources"].get("error") == missing, "the hanging worker")
        service.process.send_signal(signal.SIGCONT)
        os.kill(first, signal.SIGKILL)
        for worker in workers:
            until(lambda worker=worker: shows_all(worker), "the panels of the replacement", 60)
        assert service.stop() == 0
        assert not service.logged("Traceback")


@pytest.mark.once
@pytest.mark.parametrize("setting", ["swarm", "bus"])
def test_every_worker_is_ready_only_while_the_bus_is_connected(start, bus, setting):
    service, workers = start(f"{setting}: {bus.url}\n")

    def statuses():
        return {worker.get("/readyz").status_code for worker in workers}

    until(lambda: statuses() == {200}, "the bus")
    bus.kill()
    until(lambda: statuses() == {503}, "the outage of the bus")
    assert all("the bus cannot be reached" in worker.get("/readyz").json()["detail"] for worker in workers)
    bus.start()
    until(lambda: statuses() == {200}, "the return of the bus")
    assert service.stop() == 0


def test_a_refusal_on_the_bus_reaches_every_worker(start, bus):
    _, workers = start(f"bus: {bus.url}\n")
    ask = {"provider": "example"}
    assert all(worker.post("/v1/peek", json=ask).json()["allowed"] for worker in workers)
    with closing(Gate(providers(), bus=bus.url)) as gate:
        assert answer(gate, 429, [("Retry-After", "3600")]) == 429
        for worker in workers:
            until(lambda worker=worker: not worker.post("/v1/peek", json=ask).json()["allowed"], "the refusal")
            assert worker.post("/v1/peek", json=ask).json()["retry_after"] > 3000
