"""A process that charges a run until it is denied: URL, token, and a file with a byte for each admitted call."""

import sys
from pathlib import Path

from tidegate.agents import Run, RunDenied


def spend(url: str, token: str, path: str) -> None:
    """Write down each admitted call before it is settled, since the process may be killed."""
    run = Run.join(token, store=url)
    with Path(path).open("ab", buffering=0) as billed:
        while True:
            try:
                call = run.reserve({"tokens": 7})
            except RunDenied:
                return
            billed.write(b"x")
            call.commit({"tokens": 5})


if __name__ == "__main__":
    spend(*sys.argv[1:])
