"""Kill -9 at any moment, again and again: the provider never receives more than its quota in any window.

TIDEGATE_KILLS=200 makes it as long as the issue asks for; by default there are fewer.
"""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

from tests.outbound.server import QuotaServer

PROGRAM = Path(__file__).parents[1] / "programs.py"
KILLS = int(os.environ.get("TIDEGATE_KILLS", "30"))
LIMIT = 60
PERIOD = 1.0


def test_killed_at_random_moments_a_service_never_exceeds_the_quota(tmp_path):
    with QuotaServer(LIMIT, PERIOD) as server:
        words = [server.url, str(tmp_path / "data"), str(KILLS), str(LIMIT), str(PERIOD), "1"]
        done = subprocess.run(
            [sys.executable, PROGRAM, "be_killed", *words], check=True, capture_output=True, text=True, timeout=110
        )
        assert server.most_within(PERIOD) <= LIMIT
        assert set(server.statuses) == {200}
        assert "may have been in flight when a service was killed" in done.stderr
    db = sqlite3.connect(tmp_path / "data" / "sources.db")
    assert db.execute("SELECT count(*) FROM sources WHERE state <> 'idle'").fetchone() == (0,)
    assert db.execute("SELECT count(*) FROM sources WHERE ok > 0").fetchone() == (6,)  # none was lost
    db.close()
