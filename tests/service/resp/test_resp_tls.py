"""The RESP port with TLS: redis-py against a real process, and clients that do not complete their handshake."""

import socket
import ssl
from contextlib import ExitStack

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.servers.process import until
from tests.service.harness import DECISION
from tests.service.resp.harness import encode, serving_resp

RULES = "policies: {api: 5/1h}\n"
TOKENS = f"decision_token: {DECISION}\n"
MAX_CONNECTIONS = 16
HELLO_START = b"\x16\x03\x01\x02\x00\x01"  # the first bytes of a handshake


def tls_settings(certificate):
    return f"resp_tls_cert: {certificate / 'cert.pem'}\nresp_tls_key: {certificate / 'key.pem'}\n"


def decisions(replies):
    return [reply[0] for reply in replies]


def is_closed(caller):
    """Return whether the server has closed the connection."""
    caller.setblocking(False)
    try:
        return caller.recv(4096) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_tls(tmp_path, certificate):
    with serving_resp(tmp_path, RULES + TOKENS + tls_settings(certificate)) as (service, port):
        trusted = {"ssl": True, "ssl_ca_certs": str(certificate / "cert.pem")}
        with redis.Redis(host="127.0.0.1", port=port, password=DECISION, protocol=3, **trusted) as client:
            assert client.execute_command("TG.ACQUIRE", "api", "tls")[0] == 1
            with client.pipeline(transaction=False) as pipeline:
                for _ in range(5):
                    pipeline.execute_command("TG.ACQUIRE", "api", "tls")
                assert decisions(pipeline.execute()) == [1] * 4 + [0]
        with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as client, pytest.raises(redis.ConnectionError):
            client.ping()
        assert service.get("/healthz").json() == {"ok": True}


@pytest.mark.parametrize("sent", [b"", HELLO_START], ids=["silent", "incomplete"])
def test_handshakes_count_towards_the_connections(tmp_path, certificate, sent):
    bounds = f"max_connections: {MAX_CONNECTIONS}\nread_timeout: 60s\n"
    with (
        serving_resp(tmp_path, RULES + bounds + tls_settings(certificate)) as (service, port),
        redis.Redis(host="127.0.0.1", port=port, ssl=True, ssl_ca_certs=str(certificate / "cert.pem")) as client,
        ExitStack() as stack,
    ):
        callers = []
        for _ in range(2 * MAX_CONNECTIONS):
            callers.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)))
            callers[-1].sendall(sent)
        # The oldest make room, as over HTTP.
        until(lambda: all(is_closed(caller) for caller in callers[:MAX_CONNECTIONS]), "the end of the oldest", 20)
        assert not any(is_closed(caller) for caller in callers[MAX_CONNECTIONS:])
        assert client.execute_command("TG.ACQUIRE", "api", "k")[0] == 1
        assert client.info()["connected_clients"] == MAX_CONNECTIONS
        assert service.get("/healthz").status_code == 200
        assert service.stop() == 0  # does not wait for the handshakes


@pytest.mark.parametrize("sent", [b"", HELLO_START], ids=["silent", "incomplete"])
def test_a_handshake_has_to_be_complete_within_the_read_timeout(tmp_path, certificate, sent):
    with (
        serving_resp(tmp_path, RULES + "read_timeout: 1s\n" + tls_settings(certificate)) as (_, port),
        socket.create_connection(("127.0.0.1", port), 20) as caller,
        redis.Redis(host="127.0.0.1", port=port, ssl=True, ssl_ca_certs=str(certificate / "cert.pem")) as client,
    ):
        caller.sendall(sent)
        until(lambda: is_closed(caller), "the end of the handshake", 20)
        assert client.info()["connected_clients"] == 1


def test_commands_sent_together_with_the_end_of_the_handshake_are_answered(tmp_path, certificate):
    context = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with (
        serving_resp(tmp_path, RULES + tls_settings(certificate)) as (_, port),
        socket.create_connection(("127.0.0.1", port), 20) as caller,
    ):
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                caller.sendall(outgoing.read())
                incoming.write(caller.recv(65536))
        client.write(encode("PING"))
        caller.sendall(outgoing.read())
        while True:
            try:
                reply = client.read(100)
                break
            except ssl.SSLWantReadError:
                incoming.write(caller.recv(65536))
        assert reply == b"+PONG\r\n"
