"""The commands of the RESP port. All decisions are made by the Decider, as over HTTP.

`decide_usual` decides `TG.ACQUIRE policy key` at once, if it need not wait for the store. `run` handles all others:
consecutive commands that do not wait and do not depend on each other are decided as one batch, the others in order.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core._bounds import SECOND
from tidegate.errors import RateLimitError
from tidegate.service._api.problems import ProblemError, problem_from
from tidegate.service._decisions.audit import Origin
from tidegate.service._decisions.idempotency import KeyedCall
from tidegate.service._decisions.policy_limiters import ASK_STORE, MAX_BATCH, Subject
from tidegate.service._resp.arguments import ArgumentError, read_options, read_words, shorten
from tidegate.service._resp.parser import read_usual
from tidegate.service._resp.provider_commands import PROVIDER_USAGE, ProviderCommands
from tidegate.service._resp.replies import OK, write_decision, write_map, write_problem, write_usage, write_value
from tidegate.service._resp.run_commands import RUN_USAGE, RunCommands
from tidegate.service._resp.session import REDIS_VERSION
from tidegate.service._resp.throttle import MIN_WORDS, THROTTLE_USAGE, Throttle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence, Sized

    from tidegate._policy import Cost
    from tidegate.service._http.app import App
    from tidegate.service._resp.parser import Command
    from tidegate.service._resp.replies import Value
    from tidegate.service._resp.session import Session

    Run = Callable[[Session, Sequence[str]], Awaitable[str]]

log: logging.Logger = logging.getLogger("tidegate.service")

REPORT_INTERVAL: Final = 60 * SECOND  # between two log lines about HTTP requests
COST_ONLY: Final = ("COST",)
WAITING_OPTIONS: Final = ("COST", "TIMEOUT", "PRIORITY")
RESERVE_OPTIONS: Final = (*WAITING_OPTIONS, "TTL")
UNSUPPORTED: Final = {
    "SUBSCRIBE": "the RESP port has no channels",
    "CLUSTER": "this is not a Redis cluster: use a client for a single server",
}


class RespCommand(NamedTuple):
    """A command. `verb` names its histogram; commands that are `independent` are run concurrently if pipelined."""

    run: Run
    verb: str
    usage: str
    min_words: int
    max_words: int = 128
    admin: bool = False
    independent: bool = False


class Commands:
    """All commands over one app."""

    def __init__(self, app: App, connections: Sized) -> None:
        """Serve this app; INFO shows how many connections there are."""
        self._app = app
        self._connections = connections
        self._decider = app.decider
        self._steady = app.decider.store.clock.steady
        self._acquire_latency = app.decider.stats.latency["acquire"]
        self._batch_latency = app.decider.stats.latency["batch"]
        self._throttle = Throttle(app.decider)
        self._next_report = 0  # when the next HTTP request is logged, in steady time
        options = "[COST n | COST unit n ...]"
        self._table: dict[str, RespCommand] = {
            "TG.ACQUIRE": RespCommand(
                self._acquire, "acquire", f"policy key {options} [TIMEOUT s] [PRIORITY p]", 2, independent=True
            ),
            "TG.PEEK": RespCommand(self._peek, "peek", f"policy key {options}", 2, independent=True),
            "TG.RESERVE": RespCommand(
                self._reserve, "reserve", f"policy key {options} [TIMEOUT s] [PRIORITY p] [TTL s]", 2, independent=True
            ),
            "TG.COMMIT": RespCommand(self._commit, "commit", f"id {options}", 1, independent=True),
            "TG.CANCEL": RespCommand(self._cancel, "cancel", "id", 1, 1, independent=True),
            "TG.RELEASE": RespCommand(self._release, "release", f"policy key {options}", 2, independent=True),
            "TG.USAGE": RespCommand(self._usage, "usage", "policy key", 2, 2, independent=True),
            "TG.RESET": RespCommand(self._reset, "reset", "policy key", 2, 2, admin=True),
            "TG.PROVIDER": RespCommand(ProviderCommands(app).run, "acquire", PROVIDER_USAGE, 2, independent=True),
            "TG.RUN": RespCommand(RunCommands(app).run, "runs", RUN_USAGE, 1, 2),
            "CL.THROTTLE": RespCommand(
                self._run_throttle, "throttle", THROTTLE_USAGE, MIN_WORDS, MIN_WORDS + 1, independent=True
            ),
            "COMMAND": RespCommand(self._describe, "other", "[COUNT | DOCS | INFO | LIST]", 0),
            "INFO": RespCommand(self._info, "other", "", 0),
        }

    # ---- the fast path -----------------------------------------------------------------------------------------------

    def decide_usual(self, data: bytes) -> bytes | None:
        """Decide common commands that need no coroutine; None if the input is anything else.

        The client must be allowed to request decisions.
        """
        start = self._steady()
        usual = None if self._app.is_busy else read_usual(data)
        if usual is None:
            return None
        policies, keys = usual
        if len(keys) == 1:
            reply = self._acquire_now(policies[0], keys[0])
            if reply is not None:
                self._acquire_latency.add(self._steady() - start)
                return reply.encode()
        if not 1 < len(keys) <= MAX_BATCH:
            return None
        results: Any = self._decider.batch_now(policies, keys, [1] * len(keys))
        if results is ASK_STORE:
            return None
        replies = "".join([self._write_result(each) for each in results])
        self._batch_latency.add(self._steady() - start)
        return replies.encode()

    def _acquire_now(self, policy: str, key: str) -> str | None:
        """Decide a common command; None if the store has to be asked."""
        try:
            decision: Any = self._decider.acquire_now(policy, key)
        except RateLimitError as error:
            return self._refuse(error)
        return None if decision is ASK_STORE else write_decision(decision)

    def throttle_now(self, commands: Sequence[Command]) -> str | None:
        """Decide a pipeline of CL.THROTTLE commands on a store in memory; None if there are other commands.

        The client must be allowed to request decisions.
        """
        if not self._throttle.instant or self._app.is_busy or any(command_name(c) != "CL.THROTTLE" for c in commands):
            return None
        start = self._app.begin_request()
        replies = []
        for command in commands:
            try:
                replies.append(self._throttle.run_now(read_words(command)))
            except RateLimitError as error:
                replies.append(self._refuse(error))
        self._app.end_request("throttle" if len(commands) == 1 else "batch", start)
        return "".join(replies)

    # ---- running -----------------------------------------------------------------------------------------------------

    async def run(self, session: Session, commands: Sequence[Command], send: Callable[[str], None]) -> None:
        """Run commands in order; `send` the replies of each group of commands. Commands after QUIT are dropped.

        If this is cancelled, because the client is gone, what the commands without a reply were charged is refunded.
        """
        position = 0
        while position < len(commands) and not session.closing:
            count = self._independent(commands, position)
            group = commands[position : position + count]
            verb = "batch" if count > 1 else self._verb(group[0])
            start = self._app.begin_request()
            try:
                send("".join(await self._run_group(session, group)))
            except asyncio.CancelledError:
                for refund in session.refunds:
                    refund()
                raise
            finally:
                session.refunds.clear()
                self._app.end_request(verb, start)
            position += count

    def _verb(self, command: Command) -> str:
        """Return the name of the histogram for a command; a call that may wait has its own, as over HTTP."""
        found = self._table.get(command_name(command))
        return "other" if found is None else f"{found.verb} wait" if may_wait(command) else found.verb

    def _independent(self, commands: Sequence[Command], start: int) -> int:
        """Return how many commands from `start` on are run together: the same command, none of which may wait."""
        action = action_of(commands[start])
        entry = self._table.get(command_name(commands[start]))
        end = start + 1
        if entry is not None and entry.independent and not may_wait(commands[start]):
            while end < len(commands) and action_of(commands[end]) == action and not may_wait(commands[end]):
                end += 1
        return end - start

    async def _run_group(self, session: Session, group: Sequence[Command]) -> list[str]:
        """Run commands that do not depend on each other."""
        if len(group) == 1:
            return [await self._run_one(session, group[0])]
        if command_name(group[0]) == "TG.ACQUIRE":
            return await self._acquire_all(session, group)
        return list(await asyncio.gather(*(self._run_one(session, command) for command in group)))

    async def _run_one(self, session: Session, command: Command) -> str:
        """Run one command; an error is its reply."""
        name = command_name(command)
        try:
            words = read_words(command)
            reply = session.run(name, words)
            return await self._run_entry(session, name, words) if reply is None else reply
        except (RateLimitError, ProblemError) as error:
            return self._refuse(error)
        except Exception:
            log.exception("the command %s failed", shorten(name))
            return self._refuse(ProblemError("internal", "see the log of the service"))

    async def _run_entry(self, session: Session, name: str, words: Sequence[str]) -> str:
        entry = self._check(session, name, words)
        return await entry.run(session, words)

    def _check(self, session: Session, name: str, words: Sequence[str]) -> RespCommand:
        """Return the entry of a command; raise unless it exists, is allowed, and has enough arguments."""
        entry = self._table.get(name)
        session.check(admin=entry is not None and entry.admin)
        if entry is None:
            advice = UNSUPPORTED.get(name, f"expected one of {', '.join(self._table)}")
            raise ArgumentError(f"unknown command {shorten(name)}: {advice}")
        if not entry.min_words <= len(words) <= entry.max_words:
            raise ArgumentError(f"wrong number of arguments; usage: {name} {entry.usage}")
        # Admin requests are accepted even if there are too many requests.
        if self._app.stopping or not entry.admin:
            self._app.check_load()
        return entry

    def _refuse(self, error: RateLimitError | ProblemError) -> str:
        """Count and write an error."""
        if isinstance(error, ProblemError):
            problem = error
        elif isinstance(error, ArgumentError):
            problem = ProblemError("bad-request", str(error))
        else:
            problem = problem_from(error)
            if problem.pointer:  # a RESP error has no field of its own for it
                problem = ProblemError(problem.kind, f"{problem.pointer.strip('/')}: {problem}")
        self._app.decider.stats.errors.add(problem.kind)
        return write_problem(problem)

    def report_http(self) -> None:
        """Count an HTTP request on the RESP port; log it, at most once in REPORT_INTERVAL."""
        self._app.decider.stats.errors.add("bad-request")
        now = self._steady()
        if self._next_report <= now:
            self._next_report = now + REPORT_INTERVAL
            log.warning("an HTTP request was sent to the RESP port: the connection was closed")

    # ---- decisions ---------------------------------------------------------------------------------------------------

    async def _acquire_all(self, session: Session, group: Sequence[Command]) -> list[str]:
        """Decide several acquires as one batch."""
        asks: list[tuple[Subject, Cost]] = []
        replies: list[str | None] = []
        for command in group:
            try:
                words = read_words(command)
                self._check(session, "TG.ACQUIRE", words)
                options = read_options(words[2:], COST_ONLY)
            except (RateLimitError, ProblemError) as error:
                replies.append(self._refuse(error))
            else:
                asks.append((Subject(words[0], words[1]), options.get("cost", 1)))
                replies.append(None)
        decided = iter(await self._decider.batch(asks) if asks else ())
        return [self._write_result(next(decided)) if reply is None else reply for reply in replies]

    def _write_result(self, result: Any) -> str:  # noqa: ANN401 - a decision, an error or None
        return self._refuse(result) if isinstance(result, RateLimitError) else write_decision(result)

    async def _acquire(self, _session: Session, words: Sequence[str]) -> str:
        options = read_options(words[2:], WAITING_OPTIONS)
        subject = Subject(words[0], words[1])
        if not options.get("timeout"):
            return write_decision(await self._decider.acquire(subject, **options))
        self._app.begin_wait()
        try:
            return write_decision(await self._decider.acquire(subject, **options))
        finally:
            self._app.waiting -= 1

    async def _peek(self, _session: Session, words: Sequence[str]) -> str:
        options = read_options(words[2:], COST_ONLY)
        return write_decision(await self._decider.peek(Subject(words[0], words[1]), **options))

    async def _reserve(self, session: Session, words: Sequence[str]) -> str:
        options = read_options(words[2:], RESERVE_OPTIONS)
        waits = bool(options.get("timeout"))
        if waits:
            self._app.begin_wait()
        try:
            result = await self._decider.reserve(Subject(words[0], words[1]), **options)
        finally:
            self._app.waiting -= waits
        if result.id is not None:
            session.refunds.append(partial(self._decider.cancel_abandoned, result.id))
        return write_decision(result.decision, result.id, session.protocol)

    async def _commit(self, _session: Session, words: Sequence[str]) -> str:
        cost = read_options(words[1:], COST_ONLY).get("cost")
        await self._decider.commit(words[0], cost, _same_command("commit", words))
        return OK

    async def _cancel(self, _session: Session, words: Sequence[str]) -> str:
        await self._decider.cancel(words[0], _same_command("cancel", words))
        return OK

    async def _release(self, _session: Session, words: Sequence[str]) -> str:
        await self._decider.release(Subject(words[0], words[1]), **read_options(words[2:], COST_ONLY))
        return OK

    async def _usage(self, _session: Session, words: Sequence[str]) -> str:
        return write_usage(await self._decider.usage(Subject(words[0], words[1])))

    async def _reset(self, session: Session, words: Sequence[str]) -> str:
        await self._decider.reset(Subject(words[0], words[1]), Origin(session.name, session.address))
        return OK

    async def _run_throttle(self, session: Session, words: Sequence[str]) -> str:
        return await self._throttle.run(words, session.refunds)

    # ---- about the service -------------------------------------------------------------------------------------------

    async def _info(self, _session: Session, _words: Sequence[str]) -> str:
        lines = (
            "# Server", f"redis_version:{REDIS_VERSION}", "server_name:tidegate", "redis_mode:standalone",
            "# Clients", f"connected_clients:{len(self._connections)}",
            "# Persistence", "loading:0",
            "# Stats", f"waiting:{self._decider.waiting}",
        )  # fmt: skip
        return write_value("".join(f"{line}\r\n" for line in lines))

    async def _describe(self, session: Session, words: Sequence[str]) -> str:
        """`COMMAND`: the names and the arity of the commands, as far as clients and redis-cli need them."""
        action = words[0].upper() if words else "INFO"
        if action == "COUNT":
            return write_value(len(self._table))
        if action == "LIST":
            return write_value([name.lower() for name in self._table])
        if action == "DOCS":
            return write_map({}, session.protocol)
        if action != "INFO":
            raise ArgumentError(f"COMMAND {shorten(action)} is not supported: expected COUNT, DOCS, INFO or LIST")
        names = [name.upper() for name in words[1:]] or list(self._table)
        described: list[Value] = [self._describe_one(name) for name in names]
        return write_value(described, session.protocol)

    def _describe_one(self, name: str) -> Value:
        entry = self._table.get(name)
        if entry is None:
            return None
        fixed = entry.min_words == entry.max_words
        key = int(entry.verb != "other") + int(name.startswith("TG.") and entry.min_words > 1)
        return [name.lower(), entry.min_words + 1 if fixed else -entry.min_words - 1, [], key, key, int(key > 0)]


def _same_command(verb: str, words: Sequence[str]) -> KeyedCall:
    """Return the call of a settlement: a client may repeat the same command after it has lost its connection."""
    return KeyedCall.read(words[0].encode(), verb, repr(words[1:]).encode())


def command_name(command: Command) -> str:
    """Return the name of a command."""
    return command[0].decode("ascii", "replace").upper()


def action_of(command: Command) -> tuple[str, bytes]:
    """Return the name of a command and, of a provider's command, what it does: ACQUIRE, PEEK or USAGE."""
    name = command_name(command)
    return name, command[1].upper() if name == "TG.PROVIDER" and len(command) > 1 else b""


def may_wait(command: Command) -> bool:
    """Return whether a command has a TIMEOUT or a PRIORITY, so that it is not decided in a batch."""
    return any(word.upper() in (b"TIMEOUT", b"PRIORITY") for word in command[3:])
