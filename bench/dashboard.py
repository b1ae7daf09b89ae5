"""What an open dashboard costs the service: processor time with and without a page that polls, interleaved.

python -m bench.dashboard [--rounds 6] [--seconds 8] [--rate 10000] [--keys 10000] [--policies 50]

A service process gets decisions in batches at a fixed rate, over many keys, with denials. In every other slice, a
client polls /v1/overview once a second, as the page does. Each slice has the same number of decisions; the difference
of the processor time of the service process, per second, is the cost. The target is less than 1 % of a core.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

BATCH = 500  # decisions


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9


def run_slice(client: httpx.Client, bodies: list[bytes], seconds: int, rate: int, *, polls: bool) -> tuple[int, int]:
    """Send decisions for some seconds; return their number and the bytes of the polled responses."""
    sent = size = 0
    since = ""
    for second in range(seconds):
        started = time.perf_counter()
        for _ in range(rate // BATCH):
            client.post("/v1/batch", content=bodies[sent // BATCH % len(bodies)]).raise_for_status()
            sent += BATCH
        if polls:
            response = client.get(f"/v1/overview{since}")
            since = f"?since={response.json()['tick']}"
            size += len(response.content)
        time.sleep(max(0.0, 1.0 - (time.perf_counter() - started)))
        del second
    return sent, size


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 6), ("seconds", 8), ("rate", 10_000), ("keys", 10_000), ("policies", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    generator = random.Random(1)
    policies = "".join(f"  p{number}: {5 if number % 10 == 0 else 100000}/1m\n" for number in range(args.policies))
    headers = {"content-type": "application/json"}
    bodies = []
    for number in range(200):
        keys = [f"user:{generator.randrange(args.keys)}" for _ in range(BATCH)]
        bodies.append(json.dumps({"policy": f"p{number % args.policies}", "keys": keys}).encode())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "service.yaml"
        file.write_text(f"policies:\n{policies}", encoding="utf-8")
        command = [sys.executable, "-m", "tidegate", "start", str(file), "--listen", "127.0.0.1:0", "--json"]
        with subprocess.Popen(  # noqa: S603 - our own service
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as service:
            url = json.loads(service.stdout.readline() if service.stdout else b"")["http"]
            with httpx.Client(base_url=url, trust_env=False, timeout=60, headers=headers) as client:
                run_slice(client, bodies, 2, args.rate, polls=True)
                costs, sizes = [], []
                for _ in range(args.rounds):
                    used = {}
                    for polls in (False, True):
                        before = cpu_seconds(service.pid)
                        sent, size = run_slice(client, bodies, args.seconds, args.rate, polls=polls)
                        used[polls] = (cpu_seconds(service.pid) - before) / sent * args.rate
                        sizes += [size / args.seconds] if polls else []
                    costs.append(100 * (used[True] - used[False]))
                    sys.stdout.write(f"without {100 * used[False]:.1f} %, with {100 * used[True]:.1f} % of a core\n")
            status = Path(f"/proc/{service.pid}/status").read_text(encoding="ascii")
            resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
            service.terminate()
    sys.stdout.write(
        f"an open page costs {statistics.median(costs):.2f} % of a core (median of {args.rounds}; "
        f"{statistics.mean(sizes) / 1000:.1f} kB a second); {resident}\n"
    )


if __name__ == "__main__":
    main()
