"""`on_store_error: local` while the store answers: the whole limit is available; and spending that must not be lost."""

import pytest

from tests.outage.simulation import Simulation
from tests.outage.test_local_share import connected_processes, disconnect, local, wait
from tidegate import Limit

LOG = Limit(60, "10s", algorithm="sliding_log")


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="issue 33: after kill -9 of a process, calls of the others cost double until its claims end",
)
def test_after_a_crash_of_a_process_the_others_keep_the_whole_limit():
    simulation = connected_processes(LOG)
    del simulation.processes[1:]  # both others crash
    wait(simulation, 20)
    simulation.used.clear()
    wait(simulation, 9.75, busy=simulation.processes)
    assert len(simulation.used) == 60


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="issue 33: calls cost double until processes have seen each other"
)
def test_the_first_burst_of_two_processes_has_the_whole_limit():
    simulation = Simulation(local(Limit(10, "1m", algorithm="sliding_log")), seed=1, processes=2)
    for _ in range(10):
        for process in simulation.processes:
            simulation.call(process)
    assert len(simulation.used) == 10


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="issue 33: permits that are granted without the store while earlier ones are charged are forgotten",
)
def test_permits_granted_while_an_outage_settles_are_charged():
    simulation = connected_processes(LOG)
    one, other = simulation.processes[:2]
    disconnect(simulation, [one])
    wait(simulation, 30)
    assert simulation.call(one, cost=2)
    send = one.link.apply

    def lose_the_store_again(verb, asks, now=None, at=None):
        """Start the next outage while the first spending of this key is being charged."""
        decisions = send(verb, asks, now, at)
        if verb == "acquire" and asks[0][0] is simulation.policy and one.link.apply is not send:
            one.link.apply, one.link.state = send, "lost"
            assert simulation.call(one, cost=3), "there is still a share"
            one.link.state = "up"
        return decisions

    one.link.apply, one.link.state = lose_the_store_again, "up"
    wait(simulation, 6)
    assert one.link.apply == send, "the second outage has happened"
    assert one.guarded.metrics()["keys_unsettled"] == 0
    assert other.guarded.apply_one("peek", simulation.policy, "k", (0,)).used == [5]
