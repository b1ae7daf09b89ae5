"""Bounds of requests over HTTP, and clients that disconnect or meet a stopping or failing service."""

import asyncio

import pytest

from tests.service.harness import START, InProcessService
from tests.service.http_harness import POLICIES, K, disconnect, problem
from tidegate.stores import Store


@pytest.fixture
async def service():
    async with InProcessService(policies=POLICIES, max_body=2048, max_concurrency=2) as service:
        yield service


async def test_too_many_concurrent_requests_get_busy(service):
    await service.post("acquire", {**K, "cost": 2})
    waiting = [asyncio.create_task(service.post("acquire", {**K, "timeout": 20})) for _ in range(2)]
    while service.decider.waiting < 2:
        await asyncio.sleep(0)
    busy = await service.post("acquire", {"policy": "many", "key": "k"})
    assert problem(busy)[0] == "busy"
    assert busy.headers["retry-after"] == "1"
    for each in waiting:
        await each
    assert service.app.in_flight == 0
    assert (await service.post("acquire", {"policy": "many", "key": "k"})).json()["allowed"]


async def test_a_client_that_disconnects_leaves_the_wait_queue(service):
    await service.post("acquire", {**K, "cost": 2})
    await disconnect(service, asyncio.create_task(service.post("acquire", {**K, "timeout": 30})))
    assert (service.clock.now(), service.app.in_flight) == (START, 0)
    service.clock.advance(60)
    assert (await service.post("peek", {**K, "cost": 2})).json()["allowed"]  # nothing was taken


async def test_a_stopping_service_refuses_new_requests(service):
    service.app.stop()
    assert service.app.idle.is_set()
    assert problem(await service.post("acquire", K))[0] == "stopping"
    assert problem(await service.http.get("/readyz"))[0] == "stopping"
    assert (await service.http.get("/healthz")).status_code == 200


class Broken(Store):
    """A store that fails with an unexpected exception."""

    def apply(self, verb, asks, now=None, at=None):
        raise RuntimeError("inside")


async def test_an_unexpected_exception_is_logged_and_not_sent(caplog):
    async with InProcessService(store=Broken(), policies=POLICIES) as service:
        response = await service.post("acquire", K)
        assert problem(response)[0] == "internal"
        assert "inside" not in response.text
        assert "inside" in caplog.text
        assert service.app.in_flight == 0
