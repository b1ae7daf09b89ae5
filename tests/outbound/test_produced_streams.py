"""Strict streams of a provider that counts output when it is produced never exceed its quota, however it is counted."""

import pytest

from tests.outbound.produced_streams import QUOTA, StreamWorld

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
