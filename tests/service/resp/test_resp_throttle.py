"""CL.THROTTLE answers as redis-cell does. The expected numbers follow from its documentation and its algorithm."""

from tests.cases import cases
from tests.service.resp.harness import connected
from tidegate.service._resp import throttle

# (at, quantity, limited, remaining, retry after, reset after), with max_burst 4 and 1 permit per second. Seconds are
# rounded up.
FIVE_PER_FIVE_SECONDS = [
    (0, 6, 1, 5, -1, 0),  # a call above the maximum is never allowed
    (0, 1, 0, 4, -1, 1),
    (0, 1, 0, 3, -1, 2),
    (0, 1, 0, 2, -1, 3),
    (0, 1, 0, 1, -1, 4),
    (0, 1, 0, 0, -1, 5),
    (0, 1, 1, 0, 1, 5),
    (0, 0, 0, 0, -1, 5),  # a quantity of 0 only reads
    (3, 1, 0, 2, -1, 3),
    (3.1, 1, 0, 1, -1, 4),
    (4, 1, 0, 1, -1, 4),
    (8, 1, 0, 4, -1, 1),
    (9.5, 1, 0, 4, -1, 1),
    (9.5, 0, 0, 4, -1, 1),
    (9.5, 2, 0, 2, -1, 3),
    (9.5, 5, 1, 2, 3, 3),
    (9.6, 5, 1, 2, 3, 3),  # 2.9 s
]


async def test_answers_are_those_of_redis_cell():
    async with connected() as (service, client):
        start = service.clock.now()
        for at, quantity, *expected in FIVE_PER_FIVE_SECONDS:
            service.clock.advance(start + at - service.clock.now())
            limited, remaining, retry, reset = expected
            reply = await client.ask("CL.THROTTLE", "user", 4, 1, 1, quantity)
            assert reply == [limited, 5, remaining, retry, reset], (at, quantity)


async def test_the_example_of_its_documentation():
    async with connected() as (_, client):
        assert await client.ask("CL.THROTTLE", "user123", 15, 30, 60, 1) == [0, 16, 15, -1, 2]
        assert await client.ask("cl.throttle", "user123", 15, 30, 60) == [0, 16, 14, -1, 4]
        assert await client.ask("CL.THROTTLE", "other", 0, 1, 10) == [0, 1, 0, -1, 10]
        assert await client.ask("CL.THROTTLE", "other", 0, 1, 10) == [1, 1, 0, 10, 10]


async def test_changed_parameters_do_not_refill():
    async with connected() as (_, client):
        assert await client.ask("CL.THROTTLE", "user", 9, 10, 60, 10) == [0, 10, 0, -1, 60]
        for parameters in [(9, 10, 61), (99, 10, 60), (9, 1000, 60), (4, 5, 60)]:
            limited, _, remaining, *_ = await client.ask("CL.THROTTLE", "user", *parameters)
            assert (limited, remaining) == (1, 0), parameters


async def test_the_limits_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(throttle, "MAX_THROTTLE_LIMITS", 3)
    async with connected() as (service, client):
        for count in range(1, 20):
            await client.ask("CL.THROTTLE", f"user{count}", 9, count, 60)
        cache = service.resp._commands._throttle._policy.cache_info()  # noqa: SLF001 - no public attribute shows it
        assert (cache.currsize, cache.maxsize) == (3, 3)
        assert await client.ask("CL.THROTTLE", "user1", 9, 1, 60, 0) == [0, 10, 9, -1, 60]  # its usage was kept
        assert set(service.decider.stats.totals().counts) == {"tidegate.throttle"}


@cases(
    ("words", "message"),
    [
        (("k", 15, 30), "wrong number of arguments; usage: CL.THROTTLE <key> <max_burst>"),
        (("k", 15, 30, 60, 1, 1), "wrong number of arguments"),
        (("k", "x", 30, 60), "max_burst: expected an integer of at least 0, not 'x'"),
        (("k", -1, 30, 60), "max_burst"),
        (("k", 15, 0, 60), "count per period: expected an integer of at least 1, not '0'"),
        (("k", 15, 30, 0), "period"),
        (("k", 15, 30, -60), "period"),
        (("k", 15, 30, 60, -1), "quantity"),
        (("k", 15, 30, 60, "1.5"), "quantity"),
        (("k", 15, 30, "60s"), "period"),
        (("k", 2**53, 30, 60), "max_burst"),
        (("k", 15, 9**99, 60), "count per period"),
        (("k", 15, 1, 2**52), "period"),
        (("k" * 2000, 15, 30, 60), "key: is longer than 1024 characters"),
    ],
)
async def test_wrong_numbers_are_errors(words, message):
    async with connected() as (_, client):
        reply = await client.ask("CL.THROTTLE", *words)
        assert str(reply).startswith("ERR ")
        assert message in str(reply)
        assert await client.ask("PING") == "PONG"


async def test_denials_are_counted_and_pipelines_are_decided_in_order():
    async with connected() as (service, client):
        replies = await client.ask_all(*[("CL.THROTTLE", "user", 4, 1, 60)] * 7)
        assert [reply[0] for reply in replies] == [0] * 5 + [1] * 2
        count = service.decider.stats.totals().counts["tidegate.throttle"]
        assert (count.allowed, count.denied) == (5, 2)
