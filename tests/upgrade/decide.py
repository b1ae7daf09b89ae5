"""Answers commands from standard input: run by this version of tidegate and by an older one, on one store.

Each command is a line of JSON, with the fields of `Command` in test_rolling_upgrade.py; each answer is a line of JSON.
The script uses only public names, which the older version has, too.
"""

import json
import sys
from typing import Any

from tidegate import Limiter, RateLimitError
from tidegate.testing import ManualClock


def answer(limiter: Limiter, command: dict[str, Any]) -> object:
    verb, key, cost = command["verb"], command["key"], command["cost"]
    if verb == "try_acquire":
        decision = limiter.try_acquire(key, cost=cost)
        return [decision.allowed, decision.remaining, decision.retry_after, decision.reset_after]
    if verb == "spend":  # as many calls as are allowed, as fast as possible
        return sum(bool(limiter.try_acquire(key, cost=cost)) for _ in range(command["calls"]))
    if verb == "refund":
        limiter.refund(key, cost=cost)
        return None
    try:
        reservation = limiter.reserve(key, cost=cost, ttl=3600.0, timeout=0)
    except RateLimitError:
        return [False]
    reservation.commit(command["actual"])
    return [True]


def main(url: str) -> None:
    clock = ManualClock(start=0)
    limiters: dict[str, Limiter] = {}
    for line in sys.stdin:
        command = json.loads(line)
        name, at = command["name"], command["at"]
        clock.advance((at - clock.steady()) / 1_000_000)
        if name not in limiters:
            limiters[name] = Limiter(command["limits"], store=url, clock=clock if at else None, name=name)
        print(json.dumps(answer(limiters[name], command)), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main(sys.argv[1])
