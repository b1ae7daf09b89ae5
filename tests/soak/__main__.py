"""Soak the service: `make soak`, or `python -m tests.soak --store redis --minutes 10 --seed 7`.

The service runs with two processes on a real store under mixed traffic, while clients hang up and are killed, a process
of the service is killed, the file is changed, and the store's server freezes, crashes and resets connections. An
independent oracle (`ledger`) counts every answer. It is an error if

- more is admitted than a quota (over), or less is charged than was answered (missing);
- more stays charged than was answered and is in doubt (kept): a request that nobody was answered and that no fault can
  explain must not cost anything;
- memory or descriptors of a process rise: the median of the last third of the samples may be a tenth and 6 MB (8
  descriptors) above that of the second third;
- an answer has the status 500, a request is neither answered nor ended, the log has a traceback.

The exit code is 1 then. The seed draws the same calls and faults again, though not at the same instants.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Final

from tests.soak.soak import Soak
from tests.soak.totals import Totals, table

STORES: Final = ("sqlite", "redis", "postgres")
ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "build" / "soak"
MAX_PRINTED: Final = 20  # violations of each store


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--store", choices=(*STORES, "all"), default="all")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each store (default 10)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument(
        "--rate", type=float, default=200.0, help="calls a second; 0: as many as possible (default 200)"
    )
    parser.add_argument("--faults", default="", help="kinds of faults, separated by commas (default: all)")
    return parser.parse_args()


def soak(store: str, asked: argparse.Namespace) -> Totals:
    folder = FOLDER / f"{store}-{asked.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    end = time.monotonic() + 60 * asked.minutes
    kinds = [kind.strip() for kind in asked.faults.split(",") if kind.strip()]
    running = Soak(store, folder, asked.seed, rate=asked.rate, kinds=kinds, say=lambda text: print(text, flush=True))
    totals = running.run(lambda _: time.monotonic() < end)
    if not totals.violations:
        shutil.rmtree(folder)
    return totals


def main() -> int:
    asked = arguments()
    print(f"seed {asked.seed}", flush=True)
    results = [soak(store, asked) for store in (STORES if asked.store == "all" else (asked.store,))]
    print(f"\n{table(results)}\n")
    for totals in results:
        for text in sorted(totals.violations, key=lambda text: "KEPT" in text)[:MAX_PRINTED]:  # the worst first
            print(f"{totals.name}: {text}")
        if totals.violations:
            words = f"--store {totals.name} --minutes {asked.minutes:g} --rate {asked.rate:g} --seed {asked.seed}"
            print(f"{totals.name}: {len(totals.violations)} violations; see {totals.log.parent.relative_to(ROOT)}")
            print(f'{totals.name}: again with make soak ARGS="{words}"')
    return int(any(totals.violations for totals in results))


if __name__ == "__main__":
    sys.exit(main())
