"""Idempotency keys over HTTP, within one process."""

import asyncio

import pytest

from tests.service.harness import START, InProcessService
from tests.service.http_harness import POLICIES, K, disconnect, problem
from tidegate.service._api.problems import HTTPReply
from tidegate.service._http.replays import IdempotentReplies
from tidegate.testing import ManualClock


@pytest.fixture
async def service():
    async with InProcessService(policies=POLICIES, max_body=2048, max_concurrency=2) as service:
        yield service


async def test_the_same_idempotency_key_gets_the_same_response(service):
    headers = {"idempotency-key": "one"}
    first = await service.post("acquire", K, headers=headers)
    again = await service.post("acquire", K, headers=headers)
    assert first.json() == again.json()
    assert ("idempotency-replayed" in first.headers, again.headers["idempotency-replayed"]) == (False, "true")
    assert (await service.post("usage", K)).json()["limits"][0]["used"] == 1
    other = await service.post("acquire", {**K, "cost": 2}, headers=headers)
    assert problem(other)[0] == "idempotency-mismatch"
    service.clock.advance(601)
    later = await service.post("acquire", K, headers=headers)
    assert "idempotency-replayed" not in later.headers


async def test_the_size_of_remembered_responses_is_bounded():
    replays = IdempotentReplies(ManualClock(), max_bytes=1000)

    async def ask():
        return HTTPReply(200, b"x" * 400)

    for number in range(10):
        await replays.reply(b"%d" % number, ("batch", b"asked"), ask)
    assert len(replays) == 3
    again = await replays.reply(b"9", ("batch", b"asked"), ask)
    assert again.headers == ((b"idempotency-replayed", b"true"),)


async def test_a_repeated_request_waits_for_the_first(service):
    await service.post("acquire", {**K, "cost": 1})
    headers = {"idempotency-key": "two"}
    both = [service.post("acquire", {**K, "cost": 2, "timeout": 30}, headers=headers) for _ in range(2)]
    answers = [response.json() for response in await asyncio.gather(*both)]
    assert answers[0] == answers[1]
    assert service.decider.stats.count("api").denied == 1


@pytest.mark.parametrize("verb", ["acquire", "reserve"])
async def test_a_client_with_a_key_that_disconnects_leaves_the_wait_queue(service, verb):
    await service.post("acquire", {**K, "cost": 2})
    ask, headers = {**K, "timeout": 90}, {"idempotency-key": "abandoned"}
    for _ in range(3):
        await disconnect(service, asyncio.create_task(service.post(verb, ask, headers=headers)))
    assert (service.clock.now(), service.app.in_flight, service.app.waiting) == (START, 0, 0)
    service.decider.max_wait = 90
    first = await service.post(verb, ask, headers=headers)  # waits anew
    assert (service.clock.now(), first.json()["allowed"]) == (START + 60, True)
    again = await service.post(verb, ask, headers=headers)
    assert (again.json(), again.headers["idempotency-replayed"]) == (first.json(), "true")
    assert (await service.post("usage", K)).json()["limits"][0]["used"] == 1


async def test_a_repeated_request_keeps_waiting_when_the_first_client_disconnects(service):
    await service.post("acquire", {**K, "cost": 2})
    ask, headers = {**K, "timeout": 20}, {"idempotency-key": "twice"}
    first, second = (asyncio.create_task(service.post("acquire", ask, headers=headers)) for _ in range(2))
    while service.app.waiting < 2:
        await asyncio.sleep(0)
    first.cancel()
    assert (await second).json()["allowed"] is False  # at its own deadline
    assert first.cancelled()


async def test_waiting_calls_leave_capacity_for_other_calls():
    async with InProcessService(policies=POLICIES, max_concurrency=8) as service:
        await service.post("acquire", {**K, "cost": 2})
        asking = [asyncio.create_task(service.post("acquire", {**K, "timeout": 20})) for _ in range(8)]
        while service.app.waiting < 7 or service.app.in_flight > 7:
            await asyncio.sleep(0)
        assert (await service.post("acquire", {"policy": "many", "key": "k"})).json()["allowed"]
        statuses = [(await each).status_code for each in asking]
        assert (statuses.count(200), statuses.count(503)) == (7, 1)


async def test_an_error_is_not_remembered_for_its_key(service):
    headers = {"idempotency-key": "three"}
    wrong = {"policy": "nope", "key": "k"}
    assert [(await service.post("acquire", wrong, headers=headers)).status_code for _ in range(2)] == [404, 404]
    assert (await service.post("acquire", K, headers=headers)).status_code == 200
    assert (await service.post("acquire", K, headers={"idempotency-key": "x" * 300})).status_code == 400
