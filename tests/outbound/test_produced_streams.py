"""Strict streams of a provider that counts output when it is produced never exceed its quota, however it is counted."""

import asyncio
from contextlib import suppress

import pytest

from tests.outbound.produced_streams import DELTA, QUOTA, TICK, Stream, StreamWorld
from tidegate import StoreUnavailable
from tidegate.stores import MemoryStore

SECONDS = 180


@pytest.mark.parametrize("algorithm", ["sliding_log", "token_bucket", "sliding_window", "fixed_window"])
def test_streams_whose_speed_is_known_do_not_exceed_a_window(algorithm):
    world = StreamWorld(algorithm)
    world.learn()
    world.run(SECONDS)
    assert world.most_in_a_window() <= QUOTA
    assert sum(tokens for _, tokens in world.produced) >= 2 * QUOTA  # each stream takes 40 s, and holds its maximum
    assert world.gate.metrics()["overrun"] == 0


@pytest.mark.parametrize("burst", [6000, QUOTA, 2 * QUOTA])
def test_streams_do_not_exceed_a_bucket(burst):
    world = StreamWorld(f"token_bucket burst={burst}")
    world.learn()
    world.run(SECONDS)
    assert world.lowest_level(burst) >= 0
    assert sum(tokens for _, tokens in world.produced) >= 1.5 * QUOTA


def test_a_bucket_of_output_that_counts_when_it_is_produced_is_a_log():
    world = StreamWorld("token_bucket burst=2000")
    requests, output = world.known.match("https://x.example").limits
    assert requests.algorithm == "sliding_log"
    assert (output.algorithm, output.quota, output.length) == ("sliding_log", 2000, 15_000_000)
    assert output.name == "output-tokens-1m"


@pytest.mark.parametrize("length", [4000, 12_000, 30_000])
def test_streams_longer_than_a_period_do_not_hold_all_of_it(length):
    """A stream produces 6000 tokens in a period; at most an eighth more is held."""
    world = StreamWorld("sliding_log", quota=40_000)
    world.learn(count=25)
    world.run(6 * 60, length)
    assert world.most_in_a_window() <= 40_000
    assert world.usage() >= 0.7 * 40_000
    world.produced = [each for each in world.produced if each[0] > world.clock.steady() - 120_000_000]
    assert sum(tokens for _, tokens in world.produced) / 2 >= 0.55 * 40_000


class FailingStore(MemoryStore):
    """A store that fails as long as it is told to."""

    fails = False

    def apply(self, *args):
        if self.fails:
            raise StoreUnavailable("down")
        return super().apply(*args)

    def apply_one(self, *args):
        if self.fails:
            raise StoreUnavailable("down")
        return super().apply_one(*args)


@pytest.mark.parametrize("outage", [(7.0, 8.0), (14.0, 15.5), (7.0, 31.0)])
def test_what_could_not_be_charged_during_an_outage_is_charged_later(outage):
    world = StreamWorld("sliding_log", FailingStore)
    world.start_all(4000)
    began, count = world.clock.now(), len(world.streams)
    while world.streams:
        world.store.fails = outage[0] < world.clock.now() + TICK - began <= outage[1]
        world.advance()
        world.store.fails = False
    assert world.usage() == 4000 * count


@pytest.mark.parametrize("steps", range(1, 5))
def test_what_arrived_is_charged_if_the_task_of_a_renewal_is_cancelled(steps):
    world = StreamWorld("sliding_log")
    stream = Stream(world, 4000)
    for _ in range(14):
        world.clock.advance(TICK)
        stream.proceed(50)
    world.clock.advance(TICK)
    assert stream.settlement.feed(DELTA * 50)
    flow = stream.settlement.renew_flow()
    step = next(flow)
    with suppress(asyncio.CancelledError, StopIteration):
        for _ in range(steps - 1):
            step = flow.send(world.gate.perform(step))
        flow.throw(asyncio.CancelledError())
    world.gate.run(stream.settlement.settle_flow())
    assert world.usage() >= 4000  # its output is unknown, since it has not ended
