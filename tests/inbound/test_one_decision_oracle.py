"""Random stacks of limits against a brute-force model: each request is charged to all of its limits or to none."""

import asyncio
from collections import defaultdict, deque
from random import Random

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.cases import cases
from tests.inbound.harness import AsgiHarness
from tests.servers.valkey import ValkeyServer
from tidegate._runtime.clock import SystemClock
from tidegate.inbound import by_header, starlette

WINDOWS = {"10s": 10, "1m": 60, "5m": 300}
KEYS = {"by_address": None, "by_header(x-user)": by_header("x-user"), "by_header(x-team)": by_header("x-team")}


class Model:
    """Sliding logs, decided together."""

    def __init__(self):
        self.logs = defaultdict(deque)

    def decide(self, now, charges):
        for name, quota, seconds in charges:
            log = self.logs[name]
            while log and log[0] <= now - seconds:
                log.popleft()
            if len(log) >= quota:
                return False
        for name, _, _ in charges:
            self.logs[name].append(now)
        return True


def random_site(random):
    """Build an application with random limits, and a function that returns what a request is charged to."""
    category = (random.randint(3, 12), random.choice(list(WINDOWS)))
    routes, plans = [], {}
    for number in range(random.randint(1, 4)):

        async def page(request):
            return PlainTextResponse("page")

        page.__qualname__ = page.__name__ = f"page{number}"
        uses = {}
        for _ in range(random.randint(0, 4)):
            key, period = random.choice(list(KEYS)), random.choice(list(WINDOWS))
            scope = random.choice([None, None, "shared"])
            uses[scope or f"page{number}", key, period] = random.randint(1, 8), scope
        for (_, key, period), (quota, scope) in uses.items():
            page = starlette.limit(f"{quota}/{period}", key=KEYS[key], scope=scope)(page)
        routes.append(Route(f"/page{number}", page))
        plans[f"/page{number}"] = uses
    config = {
        "defaults": False, "unmatched": "all", "categories": {"all": {"limit": category[0], "window": category[1]}},
    }  # fmt: skip

    def charges(path, peer, user, team):
        yield ("all", peer), category[0], WINDOWS[category[1]]
        for (where, key, period), (quota, _) in plans.get(path, {}).items():
            who = {"by_address": peer, "by_header(x-user)": user, "by_header(x-team)": team}[key]
            yield (where, key, period, who), quota, WINDOWS[period]

    return Starlette(routes=routes), config, [*plans, "/missing"], charges


@cases("seed", range(30))
def test_random_stacks_agree_with_a_model(seed):
    random = Random(seed)
    app, config, paths, charges = random_site(random)
    site = AsgiHarness(config, app=app)
    model, now = Model(), 0
    for _ in range(300):
        step = random.choice([0, 0, 1, 3, 11])
        now += step
        site.clock.advance(step)
        path, peer = random.choice(paths), random.choice(["203.0.113.1", "203.0.113.2"])
        user, team = random.choice(["ann", "bob"]), random.choice(["red", "blue"])
        reply = site.request(path, peer=peer, headers=[("x-user", user), ("x-team", team)])
        expected = model.decide(now, list(charges(path, peer, user, team)))
        assert (reply.status != 429) is expected
    site.close()


# ---- a real Redis: one call for each request -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer() as server:
        yield server


RULES = {
    "defaults": False,
    "unmatched": "all",
    "categories": {"all": {"limit": 50, "window": "1h", "on_store_error": "deny"}},
}


def redis_site(server, inner="3/1h", *, flush=True, entered=None):
    if flush:
        server.ask("FLUSHALL")

    # `local` would ask the store for the share of this process, too
    @starlette.limit("20/1h", key=by_header("x-user"), on_store_error="deny")
    @starlette.limit(inner, on_store_error="deny")
    async def page(request):
        if entered is not None:
            entered.append(request)
        return PlainTextResponse("page")

    async def plain(request):
        return PlainTextResponse("plain")

    app = Starlette(routes=[Route("/page", page), Route("/plain", plain)])
    return AsgiHarness(RULES, app=app, store=f"{server.url}?deadline=60s", clock=SystemClock())


def test_redis_is_called_once_for_each_request(valkey):
    site = redis_site(valkey)
    site.request("/plain")  # connects, and loads the script
    before = valkey.calls("fcall")
    assert site.statuses(6, "/page") == [200, 200, 200, 429, 429, 429]
    assert site.statuses(4, "/plain") == [200] * 4
    assert valkey.calls("fcall") - before == 10
    assert site.request("/plain").remaining == 50 - 1 - 3 - 4 - 1  # what the route denied was not charged
    site.close()


def test_redis_is_called_once_more_to_give_back(valkey):
    valkey.ask("FLUSHALL")

    @starlette.limit("1/1h", on_store_error="deny")
    async def inner(request):
        return PlainTextResponse("inner")

    async def outer(request):  # its own limit is decided before the inner function is known
        return await inner(request)

    outer = starlette.limit("20/1h", on_store_error="deny")(outer)
    app = Starlette(routes=[Route("/page", outer), Route("/plain", lambda request: PlainTextResponse("plain"))])
    site = AsgiHarness(RULES, app=app, store=f"{valkey.url}?deadline=60s", clock=SystemClock())
    site.request("/page")
    before = valkey.calls("fcall")
    assert site.request("/page").status == 429
    assert valkey.calls("fcall") - before == 3  # the outer limits, the inner one, which denies, and what is given back
    assert site.request("/plain").remaining == 48
    site.close()


async def cancel_some(site, random):
    """Send requests at once and cancel some of them at random points; return how many got their response."""
    tasks = [asyncio.ensure_future(site.request_async("/page")) for _ in range(40)]
    for task in tasks:
        for _ in range(random.randint(0, 3)):
            await asyncio.sleep(0)
        if random.random() < 0.5:
            task.cancel()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    return sum(not isinstance(reply, BaseException) and reply.status == 200 for reply in replies)


@pytest.mark.parametrize("seed", range(4))
def test_of_cancelled_requests_exactly_those_that_were_allowed_are_charged(valkey, seed):
    entered = []
    site = redis_site(valkey, inner="100/1h", entered=entered)
    answered = site.runner.run(cancel_some(site, Random(seed)))
    site.close()  # completes what the store does in the background
    assert 0 < answered <= len(entered) <= 20
    site = redis_site(valkey, inner="100/1h", flush=False)
    assert 50 - site.request("/plain").remaining - 1 == len(entered)
    site.close()
