"""Pools: which member sends a call, and what happens if it has no room, is refused or rejected."""

import asyncio
import json
import threading
from collections import Counter
from random import Random

import httpx
import pytest

from tests.outbound.flows import settle
from tests.outbound.pool_client import KEY, PRICES, URL, Client, pool
from tidegate import Denied
from tidegate.outbound import AsyncGate, Gate, Providers
from tidegate.outbound.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.stores import MemoryStore
from tidegate.stores._sqlite import SQLiteStore
from tidegate.testing import ManualClock


@pytest.fixture
def store():
    return MemoryStore(clock=ManualClock(1_767_225_600))


def test_the_first_member_with_room_sends_with_its_own_key(store):
    with Client(store, pool("a", "b")) as client:
        for _ in range(6):
            response = client.ask()
        assert client.sent == ["a"] * 3 + ["b"] * 3
        outcome = response.extensions["tidegate"]
        assert (outcome.provider, outcome.member) == ("models", "b")
        with pytest.raises(Denied, match=r"provider models \(all 2 members\): no permit within 0\.0 s") as denied:
            client.ask()
        assert denied.value.decision.retry_after == 60.0
        assert client.used() == {"a": 3, "b": 3}


def test_a_call_waits_for_the_first_member_that_will_have_room(store):
    members = [{"name": "slow", "limits": ["1/1h"]}, {"name": "fast", "limits": ["1/10s"]}]
    settings = pool(*({**each, "api_key": f"key-{each['name']}"} for each in members))
    with Client(store, settings, timeout=None) as client:
        for _ in range(4):
            client.ask()
        assert client.sent == ["slow", "fast", "fast", "fast"]
        assert store.clock.now() - 1_767_225_600 == 20


def test_by_weight(store):
    chance = Random(4).random
    members = [{"name": "a", "api_key": "key-a", "weight": 3}, {"name": "b", "api_key": "key-b"}]
    with Client(store, pool(*members, pick="weight", limits=["1000/1m"]), jitter=chance) as client:
        for _ in range(400):
            client.ask()
        counts = Counter(client.sent)
        assert 270 <= counts["a"] <= 330


def test_the_cheapest_first(store):
    cheap = {"date": "2026-11-01", "models": {"m": {"input": 1, "output": 1}}}
    settings = pool(
        "dear", {"name": "cheap", "api_key": "key-cheap", "price": cheap}, pick="price", price=PRICES, limits=["2/1m"]
    )
    with Client(store, settings) as client:
        for _ in range(3):
            client.ask()
        assert client.sent == ["cheap", "cheap", "dear"]


def test_the_cheapest_first_if_only_members_have_prices(store):
    members = [
        {"name": n, "api_key": f"key-{n}", "price": {**PRICES, "models": {"m": {"input": cost, "output": cost}}}}
        for n, cost in (("dear", 2), ("cheap", 1))
    ]
    with Client(store, pool(*members, pick="price")) as client:
        client.ask()
        assert client.sent == ["cheap"]


def test_a_smaller_order_comes_first_and_weight_decides_within_it(store):
    members = [{"name": n, "api_key": f"key-{n}", "order": o} for n, o in (("z", 2), ("a", 1), ("b", 1))]
    with Client(store, pool(*members, pick="weight", limits=["1/1m"])) as client:
        for _ in range(3):
            client.ask()
        assert client.sent[-1] == "z"
        assert sorted(client.sent[:2]) == ["a", "b"]


# ---- conversations ---------------------------------------------------------------------------------------------------


def test_a_conversation_stays_with_its_member(store):
    settings = pool(*"abcde", limits=["1000/1m"], sticky="X-Conversation", price=PRICES)
    with Client(store, settings) as client:
        for number in range(20):
            for _ in range(3):
                client.ask(**{"x-conversation": f"c{number}"})
        kept = [set(client.sent[3 * number : 3 * number + 3]) for number in range(20)]
        assert all(len(each) == 1 for each in kept)
        assert len(set.union(*kept)) > 2
        client.ask()
        assert client.sent[-1] == "a"
    with Client(store, pool(*"abcdef", limits=["1000/1m"], sticky="X-Conversation", price=PRICES)) as client:
        for number in range(20):
            client.ask(**{"x-conversation": f"c{number}"})
        moved = [new for new, old in zip(client.sent, kept, strict=True) if new not in old]
        assert set(moved) <= {"f"}  # only what the new member takes has moved


def test_a_conversation_goes_to_another_member_while_its_own_has_no_room(store):
    with Client(store, pool(*"abc", limits=["2/1m"], sticky="x-conversation")) as client:
        for _ in range(6):
            client.ask(**{"x-conversation": "c"})
        assert Counter(client.sent) == {"a": 2, "b": 2, "c": 2}
        assert client.sent[0] == client.sent[1]


def test_without_a_cheaper_cache_a_conversation_goes_anywhere(store):
    plain = {"date": "2026-11-01", "models": {"m": {"input": 1, "output": 5}}}
    with Client(store, pool(*"abcde", limits=["99/1m"], sticky="x-conversation", price=plain)) as client:
        for number in range(20):
            client.ask(**{"x-conversation": f"c{number}"})
        assert set(client.sent) == {"a"}


# ---- members that cannot be asked ------------------------------------------------------------------------------------


def test_a_refused_member_is_skipped_until_it_may_be_asked(store):
    refusing = {"a"}

    def answer(key):
        return httpx.Response(429, headers={"retry-after": "30"}) if key in refusing else None

    with Client(store, pool("a", "b", limits=["100/1m"]), answer) as client:
        assert client.ask().status_code == 200  # the other member sends it
        assert client.sent == ["a", "b"]
        client.ask()
        assert client.sent == ["a", "b", "b"]
        refusing.clear()
        store.clock.advance(30)
        client.ask()
        assert client.sent[-1] == "a"
        assert client.gate.metrics()["refused"] == 1


def test_if_all_members_refuse_the_refusal_is_returned_and_calls_wait_for_the_first(store):
    waits = {"a": "30", "b": "10"}
    with Client(
        store, pool("a", "b", limits=["100/1m"]), lambda key: httpx.Response(429, headers={"retry-after": waits[key]})
    ) as client:
        assert client.ask().status_code == 429
        assert client.sent == ["a", "b"]
        with pytest.raises(Denied) as denied:
            client.ask()
        assert denied.value.decision.retry_after == 10.0


def test_a_member_that_cannot_be_reached_is_replaced_by_another_and_costs_nothing(store):
    def answer(key):
        if key == "a" or "all" in down:
            raise httpx.ConnectError("no route to host")

    down = set()
    with Client(store, pool("a", "b"), answer) as client:
        assert client.ask().status_code == 200
        assert client.sent == ["a", "b"]
        assert client.used() == {"a": 0, "b": 1}
        down.add("all")
        with pytest.raises(httpx.ConnectError):
            client.ask()
        assert client.sent == ["a", "b", "a", "b"]
        assert client.used() == {"a": 0, "b": 1}
        assert client.gate.metrics()["retried"] == 2


@pytest.mark.parametrize(
    "headers",
    [
        {"retry-after": "0"},
        {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"},
        {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1ms"},
        {},
    ],
)
@pytest.mark.parametrize("retries", [0, 2])
def test_a_refusal_without_a_usable_wait_is_not_repeated_at_once(store, headers, retries):
    settings = {**pool("a", "b", limits=["1000/1m"]), "retries": {"max": retries}}
    with Client(store, settings, lambda _key: httpx.Response(429, headers=headers), timeout=6) as client:
        assert client.ask().status_code == 429
        assert Counter(client.sent) == {"a": 1 + retries, "b": 1 + retries}
        assert store.clock.now() - 1_767_225_600 <= 6
        with pytest.raises(Denied):  # the next call waits, too
            client.gate.acquire("models", timeout=0)
        store.clock.advance(30)
        assert client.used() == Counter(client.sent)  # they have arrived


def test_a_slow_refusal_is_returned_at_the_deadline(store):
    def answer(_key):
        store.clock.advance(10)
        return httpx.Response(429, headers={"retry-after": "1"})

    settings = {**pool(*"abcde", limits=["1000/1m"]), "retries": {"max": 5}}
    with Client(store, settings, answer, timeout=15) as client:
        assert client.ask().status_code == 429
        assert client.sent == ["a", "b"]


def test_members_that_cannot_be_reached_are_tried_until_the_deadline(store):
    def answer(_key):
        store.clock.advance(10)
        raise httpx.ConnectTimeout("no answer")

    with Client(store, pool(*"abcde"), answer, timeout=15) as client, pytest.raises(httpx.ConnectTimeout):
        client.ask()
    assert client.sent == ["a", "b"]


def test_a_403_that_is_a_refusal_goes_to_another_member(store):
    def answer(key):
        return httpx.Response(403, headers={"retry-after": "30"}) if key == "a" else None

    with Client(store, pool("a", "b", limits=["100/1m"]), answer) as client:
        assert [client.ask().status_code for _ in range(2)] == [200] * 2
        assert client.sent == ["a", "b", "b"]
        assert client.gate.metrics()["rejected"] == 0


@pytest.mark.parametrize("status", [401, 403])
def test_calls_that_are_rejected_count(store, status):
    """They have arrived at the provider, whatever it answered."""
    with Client(store, pool("a", "b", limits=["5/1m"]), lambda _key: httpx.Response(status)) as client:
        for _ in range(5):
            assert client.ask().status_code == status
        with pytest.raises(Denied):
            client.ask()
        assert Counter(client.sent) == {"a": 5, "b": 5}
        assert client.used() == {"a": 5, "b": 5}


def test_a_member_with_an_invalid_key_is_not_asked_again(store, caplog):
    with Client(store, pool("a", "b"), lambda key: httpx.Response(401) if key == "a" else None) as client:
        assert [client.ask().status_code for _ in range(3)] == [200] * 3
        assert client.sent == ["a", "b", "b", "b"]
        assert client.used() == {"a": 1, "b": 3}
        assert "the key of models/a was rejected (401), another member could send the call" in caplog.text
        assert client.gate.metrics()["rejected"] == 1


def test_a_member_that_may_not_send_a_call_is_asked_last_for_a_minute(store, caplog):
    with Client(store, pool("a", "b"), lambda key: httpx.Response(403) if key == "a" else None) as client:
        assert [client.ask().status_code for _ in range(3)] == [200] * 3
        assert client.sent == ["a", "b", "b", "b"]
        with pytest.raises(Denied):  # the other member has no room
            client.ask()
        assert client.sent[4:] == ["a"]
        assert "models/a rejected a call of model '' (403), another member could send it" in caplog.text
        assert client.gate.metrics()["rejected"] == 0
        store.clock.advance(60)
        client.ask()
        assert client.sent[5:] == ["a", "b"]


class ModelClient(httpx.Client):
    """A client of a pool; key a may not use the model `tuned`, and says so with a status. Counts keys and models."""

    def __init__(self, store, status, **settings):
        self.counts = Counter()

        def handle(request):
            key, model = request.headers["authorization"][-1], json.loads(request.content)["model"]
            self.counts[key, model] += 1
            return httpx.Response(status if (key, model) == ("a", "tuned") else 200, json={})

        known = Providers.of(pool("a", "b", **settings))
        transport = RateLimitTransport(known, store, httpx.MockTransport(handle), timeout=0)
        self.gate = transport.gate
        super().__init__(transport=transport)

    def ask(self, model):
        return self.post(URL, json={"model": model, "max_tokens": 1}).status_code


@pytest.mark.parametrize("limits", [["10/1m"], ["10/1m", "100000/1m unit=tokens"]])
def test_calls_of_a_model_that_a_key_may_not_use_do_not_take_the_key_from_others(store, limits):
    with ModelClient(store, 403, limits=limits, pick="order") as client:
        for _ in range(20):
            assert [client.ask("tuned") for _ in range(2)] == [200] * 2
            assert [client.ask("m") for _ in range(16)] == [200] * 16
            store.clock.advance(61)
        assert client.gate.metrics()["rejected"] == 0
        assert client.counts["a", "m"] >= 20 * 8


def test_a_401_of_a_key_that_was_accepted_lately_is_about_the_call(store):
    with ModelClient(store, 401, limits=["100/1m"], pick="order") as client:
        for _ in range(20):
            assert [client.ask("m"), client.ask("tuned")] == [200] * 2
            store.clock.advance(299)
        assert client.counts == {("a", "m"): 20, ("a", "tuned"): 20, ("b", "tuned"): 20}
        assert client.gate.metrics()["rejected"] == 0
        store.clock.advance(1)
        client.ask("tuned")
        assert client.gate.metrics()["rejected"] == 1


def test_other_members_are_preferred_only_for_the_model_that_a_key_may_not_use(store):
    settings = {"limits": ["100/1m", "100000/1m unit=tokens"], "pick": "order"}
    with ModelClient(store, 403, **settings) as client:
        for model in ("tuned", "tuned", "m", "m"):
            assert client.ask(model) == 200
        assert client.counts == {("a", "tuned"): 1, ("b", "tuned"): 2, ("a", "m"): 2}


def test_a_403_for_a_call_that_cannot_be_repeated_does_not_move_calls_of_others(store):
    def body():
        yield b"x"

    def handle(request):
        request.read()
        sent.append((request.url.path, request.headers["authorization"][-1]))
        return httpx.Response(403 if "organization" in request.url.path else 200, json={})

    sent = []
    known = Providers.of(pool("a", "b", limits=["100/1m"], pick="order"))
    with httpx.Client(transport=RateLimitTransport(known, store, httpx.MockTransport(handle), timeout=0)) as client:
        for _ in range(20):
            client.post("https://api.test/v1/organization/x", content=body())
            client.post(URL, json={"model": "m", "max_tokens": 1})
            store.clock.advance(30)
    assert Counter(sent) == {("/v1/organization/x", "a"): 20, ("/v1/chat/completions", "a"): 20}


def test_a_suspended_key_is_tried_again_after_a_pause_that_doubles(store):
    bad = {"a"}
    with Client(
        store, pool("a", "b", limits=["1000/1m"]), lambda key: httpx.Response(401) if key in bad else None
    ) as client:

        def find_pause():
            """Ask each second until the first member is tried again."""
            client.sent.clear()
            seconds = 0
            while "a" not in client.sent:
                store.clock.advance(1)
                seconds += 1
                client.ask()
            return seconds

        client.ask()
        assert [find_pause() for _ in range(4)] == [60, 120, 240, 480]
        bad.clear()
        assert find_pause() == 960
        bad.add("a")
        store.clock.advance(300)  # it had worked in between: until then, a 401 may be about the call
        client.ask()
        assert find_pause() == 60


async def test_many_calls_at_once_that_are_rejected_suspend_the_key_for_one_pause(store):
    sent, all_sent = [], asyncio.Event()

    async def handle(request):
        key = request.headers["authorization"].removeprefix("Bearer key-")
        sent.append(key)
        if sent.count("a") == 5:
            all_sent.set()
        await all_sent.wait()
        return httpx.Response(401 if key == "a" else 200, json={})

    settings = pool("a", "b", limits=["100/1m"])
    transport = AsyncRateLimitTransport(Providers.of(settings), store, httpx.MockTransport(handle), timeout=0)
    async with httpx.AsyncClient(transport=transport) as client:
        body = {"model": "m", "max_tokens": 200}
        await asyncio.gather(*(client.post(URL, json=body) for _ in range(5)))
        assert Counter(sent) == {"a": 5, "b": 5}
        assert transport.gate.metrics()["rejected"] == 1
        store.clock.advance(60)
        await client.post(URL, json=body)
        assert sent[-2:] == ["a", "b"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_rejection_by_all_members_is_about_the_call_and_suspends_no_key(store, status):
    """Such as the header of a caller that names another organization."""
    statuses = [status]
    with Client(store, pool("a", "b"), lambda _key: httpx.Response(statuses[0])) as client:
        assert client.ask().status_code == status
        assert (client.sent, client.used()) == (["a", "b"], {"a": 1, "b": 1})
        statuses[0] = 200
        assert [client.ask().status_code for _ in range(4)] == [200] * 4
        assert Counter(client.sent) == {"a": 3, "b": 3}
        assert client.gate.metrics()["rejected"] == 0


@pytest.mark.parametrize("status", [401, 403])
def test_a_rejected_call_that_cannot_be_repeated_suspends_no_key(store, status):
    """After a 401, other members are preferred for a while; a 403 says nothing about the key."""

    def body():
        yield b"{}"

    bad = {"a"}
    with Client(
        store, pool("a", "b", limits=["100/1m"]), lambda key: httpx.Response(status) if key in bad else None
    ) as client:
        headers = {"authorization": "Bearer of-the-sdk"}
        statuses = [client.post(URL, content=body(), headers=headers).status_code for _ in range(3)]
        assert statuses == ([401, 200, 200] if status == 401 else [403] * 3)
        bad.clear()
        store.clock.advance(60)
        client.sent.clear()
        assert client.ask().status_code == 200
        assert client.sent == ["a"]
        assert client.gate.metrics()["rejected"] == 0


def test_a_pool_does_not_pass_on_the_account_headers_of_a_caller(store):
    seen = []

    def handle(request):
        seen.append(request.headers)
        return httpx.Response(200, json={})

    names = {"openai-organization": "org-x", "OpenAI-Project": "p", "x-goog-user-project": "p", "x-other": "stays"}
    transport = RateLimitTransport(Providers.of(pool("a")), store, httpx.MockTransport(handle), timeout=0)
    with httpx.Client(transport=transport) as client:
        client.post(URL, json={"model": "m"}, headers=names)
    assert seen[0]["x-other"] == "stays"
    assert not {name.lower() for name in names} & set(seen[0]) - {"x-other"}


def test_a_lenient_call_goes_to_a_member_that_it_fits(store):
    """A member that is too small would refuse it, whatever is reserved there."""
    small = {"name": "small", "api_key": "key-small", "limits": ["1000/1m unit=tokens"]}
    big = {"name": "big", "api_key": "key-big", "limits": ["10_000/1m unit=tokens"]}
    with Client(store, pool(small, big)) as client:
        client.post(URL, json={"model": "m", "max_tokens": 2000}, headers={"authorization": "Bearer of-the-sdk"})
        client.ask()
        assert client.sent == ["big", "small"]
        assert client.gate.acquire("models", {"tokens": 3000}, timeout=0).member == "big"
        assert client.gate.acquire("models", {"tokens": 300}, timeout=0).member == "small"
        with pytest.raises(Denied):
            client.gate.acquire("models", {"tokens": 30_000}, timeout=0)


@pytest.mark.parametrize("settings", [pool("a", limits=["1000/1m unit=tokens"]), None], ids=["pool", "account"])
def test_a_call_above_a_reduced_capacity_waits_for_its_recovery(store, settings):
    """It is too large only for now, so it is not denied for ever."""
    limits = {"limits": ["1000/1m unit=tokens"], "profile": "openai"}
    settings = settings or {"domain": "api.test", "name": "models", **limits}
    statuses = [429, 200]

    def handle(_request):
        return httpx.Response(statuses.pop(0), json={}, headers={"retry-after": "1"})

    transport = RateLimitTransport(Providers.of(settings), store, httpx.MockTransport(handle), timeout=0)
    with httpx.Client(transport=transport) as client:
        assert client.post(URL, json={"model": "m", "max_tokens": 900}).status_code == 429
        (account,) = transport.gate.accounts
        assert account.capacity < 900
        store.clock.advance(2)
        with pytest.raises(Denied) as denied:
            transport.gate.acquire("models", {"tokens": 900}, timeout=0)
        assert denied.value.decision.retry_after == 4 * 60 - 1  # the next step
        store.clock.advance(86_400)
        assert transport.gate.acquire("models", {"tokens": 900}, timeout=0).limited


def test_a_conversation_stays_with_its_member_if_the_cache_of_any_member_is_cheaper(store):
    same = {"date": "2026-11-01", "models": {"m": {"input": 1, "output": 5}}}
    members = [{"name": "a", "api_key": "key-a", "price": same}, "b", "c"]
    settings = pool(*members, price=PRICES, limits=["1000/1m"], sticky="x-conversation", pick="weight")
    with Client(store, settings) as client:
        for number in range(30):
            client.ask(**{"x-conversation": str(number)})
        assert set(client.sent) == {"a", "b", "c"}


def test_a_response_of_403_without_a_pool_is_returned(store):
    settings = {"domain": "api.test", "limits": ["5/1m"], "api_key": "key-x", "key": KEY}
    known = Providers.of(settings)
    transport = RateLimitTransport(known, store, httpx.MockTransport(lambda _request: httpx.Response(403)), timeout=0)
    with httpx.Client(transport=transport) as client:
        assert [client.get("https://api.test/").status_code for _ in range(3)] == [403] * 3


# ---- files -----------------------------------------------------------------------------------------------------------


def write(path, *members, name="api.test", retries=False):
    lines = [f"  - {{name: {member}, api_key: key-{member}{extra}}}" for member, extra in members]
    text = "domain: api.test\nprofile: openai\nlimits: [2/1m]\nkey: {header: Authorization, prefix: Bearer}\npool:\n"
    text = ("retries: {max: 2}\n" if retries else "") + text
    path.write_text(f"name: {name}\n" + text + " members:\n" + "\n".join(lines) + "\n")
    path.chmod(0o600)


def test_a_reload_adds_drains_and_removes_members_without_refilling(store, tmp_path):
    path = tmp_path / "models.yaml"
    write(path, ("a", ""), ("b", ""))
    known = Providers.load(files=[path])
    with Client(store, known) as client:
        for _ in range(2):
            client.ask()
        write(path, ("a", ", drain: true"), ("b", ""), ("c", ""))
        assert known.reload() == ("api.test",)
        for _ in range(4):
            client.ask()
        assert client.sent == ["a", "a", "b", "b", "c", "c"]
        write(path, ("c", ""))
        known.reload()
        with pytest.raises(Denied):
            client.ask()
        write(path, ("a", ""), ("b", ""), ("c", ""))
        known.reload()
        with pytest.raises(Denied):
            client.ask()  # what they used stays used
        store.clock.advance(61)
        client.ask()
        assert client.sent[-1] == "a"


def test_a_changed_file_tries_a_rejected_key_again(store, tmp_path):
    path = tmp_path / "models.yaml"
    write(path, ("a", ""), ("b", ""))
    known = Providers.load(files=[path])
    bad = {"a"}
    with Client(store, known, lambda key: httpx.Response(401) if key in bad else None) as client:
        client.ask()
        bad.clear()
        client.ask()
        assert client.sent == ["a", "b", "b"]
        write(path, ("a", ""), ("b", ", weight: 2"))
        known.reload()
        client.ask()
        assert client.sent[-1] == "a"


def test_a_drained_pool_has_no_member(store):
    settings = pool({"name": "a", "drain": True, "api_key": "key-a"})
    with Client(store, settings) as client, pytest.raises(Denied, match="all members are drained"):
        client.ask()


def test_a_member_with_a_url_of_its_own(store):
    members = ["a", {"name": "eu", "api_key": "key-eu", "url": "https://eu.test/openai"}]
    with Client(store, pool(*members, limits=["1/1m"])) as client:
        client.ask()
        client.ask()
        assert client.hosts == [URL, "https://eu.test/openai/v1/chat/completions"]


# ---- gates -----------------------------------------------------------------------------------------------------------


def test_permits_by_the_name_of_the_pool(store):
    gate = Gate(Providers.of(pool("a", "b", limits=["1/1m"])), store)
    with gate.acquire("models") as first, gate.try_acquire("api.test") as second:
        assert (first.provider, first.member, second.member) == ("models", "a", "b")
        denied = gate.try_acquire("models")
        assert not denied
        assert denied.member == ""
        second.cancel()
        with gate.acquire("models") as third:
            assert third.member == "b"
    gate.close()


def test_the_member_of_an_account_is_found_by_its_key():
    (provider,) = Providers.of(pool("a", "b"))
    assert provider.for_key(("api.test", "member=b")).member == "b"
    assert provider.for_key("api.test") is provider


async def test_tasks_that_wait_are_served_in_order_as_permits_come_back(store):
    gate = AsyncGate(Providers.of(pool("a", "b", limits=["1/1m"])), store)
    held = [await gate.acquire("models") for _ in range(2)]
    served = []

    async def wait(number):
        charge = await gate.acquire("models", timeout=30)
        served.append((number, charge.member))

    tasks = []
    for number in range(2):
        tasks.append(asyncio.create_task(wait(number)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert gate.metrics()["waiting"] == 2
    await held[1].cancel()
    await asyncio.wait_for(tasks[0], 10)
    await held[0].cancel()
    await asyncio.wait_for(tasks[1], 10)
    assert served == [(0, "b"), (1, "a")]
    await gate.close()


async def wait_in_order(gate, served, count):
    """Start tasks that wait for permits, one after the other."""

    async def wait(number):
        charge = await gate.acquire("models", timeout=300)
        served.append((number, charge.member))

    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(wait(number)))
        await settle()
    return tasks


async def test_a_reload_reaches_calls_that_wait(store, tmp_path):
    """They keep their order, a new call does not overtake them, and a drained member gets no more calls."""
    path = tmp_path / "models.yaml"
    write(path, ("a", ""), name="models")
    gate = AsyncGate(Providers.load(files=[path]), store, reload=5)
    for _ in range(2):
        await gate.acquire("models")
    served = []
    tasks = await wait_in_order(gate, served, 2)
    write(path, ("a", ", drain: true"), ("b", ""), name="models")
    await asyncio.wait_for(asyncio.gather(*tasks), 20)
    assert served == [(0, "b"), (1, "b")]
    assert store.clock.now() - 1_767_225_600 == 5  # when the files are read again
    await gate.close()


def test_a_reload_before_a_retry_reaches_the_call(store, tmp_path):
    """The first attempt fails; then the file drains its member and adds another."""
    path = tmp_path / "models.yaml"
    write(path, ("a", ""), retries=True)
    known = Providers.load(files=[path])
    sent = []

    def answer(key):
        sent.append((key, store.clock.now() - 1_767_225_600))
        if len(sent) > 1:
            return None
        write(path, ("a", ", drain: true"), ("b", ""), retries=True)
        known.reload()
        return httpx.Response(503)

    with Client(store, known, answer, timeout=100, reload=None) as client:
        client.put(URL, json={"model": "m", "max_tokens": 200})
    assert [key for key, _ in sent] == ["a", "b"]


async def test_a_member_that_failed_is_not_tried_again_after_a_reload(store, tmp_path):
    path = tmp_path / "models.yaml"
    write(path, ("a", ""), ("b", ""))
    sent = []

    def handle(request):
        sent.append(request.headers["authorization"].removeprefix("Bearer key-"))
        if sent[-1] == "a":
            raise httpx.ConnectError("no route")
        return httpx.Response(200, json={})

    transport = AsyncRateLimitTransport(Providers.load(files=[path]), store, httpx.MockTransport(handle), reload=5)
    async with httpx.AsyncClient(transport=transport) as client:
        body = {"model": "m", "max_tokens": 200}
        for _ in range(2):  # b has no room left
            await client.post(URL, json=body)
        call = asyncio.create_task(client.post(URL, json=body))
        while not transport.gate.metrics()["waiting"]:
            await asyncio.sleep(0)
        write(path, ("a", ", weight: 2"), ("b", ""))
        await asyncio.wait_for(call, 20)
    assert sent == ["a", "b", "a", "b", "a", "b"]


async def test_a_call_by_name_that_waits_keeps_its_provider_if_that_is_removed(store, tmp_path):
    path = tmp_path / "models.yaml"
    write(path, ("a", ""), name="models")
    gate = AsyncGate(Providers.load(directories=[tmp_path]), store, reload=5)
    for _ in range(2):
        await (await gate.acquire("models")).commit()
    served = []
    (task,) = await wait_in_order(gate, served, 1)
    path.unlink()
    await asyncio.wait_for(task, 20)
    assert (served, store.clock.now() - 1_767_225_600) == ([(0, "a")], 60)
    await gate.close()


async def test_a_call_that_waits_does_not_use_a_key_that_was_rejected(store):
    settings = pool("a", "b", limits=["1/10m"])
    sent = []

    def handle(request):
        sent.append(request.headers["authorization"].removeprefix("Bearer key-"))
        return httpx.Response(401 if sent[-1] == "a" and len(sent) > 2 else 200, json={})

    transport = AsyncRateLimitTransport(Providers.of(settings), store, httpx.MockTransport(handle))
    async with httpx.AsyncClient(transport=transport) as client:
        body = {"model": "m", "max_tokens": 200}
        for _ in range(2):
            await client.post(URL, json=body)
            store.clock.advance(5)  # b has room later than a, and then shows that the key of a is rejected
        calls = []
        for number in range(4):
            calls.append(asyncio.create_task(client.post(URL, json=body)))
            while transport.gate.metrics()["waiting"] <= number:
                await asyncio.sleep(0)
            store.clock.advance(1)
        await asyncio.wait_for(asyncio.gather(*calls), 20)
    assert Counter(sent) == {"a": 2, "b": 5}


async def test_what_another_process_returns_is_noticed_within_a_second(tmp_path):
    clock = ManualClock(1_767_225_600)
    stores = [SQLiteStore(tmp_path / "quota.db", clock=clock) for _ in range(2)]
    for settings in (
        pool("a", limits=["1000/1m unit=tokens"]),
        {"domain": "api.test", "name": "models", "limits": ["1000/1m unit=tokens"]},
    ):
        gates = [AsyncGate(Providers.of(settings), store) for store in stores]
        held = await gates[0].acquire("models", {"tokens": 1000})
        began = clock.now()
        waiting = asyncio.create_task(gates[1].acquire("models", {"tokens": 500}, timeout=100).__aenter__())
        while not gates[1].metrics()["waiting"]:
            await asyncio.sleep(0)
        await held.commit({"tokens": 10})
        await asyncio.wait_for(waiting, 20)
        assert clock.now() - began <= 2
        for gate in gates:
            await gate.close()
    for store in stores:
        store.close()


async def test_a_task_that_is_cancelled_leaves_the_queue(store):
    gate = AsyncGate(Providers.of(pool("a", limits=["1/1m"])), store)
    held = await gate.acquire("models")

    async def wait():
        return await gate.acquire("models", timeout=30)

    tasks = [asyncio.create_task(wait()) for _ in range(2)]
    for _ in range(5):
        await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    await held.cancel()
    charge = await asyncio.wait_for(tasks[1], 10)
    assert charge.member == "a"
    assert gate.metrics()["waiting"] == 0
    await gate.close()


def test_threads_never_exceed_the_sum_of_the_members():
    store = MemoryStore()
    gate = Gate(Providers.of(pool(*"abcd", limits=["10/1h"])), store)
    taken = []

    def run():
        while charge := gate.try_acquire("models"):
            taken.append(charge.member)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(taken) == dict.fromkeys("abcd", 10)
    gate.close()
