"""A process that leases from an SQLite file: `worker.py file rules counter calls`.

It writes the number of allowed calls into a file after each, since it may be killed at any moment.
"""

import mmap
import struct
import sys
from pathlib import Path

from tidegate import Limiter


def print_line(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def main(file: str, rules: str, counter: str, calls: int) -> None:
    with Path(counter).open("r+b") as opened, mmap.mmap(opened.fileno(), 8) as count:
        limiter = Limiter(rules, store=f"sqlite:///{file}", lease=True)
        print_line("ready")
        sys.stdin.readline()
        allowed = 0
        for _ in range(calls):
            if limiter.try_acquire("k"):
                allowed += 1
                struct.pack_into("q", count, 0, allowed)
                if allowed == 3_000:
                    print_line("running")
        if sys.stdin.readline():  # a line: close; end of input: exit while it holds a share
            limiter.close()


main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
