"""Compare tidegate with other limiters in one run, and report which targets of the project are met.

make bench                              everything, about half an hour
make bench ARGS=--quick                 a few minutes; does not change the docs
make bench ARGS="--only hot_key"        one comparison: hot_key many_keys five_limits tasks threads memory,
                                        or on shared stores: sqlite redis_bench postgres_bench leases,
                                        or of the interfaces: inbound outbound budget service
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # so that `bench` is a package, whatever the working directory

from bench import five_limits, hot_key, many_keys, memory, picture, tables, targets, tasks, threads, timing  # noqa: E402 - needs the path above
from bench.libraries import OURS, PEERS, load  # noqa: E402 - as above
from bench.workers import started  # noqa: E402 - as above

if TYPE_CHECKING:
    from types import ModuleType

TIMED: Final[tuple[ModuleType, ...]] = (hot_key, many_keys, five_limits, tasks)
ALL: Final = (OURS, *PEERS)
NAMES: Final = tuple(module.__name__.removeprefix("bench.") for module in (*TIMED, threads, memory))
# Comparisons that start their own servers and processes; each program prints its table and whether targets are met.
PROGRAMS: Final = {
    "sqlite": "One SQLite file, one and four processes",
    "redis_bench": "One Valkey server, 1, 32 and 256 tasks",
    "postgres_bench": "One PostgreSQL server, one and four processes",
    "leases": "Permits leased in advance",
    "inbound": "A middleware in front of a small application",
    "outbound": "A transport under an HTTP client",
    "budget": "A batch check on a file with 100,000 tasks",
    "service": "The decision service, compared with its bare HTTP server",
}


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer rounds and keys; docs stay as they are")
    choices = (*NAMES, *PROGRAMS)
    options.add_argument("--only", choices=choices, action="append", help="only this comparison (may be repeated)")
    chosen = options.parse_args()
    only = [name for name in chosen.only or NAMES if name in NAMES]
    begun = time.monotonic()
    results: dict[str, Any] = {"machine": machine(), "libraries": libraries()}
    print(tables.heading(results))
    for name in only:
        measure = {"threads": measure_threads, "memory": measure_memory}.get(name, measure_times)
        results[name] = measure(name, quick=chosen.quick)
        print(tables.table(name, results[name], results["libraries"]), flush=True)
    results["targets"] = targets.judge(results)
    results["seconds"] = round(time.monotonic() - begun)
    print(tables.target_lines(results["targets"]))
    results["programs"] = {
        name: {"title": PROGRAMS[name], "said": run_program(name, quick=chosen.quick)}
        for name in chosen.only or PROGRAMS
        if name in PROGRAMS
    }
    write(results, docs=not chosen.quick and not chosen.only)


def run_program(name: str, *, quick: bool) -> str:
    """Run a comparison that stands by itself, and give what it prints."""
    print(f"\n{PROGRAMS[name]}", flush=True)
    words = [sys.executable, "-m", f"bench.{name}", *(["--quick"] if quick else [])]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:  # noqa: S603 - one of ours
        assert running.stdout is not None  # noqa: S101 - as asked for above
        said = []
        for line in running.stdout:
            print(line, end="", flush=True)
            said.append(line)
    return "".join(said)


def measure_times(name: str, *, quick: bool) -> dict[str, Any]:
    """Compare a module's cases in short slices."""
    module = next(module for module in TIMED if module.__name__ == f"bench.{name}")
    with started(able(name)) as workers:
        found = timing.compare(module.__name__, module.CASES, workers, rounds=10 if quick else 60)
    return {case.name: {"title": case.title, "ns": found[case.name]} for case in module.CASES}


def measure_threads(name: str, *, quick: bool) -> dict[str, Any]:
    """Let the libraries take turns at both cases."""
    rounds = {"threads-fast": 2 if quick else 6, "threads-exact": 3 if quick else 10}
    found: dict[str, Any] = {}
    with started(each for each in able(name) if hasattr(load(each), "per_day")) as workers:
        for case in threads.CASES:
            runs: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
            for _ in range(rounds[case.name]):
                for worker in workers:
                    runs[worker.name].append(worker.run(threads.__name__, case.name))
            found[case.name] = {"title": case.title, "runs": {each: summary(some) for each, some in runs.items()}}
    return found


def summary(runs: list[dict[str, float]]) -> dict[str, float]:
    """Sum up rounds of threads: the best rate, the usual one, and every mistake."""
    rates = [run["calls"] / run["seconds"] for run in runs]
    return {
        "best": max(rates),
        "usual": median(rates),
        "calls": sum(run["calls"] for run in runs),
        **{kind: sum(run[kind] for run in runs) for kind in threads.MISTAKES},
    }


def measure_memory(name: str, *, quick: bool) -> dict[str, Any]:
    """Weigh each library in a process of its own."""
    found: dict[str, Any] = {}
    for case in memory.CASES[:1] if quick else memory.CASES:
        names = able(name)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # bytes do not mind who else is running
            sizes = pool.map(partial(weigh, case.name), names)
            found[case.name] = {"title": case.title, "bytes": dict(zip(names, sizes, strict=True))}
    return found


def weigh(case: str, library: str) -> dict[str, float]:
    """Weigh one library in a fresh process."""
    with started([library]) as (worker,):
        return dict(worker.run(memory.__name__, case))


def able(name: str) -> list[str]:
    """Name the libraries that take part in a comparison."""
    return [each for each in ALL if name in getattr(load(each), "ONLY", NAMES)]


def machine() -> dict[str, Any]:
    """Say where and when this was measured."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
    }


def libraries() -> dict[str, dict[str, str]]:
    """Say what was measured, in which version and set up how."""
    found = {}
    for each in ALL:
        library = load(each)
        version = metadata.version(library.DISTRIBUTION)
        found[each] = {"name": library.NAME, "version": version, "strategy": library.STRATEGY}
    return found


def write(results: dict[str, Any], *, docs: bool) -> None:
    """Keep the results, and show them in the documentation after a whole run."""
    path = ROOT / "bench" / "results" / "latest.json"
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"\n{results['seconds']} s; results in {path.relative_to(ROOT)}")
    if docs:
        image = ROOT / "docs" / "images" / "bench-memory.svg"
        image.parent.mkdir(exist_ok=True)
        image.write_text(picture.memory(results), encoding="utf-8")
        page = ROOT / "docs" / "reference" / "benchmarks.md"
        page.write_text(tables.into_page(page.read_text(encoding="utf-8"), results), encoding="utf-8")
        print(f"picture in {image.relative_to(ROOT)}, figures in {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
