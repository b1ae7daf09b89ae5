"""The command line: one module for each command, imported when the command is used.

A module has `add_options(parser)` and `run(args, output) -> exit code`; COMMANDS has the names and the help lines. So
`tidegate --help` imports nothing heavy, and a command whose extra is not installed does not break the others.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from typing import TYPE_CHECKING, Final, NoReturn

from tidegate.cli.output import Output
from tidegate.errors import Closed, ConfigError, RateLimitError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: Final = {
    "acquire": "take permits of a policy or a provider from a running service; wait for them with --timeout",
    "add": "add a source to the running service",
    "block": "deny all calls with a key for some time; without a key, list the blocked keys (needs the admin token)",
    "budget": "show how much of a task budget is used, and when it runs out",
    "cancel": "return permits of a provider, or of a reservation, that were not used",
    "commit": "settle permits of a provider, or a reservation, with the actual cost",
    "completion": "print a script that completes commands and options in your shell",
    "demo": "run a short live demonstration in the terminal",
    "doctor": "check a deployment, and print how to fix problems",
    "egress": "run the egress gateway alone: programs in any language call providers through it, within their quotas",
    "peek": "show what a running service would decide, without taking permits",
    "policies": "list the policies of a running service",
    "reset": "reset the usage of a key (needs the admin token)",
    "sources": "list the sources of the running service",
    "start": "run the service: decisions over HTTP, gRPC and RESP, scheduled sources, and a dashboard",
    "swarm": "show the agents of a swarm, their capacities, reductions and recoveries, live",
    "top": "show the busiest policies of a running service and the keys nearest to a limit, live",
    "usage": "show how much of each limit a key or a provider has used",
    "validate": "check configuration files of any kind, or convert files of Envoy's rate limit service",
}
DESCRIPTION: Final = "One rate limiter for both sides of an API: the requests you receive and the requests you send."
RENAMED_OPTIONS: Final = {"--wait": "--timeout"}  # names of options in earlier versions
EXIT_OK: Final = 0
EXIT_DENIED: Final = 1  # a call was denied, or the doctor found a problem
EXIT_BAD_INPUT: Final = 2  # invalid input: arguments, a file, an environment variable
EXIT_UNAVAILABLE: Final = 3  # a store, a bus or the service cannot be reached
EXIT_INTERRUPTED: Final = 130
EXIT_CODES_HELP: Final = f"""\
exit codes:
  {EXIT_OK:<6} success; the call was allowed
  {EXIT_DENIED:<6} the call was denied, or 'tidegate doctor' found a problem
  {EXIT_BAD_INPUT:<6} invalid input: arguments, a file, an environment variable
  {EXIT_UNAVAILABLE:<6} a store, a bus or the service cannot be reached
  {EXIT_INTERRUPTED:<6} interrupted by Ctrl-C

Every command accepts --json. The output has colours only on a terminal, and not if NO_COLOR is set.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = build_parser(arguments)
    except ConfigError as error:  # the command needs an extra that is not installed
        Output(as_json="--json" in arguments).write_error(str(error))
        return EXIT_BAD_INPUT
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return EXIT_OK
    output = Output(as_json=args.json)
    try:
        return int(args.run(args, output))
    except RateLimitError as error:
        output.write_error(str(error))
        return EXIT_UNAVAILABLE if isinstance(error, StoreUnavailable | Closed) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_OK


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors suggest the command or option with the most similar name."""

    known_options: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Exit with an error message."""
        from difflib import get_close_matches  # noqa: PLC0415 - only needed after a mistake

        wrong, known = "", self.known_options
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            wrong, known = choice[1], re.findall(r"[\w-]+", choice[2])
        elif option := re.search(r"unrecognized arguments:.* (--[\w-]+)", message):
            wrong = option[1]
        renamed = RENAMED_OPTIONS.get(wrong)
        near = [renamed] if renamed in known else get_close_matches(wrong, known, n=1)
        super().error(f"{message}; did you mean {near[0]!r}?" if near else message)


def build_parser(arguments: Sequence[str]) -> CommandParser:
    """Build the parser; only the commands that the arguments name are imported and have their options."""
    form = argparse.RawDescriptionHelpFormatter  # keeps the line breaks of the table
    parser = CommandParser(prog="tidegate", description=DESCRIPTION, epilog=EXIT_CODES_HELP, formatter_class=form)
    parser.add_argument("--version", action="version", version=_version())
    parser.set_defaults(json=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, line in COMMANDS.items():
        child = commands.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        child.add_argument("--json", action="store_true", help="print JSON")
        if name in arguments:
            module = importlib.import_module(f"tidegate.cli.{name}")
            module.add_options(child)
            child.set_defaults(run=module.run)
            parser.known_options = tuple(child._option_string_actions)  # noqa: SLF001 - argparse has no other way
    return parser


def _version() -> str:
    from importlib.metadata import version  # noqa: PLC0415 - only needed for --version

    return f"tidegate {version('tidegate')}"
