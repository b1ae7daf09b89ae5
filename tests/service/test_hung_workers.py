"""A worker that hangs (SIGSTOP) is noticed and replaced; every protocol still gets responses meanwhile."""

import json
import os
import signal
import socket
from contextlib import ExitStack, closing, suppress

import grpc
import httpx
import pytest

from tests.outbound.server import QuotaServer, as_json
from tests.servers.process import free_port, until
from tests.service.harness import serving
from tests.service.test_envoy import MESSAGES
from tests.service.test_workers import process_ids
from tidegate.service._envoy.messages import METHOD, SERVICE

CONNECTIONS = 20
PING = b"*1\r\n$4\r\nPING\r\n"
WITHIN = 8.0  # seconds for the replacement: 5 on a quiet machine


@pytest.fixture
def ports():
    return {name: free_port() for name in ("resp", "egress")}


@pytest.fixture
def service(tmp_path, ports):
    with QuotaServer(respond=lambda request: as_json({"path": request.path})) as upstream:
        (tmp_path / "up.yaml").write_text("domain: 127.0.0.1\nname: up\nlimits: [100000/1h]\n")
        egress = {"upstreams": {"up": upstream.url}, "allow_private": ["127.0.0.1"]}
        (tmp_path / "egress.yaml").write_text(json.dumps(egress))
        text = (
            f"store: sqlite:///{tmp_path}/limits.db?deadline=10s\npolicies: {{api: 1000000/1h}}\n"
            f"domains: [{{domain: edge, descriptors: [{{key: ip, limits: [1000000/1h]}}]}}]\n"
            f"providers: {tmp_path}/up.yaml\nresp: 127.0.0.1:{ports['resp']}\n"
            f"egress: 127.0.0.1:{ports['egress']}\negress_config: {tmp_path}/egress.yaml\n"
        )
        with serving(tmp_path, text, "--workers", "2", "--grpc", "GRPC") as running:
            until(lambda: len(process_ids(running)) == 2, "both workers")
            yield running


def ask_http(service, _ports):
    return service.post("acquire", {"policy": "api", "key": "k"}).json()["allowed"]


def ask_resp(_service, ports):
    with closing(socket.create_connection(("127.0.0.1", ports["resp"]), timeout=WITHIN)) as connection:
        connection.sendall(PING)
        return connection.recv(100) == b"+PONG\r\n"


def ask_egress(_service, ports):
    url = f"http://127.0.0.1:{ports['egress']}/up/x"
    return httpx.get(url, timeout=WITHIN, trust_env=False).status_code == 200


def ask_grpc(service, _ports):
    """Ask over a new connection, as Envoy does after a failure, until there is a response."""
    request = MESSAGES["RateLimitRequest"](domain="edge")
    request.descriptors.add().entries.add(key="ip", value="k")

    def answered():
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{service.grpc}", options=options) as channel:
            call = channel.unary_unary(f"/{SERVICE}/{METHOD}", MESSAGES["RateLimitRequest"].SerializeToString)
            with suppress(grpc.RpcError):
                return bool(call(request, timeout=1))
        return False

    until(answered, "a response over gRPC", WITHIN)
    return True


def test_every_protocol_is_answered_and_the_worker_is_replaced(service, ports):
    hung, *_ = process_ids(service)
    os.kill(hung, signal.SIGSTOP)
    for ask in (ask_http, ask_resp, ask_egress):
        assert all(ask(service, ports) for _ in range(CONNECTIONS)), ask
    assert ask_grpc(service, ports)
    until(lambda: len(process_ids(service)) == 3, "a replacement", WITHIN)
    assert service.logged(f"process {hung} has not responded for")
    until(lambda: service.get("/readyz").status_code == 200, "a service that is ready")
    assert service.stop() == 0


def test_connections_of_the_hung_worker_end(service, ports):
    """A client of the hung worker learns within seconds that it must connect again."""
    hung, *_ = process_ids(service)
    with ExitStack() as stack:
        opened = [
            stack.enter_context(closing(socket.create_connection(("127.0.0.1", ports["resp"]), timeout=WITHIN)))
            for _ in range(CONNECTIONS)
        ]
        for connection in opened:  # a worker has accepted each of them
            connection.sendall(PING)
            assert connection.recv(100) == b"+PONG\r\n"
        os.kill(hung, signal.SIGSTOP)
        for connection in opened:
            connection.sendall(PING)
            with suppress(ConnectionResetError):
                assert connection.recv(100) in (b"+PONG\r\n", b"")
    assert service.stop() == 0


def test_readyz_and_the_dashboard_report_it(service):
    hung, *_ = process_ids(service)
    # Without the parent process nobody replaces the worker, so the state stays.
    service.process.send_signal(signal.SIGSTOP)
    stop_outside_a_transaction(service, hung)
    until(lambda: service.get("/readyz").status_code == 503, "a service that is not ready")
    problem = service.get("/readyz").json()
    assert problem["type"] == "urn:tidegate:problem:worker-unresponsive"
    assert f"worker process {hung} has not responded for" in problem["detail"]

    def finding():
        found = {each["kind"]: each for each in service.get("/v1/overview").json()["findings"]}
        return found.get("workers")

    until(finding, "the finding of the dashboard")
    assert finding()["title"] == "1 of 2 workers not responding"
    assert finding()["detail"] == f"process {hung}"
    os.kill(hung, signal.SIGCONT)
    until(lambda: service.get("/readyz").status_code == 200, "a service that is ready")
    service.process.send_signal(signal.SIGCONT)
    assert service.stop() == 0


def test_a_pause_of_all_processes_replaces_none(service):
    """A machine that is suspended or overloaded stops the parent process too."""
    workers = process_ids(service)
    for pid in (service.process.pid, *workers):
        os.kill(pid, signal.SIGSTOP)
    stopped_for(5)
    for pid in (service.process.pid, *workers):
        os.kill(pid, signal.SIGCONT)
    stopped_for(2.5)
    assert process_ids(service) == workers
    assert service.get("/readyz").status_code == 200
    assert service.stop() == 0


def stop_outside_a_transaction(service, worker):
    """Stop a worker while it has neither the lock of the database nor a connection that the test just opened."""

    def stopped():
        os.kill(worker, signal.SIGSTOP)
        with suppress(httpx.TimeoutException):
            return service.post("acquire", {"policy": "api", "key": "k"}, timeout=2).status_code == 200
        os.kill(worker, signal.SIGCONT)
        return False

    until(stopped, "a stop outside a transaction")


def stopped_for(seconds):
    """Let real time pass: the processes of the test have no manual clock."""
    with suppress(AssertionError):
        until(lambda: False, "nothing", seconds)
