"""`TG.RUN`: runs of agents. The argument and the reply are the JSON of the same verb over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.service._api.problems import encode
from tidegate.service._api.verbs import (
    RUNS,
    RUNS_CHARGE,
    RUNS_CHILD,
    RUNS_CLOSE,
    RUNS_CREATE,
    RUNS_EXTEND,
    RUNS_READ,
    RUNS_REPORT,
    RUNS_STOP,
)
from tidegate.service._resp.arguments import ArgumentError, shorten
from tidegate.service._resp.replies import write_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.service._api.verbs import ServiceVerb
    from tidegate.service._http.app import App
    from tidegate.service._resp.session import Session

RUN_USAGE: Final = "CREATE | CHILD | CHARGE | READ | REPORT | EXTEND | STOP | CLOSE json, or LIST"
SUBCOMMANDS: Final[dict[str, ServiceVerb[Any, Any]]] = {
    "CREATE": RUNS_CREATE,
    "CHILD": RUNS_CHILD,
    "CHARGE": RUNS_CHARGE,
    "READ": RUNS_READ,
    "REPORT": RUNS_REPORT,
    "EXTEND": RUNS_EXTEND,
    "STOP": RUNS_STOP,
    "CLOSE": RUNS_CLOSE,
}


class RunCommands:
    """The subcommands of TG.RUN over one app."""

    def __init__(self, app: App) -> None:
        """Serve this app."""
        self._app = app

    async def run(self, session: Session, words: Sequence[str]) -> str:
        """Run a subcommand: its name, and the JSON of its request."""
        name, *arguments = words
        if name.upper() == "LIST" and not arguments:
            session.check(admin=RUNS.admin)
            return write_value(encode(await self._app.runs.list()).decode())
        verb = SUBCOMMANDS.get(name.upper())
        if verb is None or len(arguments) != 1:
            raise ArgumentError(f"unknown subcommand {shorten(name)}; usage: TG.RUN {RUN_USAGE}")
        request = verb.decode(arguments[0].encode())
        if verb.guarded and request.needs_admin:
            session.check(admin=True)
        function = getattr(self._app.runs, name.lower())
        return write_value(encode(await function(request)).decode())
