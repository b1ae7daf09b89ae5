"""The short form of `make soak`: the service on each store, under traffic, with faults of store and service."""

import pytest

from tests.soak.soak import Soak


@pytest.mark.once
@pytest.mark.parametrize(
    ("store", "kinds"),
    [("sqlite", ["locked", "worker", "edit"]), ("redis", ["late", "crash"]), ("postgres", ["late", "frozen"])],
)
def test_what_is_charged_was_answered(store, kinds, tmp_path):
    said = []
    soak = Soak(store, tmp_path, seed=1, calls=20, kinds=kinds, say=said.append)
    totals = soak.run(lambda number: number < len(kinds))
    assert totals.violations == [], f"see {totals.log} and 'make soak ARGS=\"--store {store}\"'"
    assert totals.over == totals.missing == sum(totals.kept.values()) == 0
    assert -totals.may_take <= totals.difference <= totals.may_add
    # That it was a soak at all: every fault came, permits were given, given back and refused, clients hung up.
    assert set(totals.faults) == set(kinds)
    assert min(totals.answered, totals.given_back, totals.hung_up) > 0
    assert totals.statuses[200] > 100
    assert len(said) == len(kinds)
