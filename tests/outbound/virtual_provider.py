"""A provider in virtual time, and gates that call it."""

from collections import deque

import httpx

from tidegate import Limiter
from tidegate.outbound import Gate, OutboundRequest, Providers
from tidegate.outbound._quota.exchange import ProviderResponse
from tidegate.outbound.httpx import RateLimitTransport

START = 1_728_000_000
URL = "https://x.example/"


def providers(limit=10, period="1m", **more):
    return Providers.of({"domain": "x.example", "limit": limit, "period": period, **more})


def call(method="GET", body=None, url=URL):
    return OutboundRequest(
        method, url, {}.get, lambda: body, True, lambda error: isinstance(error, ConnectionRefusedError)
    )


class Server:
    """A provider in virtual time, that lets `limit` requests through in any period, or per aligned window."""

    def __init__(self, clock, limit, period=60.0, *, aligned=False, latency=0.01, headers=None):
        self.clock, self.limit, self.period, self.aligned, self.latency = clock, limit, period, aligned, latency
        self.headers = headers or (lambda _server, _now, _ok: {})
        self.recent: deque[float] = deque()
        self.log: list[tuple[float, bool]] = []

    def left(self, now):
        if self.aligned:
            while self.recent and self.recent[0] // self.period != now // self.period:
                self.recent.popleft()
        while self.recent and now - self.recent[0] >= self.period:
            self.recent.popleft()
        return self.limit - len(self.recent)

    def __call__(self, _request):
        self.clock.advance(self.latency / 2)
        now = self.clock.now()
        ok = self.left(now) > 0
        if ok:
            self.recent.append(now)
        self.log.append((now, ok))
        headers = self.headers(self, now, ok)
        self.clock.advance(self.latency / 2)
        return httpx.Response(200 if ok else 429, headers=headers)

    def windows(self, count):
        """Tell for each window since the start how many requests were let through, and how many refused."""
        inside = [[ok for at, ok in self.log if i * 60 <= at - START < (i + 1) * 60] for i in range(count)]
        return [(sum(each), len(each) - sum(each)) for each in inside]


def saturate(server, known, seconds):
    """Send one request after another, as fast as the gate lets, for so many virtual seconds."""
    transport = RateLimitTransport(known, transport=httpx.MockTransport(server), clock=server.clock)
    with httpx.Client(transport=transport) as client:
        while server.clock.now() - START < seconds:
            client.get(URL)
    return transport.gate


def usage(known, store):
    provider = next(iter(known))
    with Limiter(provider.policy, store=store) as limiter:
        return next(iter(limiter.usage("x.example").values())).used


def answers(clock, *steps, known=None, **options):
    """A gate whose provider answers with these statuses and headers, one after another."""
    gate = Gate(known or providers(), clock=clock, timeout=0, **options)
    queue = iter(steps)

    def send(_provider):
        status, headers = next(queue)
        return ProviderResponse(status, list(headers.items()), lambda: None, status)

    return gate, lambda **options_given: gate.run(gate.send_flow(call(**options_given), send)).response
