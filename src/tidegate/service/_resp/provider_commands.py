"""`TG.PROVIDER`: permits of a provider, by its name, its domain or a URL. TG.COMMIT and TG.CANCEL settle them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from tidegate.service._resp.arguments import ArgumentError, read_options, shorten
from tidegate.service._resp.replies import write_decision, write_usage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tidegate.service._http.app import App
    from tidegate.service._resp.session import Session

PROVIDER_USAGE: Final = (
    "ACQUIRE target [COST n | COST unit n ...] [TIMEOUT s] [PRIORITY p] [TTL s] | PEEK target [COST ...] | USAGE target"
)
ACQUIRE_OPTIONS: Final = ("COST", "TIMEOUT", "PRIORITY", "TTL")


class ProviderCommands:
    """The subcommands of TG.PROVIDER over one app."""

    def __init__(self, app: App) -> None:
        """Serve this app."""
        self._app = app
        self._decider = app.decider
        self._table: dict[str, Callable[[Session, str, Sequence[str]], Awaitable[str]]] = {
            "ACQUIRE": self._acquire,
            "PEEK": self._peek,
            "USAGE": self._usage,
        }

    async def run(self, session: Session, words: Sequence[str]) -> str:
        """Run a subcommand: its name, the target, and the options."""
        name, target, *options = words
        run = self._table.get(name.upper())
        if run is None:
            raise ArgumentError(f"unknown subcommand {shorten(name)}; usage: TG.PROVIDER {PROVIDER_USAGE}")
        return await run(session, target, options)

    async def _acquire(self, session: Session, target: str, words: Sequence[str]) -> str:
        """Take permits; the reply is a decision, and the id that settles them."""
        options = read_options(words, ACQUIRE_OPTIONS)
        waits = bool(options.get("timeout"))
        if waits:
            self._app.begin_wait()
        try:
            result = await self._decider.acquire_provider(target, **options)
        finally:
            self._app.waiting -= waits
        if result.id is not None:
            session.refunds.append(partial(self._decider.cancel_abandoned, result.id))
        return write_decision(result.decision, result.id, session.protocol, result.member)

    async def _peek(self, _session: Session, target: str, words: Sequence[str]) -> str:
        options = read_options(words, ("COST",))
        return write_decision(await self._decider.provider_permits.peek(target, **options))

    async def _usage(self, _session: Session, target: str, words: Sequence[str]) -> str:
        read_options(words, ())
        return write_usage(await self._decider.provider_permits.usage(target))
