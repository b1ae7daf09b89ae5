"""Pools: which member sends a call, what happens if it has no room, is refused or rejected, and spending ceilings."""

import asyncio
import threading
from collections import Counter
from random import Random

import httpx
import pytest

from tests.outbound.streamed_model import StreamedModel
from tidegate import Denied, StoreUnavailable
from tidegate.outbound import AsyncGate, Gate, Providers, request_options
from tidegate.outbound.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.outbound.quota.exchange import OutboundRequest
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

URL = "https://api.test/v1/chat/completions"
KEY = {"header": "Authorization", "prefix": "Bearer"}
PRICES = {"date": "2026-11-01", "models": {"m": {"input": 1, "cached": 0.1, "output": 5}}}


@pytest.fixture
def store():
    return MemoryStore(clock=ManualClock(1_767_225_600))


def pool(*members, limits=("3/1m",), spend=None, price=None, **fields):
    """The settings of a provider with a pool; members are names or mappings."""
    listed = [each if isinstance(each, dict) else {"name": each, "api_key": f"key-{each}"} for each in members]
    found = {
        "domain": "api.test",
        "name": "models",
        "profile": "openai",
        "limits": list(limits),
        "key": KEY,
        "pool": {"members": listed, **fields},
    }
    if price is not None:
        found["price"] = price
    if spend is not None:
        found["spend"] = spend
    return found


class Client(httpx.Client):
    """A client of a pool; notes which key and host sent each request."""

    def __init__(self, store, settings, answer=None, jitter=lambda: 0.5, **options):
        self.sent, self.hosts = [], []
        usage = {"prompt_tokens": 100, "completion_tokens": 30}

        def handle(request):
            key = request.headers["authorization"].removeprefix("Bearer key-")
            self.sent.append(key)
            self.hosts.append(str(request.url))
            found = None if answer is None else answer(key)
            return found or httpx.Response(200, json={"usage": usage})

        known = settings if isinstance(settings, Providers) else Providers.of(settings)
        options = {"timeout": 0, "tokenizer": lambda _text: 100, "jitter": jitter, **options}
        transport = RateLimitTransport(known, store, httpx.MockTransport(handle), **options)
        self.gate = transport.gate
        super().__init__(transport=transport)

    def ask(self, **headers):
        body = {"model": "m", "max_tokens": 200}
        return self.post(URL, json=body, headers={"authorization": "Bearer of-the-sdk", **headers})

    def used(self):
        return {a.provider.member: next(iter(a.limiter.usage(a.key).values())).used for a in self.gate.accounts}


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


@pytest.mark.parametrize("status", [401, 403])
def test_a_member_with_an_invalid_key_is_not_asked_again(store, status, caplog):
    with Client(store, pool("a", "b"), lambda key: httpx.Response(status) if key == "a" else None) as client:
        assert [client.ask().status_code for _ in range(3)] == [200] * 3
        assert client.sent == ["a", "b", "b", "b"]
        assert client.used() == {"a": 0, "b": 3}
        assert f"the key of models/a was rejected ({status})" in caplog.text
        assert client.gate.metrics()["rejected"] == 1


def test_if_all_keys_are_invalid_the_response_is_returned_once_and_then_calls_fail(store):
    with Client(store, pool("a", "b"), lambda _key: httpx.Response(401)) as client:
        assert client.ask().status_code == 401
        with pytest.raises(
            Denied, match=r"the keys of all members were rejected \(401, 403\): correct them in"
        ) as denied:
            client.ask()
        assert denied.value.decision.retry_after is None
        assert len(client.sent) == 2


def test_a_response_of_403_without_a_pool_is_returned(store):
    settings = {"domain": "api.test", "limits": ["5/1m"], "api_key": "key-x", "key": KEY}
    known = Providers.of(settings)
    transport = RateLimitTransport(known, store, httpx.MockTransport(lambda _request: httpx.Response(403)), timeout=0)
    with httpx.Client(transport=transport) as client:
        assert [client.get("https://api.test/").status_code for _ in range(3)] == [403] * 3


# ---- files -----------------------------------------------------------------------------------------------------------


def write(path, *members):
    lines = [f"  - {{name: {name}, api_key: key-{name}{extra}}}" for name, extra in members]
    text = "domain: api.test\nprofile: openai\nlimits: [2/1m]\nkey: {header: Authorization, prefix: Bearer}\npool:\n"
    path.write_text(text + " members:\n" + "\n".join(lines) + "\n")
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


# ---- ceilings --------------------------------------------------------------------------------------------------------


def spent(client, ceiling=0):
    """What each key of a ceiling has spent."""
    limiter = client.gate.ceilings[ceiling]
    return lambda key: next(iter(limiter.usage(key).values())).used


def test_a_ceiling_of_the_whole_pool_is_charged_with_the_member(store):
    settings = pool("a", "b", limits=["2/1m"], price=PRICES, spend=["0.0013/day unit=usd"])
    with Client(store, settings) as client:
        client.ask()
        assert spent(client)("all") == 250  # 100 + 5 * 30
        with pytest.raises(Denied, match="usd-day"):
            client.ask()  # 1100 are reserved
        assert client.used()["a"] == 1  # all or nothing


def test_each_team_and_tag_has_its_own_ceiling(store):
    ceilings = [
        {"limit": 0.0013, "period": "day", "unit": "usd", "per": "team"},
        {"limit": 0.01, "period": "day", "unit": "usd", "per": ["team", "tag"]},
    ]
    with Client(store, pool("a", limits=["99/1m"], price=PRICES, spend=ceilings)) as client:
        with request_options(team="search", tag="nightly"):
            client.ask()
            with pytest.raises(Denied):
                client.ask()
        with request_options(team="mail", tag="nightly"):
            client.ask()
        of_team, of_both = spent(client), spent(client, 1)
        assert (of_team(("team=search",)), of_team(("team=mail",)), of_team(("team=",))) == (250, 250, 0)
        assert of_both(("tag=nightly", "team=search")) == 250


def test_a_team_that_waits_for_its_ceiling_does_not_hold_up_others(store):
    async def scene():
        ceiling = {"limit": 0.0011, "period": "day", "unit": "usd", "per": "team"}
        known = Providers.of(pool("a", limits=["99/1m"], price=PRICES, spend=[ceiling]))
        usage = {"prompt_tokens": 100, "completion_tokens": 200}
        reply = httpx.MockTransport(lambda _request: httpx.Response(200, json={"usage": usage}))
        transport = AsyncRateLimitTransport(known, MemoryStore(), reply, timeout=3600, tokenizer=lambda _text: 100)
        async with httpx.AsyncClient(transport=transport) as client:

            async def ask(team):
                with request_options(team=team):
                    return await client.post(URL, json={"model": "m", "max_tokens": 200})

            await ask("search")
            waiting = asyncio.create_task(ask("search"))
            while not transport.gate.metrics()["waiting"]:
                await asyncio.sleep(0)
            assert (await asyncio.wait_for(ask("mail"), 10)).status_code == 200
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(scene())


def test_a_named_ceiling_is_shared_by_several_providers(store):
    ceiling = {"limit": 0.0013, "period": "day", "unit": "usd", "name": "everything"}
    first, second = pool("a", price=PRICES, spend=[ceiling]), pool("b", price=PRICES, spend=[ceiling])
    known = Providers.of(first, {**second, "domain": "other.test", "name": "other"})
    with Client(store, known) as client:
        client.ask()
        with pytest.raises(Denied, match="everything"):
            client.post("https://other.test/v1/chat/completions", json={"model": "m", "max_tokens": 200})


@pytest.mark.parametrize("failure", [httpx.ConnectError("no"), httpx.ReadError("lost")], ids=["unsent", "lost"])
def test_a_call_that_was_never_sent_returns_its_money(store, failure):
    def answer(_key):
        raise failure

    with Client(store, pool("a", price=PRICES, spend=["1/day unit=usd"]), answer) as client:
        with pytest.raises(httpx.TransportError):
            client.ask()
        assert spent(client)("all") == (0 if isinstance(failure, httpx.ConnectError) else 1100)


# ---- streams, rejected keys, peeks and refusals ----------------------------------------------------------------------


def test_the_ceiling_of_a_team_holds_for_a_streamed_strict_call(store):
    """What is reserved while the output arrives counts at the same key as the first reservation."""
    model = StreamedModel(20_000)
    spend = [{"limit": 0.03, "period": "day", "unit": "usd", "per": "team"}]
    settings = {**pool("a", price=PRICES, spend=spend, limits=["100/1m"]), "strict": True}
    with Client(store, settings) as client:
        transport = RateLimitTransport(
            Providers.of(settings), store, httpx.MockTransport(model), timeout=0, tokenizer=lambda _text: 100
        )
        with httpx.Client(transport=transport) as streaming, request_options(team="search"):
            body = {"model": "m", "max_tokens": 64_000, "stream": True}
            with pytest.raises(Denied, match="cut off"):
                streaming.post(URL, json=body)
            paid = 100 + 5 * model.sent
            (limiter,) = transport.gate.ceilings
            assert 25_000 < paid <= limiter.usage("team=search")["usd-day"].used <= 30_000
            with pytest.raises(Denied):
                client.ask()


def test_a_rejected_key_is_not_used_again_if_the_call_cannot_be_repeated(store):
    def answer(key):
        return httpx.Response(401) if key == "a" else None

    def body():
        yield b"{}"

    with Client(store, pool("a", "b"), answer) as client:
        statuses = [
            client.post(URL, content=body(), headers={"authorization": "Bearer of-the-sdk"}).status_code
            for _ in range(2)
        ]
        assert statuses == [401, 200]
        assert client.sent == ["a", "b"]
        assert client.used() == {"a": 0, "b": 1}


def outbound_call(url=URL, body=b'{"model": "m", "max_tokens": 200}'):
    return OutboundRequest("POST", url, lambda _name: None, lambda: body, replays=True, unreached=lambda _error: False)


def test_peek_says_whether_any_member_has_room(store):
    gate = Gate(Providers.of(pool("a", "b", limits=["1/1m"], price=PRICES, spend=["0.0035/day unit=usd"])), store)
    cost = {"usd_micros": 1000}
    gate.acquire("models", cost)
    assert gate.peek(outbound_call()).allowed  # b has room
    gate.acquire("models", cost)
    assert gate.peek(outbound_call()).retry_after == 60
    store.clock.advance(60)
    assert gate.peek(outbound_call()).allowed
    gate.acquire("models", cost)
    assert gate.peek(outbound_call()).violated == ("usd-day",)  # the ceiling
    gate.close()


async def test_estimates_name_the_money_and_the_calls_that_wait(store):
    gate = AsyncGate(Providers.of(pool("a", limits=["1/1m"], price=PRICES, spend=["1/day unit=usd"])), store)
    estimate = await gate.estimate(outbound_call())
    assert (estimate.decision.allowed, estimate.cost["usd_micros"], estimate.waiting) == (True, 1009, 0)
    assert (await gate.peek_target("models", {"usd_micros": 5})).allowed
    held = await gate.acquire("models", {"usd_micros": 5})
    assert not (await gate.peek_target("models", {"usd_micros": 5})).allowed
    waiting = asyncio.ensure_future(asyncio.wait_for(gate.acquire("models", {"usd_micros": 5}, 30), 10))
    while not gate.metrics()["waiting"]:
        await asyncio.sleep(0)
    assert (await gate.estimate(outbound_call())).waiting == 1
    await held.cancel()
    await (await waiting).cancel()
    await gate.close()


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_does_not_lower_a_limit_in_money(store, status):
    """A provider that has only a ceiling in money is paused, but the ceiling stays."""
    replies = iter([200, status, status, 200])

    def answer(_key):
        code = next(replies)
        return httpx.Response(code, headers={"retry-after": "1"}) if code != 200 else None

    settings = {**pool("a", price=PRICES, limits=["25/day unit=usd"])}
    with Client(store, settings, answer, timeout=10) as client:
        for _ in range(4):
            client.ask()
        (account,) = client.gate.accounts
        assert account.limiter.usage(account.key)["usd-day"].quota == 25_000_000


def test_teams_and_tags_need_not_be_strings(store):
    spend = [{"limit": 1, "period": "day", "unit": "usd", "per": "team"}]
    with Client(store, pool("a", price=PRICES, spend=spend)) as client:
        for team in (7, None):
            with request_options(team=team):
                client.ask()
        assert (spent(client)("team=7"), spent(client)("team=")) == (250, 250)


class FailingStore(MemoryStore):
    """A store that fails to correct charges of these policies, once each."""

    def __init__(self, *names):
        super().__init__(clock=ManualClock(1_767_225_600))
        self.failing = list(names)

    def apply_one(self, verb, policy, *arguments, **options):
        if verb == "adjust" and policy.name in self.failing:
            self.failing.remove(policy.name)
            raise StoreUnavailable("the connection was lost")
        return super().apply_one(verb, policy, *arguments, **options)


@pytest.mark.parametrize("names", [["spend:all"], ["provider:api.test:a"], ["spend:all", "provider:api.test:a"]])
@pytest.mark.parametrize("kind", [Gate, AsyncGate])
def test_a_charge_that_was_settled_in_part_can_be_settled_again(kind, names):
    """The account is settled even if the ceiling cannot be; the caller repeats it, and nothing counts twice."""
    store = FailingStore(*names)
    limits = ["9/1h", "10_000/1h unit=usd_micros name=money"]
    spend = [{"limit": 1, "period": "day", "unit": "usd", "name": "all"}]
    gate = kind(Providers.of(pool("a", limits=limits, price=PRICES, spend=spend)), store)
    run = asyncio.run if kind is AsyncGate else lambda value: value

    async def settle_async():
        charge = await gate.acquire("models", {"usd_micros": 5000})
        with pytest.raises(StoreUnavailable):
            await charge.commit({"usd_micros": 700})
        await charge.commit({"usd_micros": 700})
        (account,) = gate.accounts
        return [(await account.limiter.usage(account.key))["money"], (await gate.ceilings[0].usage("all"))["all"]]

    def settle():
        charge = gate.acquire("models", {"usd_micros": 5000})
        with pytest.raises(StoreUnavailable):
            charge.commit({"usd_micros": 700})
        charge.commit({"usd_micros": 700})
        (account,) = gate.accounts
        return [account.limiter.usage(account.key)["money"], gate.ceilings[0].usage("all")["all"]]

    found = run(settle_async() if kind is AsyncGate else settle())
    assert [usage.used for usage in found] == [700, 700]
