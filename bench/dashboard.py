"""What an open dashboard costs the service: processor time of its requests, and of the calls that it makes slower.

python -m bench.dashboard [--seconds 60] [--rate 10000] [--keys 10000] [--policies 50]

A service process gets decisions in batches at a fixed rate, over many keys, with denials. Once a second, a client
requests /v1/overview as the page does. The processor time of the service process is read before and after every request
(the client sends one at a time, so it belongs to that request). An open page costs two things: its own request, and
that the service records some of the next calls (`near_limit`). The second is the difference between the batch after a
poll and the other batches. The sum of both, per second, is the cost; the target is less than 1 % of a core.

For comparison, every other second is without a poll: the difference of such seconds contains every effect, but it is
a small difference of large numbers, and needs a quiet machine.
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
WARM_UP = 20  # seconds
SETTLE = 0.001  # seconds until the service waits again: the kernel counts the time of a thread when it stops
TARGET = 1.0  # percent of a core


class Service:
    """A running service, and its processor time."""

    def __init__(self, process_id: int, client: httpx.Client) -> None:
        """Measure this process."""
        self._process_id = process_id
        self._client = client

    def cpu_seconds(self) -> float:
        """Return the processor time of all threads of the service."""
        time.sleep(SETTLE)
        tasks = Path(f"/proc/{self._process_id}/task").glob("*/schedstat")
        return sum(int(task.read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9

    def resident(self) -> str:
        """Return the resident memory."""
        lines = Path(f"/proc/{self._process_id}/status").read_text(encoding="ascii").splitlines()
        return next(line for line in lines if line.startswith("VmRSS"))

    def decide(self, body: bytes) -> float:
        """Send a batch; return the processor time of the service."""
        before = self.cpu_seconds()
        self._client.post("/v1/batch", content=body).raise_for_status()
        return self.cpu_seconds() - before

    def poll(self, since: int | None) -> tuple[float, int, int]:
        """Request the overview; return the processor time of the service, the tick and the size of the response."""
        before = self.cpu_seconds()
        response = self._client.get(f"/v1/overview{'' if since is None else f'?since={since}'}")
        return self.cpu_seconds() - before, response.json()["tick"], len(response.content)


class Measurement:
    """The processor time of polls, of the batches after them, and of all others; and of whole seconds."""

    def __init__(self) -> None:
        """Start without values."""
        self.polls: list[float] = []
        self.after_poll: list[float] = []
        self.others: list[float] = []
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.sizes: list[int] = []

    def run(self, service: Service, bodies: list[bytes], seconds: int, batches: int) -> None:
        """Send the batches of some seconds, with a poll at a changing place in every other second."""
        since: int | None = None
        number = 0
        for second in range(seconds):
            started, polled = time.perf_counter(), second % 2 == 1
            before = service.cpu_seconds()
            place = second * 7 % batches if polled else None
            for batch in range(batches):
                if batch == place:
                    used, since, size = service.poll(since)
                    self.polls.append(used)
                    self.sizes.append(size)
                costs = self.after_poll if batch == place else self.others
                costs.append(service.decide(bodies[number % len(bodies)]))
                number += 1
            time.sleep(max(0.0, 1.0 - (time.perf_counter() - started)))
            self.seconds[polled].append(service.cpu_seconds() - before)

    def describe(self) -> str:
        """Describe the cost of an open page, in percent of a core."""
        poll, poll_error = mean(self.polls)
        slower, slower_error = difference(self.after_poll, self.others)
        all_seconds, all_error = difference(self.seconds[True], self.seconds[False])
        total = poll + slower
        base, _ = mean(self.seconds[False])
        size = statistics.mean(self.sizes) / 1000
        verdict = "met" if total + 2 * (poll_error + slower_error) < TARGET else "NOT met"
        return (
            f"request of the overview        {poll:6.2f} ± {poll_error:.2f} %, {size:.1f} kB\n"
            f"batch after it                 {slower:6.2f} ± {slower_error:.2f} %\n"
            f"difference of whole seconds    {all_seconds:6.2f} ± {all_error:.2f} % (without a poll {base:.1f} %)\n"
            f"an open page costs {total:.2f} % of a core: the target is less than {TARGET:g} %, {verdict}"
        )


def mean(values: list[float]) -> tuple[float, float]:
    """Return a mean and its standard error, in percent."""
    return 100 * statistics.mean(values), 100 * statistics.stdev(values) / len(values) ** 0.5


def difference(values: list[float], others: list[float]) -> tuple[float, float]:
    """Return the difference of two means and its standard error, in percent."""
    (first, first_error), (second, second_error) = mean(values), mean(others)
    return first - second, (first_error**2 + second_error**2) ** 0.5


def build_bodies(policies: int, keys: int) -> list[bytes]:
    """Build batches: each is for one policy, and each key of every tenth policy is sometimes denied."""
    generator = random.Random(1)
    bodies = []
    for number in range(4 * policies):
        batch = [f"user:{generator.randrange(keys)}" for _ in range(BATCH)]
        bodies.append(json.dumps({"policy": f"p{number % policies}", "keys": batch}).encode())
    return bodies


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("seconds", 60), ("rate", 10_000), ("keys", 10_000), ("policies", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    policies = "".join(f"  p{number}: {5 if number % 10 == 0 else 100000}/1m\n" for number in range(args.policies))
    bodies = build_bodies(args.policies, args.keys)
    headers = {"content-type": "application/json"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "service.yaml"
        file.write_text(f"policies:\n{policies}", encoding="utf-8")
        command = [sys.executable, "-m", "tidegate", "start", str(file), "--listen", "127.0.0.1:0", "--json"]
        with subprocess.Popen(  # noqa: S603 - our own service
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            url = json.loads(process.stdout.readline() if process.stdout else b"")["http"]
            with httpx.Client(base_url=url, trust_env=False, timeout=60, headers=headers) as client:
                service = Service(process.pid, client)
                Measurement().run(service, bodies, WARM_UP, args.rate // BATCH)
                measured = Measurement()
                measured.run(service, bodies, args.seconds, args.rate // BATCH)
                denied = sum(each["denied"] for each in client.get("/v1/overview").json()["policies"])
                resident = service.resident()
            process.terminate()
    sys.stdout.write(f"{measured.describe()}\n{denied:,} denials; {resident}\n")


if __name__ == "__main__":
    main()
