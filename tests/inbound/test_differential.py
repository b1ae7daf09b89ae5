"""The same random requests through ASGI, WSGI and the pure function, against a brute-force model of what they cost."""

import contextlib
from collections import defaultdict
from random import Random

from tests.cases import cases
from tests.inbound.harness import AsgiHarness, WsgiHarness, run_websocket
from tests.inbound.recording_store import RecordingStore
from tidegate._runtime.flow import run
from tidegate.inbound._client.request import Request
from tidegate.inbound._limiting.charges import perform
from tidegate.inbound._limiting.request_limiter import RequestLimiter
from tidegate.inbound._limiting.request_targets import MessageTarget, RequestTarget
from tidegate.inbound._rules.path_readings import asgi_routes, wsgi_routes
from tidegate.stores import SQLiteStore
from tidegate.testing import ManualClock

START = 1_728_000_000
WINDOWS = {"10s": 10, "1m": 60, "5m": 300}
PEERS = ("203.0.113.1", "203.0.113.2")
# What each path is charged to. Another spelling may reach another route: it is charged to `rest`, too.
CATEGORIES = {
    "/page": ["pages"], "/page/": ["pages", "rest"], "/PAGE": ["pages", "rest"], "//page": ["pages", "rest"],
    "/page;v=1": ["pages", "rest"], "/x/../page": ["pages", "rest"], "/pag%65": ["pages", "rest"], "/pagé": ["rest"],
    "/files": ["files"], "/files/a/b": ["files"], "/files%2Fa": ["files", "rest"], "/quiet": ["quiet"],
    "/import": ["rest"], "/other": ["rest"], "/free": [], "/free/": ["rest"],
}  # fmt: skip
WRITES = {"/import": ["writes"]}  # the same of POST requests


def random_limits(random, count):
    periods = random.sample(list(WINDOWS), count)
    return [(random.randint(2, 9), period) for period in periods]


def random_site(random):
    """Return random limits and costs by category, the limits of the plan `pro`, and the configuration of all that."""
    limits = {
        name: random_limits(random, random.randint(1, 2)) for name in ("files", "quiet", "rest", "writes", "chat")
    }
    limits["pages"] = random_limits(random, 2)  # a single limit would share its count with that of the plan
    limits["pro"] = random_limits(random, 1)
    costs = {
        "pages": 1,
        "files": random.randint(1, 3),
        "quiet": 1,
        "rest": 1,
        "writes": random.randint(1, 2),
        "chat": 1,
    }
    endpoints = {
        "pages": ["/page"], "files": ["/files/*"], "quiet": ["/quiet"], "rest": ["/rest"],
        "writes": [{"path": "/import", "methods": ["POST"]}], "chat": [{"path": "/ws/{room}", "methods": ["MESSAGE"]}],
    }  # fmt: skip
    categories = {}
    for name, paths in endpoints.items():
        texts = [f"{max(quota, costs[name])}/{period} name={name}-{period}" for quota, period in limits[name]]
        limits[name] = [(max(quota, costs[name]), period) for quota, period in limits[name]]
        categories[name] = {"limits": texts, "endpoints": paths, "cost": costs[name]}
    categories["quiet"]["mode"] = "shadow"
    categories["pages"]["plans"] = {"pro": [f"{quota}/{period} name=pro-{period}" for quota, period in limits["pro"]]}
    config = {"defaults": False, "unmatched": "rest", "categories": categories, "exempt": ["/free"]}
    return limits, costs, config


class Model:
    """Sliding logs with one entry for each permit."""

    def __init__(self, limits, costs):
        self.limits, self.costs = limits, {**costs, "pro": costs["pages"]}
        self.logs = defaultdict(list)

    def used(self, now, name, key, period):
        return sum(1 for at in self.logs[name, key, period] if at > now - WINDOWS[period])

    def fits(self, now, name, key, cost):
        return all(self.used(now, name, key, period) + cost <= quota for quota, period in self.limits[name])

    def usages(self, now):
        """Return the permits in use, by name of the limit and key."""
        used = {(f"{name}-{period}", key): self.used(now, name, key, period) for name, key, period in [*self.logs]}
        return {limit: count for limit, count in used.items() if count}

    def request(self, now, path, key, plan, method="GET"):
        """Charge a request or not; returns whether it is allowed, and how many permits its tightest limit has left."""
        charged = WRITES.get(path) if method == "POST" else None
        charged = charged or CATEGORIES[path]
        return self.charge(now, key, ["pro" if name == "pages" and plan == "pro" else name for name in charged])

    def charge(self, now, key, names):
        """Charge categories or not, all together."""
        asked = [(name, self.costs[name]) for name in names]
        enforced = [(name, cost) for name, cost in asked if name != "quiet"]
        if not all(self.fits(now, name, key, cost) for name, cost in enforced):
            return False, None
        for name, cost in asked:
            if self.fits(now, name, key, cost):  # always, but for the category in shadow mode
                for _, period in self.limits[name]:
                    self.logs[name, key, period] += [now] * cost
        left = [
            max(0, quota - self.used(now, name, key, period))
            for name, _ in asked
            for quota, period in self.limits[name]
        ]
        return True, min(left, default=None)


class PureSite:
    """Decides with `RequestLimiter.check_flow`, without a server."""

    def __init__(self, config, clock, store, **options):
        self.limiter = RequestLimiter(config, store, clock=clock, **options)

    def request(self, path, method, headers, peer, root):
        fields = {name.lower(): value for name, value in headers}
        request = Request(method, path, peer, {}, lambda name: fields.get(name.lower()))
        found = self.limiter.targets.find((method, path, root), (method,), wsgi_routes(path, root), None)
        client = self.limiter.client_identifier.find(peer, ())
        return run(self.limiter.check_flow(request, found or RequestTarget(()), client), perform)

    def message(self, path, peer, root):
        request = Request("GET", path, peer, {}, lambda name: None)
        client = self.limiter.client_identifier.find(peer, ())
        target = MessageTarget(request, asgi_routes(root + path, root))
        return run(self.limiter.check_message_flow(target, client, client.key, path), perform)


async def echo(scope, receive, send):
    """Accept a WebSocket, and send back each message."""
    while (message := await receive())["type"] != "websocket.disconnect":
        if message["type"] == "websocket.connect":
            await send({"type": "websocket.accept"})
        else:
            await send({"type": "websocket.send", "text": message["text"]})


class Sites:
    """The same site behind both middlewares and without a server, each with a store of its own."""

    def __init__(self, config, clock, make_store):
        options = {"plan": lambda request: request.header("x-plan"), "log_burst": 0}
        self.stores = [make_store(number) for number in range(3)]
        asgi_store, wsgi_store, pure_store = self.stores
        self.asgi = AsgiHarness(config, clock=clock, store=asgi_store, on_message="drop", **options)
        self.wsgi = WsgiHarness(config, clock=clock, store=wsgi_store, **options)
        self.pure = PureSite(config, clock, pure_store, **options)

    def request(self, path, method, headers, peer, root):
        """Return the replies of both middlewares, and the result of the pure function."""
        raw = {"root_path": root, "raw_path": (root + path).encode()}
        replies = [
            self.asgi.request(root + path, method, headers, peer, **raw),
            self.wsgi.request(path, method, headers, peer, SCRIPT_NAME=root),
        ]
        return replies, self.pure.request(path, method, headers, peer, root)

    def websocket(self, peer, root, texts):
        """Open a WebSocket and send messages; returns which of them each site lets pass, or None if it is denied."""
        path = "/ws/a"
        found = []
        inner, self.asgi.middleware.app = self.asgi.middleware.app, echo
        sent = self.asgi.runner.run(run_websocket(self.asgi.middleware, texts, root + path, peer=peer, root_path=root))
        self.asgi.middleware.app = inner
        opened = sent[0]["type"] == "websocket.accept"
        found.append([each["text"] for each in sent[1:]] if opened else None)
        opened = self.wsgi.request(path, peer=peer, SCRIPT_NAME=root).status == 200
        found.append([each for each in texts if self.wsgi.limiter.check(peer, "chat")] if opened else None)
        opened = self.pure.request(path, "GET", (), peer, root).allowed
        found.append([each for each in texts if self.pure.message(path, peer, root)] if opened else None)
        return found

    def close(self):
        self.asgi.close()
        self.wsgi.close()
        for store in self.stores:
            store.close()


@cases("seed", range(30))
def test_all_ways_agree_with_the_model(seed, tmp_path):
    random = Random(seed)
    limits, costs, config = random_site(random)
    clock, now = ManualClock(start=START), START
    in_file = seed % 3 == 2  # a store that is awaited, or that blocks

    def make_store(number):
        return RecordingStore(
            clock, SQLiteStore(str(tmp_path / f"{seed}-{number}.db"), clock=clock) if in_file else None
        )

    with contextlib.closing(Sites(config, clock, make_store)) as sites:
        model = Model(limits, costs)
        for _ in range(60 if in_file else 150):
            step = random.choice([0, 0, 1, 3, 11])
            now += step
            clock.advance(step)
            peer, root = random.choice(PEERS), random.choice(["", "", "/app", "/a/pp"])
            if random.random() < 0.1:
                texts = [str(number) for number in range(random.randint(0, 5))]
                opened, _ = model.charge(now, peer, ["rest"])
                passed = [text for text in texts if model.charge(now, peer, ["chat"])[0]] if opened else None
                assert sites.websocket(peer, root, texts) == [passed] * 3
                continue
            path, plan = random.choice(list(CATEGORIES)), random.choice(["pro", "other"])
            method = random.choice(["GET", "POST", "HEAD", "PUT"])
            allowed, left = model.request(now, path, peer, plan, method)
            replies, result = sites.request(path, method, [("X-Plan", plan)], peer, root)
            assert [reply.status != 429 for reply in replies] == [allowed, allowed], (path, method)
            assert result.allowed is allowed
            limit_fields = [
                {name: value for name, value in reply.headers.items() if name.startswith(("x-rate", "retry"))}
                for reply in replies
            ]
            assert limit_fields[0] == limit_fields[1]
            if allowed:
                assert limit_fields[0].get("x-ratelimit-remaining") == (None if left is None else str(left))
        expected = model.usages(now)
        assert [store.usages_by_limit() for store in sites.stores] == [expected] * 3, "what is charged"
