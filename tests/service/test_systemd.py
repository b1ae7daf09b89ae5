"""Messages to systemd, received on a real socket."""

import socket

import pytest

from tests.service.harness import serving
from tidegate.service._runtime.systemd import SystemdNotifier


@pytest.fixture
def receiver(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as opened:
        opened.bind(str(tmp_path / "notify"))
        opened.settimeout(60)
        yield opened


@pytest.mark.parametrize("workers", [1, 2])
def test_a_service_reports_that_it_is_ready_alive_and_stopping(tmp_path, receiver, workers):
    text = f"store: sqlite:///{tmp_path}/limits.db\npolicies: {{api: 1/1s}}\nworkers: {workers}\n"
    messages = []
    with serving(tmp_path, text, NOTIFY_SOCKET=receiver.getsockname(), WATCHDOG_USEC="30000") as service:
        while messages.count("WATCHDOG=1") < 3 or "READY=1" not in messages:
            messages.append(receiver.recv(100).decode())
        service.process.terminate()
        while messages[-1] != "STOPPING=1":
            messages.append(receiver.recv(100).decode())
        service.process.wait(60)
    assert messages.count("READY=1") == 1
    assert set(messages) == {"READY=1", "WATCHDOG=1", "STOPPING=1"}


def test_a_socket_that_is_gone_is_logged_once(tmp_path, caplog):
    notifier = SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "missing")})
    notifier.notify("READY=1")
    notifier.notify("STOPPING=1")
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot notify systemd at {tmp_path}/missing: No such file or directory"
    ]


def test_abstract_sockets():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as opened:
        opened.bind(f"\0tidegate-{id(opened)}")
        opened.settimeout(10)
        SystemdNotifier({"NOTIFY_SOCKET": f"@tidegate-{id(opened)}"}).notify("READY=1")
        assert opened.recv(100) == b"READY=1"
