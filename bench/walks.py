"""Count what one call passes through: the functions of tidegate that it enters, their files, and its calls of them.

    python -m bench.walks [--show]

A walk is what a reader follows. Each call was made before, so that nothing is created for the first time; threads of
tidegate that run meanwhile are not counted. Starts a Valkey and a PostgreSQL server of its own. `PYTHONPATH` selects
another tree: only names that every version has are used.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.chosen_store import chosen_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

PACKAGE = "tidegate"


class Walk(NamedTuple):
    """The functions that a call entered, as (file, name), with how often."""

    entered: Counter[tuple[str, str]]

    def __str__(self) -> str:
        """Show the three counts."""
        files = {file for file, _ in self.entered}
        return f"{len(self.entered):4} functions in {len(files):3} files, {self.entered.total():5} calls"


def follow(call: Callable[[], object]) -> Walk:
    """Make a call, and count the functions of tidegate that this thread enters."""
    entered: Counter[tuple[str, str]] = Counter()

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        parts = Path(frame.f_code.co_filename).parts
        if event == "call" and PACKAGE in parts:
            file = "/".join(parts[len(parts) - parts[::-1].index(PACKAGE) :])
            entered[file, frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk(entered)


def main() -> None:
    """Print the walks."""
    from tidegate import Denied, Limiter  # noqa: PLC0415 - of the tree under test

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="list the functions")
    show = parser.parse_args().show
    with ExitStack() as stack:
        redis, postgres = (stack.enter_context(chosen_store(kind)) for kind in ("valkey", "postgres"))

        def limiter(*rules: str, **options: object) -> Limiter:
            return stack.enter_context(Limiter(list(rules), **options))  # type: ignore[arg-type]  # options of Limiter

        memory = limiter("1000000/1h")
        observed = limiter("1000000/1h", observer=lambda _record: None)
        remote, leased = limiter("1000000/1h", store=redis), limiter("1000000/1h", store=redis, lease=True)
        scarce = limiter("1/1h", store=postgres)
        scarce.try_acquire("k")

        def wait() -> None:
            with suppress(Denied):
                scarce.acquire("k", timeout=0.05)

        for name, call in {
            "memory": lambda: memory.try_acquire("k"),
            "memory, observer": lambda: observed.try_acquire("k"),
            "Redis": lambda: remote.try_acquire("k"),
            "Redis, lease": lambda: leased.try_acquire("k", 2),
            "PostgreSQL, denied acquire with a timeout": wait,
        }.items():
            for _ in range(3):
                call()
            walk = follow(call)
            print(f"{name:44}{walk}")
            for (file, function), count in sorted(walk.entered.items()) if show else ():
                print(f"    {count:4} {file}: {function}")


if __name__ == "__main__":
    main()
