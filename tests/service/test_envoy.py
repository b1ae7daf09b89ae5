"""Envoy's rate limit service, called by a gRPC client over a real connection, in virtual time."""

import asyncio
import json

import grpc
import pytest

from tests.servers.process import free_port
from tests.servers.valkey import ValkeyServer
from tests.service.harness import START
from tidegate import StoreUnavailable
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions.decider import Decider, Subject
from tidegate.service._envoy.messages import CODE_OK, CODE_OVER_LIMIT, METHOD, SERVICE, message_classes
from tidegate.service._envoy.service import serve
from tidegate.stores import MemoryStore
from tidegate.stores._outage import open_guarded
from tidegate.testing import ManualClock

MESSAGES = message_classes()
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


class EnvoyClient:
    """Sends the requests that Envoy would send."""

    def __init__(self, decider, channel):
        self.decider = decider
        self.channel = channel
        self._call = channel.unary_unary(
            f"/{SERVICE}/{METHOD}",
            request_serializer=MESSAGES["RateLimitRequest"].SerializeToString,
            response_deserializer=MESSAGES["RateLimitResponse"].FromString,
        )

        self.send = channel.unary_unary(f"/{SERVICE}/{METHOD}")  # sends raw bytes

    async def call(self, *descriptors, domain="edge", hits=0):
        request = MESSAGES["RateLimitRequest"](domain=domain, hits_addend=hits)
        for pairs, *options in descriptors:
            descriptor = request.descriptors.add()
            for key, value in pairs.items():
                descriptor.entries.add(key=key, value=value)
            for option in options:
                if "hits" in option:
                    descriptor.hits_addend.value = option["hits"]
                if "limit" in option:
                    descriptor.limit.requests_per_unit, descriptor.limit.unit = option["limit"]
        return await self._call(request, timeout=30)

    async def codes(self, *descriptors, **more):
        response = await self.call(*descriptors, **more)
        return response.overall_code, [status.code for status in response.statuses]


async def run(decider):
    """Serve a decider over gRPC."""
    settings = load_settings({"grpc": f"127.0.0.1:{free_port()}"})
    server = await serve(decider, settings)
    async with grpc.aio.insecure_channel(str(settings.grpc)) as channel:
        yield EnvoyClient(decider, channel)
    await server.stop(None)
    await decider.close()


@pytest.fixture
def clock():
    return ManualClock(start=START)


@pytest.fixture
async def envoy(clock):
    decider = Decider(load_settings({"domains": DOMAINS}).policies, MemoryStore(clock=clock))
    async for client in run(decider):
        yield client


async def test_over_limit_responses_have_header_fields_and_a_body(envoy, clock):
    descriptor = ({"ip": "203.0.113.9"},)
    first = await envoy.call(descriptor)
    assert first.overall_code == CODE_OK
    (status,) = first.statuses
    assert (status.current_limit.requests_per_unit, status.current_limit.unit, status.limit_remaining) == (3, 2, 2)
    assert status.duration_until_reset.seconds == 60
    await envoy.call(descriptor)
    await envoy.call(descriptor)
    clock.advance(19.5)
    over = await envoy.call(descriptor)
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
    assert (await envoy.call(descriptor)).overall_code == CODE_OK


async def test_each_value_has_its_own_limit_and_unknown_values_are_not_limited(envoy):
    for _ in range(2):
        assert await envoy.codes(({"path": "/login"},)) == (CODE_OK, [CODE_OK])
    assert await envoy.codes(({"path": "/login"},)) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT])
    assert await envoy.codes(({"path": "/other"},)) == (CODE_OK, [CODE_OK])
    assert await envoy.codes(({"ip": "203.0.113.9"},), domain="nowhere") == (CODE_OK, [CODE_OK])
    assert (await envoy.call(({"path": "/other"},))).statuses[0].HasField("current_limit") is False


async def test_one_descriptor_over_its_limit_denies_all_and_charges_none(envoy):
    login, ip = ({"path": "/login"},), ({"ip": "203.0.113.9"},)
    assert await envoy.codes(login, ip) == (CODE_OK, [CODE_OK, CODE_OK])
    assert await envoy.codes(login, ip) == (CODE_OK, [CODE_OK, CODE_OK])
    for _ in range(5):
        assert await envoy.codes(login, ip) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT, CODE_OK])
    assert await envoy.codes(ip) == (CODE_OK, [CODE_OK])
    assert await envoy.codes(ip) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT])
    counts = {name: (count.allowed, count.denied) for name, count in envoy.decider.stats.totals().counts.items()}
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


async def test_shadow_mode_allows_and_is_counted(envoy):
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


async def test_zero_hits_peek_without_charging(envoy):
    for _ in range(5):
        assert await envoy.codes(({"ip": "1"}, {"hits": 0})) == (CODE_OK, [CODE_OK])
    await envoy.call(({"ip": "1"},), hits=3)
    assert await envoy.codes(({"ip": "1"}, {"hits": 0})) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT])
    # A descriptor is not charged either if the peek of another one denies.
    assert await envoy.codes(({"ip": "1"}, {"hits": 0}), ({"path": "/login"},)) == (
        CODE_OVER_LIMIT,
        [CODE_OVER_LIMIT, CODE_OK],
    )
    assert await envoy.codes(({"path": "/login"},), hits=2) == (CODE_OK, [CODE_OK])


async def test_a_limit_in_the_request_replaces_the_configured_one(envoy):
    five = {"limit": (5, 2)}
    for _ in range(5):
        response = await envoy.call(({"ip": "1"}, five))
        assert (response.overall_code, response.statuses[0].current_limit.requests_per_unit) == (CODE_OK, 5)
    assert await envoy.codes(({"ip": "1"}, five)) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT])
    assert await envoy.codes(({"ip": "1"},)) == (CODE_OVER_LIMIT, [CODE_OVER_LIMIT])  # what was consumed stays consumed
    once = {"limit": (1, 7)}  # for a descriptor that is not in the file, per week
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
async def test_invalid_requests_are_refused(envoy, descriptors, more):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await envoy.call(*descriptors, **more)
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
async def test_a_message_that_cannot_be_parsed_is_refused(envoy, sent):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await envoy.send(sent)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.details() == (
        "cannot parse the message: expected a RateLimitRequest of Envoy's rate limit service v3"
    )
    assert envoy.decider.stats.errors.totals() == {"bad-field": 1}


async def test_an_unexpected_exception_is_logged_and_not_sent(envoy, monkeypatch, caplog):
    monkeypatch.setattr(envoy.decider, "acquire_in_thread", None)  # causes a TypeError
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await envoy.call(({"ip": "1"},))
    assert (error.value.code(), error.value.details()) == (grpc.StatusCode.INTERNAL, "see the log of the service")
    assert "TypeError" in caplog.text
    assert envoy.decider.stats.errors.totals() == {"internal": 1}


async def test_unknown_domains_leave_no_state(envoy):
    for number in range(50):
        codes = await envoy.codes(({"ip": "1"}, {"limit": (1, 2)}), domain=f"invented {number}")
        assert codes == (CODE_OK, [CODE_OK])
    assert envoy.decider.stats.totals().counts == {}
    assert envoy.decider.store.metrics()["entries"] == 0


async def test_an_unavailable_store_returns_unavailable_so_that_envoys_failure_mode_applies():
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
                    await envoy.call(({"path": "/login"},))
                assert error.value.code() == grpc.StatusCode.UNAVAILABLE
            assert await envoy.codes(({"open": "x"},)) == (CODE_OK, [CODE_OK])
            # As over HTTP: a lost store is counted, and a policy in shadow mode never denies.
            assert decider.stats.count("edge/path=%2Flogin").local == 2
            assert await envoy.codes(({"path": "/new"},), ({"path": "/new"}, {"hits": 0})) == (CODE_OK, [CODE_OK] * 2)
            new = Subject(domain="edge", descriptor=(("path", "/new"),))
            assert (await decider.acquire(new)).allowed
            assert (await decider.peek(new)).allowed
            assert decider.stats.count("edge/path=%2Fnew").shadow == 2
            with pytest.raises(StoreUnavailable):
                await decider.probe()


async def test_observers_are_called_for_every_decision_as_over_http(clock):
    records, subject = [], Subject(domain="edge", descriptor=(("path", "/login"),))
    decider = Decider(
        load_settings({"domains": DOMAINS}).policies, MemoryStore(clock=clock), observers=[records.append]
    )
    async for envoy in run(decider):
        await envoy.call(({"path": "/login"},), ({"ip": "1"},))
        await envoy.call(({"path": "/new"},))
        await decider.acquire(subject)
        await envoy.call(({"path": "/login"},), ({"ip": "1"},))  # only /login is over its limit
        await decider.acquire(subject)
        await envoy.call(({"path": "/new"},))
    seen = [(record.policy.name, record.verb, record.decision.allowed, record.decision.violated) for record in records]
    login, ip, new = "edge/path=%2Flogin", "edge/ip", "edge/path=%2Fnew"
    assert seen == [
        (login, "acquire", True, ()),
        (ip, "acquire", True, ()),
        (new, "acquire", True, ()),
        (login, "acquire", True, ()),
        (login, "acquire", False, ("per-hour",)),
        (login, "acquire", False, ("per-hour",)),
        (new, "acquire", True, ("per-hour",)),
    ]


async def test_calls_that_send_no_message_hold_no_others_up(envoy):
    waiting = asyncio.Event()

    async def no_message():
        await waiting.wait()
        yield b""

    silent = [envoy.channel.stream_unary(f"/{SERVICE}/{METHOD}")(no_message()) for _ in range(20)]
    for number in range(10):  # on the same connection, so behind the silent calls
        assert (await asyncio.wait_for(envoy.codes([{"ip": f"192.0.2.{number}"}]), 10))[0] == CODE_OK
    for call in silent:
        call.cancel()
