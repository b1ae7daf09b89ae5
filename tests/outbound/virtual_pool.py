"""A pool of keys in virtual time: each key has quotas of its own, and all of them one ceiling of money per day."""

from functools import partial

from tests.outbound.virtual_model import INPUT, Answering, Simulation, Window
from tidegate.outbound import Providers

SHARES = (2, 3, 4, 5, 6)  # of the quotas of five keys
DAY = 86_400
AGENTS = 200
MICROS = 10**6


class PoolSimulation(Simulation):
    """Agents that share five keys with unequal quotas, and a ceiling of money."""

    def __init__(self, prices, ceiling=25, tokens=10_000_000, requests=2500, **options):
        self.ceiling, self.price = ceiling * MICROS, prices
        self.quotas = {
            f"k{share}": (tokens * share // sum(SHARES), requests * share // sum(SHARES)) for share in SHARES
        }
        self.tokens_of = {key: Window(quota) for key, (quota, _) in self.quotas.items()}
        self.requests_of = {key: Window(quota) for key, (_, quota) in self.quotas.items()}
        self.spent, self.most_charged = 0, 0
        self.money_left = []  # shares of the ceiling that were left when a call was refused for it
        super().__init__("openai", agents=AGENTS, tokens=tokens, requests=requests, **options)

    def providers(self, _limits, profile):
        members = [
            {"name": key, "limits": [f"{requests}/1m", f"{tokens}/1m unit=tokens name=tpm"]}
            for key, (tokens, requests) in self.quotas.items()
        ]
        prices = {"date": "2026-11-01", "models": {"m": {"input": self.price[0], "output": self.price[1]}}}
        settings = {"domain": "llm.test", "profile": profile, "strict": True, "price": prices}
        pool = {"pick": "weight", "members": members}
        return Providers.of({**settings, "spend": [f"{self.ceiling // MICROS}/day unit=usd"], "pool": pool})

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
            needed = sum(self.cost(answer.length) for answer in self.running)
            self.money_left.append((self.ceiling - self.spent - needed) / self.ceiling)
        else:
            super().note_refusal(denied)

    def left(self):
        """The share of all quotas that is free."""
        for each in (*self.tokens_of.values(), *self.requests_of.values()):
            each.expire(self.clock.now())
        needed = self.needed() + self.surplus()
        tokens = self.tokens.quota - needed - sum(each.used for each in self.tokens_of.values())
        requests = self.requests.quota - sum(each.used for each in self.requests_of.values())
        return min(tokens / self.tokens.quota, requests / self.requests.quota)

    def answering(self, *call):
        return MemberAnswering(self, *call)

    def arrive(self, flow, answer, again):
        now, member = self.clock.now(), answer.body["member"]
        self.requests_of[member].add(now, 1)
        answer.entry = self.tokens_of[member].add(now, INPUT)
        self.most_charged = max(self.most_charged, self.charged())
        self.at(0.01, partial(self.respond, flow, answer))
        self.at(0.02, partial(answer.produce, again))


class MemberAnswering(Answering):
    """An answer that is counted at one key."""

    def finish(self):
        world = self.simulation
        world.running.discard(self)
        world.spent += world.cost(self.produced)
        tokens = world.tokens_of[self.body["member"]]
        tokens.change(world.clock.now(), self.entry, self.amount, INPUT + self.produced)
