"""Services that share a store list each other's blocks."""

import pytest

from tests.cases import cases
from tests.servers.process import until
from tests.servers.valkey import ValkeyServer
from tests.service.harness import ADMIN, serving
from tidegate.service.decisions import block_directory, service_directory, stored_bytes
from tidegate.service.decisions.block_directory import BlockDirectory, decode_blocks, encode_blocks
from tidegate.service.decisions.blocks import Blocks
from tidegate.service.decisions.service_directory import ServiceDirectory
from tidegate.stores import MemoryStore
from tidegate.stores.sqlite import SQLiteStore
from tidegate.testing import ManualClock

KEYS = [("api", "bad"), ("api", ("tenant", "ä" * 200)), ("other", 'q"\ud800')]


class SharingService:
    """What a service needs to list blocks, on a store of its own connection."""

    def __init__(self, store, name):
        self.clock = store.clock
        self.blocks = Blocks(store)
        self.services = ServiceDirectory(store, name, ())
        self.directory = BlockDirectory(store, self.services, self.blocks)

    async def announce(self):
        await self.blocks.refresh()
        await self.services.announce(0, 0)
        await self.directory.announce()

    async def listed(self):
        await self.blocks.refresh()
        return sorted(str((each.policy, each.key)) for each in await self.blocks.find_all())


class CountingStore:
    """Counts the calls of a store."""

    def __init__(self, store):
        self._store = store
        self.calls = 0

    async def apply_async(self, *arguments):
        self.calls += 1
        return await self._store.apply_async(*arguments)

    def __getattr__(self, name):
        return getattr(self._store, name)


@pytest.fixture
def clock():
    return ManualClock(start=1_728_000_000)


@pytest.fixture
def services(tmp_path, clock):
    stores = [SQLiteStore(tmp_path / "limits.db", clock=clock) for _ in range(3)]
    yield [SharingService(store, f"service-{number}") for number, store in enumerate(stores)]
    for store in stores:
        store.close()


async def pass_period(clock, *services):
    clock.advance(block_directory.RECORD_SECONDS)
    for service in services:
        await service.announce()
    clock.advance(3)  # beyond the time for which a service caches what it has read


async def test_blocks_of_other_services_are_listed_until_they_end(services, clock):
    first, second, _ = services
    for policy, key in KEYS:
        await first.blocks.block(policy, key, 300)
    await second.blocks.block("api", "own", 300)
    await pass_period(clock, first, second)
    expected = sorted(str(each) for each in [*KEYS, ("api", "own")])
    assert await first.listed() == await second.listed() == expected
    await second.blocks.unblock("api", "bad")
    clock.advance(block_directory.RECORD_SECONDS)
    assert await first.listed() == await second.listed() == [each for each in expected if "bad" not in each]
    clock.advance(300)
    assert await first.listed() == await second.listed() == []


async def test_a_block_stays_listed_after_its_service_has_ended(services, clock):
    first, second, third = services
    await first.blocks.block("api", "bad", 3600)
    await pass_period(clock, first, second)
    await second.listed()
    for _ in range(
        2 * service_directory.RECORD_SECONDS // block_directory.RECORD_SECONDS + 3
    ):  # the first service has ended
        await pass_period(clock, second, third)
    assert len(await second.services.list()) == 2
    assert await third.listed() == [str(("api", "bad"))]


async def test_what_all_services_write_is_read_once(services, clock):
    for service in services:
        for number in range(50):
            await service.blocks.block("api", f"key-{number}", 3600)
    await pass_period(clock, *services)
    stored = services[0].directory._stored  # noqa: SLF001 - counts calls
    store = stored._store = CountingStore(stored._store)  # noqa: SLF001 - counts calls
    assert len([*await services[0].directory.find()]) == 50
    records = -(-len(encode_blocks(("api", f"key-{number}") for number in range(50))) // stored_bytes.ENTRY_BYTES)
    assert store.calls == 1 + records + 3  # the clock; one service in full; then one entry per service and period


async def test_without_blocks_nothing_is_written_or_read(services, clock):
    first, second, _ = services
    await pass_period(clock, first, second)
    assert await second.directory.find() == ()
    await second.blocks.block("api", "bad", 60)
    assert [*await second.directory.find()] == []
    memory = SharingService(MemoryStore(clock=clock), "memory")
    await memory.blocks.block("api", "bad", 60)
    await memory.directory.run()  # returns: the store is not shared
    assert await memory.directory.find() == ()


def test_the_blocks_that_fit_are_written():
    assert decode_blocks(encode_blocks(reversed(KEYS))) == KEYS
    assert encode_blocks(KEYS) == encode_blocks(reversed(KEYS))
    assert decode_blocks(encode_blocks([])) == []
    many = [("api", f"key-{number:05}") for number in range(10_000)]
    data = encode_blocks(many)
    assert len(data) <= stored_bytes.MAX_STORED_BYTES
    found = decode_blocks(data)
    assert found == many[: len(found)]
    assert len(found) > 200


@cases("data", [b"", b"[", b"{}", b"\xff", b"[1]", b'[["a"]]', b'[["a",1]]', b"null"])
def test_invalid_records_are_ignored(data):
    assert decode_blocks(data) == []


def test_the_block_command_lists_blocks_of_another_service(tmp_path):
    with ValkeyServer() as valkey:
        text = f"store: {valkey.url}?deadline=2s\nadmin_token: {ADMIN}\npolicies: {{api: 2/1h fixed_window}}\n"
        folders = [tmp_path / "a", tmp_path / "b"]
        for folder in folders:
            folder.mkdir()
        with serving(folders[0], text, "--workers", "2") as first, serving(folders[1], text) as second:
            token = {"Authorization": f"Bearer {ADMIN}"}
            first.post("block", {"policy": "api", "key": "bad", "seconds": 600}, headers=token)
            until(lambda: "bad" in second.get("/v1/blocks", headers=token).text, "the block of the other service", 40)
