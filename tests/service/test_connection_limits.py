"""The number of HTTP/1 connections is bounded, and stopping closes them."""

import asyncio
import json

from tests.service.connection_harness import (
    GET,
    IDLE,
    OK,
    POLICIES,
    READ,
    acquire_body,
    post,
    running,
)
from tests.service.harness import ADMIN, DECISION
from tidegate.service._http.app import FREE_SHARE_DIVISOR
from tidegate.service._http.connections import NEVER_TICKS, Connections, connections_for_requests, fit_connections

# ---- how many --------------------------------------------------------------------------------------------------------


async def test_the_connection_that_waited_longest_is_closed():
    async with running(max_connections=20) as it:
        silent = [it.connect() for _ in range(18)]
        served = await it.ask(GET)  # idle since now
        half = it.connect(GET[:5])
        new = await it.ask(GET)
        assert [client.state for client in silent] == ["closed"] + ["open"] * 17
        for _ in range(17):
            await it.ask(GET)
        assert {client.state for client in silent} == {"closed"}
        assert (half.state, served.state, new.statuses()) == ("open", "open", [OK])
        await it.ask(GET)  # `half` has waited longer than `served`: it began before that was answered
        assert (half.state, served.state, len(it.connections)) == ("open", "closed", 20)


async def test_requests_leave_connections_for_health_metrics_and_admin():
    bound = connections_for_requests(20)
    tokens = {"decision_token": DECISION, "admin_token": ADMIN}
    async with running(max_connections=20, max_concurrency=bound, **tokens) as it:
        decision, admin = f"X-Tidegate-Token: {DECISION}", f"X-Tidegate-Token: {ADMIN}"
        slow = json.dumps({"policy": "slow", "key": "k"}).encode()
        await it.ask(post(slow, decision))
        waiting = post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode(), decision)
        callers = [await it.ask(waiting) for _ in range(bound + 3)]
        may_wait = bound - bound // FREE_SHARE_DIVISOR
        assert [client.problems() for client in callers] == [[]] * may_wait + [["busy"]] * (bound + 3 - may_wait)
        silent = [it.connect() for _ in range(50)]
        assert (await it.ask(GET)).statuses() == [OK]
        assert (await it.ask(GET.replace(b"healthz", b"readyz"))).statuses() == [OK]
        metrics = GET.replace(b"healthz", b"metrics")[:-2] + decision.encode() + b"\r\n\r\n"
        assert (await it.ask(metrics)).statuses() == [OK]
        assert (await it.ask(post(acquire_body(), decision))).statuses() == [OK]  # calls that wait leave room for it
        assert len(it.connections) == 20
        assert sum(client.state == "open" for client in silent) < 6
        assert (await it.ask(post(slow, admin, path="/v1/reset"))).statuses() == [OK]
        await it.settle(100)
        assert callers[0].statuses() == [OK]  # after the reset, the first caller has its permit
        it.service.clock.advance(30)
        await it.settle(100)


async def test_connections_with_active_requests_are_not_closed():
    async with running(max_connections=16, policies=POLICIES) as it:
        await it.ask(post(json.dumps({"policy": "slow", "key": "k"}).encode()))
        waiting = post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode())
        callers = [await it.ask(waiting) for _ in range(16)]
        late = await it.ask(waiting)
        assert (late.state, {client.state for client in callers}) == ("closed", {"open"})
        it.service.clock.advance(30)
        await it.settle(100)
        assert [client.statuses() for client in callers] == [[OK]] * 16


def test_connections_fit_below_the_limit_of_open_files():
    assert fit_connections(8192, None) == 8192
    assert fit_connections(8192, 1_048_576) == 8192
    assert fit_connections(8192, 1024) == 896
    assert fit_connections(500, 1024) == 500
    assert fit_connections(500, 1024, addresses=2) == 448
    assert fit_connections(8192, 64) == 16
    assert [connections_for_requests(count) for count in (16, 100, 896, 8192)] == [12, 75, 864, 8160]


def test_ticks_are_short_enough_for_the_timeouts():
    for read, idle in ((5, 75), (0.05, 75), (3600, 7200), (75, 0.4)):
        bounds = Connections(10, read, idle)
        assert 0 < bounds.tick_seconds <= 1
        assert bounds.read_ticks * bounds.tick_seconds >= read
        assert bounds.idle_ticks * bounds.tick_seconds >= idle
        assert (bounds.read_ticks + 1) * bounds.tick_seconds <= read * 1.25 + 1e-9
        assert bounds.idle_ticks < NEVER_TICKS


def test_a_failing_connection_does_not_keep_others_open(caplog):
    class Late:
        ticks_left = 0
        ended = False

        def __init__(self, fails):
            self.fails = fails

        def expire(self):
            assert not self.fails, "planted"
            self.ended = True

    bounds = Connections(100, READ, IDLE)
    late = [Late(fails=number % 3 == 0) for number in range(30)]
    for connection in late:
        bounds.add(connection)
    bounds.tick()
    assert [connection.ended for connection in late] == [not connection.fails for connection in late]
    assert len(bounds) == 20
    assert caplog.text.count("planted") >= 10


# ---- the end ---------------------------------------------------------------------------------------------------------


async def test_stopping_finishes_active_requests():
    async with running() as it:
        await it.ask(post(json.dumps({"policy": "slow", "key": "k"}).encode()))
        silent, half_head, idle = it.connect(), it.connect(GET[:9]), await it.ask(GET)
        half_body = await it.ask(post(acquire_body())[:-5])
        caller = await it.ask(post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode()) + GET)
        behind = await it.ask(GET + post(acquire_body())[:-5])
        stopping = asyncio.create_task(it.server.stop(20))
        await it.settle()
        assert {client.state for client in (silent, half_head, idle)} == {"closed"}
        assert half_body.problems() == ["stopping"]
        assert behind.statuses() == [OK, 503]
        assert caller.state == "open"
        it.service.clock.advance(30)
        await it.settle(100)
        assert (caller.statuses(), caller.state) == ([OK, OK], "closed")
        for client in (half_body, behind):
            assert client.eof
            client.close()  # the clients have read their answers
        await stopping
        assert len(it.connections) == 0


async def test_a_client_that_disconnects_before_its_responses():
    async with running() as it:
        await it.ask(post(json.dumps({"policy": "slow", "key": "k"}).encode()))
        waiting = post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode())
        for behind in (b"", GET * 5, GET * 5000, post(acquire_body())[:-5], b"\x00"):
            client = await it.ask(waiting + behind)
            client.abort()
            it.service.clock.advance(30)
            await it.settle(100)
            assert (it.service.app.in_flight, client.written) == (0, b"")
