"""Client leases never exceed the limits, checked by an oracle in virtual time and with real processes."""

import asyncio
import threading
import time
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.service.harness import InProcessService, serving
from tidegate import ConfigError, Limit, RateLimitError, ResourceUnknown, StoreUnavailable
from tidegate.core._bounds import SECOND
from tidegate.service.client._client import AsyncClient, Client
from tidegate.service.client._lease_cache import LeaseCache, read_lease_duration
from tidegate.service.client._protocol import MAX_TRIES, decide_flow, read_response, settle_flow
from tidegate.testing import ManualClock


class VirtualClient:
    """A client in virtual time: its lease cache, and a count of its requests."""

    def __init__(self, app_service, duration=1.0):
        self.app_service = app_service
        self.lease_cache = None if duration is None else LeaseCache(duration, app_service.clock.steady)
        self.requests = Counter()

    async def try_acquire(self, key="k", cost=1, policy="api", timeout=0.0):  # noqa: ASYNC109 - as the client's
        return await self._drive(decide_flow(self.lease_cache, policy, key, cost, timeout))

    async def close(self):
        if self.lease_cache is not None:
            await self._drive(settle_flow(self.lease_cache, self.lease_cache.pop_all()))

    async def _drive(self, flow):
        try:
            request = next(flow)
            while True:
                method, path, _, headers, _, decode = request
                self.requests[path.rpartition("/")[2]] += 1
                try:
                    http = self.app_service.http
                    sent = await http.request(method, path, content=request.content, headers=headers)
                    response = read_response(sent, decode)
                except RateLimitError as error:
                    request = flow.throw(error)
                else:
                    request = flow.send(response)
        except StopIteration as done:
            return done.value


# ---- the oracle ------------------------------------------------------------------------------------------------------


def exceeded(limit: Limit, uses: list[tuple[int, int]]) -> str | None:
    """Return where uses (instant, cost) exceed a limit, by brute force; None if they do not."""
    if limit.algorithm == "token_bucket":
        for first, (start, _) in enumerate(uses):
            total = 0
            for end, cost in uses[first:]:
                total += cost
                if total * SECOND > limit.burst * SECOND + limit.quota * (end - start) * SECOND // limit.length + 1:
                    return f"{total} within {(end - start) / SECOND} s"
        return None
    opened, total = None, 0
    for instant, cost in uses:
        start = instant - instant % limit.length if limit.algorithm == "calendar_window" else instant
        if opened is None or instant >= opened + limit.length:
            opened, total = start, 0
        total += cost
        if total > limit.quota:
            return f"{total} in the window from {opened}"
    return None


LIMITS = ("40/1s", "80/2s burst=24", "48/1s fixed_window", "60/1m calendar_window")
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which client: the last one has no leases
        st.sampled_from([1, 1, 2, 5, 12, 50]),  # how many calls in a row
        st.integers(1, 2),  # of which cost
        st.sampled_from([0, 0, 1, 10, 50, 100, 200, 400, 990]),  # thousandths of the period that pass before
        st.sampled_from(["ask", "ask", "ask", "ask", "close"]),
    ),
    max_size=20,
)
# LATE needs `decay`: leased, refilled, taken by another client, and then used. BACK needs `to_commit`.
LATE = [(0, 5, 1, 0, "ask"), (0, 3, 1, 0, "ask"), (2, 50, 1, 200, "ask"), (0, 12, 1, 0, "ask")]
BACK = [(0, 5, 1, 0, "ask"), (0, 2, 1, 150, "ask"), (0, 1, 1, 0, "close"), (2, 50, 1, 0, "ask")]


# SAME: several uses at one instant, after some permits have expired.
SAME = [(0, 1, 1, 0, "ask"), (1, 5, 2, 0, "ask"), (1, 1, 1, 200, "ask"), (1, 50, 1, 50, "ask")]


@pytest.mark.parametrize("text", LIMITS)
@settings(max_examples=30, deadline=None)
@example(steps=SAME, duration=0.3)
@example(steps=LATE, duration=1.0)
@example(steps=BACK, duration=1.0)
@given(steps=STEPS, duration=st.sampled_from([0.05, 0.3, 1.0, 5.0]))
def test_no_limit_is_ever_exceeded(text, steps, duration):
    limit = Limit.parse(text)

    async def play():
        uses = []
        async with InProcessService(policies={"api": text}) as app_service:
            clients = [
                VirtualClient(app_service, duration),
                VirtualClient(app_service, duration),
                VirtualClient(app_service, None),
            ]
            for who, calls, cost, passing, what in steps:
                app_service.clock.advance(passing * limit.length / 1000 / SECOND)
                if what == "close":
                    await clients[who].close()
                    continue
                for _ in range(calls):
                    if not await clients[who].try_acquire(cost=cost):
                        break
                    uses.append((app_service.clock.ns() // 1000, cost))
        return exceeded(limit, uses)

    assert asyncio.run(play()) is None


def test_the_oracle_finds_violations():
    bucket = Limit.parse("10/1s")
    assert exceeded(bucket, [(0, 10), (100_000, 1)]) is None
    assert exceeded(bucket, [(0, 10), (99_000, 1)]) == "11 within 0.099 s"
    assert exceeded(Limit.parse("2/1s fixed_window"), [(5, 2), (1_000_004, 1)]) == "3 in the window from 5"
    assert exceeded(Limit.parse("2/1s fixed_window"), [(5, 2), (1_000_005, 2)]) is None
    assert exceeded(Limit.parse("2/1m calendar_window"), [(59 * SECOND, 2), (60 * SECOND, 2)]) is None


# ---- what is asked ---------------------------------------------------------------------------------------------------


async def test_many_calls_need_few_requests():
    async with InProcessService(policies={"api": "100000/1h"}) as app_service:
        client = VirtualClient(app_service)
        answers = []
        for _ in range(2000):
            answers.append(await client.try_acquire())
            app_service.clock.advance(0.001)
        assert all(answers)
        assert sum(client.requests.values()) < 30
        assert answers[0].remaining == 99_999
        await client.close()
        assert (await app_service.post("usage", {"policy": "api", "key": "k"})).json()["limits"][0]["used"] <= 2100


@pytest.mark.parametrize("text", ["40/1h fixed_window", "40/month"])
async def test_unused_permits_are_returned_exactly(text):
    async with InProcessService(policies={"api": text}) as app_service:
        client, other = VirtualClient(app_service, 60.0), VirtualClient(app_service, None)
        for _ in range(7):
            assert await client.try_acquire()
        assert client.requests["lease"] < 7
        await client.close()
        assert (await app_service.post("usage", {"policy": "api", "key": "k"})).json()["limits"][0]["used"] == 7
        assert await other.try_acquire(cost=33)
        assert not await client.try_acquire()


async def test_an_expired_lease_is_settled_by_a_later_call():
    async with InProcessService(policies={"api": "40/1h fixed_window"}) as app_service:
        client = VirtualClient(app_service, 1.0)
        assert await client.try_acquire("one")
        app_service.clock.advance(1.0)
        assert await client.try_acquire("two")
        assert (await app_service.post("usage", {"policy": "api", "key": "one"})).json()["limits"][0]["used"] == 1


async def test_all_permits_are_used_before_a_denial():
    async with InProcessService(policies={"api": "9/1h fixed_window"}) as app_service:
        first, second = VirtualClient(app_service, 60.0), VirtualClient(app_service, 60.0)
        got = [bool(await client.try_acquire()) for _ in range(6) for client in (first, second)]
        assert sum(got) == 9
        result = await first.try_acquire()
        assert (result.allowed, result.violated, result.retry_after) == (False, ("1h",), 3600.0)


@pytest.mark.parametrize(
    "policy",
    [
        "10/1m sliding_log",
        "10/1m sliding_window",
        "10/1m concurrency",
        {"limits": "10/1m", "mode": "shadow"},
        "10/1m, 100/1h sliding_log",
    ],
)
async def test_policies_without_safe_terms_send_a_request_per_call(policy):
    async with InProcessService(policies={"api": policy}) as app_service:
        client = VirtualClient(app_service)
        answers = [await client.try_acquire() for _ in range(11)]
        assert [bool(answer) for answer in answers] == [True] * 10 + [isinstance(policy, dict)]
        assert client.requests == {"lease": 1, "acquire": 10}  # then no lease is tried for a while
        app_service.clock.advance(60)
        await client.try_acquire()
        assert client.requests["lease"] == 2


async def test_costs_by_unit_and_waits_send_requests():
    async with InProcessService(policies={"api": "10/1m, 100/1m unit=tokens name=tpm"}) as app_service:
        client = VirtualClient(app_service)
        assert await client.try_acquire(cost={"requests": 1, "tokens": 60})
        assert client.requests == {"acquire": 1}
        assert await client.try_acquire(timeout=5.0)
        assert client.requests == {"acquire": 2}
        assert await client.try_acquire()
        assert await client.try_acquire(timeout=5.0)  # served from the lease
        assert client.requests == {"acquire": 2, "lease": 1}


async def test_a_blocked_key_gets_no_lease():
    async with InProcessService(policies={"api": "10/1h"}) as app_service:
        await app_service.post("block", {"policy": "api", "key": "k"})
        client = VirtualClient(app_service)
        assert (await client.try_acquire()).violated == ("blocked",)
        await app_service.post("unblock", {"policy": "api", "key": "k"})
        assert await client.try_acquire()


async def test_a_cost_above_the_limit_and_an_unknown_policy():
    async with InProcessService(policies={"api": "10/1h"}) as app_service:
        client = VirtualClient(app_service)
        result = await client.try_acquire(cost=11)
        assert (result.allowed, result.retry_after) == (False, None)
        with pytest.raises(RateLimitError, match="there is no policy 'nope'"):
            await client.try_acquire(policy="nope")


async def test_a_lease_that_cannot_be_settled_stays_charged():
    async with InProcessService(policies={"api": "10/1h fixed_window"}) as app_service:
        client = VirtualClient(app_service)
        assert await client.try_acquire()
        for share in next(iter(client.lease_cache._leases.values())):  # noqa: SLF001 - as if the service had forgotten it
            share.id = "unknown"
        await client.close()
        assert (await app_service.post("usage", {"policy": "api", "key": "k"})).json()["limits"][0]["used"] > 1


def test_settling_stops_when_the_service_is_unreachable():
    lease_cache = LeaseCache(1.0, ManualClock().steady)
    flow = settle_flow(lease_cache, [("a", 0), ("b", 1)])
    assert next(flow).content == b'{"id":"a"}'
    with pytest.raises(StopIteration):
        flow.throw(StoreUnavailable("gone"))


def test_settling_has_one_deadline():
    clock = ManualClock()
    flow = settle_flow(LeaseCache(1.0, clock.steady), [(str(number), 1) for number in range(9)])
    request, asked = next(flow), []
    with pytest.raises(StopIteration):  # noqa: PT012 - one of them is the last
        while True:
            asked.append((request.body.id, request.timeout * MAX_TRIES))
            clock.advance(2)  # so slow is the service
            request = flow.send({}) if len(asked) % 2 else flow.throw(ResourceUnknown("gone"))
    assert asked == [("0", 5.0), ("1", 3.0), ("2", 1.0)]


async def test_a_cancelled_call_lets_other_calls_request_a_lease():
    heard = asyncio.Queue()

    async def say_nothing(reader, writer):
        heard.put_nowait((await reader.readline()).split()[1])
        await reader.read()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with server:
        client = AsyncClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", lease="1s")
        frames = []  # those of the cancelled calls are kept
        for first in range(2):
            calls, paths = [], []
            for _ in range(2):
                calls.append(asyncio.create_task(client.try_acquire("api", "k")))
                paths.append(await heard.get())
            assert paths == [b"/v1/lease", b"/v1/acquire"], first
            for call in calls:
                call.cancel()
                with pytest.raises(asyncio.CancelledError) as caught:
                    await call
                frames.append(caught.tb)
        await client.close()


@pytest.mark.parametrize("field", [{"max_permits": 0}, {"max_permits": "many"}, {"max_permits": 10**9}, {"ttl": "1s"}])
async def test_invalid_lease_fields_are_refused(field):
    async with InProcessService(policies={"api": "10/1h"}) as app_service:
        result = await app_service.post("lease", {"policy": "api", "key": "k", **field})
        assert (result.status_code, result.json()["pointer"]) == (422, f"/{next(iter(field))}")


async def test_a_lease_of_an_unlimited_subject():
    async with InProcessService(
        domains=[{"domain": "e", "descriptors": [{"key": "ip", "limits": "3/1m"}]}]
    ) as app_service:
        body = {"domain": "e", "descriptor": [["x", "1"]], "max_permits": 5, "ttl": 2}
        result = (await app_service.post("lease", body)).json()
        assert (result["allowed"], result["permits"], result["seconds"], result["id"]) == (True, 5, 2.0, None)


@pytest.mark.parametrize("lease", ["soon", "0s", "2m", -1, 0])
def test_invalid_lease_durations_are_refused(lease):
    with pytest.raises(ConfigError, match="lease: expected a duration of up to 60s"):
        Client(lease=lease)


def test_lease_durations_are_read():
    assert [read_lease_duration(text) for text in ("1s", "250ms", 2, 0.5)] == [1.0, 0.25, 2.0, 0.5]


# ---- a real service --------------------------------------------------------------------------------------------------


def test_threads_of_several_clients(tmp_path):
    """Each use lies between two readings of the clock; the uses that are certainly within an interval must fit it."""
    with serving(tmp_path, "policies: {api: 200/1s burst=50, once: 100/1h fixed_window}\n") as service:
        uses, counted, lock = [], Counter(), threading.Lock()

        def work(client):
            mine, count = [], Counter()
            for _ in range(150):
                start = time.monotonic()
                if client.try_acquire("api", "k"):
                    mine.append((start, time.monotonic()))
                count["once"] += bool(client.try_acquire("once", "k"))
            with lock:
                uses.extend(mine)
                counted.update(count)

        clients = [Client(service.url, lease="500ms") for _ in range(2)]
        threads = [threading.Thread(target=work, args=(client,)) for client in clients for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()
        used = service.post("usage", {"policy": "once", "key": "k"}).json()["limits"][0]["used"]
        assert 0 < counted["once"] <= used <= 100
        starts = sorted(start for start, _ in uses)
        ends = sorted(end for _, end in uses)
        assert uses
        for start in starts[::7]:
            for end in ends[::7]:
                within = sum(1 for use in uses if start <= use[0] and use[1] <= end)
                assert within <= 50 + 200 * max(0.0, end - start) + 1


async def test_tasks_of_one_client(tmp_path):
    with serving(tmp_path, "policies: {api: 100/1h fixed_window}\n") as service:
        async with AsyncClient(service.url, lease="30s") as client:
            answers = await asyncio.gather(*(client.try_acquire("api", "k") for _ in range(60)))
            assert sum(map(bool, answers)) == 60
        async with AsyncClient(service.url, lease="30s") as client:
            got = [bool(await client.try_acquire("api", "k")) for _ in range(45)]
            assert got == [True] * 40 + [False] * 5  # nothing was lost on the way
