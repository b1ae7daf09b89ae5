"""One idempotency key is charged once, whichever process or service on the same store gets the request."""

import asyncio
import json
import secrets
import signal
import sys
from functools import partial
from itertools import cycle

import httpx
import pytest

from tests.cases import cases
from tests.servers.process import until
from tests.servers.valkey import ValkeyCluster, ValkeyServer
from tests.service.conftest import STORES, shared_store_url
from tests.service.harness import START, InProcessService, http_client, serving
from tests.service.test_signing import payload_of, services
from tidegate import ConfigError, ResourceUnknown
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions.decider import Decider, Subject
from tidegate.service._decisions.idempotency import REMEMBER_FOR, KeyedCall
from tidegate.service._decisions.reservation_ids import AlreadySettledError
from tidegate.service._http import App
from tidegate.stores._delegating import DelegatingStore
from tidegate.stores._lease import Lease, LeasedStore
from tidegate.stores._outage import GuardedStore, open_guarded
from tidegate.stores._registry import open_store
from tidegate.testing import ManualClock

pytestmark = pytest.mark.once("valkey", "plain")

POLICIES = """
policies:
  api: 20/1h fixed_window
  one: 1/1h fixed_window
  bucket: 20/1h
  log: 20/1h sliding_log
  slots: 3/10m concurrency
  shadow: {limits: 1/1h fixed_window, mode: shadow}
"""


@pytest.fixture(scope="module", params=STORES)
def pair(request, tmp_path_factory):
    """Two services on one store, one of them with two processes."""
    folder = tmp_path_factory.mktemp("pair")
    text = f"store: {shared_store_url(request.param, request, folder)}\n{POLICIES}"
    with services(folder, text) as (first,), serving(folder, text, "--workers", "2") as second:
        yield first, second


def keyed(key=None):
    return {"headers": {"idempotency-key": key or secrets.token_hex(8)}}


def used(service, policy, key):
    return service.post("usage", {"policy": policy, "key": key}).json()["limits"][0]["used"]


@cases("policy", ["api", "bucket", "log"])
def test_an_acquire_is_charged_once(pair, policy):
    ask, key = {"policy": policy, "key": secrets.token_hex(8), "cost": 5}, keyed()
    first, *again = [service.post("acquire", ask, **key) for service in (*pair, *pair, pair[1], pair[1])]
    assert (first.json()["remaining"], "idempotency-replayed" in first.headers) == (15, False)
    assert {(each.json()["allowed"], each.json()["remaining"]) for each in again} == {(True, 15)}
    assert {each.headers["idempotency-replayed"] for each in again} == {"true"}
    assert used(pair[0], policy, ask["key"]) == 5
    pair[0].post("acquire", {**ask, "cost": 2})
    assert used(pair[0], policy, ask["key"]) == 7


def test_a_repeated_acquire_is_allowed_when_nothing_is_left(pair):
    ask, key = {"policy": "one", "key": secrets.token_hex(8)}, keyed()
    answers = [service.post("acquire", ask, **key).json() for service in pair]
    assert [(each["allowed"], each["remaining"], each["retry_after"]) for each in answers] == [(True, 0, 0.0)] * 2
    assert not pair[1].post("acquire", ask, **keyed()).json()["allowed"]


def test_a_denied_call_is_decided_again(pair):
    ask, key = {"policy": "slots", "key": secrets.token_hex(8)}, keyed()
    pair[0].post("acquire", {**ask, "cost": 3})
    assert not pair[0].post("acquire", ask, **key).json()["allowed"]
    pair[0].post("release", ask)
    result = pair[1].post("acquire", ask, **key)
    assert (result.json()["allowed"], "idempotency-replayed" in result.headers) == (True, False)


def test_another_request_with_the_same_key_is_refused(pair):
    ask, key = {"policy": "api", "key": secrets.token_hex(8)}, keyed()
    assert pair[0].post("acquire", ask, **key).status_code == 200
    for verb, body in (("acquire", {**ask, "cost": 2}), ("reserve", ask)):
        refused = pair[1].post(verb, body, **key)
        assert (refused.status_code, refused.json()["type"]) == (422, "urn:tidegate:problem:idempotency-mismatch")
    assert used(pair[0], "api", ask["key"]) == 1


@cases("policy", ["api", "bucket", "log"])
def test_a_repeated_reservation_is_the_same_one(pair, policy):
    ask, key = {"policy": policy, "key": secrets.token_hex(8), "cost": 10}, keyed()
    ids = [service.post("reserve", ask, **key).json()["id"] for service in (*pair, pair[1], pair[1])]
    assert len({json.dumps(payload_of(each)) for each in ids}) == 1
    assert used(pair[0], policy, ask["key"]) == 10
    statuses = [service.post("commit", {"id": each, "cost": 4}).status_code for service, each in zip(cycle(pair), ids)]
    assert statuses == [200, 409, 409, 409]
    assert used(pair[0], policy, ask["key"]) == 4


def test_a_repeated_settlement_is_made_once(pair):
    ask = {"policy": "api", "key": secrets.token_hex(8), "cost": 10}
    settle, key = {"id": pair[0].post("reserve", ask).json()["id"], "cost": 3}, keyed()
    answers = [service.post("commit", settle, **key) for service in (*pair, pair[1], pair[1])]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert pair[1].post("commit", settle, **keyed()).status_code == 409
    assert pair[1].post("commit", {**settle, "cost": 0}).status_code == 409
    assert used(pair[1], "api", ask["key"]) == 3


def test_a_repeated_release_frees_one_slot(pair):
    ask, key = {"policy": "slots", "key": secrets.token_hex(8)}, keyed()
    pair[0].post("acquire", {**ask, "cost": 3})
    assert {service.post("release", ask, **key).status_code for service in (*pair, *pair)} == {200}
    assert used(pair[0], "slots", ask["key"]) == 2
    wrong = {"policy": "api", "key": "k"}
    assert {service.post("release", wrong, **key).status_code for service in pair} == {422}  # the key of another
    assert {service.post("release", wrong, **keyed("wrong")).status_code for service in (*pair, *pair)} == {422}


def test_a_repeated_batch_is_charged_once(pair):
    names = [secrets.token_hex(8) for _ in range(3)]
    for body in (
        {"policy": "api", "keys": [names[0], names[1], names[0]]},
        {"asks": [{"policy": "bucket", "key": names[2], "cost": 7}, {"policy": "nope", "key": "k"}]},
    ):
        key = keyed()
        answers = [service.post("batch", body, **key).json()["answers"] for service in (*pair, pair[1], pair[1])]
        assert [each.get("allowed") for each in answers[0]] == [each.get("allowed") for each in answers[1]]
    counts = [used(pair[0], *each) for each in (("api", names[0]), ("api", names[1]), ("bucket", names[2]))]
    assert counts == [2, 1, 7]


def test_a_repeated_lease_takes_no_further_permits(pair):
    ask, key = {"policy": "api", "key": secrets.token_hex(8), "max_permits": 4, "ttl": 10}, keyed()
    first, again = (service.post("lease", ask, **key).json() for service in pair)
    assert (first["permits"], again["permits"], again["allowed"], again["id"]) == (4, 0, True, None)
    assert again["seconds"] > 0  # the policy knows leases
    assert used(pair[1], "api", ask["key"]) == 4


def test_shadow_mode_charges_a_key_once(pair):
    ask = {"policy": "shadow", "key": secrets.token_hex(8)}
    key, other = keyed(), keyed()
    assert {service.post("acquire", ask, **key).json()["shadow"] for service in (*pair, *pair)} == {False}
    assert [service.post("acquire", ask, **other).json()["shadow"] for service in pair] == [True, True]
    assert used(pair[0], "shadow", ask["key"]) == 1


async def test_waiting_calls_with_one_key_are_charged_once(pair):
    ask, key = {"policy": "slots", "key": secrets.token_hex(8)}, keyed()
    pair[0].post("acquire", {**ask, "cost": 3})
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        waiting = [http.post(f"{service.url}/v1/acquire", json={**ask, "timeout": 25}, **key) for service in pair]
        asking = asyncio.gather(*waiting)
        for service in pair:
            await asyncio.to_thread(until, partial(waits, service), "a call that waits")
        await http.post(f"{pair[0].url}/v1/release", json=ask)
        assert [answer.json()["allowed"] for answer in await asking] == [True, True]
    assert used(pair[0], "slots", ask["key"]) == 3


def waits(service):
    """Return whether a call waits in the process that answers."""
    return "tidegate_waiting 1" in service.get("/metrics").text


async def test_concurrent_calls_with_repeated_keys_are_charged_once(pair):
    name, keys = secrets.token_hex(8), [secrets.token_hex(8) for _ in range(12)]
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        asking = [
            http.post(f"{service.url}/v1/acquire", json={"policy": "api", "key": name}, **keyed(key))
            for key in keys
            for service in (*pair, *pair)
        ]
        answers = await asyncio.gather(*asking)
    assert {answer.json()["allowed"] for answer in answers} == {True}
    assert used(pair[0], "api", name) == len(keys)


@pytest.mark.parametrize("verb", ["acquire", "reserve"])
async def test_a_call_that_is_abandoned_while_the_store_decides_is_charged_once(verb, shared_url):
    policies = load_settings({"policies": {"api": "1000/1h fixed_window"}}).policies
    here, there = (Decider(policies, open_guarded(shared_url)) for _ in range(2))
    subject, rounds = Subject("api", "k"), 60
    try:
        for decider in (here, there):
            await decider.usage(subject)  # connected
        for turns in range(rounds):
            first, again = (KeyedCall.read(b"%d" % turns, verb, b"{}") for _ in range(2))
            asking = asyncio.create_task(getattr(here, verb)(subject, call=first))
            for _ in range(turns // 2):
                await asyncio.sleep(0)
            asking.cancel()
            await getattr(there, verb)(subject, call=again)
            await asyncio.gather(asking, return_exceptions=True)
        assert (await there.usage(subject))["1h"].used == rounds
    finally:
        for decider in (here, there):
            await decider.close()


# ---- one process after another, in virtual time ----------------------------------------------------------------------


@pytest.fixture(params=["plain", "leased"])
async def app_services(request, tmp_path):
    """Two apps over one file, each as in a process of its own."""
    clock = ManualClock(start=START)
    stores = [open_store(f"sqlite:///{tmp_path / 'limits.db'}", clock=clock) for _ in range(2)]
    if request.param == "leased":
        stores = [LeasedStore(store, Lease(1.0)) for store in stores]
    found = [InProcessService(store=store, policies={"api": "100/1h fixed_window"}) for store in stores]
    for app_service in found:
        app_service.clock = clock
    async with found[0], found[1]:
        yield found


async def test_a_key_is_remembered_for_ten_minutes(app_services):
    here, there = app_services
    ask, key = {"policy": "api", "key": "k"}, keyed("one")
    for app_service in (here, there, here, there):
        assert (await app_service.post("acquire", ask, **key)).json()["remaining"] == 99
    ids = [(await app_service.post("reserve", ask, **keyed("two"))).json()["id"] for app_service in (here, there)]
    here.clock.advance(REMEMBER_FOR / 1e6 - 0.001)
    assert (await there.post("acquire", ask, **key)).json()["remaining"] == 99  # the very answer of that time
    here.clock.advance(0.001)
    assert (await there.post("acquire", ask, **key)).json()["remaining"] == 97
    # The same key later is another reservation, which is settled by itself.
    later = (await here.post("reserve", ask, **keyed("two"))).json()["id"]
    assert (payload_of(ids[0]), payload_of(ids[0])[0] == payload_of(later)[0]) == (payload_of(ids[1]), False)
    assert (await there.post("cancel", {"id": later})).status_code == 200


async def test_calls_with_a_key_and_calls_from_a_lease_are_both_charged(app_services):
    here, there = app_services
    ask = {"policy": "api", "key": "k"}
    for number in range(30):
        await here.post("acquire", ask)
        for app_service in app_services:
            assert (await app_service.post("acquire", ask, **keyed(f"number {number}"))).json()["allowed"]
    # A call with a key returns what this process holds of the share, so the other one sees it all.
    assert (await there.post("usage", ask)).json()["limits"][0]["used"] == 60


async def test_a_call_that_is_blocked_while_waiting_is_forgotten(tmp_path):
    clock = ManualClock(start=START)
    async with InProcessService(
        store=open_store(f"sqlite:///{tmp_path / 'l.db'}", clock=clock), policies={"api": "1/1m fixed_window"}
    ) as app_service:
        ask, key = {"policy": "api", "key": "k"}, keyed("one")
        await app_service.post("acquire", ask)
        app_service.decider.max_wait = 90
        waiting = asyncio.create_task(app_service.post("acquire", {**ask, "timeout": 80}, **key))
        while not app_service.decider.waiting:
            await asyncio.sleep(0)
        await app_service.post("block", {**ask, "seconds": 70})
        clock.advance(60)
        assert (await waiting).json()["violated"] == ["blocked"]
        clock.advance(10)
        app = App(app_service.decider, app_service.settings)  # another process
        async with http_client(app) as other:
            result = (await other.post("/v1/acquire", json={**ask, "timeout": 80}, **key)).json()
        assert (result["allowed"], result["remaining"]) == (True, 0)  # charged now


class RecordingStore(DelegatingStore):
    """Records each call that changes the store."""

    def __init__(self, inner):
        super().__init__(inner)
        self.calls = []

    async def apply_async(self, verb, asks, now=None, at=None, writes=()):
        self.calls.append((verb, len(asks), len(writes)))
        return await super().apply_async(verb, asks, now, at, writes)


@pytest.mark.parametrize(("ask", "verb"), [("acquire", "acquire"), ("reserve", "hold")])
async def test_the_key_and_the_charge_are_one_step_of_the_store(ask, verb, tmp_path):
    """So that a process that is killed has written both or neither."""
    store = RecordingStore(open_store(f"sqlite:///{tmp_path / 'l.db'}", clock=ManualClock(start=START)))
    decider = Decider(load_settings({"policies": {"api": "10/1h fixed_window"}}).policies, store)
    try:
        await getattr(decider, ask)(Subject("api", "k"), call=KeyedCall.read(b"one", ask, b"{}"))
        assert [call for call in store.calls if call[1]] == [(verb, 1, 1)]
        store.calls.clear()
        again = KeyedCall.read(b"one", ask, b"{}")
        await getattr(decider, ask)(Subject("api", "k"), call=again)
        assert again.repeated
        assert [call for call in store.calls if call[1]] == [(verb, 1, 1), ("peek", 1, 0)]  # refused, then shown
        assert (await decider.usage(Subject("api", "k")))["1h"].used == 1
    finally:
        await decider.close()


KILLED_SERVICE = """
import asyncio, os, signal, sys
from tests.service.test_idempotency import OneCall
from tidegate.stores._delegating import DelegatingStore
from tidegate.stores._outage import open_guarded

class KilledStore(DelegatingStore):
    async def apply_async(self, verb, asks, now=None, at=None, writes=()):
        if MOMENT == "before" and asks and verb != "peek":
            os.kill(os.getpid(), signal.SIGKILL)
        decisions = await super().apply_async(verb, asks, now, at, writes)
        if MOMENT == "after" and asks and verb != "peek":
            os.kill(os.getpid(), signal.SIGKILL)
        return decisions

MOMENT, url, ask = sys.argv[1:]
asyncio.run(OneCall(KilledStore(open_guarded(url)), ask).run())
"""


class OneCall:
    """A call with an idempotency key, to a service on this store."""

    def __init__(self, store, ask):
        self.decider = Decider(load_settings({"policies": {"api": "10/1h fixed_window"}}).policies, store)
        self.ask = ask
        self.call = KeyedCall.read(b"one", ask, b"{}")

    async def run(self):
        try:
            await getattr(self.decider, self.ask)(Subject("api", "k"), 3, call=self.call)
            return (await self.decider.usage(Subject("api", "k")))["1h"].used
        finally:
            await self.decider.close()


@pytest.mark.parametrize("ask", ["acquire", "reserve"])
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_process_that_is_killed_before_it_answers_has_charged_once_or_not_at_all(ask, moment, shared_url):
    """Kill -9 immediately before or after the store has charged: the client repeats its call with the same key."""
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED_SERVICE, moment, shared_url, ask)
    assert await killed.wait() == -signal.SIGKILL
    for number in range(2):
        again = OneCall(open_guarded(shared_url), ask)
        assert await again.run() == 3
        assert again.call.repeated == (moment == "after" or number == 1)


class ValuelessStore(DelegatingStore):
    """A store of somebody else, which implements only `apply`."""

    def __init__(self, inner):
        super().__init__(inner)
        self.keeps_values = False


async def test_a_store_without_values_leaves_keys_and_ids_to_each_process(tmp_path, caplog):
    store = ValuelessStore(open_store(f"sqlite:///{tmp_path / 'l.db'}", clock=ManualClock(start=START)))
    policies = load_settings({"policies": {"api": "10/1h fixed_window"}}).policies
    subject, secret = Subject("api", "k"), ("a-secret-0123456789",)
    decider = Decider(policies, store, secrets=secret)
    elsewhere = Decider(policies, ValuelessStore(store.inner), secrets=secret)
    try:
        assert len([each for each in caplog.messages if "ValuelessStore keeps no values" in each]) == 2  # one for each
        for _ in range(2):
            await decider.acquire(subject, call=KeyedCall.read(b"one", "acquire", b"{}"))
        assert (await decider.usage(subject))["1h"].used == 2  # only http.replays remembers the key
        reserved = await decider.reserve(subject)
        with pytest.raises(ConfigError, match="ValuelessStore keeps no values: it cannot block keys"):
            await decider.block(subject)
        assert not decider.blocks.active
        with pytest.raises(ResourceUnknown):  # another process cannot know whether it is settled
            await elsewhere.cancel(reserved.id)
        await decider.cancel(reserved.id)
        with pytest.raises(AlreadySettledError):
            await decider.cancel(reserved.id)
        assert (await decider.usage(subject))["1h"].used == 2
    finally:
        await decider.close()


# ---- where the store cannot remember ---------------------------------------------------------------------------------


async def test_the_policy_decides_while_the_store_is_unavailable():
    policies = {"deny": "2/1h", "allow": {"limits": "2/1h", "on_store_error": "allow"}}
    with ValkeyServer() as valkey:
        store = GuardedStore(open_store(valkey.url), clock=ManualClock(), background=False)
        async with InProcessService(store=store, policies=policies) as app_service:
            asks = {name: ({"policy": name, "key": "k"}, keyed(name)) for name in policies}
            assert (await app_service.post("acquire", asks["deny"][0], **keyed("before"))).json()["allowed"]
            valkey.kill()
            for _ in range(2):
                assert (await app_service.post("acquire", asks["deny"][0], **asks["deny"][1])).status_code == 503
                result = (await app_service.post("acquire", asks["allow"][0], **asks["allow"][1])).json()
                assert (result["allowed"], result["local"]) == (True, True)


async def test_a_cluster_remembers_keys_with_and_without_hash_tag():
    with ValkeyCluster() as cluster:
        for options in ("", "?hash_tag=all"):
            store = open_guarded(f"{cluster.url}{options or '?'}&deadline=20s")
            found = [InProcessService(store=store, policies={"api": "10/1h fixed_window"}) for _ in range(2)]
            ask = {"policy": "api", "key": f"k{options}"}
            for app_service in (*found, *found):
                assert (await app_service.post("acquire", ask, **keyed("one"))).json()["allowed"]
            assert (await found[0].post("usage", ask)).json()["limits"][0]["used"] == 1
            for app_service in found:
                await app_service.http.aclose()
            await store.close_async()
