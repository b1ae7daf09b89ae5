"""How much of a hidden limit a swarm uses after settling, with each recovery: 20 agents on a real NATS.

python -m bench.swarm_recovery                       every mode and recovery, about two minutes
python -m bench.swarm_recovery --recovery remember   both modes with one recovery
python -m bench.swarm_recovery --retry-after 1       the server sends Retry-After with each refusal

The server serves 600 calls a second and refuses the others. In per-agent mode each agent assumes 100 a second; in
shared mode all agents share 2,000 a second in a Valkey server. A call takes 5 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

from tests.servers.nats import NatsServer
from tests.servers.valkey import ValkeyServer
from tidegate import Limiter
from tidegate.bus import open_bus
from tidegate.swarm import AsyncSwarmLimiter

if TYPE_CHECKING:
    from tidegate.adaptive import Recovery

AGENTS: Final = 20
HIDDEN: Final = 600  # calls a second
OWN_CAPACITY: Final = 100
LATENCY: Final = 0.005
INTERVAL: Final = 0.3  # seconds between recovery steps
MIN_USED: Final = 0.9
MAX_REFUSED: Final = 0.01


class TooManyRequests(Exception):  # noqa: N818 - the name of the status
    """A 429."""

    status_code = 429

    def __init__(self, headers: dict[str, str]) -> None:
        """Carry the header fields of the response."""
        super().__init__("429")
        self.headers = headers


class HiddenServer:
    """Serves as many calls as its limit allows."""

    def __init__(self, *, shared: bool, retry_after: int | None = None) -> None:
        """A shared quota is a number of calls in any second, so its server counts windows, too."""
        self.limiter = Limiter(f"{HIDDEN}/1s sliding_log" if shared else f"{HIDDEN}/1s burst={HIDDEN // 6}")
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        self.served = self.refused = 0

    async def call(self) -> None:
        """Serve a call, or raise."""
        await asyncio.sleep(LATENCY / 2)
        allowed = self.limiter.try_acquire("all").allowed
        await asyncio.sleep(LATENCY / 2)
        self.served += allowed
        self.refused += not allowed
        if not allowed:
            raise TooManyRequests(self.headers)


async def measure(nats: str, store: str | None, recovery: Recovery, options: argparse.Namespace) -> dict[str, Any]:
    """Let the agents call as often as they may, and count after they have settled."""
    server = HiddenServer(shared=store is not None, retry_after=options.retry_after)
    ended = asyncio.Event()

    async def work(limiter: AsyncSwarmLimiter) -> None:
        while not ended.is_set():
            try:
                async with limiter.limited("api", timeout=5):
                    await server.call()
            except TooManyRequests:
                continue

    async with AsyncExitStack() as stack:
        limiters = []
        for number in range(AGENTS):
            bus = stack.enter_context(open_bus(nats))
            limiter = AsyncSwarmLimiter(
                bus,
                agent_id=f"agent-{number}",
                namespace=f"bench-{recovery}-{'own' if store is None else 'shared'}",
                recovery=recovery,
                recovery_interval=options.interval,
                store=store,
            )
            await stack.enter_async_context(limiter)
            await asyncio.to_thread(bus.wait, 20)
            await limiter.set_capacity("api", OWN_CAPACITY if store is None else AGENTS * OWN_CAPACITY, 1)
            limiters.append(limiter)
        # As many calls at once as the assumed rate needs, with room for waiting
        workers = [asyncio.create_task(work(limiter)) for limiter in limiters for _ in range(2)]
        await asyncio.sleep(options.settle)
        served, refused = server.served, server.refused
        await asyncio.sleep(options.seconds)
        served, refused = server.served - served, server.refused - refused
        ended.set()
        await asyncio.gather(*workers)
    used, share = served / (HIDDEN * options.seconds), refused / max(1, served + refused)
    return {"used": round(used, 4), "refused": round(share, 5), "calls": served + refused}


def main() -> int:
    """Measure and print; fails if the recovery `remember` misses its targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recovery", choices=["gradual", "remember"])
    parser.add_argument("--settle", type=float, default=12.0, help="seconds before counting starts")
    parser.add_argument("--retry-after", type=int, help="seconds that the server sends with each refusal")
    parser.add_argument("--interval", type=float, default=INTERVAL, help="seconds between recovery steps")
    parser.add_argument("--seconds", type=float, default=18.0, help="seconds to count")
    args = parser.parse_args()
    missed = False
    with NatsServer() as nats, ValkeyServer() as valkey:
        for recovery in ("gradual", "remember"):
            if args.recovery in (None, recovery):
                for mode, store in (("per-agent", None), ("shared", valkey.url)):
                    found = asyncio.run(measure(nats.url, store, recovery, args))
                    print(json.dumps({"recovery": recovery, "mode": mode, **found}), flush=True)
                    met = found["used"] >= MIN_USED and found["refused"] <= MAX_REFUSED
                    missed = missed or (recovery == "remember" and not met)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
