"""Doors of both kinds, closed when a test ends."""

import pytest

from tests.inbound.harness import DOORS


@pytest.fixture(params=DOORS, ids=["asgi", "wsgi"])
def door(request):
    """Build doors of one kind: `door(config=…)`."""
    built = []

    def build(*args, **options):
        made = request.param(*args, **options)
        built.append(made)
        return made

    yield build
    for made in built:
        made.close()
