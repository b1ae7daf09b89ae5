"""Blocked keys: over HTTP, with every verb and mode, in all processes that share a store, and how a block ends."""

import asyncio
import json
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.servers.process import until
from tests.servers.valkey import ValkeyServer
from tests.service.harness import ADMIN, DECISION, START, InProcessService, serving
from tests.service.test_worker_totals import only
from tests.service.test_workers import process_ids
from tidegate import ConfigError, ResourceUnknown, StoreUnavailable
from tidegate._cli import main
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions import blocks as module
from tidegate.service._decisions.blocks import Blocks
from tidegate.service._decisions.decider import Decider, Subject
from tidegate.service._decisions.shared_store import CLOCK_POLICY
from tidegate.service.client._client import Client
from tidegate.stores import open_store
from tidegate.stores._delegating import DelegatingStore
from tidegate.stores._lease import Lease, LeasedStore
from tidegate.stores._outage import GuardedStore
from tidegate.stores._sqlite import value_rows
from tidegate.testing import ManualClock

POLICIES = {
    "api": "5/1m",
    "quiet": {"limits": "5/1m", "mode": "shadow"},
    "other": {"limits": "5/1m", "overrides": [{"key": "vip", "limits": "9/1m"}]},
}
DOMAINS = [{"domain": "edge", "descriptors": [{"key": "ip", "limits": "5/1m"}, {"key": "path", "limits": "5/1m"}]}]
BAD = {"policy": "api", "key": "bad"}


async def test_a_blocked_key_is_denied_until_the_block_ends():
    async with InProcessService(policies=POLICIES) as app_service:
        assert (await app_service.post("acquire", BAD)).json()["remaining"] == 4
        assert (await app_service.post("block", {**BAD, "seconds": 90})).json() == {"ok": True, "seconds": 90.0}
        result = (await app_service.post("acquire", BAD)).json()
        assert (result["allowed"], result["violated"], result["retry_after"]) == (False, ["blocked"], 90.0)
        assert result["limits"][0]["name"] == "blocked"
        assert (await app_service.post("acquire", {**BAD, "key": "good"})).json()["allowed"]
        assert (await app_service.post("acquire", {**BAD, "policy": "other"})).json()["allowed"]
        app_service.clock.advance(89.999)
        assert (await app_service.post("acquire", BAD)).json()["retry_after"] == 0.001
        app_service.clock.advance(0.001)
        assert (await app_service.post("acquire", BAD)).json()["remaining"] == 4  # its limits went on meanwhile
        assert app_service.decider.stats.totals().counts["api"].denied == 2
        assert app_service.decider.stats.totals().violated["api", "blocked"] == 2


@pytest.mark.parametrize("verb", ["acquire", "reserve"])
async def test_a_waiting_call_is_blocked_too(verb):
    async with InProcessService(policies=POLICIES) as app_service:
        await app_service.post("acquire", {**BAD, "cost": 5})
        waiting = asyncio.create_task(app_service.post(verb, {**BAD, "timeout": 30}))
        while not app_service.decider.waiting:
            await asyncio.sleep(0)
        await app_service.post("block", {**BAD, "seconds": 90})
        app_service.clock.advance(12)
        result = (await waiting).json()
        assert (result["allowed"], result["violated"]) == (False, ["blocked"])
        assert (await app_service.post("usage", BAD)).json()["limits"][0]["used"] == 4


async def test_blocks_begin_and_end_for_keys_that_were_decided_before():
    async with InProcessService(policies=POLICIES) as app_service:

        async def is_allowed():
            return (await app_service.post("acquire", {**BAD, "cost": 0})).json()["allowed"]

        assert await is_allowed()
        await app_service.post("block", {**BAD, "seconds": 10})
        batch = {"policy": "api", "keys": ["bad", "good"]}
        result = (await app_service.post("batch", batch)).json()["answers"]
        assert [each["allowed"] for each in result] == [False, True]
        app_service.clock.advance(10)
        assert await is_allowed()
        await app_service.post("block", BAD)
        assert not await is_allowed()
        await app_service.post("unblock", BAD)
        assert await is_allowed()


@pytest.mark.parametrize("policy", ["api", "quiet", "other"])
async def test_blocks_apply_to_every_verb_and_mode(policy):
    async with InProcessService(policies=POLICIES) as app_service:
        ask = {"policy": policy, "key": "vip"}
        await app_service.post("block", ask)
        for verb in ("acquire", "peek", "reserve"):
            result = (await app_service.post(verb, ask)).json()
            assert (result["allowed"], result["violated"], result["retry_after"]) == (False, ["blocked"], 3600.0)
        assert (await app_service.post("acquire", {**ask, "timeout": 20})).json()["allowed"] is False  # at once
        assert (await app_service.http.get("/v1/check", params=ask)).status_code == 429
        assert (await app_service.post("usage", ask)).json()["limits"][0]["used"] == 0


async def test_blocks_of_descriptors():
    async with InProcessService(policies=POLICIES, domains=DOMAINS) as app_service:
        body = {"domain": "edge", "descriptor": [["ip", "1"]]}
        await app_service.post("block", body)
        assert (await app_service.post("acquire", body)).json()["violated"] == ["blocked"]
        found = [
            app_service.decider.policies.match_descriptor("edge", pairs) for pairs in ((("ip", "1"),), (("path", "/"),))
        ]
        asks = [(variant.policy, key, 1) for variant, key in found]
        decisions = await app_service.decider.acquire_together(asks)
        assert [decision.allowed for decision in decisions] == [False, True]
        assert (await app_service.decider.usage(Subject(domain="edge", descriptor=(("path", "/"),))))["1m"].used == 0
        assert not (await app_service.decider.peek_policy(*asks[0][:2])).allowed
        await app_service.post("unblock", body)
        assert all(await app_service.decider.acquire_together(asks))
        result = await app_service.post("block", {"domain": "edge", "descriptor": [["unknown", "1"]]})
        assert result.status_code == 404


async def test_blocks_are_listed_and_replaced():
    async with InProcessService(policies=POLICIES) as app_service:
        await app_service.post("block", {"policy": "api", "key": ["a", "b"], "seconds": 50})
        await app_service.post("block", {**BAD, "seconds": 500})
        await app_service.post("block", {**BAD, "seconds": 20})  # the later one counts
        listed = (await app_service.http.get("/v1/blocks")).json()["blocks"]
        assert listed == [
            {"policy": "api", "key": "bad", "seconds": 20.0},
            {"policy": "api", "key": ["a", "b"], "seconds": 50.0},
        ]
        app_service.clock.advance(20)
        assert [block.key for block in app_service.decider.blocked()] == [("a", "b")]


@pytest.mark.parametrize(
    ("change", "status", "pointer"),
    [
        ({"seconds": 0}, 422, "/seconds"),
        ({"seconds": 40 * 86_400}, 422, "/seconds"),
        ({"seconds": "1h"}, 422, "/seconds"),
        ({"policy": "nope"}, 404, None),
        ({"cost": 1}, 422, "/cost"),
    ],
)
async def test_invalid_blocks_are_refused(change, status, pointer):
    async with InProcessService(policies=POLICIES) as app_service:
        result = await app_service.post("block", {**BAD, **change})
        assert (result.status_code, result.json().get("pointer")) == (status, pointer)
        assert app_service.decider.blocked() == []


async def test_blocking_needs_the_admin_token():
    async with InProcessService(policies=POLICIES, decision_token=DECISION, admin_token=ADMIN) as app_service:
        for verb in ("block", "unblock"):
            refused = await app_service.post(verb, BAD, headers={"authorization": f"Bearer {DECISION}"})
            assert refused.status_code == 403
            assert (await app_service.post(verb, BAD, headers={"authorization": f"Bearer {ADMIN}"})).status_code == 200
        for token, status in ((DECISION, 403), (ADMIN, 200)):
            found = await app_service.http.get("/v1/blocks", headers={"authorization": f"Bearer {token}"})
            assert found.status_code == status


async def test_the_number_of_blocks_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_BLOCKS", 2)
    async with InProcessService(policies=POLICIES) as app_service:
        for key in "ab":
            await app_service.decider.block(Subject("api", key), 10)
        await app_service.decider.block(Subject("api", "b"), 10)  # replaces its block
        with pytest.raises(ConfigError, match="2 keys are already blocked"):
            await app_service.decider.block(Subject("api", "c"))
        app_service.clock.advance(10)
        await app_service.decider.block(Subject("api", "c"))


# ---- with others -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["plain", "leased"])
async def deciders(request, tmp_path):
    """Two deciders over one file, each as in a process of its own."""
    clock = ManualClock(start=START)
    policies = load_settings({"policies": {"api": "1000/1m"}}).policies
    stores = [open_store(f"sqlite:///{tmp_path / 'limits.db'}", clock=clock) for _ in range(2)]
    if request.param == "leased":
        stores = [LeasedStore(store, Lease(1.0)) for store in stores]
    found = [Decider(policies, store) for store in stores]
    yield clock, *found
    for decider in found:
        await decider.close()


async def test_a_block_applies_in_all_processes_on_the_store(deciders):
    clock, here, there = deciders
    subject = Subject("api", "bad")
    assert await here.acquire(subject)
    assert await there.acquire(subject)
    await here.block(subject, 90)
    assert not await here.acquire(subject)
    await there.blocks.refresh()
    for result in (await there.acquire(subject), (await there.batch([(subject, 1)]))[0]):
        assert (result.allowed, result.violated, result.retry_after) == (False, ("blocked",), 90.0)
    assert await there.acquire(Subject("api", "good"))
    assert [block.key for block in there.blocked()] == ["bad"]  # met here
    clock.advance(30)
    await there.unblock(subject)  # by another than who made it
    assert await there.acquire(subject)
    assert await here.acquire(subject)
    assert here.blocked() == []
    clock.advance(60)
    assert not here.blocks.active
    await there.blocks.refresh()
    assert not there.blocks.active


async def test_blocks_of_other_services_are_listed_until_they_end(deciders):
    clock, here, there = deciders
    keys = ["bad", ("tenant", "ä" * 1000), 'q"\n']
    for number, key in enumerate(keys):
        await here.block(Subject("api", key), 300 + number)
    await there.block(Subject("api", "own"), 400)
    clock.advance(1)
    listed = await here.find_blocks()
    assert listed == await there.find_blocks()
    assert [(block.key, block.seconds) for block in listed] == [*zip(keys, (299, 300, 301), strict=True), ("own", 399)]
    await there.unblock(Subject("api", "bad"))
    clock.advance(1)
    assert [block.key for block in await here.find_blocks()] == [*keys[1:], "own"]
    clock.advance(400)
    assert await here.find_blocks() == await there.find_blocks() == []


async def test_a_block_outlives_the_service_that_made_it(deciders):
    clock, here, there = deciders
    await here.block(Subject("api", "bad"), 3600)
    await here.close()
    clock.advance(600)
    assert [(block.key, block.seconds) for block in await there.find_blocks()] == [("bad", 3000.0)]
    assert not await there.acquire(Subject("api", "bad"))


class ReadCountingStore(DelegatingStore):
    """Counts the reads of values; calls `meanwhile` once while values are listed."""

    def __init__(self, inner):
        super().__init__(inner)
        self.reads = []
        self.meanwhile = None

    async def get_value_async(self, collection, name, now=None):
        self.reads.append("get")
        return await super().get_value_async(collection, name, now)

    async def list_values_async(self, collection, now=None):
        self.reads.append("list")
        found = await super().list_values_async(collection, now)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return found


@pytest.fixture
def counting(tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'limits.db'}", clock=ManualClock(start=START))
    yield ReadCountingStore(store)
    store.close()


async def test_blocks_are_read_only_after_a_change(counting):
    here, there = Blocks(counting), Blocks(counting.inner)
    await here.refresh()
    assert counting.reads == ["get"]  # there are none
    await there.block("api", "bad", 60)
    for _ in range(3):
        await here.refresh()
    assert counting.reads == ["get"] + ["get", "list"] + ["get"] * 2
    assert here.known("api", "bad").retry_after == 60.0
    assert here.known("api", "good") is True
    counting.clock.advance(1)
    assert here.known("api", "bad") is False  # it may have been unblocked
    assert await here.find("api", "good") is None
    assert (await here.find("api", "bad")).retry_after == 59.0
    assert counting.reads[5:] == ["get"]  # for one of them


@pytest.mark.parametrize("change", ["block", "unblock"])
async def test_a_change_while_the_blocks_are_read_is_kept(change, counting):
    here, there = Blocks(counting), Blocks(counting.inner)
    await there.block("api", "elsewhere", 60)
    if change == "unblock":
        await there.block("api", "bad", 60)
    counting.meanwhile = lambda: getattr(here, change)("api", "bad")
    await here.refresh()
    assert (await here.find("api", "bad") is not None) == (change == "block")
    await here.refresh()
    assert (await here.find("api", "bad") is not None) == (change == "block")
    assert await here.find("api", "elsewhere") is not None


@pytest.mark.parametrize("data", [b"", b"[", b"{}", b"\xff", b"[1]", b'["a"]', b'["a",1]', b"null"])
async def test_invalid_values_are_ignored(data, counting):
    await Blocks(counting).block("api", "bad", 60)
    counting.put_value(module.BLOCKS, "other", data, 60)
    blocks = Blocks(counting)
    assert [block.key for block in await blocks.find_all()] == ["bad"]


async def test_a_full_store_refuses_a_block(counting, monkeypatch):
    monkeypatch.setattr(value_rows, "MAX_LISTED", 3)
    here, there = Blocks(counting), Blocks(counting)
    await here.block("api", "a", 60)
    await here.block("api", "b", 60)
    with pytest.raises(ConfigError, match="keys are already blocked"):
        await there.block("api", "c", 60)


async def test_a_long_block_outlives_a_short_one(deciders):
    clock, here, there = deciders
    await here.block(Subject("api", "short"), 10)
    await there.block(Subject("api", "long"), 100)
    clock.advance(50)
    for decider in (here, there):
        await decider.blocks.refresh()
        assert (await decider.acquire(Subject("api", "short"))).allowed
        assert (await decider.acquire(Subject("api", "long"))).retry_after == 50.0


async def test_known_blocks_apply_while_the_store_is_unavailable():
    clock = ManualClock(start=START)
    with ValkeyServer() as valkey:
        store = GuardedStore(open_store(valkey.url, clock=clock), clock=clock, background=False)
        blocks, elsewhere = Blocks(store), Blocks(store)
        try:
            await blocks.block("api", "bad", 3600)
            await elsewhere.refresh()
            valkey.kill()
            clock.advance(10)  # longer than a copy is used without asking the store
            for each in (blocks, elsewhere):
                assert (await each.find("api", "bad")).violated == ("blocked",)
                assert await each.find("api", "good") is None
            with pytest.raises(StoreUnavailable):
                await blocks.block("api", "worse", 10)
            assert await blocks.find("api", "worse") is None
        finally:
            await store.close_async()


def test_names_of_the_service_are_reserved():
    with pytest.raises(ConfigError, match=r"does not begin with 'tidegate\.'"):
        load_settings({"policies": {CLOCK_POLICY.name: "1/1s"}})


# ---- whole processes -------------------------------------------------------------------------------------------------


@contextmanager
def connected(service, pid):
    """Open a connection to one worker: it stays with the worker that accepts it."""
    with httpx.Client(base_url=service.url, timeout=60, trust_env=False) as worker:
        with only(service, pid):
            worker.get("/healthz")
        yield worker


def test_the_block_command_affects_every_process(tmp_path, capsys):
    text = f"store: sqlite:///{tmp_path / 'limits.db'}?deadline=10s\npolicies: {{api: 1000/1h}}\n"

    def command(*words):
        code = main([*words, "--url", service.url])
        result = capsys.readouterr()
        return code, result.out.strip(), result.err.strip()

    with serving(tmp_path, text, "--workers", "2") as service, ExitStack() as stack:
        workers = [stack.enter_context(connected(service, pid)) for pid in process_ids(service)]
        assert len(workers) == 2
        assert command("block", "api", "bad", "--for", "10m") == (0, "api: bad is blocked for 10m", "")

        def allowed():
            answers = [worker.post("/v1/acquire", json={"policy": "api", "key": "bad"}) for worker in workers]
            return [answer.json()["allowed"] for answer in answers]

        until(lambda: allowed() == [False, False], "both processes to hold it")
        assert command("acquire", "api", "bad")[:2][0] == 1
        assert command("block", "api", "bad", "--remove") == (0, "api: bad is no longer blocked", "")
        until(lambda: allowed() == [True, True], "both processes to let go")
        assert command("block", "api")[0] == 2


def test_the_block_command_and_the_client_list_blocks(tmp_path, capsys):
    with serving(tmp_path, "policies: {api: 10/1h}\n") as service, Client(service.url) as client:
        assert main(["block", "--url", service.url]) == 0
        assert capsys.readouterr().out == "no key is blocked\n"
        client.block("api", ("a", "b\x1b[2J"), 3600)
        assert main(["block", "--url", service.url]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["policy", "key", "blocked", "for", "another"]
        assert lines[1].split()[:3] == ["api", "a", "b?[2J"]
        assert main(["block", "--json", "--url", service.url]) == 0
        assert json.loads(capsys.readouterr().out)["blocks"][0]["key"] == ["a", "b\x1b[2J"]
        assert client.try_acquire("api", ("a", "b\x1b[2J")).violated == ("blocked",)
        client.unblock("api", ("a", "b\x1b[2J"))
        assert client.blocks() == []
        with pytest.raises(ResourceUnknown):
            client.block("nope", "k")


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
