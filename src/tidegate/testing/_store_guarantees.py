"""The guarantees of every store, one test function each; a failure shows its name and its docstring."""
# ruff: noqa: D401 - a docstring here states what a store does, not what the function does

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from tidegate._policy import Policy
from tidegate.core._algorithms import NEVER
from tidegate.core._bounds import MAX_INTEGER, SECOND
from tidegate.core._limit import Limit
from tidegate.errors import ConfigError
from tidegate.testing._reference import ExpectedAnswer, answer_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._policy import Key
    from tidegate.stores._base import Ask, Store

NOW: Final = 1_750_000_000 * SECOND + 123_456  # 2025-06-15 15:06:40 UTC and a fraction of a second
HOUR: Final = 3600 * SECOND
MIDNIGHT: Final = 1_750_032_000 * SECOND
JULY: Final = 1_751_328_000 * SECOND
WINDOW_CHANGES: Final = (  # limit before, limit after, an instant in a window of both, end of the window before
    ("month calendar_window", "day calendar_window", NOW, JULY),
    ("month calendar_window", "month calendar_window reset_day=10", NOW, JULY),
    ("day calendar_window", "month calendar_window", NOW, MIDNIGHT),
    ("day calendar_window", "day calendar_window timezone=Asia/Kolkata", NOW + 4 * HOUR, MIDNIGHT),
    ("day calendar_window", "day calendar_window reset_hour=16", NOW + HOUR, MIDNIGHT),
    ("week calendar_window", "week calendar_window reset_day=7", NOW, MIDNIGHT),
    ("1h fixed_window", "1m fixed_window", NOW + HOUR // 6, NOW + HOUR),
    ("1m fixed_window", "1h fixed_window", NOW + SECOND, NOW + 60 * SECOND),
)
CANCELLED_WAVES: Final = 60
REFUND_TIMEOUT: Final = 5.0  # seconds within which the charges of cancelled calls are refunded


def exactly_the_quota_is_admitted(store: Store) -> None:
    """Exactly the quota is admitted; then one more call at exactly `retry`, not one microsecond before."""
    for algorithm in ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency"):
        policy = Policy(f"quota-{algorithm}", (Limit(3, "1h", algorithm),))
        now = NOW
        for left in (2, 1, 0):
            answer = ask(store, "acquire", policy, "k", (1,), now)
            expect(answer, allowed=True, remaining=[left], what=f"{algorithm}: call {3 - left} of 3")
            now += SECOND
        answer = ask(store, "acquire", policy, "k", (1,), now)
        expect(answer, allowed=False, remaining=[0], what=f"{algorithm}: call 4 of 3")
        retry = answer.views[0][1]
        early = ask(store, "peek", policy, "k", (1,), now + retry - 1)
        expect(early, allowed=False, what=f"{algorithm}: a microsecond before retry ({retry})")
        due = ask(store, "acquire", policy, "k", (1,), now + retry)
        expect(due, allowed=True, what=f"{algorithm}: at retry ({retry})")


def a_cost_that_never_fits_is_denied_with_never(store: Store) -> None:
    """A cost above the capacity is denied with `retry` NEVER (-1), on a new key and on one in use."""
    policy = Policy("never", (Limit(3, "1h"), Limit(5, "1h", "sliding_log", name="log")))
    for _ in range(2):
        answer = ask(store, "acquire", policy, "k", (4, 1), NOW)
        expect(answer, allowed=False, retry=[NEVER, 0], what="4 of a quota of 3")
        expect(ask(store, "acquire", policy, "k", (1, 1), NOW), allowed=True, what="1 of each")


def all_or_nothing(store: Store) -> None:
    """A call that one limit denies is charged to no limit of the policy."""
    policy = Policy("all", (Limit(5, "1h", name="hourly"), Limit(1, "1m", "fixed_window", name="minutely")))
    expect(ask(store, "acquire", policy, "k", (1, 1), NOW), allowed=True, remaining=[4, 0], what="the first call")
    for _ in range(5):
        denied = ask(store, "acquire", policy, "k", (1, 1), NOW)
        expect(denied, allowed=False, remaining=[4, 0], what="calls that the second limit denies")
    after = ask(store, "acquire", policy, "k", (1, 0), NOW)
    expect(after, allowed=True, remaining=[3, 0], what="the first limit after denials by the second")


def a_batch_is_decided_together(store: Store) -> None:
    """The asks of one `apply` are all charged or none, for any policies and keys; answers are in order."""
    one, two = Policy("batch-1", (Limit(2, "1h"),)), Policy("batch-2", (Limit(1, "1h", "sliding_log"),))
    asks: tuple[Ask, ...] = ((one, "a", (1,)), (two, "a", (1,)), (one, "b", (2,)))
    first = [answer_of(decision) for decision in store.apply("acquire", asks, NOW)]
    left = [answer.views[0][0] for answer in first]
    check(all(answer.allowed for answer in first), f"a batch that fits was denied: {first}")
    check(left == [1, 0, 0], f"remaining of (a, a, b) should be [1, 0, 0], not {left}")
    second = [answer_of(decision) for decision in store.apply("acquire", asks, NOW)]
    check(not any(answer.allowed for answer in second), f"a batch that does not fit as a whole was allowed: {second}")
    expect(
        ask(store, "acquire", one, "a", (1,), NOW), allowed=True, remaining=[0], what="a call after the denied batch"
    )


def a_key_twice_in_a_batch_pays_both_costs(store: Store) -> None:
    """A key that is twice in a batch is charged both costs, and denied if they do not fit together."""
    for algorithm in ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency"):
        policy, equal = (Policy(f"twice-{algorithm}", (Limit(10, "1h", algorithm),)) for _ in range(2))
        for other in (policy, equal):
            key = "same" if other is policy else "equal"
            batch(store, "acquire", (policy, key, (1,)), (other, key, (2,)), what=f"{algorithm}: 1 and 2 of 10")
            left = ask(store, "peek", policy, key, (0,), NOW)
            expect(left, remaining=[7], what=f"{algorithm}: after 1 and 2 of 10 in one batch")
            too_much = ((policy, key, (4,)), (other, key, (4,)))
            for verb in ("peek", "acquire"):
                batch(store, verb, *too_much, allowed=False, what=f"{algorithm}: {verb} 4 and 4 of 7")
            batch(store, "adjust", (policy, key, (-1,)), (other, key, (-2,)), what=f"{algorithm}: refunds")
            left = ask(store, "peek", policy, key, (0,), NOW)
            expect(left, remaining=[10], what=f"{algorithm}: after refunds of 1 and 2 in one batch")


def policies_of_one_name_in_a_batch_pay_all_costs(store: Store) -> None:
    """Two policies of one name are one in a batch: it is charged to all their limits, and the sum to common limits."""
    for algorithm in ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency"):
        name = f"names-{algorithm}"
        hourly, daily, lower = (
            Policy(name, (Limit(quota, period, algorithm),)) for quota, period in ((10, "1h"), (15, "1d"), (8, "1h"))
        )
        both = Policy(name, (*hourly.limits, *daily.limits))
        batch(store, "acquire", (hourly, "k", (1,)), (daily, "k", (2,)), (both, "k", (1, 1)), what=f"{algorithm}: fits")
        left = ask(store, "peek", both, "k", (0, 0), NOW)
        expect(left, remaining=[8, 12], what=f"{algorithm}: after 1+1 of 10 per hour and 2+1 of 15 per day")
        too_much = ((both, "k", (1, 12)), (daily, "k", (1,)), (hourly, "k", (1,)))
        batch(store, "acquire", *too_much, allowed=False, what=f"{algorithm}: 13 of 12 per day")
        left = ask(store, "peek", both, "k", (0, 0), NOW)
        expect(left, remaining=[8, 12], what=f"{algorithm}: after a denied batch")
        batch(store, "acquire", (hourly, "l", (3,)), (lower, "l", (4,)), what=f"{algorithm}: 3 and 4 of 10 and 8")
        left = ask(store, "peek", lower, "l", (0,), NOW)
        expect(left, remaining=[1], what=f"{algorithm}: after 3 and 4 of 8")
        more = ((lower, "l", (1,)), (hourly, "l", (1,)))
        batch(store, "acquire", *more, allowed=False, what=f"{algorithm}: 1 and 1 more of 8")


def limits_that_differ_in_a_batch_are_refused(store: Store) -> None:
    """If two policies of one name have limits of one name that cannot be compared, the batch is a ConfigError."""
    first, second = (Policy("differ", (Limit(10, period, name="x"),)) for period in ("1h", "1m"))
    other = Policy("other", (Limit(10, "1h"),))
    try:
        store.apply("acquire", ((other, "k", (1,)), (first, "k", (1,)), (second, "k", (1,))), NOW)
    except ConfigError:
        pass
    else:
        check(holds=False, message="10/1h name=x and 10/1m name=x of one policy were charged in one batch")
    for policy in (other, first):
        expect(ask(store, "peek", policy, "k", (0,), NOW), remaining=[10], what="after a refused batch")


def a_batch_without_asks_is_decided(store: Store) -> None:
    """A call without asks has no decisions."""
    check(holds=not store.apply("acquire", (), NOW), message="apply without asks should return an empty list")


def a_denied_call_changes_nothing(store: Store) -> None:
    """Denials neither cost anything nor lengthen the wait."""
    for algorithm in ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency"):
        policy = Policy(f"denied-{algorithm}", (Limit(2, "1h", algorithm),))
        ask(store, "acquire", policy, "k", (2,), NOW)
        wait = ask(store, "acquire", policy, "k", (1,), NOW).views[0][1]
        for step in range(1, 4):
            answer = ask(store, "acquire", policy, "k", (1,), NOW + step * SECOND)
            expect(answer, allowed=False, retry=[wait - step * SECOND], what=f"{algorithm}: denial {step}")


def peek_changes_nothing(store: Store) -> None:
    """`peek` returns the answer of `acquire` and changes nothing, even on new keys."""
    policy = Policy("peek", (Limit(3, "1h"), Limit(3, "1h", "sliding_log", name="log")))
    for used in range(3):
        peeks = [ask(store, "peek", policy, "k", (1, 1), NOW) for _ in range(3)]
        check(peeks[0] == peeks[1] == peeks[2], f"peeks differ: {peeks}")
        taken = ask(store, "acquire", policy, "k", (1, 1), NOW)
        check(peeks[0] == taken, f"peek returned {peeks[0]}, acquire {taken}")
        expect(taken, allowed=True, remaining=[2 - used, 2 - used], what=f"call {used + 1} after peeks")


def keys_are_separate(store: Store) -> None:
    """Keys are opaque: different keys never collide, whatever their parts and characters."""
    policy = Policy("keys", (Limit(1, "1h"),))
    keys: list[Key] = [
        "a", "A", "a ", "a/b", ("a", "b"), ("a/b", "c"), ("a", "b/c"), ("a", "b", "c"), "a%2Fb", ("a", "", "b"),
        ("a:b", "c"), ("a", "b:c"), "", ("", ""), "*", "{a}", "a\nb", "a\0b", "é", "e\u0301", "\U0001f511", "k" * 300,
    ]  # fmt: skip
    for key in keys:
        expect(ask(store, "acquire", policy, key, (1,), NOW), allowed=True, what=f"the first call at {key!r}")
    for key in keys:
        expect(ask(store, "acquire", policy, key, (1,), NOW), allowed=False, what=f"the second call at {key!r}")


def policies_are_separate(store: Store) -> None:
    """The same key under another policy name is another key."""
    for name in ("p", "P", "p/k", "", "p:1"):
        policy = Policy(name, (Limit(1, "1h"),))
        expect(ask(store, "acquire", policy, "k", (1,), NOW), allowed=True, what=f"the first call under {name!r}")
        expect(ask(store, "acquire", policy, "k", (1,), NOW), allowed=False, what=f"the second call under {name!r}")


def a_changed_limit_refills_nothing(store: Store) -> None:
    """Windows and logs keep their usage (60 of 100, then 30: 0 left), buckets their permits, up to the new burst."""
    for algorithm in ("fixed_window", "sliding_window", "sliding_log", "concurrency"):
        before, after = (Policy(f"change-{algorithm}", (Limit(q, "1h", algorithm),)) for q in (100, 30))
        ask(store, "acquire", before, "k", (60,), NOW)
        expect(ask(store, "peek", after, "k", (0,), NOW), remaining=[-30], what=f"{algorithm}: 60 of 100 used, then 30")
        expect(ask(store, "peek", before, "k", (0,), NOW), remaining=[40], what=f"{algorithm}: and 100 again")
    before, after, more = (Policy("change-bucket", (Limit(q, "1h"),)) for q in (100, 30, 1000))
    ask(store, "acquire", before, "k", (50,), NOW)
    expect(ask(store, "peek", after, "k", (0,), NOW), remaining=[30], what="token_bucket: 50 of 100 left, then 30")
    expect(ask(store, "peek", more, "k", (0,), NOW), remaining=[50], what="token_bucket: 50 of 100 left, then 1000")


def a_changed_window_refills_nothing(store: Store) -> None:
    """Usage counts until its window ends, even if a changed limit has other windows."""
    for old, new, then, ends in WINDOW_CHANGES:
        before, after = (Policy(f"{old} to {new}", (Limit.parse(f"100/{text} name=w"),)) for text in (old, new))
        for key in ("k", "idle"):
            ask(store, "acquire", before, key, (60,), NOW)
        expect(ask(store, "peek", after, "k", (0,), then), remaining=[40], what=f"{old}, then {new}: 60 of 100 used")
        denied = ask(store, "acquire", after, "k", (41,), then)
        expect(denied, allowed=False, retry=[ends - then], reset=[ends - then], what=f"{old}, then {new}: 41 more")
        more = ask(store, "acquire", after, "k", (40,), then)
        expect(more, allowed=True, remaining=[0], what=f"{old}, then {new}: 40 more")
        back = ask(store, "acquire", before, "k", (1,), then)
        expect(back, allowed=False, remaining=[0], what=f"{old}, then {new}, then {old} again")
        early = ask(store, "peek", after, "idle", (41,), ends - 1)
        expect(early, allowed=False, what=f"{old}, then {new}: a microsecond before the window ends")
        expect(ask(store, "peek", after, "idle", (41,), ends), allowed=True, what=f"{old}, then {new}: when it ends")
        over = then + back.views[0][2]
        early = ask(store, "peek", before, "k", (100,), over - 1)
        expect(early, allowed=False, what=f"{old}, then {new}, then {old}: a microsecond before reset")
        expect(ask(store, "acquire", before, "k", (100,), over), allowed=True, what=f"{old}, then {new}: at reset")


def a_changed_policy_keeps_its_other_limits(store: Store) -> None:
    """Limits are identified by name and algorithm: adding, removing and reordering others does not change them."""
    hour, minute = Limit(5, "1h"), Limit(2, "1m", "sliding_log")
    one, both, reordered = (Policy("set", limits) for limits in ((hour,), (hour, minute), (minute, hour)))
    ask(store, "acquire", one, "k", (2,), NOW)
    expect(ask(store, "acquire", both, "k", (1, 1), NOW), remaining=[2, 1], what="a limit added")
    expect(ask(store, "acquire", reordered, "k", (1, 1), NOW), remaining=[0, 1], what="limits in another order")
    expect(ask(store, "acquire", one, "k", (1,), NOW), remaining=[0], what="a limit removed")
    expect(ask(store, "peek", both, "k", (0, 0), NOW), remaining=[0, 0], what="and back again")
    other = Policy("set", (Limit(5, "1h", name="other"), Limit(5, "1h", "fixed_window")))
    expect(ask(store, "acquire", other, "k", (1, 1), NOW), remaining=[4, 4], what="another name, another algorithm")
    expect(ask(store, "peek", one, "k", (0,), NOW), remaining=[0], what="the limit as before")


def a_clock_that_steps_back_credits_nothing(store: Store) -> None:
    """Time does not run backwards for a key, and the same time is not credited twice."""
    policy = Policy("back", (Limit(60, "1m"), Limit(60, "1m", "sliding_log", name="log")))
    ask(store, "acquire", policy, "k", (60, 60), NOW)
    for at, left in ((NOW - 30 * SECOND, 0), (NOW, 0), (NOW + SECOND, 1), (NOW - 5 * SECOND, 1), (NOW + SECOND, 1)):
        answer = ask(store, "peek", policy, "k", (0, 0), at)
        where = (at - NOW) // SECOND
        if where >= 0:
            expect(answer, remaining=[left, 0], what=f"{where} s after 60 of 60 were used")
        else:
            expect(answer, remaining=[0, 0], what=f"{-where} s before 60 of 60 were used")
    expect(ask(store, "acquire", policy, "k", (1, 0), NOW + SECOND), allowed=True, what="the permit of one second")
    expect(ask(store, "acquire", policy, "k", (1, 0), NOW), allowed=False, what="after a step back of one second")
    expect(ask(store, "acquire", policy, "k", (1, 0), NOW + SECOND), allowed=False, what="the same second once more")


def a_refund_restores_permits(store: Store) -> None:
    """`adjust` by a negative number refunds the latest charges, at most all; by a positive number it charges."""
    for algorithm in ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency"):
        policy = Policy(f"refund-{algorithm}", (Limit(10, "1h", algorithm),))
        ask(store, "acquire", policy, "k", (6,), NOW)
        expect(ask(store, "adjust", policy, "k", (-2,), NOW), remaining=[6], what=f"{algorithm}: 2 of 6 refunded")
        expect(ask(store, "adjust", policy, "k", (9,), NOW), remaining=[-3], what=f"{algorithm}: 9 more taken")
        denied = ask(store, "acquire", policy, "k", (1,), NOW)
        expect(denied, allowed=False, what=f"{algorithm}: one more, with 13 of 10 taken")
        expect(ask(store, "adjust", policy, "k", (-99,), NOW), remaining=[10], what=f"{algorithm}: 99 of 13 refunded")
        new = ask(store, "adjust", policy, "new", (-5,), NOW)
        expect(new, remaining=[10], what=f"{algorithm}: nothing to refund")


def a_held_charge_is_corrected_at_its_instant(store: Store) -> None:
    """`hold`, then `adjust` with its instant, have the effect of charging the actual cost, while the charge counts."""
    for algorithm in ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency"):
        policy = Policy(f"hold-{algorithm}", (Limit(100, "100s", algorithm),))
        start = NOW - NOW % (100 * SECOND)
        ask(store, "hold", policy, "k", (60,), start)
        ask(store, "hold", policy, "k", (30,), start + 10 * SECOND)
        refilled = 10 if algorithm == "token_bucket" else 0
        expect(
            ask(store, "adjust", policy, "k", (-40,), start + 10 * SECOND, start),
            remaining=[10 + refilled + 40], what=f"{algorithm}: 60 held, 20 used",
        )  # fmt: skip
        expect(
            ask(store, "adjust", policy, "k", (5,), start + 10 * SECOND, start + 10 * SECOND),
            remaining=[5 + refilled + 40], what=f"{algorithm}: 30 held, 35 used",
        )  # fmt: skip
        if algorithm in ("sliding_log", "concurrency"):
            half = ask(store, "peek", policy, "k", (0,), start + 100 * SECOND)
            expect(half, remaining=[65], what=f"{algorithm}: the first charge left, the second counts")
        late = ask(store, "adjust", policy, "k", (-10,), start + 300 * SECOND, start)
        expect(late, remaining=[100], what=f"{algorithm}: refunded after it had ended")


def a_refund_does_not_exceed_the_burst(store: Store) -> None:
    """A token bucket refunds no more than it would hold had the permits never been taken."""
    policy = Policy("spill", (Limit(10, "10s"),))
    ask(store, "hold", policy, "k", (5,), NOW)
    ask(store, "acquire", policy, "k", (9,), NOW + 4 * SECOND)
    after = ask(store, "adjust", policy, "k", (-5,), NOW + 4 * SECOND, NOW)
    expect(after, remaining=[1], what="5 held, 4 refilled, 9 taken, 5 refunded: 4 of them would have overflowed")


def reset_clears_a_key(store: Store) -> None:
    """After `reset` a key is like a new key, and other keys are unchanged."""
    limits = tuple(Limit(2, "1h", name, name=name) for name in ("token_bucket", "fixed_window", "sliding_log"))
    policy = Policy("reset", limits)
    for key in ("k", "other"):
        ask(store, "acquire", policy, key, (2, 2, 2), NOW)
    expect(ask(store, "reset", policy, "k", (0, 0, 0), NOW), allowed=True, remaining=[2, 2, 2], what="reset")
    expect(ask(store, "acquire", policy, "k", (1, 1, 1), NOW), remaining=[1, 1, 1], what="a call after reset")
    expect(ask(store, "peek", policy, "other", (0, 0, 0), NOW), remaining=[0, 0, 0], what="another key")


def usage_ends_exactly_at_reset(store: Store) -> None:
    """At exactly `reset` all permits are available again; one microsecond before, they are not."""
    for algorithm in ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency"):
        policy = Policy(f"end-{algorithm}", (Limit(1, "1h", algorithm),))
        ends = ask(store, "acquire", policy, "k", (1,), NOW).views[0][2]
        early = ask(store, "peek", policy, "k", (1,), NOW + ends - 1)
        expect(early, allowed=False, reset=[1], what=f"{algorithm}: a microsecond before reset ({ends})")
        ended = ask(store, "peek", policy, "k", (0,), NOW + ends)
        expect(ended, remaining=[1], reset=[0], what=f"{algorithm}: at reset")
    calendar = Policy("end-calendar", (Limit(1, "day", "calendar_window", timezone="Europe/Berlin"),))
    midnight = 1_750_024_800 * SECOND
    answer = ask(store, "acquire", calendar, "k", (1,), NOW)
    expect(answer, allowed=True, reset=[midnight - NOW], what="calendar_window: until midnight in Berlin")
    early = ask(store, "acquire", calendar, "k", (1,), midnight - 1)
    expect(early, allowed=False, what="calendar_window: before midnight")
    expect(ask(store, "acquire", calendar, "k", (1,), midnight), allowed=True, what="calendar_window: at midnight")


def slots_are_released(store: Store) -> None:
    """`adjust` releases slots of `concurrency`, those of an instant or the oldest; they also end with their lease."""
    policy = Policy("slots", (Limit(2, "1h", "concurrency"),))
    ask(store, "acquire", policy, "k", (1,), NOW)
    ask(store, "acquire", policy, "k", (1,), NOW + SECOND)
    expect(ask(store, "acquire", policy, "k", (1,), NOW + SECOND), allowed=False, what="a third of two slots")
    released = ask(store, "adjust", policy, "k", (-1,), NOW + SECOND, NOW + SECOND)
    expect(released, remaining=[1], reset=[HOUR - SECOND], what="the second slot released by its instant")
    expect(ask(store, "acquire", policy, "k", (1,), NOW + 2 * SECOND), remaining=[0], what="a slot taken again")
    oldest = ask(store, "adjust", policy, "k", (-1,), NOW + 2 * SECOND)
    expect(oldest, remaining=[1], reset=[HOUR], what="the slot whose lease ends first released")
    ended = ask(store, "peek", policy, "k", (0,), NOW + 2 * SECOND + HOUR)
    expect(ended, remaining=[2], what="the lease of a crashed holder ended")


def large_costs_are_one_entry(store: Store) -> None:
    """A large cost is one entry: 50,000 tokens are not 50,000 entries, and counting is exact."""
    limits = (Limit(10**9, "1h", name="bucket"), Limit(10**9, "1h", "sliding_log", name="log"))
    policy = Policy("large", limits)
    for _ in range(5):
        ask(store, "acquire", policy, "k", (50_000, 50_000), NOW)
    after = ask(store, "acquire", policy, "k", (10**9 - 250_000, 10**9 - 250_000), NOW)
    expect(after, allowed=True, remaining=[0, 0], what="10**9 in all")


def counting_is_exact_up_to_the_bound(store: Store) -> None:
    """Counting is exact to the last permit up to 2**53 - 1; nothing is rounded, nothing overflows."""
    limits = (
        Limit(MAX_INTEGER, "1s", "fixed_window", name="fixed"),
        Limit(MAX_INTEGER, "1s", "sliding_log", name="log"),
        Limit(MAX_INTEGER, "1s", "concurrency", name="slots"),
        Limit(MAX_INTEGER, "1us", burst=MAX_INTEGER, name="bucket"),
        Limit(MAX_INTEGER // SECOND, "1s", "sliding_window", name="sliding"),
    )
    policy = Policy("bound", limits)
    now = NOW - NOW % SECOND
    first = ask(store, "acquire", policy, "k", tuple(limit.quota - 1 for limit in limits), now)
    expect(first, allowed=True, remaining=[1] * 5, what="all permits but one")
    expect(ask(store, "acquire", policy, "k", (2,) * 5, now), allowed=False, what="two, with one left")
    expect(ask(store, "acquire", policy, "k", (1,) * 5, now), allowed=True, remaining=[0] * 5, what="the last permit")
    slow = Policy("bound-slow", (Limit(1, f"{2**52}us"),))
    ask(store, "acquire", slow, "k", (1,), now)
    expect(ask(store, "peek", slow, "k", (1,), now + 1), retry=[2**52 - 1], what="one permit in 142 years")
    idle = Policy("bound-idle", (Limit(MAX_INTEGER, "1us", burst=MAX_INTEGER),))
    ask(store, "acquire", idle, "k", (MAX_INTEGER,), now)
    expect(
        ask(store, "peek", idle, "k", (0,), now + 10**14),
        remaining=[MAX_INTEGER],
        what="a fast bucket after three years",
    )


def threads_are_decided_one_after_another(store: Store) -> None:
    """Calls from several threads are serialised: exactly the quota is admitted."""
    policy = Policy("threads", (Limit(20, "1h"), Limit(20, "1h", "sliding_log", name="log")))

    def call(_: int) -> bool:
        return ask(store, "acquire", policy, "k", (1, 1), NOW).allowed

    with ThreadPoolExecutor(4) as threads:
        admitted = sum(threads.map(call, range(60)))
    check(admitted == 20, f"60 calls by 4 threads at a quota of 20: {admitted} were admitted")  # noqa: PLR2004 - as above


def a_cancelled_call_is_refunded(store: Store) -> None:
    """Only calls that received an answer are charged: a call whose task is cancelled at any time is refunded soon."""
    algorithms = ("fixed_window", "sliding_log", "concurrency")
    policy = Policy("cancelled", tuple(Limit(10**6, "1h", algorithm, name=algorithm) for algorithm in algorithms))
    with ThreadPoolExecutor(1) as thread:  # an event loop may be running in this one
        charged, answered = thread.submit(asyncio.run, _cancel_calls(store, policy)).result()
    check(
        charged == [answered] * len(algorithms),
        f"{answered} calls received an answer, but {charged} permits are charged",
    )


async def _cancel_calls(store: Store, policy: Policy) -> tuple[list[int], int]:
    """Cancel tasks after some iterations of the event loop; return the charged permits and the answered calls."""
    answered = 0

    async def call(verb: str) -> None:
        nonlocal answered
        decisions = await store.apply_async(verb, ((policy, "k", (1, 1, 1)),), NOW)
        answered += sum(map(bool, decisions))

    async def count() -> list[int]:
        seen = (await store.apply_async("peek", ((policy, "k", (0, 0, 0)),), NOW))[0]
        return [limit.quota - left for limit, (left, _, _) in zip(policy.limits, seen.views, strict=True)]

    await count()
    for number in range(CANCELLED_WAVES):
        tasks = [asyncio.ensure_future(call("hold" if number % 4 == 0 else "acquire")) for _ in range(4)]
        for _ in range(number % 12):
            await asyncio.sleep(0)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    until = loop.time() + REFUND_TIMEOUT
    charged = await count()
    while charged != [answered] * len(charged) and loop.time() < until:
        await asyncio.sleep(0.001)
        charged = await count()
    return charged, answered


def ask(
    store: Store, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int, at: int | None = None
) -> ExpectedAnswer:
    """Apply a verb to one key."""
    answer = answer_of(store.apply(verb, ((policy, key, costs),), now, at)[0])
    check(answer.at == now, f"decided at {answer.at}, though asked to decide at {now}")
    return answer


def batch(store: Store, verb: str, *asks: Ask, what: str, allowed: bool = True) -> None:
    """Apply a verb to several keys, and check whether all are allowed, or none."""
    answers = [answer_of(decision) for decision in store.apply(verb, asks, NOW)]
    check(len(answers) == len(asks), f"{what}: {len(answers)} answers to {len(asks)} asks")
    for answer, (policy, _, _) in zip(answers, asks, strict=True):
        expect(answer, allowed=allowed, what=what)
        check(len(answer.views) == len(policy.limits), f"{what}: an answer has {len(answer.views)} limits: {answer}")


def expect(
    answer: ExpectedAnswer,
    *,
    what: str,
    allowed: bool | None = None,
    remaining: list[int] | None = None,
    retry: list[int] | None = None,
    reset: list[int] | None = None,
) -> None:
    """Compare the given values with the answer."""
    if allowed is not None:
        check(answer.allowed == allowed, f"{what}: should be {'allowed' if allowed else 'denied'}, got {answer}")
    for place, (name, numbers) in enumerate((("remaining", remaining), ("retry", retry), ("reset", reset))):
        if numbers is not None:
            got = [view[place] for view in answer.views]
            check(got == numbers, f"{what}: {name} should be {numbers}, not {got}")


def check(holds: bool, message: str) -> None:  # noqa: FBT001 - an assertion that python -O keeps
    """Raise AssertionError unless the condition holds."""
    if not holds:
        raise AssertionError(message)


GUARANTEES: Final[tuple[Callable[[Store], None], ...]] = (
    exactly_the_quota_is_admitted,
    a_cost_that_never_fits_is_denied_with_never,
    all_or_nothing,
    a_batch_is_decided_together,
    a_key_twice_in_a_batch_pays_both_costs,
    policies_of_one_name_in_a_batch_pay_all_costs,
    limits_that_differ_in_a_batch_are_refused,
    a_batch_without_asks_is_decided,
    a_denied_call_changes_nothing,
    peek_changes_nothing,
    keys_are_separate,
    policies_are_separate,
    a_changed_limit_refills_nothing,
    a_changed_window_refills_nothing,
    a_changed_policy_keeps_its_other_limits,
    a_clock_that_steps_back_credits_nothing,
    a_refund_restores_permits,
    a_held_charge_is_corrected_at_its_instant,
    a_refund_does_not_exceed_the_burst,
    reset_clears_a_key,
    usage_ends_exactly_at_reset,
    slots_are_released,
    large_costs_are_one_entry,
    counting_is_exact_up_to_the_bound,
    threads_are_decided_one_after_another,
    a_cancelled_call_is_refunded,
)
