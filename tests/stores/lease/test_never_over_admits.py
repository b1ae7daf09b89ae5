"""No schedule of crashes, delays and losses makes processes exceed a limit together, checked by true use times.

Shares have random sizes and are used at the worst moment, so correctness does not depend on how shares are sized.
Each of `FAULTS`, when injected, must be found within a few hundred schedules.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest

from tests.cases import cases
from tests.seeds import seeds
from tests.stores.lease.simulator import overspent, random_simulation
from tidegate.stores._lease import share, steps, terms
from tidegate.stores._lease.key_lease import LeaseEvent

ALL = ("token_bucket", "sliding_log", "fixed_window", "sliding_window", "calendar_window")
POLICIES = [*((algorithm,) for algorithm in ALL), ("token_bucket", "token_bucket"), ALL]
SCHEDULES = 300  # for each policy: 2,100 in all


@pytest.mark.seeds
@cases("algorithms", POLICIES)
def test_no_schedule_exceeds_a_limit(algorithms):
    local = 0
    for seed in seeds(SCHEDULES):
        simulation = random_simulation(seed, algorithms)
        assert overspent(simulation) is None, f"random_simulation({seed}, {algorithms})"
        local += simulation.local
    assert local > 4 * len(seeds(SCHEDULES)), "the schedules hardly use leases, so they show nothing"


@pytest.mark.seeds
@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window", "calendar_window"])
def test_windows_are_not_exceeded_if_some_processes_do_not_lease(algorithm):
    for seed in seeds(100):
        assert overspent(random_simulation(seed, (algorithm,), mixed=True)) is None, seed


@pytest.mark.seeds
def test_a_bucket_is_exceeded_by_no_more_than_documented_if_some_processes_do_not_lease():
    # By a margin because permits are used later than charged, and by another one when the bucket is full for the
    # processes that lease: then its state ends, and for the others it is full up to the larger burst.
    over = 0
    for seed in seeds(150):
        simulation = random_simulation(seed, ("token_bucket",), mixed=True)
        (limit,) = simulation.policy.limits
        margin = limit.burst - terms.compute_terms(simulation.policy, simulation.lease).strict.limits[0].burst
        assert overspent(simulation, (replace(limit, burst=limit.burst + 2 * margin),)) is None, seed
        over += overspent(simulation) is not None
    assert over, "nothing was exceeded: the documented bound is not needed"


LeasedShare, StoreRequest = share.LeasedShare, steps.StoreRequest


def start_at_reply(self, one, granted, decision, sent, received, span, init=LeasedShare.__init__):
    init(self, one, granted, decision, received, received, span)


def keep_limit(limit, length):
    return limit


def outlast_window(limits, costs, views, length):
    return length


def return_to_latest_charge(self, leftovers):
    for policy_leases, key, left in leftovers:
        yield StoreRequest("adjust", [(policy_leases.strict, key, tuple(-permits for permits in left.left))])


def return_twice(self, leftovers):
    for policy_leases, key, left in leftovers:
        for _ in range(2):
            yield StoreRequest(
                "adjust", [(policy_leases.strict, key, tuple(-permits for permits in left.left))], None, left.charged
            )


def return_used_permits(self, leftovers):
    for policy_leases, key, left in leftovers:
        yield StoreRequest(
            "adjust", [(policy_leases.strict, key, tuple(-permits for permits in left.granted))], None, left.charged
        )


def extend_share(self, new, now):
    if self.share is share.NO_SHARE:
        self.share = new
    else:
        self.share.units += new.units
        self.share.ends = max(self.share.ends, new.ends)
    self.on(LeaseEvent.GRANT)
    return []


LEASE = "tidegate.stores._lease"
FAULTS = [
    (f"{LEASE}.share.LeasedShare.__init__", start_at_reply, "token_bucket"),
    (f"{LEASE}.share.LeasedShare.__init__", start_at_reply, "sliding_log"),
    (f"{LEASE}.share.LeasedShare.__init__", start_at_reply, "fixed_window"),
    (f"{LEASE}.share.LeasedShare.__init__", start_at_reply, "sliding_window"),
    (f"{LEASE}.terms.make_stricter", keep_limit, "token_bucket"),
    (f"{LEASE}.terms.make_stricter", keep_limit, "sliding_log"),
    (f"{LEASE}.manager.share_lifetime", outlast_window, "fixed_window"),
    (f"{LEASE}.manager.share_lifetime", outlast_window, "calendar_window"),
    (f"{LEASE}.manager.share_lifetime", outlast_window, "sliding_window"),
    (f"{LEASE}.manager.LeaseManager.return_flow", return_to_latest_charge, "token_bucket"),
    (f"{LEASE}.manager.LeaseManager.return_flow", return_to_latest_charge, "sliding_log"),
    (f"{LEASE}.manager.LeaseManager.return_flow", return_to_latest_charge, "fixed_window"),
    (f"{LEASE}.manager.LeaseManager.return_flow", return_twice, "token_bucket"),
    (f"{LEASE}.manager.LeaseManager.return_flow", return_twice, "fixed_window"),
    (f"{LEASE}.manager.LeaseManager.return_flow", return_used_permits, "sliding_log"),
    (f"{LEASE}.key_lease.KeyLease.install", extend_share, "sliding_log"),
]


@pytest.mark.slow
@cases(("place", "fault", "algorithm"), FAULTS)
def test_an_injected_fault_is_found(place, fault, algorithm):
    with patch(place, fault):
        assert any(overspent(random_simulation(seed, (algorithm,))) for seed in range(400))
