"""One client on the RESP port: its rights, its protocol version, and the commands that only concern its connection.

`run` returns a reply for every command that needs no policy; `commands` implements the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.service._api.problems import ProblemError
from tidegate.service._resp.arguments import ArgumentError, shorten
from tidegate.service._resp.replies import OK, write_error, write_map, write_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.service._http.app import App
    from tidegate.service._resp.replies import Value

SERVER_NAME: Final = "tidegate"
REDIS_VERSION: Final = "7.0.0"  # whose protocol the port speaks: some clients choose their commands by it
MAX_CLIENT_NAME: Final = 256  # characters of the name that a client gives to its connection
NO_AUTH_NEEDED: Final = (  # as Redis: clients know this message
    "AUTH <password> called without any password configured for the default user. "
    "Are you sure your configuration is correct?"
)
WRONG_PASSWORD: Final = "invalid token: send the decision token or the admin token as the password"  # noqa: S105 - a message
AUTH_WORDS: Final = 2  # of AUTH: a user name, which is ignored, and the token
NO_TRANSACTIONS: Final = (
    "transactions are not supported: use a pipeline without one (redis-py: pipeline(transaction=False))"
)
PROTOCOLS: Final = ("2", "3")


class Session:
    """The state of one connection."""

    def __init__(self, app: App, number: int) -> None:
        """Start without a token; `number` identifies the connection."""
        self.number = number
        self.protocol: int = 2
        self.name: str = ""
        self.address: str = ""  # of the client
        self.closing: bool = False  # the client has sent QUIT
        self.in_transaction: bool = False  # MULTI was refused: so are all commands until EXEC, and nothing is charged
        self.refunds: list[Callable[[], None]] = []  # of commands that were charged, and have no reply yet
        self._app = app
        self._needs_token = app.settings.decision_token is not None
        self._has_token = False
        self._is_admin = app.authenticator.open
        self.may_decide_now: bool = not self._needs_token  # has the right to decisions, and is not in a transaction
        self._commands: dict[str, Callable[[Sequence[str]], str]] = {
            "AUTH": self._auth,
            "HELLO": self._hello,
            "CLIENT": self._client,
            "PING": self._ping,
            "ECHO": self._echo,
            "SELECT": self._select,
            "QUIT": self._quit,
            "MULTI": self._multi,
            "EXEC": self._end_transaction,
            "DISCARD": self._end_transaction,
        }

    def run(self, name: str, words: Sequence[str]) -> str | None:
        """Run a command of the connection; None if it is another command."""
        run = self._commands.get(name)
        if run is None:
            return None
        if name not in ("AUTH", "HELLO", "QUIT", "EXEC", "DISCARD"):
            self.check(admin=False)
        return run(words)

    def check(self, *, admin: bool) -> None:
        """Raise unless the client may request decisions, or do what needs the admin token."""
        if self._needs_token and not self._has_token:
            raise ProblemError("unauthorized", "Authentication required: send the token with AUTH")
        if self.in_transaction:
            raise ArgumentError(NO_TRANSACTIONS)
        if admin and not self._is_admin:
            configured = self._app.settings.admin_token is not None
            missing = "no admin token is configured: set admin_token or admin_token_file"
            raise ProblemError("forbidden", "this needs the admin token" if configured else missing)

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _auth(self, words: Sequence[str]) -> str:
        if not 1 <= len(words) <= AUTH_WORDS:
            raise ArgumentError("usage: AUTH [username] token")
        return self._authenticate(words[-1]) or OK

    def _authenticate(self, token: str) -> str | None:
        """Accept a token, or return an error."""
        if self._app.authenticator.open:
            return write_error("ERR", NO_AUTH_NEEDED)
        is_admin, is_decision = self._app.authenticator.find_rights(token.encode())
        if is_admin or is_decision:
            self._is_admin, self._has_token = is_admin, True
            self.may_decide_now = not self.in_transaction
            return None
        self._app.decider.stats.errors.add("unauthorized")
        return write_error("WRONGPASS", WRONG_PASSWORD)

    def _hello(self, words: Sequence[str]) -> str:
        """`HELLO [2|3 [AUTH username token] [SETNAME name]]`."""
        if words and words[0] not in PROTOCOLS:
            return write_error("NOPROTO", "unsupported protocol version")
        options = list(words[1:])
        name = None
        while options:
            option = options.pop(0).upper()
            if option == "AUTH" and len(options) >= AUTH_WORDS:
                error = self._authenticate(options[1])
                if error is not None:
                    return error
                del options[:AUTH_WORDS]
            elif option == "SETNAME" and options:
                name = options.pop(0)
            else:
                raise ArgumentError(f"syntax error in HELLO: {shorten(option)}")
        self.check(admin=False)
        self.protocol = int(words[0]) if words else self.protocol
        self.name = self.name if name is None else name[:MAX_CLIENT_NAME]
        described: dict[str, Value] = {
            "server": SERVER_NAME,
            "version": REDIS_VERSION,
            "proto": self.protocol,
            "id": self.number,
        }
        return write_map({**described, "mode": "standalone", "role": "master", "modules": []}, self.protocol)

    def _client(self, words: Sequence[str]) -> str:
        name = words[0].upper() if words else ""
        if name == "ID":
            return write_value(self.number)
        if name == "GETNAME":
            return write_value(self.name or None, self.protocol)
        if name == "SETNAME" and len(words) == 2:  # noqa: PLR2004 - the word and the name
            self.name = words[1][:MAX_CLIENT_NAME]
            return OK
        if name == "SETINFO":
            return OK
        raise ArgumentError(f"CLIENT {shorten(name)} is not supported: expected ID, GETNAME, SETNAME or SETINFO")

    @staticmethod
    def _ping(words: Sequence[str]) -> str:
        return write_value(words[0]) if words else "+PONG\r\n"

    @staticmethod
    def _echo(words: Sequence[str]) -> str:
        if len(words) != 1:
            raise ArgumentError("usage: ECHO message")
        return write_value(words[0])

    @staticmethod
    def _select(words: Sequence[str]) -> str:
        if list(words) != ["0"]:
            raise ArgumentError("DB index is out of range: there is only database 0")
        return OK

    def _multi(self, _words: Sequence[str]) -> str:
        self.in_transaction, self.may_decide_now = True, False
        raise ArgumentError(NO_TRANSACTIONS)

    def _end_transaction(self, _words: Sequence[str]) -> str:
        self.in_transaction = False
        self.may_decide_now = self._has_token or not self._needs_token
        return write_error("EXECABORT", f"Transaction discarded: {NO_TRANSACTIONS}")

    def _quit(self, _words: Sequence[str]) -> str:
        self.closing = True
        return OK
