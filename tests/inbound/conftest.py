"""Fixtures: limited applications of both kinds, and limits that belong to one test."""

import pytest

from tests.inbound.harness import HARNESSES
from tidegate.inbound.testing import limits_replaced
from tidegate.testing import ManualClock


@pytest.fixture(params=HARNESSES, ids=["asgi", "wsgi"])
def make_app(request):
    """Build limited applications of one kind: `make_app(config=…)`."""
    built = []

    def build(*args, **options):
        made = request.param(*args, **options)
        built.append(made)
        return made

    yield build
    for made in built:
        made.close()


@pytest.fixture
def clock():
    """A clock that moves only if the test says so."""
    return ManualClock(start=1_728_000_000)


@pytest.fixture(autouse=True)
def own_limits(request):
    """Limits without a middleware count for one test, by its clock if it has one."""
    given = request.getfixturevalue("clock") if "clock" in request.fixturenames else None
    with limits_replaced(clock=given) as limits:
        yield limits
