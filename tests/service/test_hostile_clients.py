"""Hostile clients against a real process: silent connections, incomplete and large requests, a stop in between."""

import json
import os
import resource
import select
import signal
import socket
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.servers.process import until
from tests.service.harness import serving
from tests.service.test_service_processes import log_lines
from tidegate.service._runtime.file_limits import raise_descriptor_limit

RULES = "policies: {api: 1000000/1h, slow: 1/1h}\n"
FEW = 1024  # descriptors
SILENT = 1400
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(body, *fields):
    lines = ["POST /v1/acquire HTTP/1.1", "Host: localhost", "Content-Type: application/json", *fields]
    return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body


ASK = post(b'{"policy":"api","key":"k"}')


def connect(service, data=b"", port=None):
    caller = socket.create_connection(("127.0.0.1", port or service.port), 20)
    if data:
        caller.sendall(data)
    return caller


def is_closed(caller):
    """Return whether the server has closed the connection."""
    caller.setblocking(False)
    try:
        while caller.recv(65536):
            pass  # a gRPC server speaks first
        return True  # noqa: TRY300 - the end
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def read_all(caller):
    """Read until the server closes."""
    found = b""
    while data := caller.recv(65536):
        found += data
    return found


def have_descriptors(connections):
    """Raise the limit of this process, which has as many connections as the service."""
    limit = raise_descriptor_limit()
    if limit is not None and limit < connections + FEW:
        pytest.skip(f"this machine allows {limit} open files, too few for {connections} connections")


def limits_of(pid):
    (line,) = [
        line for line in Path(f"/proc/{pid}/limits").read_text(encoding="ascii").splitlines() if "open files" in line
    ]
    return [int(word) for word in line.split()[3:5]]


@pytest.mark.once
@pytest.mark.parametrize("workers", [1, 2])
def test_many_silent_connections_do_not_block_health_checks(tmp_path, workers):
    """More connections than descriptors, of clients that never send anything."""
    have_descriptors(SILENT * workers)
    with ExitStack() as stack:
        store = f"store: sqlite:///{tmp_path / 'limits.db'}\nmax_connections: 2000\nread_timeout: 60s\n"
        script = ["sh", "-c", f'ulimit -n {FEW} && exec "$@"', "sh"]
        service = stack.enter_context(serving(tmp_path, store + RULES, "--workers", str(workers), prefix=script))
        assert service.logged(f"max_connections is lowered to {FEW - 128}: the limit on open files is {FEW}")
        silent = []
        for _ in range(SILENT * workers):
            silent.append(stack.enter_context(connect(service)))
            if len(silent) % 100 == 0:
                with connect(service, GET) as checker:
                    assert checker.recv(4096).startswith(b"HTTP/1.1 200 OK")
        assert service.get("/healthz").status_code == 200
        assert service.get("/readyz").status_code == 200
        assert service.post("acquire", {"policy": "api", "key": "k"}).json()["allowed"]
        # Those that waited longest made room, not the latest.
        assert sum(is_closed(caller) for caller in silent) >= (SILENT - FEW) * workers
        assert not is_closed(silent[-1])
        assert not service.logged("Too many open files")
        assert service.stop() == 0


def test_silent_grpc_connections_are_closed_too(tmp_path):
    have_descriptors(SILENT)
    script = ["sh", "-c", f'ulimit -n {FEW} && exec "$@"', "sh"]
    text = "read_timeout: 1s\nidle_timeout: 1s\n" + RULES
    with serving(tmp_path, text, "--grpc", "GRPC", prefix=script) as service, ExitStack() as stack:
        silent = [stack.enter_context(connect(service, port=service.grpc)) for _ in range(SILENT)]
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
        assert service.get("/healthz").status_code == 200
        until(lambda: all(is_closed(caller) for caller in silent), "the end of all of them")
        with connect(service, preface, port=service.grpc) as idle:
            until(lambda: is_closed(idle), "the end of an idle one")
        assert service.get("/healthz").status_code == 200


def test_the_soft_limit_of_descriptors_is_raised(tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    script = ["sh", "-c", 'ulimit -S -n 256 && exec "$@"', "sh"]
    with serving(
        tmp_path, RULES, "--store", f"sqlite:///{tmp_path / 'limits.db'}", "--workers", "2", prefix=script
    ) as it:
        assert limits_of(it.process.pid)[0] == 256  # it only watches the others
        processes = [int(line.split("process ")[1].split('"')[0]) for line in log_lines(it, "serving on")]
        assert [limits_of(pid) for pid in processes] == [[hard, hard]] * 2
    with serving(tmp_path, RULES, prefix=script) as it:
        assert limits_of(it.process.pid) == [hard, hard]


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    text = "read_timeout: 300ms\nidle_timeout: 900ms\nmax_body: 65536\n" + RULES
    with serving(tmp_path_factory.mktemp("hostile"), text) as it:
        yield it


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /hea", GET[:-2], b"P", ASK[:-30]])
def test_clients_that_stop_sending_are_disconnected(impatient, sent):
    with connect(impatient, sent) as caller:
        until(lambda: is_closed(caller), "the end of a silent connection")


@pytest.mark.parametrize("sent", [GET[:-2] + b"x: y\r\n" * 1000, post(b" " * 30_000), b"\r\n" * 5000])
def test_clients_that_send_byte_by_byte_are_disconnected(impatient, sent):
    position = 0
    with connect(impatient) as caller:

        def drip():
            nonlocal position
            position += 1
            try:
                caller.sendall(sent[position - 1 : position])
            except ConnectionError:
                return True
            readable = select.select([caller], [], [], 0)[0]
            return bool(readable)

        until(drip, "the end of a dripping connection")
        assert position < len(sent)
        caller.setblocking(True)
        try:
            result = read_all(caller)
        except ConnectionError:
            result = b""
        assert result == b"" if not sent.startswith(b"POST") else result[:12] in (b"", b"HTTP/1.1 408")


def test_an_incomplete_body_gets_408(impatient):
    with connect(impatient, ASK[:-5]) as caller:
        result = read_all(caller)
    assert result.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"urn:tidegate:problem:timeout" in result
    assert impatient.get("/metrics").text.count('tidegate_problems_total{kind="timeout"}') == 1


def test_idle_connections_are_closed(impatient):
    with connect(impatient, GET) as caller:
        assert read_all(caller).endswith(b'{"ok":true}')  # ends because the server closes the connection


def test_http_2_is_refused(impatient):
    with connect(impatient, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00") as caller:
        assert read_all(caller).startswith(b"HTTP/1.1 400 Bad Request\r\n")
    with httpx.Client(http1=True, http2=True, trust_env=False) as http:
        assert http.get(f"{impatient.url}/healthz").http_version == "HTTP/1.1"


def test_a_client_that_sends_too_much_can_read_the_response(impatient):
    """Clients that send everything before they read: a server that just closes resets their connection."""
    large = b" " * 8_000_000
    for close in (True, False):
        request = urllib.request.Request(  # noqa: S310 - our own
            f"{impatient.url}/v1/acquire", large, {"Content-Type": "application/json"}
        )
        if close:  # urllib closes every connection
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with pytest.raises(urllib.error.HTTPError) as refused:
                opener.open(request, timeout=20)
            with refused.value as answer:
                assert json.load(answer)["type"] == "urn:tidegate:problem:too-large"
        else:
            answer = impatient.post("acquire", " " * 8_000_000)
            assert answer.json()["type"] == "urn:tidegate:problem:too-large"
    head = GET[:-2] + b"x: " + b"y" * 5_000_000 + b"\r\n\r\n"
    with connect(impatient) as caller:
        caller.sendall(head)
        assert read_all(caller).startswith(b"HTTP/1.1 431 ")


def test_responses_have_a_date_and_no_server_name(impatient):
    fields = impatient.get("/healthz").headers
    assert fields["date"].endswith(" GMT")
    assert "server" not in fields


def test_a_stop_refuses_incomplete_requests(tmp_path):
    with serving(tmp_path, "read_timeout: 60s\n" + RULES, "--stop-within", "200ms") as service, ExitStack() as stack:
        service.post("acquire", {"policy": "slow", "key": "k"})
        half_head = stack.enter_context(connect(service, GET[:9]))
        half_body = stack.enter_context(connect(service, ASK[:-5]))
        chunked = ASK.partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345"
        half_chunk = stack.enter_context(connect(service, chunked))
        waiting = stack.enter_context(connect(service, post(b'{"policy":"slow","key":"k","timeout": 25}')))
        idle = stack.enter_context(connect(service, GET))
        until(lambda: "tidegate_requests_in_flight 4" in service.get("/metrics").text, "three requests, and this one")
        service.process.send_signal(signal.SIGTERM)
        for caller in (half_body, half_chunk, waiting):
            result = read_all(caller)
            assert result.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert b"urn:tidegate:problem:stopping" in result
        assert read_all(half_head) == b""
        assert read_all(idle).endswith(b'{"ok":true}')
        assert service.process.wait(30) == 0
        assert not service.logged("Traceback")


def test_a_body_that_completes_while_stopping_is_answered(tmp_path):
    with serving(tmp_path, "read_timeout: 60s\n" + RULES, "--stop-within", "20s", "--drain-for", "1m") as service:
        with connect(service, ASK[:-5]) as half:
            until(lambda: "tidegate_requests_in_flight 2" in service.get("/metrics").text, "half a request")
            service.process.send_signal(signal.SIGTERM)
            until(lambda: service.get("/readyz").status_code == 503, "the stop")
            service.process.send_signal(signal.SIGTERM)  # again: the service does not drain any longer
            until(lambda: refuses_connections(service), "the end of the listener")
            half.sendall(ASK[-5:])
            assert b'"allowed":true' in read_all(half)
        assert service.process.wait(30) == 0


def refuses_connections(service):
    try:
        connect(service).close()
    except ConnectionRefusedError:
        return True
    return False


def test_no_connection_is_refused_while_a_process_is_replaced(tmp_path):
    """The listening socket outlives each process: no connection is refused while one is replaced."""
    text = f"store: sqlite:///{tmp_path / 'limits.db'}?deadline=10s\n" + RULES
    with serving(tmp_path, text, "--workers", "2") as service:
        processes = [int(line.split("process ")[1].split('"')[0]) for line in log_lines(service, "serving on")]
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        assert service.get("/healthz").status_code == 200
        assert service.stop() == 0
