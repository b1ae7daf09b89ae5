"""Settings of all tests: the number of Hypothesis examples, and how often threads switch."""

import os
import sys

import pytest
from hypothesis import Phase, settings

# No deadline: a busy machine is not a failing property. Under CI the same examples each time, so that no
# change is refused for an example it did not cause; at a desk new ones, and what they find becomes a vector.
settings.register_profile("main", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.register_profile("quick", settings.get_profile("main"), max_examples=20)
settings.register_profile("mutants", settings.get_profile("quick"), phases=(Phase.explicit, Phase.generate))
settings.register_profile("deep", settings.get_profile("main"), max_examples=5000, derandomize=False)
settings.load_profile("main")  # --hypothesis-profile on the command line goes before this


@pytest.fixture
def switching():
    """Let threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
