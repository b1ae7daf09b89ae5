"""Envoy's rate limit service, asked by a gRPC client of our own over a real connection, in virtual time."""

import json

import grpc
import pytest

from tests.servers.process import free_port
from tests.servers.valkey import ValkeyServer
from tests.service.harness import START
from tidegate import StoreUnavailable
from tidegate.service.config.settings import load_settings
from tidegate.service.decisions.decider import Decider
from tidegate.service.envoy.messages import CODE_OK, CODE_OVER_LIMIT, METHOD, SERVICE, classes
from tidegate.service.envoy.service import serve
from tidegate.stores import MemoryStore
from tidegate.stores.outage import open_guarded
from tidegate.testing import ManualClock

MESSAGES = classes()
DOMAINS = [
    {
        "domain": "edge",
        "descriptors": [
            {"key": "ip", "rate_limit": {"unit": "minute", "requests_per_unit": 3}},
            {"key": "path", "value": "/login", "rate_limit": {"unit": "hour", "requests_per_unit": 2}},
            {
                "key": "path",
                "value": "/new",
                "shadow_mode": True,
                "rate_limit": {"unit": "hour", "requests_per_unit": 1},
            },
            {"key": "plan", "value": "free", "descriptors": [{"key": "user", "limits": ["2/1s", "4/1d"]}]},
        ],
    }
]


class Envoy:
    """Asks as Envoy does."""

    def __init__(self, decider, channel):
        self.decider = decider
        self._call = channel.unary_unary(
            f"/{SERVICE}/{METHOD}",
            request_serializer=MESSAGES["RateLimitRequest"].SerializeToString,
            response_deserializer=MESSAGES["RateLimitResponse"].FromString,
        )

        self.send = channel.unary_unary(f"/{SERVICE}/{METHOD}")  # bytes as they are

    async def ask(self, *descriptors, domain="edge", hits=0):
        request = MESSAGES["RateLimitRequest"](domain=domain, hits_addend=hits)
        for pairs, *more in descriptors:
            descriptor = request.descriptors.add()
            for key, value in pairs.items():
                descriptor.entries.add(key=key, value=value)
            for extra in more:
                if "hits" in extra:
                    descriptor.hits_addend.value = extra["hits"]
                if "limit" in extra:
                    descriptor.limit.requests_per_unit, descriptor.limit.unit = extra["limit"]
        return await self._call(request, timeout=30)

    async def codes(self, *descriptors, **more):
        answer = await self.ask(*descriptors, **more)
        return answer.overall_code, [status.code for status in answer.statuses]


async def run(decider):
    """Serve a decider over gRPC."""
    settings = load_settings({"grpc": f"127.0.0.1:{free_port()}"})
    server = await serve(decider, settings)
    async with grpc.aio.insecure_channel(str(settings.grpc)) as channel:
        yield Envoy(decider, channel)
    await server.stop(None)
    await decider.close()


@pytest.fixture
def clock():
    return ManualClock(start=START)


@pytest.fixture
async def envoy(clock):
    decider = Decider(load_settings({"domains": DOMAINS}).policies, MemoryStore(clock=clock))
    async for each in run(decider):
        yield each


async def test_ok_then_over_with_header_fields_and_a_body(envoy, clock):
    ask = ({"ip": "203.0.113.9"},)
    first = await envoy.ask(ask)
    assert first.overall_code == CODE_OK
    (status,) = first.statuses
    assert (status.current_limit.requests_per_unit, status.current_limit.unit, status.limit_remaining) == (3, 2, 2)
    assert status.duration_until_reset.seconds == 60
    await envoy.ask(ask)
    await envoy.ask(ask)
    clock.advance(19.5)
    over = await envoy.ask(ask)
    assert over.overall_code == CODE_OVER_LIMIT
    assert over.statuses[0].limit_remaining == 0
    assert (over.statuses[0].duration_until_reset.seconds, over.statuses[0].duration_until_reset.nanos) == (
        40,
        500_000_000,
    )
    fields = {field.key: field.value for field in over.response_headers_to_add}
    assert fields["x-ratelimit-limit"] == "3"
    assert fields["x-ratelimit-remaining"] == "0"
    assert fields["retry-after"] == "41"
    assert json.loads(over.raw_body)["violated-policies"] == ["per-minute"]
    assert fields["content-type"] == "application/problem+json"
    clock.advance(40.5)
    assert (await envoy.ask(ask)).overall_code == CODE_OK


async def test_values_are_counted_apart_and_unknown_ones_pass(envoy):
    for _ in range(2):
        assert await envoy.codes(({"path": "/login"},)) == (CODE_OK, [CODE_OK])
    assert await envoy.codes(({"path": "/login"},)) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT])
    assert await envoy.codes(({"path": "/other"},)) == (CODE_OK, [CODE_OK])
    assert await envoy.codes(({"ip": "203.0.113.9"},), domain="nowhere") == (CODE_OK, [CODE_OK])
    assert (await envoy.ask(({"path": "/other"},))).statuses[0].HasField("current_limit") is False


async def test_over_if_one_is_over_and_then_none_is_charged(envoy):
    login, ip = ({"path": "/login"},), ({"ip": "203.0.113.9"},)
    assert await envoy.codes(login, ip) == (CODE_OK, [CODE_OK, CODE_OK])
    assert await envoy.codes(login, ip) == (CODE_OK, [CODE_OK, CODE_OK])
    for _ in range(5):
        assert await envoy.codes(login, ip) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT, CODE_OK])
    assert await envoy.codes(ip) == (CODE_OK, [CODE_OK])
    assert await envoy.codes(ip) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT])
    counts = {name: (count.allowed, count.denied) for name, count in envoy.decider.stats.counts.items()}
    assert counts == {"edge/path=%2Flogin": (2, 5), "edge/ip": (3, 1)}


async def test_nested_descriptors_with_several_limits(envoy, clock):
    bob = ({"plan": "free", "user": "bob"},)
    assert [(await envoy.codes(bob))[0] for _ in range(3)] == [CODE_OK, CODE_OK, CODE_OVER_LIMIT]
    clock.advance(1)
    assert [(await envoy.codes(bob))[0] for _ in range(3)] == [CODE_OK, CODE_OK, CODE_OVER_LIMIT]
    clock.advance(1)
    assert (await envoy.codes(bob))[0] == CODE_OVER_LIMIT  # the day's four are used
    assert (await envoy.codes(({"plan": "free", "user": "eve"},)))[0] == CODE_OK
    assert (await envoy.codes(({"plan": "paid", "user": "bob"},)))[0] == CODE_OK


async def test_shadow_mode_lets_pass_and_tells(envoy):
    for _ in range(3):
        assert await envoy.codes(({"path": "/new"},)) == (CODE_OK, [CODE_OK])
    count = envoy.decider.stats.count("edge/path=%2Fnew")
    assert (count.allowed, count.shadow, count.denied) == (1, 2, 0)


async def test_hits_addend_of_the_request_and_of_a_descriptor(envoy):
    assert await envoy.codes(({"ip": "1"},), hits=3) == (CODE_OK, [CODE_OK])
    assert await envoy.codes(({"ip": "1"},)) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT])
    assert await envoy.codes(({"ip": "2"}, {"hits": 2}), hits=50) == (CODE_OK, [CODE_OK])
    assert await envoy.codes(({"ip": "2"},), hits=2) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT])
    assert await envoy.codes(({"ip": "2"},)) == (CODE_OK, [CODE_OK])


async def test_no_hits_only_look(envoy):
    for _ in range(5):
        assert await envoy.codes(({"ip": "1"}, {"hits": 0})) == (CODE_OK, [CODE_OK])
    await envoy.ask(({"ip": "1"},), hits=3)
    assert await envoy.codes(({"ip": "1"}, {"hits": 0})) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT])
    # What another descriptor refuses by a look is not charged either.
    assert await envoy.codes(({"ip": "1"}, {"hits": 0}), ({"path": "/login"},)) == (
        CODE_OVER_LIMIT,
        [CODE_OVER_LIMIT, CODE_OK],
    )
    assert await envoy.codes(({"path": "/login"},), hits=2) == (CODE_OK, [CODE_OK])


async def test_a_limit_that_the_request_brings_replaces_the_configured_one(envoy):
    five = {"limit": (5, 2)}
    for _ in range(5):
        answer = await envoy.ask(({"ip": "1"}, five))
        assert (answer.overall_code, answer.statuses[0].current_limit.requests_per_unit) == (CODE_OK, 5)
    assert await envoy.codes(({"ip": "1"}, five)) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT])
    assert await envoy.codes(({"ip": "1"},)) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT])  # what was consumed stays consumed
    once = {"limit": (1, 7)}  # for a descriptor that the file does not know, per week
    assert await envoy.codes(({"new": "x"}, once)) == (CODE_OK, [CODE_OK])
    assert await envoy.codes(({"new": "x"}, once)) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT])


@pytest.mark.parametrize(
    ("descriptors", "more"),
    [
        ([({"ip": "1"},)], {"domain": ""}),
        ([], {}),
        ([({"ip": "1"},)] * 101, {}),
        ([({"ip": "1"}, {"limit": (1, 99)})], {}),
    ],
)
async def test_what_makes_no_sense_is_refused(envoy, descriptors, more):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await envoy.ask(*descriptors, **more)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff",
        b"\x0a\x05edge",
        b"\x0a\x02\xff\xfe",
        b"\x0a\x04edge\x12\x05\x0a\x03\x0a\xff\xff",
        b"{}",
        b"\x00" * 1000,
    ],
)
async def test_a_message_that_cannot_be_read_is_refused_in_plain_words(envoy, sent):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await envoy.send(sent)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.details() == "the message cannot be read: it is no request of Envoy's rate limit service v3"
    assert envoy.decider.stats.errors == {"bad-field": 1}


async def test_what_was_not_foreseen_tells_nothing_of_the_inside(envoy, monkeypatch, caplog):
    monkeypatch.setattr(envoy.decider.store, "apply_async", None)  # a fault that nobody has thought of
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await envoy.ask(({"ip": "1"},))
    assert (error.value.code(), error.value.details()) == (grpc.StatusCode.INTERNAL, "see the log of the service")
    assert "TypeError" in caplog.text
    assert envoy.decider.stats.errors == {"internal": 1}


async def test_domains_that_nobody_configured_leave_nothing_behind(envoy):
    for number in range(50):
        answer = await envoy.codes(({"ip": "1"}, {"limit": (1, 2)}), domain=f"invented {number}")
        assert answer == (CODE_OK, [CODE_OK])
    assert envoy.decider.stats.counts == {}
    assert envoy.decider.store._tables == {}  # noqa: SLF001 - nothing else shows what a store keeps of a policy


async def test_a_lost_store_is_unavailable_so_that_envoys_failure_mode_decides():
    with ValkeyServer() as valkey:
        store = open_guarded(f"{valkey.url}?deadline=200ms")
        domains = [{"domain": "edge", "descriptors": [*DOMAINS[0]["descriptors"],
                    {"key": "open", "on_store_error": "allow", "limits": "1/1h"}]}]  # fmt: skip
        decider = Decider(load_settings({"domains": domains}).policies, store)
        async for envoy in run(decider):
            assert await envoy.codes(({"path": "/login"},), ({"ip": "1"},)) == (CODE_OK, [CODE_OK, CODE_OK])
            await decider.probe()
            valkey.kill()
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await envoy.ask(({"path": "/login"},))
                assert error.value.code() == grpc.StatusCode.UNAVAILABLE
            assert await envoy.codes(({"open": "x"},)) == (CODE_OK, [CODE_OK])
            with pytest.raises(StoreUnavailable):
                await decider.probe()
