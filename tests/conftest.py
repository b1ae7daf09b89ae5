"""Settings of all tests: numbers of random examples, marks, how often threads switch, what a run leaves behind."""

import os
import re
import signal
import sys
from functools import cache
from inspect import getsource

import pytest
from hypothesis import Phase, settings

from tests.leftovers import VARIABLE, Run
from tests.servers.fixtures import postgres_url, running_postgres

# No deadline: a busy machine is not a failing property. Under CI the same examples each time, so that no
# change is refused for an example it did not cause; at a desk new ones, and what they find becomes a vector.
settings.register_profile("main", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.register_profile("quick", settings.get_profile("main"), max_examples=20)
settings.register_profile("mutants", settings.get_profile("quick"), phases=(Phase.explicit, Phase.generate))
settings.register_profile("deep", settings.get_profile("main"), max_examples=5000, derandomize=False)
settings.load_profile("main")  # --hypothesis-profile on the command line goes before this

__all__ = ["postgres_url", "running_postgres"]  # fixtures
RUN = pytest.StashKey[Run]()


def pytest_configure(config):
    # Started in the background, a shell lets it ignore SIGINT, and with it every process that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
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


# What a module that starts such things imports or calls.
KINDS = {
    "process": re.compile(r"\b(subprocess|multiprocessing|os\.fork|serving\w*)\b"),
    "server": re.compile(r"tests\.servers\.(caddy|envoy|haproxy|nats|nginx|postgres|proxy|traefik|valkey)\b"),
    "browser": re.compile(r"\bplaywright\b"),
}


def pytest_collection_modifyitems(items):
    kept = {}
    for item in items:
        if (once := item.get_closest_marker("once")) is not None and hasattr(item, "callspec"):
            name = (item.module.__name__, item.originalname)
            wanted = not once.args or any(each in item.callspec.id for each in once.args)
            if not wanted or kept.setdefault(name, item) is not item:
                item.add_marker("slow")
        modules = {item.module.__name__} | {
            definition.func.__module__
            for definitions in item._fixtureinfo.name2fixturedefs.values()  # noqa: SLF001 - pytest shows them nowhere else
            for definition in definitions
        }
        for kind in {kind for module in modules if module.startswith("tests.") for kind in kinds_of(module)}:
            item.add_marker(kind)


@cache
def kinds_of(module):
    """Return the marks of the tests and fixtures of a module."""
    source = getsource(sys.modules[module]) if module in sys.modules else ""
    return [kind for kind, pattern in KINDS.items() if pattern.search(source)]


@pytest.fixture
def switching():
    """Let threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
