"""The same random requests through ASGI, WSGI and the pure function, against a brute-force model of what they cost."""

from collections import defaultdict
from random import Random

from tests.cases import cases
from tests.inbound.harness import AsgiHarness, WsgiHarness
from tests.inbound.recording_store import RecordingStore
from tidegate._runtime.flow import run
from tidegate.inbound._client.request import Request
from tidegate.inbound._limiting.charges import perform
from tidegate.inbound._limiting.request_limiter import RequestLimiter
from tidegate.inbound._limiting.request_targets import RequestTarget
from tidegate.inbound._rules.path_readings import wsgi_routes
from tidegate.testing import ManualClock

START = 1_728_000_000
WINDOWS = {"10s": 10, "1m": 60, "5m": 300}
PEERS = ("203.0.113.1", "203.0.113.2")
# What each path is charged to. Another spelling may reach another route: it is charged to `rest`, too.
CATEGORIES = {
    "/page": ["pages"], "/page/": ["pages", "rest"], "/PAGE": ["pages", "rest"], "/files/a/b": ["files"],
    "/files%2Fa": ["files", "rest"], "/quiet": ["quiet"], "/other": ["rest"], "/free": [],
}  # fmt: skip


def random_limits(random, count):
    periods = random.sample(list(WINDOWS), count)
    return [(random.randint(2, 9), period) for period in periods]


def random_site(random):
    """Return random limits and costs by category, the limits of the plan `pro`, and the configuration of all that."""
    limits = {name: random_limits(random, random.randint(1, 2)) for name in ("files", "quiet", "rest")}
    limits["pages"] = random_limits(random, 2)  # a single limit would share its count with that of the plan
    limits["pro"] = random_limits(random, 1)
    costs = {"pages": 1, "files": random.randint(1, 3), "quiet": 1, "rest": 1}
    endpoints = {"pages": ["/page"], "files": ["/files/*"], "quiet": ["/quiet"], "rest": ["/rest"]}
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
        self.limits, self.costs = limits, costs
        self.logs = defaultdict(list)

    def used(self, now, name, key, period):
        return sum(1 for at in self.logs[name, key, period] if at > now - WINDOWS[period])

    def fits(self, now, name, key, cost):
        return all(self.used(now, name, key, period) + cost <= quota for quota, period in self.limits[name])

    def request(self, now, path, key, plan):
        """Charge a request or not; returns whether it is allowed, and how many permits its tightest limit has left."""
        asked = [("pro" if name == "pages" and plan == "pro" else name, self.costs[name]) for name in CATEGORIES[path]]
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

    def request(self, path, method, headers, peer):
        fields = {name.lower(): value for name, value in headers}
        request = Request(method, path, peer, {}, lambda name: fields.get(name.lower()))
        found = self.limiter.targets.find((method, path), (method,), wsgi_routes(path, ""), None)
        client = self.limiter.client_identifier.find(peer, ())
        return run(self.limiter.check_flow(request, found or RequestTarget(()), client), perform)


@cases("seed", range(25))
def test_all_ways_agree_with_the_model(seed):
    random = Random(seed)
    limits, costs, config = random_site(random)
    clock, now = ManualClock(start=START), START
    stores = [RecordingStore(clock) for _ in range(3)]
    options = {"plan": lambda request: request.header("x-plan"), "log_burst": 0}
    sites = [
        kind(config, clock=clock, store=store, **options)
        for kind, store in zip((AsgiHarness, WsgiHarness), stores, strict=False)
    ]
    pure, model = PureSite(config, clock, stores[2], **options), Model(limits, costs)
    for _ in range(150):
        step = random.choice([0, 0, 1, 3, 11])
        now += step
        clock.advance(step)
        path, peer = random.choice(list(CATEGORIES)), random.choice(PEERS)
        method, plan = random.choice(["GET", "POST", "HEAD"]), random.choice(["pro", "other"])
        allowed, left = model.request(now, path, peer, plan)
        replies = [site.request(path, method, [("X-Plan", plan)], peer) for site in sites]
        result = pure.request(path, method, [("X-Plan", plan)], peer)
        assert [reply.status != 429 for reply in replies] == [allowed, allowed]
        assert result.allowed is allowed
        limit_fields = [
            {name: value for name, value in reply.headers.items() if name.startswith(("x-rate", "retry"))}
            for reply in replies
        ]
        assert limit_fields[0] == limit_fields[1]
        if allowed:
            assert limit_fields[0].get("x-ratelimit-remaining") == (None if left is None else str(left))
    usages = [store.usages() for store in stores]
    assert usages[0] == usages[1] == usages[2]
    for site in sites:
        site.close()
