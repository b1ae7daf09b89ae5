"""Streams of a provider that counts output when it is produced, in virtual time."""

import json

from tidegate import Denied, Limiter
from tidegate.outbound import Gate, OutboundRequest, Providers
from tidegate.outbound._quota.exchange import ProviderResponse
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

PERIOD = 60
QUOTA = 8000
TICK = 0.5


def event(payload):
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


START = event({"type": "message_start", "message": {"usage": {"input_tokens": 10, "output_tokens": 1}}})
DELTA = event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "abc"}})


class StreamWorld:
    """A provider with one quota of output, and what it has counted."""

    def __init__(self, limit, store=MemoryStore, quota=QUOTA, speed=100):
        self.clock, self.speed = ManualClock(1_728_000_000), speed
        self.store = store(clock=self.clock)
        limits = ["1000/1m", f"{quota}/1m unit=output-tokens {limit}"]
        self.known = Providers.of({"domain": "x.example", "limits": limits, "profile": "anthropic", "strict": True})
        self.gate = Gate(self.known, self.store, timeout=0, tokenizer=lambda _text: 10)
        self.produced, self.streams = [], []  # when, and how many tokens

    def usage(self):
        with Limiter(next(iter(self.known)).policy, store=self.store) as limiter:
            return limiter.usage("x.example")["output-tokens-1m"].used

    def advance(self):
        """Let all streams produce what they produce in half a second."""
        self.clock.advance(TICK)
        self.streams = [each for each in self.streams if each.proceed(round(self.speed * TICK))]

    def finish(self):
        while self.streams:
            self.advance()

    def learn(self, count=12, length=400, wait=0):
        """Run streams one by one, so that the speed is known; their quota is free again afterwards."""
        for _ in range(count):
            self.streams = [Stream(self, length)]
            self.clock.advance(wait)
            self.finish()
            self.clock.advance(PERIOD if count > 15 else 0)
        self.clock.advance(3 * PERIOD)
        self.produced.clear()

    def start_all(self, length):
        """Start streams as long as there is room for one."""
        while True:
            try:
                self.streams.append(Stream(self, length))
            except Denied:
                return

    def run(self, seconds, length=4000):
        for _ in range(round(seconds / TICK)):
            self.start_all(length)
            self.advance()

    def most_in_a_window(self):
        """The most that the provider has counted within a period."""
        most = used = first = 0
        for at, tokens in self.produced:
            used += tokens
            while self.produced[first][0] <= at - PERIOD * 1_000_000:
                used -= self.produced[first][1]
                first += 1
            most = max(most, used)
        return most

    def lowest_level(self, burst, quota=QUOTA):
        """The lowest level of a bucket of the provider."""
        level = lowest = burst
        last = self.produced[0][0]
        for at, tokens in self.produced:
            level = min(burst, level + (at - last) / 1e6 * quota / PERIOD) - tokens
            lowest, last = min(lowest, level), at
        return lowest


class Stream:
    """One streamed answer, which produces as many tokens as the request allows."""

    def __init__(self, world, length):
        self.world, self.tokens = world, 0
        body = json.dumps({"model": "m", "max_tokens": length, "stream": True, "messages": []}).encode()
        request = OutboundRequest(
            "POST", "https://x.example/v1/messages", {}.get, lambda: body, True, lambda _: False, True
        )

        def send(_provider, changed=None):
            self.left = json.loads(changed or body)["max_tokens"]
            return ProviderResponse(200, (), lambda: None, 200)

        self.settlement = world.gate.run(world.gate.send_flow(request, send)).settlement
        self.settlement.open()
        self.feed(START)

    def feed(self, piece):
        if self.settlement.feed(piece):
            self.world.gate.run(self.settlement.renew_flow())

    def proceed(self, tokens):
        """Produce tokens; returns whether there will be more."""
        tokens = min(tokens, self.left)
        self.left -= tokens
        self.tokens += tokens
        self.world.produced.append((self.world.clock.steady(), tokens))
        self.feed(DELTA * tokens)
        if self.left:
            return True
        self.feed(event({"type": "message_delta", "usage": {"output_tokens": self.tokens}}))
        self.feed(b"event: message_stop\ndata: {}\n\n")
        self.settlement.end()
        self.world.gate.run(self.settlement.settle_flow())
        return False
