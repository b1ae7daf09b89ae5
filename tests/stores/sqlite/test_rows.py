"""The fast paths that read and write states by position do the same as the codec of the core."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import limits
from tidegate.core._bounds import SECOND
from tidegate.core._limit import Limit
from tidegate.core.codec import dump, load
from tidegate.stores._sqlite.rows import reader_of, write_state

NOW = 1_750_000_000 * SECOND


def states_after(limit, charges):
    """Return the states of a limit after each charge or correction."""
    state, now = None, NOW
    for gap, cost, corrected in charges:
        now += gap
        state = (
            limit.rules.adjust(state, limit, -cost, now, now) if corrected else limit.charge(state, limit, cost, now)
        ) or state
        if state is not None:
            yield state


CHARGES = st.lists(st.tuples(st.integers(0, 3600 * SECOND), st.integers(1, 3), st.booleans()), min_size=1, max_size=8)


@given(limits().filter(lambda limit: not limit.rules.logged), CHARGES)
def test_states_are_written_and_read_as_the_codec_does(limit, charges):
    for state in states_after(limit, charges):
        written = write_state(state)
        assert written[: len(dump(state))] == dump(state)
        assert reader_of(limit)(limit, written) == load(limit, dump(state)) == state


@pytest.mark.parametrize("algorithm", ["token_bucket", "fixed_window", "sliding_window"])
def test_no_state_is_written_as_nothing(algorithm):
    limit = Limit(5, "1h", algorithm)
    assert write_state(None) == []
    assert reader_of(limit)(limit, []) is None
