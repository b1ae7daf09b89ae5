"""A soak of one store: the real service under mixed traffic, with faults, round after round."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

from tests.service.harness import serving
from tests.soak.connection import Connection
from tests.soak.journal import Journal
from tests.soak.rounds import Plan, Round, read_usage
from tests.soak.service import WORKERS, Service, rise, settings_text
from tests.soak.targets import LOSING, open_target
from tests.soak.totals import Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.soak.targets import Fault

CALLS: Final = 36  # of each client in a round


class Soak:
    """Runs rounds on one store."""

    def __init__(
        self,
        store: str,
        folder: Path,
        seed: int,
        *,
        rate: float = 0.0,
        calls: int = CALLS,
        kinds: Sequence[str] = (),
        say: Callable[[str], object] = print,
    ) -> None:
        """Soak this store; `kinds` are the faults to draw from, all of them by default."""
        self.totals = Totals(store, folder / "violations.log")
        self._folder = folder
        self._seed = f"{seed}/{store}"
        self._rate = rate
        self._calls = calls
        self._kinds = kinds
        self._say = say
        self._draw = random.Random(self._seed)

    def run(self, more: Callable[[int], bool]) -> Totals:
        """Run rounds while `more` says so of their number."""
        with open_target(self.totals.name, self._folder) as target:
            with serving(self._folder, settings_text(target.url), "--workers", str(WORKERS)) as running:
                service = Service(running, self._folder, target.url)
                asyncio.run(self._rounds(service, {**target.faults, **service.faults}, more))
                self._expect(running.stop() == 0, f"the service ended with {running.process.returncode}")
            self._expect(not running.logged("Traceback"), f"a traceback in {running.log}")
        return self.totals

    async def _rounds(self, service: Service, faults: dict[str, Fault], more: Callable[[int], bool]) -> None:
        totals = self.totals
        if not {"calm", *faults} >= set(self._kinds):
            raise ValueError(f"the faults of {totals.name} are calm, {', '.join(faults)}; not {', '.join(self._kinds)}")
        kinds: list[str] = []
        while more(totals.rounds):
            kinds = kinds or self._shuffled(faults)
            kind = kinds.pop()
            plan = Plan(self._seed, totals.rounds, kind, self._calls, self._rate)
            await Round(plan, service, faults.get(kind), self._folder, totals).run()
            for name, sample in service.sample().items():
                totals.samples[name].append(sample)
            totals.rounds += 1
            self._say(totals.progress(kind))
        await self._check_again(service)
        for name, samples in totals.samples.items():
            for text in rise(samples):
                self._expect(False, f"{name} process: {text}")
        noticed = service.losses() > 0 or not set(LOSING) & set(totals.faults)
        self._expect(noticed, "the service's log reports no outage of the store: was its message changed?")

    def _shuffled(self, faults: dict[str, Fault]) -> list[str]:
        """Draw the order of the next faults."""
        kinds = list(self._kinds or ("calm", *faults))
        self._draw.shuffle(kinds)
        return kinds

    def _expect(self, good: bool, text: str) -> None:
        if not good:
            self.totals.violations.append(text)

    async def _check_again(self, service: Service) -> None:
        """See that nothing was charged late, or got lost in a later round."""
        connection = Connection(service.running.port, Journal(lambda _: None), {})
        for account, (least, most) in self.totals.checked.items():
            used = await read_usage(connection, account)
            text = f"{account}: {used} charged at the end of the soak, between {least} and {most} after its round"
            self._expect(least <= min(used) and max(used) <= most, text)
        connection.close()
