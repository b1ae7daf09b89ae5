"""A call of a deep node is one call of the store; processes that are killed leave their estimates charged."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.process import until
from tidegate.agents import Run
from tidegate.stores import DelegatingStore


class CountingStore(DelegatingStore):
    """Counts calls of the store."""

    calls = 0

    def apply(self, *arguments):
        self.calls += 1
        return super().apply(*arguments)

    def get_value(self, *arguments):
        self.calls += 1
        return super().get_value(*arguments)


def test_a_call_with_four_ancestors_is_one_call_of_the_store(store):
    counting = CountingStore(store)
    run = root = Run("r", store=counting, limits="9/run unit=tokens")
    for number in range(4):
        run = run.child(f"c{number}", limits="9/run unit=tokens")
    before = counting.calls
    call = run.reserve({"tokens": 5})
    assert counting.calls == before + 1
    call.commit({"tokens": 2})
    assert counting.calls == before + 2
    assert [node.used["tokens"] for _, node in root.usage().walk()] == [2] * 5
    elsewhere = Run.join(run.token(), store=counting)
    root.extend({"tokens": 1})
    before = counting.calls
    elsewhere.charge({"tokens": 1})
    assert counting.calls == before + 2 + 2, "the first call after a change is refused, and reads the node again"


def start(url, token, path):
    """Start a process that spends."""
    command = [sys.executable, "-m", "tests.agents.spender", url, token, str(path)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("place", ["sqlite", "redis", "postgres"])
def test_killed_processes_never_free_what_they_reserved(urls, place, tmp_path):
    path = tmp_path / "billed"
    path.touch()
    with Run("r", store=urls[place], limits="2000/run unit=tokens") as run:
        tokens = [run.child(f"c{number}", limits="1500/run unit=tokens").token() for number in range(2)]
        several = [start(urls[place], token, path) for token in tokens * 2]
        until(lambda: path.stat().st_size > 20, "calls were made")
        for process in several[:2]:
            process.kill()
        for process in several:
            process.wait()
        usage = run.usage()
        used, calls = usage.used["tokens"], path.stat().st_size
        assert 5 * calls <= used <= 2000
        assert used <= 5 * calls + 2 * 7, "at most one call of each killed process is charged and not billed"
        assert used > 1940, "at least 97 % can be used"
        assert [process.returncode for process in several[2:]] == [0, 0]
        assert sum(child.used["tokens"] for child in usage.children) == used
        assert all(child.used["tokens"] <= 1500 for child in usage.children)
