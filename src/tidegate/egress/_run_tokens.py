"""Runs of agents at the gateway: each request with a token of a run is charged to its node, too.

The token is `X-Tidegate-Run`, or is sent where the token of a caller goes. The field never replaces the authentication
of the caller. In the place of a caller's token, it is the authentication of the caller that has `runs: true`, if there
is one. Wherever a token of a run is found, valid or not, it is removed from what is sent.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tidegate._runtime.ambient import CURRENT_RUN
from tidegate.agents._errors import RunDenied, RunEndedError, TokenError
from tidegate.agents._known import KnownRuns
from tidegate.agents._tokens import looks_like_token
from tidegate.egress._messages import EgressError
from tidegate.errors import ConfigError, RateLimitError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.agents import AsyncRun
    from tidegate.stores import Store

STOP_CHECK: Final = 1.0  # seconds between two checks whether the run of a stream was stopped


class EgressRuns:
    """The runs of a gateway, in its store."""

    def __init__(self, store: Store, secrets: Sequence[str] = ()) -> None:
        """Find runs in this store."""
        self._store = store
        self._secrets = tuple(secrets)
        self._known: KnownRuns | None = None

    async def enter(self, token: str) -> AsyncRun:
        """Make a run current for a request, which has a task of its own; raises EgressError without a valid token."""
        message = "the token of a run is not valid here: it was changed, is of another store, or its run ended"
        if not looks_like_token(token):
            raise EgressError(401, "bad-run-token", message)
        try:
            self._known = self._known or KnownRuns(self._store, self._secrets)
            run = await self._known.join(token)
        except (TokenError, RunEndedError):
            raise EgressError(401, "bad-run-token", message) from None
        except ConfigError:
            message = "the store of this gateway keeps no runs: use one of tidegate's own stores"
            raise EgressError(400, "no-runs", message) from None
        except RateLimitError:
            raise EgressError(
                503, "unavailable", "the store of the gateway is unavailable", {"Retry-After": "1"}
            ) from None
        CURRENT_RUN.set(run)
        return run


async def end_when_stopped(run: AsyncRun, end: Callable[[RunDenied], object]) -> None:
    """Call a function when the run of a stream was stopped with `end_streams`; an unavailable store ends nothing."""
    while True:
        await asyncio.sleep(STOP_CHECK)
        try:
            await run.check_streams()
        except RunDenied as denied:
            end(denied)
            return
        except RateLimitError:
            continue
