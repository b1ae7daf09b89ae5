"""Spends the tokens of many nodes of a tree until its root has none left, and bills each admitted call.

A line of the bill is `begun node reserved billed`: when the call was begun, the id of the node, and its tokens.
`billed` is -1 when the call was admitted; the line with its usage follows before it is settled. So a process that is
killed leaves lines without usage, whose estimates may stay charged.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from tidegate.agents import Run, RunDenied
from tidegate.stores import open_store

MOST = 60  # tokens of a call
STREAMS = 4  # calls that are open at the same time
DENIALS = 400  # in a row: nothing is left anywhere


class Spender:
    """One process, or thread, that spends."""

    def __init__(self, url: Any, nodes: list[tuple[str, str]], bill: str, seed: int) -> None:
        self.random = Random(seed)
        self.nodes = nodes
        self.path = Path(bill)
        self.bill: Any = None
        self.url = url
        self.runs: dict[str, Run] = {}
        self.streams: list[tuple[float, str, int, Any]] = []

    def join(self, node: str, token: str) -> Run:
        if node not in self.runs:
            self.runs[node] = Run.join(token, store=self.url)
        return self.runs[node]

    def call(self) -> bool:
        """Begin a call of a random node; returns whether it was admitted."""
        node, token = self.random.choice(self.nodes)
        begun, most = time.monotonic(), self.random.randint(20, MOST)
        try:
            held = self.join(node, token).reserve({"tokens": most})
        except RunDenied:
            return False
        self.write(begun, node, most, -1)
        self.streams.append((begun, node, most, held))
        return True

    def settle(self) -> None:
        begun, node, most, held = self.streams.pop(self.random.randrange(len(self.streams)))
        if self.random.random() < 0.05:
            self.write(begun, node, most, 0)
            held.cancel()
            return
        used = self.random.randint(1, most)
        self.write(begun, node, most, used)
        held.commit({"tokens": used})

    def write(self, begun: float, node: str, most: int, used: int) -> None:
        self.bill.write(f"{begun!r} {node} {most} {used}\n".encode())

    def run(self) -> None:
        denied = 0
        with self.path.open("ab", buffering=0) as self.bill:
            while denied < DENIALS:
                denied = 0 if self.call() else denied + 1
                if len(self.streams) > STREAMS or (denied and self.streams):
                    self.settle()
            while self.streams:
                self.settle()


if __name__ == "__main__":
    plan = json.loads(Path(sys.argv[1]).read_text())
    Spender(open_store(plan["url"]), [tuple(each) for each in plan["nodes"]], plan["bill"], plan["seed"]).run()
