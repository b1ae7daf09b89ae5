"""Spending ceilings of pools, teams and tags; estimates, refusals and settlement of calls with several charges."""

import asyncio

import httpx
import pytest

from tests.outbound.pool_client import PRICES, URL, Client, pool
from tests.outbound.streamed_model import StreamedModel
from tidegate import Denied, StoreUnavailable
from tidegate.outbound import AsyncGate, Gate, Providers, request_options
from tidegate.outbound._quota.exchange import OutboundRequest
from tidegate.outbound.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock


@pytest.fixture
def store():
    return MemoryStore(clock=ManualClock(1_767_225_600))


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


@pytest.mark.parametrize(
    "ceiling",
    [
        {"limit": 0.0013, "period": "day", "unit": "usd", "name": "everything"},
        "0.0013/day unit=usd name=everything",
        '0.0013/day name="everything" unit=usd',
    ],
    ids=str,
)
def test_a_named_ceiling_is_shared_by_several_providers(store, ceiling):
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
    """The output is bounded before it is sent, so it does not matter how quickly it is read."""
    model = StreamedModel(20_000)
    spend = [{"limit": 0.03, "period": "day", "unit": "usd", "per": "team"}]
    settings = {**pool("a", price=PRICES, spend=spend, limits=["100/1m"]), "strict": True}
    with Client(store, settings) as client:
        transport = RateLimitTransport(
            Providers.of(settings), store, httpx.MockTransport(model), timeout=0, tokenizer=lambda _text: 100
        )
        with httpx.Client(transport=transport) as streaming, request_options(team="search"):
            body = {"model": "m", "max_tokens": 64_000, "stream": True}
            streaming.post(URL, json=body)
            (limiter,) = transport.gate.ceilings
            assert 100 + 5 * model.sent == limiter.usage("team=search")["usd-day"].used == 30_000
            with pytest.raises(Denied):
                client.ask()


def test_another_member_is_preferred_after_a_rejected_call_that_cannot_be_repeated(store):
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
        assert client.used() == {"a": 1, "b": 1}


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
    """A store that fails to correct charges of these policies, once."""

    def __init__(self, *names):
        super().__init__(clock=ManualClock(1_767_225_600))
        self.failing = list(names)

    def apply(self, verb, asks, *arguments, **options):
        if verb == "adjust" and any(policy.name in self.failing for policy, _, _ in asks):
            self.failing.clear()
            raise StoreUnavailable("the connection was lost")
        return super().apply(verb, asks, *arguments, **options)


@pytest.mark.parametrize("names", [["spend:all"], ["provider:api.test:a"], ["spend:all", "provider:api.test:a"]])
@pytest.mark.parametrize("kind", [Gate, AsyncGate])
def test_a_charge_that_could_not_be_settled_can_be_settled_again(kind, names):
    """The account and the ceiling are settled in one step; the caller repeats it, and nothing counts twice."""
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
