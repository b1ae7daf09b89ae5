"""Windows of limits that change: what was used stays used until its window ends, whatever changes, however often."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import START
from tidegate import Limit
from tidegate.core.bounds import SECOND
from tidegate.core.codec import dump, limit_of, load
from tidegate.core.windows import MAX_OLDER_WINDOWS

MINUTE, HOUR, DAY = 60 * SECOND, 3600 * SECOND, 86_400 * SECOND


class Ledger:
    """The brute-force oracle: every admitted call since the key was last unused, and until when each counts.

    A call counts until its window ends, and what counts at a later admission also counts until that call's window ends.
    What has ended since the last admission counts on for a limit whose window holds that admission; what had ended
    before it counts again for one whose window begins before that admission's. A fixed window holds it while it is
    open, and is taken to begin before it if it is longer.
    """

    def __init__(self):
        self.calls = []  # [cost, counts until, admitted at, whether it had ended at a later admission]
        self.own = (0, 0)
        self.last = 0

    def alive(self, now):
        return any(until > now for _, until, _, _ in self.calls)

    def seen(self, now):
        """Return the instant that counts: a state without older windows knows only the start of its window."""
        if not self.alive(now):
            return now
        carries = any(gone or until > self.own[1] for _, until, _, gone in self.calls)
        return max(now, self.last if carries else self.own[0])

    def window(self, limit, now):
        now, alive = self.seen(now), self.alive(now)
        if limit.calendar is not None:
            return limit.calendar.window(now)
        start = self.own[0] if alive and now - self.own[0] < limit.length else now
        return start, start + limit.length

    def counted(self, limit, now):
        start = self.window(limit, now)[0]
        holds, back = start <= self.last, start < self.own[0]
        if limit.calendar is None:
            holds = start == self.own[0]
            back = holds and limit.length > self.own[1] - self.own[0]
        now = self.seen(now)
        if not self.alive(now):
            return []
        return [call for call in self.calls if call[1] > now or back or (holds and not call[3])]

    def used(self, limit, now):
        return sum(call[0] for call in self.counted(limit, now))

    def admit(self, limit, cost, now):
        if not self.alive(now):
            self.calls.clear()
        window = self.window(limit, now)
        counted = self.counted(limit, now)
        for call in self.calls:
            call[3] = call not in counted
            if not call[3]:
                call[1] = max(call[1], window[1])
        self.own, self.last = window, max(self.seen(now), window[0])
        self.calls.append([cost, window[1], now, False])

    def older(self):
        """Count the different ends of usage that lasts longer than the window of the last admission."""
        return len({until for _, until, _, _ in self.calls if until > self.own[1]})


quotas = st.integers(1, 30)
calendars = st.builds(
    lambda quota, period, zone, hour, day: Limit(
        quota, period, "calendar_window", name="l", timezone=zone,
        reset_hour=0 if period == "hour" else hour, reset_day=1 if period in ("hour", "day") else day,
    ),
    quotas,
    st.sampled_from(["hour", "day", "day", "week", "month", "year"]),
    st.sampled_from(["UTC", "Asia/Kolkata", "America/New_York"]),
    st.sampled_from([0, 0, 5, 18]),
    st.integers(1, 7),
)  # fmt: skip
fixed = st.builds(
    lambda quota, minutes: Limit(quota, f"{minutes}m", "fixed_window", name="l"),
    quotas,
    st.sampled_from([1, 2, 7, 60, 90]),
)
LIMITS = {"calendar_window": calendars, "fixed_window": fixed}
STEPS = {
    "calendar_window": st.sampled_from(
        [0, 0, 1, MINUTE, 20 * MINUTE, 3 * HOUR, 11 * HOUR, DAY, 5 * DAY, 20 * DAY, -HOUR]
    ),
    "fixed_window": st.sampled_from([0, 0, 1, 20 * SECOND, MINUTE, MINUTE - 1, 5 * MINUTE, 31 * MINUTE, HOUR, -SECOND]),
}


def view_of(limit, state, cost, now):
    return limit.rules.view(state, limit, cost, now)


@pytest.mark.parametrize("algorithm", LIMITS)
def test_every_answer_agrees_with_the_ledger_of_calls(algorithm):
    """Limits change at random instants, lowered, raised, back and forth; every answer is exact, also in between."""

    @given(versions=st.lists(LIMITS[algorithm], min_size=2, max_size=5), data=st.data())
    def check(versions, data):
        state, ledger, now, exact = None, Ledger(), START, True
        limit = versions[0]
        for _ in range(data.draw(st.integers(2, 16), label="steps")):
            now += data.draw(STEPS[algorithm], label="gap")
            if data.draw(st.booleans(), label="change"):
                limit = data.draw(st.sampled_from(versions), label="limit")
            cost = data.draw(st.one_of(st.integers(1, 3), st.integers(1, limit.quota + 1)), label="cost")
            state = state if state is None else load(limit_of(state), dump(state))
            before = ledger.used(limit, now)
            if exact:
                assert_agrees(limit, state, ledger, cost, now)
            after = limit.charge(state, limit, cost, now)
            if after is not None:
                assert before + cost <= limit.quota, "admitted more than the quota in force"
                ledger.admit(limit, cost, now)
                state = after
                start = ledger.window(limit, now)[0]
                assert sum(cost for cost, _, at, _ in ledger.calls if at >= start) <= limit.quota
            elif exact:
                assert before + cost > limit.quota, "denied needlessly"
            exact = exact and ledger.older() <= MAX_OLDER_WINDOWS

    check()


def assert_agrees(limit, state, ledger, cost, now):
    """Compare a view with the ledger: remaining, retry and reset."""
    remaining, retry, reset = view_of(limit, state, cost, now)
    assert remaining == max(0, limit.quota - ledger.used(limit, now))
    assert (retry == 0) == (cost <= remaining)
    if retry > 0:
        assert cost > limit.quota - ledger.used(limit, now + retry - 1)
        assert cost <= limit.quota - ledger.used(limit, now + retry)
    assert (retry == -1) == (cost > limit.quota)
    assert not ledger.alive(now + reset)
    assert not reset or ledger.alive(now + reset - 1)
    assert view_of(limit, state, cost, now + reset) == view_of(limit, None, cost, now + reset)
