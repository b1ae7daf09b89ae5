"""The command line: one module for each command, found by name when it is asked for.

A module has `HELP` (one line), `options(parser)` and `run(args, say) -> exit code`; COMMANDS names them. So `tidegate
--help` imports nothing heavy, and a command whose extra is not installed says so without breaking the others.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING, Final

from tidegate.cli.say import Say
from tidegate.errors import Closed, RateLimitError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: Final = {
    "acquire": "take permits of a running service, waiting for them if asked to",
    "add": "add a source to the running service",
    "budget": "show how much of a task budget is used, and when it runs out",
    "demo": "play a short live demonstration in the terminal",
    "peek": "ask what a running service would answer, and change nothing",
    "policies": "list the policies of a running service",
    "reset": "forget what a key has used (needs the admin token)",
    "serve": "answer rate limit questions over HTTP and gRPC",
    "sources": "list the sources of the running service",
    "start": "run scheduled sources within the quotas of their providers",
    "swarm": "show the agents of a swarm, their capacities, reductions and recoveries, live",
    "usage": "show how much of each limit a key has used",
    "validate": "check a service's file, or convert one of Envoy's rate limit service",
}
ABOUT: Final = "One rate limiter for both sides of an API: the requests you receive and the requests you send."
OK: Final = 0
DENIED: Final = 1  # the answer was no
WRONG: Final = 2  # bad input: arguments, a file, an environment variable
UNAVAILABLE: Final = 3  # a store, a bus or the service could not be reached
INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code says how it went."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(arguments)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return OK
    say = Say(as_json=args.json)
    try:
        return int(args.run(args, say))
    except RateLimitError as error:
        say.error(str(error))
        return UNAVAILABLE if isinstance(error, StoreUnavailable | Closed) else WRONG
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return OK


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tidegate", description=ABOUT)
    parser.add_argument("--version", action="version", version=_version())
    parser.set_defaults(json=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, line in COMMANDS.items():
        child = commands.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        child.add_argument("--json", action="store_true", help="answer in JSON, for programs")
        if name in arguments:  # only the command that is meant is imported
            module = importlib.import_module(f"tidegate.cli.{name}")
            module.options(child)
            child.set_defaults(run=module.run)
    return parser


def _version() -> str:
    from importlib.metadata import version  # noqa: PLC0415 - only asked for with --version

    return f"tidegate {version('tidegate')}"
