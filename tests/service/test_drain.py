"""At SIGTERM the service is first not ready, then refuses connections, then finishes what is under way."""

import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.servers.process import until
from tests.service.harness import serving
from tests.service.test_workers import store_of

POLICIES = "policies: {api: 1000/1h, slow: 1/10s fixed_window}\n"
SLOW = {"policy": "slow", "key": "k"}


def refuses_connections(service):
    try:
        socket.create_connection(("127.0.0.1", service.port), 20).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.once
@pytest.mark.parametrize("workers", [1, 2])
def test_the_order_of_a_stop(tmp_path, workers):
    text = store_of(tmp_path) + POLICIES
    options = ("--workers", str(workers), "--stop-within", "60s", "--drain-for", "5m")
    with serving(tmp_path, text, *options) as service, ThreadPoolExecutor() as pool:
        assert service.post("acquire", SLOW).json()["allowed"]
        waiting = pool.submit(service.post, "acquire", {**SLOW, "timeout": 25})
        until(lambda: "tidegate_waiting 1" in service.get("/metrics").text, "a call that waits")
        service.process.send_signal(signal.SIGTERM)
        # 1. Not ready; the listener still accepts, and requests are served.
        until(lambda: service.get("/readyz").status_code == 503, "the end of readiness")
        for _ in range(5):
            response = service.get("/readyz")
            assert (response.status_code, response.json()["state"]) == (503, "stopping")
            assert response.headers["connection"] == "close"
            assert service.get("/healthz").status_code == 200
            assert service.post("acquire", {"policy": "api", "key": "k"}).json()["allowed"]
        # 2. The listener closes: here at the second SIGTERM, otherwise after drain_for.
        service.process.send_signal(signal.SIGTERM)
        until(lambda: refuses_connections(service), "the end of the listener")
        assert service.process.poll() is None
        assert not waiting.done()
        # 3. What is under way ends: the call gets its permit.
        assert waiting.result(60).json()["allowed"]
        assert service.process.wait(30) == 0
        assert not service.logged("Traceback")


def test_draining_ends_by_itself(tmp_path):
    with serving(tmp_path, POLICIES, "--drain-for", "300ms") as service:
        service.process.send_signal(signal.SIGTERM)
        until(lambda: refuses_connections(service), "the end of the listener")
        assert service.process.wait(30) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_does_not_drain(tmp_path, workers):
    options = ("--workers", str(workers), "--drain-for", "5m")
    with serving(tmp_path, store_of(tmp_path) + POLICIES, *options) as service:
        assert service.stop(signal.SIGINT) in (0, 130)
        with pytest.raises(httpx.ConnectError):
            service.get("/readyz")
