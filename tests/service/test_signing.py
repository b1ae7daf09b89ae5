"""Reservation ids cannot be forged, whatever token a client has."""

import base64
import json
from contextlib import ExitStack, contextmanager
from hashlib import blake2b

import httpx
import pytest

from tests.cases import cases
from tests.servers.process import until
from tests.servers.valkey import ValkeyServer
from tests.service.harness import DECISION, START, InProcessService, serving
from tidegate import ConfigError, ResourceUnknown
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions.decider import Decider, Subject
from tidegate.service._decisions.reservation_ids import AlreadySettledError
from tidegate.service._decisions.signing import SECRET_NAME, SECRET_TTL, SECRETS, SigningKeys
from tidegate.stores import MemoryStore
from tidegate.stores._outage import GuardedStore
from tidegate.stores._outage.open import open_guarded
from tidegate.stores._registry import open_store
from tidegate.testing import ManualClock

OLD, NEW = "an-old-secret-0123456789", "a-new-secret-0123456789"
WINDOW = {"policies": {"api": "10/1h fixed_window"}}
K = Subject("api", "k")


def encode(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def payload_of(reservation_id):
    head = reservation_id.partition(".")[0]
    return json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))


def guesses(token, reservation_id):
    """Sign a changed id with every key that a client can derive from what it has."""
    result = json.dumps(["0" * 16, *payload_of(reservation_id)[1:]]).encode()
    tail = base64.urlsafe_b64decode(reservation_id.partition(".")[2] + "==")
    known = {b"", token.encode(), b"reservations", tail}
    for person in (b"", b"reservations", b"reservation id"):
        known |= {blake2b(each, digest_size=size, person=person).digest() for each in set(known) for size in (32, 64)}
    for key in known:
        for secret in {key[:64], blake2b(key, digest_size=32).digest()}:
            yield f"{encode(result)}.{encode(blake2b(result, key=secret, digest_size=16).digest())}"


@contextmanager
def services(folder, *texts, flags=()):
    """Start services that share nothing but the store."""
    with ExitStack() as stack:
        found = []
        for number, text in enumerate(texts):
            own = folder / f"service-{number}"
            own.mkdir(exist_ok=True)
            found.append(stack.enter_context(serving(own, text, *flags)))
        yield found


@pytest.mark.parametrize("store", ["memory://", "sqlite"])
def test_a_client_cannot_forge_a_reservation_id(store, tmp_path):
    store = f"sqlite:///{tmp_path / 'limits.db'}?deadline=10s" if store == "sqlite" else store
    text = f"store: {store}\ndecision_token: {DECISION}\npolicies: {{api: 10/1h fixed_window}}\n"
    client = {"headers": {"Authorization": f"Bearer {DECISION}"}}
    ask = {"policy": "api", "key": "k"}
    with serving(tmp_path, text) as service:
        reservation = service.post("reserve", {**ask, "cost": 10}, **client).json()
        with httpx.Client(base_url=service.url, trust_env=False, timeout=30, **client) as http:
            statuses = {
                http.post("/v1/cancel", json={"id": forged}).status_code
                for forged in guesses(DECISION, reservation["id"])
            }
            assert statuses == {404}
        assert not service.post("acquire", ask, **client).json()["allowed"]
        assert service.post("cancel", {"id": reservation["id"]}, **client).status_code == 200
        for _ in range(3):
            assert service.post("cancel", {"id": reservation["id"]}, **client).status_code == 409
        assert service.post("usage", ask, **client).json()["limits"][0]["used"] == 0


@pytest.mark.once
def test_services_on_one_store_settle_each_others_ids(shared_url, tmp_path):
    tokens = [DECISION, None]
    texts = [
        f"store: {shared_url}\n{f'decision_token: {token}' if token else ''}\npolicies: {{api: 10/1h fixed_window}}\n"
        for token in tokens
    ]
    headers = [{"Authorization": f"Bearer {token}"} if token else {} for token in tokens]
    ask = {"policy": "api", "key": "k"}
    with services(tmp_path, *texts) as running:
        pairs = list(zip(running, headers, strict=True))
        for place, (maker, own) in enumerate(pairs):
            other, theirs = pairs[place - 1]
            reservation = maker.post("reserve", {**ask, "cost": 10}, headers=own).json()
            assert not other.post("acquire", ask, headers=theirs).json()["allowed"]
            answers = [
                each.post("cancel", {"id": reservation["id"]}, headers=his) for each, his in ((other, theirs), *pairs)
            ]
            assert [answer.status_code for answer in answers] == [200, 409, 409]
        kept = running[0].post("reserve", {**ask, "cost": 10}, headers=headers[0]).json()["id"]
    with services(tmp_path, texts[1], flags=("--workers", "2")) as (restarted,):
        assert restarted.post("cancel", {"id": kept}).status_code == 200
        assert {restarted.post("cancel", {"id": kept}).status_code for _ in range(8)} == {409}
        assert restarted.post("usage", ask).json()["limits"][0]["used"] == 0


async def test_secrets_are_rotated():
    policies, store = load_settings(WINDOW).policies, MemoryStore(clock=ManualClock(start=START))
    before, between, after = (Decider(policies, store, secrets=each) for each in ((OLD,), (NEW, OLD), (NEW,)))
    by_old, by_new = await before.reserve(K), await between.reserve(K)
    with pytest.raises(ResourceUnknown):
        await before.cancel(by_new.id)
    with pytest.raises(ResourceUnknown):
        await after.cancel(by_old.id)
    await between.cancel(by_old.id)
    await after.cancel(by_new.id)
    for decider in (before, between):
        with pytest.raises(AlreadySettledError):
            await decider.cancel(by_old.id)
    assert (await between.usage(K))["1h"].used == 0


def test_secrets_from_the_settings(tmp_path):
    path = tmp_path / "secrets"
    path.write_text(f"{NEW}\n{OLD}\n", encoding="utf-8")
    for given in (
        {"reservation_secret": [NEW, OLD]},
        {"reservation_secret": f"{NEW} {OLD}"},
        {"reservation_secret_file": str(path)},
    ):
        settings = load_settings(given)
        assert settings.reservation_secret == (NEW, OLD)
        assert NEW not in repr(settings)
    assert settings.secrets == (path,)
    digits = "1234567890123456"
    assert load_settings(environment={"TIDEGATE_RESERVATION_SECRET": digits}).reservation_secret == (digits,)
    assert load_settings({}).reservation_secret == ()
    path.write_text(" \n", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected at least one secret"):
        load_settings({"reservation_secret_file": str(path)})
    with pytest.raises(ConfigError, match="reservation_secret: must differ from the tokens"):
        load_settings({"decision_token": DECISION, "reservation_secret": [NEW, DECISION]})


# ---- kept in the store -----------------------------------------------------------------------------------------------


async def test_the_store_keeps_the_first_secret(shared_url):
    stores = [open_guarded(shared_url) for _ in range(3)]
    try:
        found = {await SigningKeys(store).all() for store in (*stores, *stores)}
        assert len(found) == 1
        ((key,),) = found
        assert len(key) == 32
        stored = stores[0].get_value(SECRETS, SECRET_NAME)
        assert stored.ends - stored.written == SECRET_TTL * 1e6
    finally:
        for store in stores:
            await store.close_async()


async def test_each_store_in_memory_has_its_own_secret():
    one, other = MemoryStore(), MemoryStore()
    assert await SigningKeys(one).all() == await SigningKeys(one).all()
    assert await SigningKeys(one).all() != await SigningKeys(other).all()
    assert one.metrics()["entries"] == 0


async def test_an_emptied_store_gets_the_secret_back():
    clock = ManualClock(start=START)
    with ValkeyServer() as valkey:
        store = open_store(valkey.url, clock=clock)
        try:
            first, second = SigningKeys(store), SigningKeys(store)
            key = (await first.all())[0]
            assert await second.all() == (key,)
            valkey.ask("FLUSHALL")
            clock.advance(61)
            assert await first.all() == await second.all() == await SigningKeys(store).all() == (key,)
            # Another secret took its place: what was signed before is still verified.
            valkey.ask("FLUSHALL")
            (other,) = await SigningKeys(store).all()
            clock.advance(61)
            assert await first.all() == await second.all() == (other, key)
        finally:
            await store.close_async()


async def test_ids_signed_while_the_store_was_unavailable_are_valid_later(monkeypatch):
    monkeypatch.setattr("tidegate.service._decisions.signing.RETRY_INTERVAL", 0)
    clock = ManualClock(start=START)
    policies = load_settings(
        {"policies": {"api": {"limits": "10/1h fixed_window", "on_store_error": "allow"}}}
    ).policies
    with ValkeyServer() as valkey:
        store = GuardedStore(open_store(valkey.url), clock=clock, background=False)
        valkey.kill()
        decider = Decider(policies, store)
        try:
            lost = await decider.reserve(K)
            assert lost.decision.allowed
            assert store.unavailable
            valkey.start()

            def back():
                clock.advance(1)
                store.maintain()
                return not store.unavailable

            until(back, "the return of the store")
            other = Decider(policies, store)  # of another process
            await decider.cancel((await other.reserve(K)).id)
            await other.cancel((await decider.reserve(K)).id)
            await decider.cancel(lost.id)
            with pytest.raises(AlreadySettledError):
                await decider.cancel(lost.id)
        finally:
            await decider.close()


# ---- refunds of settlements ------------------------------------------------------------------------------------------

LIMITS = ["10/1m fixed_window", "10/minute calendar_window", "10/1m sliding_window", "10/1m sliding_log", "10/1m",
          "10/1m concurrency"]  # fmt: skip


@cases("limit", LIMITS)
async def test_an_expired_window_gets_no_refund(limit, shared_url):
    clock = ManualClock(start=START)  # the beginning of a minute
    store = open_store(shared_url.replace("deadline=20s&", "").replace("?deadline=20s", ""), clock=clock)
    decider = Decider(load_settings({"policies": {"api": limit}}).policies, store)
    try:
        old = await decider.reserve(K, 10, ttl=600)
        clock.advance(120)
        assert (await decider.acquire(K, 10)).allowed
        await decider.cancel(old.id)
        assert [each.used for each in (await decider.usage(K)).values()] == [10]
        assert not (await decider.acquire(K)).allowed
        # Within its window, a settlement refunds exactly its charge, even if it is repeated.
        clock.advance(120)
        assert (await decider.acquire(K, 4)).allowed
        reservation = await decider.reserve(K, 6, ttl=600)
        await decider.cancel(reservation.id)
        for _ in range(3):
            with pytest.raises(AlreadySettledError):
                await decider.cancel(reservation.id)
        assert [each.used for each in (await decider.usage(K)).values()] == [4]
    finally:
        await decider.close()


async def test_lease_ids_are_signed():
    async with InProcessService(policies={"api": "100/1h fixed_window"}) as app_service:
        lease = (await app_service.post("lease", {"policy": "api", "key": "k", "max_permits": 20})).json()
        assert lease["permits"] == 20
        for forged in guesses(DECISION, lease["id"]):
            assert (await app_service.post("commit", {"id": forged, "cost": 0})).status_code == 404
        assert (await app_service.post("commit", {"id": lease["id"], "cost": 3})).status_code == 200
        assert (await app_service.post("commit", {"id": lease["id"], "cost": 0})).status_code == 409
        assert (await app_service.post("usage", {"policy": "api", "key": "k"})).json()["limits"][0]["used"] == 3
