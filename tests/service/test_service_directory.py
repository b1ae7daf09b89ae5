"""Services that share a store list each other by name."""

import socket

import pytest

from tests.cases import cases
from tests.servers.process import until
from tests.servers.valkey import ValkeyServer
from tests.service.harness import serving
from tidegate._cli import main
from tidegate.service._decisions.service_directory import MAX_SERVICES, SERVICES, ServiceDirectory
from tidegate.stores import MemoryStore
from tidegate.stores._sqlite import SQLiteStore
from tidegate.testing import ManualClock

POLICIES = "policies: {api: 2/1h fixed_window}\n"


@pytest.fixture
def shared(tmp_path):
    clock = ManualClock(start=1_728_000_000)
    store = SQLiteStore(tmp_path / "limits.db", clock=clock)
    yield store
    store.close()


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """No clock advances between two lists here."""
    monkeypatch.setattr("tidegate.service._decisions.service_directory.CACHE_TTL", 0)


async def names(directory):
    return [(each.name, each.admitted, each.denied, each.own) for each in await directory.list()]


async def test_each_service_is_listed_once_with_its_last_record(shared):
    long = "there:" + "ä" * 60
    here, there = (ServiceDirectory(shared, name, (1,)) for name in ("here:8080", long))
    for count in (1, 2):
        assert await here.announce(10 * count, count)
        assert await there.announce(20, 0)
    assert await names(here) == [("here:8080", 20, 2, True), (long[:48], 20, 0, False)]
    shared.clock.advance(30)
    await here.announce(30, 3)
    assert await names(there) == [("here:8080", 30, 3, False), (long[:48], 20, 0, True)]
    assert [each.seconds_ago for each in await there.list()] == [0.0, 30.0]
    shared.clock.advance(30)
    await here.announce(40, 4)
    assert await names(here) == [("here:8080", 40, 4, True)]  # the other one has ended


async def test_the_number_of_listed_services_is_bounded(shared):
    services = [ServiceDirectory(shared, f"{number:02}", ()) for number in range(MAX_SERVICES + 1)]
    for each in services:
        assert await each.announce(0, 0)
    listed = [await each.list() for each in services]
    assert {len(each) for each in listed} == {MAX_SERVICES}
    assert [sum(record.own for record in each) for each in listed] == [1] * len(services)


@cases("data", [b"", b"{}", b"\xff", b"[1]", b'["a", "b", 1]'])
async def test_invalid_records_are_ignored(data, shared):
    here = ServiceDirectory(shared, "here", ())
    await here.announce(1, 2)
    shared.put_value(SERVICES, "other", data, 60)
    assert await names(here) == [("here", 1, 2, True)]


async def test_a_store_in_memory_is_not_shared():
    directory = ServiceDirectory(MemoryStore(), "here", ())
    assert not await directory.announce(1, 1)
    assert await directory.list() == []
    await directory.run(lambda: (0, 0))


def test_the_overview_names_every_service_on_the_store(tmp_path, capsys):
    with ValkeyServer() as valkey:
        text = f"store: {valkey.url}?deadline=2s\n" + POLICIES
        folders = [tmp_path / "a", tmp_path / "b"]
        for folder in folders:
            folder.mkdir()
        with serving(folders[0], text, "--workers", "2") as first, serving(folders[1], text) as second:
            expected = {f"{socket.gethostname()}:{each.port}" for each in (first, second)}
            for service in (first, second):

                def listed(service=service):
                    found = service.get("/v1/overview").json()["services"]
                    own = [each["name"] for each in found if each["own"]]
                    right = own == [f"{socket.gethostname()}:{service.port}"]
                    return right and {each["name"] for each in found} == expected

                until(listed, "both services")
                assert main(["top", "--once", "--url", service.url]) == 0
                assert f"{socket.gethostname()}:{service.port} (this one)" in capsys.readouterr().out
