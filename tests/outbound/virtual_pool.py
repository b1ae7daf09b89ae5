"""A pool of keys in virtual time: each key has quotas of its own, and all of them one spending ceiling per day."""

from functools import partial

from tests.outbound.virtual_model import INPUT, MEAN_ANSWER, PERIOD, Answering, Simulation, Window, bound_of
from tidegate.outbound import Providers
from tidegate.outbound._quota.exchange import ProviderResponse

SHARES = (2, 3, 4, 5, 6)  # of the quotas of five keys
DAY = 86_400
AGENTS = 200
MICROS = 10**6


class PoolSimulation(Simulation):
    """Agents that share five keys with unequal quotas, and a spending ceiling."""

    def __init__(self, prices, ceiling=25, tokens=10_000_000, requests=2500, **options):
        self.ceiling, self.price = ceiling * MICROS, prices
        self.tokens_given, self.requests_given, self.failed = tokens, requests, 0
        self.quotas = {
            f"k{share}": (tokens * share // sum(SHARES), requests * share // sum(SHARES)) for share in SHARES
        }
        self.tokens_of = {key: Window(quota) for key, (quota, _) in self.quotas.items()}
        self.requests_of = {key: Window(quota) for key, (_, quota) in self.quotas.items()}
        self.spent, self.most_charged = 0, 0
        self.money_left = []  # shares of the ceiling that were left when a call was refused for it
        super().__init__("openai", agents=AGENTS, tokens=tokens, requests=requests, **options)

    def providers(self, _limits, profile):
        known = {key: self.known_quotas(key) for key in self.quotas}
        members = [
            {"name": key, "limits": [f"{requests}/1m", f"{tokens}/1m unit=tokens name=tpm"]}
            for key, (tokens, requests) in known.items()
        ]
        prices = {"date": "2026-11-01", "models": {"m": {"input": self.price[0], "output": self.price[1]}}}
        settings = {"domain": "llm.test", "profile": profile, "strict": True, "price": prices}
        pool = {"pick": "weight", "members": members}
        return Providers.of({**settings, "spend": [f"{self.ceiling // MICROS}/day unit=usd"], "pool": pool})

    def known_quotas(self, key):
        """What the provider file says about a key."""
        return self.quotas[key]

    def next_day(self):
        """Let what is in flight end, and skip the rest of the day, in which all calls are refused."""
        while self.running:
            self.run(self.events[0][0])
        self.events.clear()
        self.clock.advance(DAY - self.clock.now() % DAY)
        for agent in range(AGENTS):
            process = agent % len(self.gates)
            again = partial(self.call, process, self.generation[process])
            self.at(self.random.random() * self.pause, again)
        self.spent, self.money_left = 0, []

    def charged(self):
        """What is spent or reserved, as the store counts it."""
        ceilings = self.gates[0].ceilings
        return ceilings[0].usage("all")["usd-day"].used if ceilings else 0

    def cost(self, output):
        """What a call costs, rounded up as the prices are."""
        return -(-(INPUT * self.price[0] * MICROS + output * self.price[1] * MICROS) // MICROS)

    def note_refusal(self, denied):
        if "usd-day" in denied.decision.violated:
            bounds = [*self.sent, *(answer.bound for answer in self.running)]
            reserved = sum(map(self.cost, bounds))
            self.money_left.append((self.ceiling - self.spent - reserved) / self.ceiling)
        else:
            super().note_refusal(denied)

    def left(self):
        """The share of all quotas that is free."""
        for each in (*self.tokens_of.values(), *self.requests_of.values()):
            each.expire(self.clock.now())
        tokens = self.tokens.quota - self.held() - sum(each.used for each in self.tokens_of.values())
        requests = self.requests.quota - sum(each.used for each in self.requests_of.values())
        return min(tokens / self.tokens.quota, requests / self.requests.quota)

    def arrive(self, process, generation, flow, sent, again):
        now, body = self.clock.now(), sent[-1]
        member = body["member"]
        if self.refuses(member, now):
            self.at(0.01, partial(self.refuse, process, generation, flow, sent, again))
            return
        wanted = round(MEAN_ANSWER * self.factor * (0.5 + self.random.random()))
        self.requests_of[member].add(now, 1)
        entry = self.tokens_of[member].add(now, INPUT)
        length = min(body["max_tokens"], wanted)
        answer = MemberAnswering(self, process, generation, length, bound_of(body), "usage", entry, INPUT)
        answer.member = member
        self.running.add(answer)
        self.most_charged = max(self.most_charged, self.charged())
        self.at(0.01, partial(self.respond, process, generation, flow, answer, self.headers(member, now)))
        self.at(0.02, partial(answer.produce, again))

    def refuses(self, _member, _now):
        """Whether the provider refuses a request that arrives; here it only counts."""
        return False

    def headers(self, _member, _now):
        """The headers of a response."""
        return ()


class HiddenPoolSimulation(PoolSimulation):
    """The same with quotas that no file knows: each key is configured with the sum of all quotas.

    The provider refuses what is over the quota of a key. With `reports`, it reports quotas as OpenAI does.
    """

    def __init__(self, prices, *, reports=True, **options):
        self.reports = reports
        self.refused = []  # when, and by which key
        super().__init__(prices, **options)

    def known_quotas(self, _key):
        return self.tokens_given, self.requests_given

    def refuses(self, member, now):
        windows = self.requests_of[member], self.tokens_of[member]
        for window in windows:
            window.expire(now)
        over = any(window.used + cost > window.quota for window, cost in zip(windows, (1, INPUT), strict=True))
        if over:
            self.refused.append((self.now(), member))
        return over

    def headers(self, member, now):
        if not self.reports:
            return ()
        found = []
        for unit, windows in (("requests", self.requests_of), ("tokens", self.tokens_of)):
            window = windows[member]
            window.expire(now)
            reset = window.entries[-1][0] + PERIOD - now if window.entries else 0
            found += [
                (f"x-ratelimit-limit-{unit}", str(window.quota)),
                (f"x-ratelimit-remaining-{unit}", str(max(0, window.quota - window.used))),
                (f"x-ratelimit-reset-{unit}", f"{reset:.3f}s"),
            ]
        return found

    def refuse(self, process, generation, flow, sent, again):
        """Answer 429: the call goes to another key, or fails."""
        if not self.alive(process, generation):
            return
        member, now = sent[-1]["member"], self.clock.now()
        windows = self.requests_of[member], self.tokens_of[member]
        entries = [window.entries[0][0] for window in windows if window.entries]
        wait = max(0.0, min(entries, default=now) + PERIOD - now)
        headers = [("retry-after", str(int(wait) + 1)), *self.headers(member, now)]
        value = ProviderResponse(429, headers, lambda: None, 429)
        if self.proceed(process, generation, flow, value, sent, again) is not None:
            self.failed += 1
            self.at(self.random.random() * self.pause, again)


class MemberAnswering(Answering):
    """An answer that is counted at one key."""

    member = ""

    def finish(self):
        world = self.simulation
        world.running.discard(self)
        world.spent += world.cost(self.produced)
        tokens = world.tokens_of[self.member]
        tokens.change(world.clock.now(), self.entry, self.amount, INPUT + self.produced)
