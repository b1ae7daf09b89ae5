"""One round of a soak: traffic of all clients, a fault in the middle of it, and the check of what it left behind."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tests.soak.connection import Connection
from tests.soak.journal import Journal, read_journal
from tests.soak.ledger import Balance, Outage, read_events
from tests.soak.targets import HARMLESS
from tests.soak.traffic import LOWERED, QUOTA, QUOTAS, RawClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.soak.effects import Account, Effect
    from tests.soak.journal import Event
    from tests.soak.service import Service
    from tests.soak.targets import Fault
    from tests.soak.totals import Totals

ROOT: Final = Path(__file__).parents[2]
CLIENTS: Final = 12
PROCESS_CALLS: Final = 4  # of the client process for each call of another client
MAX_FAULT: Final = 1.5  # seconds that a fault lasts
FAULT_CALLS: Final = 100  # after so many calls it ends, too
QUIET: Final = 1.0  # seconds without a change after which nothing more is expected to change
MAX_RECOVERY: Final = 60.0
MAX_PROCESS: Final = 300.0  # seconds for a client process, which may start slowly on a busy machine
FRESH: Final = 8  # connections in a row that have to find the service well: any of its processes may answer one
MIN_EVENTS: Final = 30  # in the journal of a client process before it may be killed
MINUTE: Final = 60 * 10**9


class Plan(NamedTuple):
    """The parameters of a round. The same plan draws the same calls, though not at the same instants."""

    seed: str
    number: int
    kind: str  # of fault
    calls: int  # of each client
    rate: float  # calls a second, of all clients; 0: as fast as they can


class Round:
    """Runs one plan."""

    def __init__(self, plan: Plan, service: Service, fault: Fault | None, folder: Path, totals: Totals) -> None:
        self._plan = plan
        self._service = service
        self._port = service.running.port
        self._fault = fault
        self._path = folder / f"client-{plan.number}.jsonl"
        self._totals = totals
        self._place = f"round {plan.number} ({plan.kind})"
        self._events: list[Event] = []
        self._journal = Journal(self._events.append)
        self._draw = random.Random(f"{plan.seed}/{plan.number}")
        self._outages: list[Outage] = []
        self._due = time.monotonic()

    async def run(self) -> None:
        """Run the round and check it."""
        began, losses = time.monotonic_ns(), self._service.losses()
        process = self._start_process()
        try:
            held: dict[str, Effect] = {}
            clients = [self._client(number, held) for number in range(CLIENTS)]
            async with asyncio.TaskGroup() as group:
                for part in (self._break(), self._end_process(process), *map(self._drive, clients)):
                    group.create_task(part)
        finally:
            process.kill()
            process.wait()
        await self._recover()
        self._note(clients)
        if self._plan.kind in HARMLESS and self._service.losses() > losses:
            self._totals.losses += self._service.losses() - losses
            self._outages.append(Outage("lost by itself", began, time.monotonic_ns()))
        await self._check([self._events, read_journal(self._path)])
        for path in (self._path, self._done):
            path.unlink(missing_ok=True)

    # ---- traffic -----------------------------------------------------------------------------------------------------

    def _client(self, number: int, held: dict[str, Effect]) -> RawClient:
        draw = random.Random(f"{self._plan.seed}/{self._plan.number}/{number}")
        return RawClient(Connection(self._port, self._journal, held), draw, self._plan.number)

    @property
    def _done(self) -> Path:
        """The file by which a client process says that it has closed its clients."""
        return self._path.with_suffix(".done")

    def _start_process(self) -> subprocess.Popen[bytes]:
        plan = self._plan
        words = [self._service.running.url, self._path, plan.seed, plan.number, plan.calls * PROCESS_CALLS]
        command = [sys.executable, "-m", "tests.soak.client", *map(str, words)]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)

    async def _end_process(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the client process in the middle of its calls, or let it end by itself."""
        if self._draw.random() < 0.5:
            events = self._draw.randint(MIN_EVENTS, 4 * MIN_EVENTS)
            await poll(lambda: process.poll() is not None or self._recorded() >= events, "calls of a client process")
            process.kill()
            self._totals.killed += 1
        await poll(lambda: process.poll() is not None, "the end of a client process")
        if process.returncode > 0:
            self._totals.violations.append(f"{self._place}: a client process ended with {process.returncode}")

    def _recorded(self) -> int:
        """Count the events in the journal of the client process."""
        return self._path.read_bytes().count(b"\n") if self._path.exists() else 0

    async def _drive(self, client: RawClient) -> None:
        for _ in range(self._plan.calls):
            await self._pace()
            try:
                await client.step()
            except TimeoutError:
                client.faults.append("no answer and no end of the connection within 30 s")
        client.close()

    async def _pace(self) -> None:
        """Keep all clients together to the rate of calls, if there is one."""
        if self._plan.rate:
            self._due = max(self._due + 1 / self._plan.rate, time.monotonic() - 1)
            await asyncio.sleep(self._due - time.monotonic())

    def _note(self, clients: list[RawClient]) -> None:
        totals = self._totals
        totals.calls += self._journal.ended_calls
        totals.faults[self._plan.kind] = totals.faults.get(self._plan.kind, 0) + 1
        for client in clients:
            totals.violations += [f"{self._place}: {text}" for text in client.faults]
            for status, count in client.statuses.items():
                totals.statuses[status] = totals.statuses.get(status, 0) + count

    # ---- faults ------------------------------------------------------------------------------------------------------

    async def _break(self) -> None:
        """Begin the fault after some calls, end it after some more."""
        if self._fault is None:
            return
        await self._calls(self._draw.randint(10, CLIENTS * self._plan.calls // 3), MAX_RECOVERY)
        fault = self._fault()
        begin = time.monotonic_ns()
        await asyncio.to_thread(fault.__enter__)
        try:
            await self._calls(self._journal.ended_calls + FAULT_CALLS, MAX_FAULT)
        finally:
            await asyncio.to_thread(fault.__exit__, None, None, None)
            await self._recover()
            if self._plan.kind not in HARMLESS:
                self._outages.append(Outage(self._plan.kind, begin, time.monotonic_ns()))

    async def _calls(self, count: int, seconds: float) -> None:
        """Wait until so many calls have ended, or so many seconds are over."""
        deadline = time.monotonic() + seconds
        while self._journal.ended_calls < count and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    async def _recover(self) -> None:
        """Wait until every process of the service finds its store."""
        deadline = time.monotonic() + MAX_RECOVERY
        well = 0
        connection = Connection(self._port, Journal(lambda _: None), {})
        while well < FRESH:
            connection.close()
            reply = await connection.get("/readyz")
            well = well + 1 if reply is not None and reply.status == 200 else 0
            if not well:
                if time.monotonic() > deadline:
                    raise AssertionError(f"{self._place}: the service is not ready {MAX_RECOVERY} s after a fault")
                await asyncio.sleep(0.02)
        connection.close()

    # ---- the check ---------------------------------------------------------------------------------------------------

    async def _check(self, journals: list[list[Event]]) -> None:
        balances = read_events(journals, self._outages)
        used = await self._settled(balances)
        for account, balance in balances.items():
            self._check_over(account, balance)
            if account[0] != "local":  # of which a part is claimed ahead for the time without a store
                self._check_charged(account, balance, used[account])
            if account[0] == "leased":
                self._check_leased(account, balance, used[account][0])

    def _check_over(self, account: Account, balance: Balance) -> None:
        quota = QUOTAS[account[0]]
        peak = balance.peak_beyond_refill(QUOTA, MINUTE) if account[0] == "local" else balance.peak()
        peak = max(peak, balance.used_from_leases)
        if peak > quota:
            self._totals.over += peak - quota
            self._totals.report(
                self._place, account, f"OVER: {peak} permits admitted, the quota is {quota}", balance, self._outages
            )

    def _check_charged(self, account: Account, balance: Balance, used: list[int]) -> None:
        kept, missing = self._totals.add(account, balance, used)
        if kept or missing:
            found = f"KEPT: {kept} too many" if kept else f"MISSING: {missing} too few"
            text = (
                f"{found}; {used} charged, {balance.charged} answered, {balance.given_back} given back, in doubt "
                f"+{balance.may_add} -{balance.may_take}; {balance.hung_up} asked for by clients that hung up"
            )
            self._totals.report(self._place, account, text, balance, self._outages)

    def _check_leased(self, account: Account, balance: Balance, charged: int) -> None:
        """See that permits taken ahead are charged before they are used, and given back by a client that closes."""
        unused = charged - balance.used_from_leases
        if unused < 0 or (self._done.exists() and unused and not balance.may_add + balance.may_take):
            text = f"LEASED: {charged} charged, {balance.used_from_leases} used by a client that has closed"
            self._totals.report(self._place, account, text, balance, self._outages)

    async def _settled(self, balances: dict[Account, Balance]) -> dict[Account, list[int]]:
        """Read what the store says of each account, until it is as expected or does not change any more."""
        connection = Connection(self._port, Journal(lambda _: None), {})
        used: dict[Account, list[int]] = {}
        changed = time.monotonic()
        unsettled = [account for account in balances if account[0] != "local"]
        while unsettled and time.monotonic() < changed + QUIET:
            connection.close()
            for account in unsettled:
                found = await read_usage(connection, account)
                if found != used.get(account):
                    used[account], changed = found, time.monotonic()
            unsettled = [account for account in unsettled if set(used[account]) != {balances[account].expected}]
        connection.close()
        return used


async def read_usage(connection: Connection, account: Account) -> list[int]:
    """Ask what is used of each limit of an account, once its limits are not lowered any more."""
    policy, key = account
    deadline = time.monotonic() + MAX_RECOVERY
    while time.monotonic() < deadline:
        reply = await connection.post("usage", {"policy": policy, "key": key})
        if reply is not None and reply.status == 200:
            limits = reply.body["limits"]
            if policy not in LOWERED or limits[0]["used"] + limits[0]["remaining"] == QUOTAS[policy]:
                return [limit["used"] for limit in limits]
        connection.close()
        await asyncio.sleep(0.02)
    raise AssertionError(f"the usage of {account} could not be read within {MAX_RECOVERY} s")


async def poll(condition: Callable[[], Any], what: str) -> None:
    """Wait for something."""
    deadline = time.monotonic() + MAX_PROCESS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {MAX_PROCESS} s")
        await asyncio.sleep(0.01)
