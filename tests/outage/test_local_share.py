"""`on_store_error: local`, in virtual time: N processes never admit more than the limit together.

Over-admission: 0, checked by an oracle over all admitted calls, in random schedules with lost requests, lost and late
answers, crashes, starts and exits.
"""

import os

import pytest

from tests.outage.simulation import Simulation, excess
from tidegate import Limit, Policy
from tidegate.core.decision import LocalDecision
from tidegate.stores.outage.local_share import MAX_KEYS

LIMITS = [
    Limit(20, "10s"),
    Limit(60, "10s", burst=10),
    Limit(20, "7s", algorithm="sliding_log"),
    Limit(20, "7s", algorithm="fixed_window"),
    Limit(20, "7s", algorithm="sliding_window"),
    Limit(40, "minute", algorithm="calendar_window"),
]
SEEDS = int(os.environ.get("FAULT_SEEDS", "3"))


def local(limit):
    return Policy("p", (limit,), on_store_error="local")


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_no_schedule_exceeds_the_limit(limit, seed, caplog):
    caplog.set_level("CRITICAL")
    simulation = Simulation(local(limit), seed, processes=1 + seed % 5)
    simulation.run(1500, busy=0.3, fault_rate=simulation.random.choice((0.003, 0.01, 0.03)))
    assert excess(limit, simulation.used) == 0
    assert simulation.used


def connected_processes(limit, processes=3, seconds=220, **options):
    """Return a simulation in which all processes know each other, past the middle of a term."""
    simulation = Simulation(local(limit), 1, processes, **options)
    for process in simulation.processes:
        simulation.call(process)
    wait(simulation, seconds)
    simulation.used.clear()
    return simulation


def wait(simulation, seconds, busy=()):
    for _ in range(round(seconds * 4)):
        simulation.clock.advance(0.25)
        simulation.maintain()
        for process in busy:
            while simulation.call(process):
                pass


def disconnect(simulation, processes, state="lost"):
    for process in processes:
        process.link.state = state
        simulation.call(process)


def test_disconnected_processes_together_spend_half_of_the_limit():
    limit = Limit(600, "1m")  # ten a second
    simulation = connected_processes(limit)
    disconnect(simulation, simulation.processes)
    wait(simulation, 6)  # no process relies on another any more
    simulation.used.clear()
    wait(simulation, 60, busy=simulation.processes)
    assert 280 <= len(simulation.used) <= 5 * 63  # of 600: what was refilled since the share started, and in a minute
    assert simulation.processes[0].guarded.metrics()["share_ppm"] == pytest.approx(10**6 / 6, abs=2)


def test_a_share_is_spent_only_after_the_others_stop_relying_on_the_process():
    simulation = connected_processes(Limit(600, "1m"))
    one = simulation.processes[0]
    disconnect(simulation, [one])
    answer = simulation.call(one)
    assert isinstance(answer, LocalDecision)
    assert not answer
    wait(simulation, 3.25, busy=[one])  # it posted in the beat before, and three more must end
    assert simulation.used == []
    wait(simulation, 3, busy=[one])
    assert simulation.used


def test_windows_admit_nothing_for_one_period_after_the_outage_starts():
    simulation = connected_processes(Limit(60, "20s", algorithm="sliding_log"))
    one = simulation.processes[0]
    disconnect(simulation, [one])
    wait(simulation, 20, busy=[one])
    assert simulation.used == []
    wait(simulation, 10, busy=[one])
    assert len(simulation.used) == 10  # a sixth of 60


def test_while_one_process_is_disconnected_the_others_have_half():
    limit = Limit(60, "10s", algorithm="sliding_log")
    simulation = connected_processes(limit)
    one, *others = simulation.processes
    disconnect(simulation, [one])
    wait(simulation, 20)
    simulation.used.clear()
    wait(simulation, 9.75, busy=others)
    assert len(simulation.used) == 30
    assert others[0].guarded.metrics()["halved"] == 1
    one.link.state = "up"
    wait(simulation, 25)
    assert others[0].guarded.metrics()["halved"] == 0
    simulation.used.clear()
    wait(simulation, 9, busy=others)
    assert len(simulation.used) == 60


def test_spending_of_a_share_is_charged_before_the_whole_limit_is_available_again():
    limit = Limit(60, "20s", algorithm="sliding_log")
    simulation = connected_processes(limit)
    one, *others = simulation.processes
    disconnect(simulation, [one])
    wait(simulation, 30, busy=[one])
    assert len(simulation.used) == 10
    one.link.state = "up"
    wait(simulation, 6)
    assert one.guarded.metrics()["keys_unsettled"] == 0
    assert others[0].guarded.metrics()["halved"] == 0
    seen = others[0].guarded.apply_one("peek", simulation.policy, "k", (0,))
    assert seen.remaining == 50
    wait(simulation, 1, busy=others)
    assert excess(limit, simulation.used) == 0


def test_spending_is_charged_to_a_full_log():
    limit = Limit(20, "60s", algorithm="sliding_log")
    simulation = connected_processes(limit, processes=2)
    one, other = simulation.processes
    disconnect(simulation, [one])
    wait(simulation, 70, busy=[one])
    wait(simulation, 1, busy=[other])
    assert len(simulation.used) == 5 + 10
    one.link.state = "up"
    wait(simulation, 8, busy=[other])
    assert one.guarded.metrics()["keys_unsettled"] == 0
    wait(simulation, 120, busy=[one, other])
    assert excess(limit, simulation.used) == 0


def test_a_process_that_starts_during_the_outage_denies():
    simulation = connected_processes(Limit(600, "1m"))
    late = simulation.join()
    late.link.state = "lost"
    wait(simulation, 30, busy=[late])
    assert simulation.used == []


def test_a_crashed_process_halves_the_limit_until_its_claims_end_a_closed_one_does_not():
    simulation = connected_processes(Limit(60, "10s", algorithm="sliding_log"), local_for=100)
    first, second, third = simulation.processes
    simulation.processes.remove(third)
    third.guarded.close()
    wait(simulation, 6)
    assert first.guarded.metrics()["halved"] == 0
    simulation.processes.remove(second)  # crashes
    wait(simulation, 6)
    assert first.guarded.metrics()["halved"] == 1
    wait(simulation, 300)
    assert first.guarded.metrics()["halved"] == 0


def test_an_outage_longer_than_the_claims_ends_in_denial():
    simulation = connected_processes(Limit(600, "1m"), local_for=100)
    disconnect(simulation, simulation.processes)
    wait(simulation, 400)
    simulation.used.clear()
    wait(simulation, 10, busy=simulation.processes)
    assert simulation.used == []


def test_spending_has_come_back_when_the_claims_end():
    """Found by random schedules: when claims end, the others have the whole limit and do not know of this spending."""
    limit = Limit(60, "20s", algorithm="sliding_log")
    simulation = connected_processes(
        limit, seconds=50, local_for=100
    )  # before the middle of the first term, which lasts 200 s
    one, *others = simulation.processes
    disconnect(simulation, [one])
    wait(simulation, 149, busy=[one])
    assert simulation.used
    wait(simulation, 3)
    wait(simulation, 30, busy=[one, *others])
    assert excess(limit, simulation.used) == 0


def test_a_process_that_cannot_settle_does_not_post():
    simulation = connected_processes(Limit(60, "20s", algorithm="sliding_log"))
    one, *others = simulation.processes
    disconnect(simulation, [one])
    wait(simulation, 30, busy=[one])
    one.link.state = "stubborn"
    wait(simulation, 10)
    assert one.guarded.metrics()["keys_unsettled"] == 1
    assert others[0].guarded.metrics()["halved"] == 1


def test_starts_and_ends_of_outages_admit_nothing_extra():
    """The disconnected process and the others call all the time, before, during and after the outage."""
    for limit in LIMITS:
        simulation = connected_processes(limit)
        one, *others = simulation.processes
        wait(simulation, 15, busy=others)
        for state in ("lost", "up", "deaf", "up"):
            one.link.state = state
            wait(simulation, 25, busy=[one, *others])
        assert excess(limit, simulation.used) == 0


def test_concurrency_limits_have_no_share():
    simulation = connected_processes(Limit(60, "10s", algorithm="concurrency"))
    disconnect(simulation, simulation.processes)
    wait(simulation, 60, busy=simulation.processes)
    assert simulation.used == []


def test_a_share_below_one_permit_denies_with_retry_after():
    simulation = connected_processes(Limit(5, "10s"))
    one = simulation.processes[0]
    disconnect(simulation, [one])
    wait(simulation, 20)
    answer = simulation.call(one)
    assert not answer
    assert answer.retry_after is not None


def test_a_cost_above_the_share_has_retry_after_a_cost_above_the_limit_has_none():
    simulation = connected_processes(Limit(60, "10s"))
    one = simulation.processes[0]
    disconnect(simulation, [one])
    wait(simulation, 20)
    assert simulation.call(one, cost=50).retry_after is not None
    assert simulation.call(one, cost=61).retry_after is None


def test_a_reservation_made_during_the_outage_is_settled_locally():
    simulation = connected_processes(Limit(600, "1m"))
    one = simulation.processes[0]
    disconnect(simulation, [one])
    wait(simulation, 60)
    reservation = one.guarded.apply_one("hold", simulation.policy, "k", (10,))
    assert reservation
    before = one.guarded.apply_one("peek", simulation.policy, "k", (0,)).remaining
    one.guarded.apply_one("adjust", simulation.policy, "k", (-4,), at=reservation.at)
    assert one.guarded.apply_one("peek", simulation.policy, "k", (0,)).remaining == before + 4
    assert one.guarded.metrics()["corrections_waiting"] == 0


def test_keys_beyond_the_maximum_are_denied(monkeypatch):
    assert MAX_KEYS >= 10_000
    monkeypatch.setattr("tidegate.stores.outage.fallback.MAX_KEYS", 3)
    simulation = connected_processes(Limit(600, "1m"))
    one = simulation.processes[0]
    disconnect(simulation, [one])
    wait(simulation, 60)
    assert [bool(simulation.call(one, key=str(n))) for n in range(5)] == [True, True, True, False, False]


def test_a_single_connected_process_has_the_whole_limit_from_its_first_call():
    simulation = Simulation(local(Limit(10, "1h")), 1, processes=1)
    assert [bool(simulation.call(simulation.processes[0])) for _ in range(11)] == [True] * 10 + [False]


def test_entries_of_peers_in_the_store_expire():
    simulation = connected_processes(Limit(10, "1s"), processes=2, seconds=60)
    entries = simulation.server.metrics()["entries"]
    wait(simulation, 300)
    assert simulation.server.metrics()["entries"] <= entries + 5
