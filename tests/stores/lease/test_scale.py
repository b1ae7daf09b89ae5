"""The simulation for docs/concepts/sizing.md: with churn and a lost shard, no limit is exceeded; the oracle works."""

import pytest

from bench.scale import Scenario, count_over, simulate
from tidegate import Limit

SMALL = Scenario("small", 1_000, 4, 2, 20, seconds=12)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("lease", [None, 3])
def test_churn_and_a_lost_shard_exceed_no_limit(seed, lease):
    found = simulate(SMALL._replace(churn=1, lost=True, lease=lease), seed)
    assert found.over == 0
    assert found.admitted < 0.95, "hardly anything was denied, so the limits were not tested"
    assert found.unanswered > 0.01, "the shard was not missed"
    assert found.lost_permits > 0, "the killed processes held nothing"


def test_a_shard_that_loses_its_state_exceeds_limits():
    assert simulate(SMALL._replace(emptied=True)).over > 0


def test_keys_with_one_process_need_fewer_store_calls():
    all_processes, one_home = simulate(SMALL), simulate(SMALL._replace(homes=1))
    assert one_home.calls < 0.75 * all_processes.calls
    assert all_processes.unanswered == one_home.unanswered == 0


@pytest.mark.parametrize(
    ("times", "over"),
    [
        ([0] * 20, 0),
        ([0] * 21, 1),
        ([0] * 20 + [499_999], 1),  # a permit every half second
        ([0] * 20 + [500_000], 0),
        ([10_000_000] * 20 + [0] * 20, 0),
    ],
)
def test_the_oracle_counts_every_admission_beyond_burst_and_rate(times, over):
    assert count_over(times, Limit(20, "10s")) == over
