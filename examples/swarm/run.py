"""Five agents in separate processes, against a server with a hidden limit, with each way of recovery.

From the folder of the repository:

python -m examples.swarm.run nats://127.0.0.1:4222       (or redis://127.0.0.1:6379)

Watch them meanwhile, in another terminal: tidegate swarm nats://127.0.0.1:4222 --namespace example-gradual
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from examples.swarm.agent import write_line
from examples.swarm.server import HiddenLimit

AGENTS = 5


def main() -> int:
    """Let the agents run with each recovery, and print the results."""
    parser = argparse.ArgumentParser(description="Five agents against a server with a hidden limit.")
    parser.add_argument("bus", help="URL of a NATS or Redis server")
    parser.add_argument("calls", nargs="?", default="120", help="calls per agent (120)")
    args = parser.parse_args()
    return max(run(args.bus, args.calls, recovery) for recovery in ("gradual", "remember"))


def run(bus: str, calls: str, recovery: str) -> int:
    """Start the server and the agents, and print the results."""
    with HiddenLimit() as hidden:
        agents = [
            subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-m", "examples.swarm.agent", bus, hidden.url, f"agent-{number}", calls, recovery],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(1, AGENTS + 1)
        ]
        for agent in agents:
            if agent.stdout is not None:
                agent.stdout.readline()  # wait until it is ready
        for agent in agents:
            if agent.stdin is not None:
                agent.stdin.write("go\n")
                agent.stdin.flush()
        outputs = [agent.communicate()[0].splitlines() for agent in agents]
    for line in (line for lines in outputs for line in lines[:-1]):
        write_line(line)
    results = [json.loads(lines[-1]) for lines in outputs if lines]
    for result in results:
        told = f"{result['calls']} calls, {result['refused']} refused, lowest capacity {result['lowest']}"
        write_line(f"{result['agent']}: {told}")
    counts = {"served": hidden.served, "refused": hidden.refused, "agents": len(results)}
    write_line(json.dumps({"recovery": recovery, **counts}))
    return 0 if len(results) == AGENTS and not any(agent.returncode for agent in agents) else 1


if __name__ == "__main__":
    sys.exit(main())
