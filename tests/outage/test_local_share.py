"""`on_store_error: local`, in virtual time.

While the store answers, it alone decides, and the whole limit is available. Without it, processes admit at most one
more limit per period together: checked by an oracle over all admitted calls, in random schedules with lost requests,
lost and late answers, crashes, starts and exits.
"""

import os
from dataclasses import replace

import pytest

from tests.cases import cases
from tests.outage.simulation import Simulation, excess
from tidegate import Limit, Policy
from tidegate.core._decision import LocalDecision
from tidegate.stores import MemoryStore
from tidegate.stores._outage import GuardedStore
from tidegate.stores._outage.local_share import MAX_KEYS
from tidegate.stores._outage.process_share import PROCESSES, READ_INTERVAL, VALUE_TTL
from tidegate.stores._values import MAX_LISTED
from tidegate.testing import ManualClock

LIMITS = [
    Limit(20, "10s"),
    Limit(60, "10s", burst=10),
    Limit(20, "7s", algorithm="sliding_log"),
    Limit(20, "7s", algorithm="fixed_window"),
    Limit(20, "7s", algorithm="sliding_window"),
    Limit(40, "minute", algorithm="calendar_window"),
]
LOG = Limit(60, "10s", algorithm="sliding_log")
SEEDS = int(os.environ.get("FAULT_SEEDS", "3"))


def local(limit):
    return Policy("p", (limit,), on_store_error="local")


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_no_schedule_admits_more_than_one_more_limit(limit, seed, caplog):
    caplog.set_level("CRITICAL")
    simulation = Simulation(local(limit), seed, processes=1 + seed % 5)
    fault_rate = simulation.random.choice((0.003, 0.01, 0.03))
    simulation.run(3000, busy=0.3, fault_rate=fault_rate)
    assert excess(limit, simulation.used) == 0, "with the store"
    counted = replace(limit, algorithm="sliding_log") if limit.algorithm == "fixed_window" else limit
    assert excess(counted, simulation.local) == 0, "without the store"
    assert simulation.used
    assert simulation.local


def connected_processes(limit, processes=3, seconds=90):
    """Return a simulation in which all processes have their part."""
    simulation = Simulation(local(limit), 1, processes)
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
        process.guarded.apply_one("peek", simulation.policy, "k", (1,))
        assert process.guarded.unavailable


def reconnect(simulation, processes):
    for process in processes:
        process.link.state = "up"
    wait(simulation, 5)
    assert not any(process.guarded.unavailable for process in processes)


# ---- while the store answers -----------------------------------------------------------------------------------------


def test_the_first_burst_of_two_processes_has_the_whole_limit():
    simulation = Simulation(local(Limit(10, "1m", algorithm="sliding_log")), seed=1, processes=2)
    for _ in range(10):
        for process in simulation.processes:
            simulation.call(process)
    assert len(simulation.used) == 10


def test_after_a_crash_of_a_process_the_others_keep_the_whole_limit():
    simulation = connected_processes(LOG)
    del simulation.processes[1:]  # both others crash
    wait(simulation, 20)
    simulation.used.clear()
    wait(simulation, 9.75, busy=simulation.processes)
    assert len(simulation.used) == 60


def test_while_one_process_is_disconnected_the_others_have_the_whole_limit():
    simulation = connected_processes(LOG)
    disconnect(simulation, simulation.processes[:1])
    wait(simulation, 9.75, busy=simulation.processes)
    assert len(simulation.used) == 60
    assert len(simulation.local) == 20


def quiet_steps(simulation, process):
    """Return for how many quarters of a second a disconnected process may still use its part."""
    steps = 0
    while process.guarded.apply_one("peek", simulation.policy, "k", (1,)).allowed:
        wait(simulation, 0.25)
        steps += 1
    return steps


def test_the_part_of_a_lost_process_is_used_by_others_only_when_its_last_permits_have_left_the_window():
    """A large burst is back long after a period."""
    limit = Limit(6, "10s", burst=200)
    simulation = connected_processes(limit, processes=2)
    disconnect(simulation, simulation.processes[:1])
    last = quiet_steps(simulation, simulation.processes[0]) - 1
    assert last > 0
    simulation = connected_processes(limit, processes=2)
    one, other = simulation.processes
    disconnect(simulation, [one])
    wait(simulation, last / 4)
    while simulation.call(one):
        pass
    assert len(simulation.local) == 100
    while other.guarded.metrics()["processes"] > 1:
        wait(simulation, 0.25)
    wait(simulation, READ_INTERVAL / 1e6)
    disconnect(simulation, [other])
    while simulation.call(other):
        pass
    assert len(simulation.local) == 300
    assert excess(limit, simulation.local) == 0


def test_an_idle_process_makes_at_most_one_call_in_ten_seconds():
    simulation = connected_processes(LOG)
    before = [process.link.reached for process in simulation.processes]
    wait(simulation, 600)
    made = [process.link.reached - count for process, count in zip(simulation.processes, before, strict=True)]
    assert all(0 < count <= 60 for count in made), made


def test_calls_go_to_the_store_as_they_are():
    """No lower limits, no doubled costs, nothing per policy."""
    simulation = connected_processes(LOG, processes=1)
    one = simulation.processes[0]
    before = one.link.reached
    for number in range(50):
        policy = Policy(f"policy {number}", (LOG,), on_store_error="local")
        assert one.guarded.apply_one("acquire", policy, "k", (60,)).limits[0].quota == 60
    wait(simulation, 1)
    assert one.link.reached == before + 50


def test_a_policy_that_is_not_local_counts_no_processes():
    simulation = Simulation(Policy("p", (LOG,), on_store_error="deny"), 1)
    for process in simulation.processes:
        simulation.call(process)
    wait(simulation, 60)
    assert simulation.server.list_values(PROCESSES) == {}


# ---- without the store -----------------------------------------------------------------------------------------------


def test_disconnected_processes_together_admit_one_limit():
    simulation = connected_processes(LOG)
    disconnect(simulation, simulation.processes)
    wait(simulation, 9.75, busy=simulation.processes)
    assert len(simulation.local) == 60
    wait(simulation, 10, busy=simulation.processes)
    assert len(simulation.local) == 120


def test_usage_is_kept_when_the_store_is_lost_again():
    limit = Limit(60, "1h", algorithm="sliding_log")
    simulation = connected_processes(limit)
    for _ in range(5):
        disconnect(simulation, simulation.processes)
        wait(simulation, 5, busy=simulation.processes)
        reconnect(simulation, simulation.processes)
    assert len(simulation.local) == 60


@cases("limit", [LOG, Limit(60, "10s"), Limit(60, "10s", algorithm="fixed_window"), Limit(60, "1h", "sliding_log")])
def test_what_was_admitted_is_charged_when_the_store_is_back(limit):
    simulation = connected_processes(limit)
    one, other = simulation.processes[:2]
    wait(simulation, 30)
    disconnect(simulation, [one])
    assert simulation.call(one, cost=7)
    assert simulation.call(one, key="another", cost=3)
    one.link.state = "up"
    one.due = 0
    simulation.clock.advance(0.06)
    simulation.maintain()
    assert one.guarded.metrics()["keys_unsettled"] == 0
    assert other.guarded.apply_one("peek", simulation.policy, "another", (0,)).used in ([3], [2])  # a bucket refills
    assert other.guarded.apply_one("peek", simulation.policy, "k", (0,)).used[0] >= 6


def test_spending_is_charged_to_a_full_log():
    simulation = connected_processes(LOG)
    one, other = simulation.processes[:2]
    disconnect(simulation, [one])
    assert simulation.call(one, cost=20)
    assert simulation.call(other, cost=60)
    reconnect(simulation, [one])
    assert other.guarded.apply_one("peek", simulation.policy, "k", (0,)).used == [80]


def test_what_has_left_its_window_is_not_charged():
    simulation = connected_processes(LOG)
    one, other = simulation.processes[:2]
    disconnect(simulation, [one])
    assert simulation.call(one, cost=20)
    wait(simulation, 20)
    reconnect(simulation, [one])
    assert other.guarded.apply_one("peek", simulation.policy, "k", (0,)).used == [0]


def test_permits_granted_while_an_outage_settles_are_charged():
    simulation = connected_processes(LOG)
    one, other = simulation.processes[:2]
    disconnect(simulation, [one])
    assert simulation.call(one, cost=2)
    send = one.link.apply

    def lose_the_store_again(verb, asks, now=None, at=None, writes=()):
        """Start the next outage while the first spending of this key is being charged."""
        decisions = send(verb, asks, now, at, writes)
        if verb == "acquire" and asks and asks[0][0] == simulation.policy and one.link.apply is not send:
            one.link.apply, one.link.state = send, "lost"
            assert simulation.call(one, cost=3), "there is still a share"
            one.link.state = "up"
        return decisions

    one.link.apply, one.link.state = lose_the_store_again, "up"
    wait(simulation, 6)
    assert one.link.apply == send, "the second outage has happened"
    assert one.guarded.metrics()["keys_unsettled"] == 0
    assert other.guarded.apply_one("peek", simulation.policy, "k", (0,)).used == [5]


def test_a_process_that_starts_during_the_outage_denies():
    simulation = connected_processes(LOG)
    disconnect(simulation, simulation.processes)
    late = simulation.join()
    late.link.state = "lost"
    answer = simulation.call(late)
    assert isinstance(answer, LocalDecision)
    assert not answer
    assert answer.retry_after is not None


def test_a_configured_number_of_processes_needs_no_count():
    store = GuardedStore(Simulation(local(LOG), 1).processes[0].link, processes=4, background=False)
    store.store.state = "lost"
    admitted = sum(bool(store.apply_one("acquire", local(LOG), "k", (1,))) for _ in range(60))
    assert admitted == 15
    assert store.metrics()["processes"] == 4
    assert store.metrics()["share_ppm"] == 250_000


def test_a_new_process_has_no_part_until_the_others_make_room():
    simulation = connected_processes(LOG, processes=2)
    late = simulation.join()
    simulation.call(late)
    simulation.maintain()
    parts = [process.guarded.metrics()["share_ppm"] for process in simulation.processes]
    assert parts == [500_000, 500_000, 0]
    wait(simulation, 2 * READ_INTERVAL / 10**6 + 5)
    parts = [process.guarded.metrics()["share_ppm"] for process in simulation.processes]
    assert parts == [333_333] * 3


def test_a_closed_process_frees_its_part_a_killed_one_when_its_value_ends():
    simulation = connected_processes(LOG)
    simulation.processes.pop().guarded.close()
    wait(simulation, 60)
    assert [process.guarded.metrics()["share_ppm"] for process in simulation.processes] == [500_000] * 2
    simulation.ended.append(simulation.processes.pop())  # killed
    wait(simulation, 60)
    assert [process.guarded.metrics()["share_ppm"] for process in simulation.processes] == [500_000]
    wait(simulation, VALUE_TTL / 10**6 + 60)
    assert [process.guarded.metrics()["share_ppm"] for process in simulation.processes] == [1_000_000]


def test_a_process_that_closes_with_usage_in_its_window_keeps_its_part():
    """Otherwise the others could admit it once more in the same period."""
    simulation = connected_processes(Limit(60, "1h", algorithm="sliding_log"), processes=2)
    one = simulation.processes[0]
    disconnect(simulation, [one])
    assert simulation.call(one, cost=30)
    reconnect(simulation, [one])
    simulation.processes.remove(one)
    one.guarded.close()
    wait(simulation, 120)
    assert simulation.processes[0].guarded.metrics()["share_ppm"] == 500_000


def test_an_outage_longer_than_the_value_ends_in_denial():
    simulation = connected_processes(LOG)
    disconnect(simulation, simulation.processes)
    wait(simulation, VALUE_TTL / 10**6)
    assert not any(simulation.call(process) for process in simulation.processes)


def test_concurrency_limits_have_no_share():
    simulation = connected_processes(Limit(60, "10s", algorithm="concurrency"))
    disconnect(simulation, simulation.processes)
    wait(simulation, 60, busy=simulation.processes)
    assert simulation.local == []


def test_a_share_below_one_permit_denies_with_retry_after():
    simulation = connected_processes(Limit(2, "10s"))
    one = simulation.processes[0]
    disconnect(simulation, [one])
    answer = simulation.call(one)
    assert not answer
    assert answer.retry_after is not None


def test_a_cost_above_the_share_has_retry_after_a_cost_above_the_limit_has_none():
    simulation = connected_processes(Limit(60, "10s"))
    one = simulation.processes[0]
    disconnect(simulation, [one])
    denied = simulation.call(one, cost=50)
    assert 0 < denied.retry_after <= 2
    assert simulation.call(one, cost=61).retry_after is None


def test_a_reservation_made_during_the_outage_is_settled_locally():
    simulation = connected_processes(Limit(600, "1m"))
    one = simulation.processes[0]
    disconnect(simulation, [one])
    reservation = one.guarded.apply_one("hold", simulation.policy, "k", (10,))
    assert reservation
    before = one.guarded.apply_one("peek", simulation.policy, "k", (0,)).remaining
    one.guarded.apply_one("adjust", simulation.policy, "k", (-4,), at=reservation.at)
    assert one.guarded.apply_one("peek", simulation.policy, "k", (0,)).remaining == before + 4
    assert one.guarded.metrics()["corrections_waiting"] == 0


def test_keys_beyond_the_maximum_are_denied(monkeypatch):
    assert MAX_KEYS >= 10_000
    monkeypatch.setattr("tidegate.stores._outage.fallback.MAX_KEYS", 3)
    simulation = connected_processes(Limit(600, "1m"))
    one = simulation.processes[0]
    disconnect(simulation, [one])
    assert [bool(simulation.call(one, key=str(n))) for n in range(5)] == [True, True, True, False, False]


def test_a_store_without_values_denies(caplog):
    class Plain(MemoryStore):
        keeps_values = False
        lost = False

        def apply(self, *arguments):
            if self.lost:
                raise OSError("down")
            return super().apply(*arguments)

        def apply_one(self, *arguments):
            return self.apply(arguments[0], (arguments[1:4],))[0]

    store = GuardedStore(Plain(), clock=ManualClock(), background=False)
    assert store.apply_one("acquire", local(LOG), "k", (1,))
    store.maintain()
    store.store.lost = True
    assert not store.apply_one("acquire", local(LOG), "k", (1,))
    assert "does not know how many processes" in caplog.text


def test_calls_admitted_while_the_part_is_being_lowered_count():
    """What is admitted between the read of the other values and the write of the own one keeps the part."""
    simulation = connected_processes(Limit(60, "1m", algorithm="fixed_window"), processes=1)
    one = simulation.processes[0]
    late = simulation.join()
    simulation.call(late)
    simulation.maintain()
    simulation.clock.advance(READ_INTERVAL / 10**6)
    read = one.link.list_values

    def lose_the_store_meanwhile(collection, now=None):
        values = read(collection, now)
        one.link.list_values = read
        disconnect(simulation, [one])
        while simulation.call(one):
            pass
        one.link.state = "up"
        return values

    one.link.list_values = lose_the_store_meanwhile
    one.guarded.maintain()
    assert one.link.list_values == read
    wait(simulation, 15)
    disconnect(simulation, [late])
    wait(simulation, 10, busy=[late])
    assert len(simulation.local) == 60


def test_a_store_that_has_lost_its_data_gives_nobody_more():
    """Found in a review: the first process that wrote its value again took the parts of the others."""
    simulation = connected_processes(Limit(60, "1m", algorithm="fixed_window"))
    disconnect(simulation, simulation.processes)
    wait(simulation, 1, busy=simulation.processes)
    assert len(simulation.local) == 60
    for value in simulation.server.list_values(PROCESSES):
        simulation.server.delete_value(PROCESSES, value)
    one = simulation.processes[0]
    reconnect(simulation, [one])
    wait(simulation, READ_INTERVAL / 10**6)
    disconnect(simulation, [one])
    wait(simulation, 20, busy=simulation.processes)
    assert len(simulation.local) == 60
    reconnect(simulation, simulation.processes)
    wait(simulation, 120)
    assert [process.guarded.metrics()["share_ppm"] for process in simulation.processes] == [333_333] * 3


def test_a_process_without_room_for_its_value_has_no_part():
    simulation = connected_processes(LOG, processes=1)
    for number in range(MAX_LISTED - 1):
        simulation.server.put_value(PROCESSES, f"killed {number}", b"0 1", VALUE_TTL / 10**6)
    late = simulation.join()
    assert simulation.call(late)
    late.guarded.maintain()
    assert (late.guarded.metrics()["share_ppm"], late.guarded.metrics()["losses"]) == (0, 0)
    disconnect(simulation, [late])
    assert not simulation.call(late)
