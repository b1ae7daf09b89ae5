"""Decide by commands from standard input: run by the new tidegate and by version 0.1, on one store.

Each line is a JSON object: `limits` (strings), `name` (of the policy), `key`, `cost`, `at` (microseconds) and `verb`. Each
answer is a line of JSON. The script uses only names that version 0.1 already had.
"""

import json
import sys

from tidegate import Limiter, RateLimitError
from tidegate.testing import ManualClock


def answer(limiter: Limiter, command: dict) -> object:
    verb, key, cost = command["verb"], command["key"], command["cost"]
    if verb == "try_acquire":
        decision = limiter.try_acquire(key, cost=cost)
        return [decision.allowed, decision.remaining, decision.retry_after, decision.reset_after]
    if verb == "reserve":
        try:
            reservation = limiter.reserve(key, cost=cost, ttl=3600.0, timeout=0)
        except RateLimitError:
            return [False]
        reservation.commit(command["actual"])
        return [True]
    if verb == "refund":
        limiter.refund(key, cost=cost)
        return None
    raise AssertionError(verb)


def main(url: str) -> None:
    clock = ManualClock(start=0)
    limiters = {}
    for line in sys.stdin:
        command = json.loads(line)
        clock.advance((command["at"] - clock.steady()) / 1_000_000)
        name = command["name"]
        if name not in limiters:
            limiters[name] = Limiter(command["limits"], store=url, clock=clock, name=name)
        try:
            said = answer(limiters[name], command)
        except RateLimitError as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
