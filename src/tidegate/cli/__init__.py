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
    "block": "deny a key for a while, whatever its limits say; without a key: list the blocks",
    "budget": "show how much of a task budget is used, and when it runs out",
    "completion": "print a script that completes commands and options in your shell",
    "demo": "play a short live demonstration in the terminal",
    "doctor": "check a deployment, and say what to do",
    "peek": "ask what a running service would answer, and change nothing",
    "policies": "list the policies of a running service",
    "reset": "forget what a key has used (needs the admin token)",
    "sources": "list the sources of the running service",
    "start": "run the service: decisions by HTTP and gRPC, sources within quotas, a dashboard",
    "swarm": "show the agents of a swarm, their capacities, reductions and recoveries, live",
    "top": "show the busiest policies and the keys nearest to a limit of a running service, live",
    "usage": "show how much of each limit a key has used",
    "validate": "check a service's file, or convert one of Envoy's rate limit service",
}
ABOUT: Final = "One rate limiter for both sides of an API: the requests you receive and the requests you send."
OK: Final = 0
DENIED: Final = 1  # the answer was no
WRONG: Final = 2  # bad input: arguments, a file, an environment variable
UNAVAILABLE: Final = 3  # a store, a bus or the service could not be reached
INTERRUPTED: Final = 130
CODES: Final = f"""\
exit codes:
  {OK:<6} it went well; allowed
  {DENIED:<6} the answer is no: denied, or the doctor found something wrong
  {WRONG:<6} bad input: arguments, a file, an environment variable
  {UNAVAILABLE:<6} a store, a bus or the service could not be reached
  {INTERRUPTED:<6} interrupted by Ctrl-C

Every command takes --json. Colours are shown on a terminal only, and not if NO_COLOR is set.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code says how it went."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = parser_of(arguments)
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


def parser_of(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Make the parser; only the commands that the arguments name are imported and have their options."""
    form = argparse.RawDescriptionHelpFormatter  # keeps the table in its form
    parser = argparse.ArgumentParser(prog="tidegate", description=ABOUT, epilog=CODES, formatter_class=form)
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
