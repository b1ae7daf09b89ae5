"""Settings of all tests: the number of Hypothesis examples, how often threads switch, and what a run leaves behind."""

import os
import sys

import pytest
from hypothesis import Phase, settings

from tests.leftovers import VARIABLE, Run

# No deadline: a busy machine is not a failing property. Under CI the same examples each time, so that no
# change is refused for an example it did not cause; at a desk new ones, and what they find becomes a vector.
settings.register_profile("main", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.register_profile("quick", settings.get_profile("main"), max_examples=20)
settings.register_profile("mutants", settings.get_profile("quick"), phases=(Phase.explicit, Phase.generate))
settings.register_profile("deep", settings.get_profile("main"), max_examples=5000, derandomize=False)
settings.load_profile("main")  # --hypothesis-profile on the command line goes before this

RUN = pytest.StashKey[Run]()


def pytest_configure(config):
    if VARIABLE not in os.environ:  # a process of pytest-xdist belongs to the run of its parent
        config.stash[RUN] = Run()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
    yield
    if (run := session.config.stash.get(RUN, None)) is None:
        return
    if not (left := run.end()):
        return
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    terminal.section(f"processes that were still running, now killed: {len(left)}", red=True)
    for line in left:
        terminal.line(line)
    if exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def switching():
    """Let threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
