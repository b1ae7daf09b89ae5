"""The `make_app` fixture: limited applications of both kinds, closed when a test ends."""

import pytest

from tests.inbound.harness import HARNESSES


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
