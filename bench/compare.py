"""Compare this tree with another commit in one interleaved run: `make bench-compare COMMIT=main~1`.

    python -m bench.compare COMMIT [--rounds 20]

The commit is checked out into a temporary directory. Both trees run the same operations in a process each, in turn, and
report microseconds of processor time. The ratio of the best slices is the figure to read: above 1, this tree is slower.
Only names that every version has are used, so that old commits can be compared, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
LARGE = "1000000000/1s"
ROUNDS = 20


class Operation(NamedTuple):
    """A function that makes so many calls, and how many to make in one slice."""

    run: Callable[[int], object]
    calls: int


def operations() -> dict[str, Operation]:
    """Build the operations with the tidegate that is on the path."""
    from tidegate import AsyncLimiter, Limiter  # noqa: PLC0415 - of the tree under test

    def repeat(function: Callable[..., object], *args: object) -> Callable[[int], object]:
        return lambda n: [function(*args) for _ in range(n)]

    one, five, many = Limiter(LARGE), Limiter([f"{10**9 + i}/{i + 1}s" for i in range(5)]), Limiter("1000000/1s")
    denied, window, waiting, reserved = (
        Limiter("1/1d"),
        Limiter(f"{LARGE} fixed_window"),
        Limiter(LARGE),
        Limiter(LARGE),
    )
    sqlite = Limiter("1000000/1s", store="sqlite:///plain.db")
    leased = Limiter("1000000000/1m", store="sqlite:///leased.db", lease=True)
    tasks, loop = AsyncLimiter(LARGE), asyncio.new_event_loop()
    keys = [f"user-{i}" for i in range(20_000)]

    def reserve(n: int) -> None:
        for _ in range(n):
            with reserved.reserve("k", 5) as reservation:
                reservation.commit(3)

    async def try_acquire(n: int) -> None:
        for _ in range(n):
            await tasks.try_acquire("k")

    return {
        "memory, one limit": Operation(repeat(one.try_acquire, "k"), 20_000),
        "memory, five limits": Operation(repeat(five.try_acquire, "k"), 5_000),
        "memory, 20,000 keys": Operation(lambda _: [many.try_acquire(key) for key in keys], len(keys)),
        "memory, denied": Operation(repeat(denied.try_acquire, "k"), 20_000),
        "memory, fixed window": Operation(repeat(window.try_acquire, "k"), 20_000),
        "memory, cost 3": Operation(repeat(one.try_acquire, "k", 3), 10_000),
        "memory, acquire": Operation(repeat(waiting.acquire, "k"), 3_000),
        "memory, reserve and commit": Operation(reserve, 1_500),
        "memory, async": Operation(lambda n: loop.run_until_complete(try_acquire(n)), 10_000),
        "SQLite": Operation(repeat(sqlite.try_acquire, "k"), 300),
        "SQLite, leased": Operation(repeat(leased.try_acquire, "k"), 3_000),
    }


def serve() -> None:
    """Run the operations that the parent names, one per line, and print the microseconds per call."""
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        known = operations()
        print(json.dumps(list(known)), flush=True)
        for line in sys.stdin:
            run, calls = known[line.strip()]
            began = time.process_time()
            run(calls)
            print((time.process_time() - began) / calls * 1e6, flush=True)
        os.chdir(ROOT)


class Tree:
    """A process that runs the operations with the tidegate of one directory."""

    def __init__(self, source: Path) -> None:
        """Start the process."""
        environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.compare", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        assert self.process.stdin is not None  # noqa: S101 - both are pipes
        assert self.process.stdout is not None  # noqa: S101 - as above
        self._input: IO[str] = self.process.stdin
        self._output: IO[str] = self.process.stdout
        self.names: list[str] = json.loads(self._output.readline())

    def measure(self, name: str) -> float:
        """Run one slice of an operation; return the microseconds per call."""
        self._input.write(f"{name}\n")
        self._input.flush()
        return float(self._output.readline())

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def compare(commit: str, rounds: int) -> None:
    """Measure both trees in turn, and print a table."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["git", "archive", commit, "src"]
        archive = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)  # noqa: S603 - no shell
        subprocess.run(["tar", "-x", "-C", directory], input=archive.stdout, check=True)  # noqa: S603, S607 - as above
        trees = (Tree(Path(directory) / "src"), Tree(ROOT / "src"))
        figures: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in trees[0].names}
        for number in range(rounds):
            print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
            for name, measured in figures.items():
                for index in (0, 1) if number % 2 else (1, 0):
                    measured[index].append(trees[index].measure(name))
        print(file=sys.stderr)
        for tree in trees:
            tree.close()
    print(f"{'µs of processor time per call':32}{commit[:12]:>14}{'this tree':>14}{'best/best':>12}{'median':>10}")
    for name, (old, new) in figures.items():
        ratio, middle = min(new) / min(old), median(b / a for a, b in zip(old, new, strict=True))
        print(f"{name:32}{min(old):14.2f}{min(new):14.2f}{ratio:12.2f}{middle:10.2f}")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"slices of each operation (default {ROUNDS})")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    elif options.commit is None:
        parser.error("name the commit to compare with, such as main~1")
    else:
        compare(options.commit, options.rounds)


if __name__ == "__main__":
    main()
