"""A provider of a language model in virtual time that counts by the rule of a profile, and agents that call it.

Everything runs in one thread: agents are flows of the gate that this module steps through, and what happens next is
the earliest event of a heap.
"""

import heapq
import json
import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from tidegate import Denied, RateLimitError
from tidegate.outbound import Gate, OutboundRequest, Providers
from tidegate.outbound._providers.profile_file import shipped_profile
from tidegate.outbound._quota.exchange import ProviderResponse
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

PERIOD = 60.0
START = 1_728_000_000
INPUT = 6400  # tokens, as the tokenizer counts them
MAX_TOKENS = 64_000
MEAN_ANSWER = 5400
CHUNK_SECONDS = 0.05
URL = "https://llm.test/v1/chat/completions"


@dataclass
class Window:
    """What a provider has counted within the last period, and how much that was at most."""

    quota: int
    entries: deque[list[float]] = field(default_factory=deque)
    used: int = 0
    most: int = 0
    total: int = 0

    def expire(self, now):
        while self.entries and self.entries[0][0] <= now - PERIOD:
            self.used -= self.entries.popleft()[1]

    def add(self, now, amount):
        self.expire(now)
        entry = [now, amount]
        self.entries.append(entry)
        self.change(now, entry, 0, amount)
        return entry

    def change(self, now, entry, old, new):
        """Count an entry with another amount, if it still counts."""
        entry[1] = new
        self.total += new - old
        if entry[0] > now - PERIOD:
            self.used += new - old
            self.most = max(self.most, self.used)


class Simulation:
    """Agents of several processes that share a store and a quota."""

    def __init__(self, profile, *, agents=200, processes=4, tokens=10_000_000, requests=2500, seed=1, speed=10_000,
                 streams=0.5, pause=23.0):  # fmt: skip
        self.profile, self.speed, self.streams, self.pause = shipped_profile(profile), speed, streams, pause
        self.clock, self.random = ManualClock(START), random.Random(seed)
        self.store = MemoryStore(clock=self.clock)
        limits = [f"{requests}/1m", f"{tokens}/1m unit=tokens name=tpm"]
        self.known = self.providers(limits, profile)
        self.tokens, self.requests = Window(tokens), Window(requests)
        self.events, self.order = [], count()
        self.gates = [self.open_gate() for _ in range(processes)]
        self.generation = [0] * processes
        self.factor = 1
        self.refusals, self.answers = [], 0
        self.running = set()  # answers that are being produced
        self.sent = []  # the bounds of requests that have not arrived
        for agent in range(agents):
            self.at(self.random.random() * PERIOD, partial(self.call, agent % processes, 0))

    def providers(self, limits, profile):
        return Providers.of({"domain": "llm.test", "limits": limits, "profile": profile, "strict": True})

    def open_gate(self):
        return Gate(self.known, self.store, timeout=0, tokenizer=lambda _text: INPUT, jitter=self.random.random)

    # ---- time --------------------------------------------------------------------------------------------------------

    def now(self):
        return self.clock.now() - START

    def at(self, delay, action):
        heapq.heappush(self.events, (self.now() + delay, next(self.order), action))

    def run(self, until):
        while self.events and self.events[0][0] <= until:
            when, _, action = heapq.heappop(self.events)
            self.clock.advance(max(0.0, when - self.now()))
            action()
        self.clock.advance(max(0.0, until - self.now()))

    # ---- processes and agents ----------------------------------------------------------------------------------------

    def kill(self, process):
        """End a process with everything it has in flight; another one takes its place."""
        self.generation[process] += 1  # nothing of it is settled
        self.gates[process] = self.open_gate()
        for _ in range(200 // len(self.gates)):
            self.at(self.random.random() * self.pause, partial(self.call, process, self.generation[process]))

    def alive(self, process, generation):
        return self.generation[process] == generation

    def call(self, process, generation):
        """Send one request, and the next one when it has ended."""
        if not self.alive(process, generation):
            return
        again = partial(self.call, process, generation)
        body = {"model": "m", "max_tokens": MAX_TOKENS, "stream": self.random.random() < self.streams}
        if self.profile.name == "bedrock":
            body = {"inferenceConfig": {"maxTokens": MAX_TOKENS}}
        raw = json.dumps(body).encode()
        request = OutboundRequest("POST", URL, {}.get, lambda: raw, True, lambda _error: False, True)
        gate, sent = self.gates[process], []  # what was sent, by each attempt

        def send(provider, changed=None):
            sent.append({**json.loads(changed or raw), "member": provider.member})

        flow = gate.send_flow(request, send)
        self.proceed(process, generation, flow, None, sent, again)

    def proceed(self, process, generation, flow, value, sent, again):
        """Step through a call until it sends its next request; returns what it ended with, if it has ended."""
        already = len(sent)
        try:
            step = flow.send(value)
            while True:
                try:
                    value = self.gates[process].perform(step)
                except RateLimitError as error:
                    step = flow.throw(error)
                    continue
                if len(sent) > already:
                    break
                step = flow.send(value)
        except Denied as denied:
            self.note_refusal(denied)
            wait = denied.decision.retry_after or 0.0
            self.at(min(max(wait, 1.0), 3.0) * (0.5 + self.random.random()), again)
            return None
        except StopIteration as done:
            return done.value
        delay = 0.01 + 0.05 * self.random.random()
        self.sent.append(bound_of(sent[-1]))
        self.at(delay, partial(self.deliver, process, generation, flow, sent, again))
        return None

    def deliver(self, process, generation, flow, sent, again):
        self.sent.remove(bound_of(sent[-1]))
        self.arrive(process, generation, flow, sent, again)

    def note_refusal(self, _denied):
        self.refusals.append((self.now(), self.left()))

    def left(self):
        """The share of the quota that is free: neither counted nor reserved for calls that have not ended."""
        for each in (self.tokens, self.requests):
            each.expire(self.clock.now())
        tokens = (self.tokens.quota - self.tokens.used - self.held()) / self.tokens.quota
        return min(tokens, (self.requests.quota - self.requests.used) / self.requests.quota)

    def held(self):
        """What is reserved for calls that have not ended, and not counted by the provider."""
        held = self.needed() + sum(answer.surplus() for answer in self.running)
        if self.profile.charges == "usage":
            held += sum(max(0, bound - MEAN_ANSWER * self.factor) for bound in self.sent)
        return held

    def needed(self):
        """What the provider will still count for the answers that are being produced, and for requests on their way."""
        coming = len(self.sent) * (INPUT + min(MAX_TOKENS, MEAN_ANSWER * self.factor))
        return coming + sum(answer.needed() for answer in self.running)

    def observe(self, seconds, interval=0.25):
        """Let it run; returns the share of the quota that was counted or needed, on average over time."""
        shares, until = [], self.now() + seconds
        while self.now() < until:
            self.run(self.now() + interval)
            self.tokens.expire(self.clock.now())
            shares.append((self.tokens.used + self.needed()) / self.tokens.quota)
        return sum(shares) / len(shares)

    # ---- the provider ------------------------------------------------------------------------------------------------

    def arrive(self, process, generation, flow, sent, again):
        now, body = self.clock.now(), sent[-1]
        bound = bound_of(body)
        wanted = round(MEAN_ANSWER * self.factor * (0.5 + self.random.random()))
        length = min(bound, wanted)
        self.requests.add(now, 1)
        rule = "produced" if self.profile.output_counted == "produced" else self.profile.charges
        amount = INPUT if rule in ("usage", "produced") else INPUT + bound
        entry = self.tokens.add(now, amount)
        answer = Answering(self, process, generation, length, bound, rule, entry, amount)
        self.running.add(answer)
        self.at(0.01, partial(self.respond, process, generation, flow, answer))
        self.at(0.02, partial(answer.produce, again))

    def respond(self, process, generation, flow, answer, headers=()):
        if not self.alive(process, generation):
            return
        try:
            step = flow.send(ProviderResponse(200, headers, lambda: None, 200))
            while True:
                try:
                    value = self.gates[process].perform(step)
                except RateLimitError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(value)
        except StopIteration as done:
            answer.settlement = done.value.settlement
            answer.settlement.open()


def bound_of(body):
    """The longest output that a request allows."""
    return body.get("max_tokens") or body["inferenceConfig"]["maxTokens"]


class Answering:
    """An answer that is produced chunk by chunk."""

    def __init__(self, simulation, process, generation, length, bound, rule, entry, amount):
        self.simulation, self.process, self.generation = simulation, process, generation
        self.length, self.bound, self.rule, self.entry, self.amount = length, bound, rule, entry, amount
        self.produced = 0
        self.settlement = None

    def produce(self, again):
        """Produce what a chunk holds, and let the agent read it a moment later; a lost connection ends the answer."""
        world = self.simulation
        if not world.alive(self.process, self.generation):
            self.finish()
            return
        tokens = min(self.length - self.produced, round(world.speed * CHUNK_SECONDS))
        self.produced += tokens
        if self.rule == "produced":
            world.tokens.add(world.clock.now(), tokens)
        self.read(tokens)
        if self.produced < self.length:
            world.at(CHUNK_SECONDS, partial(self.produce, again))
            return
        self.finish()
        used = {"prompt_tokens": INPUT, "completion_tokens": self.produced, "input_tokens": INPUT,
                "output_tokens": self.produced, "inputTokens": INPUT, "outputTokens": self.produced,
                "promptTokenCount": INPUT, "candidatesTokenCount": self.produced}  # fmt: skip
        self.settlement.feed(b"data: " + json.dumps({"usage": used, "usageMetadata": used}).encode() + b"\n\n")
        self.settlement.end()
        world.gates[self.process].run(self.settlement.settle_flow())
        world.answers += 1
        world.at(world.random.random() * world.pause, again)

    def read(self, tokens):
        """Read a chunk."""
        if self.settlement.feed(b'data: {"delta": {"text": "%s"}}\n\n' % (b"abc" * tokens)):
            self.simulation.gates[self.process].run(self.settlement.renew_flow())

    def needed(self):
        """What the provider will still count until the answer has ended."""
        if self.rule == "produced":
            return self.length - self.produced
        return self.length if self.rule == "usage" else 0

    def surplus(self):
        """What is reserved beyond the length of the answer, which only its end tells."""
        return max(0, self.bound - self.length) if self.rule in ("usage", "produced") else 0

    def finish(self):
        """Count what the whole answer has cost, as the profile's rule says."""
        world = self.simulation
        world.running.discard(self)
        if self.rule == "usage":
            world.tokens.change(world.clock.now(), self.entry, self.amount, INPUT + self.produced)
        elif self.rule == "bound":
            rate = world.profile.output_rate("m")
            world.tokens.change(world.clock.now(), self.entry, self.amount, INPUT + self.produced * rate)
