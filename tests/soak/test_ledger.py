"""The oracle of the soak: it accepts what is exact or in doubt, and notices what is not."""

import pytest

from tests.cases import cases
from tests.soak.effects import Effect, actual_effects, expected_effects
from tests.soak.journal import ANSWERED, BROKEN, GONE, HUNG_UP, file_journal, read_journal
from tests.soak.ledger import FOREVER, MAX_REFUND, Outage, read_events
from tests.soak.service import Sample, rise

ACCOUNT = ("window", "k")
DOWN = [Outage("crash", 100, 200)]


def balance_of(*calls, outages=()):
    """Make the balance of calls (verb, amount, sent, ended, how, actual)."""
    events = []
    for number, (verb, amount, sent, ended, how, actual) in enumerate(calls):
        events.append(["sent", number, sent, verb, [[*ACCOUNT, amount]]])
        if how is not None:
            events.append(["ended", number, ended, how, [actual]])
    return read_events([events], outages)[ACCOUNT]


@cases(
    ("call", "outages", "charges"),
    [
        (("acquire", 2, 0, 9, ANSWERED, 2), [], [2]),
        (("acquire", 2, 0, 9, ANSWERED, 0), [], [0]),
        (("acquire", 2, 0, 9, ANSWERED, None), [], [0, 1, 2]),  # an answer that does not tell
        (("acquire waiting", 2, 0, 99, ANSWERED, 0), DOWN, [0]),
        (("acquire waiting", 2, 0, 150, ANSWERED, 0), DOWN, [0, 1, 2]),  # the store's first answer may be lost
        (("acquire waiting", 2, 0, 150, ANSWERED, 2), DOWN, [2, 3, 4]),
        (("acquire", 2, 0, 150, ANSWERED, 2), DOWN, [2]),
        (("acquire", 2, 0, 9, HUNG_UP, None), [], [0]),
        (("acquire", 2, 99, 150, HUNG_UP, None), DOWN, [0, 1, 2]),
        (("acquire", 2, 0, 99, HUNG_UP, None), DOWN, [0, 1, 2]),  # its refund may be lost
        (("acquire", 2, 0, 99, HUNG_UP, None), [Outage("crash", 99 + MAX_REFUND, FOREVER)], [0, 1, 2]),
        (("acquire", 2, 0, 99, HUNG_UP, None), [Outage("crash", 100 + MAX_REFUND, FOREVER)], [0]),  # refunded before
        (("acquire", 2, 201, 210, HUNG_UP, None), DOWN, [0]),
        (("acquire", 2, 0, 9, GONE, None), [], [0, 1, 2]),
        (("acquire", 2, 0, 9, BROKEN, None), [], [0, 1, 2]),
        (("acquire", 2, 0, 9, None, None), [], [0, 1, 2]),  # the client was killed
    ],
)
def test_what_may_be_charged_for_a_call(call, outages, charges):
    balance = balance_of(call, outages=outages)
    assert [charged for charged in range(-3, 6) if balance.holds(charged)] == charges


@pytest.mark.parametrize(
    ("settlement", "outages", "charges"),
    [
        (("cancel", -3, 10, 19, ANSWERED, -3), [], [0]),
        (("cancel", -3, 10, 19, ANSWERED, 0), [], [3]),  # refused
        (("cancel", -3, 10, 19, GONE, None), [], [0, 1, 2, 3]),
        (("cancel", -3, 150, 160, ANSWERED, -3), DOWN, [0, 1, 2, 3]),  # done later, or lost with its process
    ],
)
def test_what_may_be_charged_after_a_settlement(settlement, outages, charges):
    balance = balance_of(("reserve", 3, 0, 9, ANSWERED, 3), settlement, outages=outages)
    assert [charged for charged in range(-3, 6) if balance.holds(charged)] == charges


def test_the_most_permits_at_a_time():
    charge, late = ("reserve", 3, 0, 10, ANSWERED, 3), ("acquire", 2, 0, 30, ANSWERED, 2)
    assert balance_of(charge, late).peak() == 5
    # What is given back may be taken by others from when that was sent; what is not known may have been given back.
    assert balance_of(charge, ("cancel", -3, 29, 40, ANSWERED, -3), late).peak() == 3
    assert balance_of(charge, ("cancel", -3, 29, 40, GONE, None), late).peak() == 3
    assert balance_of(charge, ("cancel", -3, 31, 40, ANSWERED, -3), late).peak() == 5


def test_a_bucket_admits_its_burst_and_what_it_refilled():
    calls = [("acquire", 1, at, at + 1, ANSWERED, 1) for at in range(0, 100, 10)]
    assert balance_of(*calls).peak_beyond_refill(1, 10) == 1
    assert balance_of(*calls).peak_beyond_refill(1, 20) == 6  # 10 in 91 units of time, which refill 4
    assert balance_of(*calls).peak_beyond_refill(1, 10**9) == 10


def test_what_requests_may_change():
    held = {"r": Effect(ACCOUNT, 5)}
    subject = {"policy": "window", "key": "k"}
    cases = [
        ("acquire", {**subject, "cost": 2}, [2]),
        ("batch", {"asks": [subject, {**subject, "cost": 3}]}, [1, 3]),
        ("batch", {"policy": "window", "keys": ["k", "k"]}, [1, 1]),
        ("lease", {**subject, "max_permits": 8}, [8]),
        ("commit", {"id": "r", "cost": 2}, [-3]),
        ("commit", {"id": "r"}, [0]),
        ("cancel", {"id": "r"}, [-5]),
        ("cancel", {"id": "unknown"}, []),
        ("release", subject, [-1]),
        ("peek", subject, []),
    ]
    for verb, body, amounts in cases:
        assert expected_effects(verb, body, held) == [Effect(ACCOUNT, amount) for amount in amounts]


def test_what_answers_tell():
    lost = {"type": "urn:tidegate:problem:store-unavailable", "status": 503}
    one = [Effect(ACCOUNT, 4)]
    cases = [
        ("acquire", one, 200, {"allowed": True}, [4]),
        ("acquire", one, 200, {"allowed": False}, [0]),
        ("acquire", one, 422, {}, [0]),
        ("acquire", one, 503, lost, [None]),
        ("acquire", one, 503, {"type": "urn:tidegate:problem:stopping"}, [0]),
        ("acquire", one, 500, {}, [None]),
        ("lease", one, 200, {"allowed": True, "id": "l", "permits": 3}, [3]),
        ("lease", one, 200, {"allowed": True, "id": None, "permits": 0}, [4]),
        ("batch", one * 3, 200, {"answers": [{"allowed": True}, {"allowed": False}, {"error": lost}]}, [4, 0, None]),
        ("cancel", [Effect(ACCOUNT, -4)], 409, {}, [0]),
        ("cancel", [Effect(ACCOUNT, -4)], 200, {"ok": True}, [-4]),
    ]
    for verb, effects, status, answer, amounts in cases:
        assert actual_effects(verb, effects, status, answer) == amounts


def test_a_killed_client_leaves_its_journal(tmp_path):
    journal = file_journal(tmp_path / "journal")
    journal.ended(journal.sent("acquire", [Effect(ACCOUNT, 1)]), ANSWERED, [1])
    journal.used(ACCOUNT, 2, 0)
    journal.sent("acquire", [Effect(ACCOUNT, 5)])
    with (tmp_path / "journal").open("a", encoding="utf-8") as file:
        file.write('["sent", 9')  # killed within a line
    balance = read_events([read_journal(tmp_path / "journal")], [])[ACCOUNT]
    assert (balance.expected, balance.may_add, balance.used_from_leases) == (1, 5, 2)
    assert read_journal(tmp_path / "none") == []


def test_flat_is_a_tenth_and_a_little_more():
    level = [Sample(100 << 20, 20)] * 6
    assert rise([*level, *[Sample(115 << 20, 29)] * 3]) == []
    assert len(rise([*level, *[Sample(117 << 20, 31)] * 3])) == 2
    assert rise([*level[:2], *[Sample(200 << 20, 99)] * 3]) == []  # too few to tell
