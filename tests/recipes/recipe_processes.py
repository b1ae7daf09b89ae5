"""Processes that share a quota in SQLite: the provider refuses none of their calls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.page import write_providers

PROGRAM = Path(__file__).parent / "send.py"
PROCESSES, CALLS = 3, 12
LIMIT, PERIOD = 12, 2


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_the_provider_refuses_no_call_of_several_processes(name, model_server):
    model_server.limit, model_server.period = LIMIT, PERIOD
    write_providers(**{name: f"[{LIMIT}/{PERIOD}s]"})
    command = [sys.executable, str(PROGRAM), name, str(PROCESSES), str(CALLS)]
    assert subprocess.run(command, env=os.environ, stdout=subprocess.DEVNULL, timeout=170, check=False).returncode == 0
    assert model_server.statuses == {200: PROCESSES * CALLS}
    assert model_server.most_within(PERIOD) <= LIMIT
