"""Random histories of trees of depth 4, on every store, against an oracle that bills: equal to the last unit."""

from random import Random

import pytest

from tests.agents.oracle import CALLS, Billed, give_back_ended
from tests.cases import cases
from tests.seeds import seeds
from tidegate.agents import Run, RunDenied

UNITS = ("usd_micros", "tokens")
STEPS = 120


class History:
    """One random history: a tree of runs and its oracle, changed in the same way."""

    def __init__(self, seed, store, clock):
        self.random = Random(seed)
        self.clock = clock
        quotas = {"usd_micros": 2_000, "tokens": 3_000, CALLS: 90}
        self.root = Billed(None, quotas, self.now() + 600)
        self.runs = {self.root: Run("root", store=store, limits=self.texts(quotas), ttl=600, clock=clock)}
        self.open = []
        self.admitted = self.denied = 0

    def now(self):
        return self.clock.ns() / 1e9

    @staticmethod
    def texts(quotas):
        return [f"{quota}/run unit={unit}" for unit, quota in quotas.items()]

    def amounts(self, most):
        return {unit: self.random.randint(0, most) for unit in UNITS if self.random.random() < 0.8}

    def expect(self, node, cost, call):
        """Make a call that the oracle also decides; returns what it returned, or None if both denied."""
        fits = node.accepts(self.now()) and node.fits(cost)
        if not fits and node.accepts(self.now()) and give_back_ended(self.root, self.now()):
            fits = node.fits(cost)
        denied = None
        try:
            found = call()
        except RunDenied as error:
            denied = error
        if denied is not None:
            assert not fits, f"denied: {denied}"
            assert denied.node
            self.denied += 1
            return None
        assert fits, f"{cost} was admitted at {node.quotas} {node.used}"
        self.admitted += 1
        return found

    def reserve(self, node):
        cost = {CALLS: 1, **self.amounts(120)}
        found = self.expect(node, cost, lambda: self.runs[node].reserve(cost))
        if found is not None:
            node.add(cost)
            self.open.append((node, cost, found))

    def settle(self):
        if not self.open:
            return
        node, cost, held = self.open.pop(self.random.randrange(len(self.open)))
        if self.random.random() < 0.2:
            held.cancel()
            node.add({unit: -amount for unit, amount in cost.items()})
            return
        actual = {unit: self.random.randint(0, amount) for unit, amount in cost.items() if unit != CALLS}
        held.commit(actual)
        node.add({unit: amount - cost[unit] for unit, amount in actual.items()})

    def child(self, node):
        if len(node.line) > 3 or len(self.runs) > 25:
            return
        run, ttl = self.runs[node], self.random.choice((None, None, 20, 60))
        carve = (
            {unit: amount for unit, amount in self.amounts(500).items() if amount} if self.random.random() < 0.4 else {}
        )
        quotas = {
            unit: 1 + self.random.randint(0, 600) for unit in UNITS if unit not in carve and self.random.random() < 0.5
        }
        options = {"limits": self.texts(quotas), "ttl": ttl} | ({"carve": carve} if carve else {})
        made = self.expect(node, carve, lambda: run.child(f"child-{len(self.runs)}", **options))
        if made is None:
            return
        node.add(carve)
        ends = node.ends if ttl is None else min(node.ends, self.now() + ttl)
        self.runs[Billed(node, quotas | carve, ends, dict(carve))] = made

    def stop(self, node):
        if node.parent is not None and node.status == "open":
            self.runs[node].stop()
            node.status = "stopped"

    def close(self, node):
        if node.parent is not None:
            self.runs[node].close()
            node.close()

    def extend(self, node):
        if node.carved or node.status != "open" or self.now() >= node.ends:
            return
        more = {unit: self.random.randint(1, 200) for unit in node.quotas if self.random.random() < 0.5}
        ttl = self.random.choice((None, 30, 90))
        self.runs[node].extend(more, ttl=ttl)
        for unit, amount in more.items():
            node.quotas[unit] += amount
        node.ends = node.ends if ttl is None else max(node.ends, self.now() + ttl)

    def step(self):
        nodes = list(self.runs)
        node = self.random.choice(nodes)
        action = self.random.choices(
            (
                self.reserve,
                lambda _: self.settle(),
                self.child,
                self.stop,
                self.close,
                self.extend,
                self.wait,
                self.check,
            ),
            (40, 25, 14, 2, 4, 3, 4, 2),
        )[0]
        action(node)

    def wait(self, _):
        self.clock.advance(self.random.choice((1, 5, 15)))

    def check(self, _=None):
        """Compare the usage of every node."""
        give_back_ended(self.root, self.now())
        found = {node.id: node for _, node in self.runs[self.root].usage().walk()}
        for node, run in self.runs.items():
            used = found[run.id].used
            assert {unit: used.get(unit, 0) for unit in (*UNITS, CALLS)} == {
                unit: node.used.get(unit, 0) for unit in (*UNITS, CALLS)
            }, run.name
            for unit, quota in node.quotas.items():
                assert node.used.get(unit, 0) <= quota

    def run(self):
        for _ in range(STEPS):
            self.step()
        while self.open:
            self.settle()
        self.check()


@pytest.mark.seeds
@cases("seed", seeds(6))
def test_random_histories_are_billed_to_the_last_unit(store, clock, seed):
    history = History(seed, store, clock)
    history.run()
    assert history.admitted > 10
