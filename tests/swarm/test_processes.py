"""20 agents in processes of their own, on a real NATS and a real Redis server; servers and agents are killed."""

import time

import pytest

from tests.servers.nats import NatsServer
from tests.servers.process import until
from tests.servers.valkey import ValkeyServer
from tests.swarm.agents import Agent

AGENTS = 20


class AgentProcesses:
    """The processes of all agents, and requests to all of them."""

    def __init__(self, url):
        self.url = url
        self.agents = [Agent(url, f"agent-{number}") for number in range(AGENTS)]
        for agent in self.agents:
            agent.ready()

    def states(self):
        for agent in self.agents:
            agent.connection.send(["state"])
        return [agent.answer() for agent in self.agents]

    def all(self, condition, what, but=None):
        try:
            until(lambda: all(condition(state) for n, state in enumerate(self.states()) if n != but), what, 40)
        except AssertionError as error:
            wrong = {n: state for n, state in enumerate(self.states()) if n != but and not condition(state)}
            raise AssertionError(f"{error}: {wrong}") from None

    def replace(self, *numbers):
        for number in numbers:
            self.agents[number].kill()
            self.agents[number] = Agent(self.url, f"{self.agents[number].name}-again")
        for number in numbers:
            self.agents[number].ready()

    def close(self):
        for agent in self.agents:
            agent.close()


@pytest.mark.once
@pytest.mark.parametrize("kind", [NatsServer, ValkeyServer])
def test_twenty_agents_reduce_and_recover_through_crashes(kind):
    with kind() as server:
        processes = AgentProcesses(server.url)
        try:
            agents = processes.agents
            delays = []
            for number in range(5):
                name = f"r{number}"
                began = agents[number].ask("announce", name)
                processes.all(lambda state, name=name: name in state["heard"], "all reduced", but=number)
                heard = [state["heard"].get(name) for state in processes.states()]
                delays += [instant - began for place, instant in enumerate(heard) if place != number]
            assert len(delays) == 5 * (AGENTS - 1)
            assert max(delays) < 10 * 10**9, "bench/ measures the delay; here only that every agent is informed"

            server.kill()
            agents[1].ask("announce", "slow")
            assert processes.states()[1]["totals"]["slow"] == 50, (
                "the announcing agent reduces at once, with or without a server"
            )
            server.start()
            processes.all(lambda state: state["totals"]["slow"] == 50, "all reduced once the server is back")

            processes.replace(0, 1, 2)  # the one that announced it among them
            processes.all(lambda state: state["totals"]["slow"] == 50, "those that joined late reduced")

            server.kill()
            server.start()
            processes.all(lambda state: state["connected"], "all connected again")
            processes.replace(3, 4)  # agents publish reductions again that the server has lost
            processes.all(lambda state: state["totals"]["slow"] == 50, "those that joined later still reduced")

            before = [state["done"] for state in processes.states()]
            processes.all(
                lambda state: all(total == 100 for name, total in state["totals"].items() if name != "slow"), "recovery"
            )
            until(
                lambda: all(now["done"] > then for now, then in zip(processes.states(), before, strict=True)),
                "everybody making calls",
                40,
            )
            assert [state["errors"] for state in processes.states()] == [[]] * AGENTS
        finally:
            processes.close()


def test_an_agent_process_ends_with_its_parent():
    """Nothing is left behind by a test that fails."""
    with ValkeyServer() as server:
        agent = Agent(server.url, "orphan")
        agent.ready()
        agent.connection.close()
        deadline = time.monotonic() + 40
        while agent.process.is_alive() and time.monotonic() < deadline:
            agent.process.join(0.1)
        assert not agent.process.is_alive()
