"""The oracle over true use times: no schedule of crashes, delays and losses makes processes exceed a limit together.

Sizes of shares are drawn at random and used at the worst moment, so soundness does not rest on how shares are sized.
`FAULTS` are planted to see that the oracle would notice: each must be found among a few hundred schedules.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest

from tests.stores.lease.simulator import overspent, random_simulation
from tidegate.stores.lease import manager, share, terms

ALL = ("token_bucket", "sliding_log", "fixed_window", "sliding_window", "calendar_window")
POLICIES = [*((algorithm,) for algorithm in ALL), ("token_bucket", "token_bucket"), ALL]
SCHEDULES = 300  # for each policy: 2,100 in all
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("algorithms", POLICIES, ids=lambda names: "+".join(names) if len(names) < 3 else "all")
def test_no_schedule_exceeds_a_limit(algorithms, part):
    local = 0
    for seed in range(part, SCHEDULES, PARTS):
        simulation = random_simulation(seed, algorithms)
        assert overspent(simulation) is None, f"random_simulation({seed}, {algorithms})"
        local += simulation.local
    assert local > 300, "the schedules hardly lease at all, so they show nothing"


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window", "calendar_window"])
def test_windows_do_not_mind_processes_that_do_not_lease(algorithm):
    for seed in range(100):
        assert overspent(random_simulation(seed, (algorithm,), mixed=True)) is None, seed


def test_a_bucket_is_exceeded_by_no_more_than_documented_when_some_do_not_lease():
    over = 0
    for seed in range(150):
        simulation = random_simulation(seed, ("token_bucket",), mixed=True)
        (limit,) = simulation.policy.limits
        kept_back = limit.burst - terms.terms(simulation.policy, simulation.lease).strict.limits[0].burst
        assert overspent(simulation, (replace(limit, burst=limit.burst + kept_back),)) is None, seed
        over += overspent(simulation) is not None
    assert over, "nothing was exceeded at all: the documentation is too timid"


Share, strict, Step = share.LeasedShare, terms.strict, manager.StoreRequest


def from_the_reply(self, one, granted, decision, sent, received, span, init=Share.__init__):
    init(self, one, granted, decision, received, received, span)


def same_limit(limit, length):
    return limit


def past_the_window(limits, costs, views, length):
    return length


def to_the_latest(self, leftovers):
    for book, key, left in leftovers:
        yield Step("adjust", [(book.strict, key, tuple(-permits for permits in left.left))])


def twice(self, leftovers):
    for book, key, left in leftovers:
        for _ in range(2):
            yield Step("adjust", [(book.strict, key, tuple(-permits for permits in left.left))], None, left.charged)


def used_ones_too(self, leftovers):
    for book, key, left in leftovers:
        yield Step("adjust", [(book.strict, key, tuple(-permits for permits in left.granted))], None, left.charged)


def renewed_by_the_next(self, new, now):
    if self.share is share.NO_SHARE:
        self.share = new
    else:
        self.share.units += new.units
        self.share.ends = max(self.share.ends, new.ends)
    return []


LEASE = "tidegate.stores.lease"
FAULTS = [
    (f"{LEASE}.share.Share.__init__", from_the_reply, "token_bucket"),
    (f"{LEASE}.share.Share.__init__", from_the_reply, "sliding_log"),
    (f"{LEASE}.share.Share.__init__", from_the_reply, "fixed_window"),
    (f"{LEASE}.share.Share.__init__", from_the_reply, "sliding_window"),
    (f"{LEASE}.terms.strict", same_limit, "token_bucket"),
    (f"{LEASE}.terms.strict", same_limit, "sliding_log"),
    (f"{LEASE}.steps.span", past_the_window, "fixed_window"),
    (f"{LEASE}.steps.span", past_the_window, "calendar_window"),
    (f"{LEASE}.steps.span", past_the_window, "sliding_window"),
    (f"{LEASE}.steps.Desk.returning", to_the_latest, "token_bucket"),
    (f"{LEASE}.steps.Desk.returning", to_the_latest, "sliding_log"),
    (f"{LEASE}.steps.Desk.returning", to_the_latest, "fixed_window"),
    (f"{LEASE}.steps.Desk.returning", twice, "token_bucket"),
    (f"{LEASE}.steps.Desk.returning", twice, "fixed_window"),
    (f"{LEASE}.steps.Desk.returning", used_ones_too, "sliding_log"),
    (f"{LEASE}.share.Holder.install", renewed_by_the_next, "sliding_log"),
]


@pytest.mark.parametrize(("place", "fault", "algorithm"), FAULTS, ids=lambda part: getattr(part, "__name__", part))
def test_the_oracle_notices_a_planted_fault(place, fault, algorithm):
    with patch(place, fault):
        assert any(overspent(random_simulation(seed, (algorithm,))) for seed in range(400))
