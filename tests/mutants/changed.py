"""The lines of a file that the latest commits changed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMITS = 100  # of one session
HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


def changed_lines(path: Path, commits: int = COMMITS) -> set[int]:
    """Return the numbers of the lines that the latest commits, or changes that are not committed, wrote."""
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    if not (ROOT / ".git").exists():
        return set()  # an unpacked archive
    known = int(
        subprocess.run([*git, "rev-list", "--first-parent", "--count", "HEAD"], check=True, capture_output=True).stdout
    )
    since = f"HEAD~{min(commits, known - 1)}"
    diff = subprocess.run([*git, "diff", "-U0", since, "--", path], check=True, capture_output=True, text=True).stdout
    found = ((int(start), int(count or 1)) for start, count in HUNK.findall(diff))
    return {line for start, count in found for line in range(start, start + count)}
