"""The command line: one module for each command, imported when the command is used.

A module has `add_options(parser)` and `run(args, output) -> exit code`, and EXAMPLES of its use; COMMANDS is the table
of the commands. So `tidegate --help` imports nothing heavy, and a command whose extra is not installed does not break
the others.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._cli.output import Output, OutputError
from tidegate._cli.parser import CommandParser
from tidegate.errors import Closed, ConfigError, RateLimitError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence


class Command(NamedTuple):
    """A command: its group in the help, its help line, and what it does before its first output.

    The latter is shown if that takes longer than a second.
    """

    group: str
    help: str
    progress: str = ""


TAKE: Final = "take permits from a running service"
ADMINISTER: Final = "administer a running service"
CALLING: Final = "calling the service"
COMMANDS: Final = {
    "init": Command("configure", "write a commented configuration file to start from"),
    "validate": Command("configure", "check configuration files; convert Envoy rate limit files", "checking the files"),
    "explain": Command("configure", "show which limits apply to a request, and why", "reading the file"),
    "plan": Command("configure", "replay logs: see whom limits would deny; suggest limits", "reading the logs"),
    "doctor": Command("configure", "check a deployment, and print how to fix problems", "checking the deployment"),
    "start": Command("run", "run the service: decisions over the network, a dashboard"),
    "egress": Command("run", "run only the egress gateway, without the service", "starting the gateway"),
    "demo": Command("run", "run a short live demonstration in the terminal"),
    "acquire": Command(TAKE, "take permits of a policy or a provider; may wait for them", "waiting for permits"),
    "peek": Command(TAKE, "show what the service would decide, without taking permits", CALLING),
    "commit": Command(TAKE, "settle a reservation with the actual cost", CALLING),
    "cancel": Command(TAKE, "return unused permits", CALLING),
    "top": Command("watch", "show the busiest policies and the keys nearest to a limit, live", CALLING),
    "usage": Command("watch", "show how much of each limit a key or a provider has used", CALLING),
    "policies": Command("watch", "list the policies of a running service", CALLING),
    "budget": Command("watch", "show the use of task budgets and money limits; correct a budget", "reading the budget"),
    "swarm": Command("watch", "show the agents of a swarm and their capacities, live", "waiting for the agents"),
    "runs": Command("watch", "show runs of agents and their budgets, live; stop or extend them", "reading the runs"),
    "sources": Command("watch", "list the sources of a running service", CALLING),
    "add": Command(ADMINISTER, "add a source to a running service", CALLING),
    "remove": Command(ADMINISTER, "remove a source from a running service", CALLING),
    "block": Command(ADMINISTER, "deny all calls with a key for some time; list the blocks", CALLING),
    "reset": Command(ADMINISTER, "reset the usage of a key", CALLING),
    "completion": Command("set up your shell", "print a script that completes commands in your shell"),
}
GROUPS: Final = tuple(dict.fromkeys(command.group for command in COMMANDS.values()))
EXAMPLES: Final = (
    ("tidegate start --demo", "see everything at work in your browser"),
    ("tidegate init api", "write limits for your API to config.yaml"),
    ("tidegate explain config.yaml --request 'POST /login'", "which limits apply?"),
    ("tidegate start --policy 'api=100/1m'", "serve decisions on port 8080"),
    ("tidegate acquire api user:42", "take a permit; exit code 1 if denied"),
)
CREDENTIALS_HELP: Final = "; this command sends the token in --token-file FILE, or in TIDEGATE_TOKEN"
DESCRIPTION: Final = "One rate limiter for both sides of an API: the requests you receive and the\nrequests you send."
EXIT_OK: Final = 0
EXIT_DENIED: Final = 1  # a call was denied, or the doctor found a problem
EXIT_BAD_INPUT: Final = 2  # invalid input: arguments, a file, an environment variable
EXIT_UNAVAILABLE: Final = 3  # a store, a bus or the service cannot be reached, or the output cannot be written
EXIT_INTERRUPTED: Final = 130
EXIT_CODES: Final = {
    EXIT_OK: "success; the call was allowed",
    EXIT_DENIED: "the call was denied, 'tidegate doctor' found a problem, or a condition of 'tidegate plan' holds",
    EXIT_BAD_INPUT: "invalid input: arguments, a file, an environment variable",
    EXIT_UNAVAILABLE: "a store, a bus or the service cannot be reached, or the output cannot be written",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C",
}
EXIT_CODES_HELP: Final = "exit codes:\n" + "\n".join(f"  {code:<6} {text}" for code, text in EXIT_CODES.items())
JSON_HELP: Final = (
    "'tidegate help COMMAND' explains a command. Every command accepts --json. The\n"
    "output has colours only on a terminal, with rich installed (tidegate[cli]), and\n"
    "not if NO_COLOR is set."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
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
        with output.progress(COMMANDS[args.command].progress):
            return int(args.run(args, output))
    except RateLimitError as error:
        help_text = CREDENTIALS_HELP if isinstance(error, ConfigError) and error.field == "token" else ""
        output.write_error(f"{error}{help_text}")
        return EXIT_UNAVAILABLE if isinstance(error, StoreUnavailable | Closed) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (BrokenPipeError, OutputError) as error:
        return discard_output(error, output)


def discard_output(error: BrokenPipeError | OutputError, output: Output) -> int:
    """Discard standard output, which could not be written, and return the exit code."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123 - not a path of the user
        os.dup2(nowhere.fileno(), sys.stdout.fileno())  # Python writes the rest of its buffer when it exits
    if isinstance(error, BrokenPipeError):  # the reader needs no more
        return EXIT_OK
    output.write_error(str(error))
    return EXIT_UNAVAILABLE


def import_command(name: str) -> Any:  # noqa: ANN401 - a module
    """Import the module of a command; raises ConfigError if it needs an extra that is not installed."""
    try:
        return importlib.import_module(f"tidegate._cli.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tidegate"):
            raise
        extra = "sources" if name in ("add", "sources") else "all"
        raise ConfigError(f"tidegate {name} needs {error.name}: pip install 'tidegate[{extra}]'") from None


def build_parser(arguments: Sequence[str], *, skip_missing: bool = False) -> CommandParser:
    """Build the parser; only the command that the arguments name is imported and has its options.

    With `skip_missing`, all commands have their options, except those whose extra is not installed; otherwise, a
    missing extra raises ConfigError.
    """
    parser = CommandParser(prog="tidegate", usage="tidegate COMMAND [OPTION ...]", description=DESCRIPTION)
    parser.command_groups = {
        title: {name: command.help for name, command in COMMANDS.items() if command.group == title} for title in GROUPS
    }
    parser.examples = EXAMPLES
    parser.notes = [EXIT_CODES_HELP, JSON_HELP]
    parser.add_argument("--version", action="version", version=_version())
    parser.set_defaults(json=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog="tidegate")
    used = [name for name in arguments if name in COMMANDS]  # later ones may be names of files, such as `sources`
    used = used if skip_missing else used[:1]
    for name, (_, line, _) in COMMANDS.items():
        child = commands.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        child.add_argument("--json", action="store_true", help="print JSON")
        if name in used:
            try:
                module = import_command(name)
            except ConfigError:
                if not skip_missing:
                    raise
                continue
            module.add_options(child)
            child.examples = module.EXAMPLES
            child.set_defaults(run=module.run)
            parser.command = child
    return parser


def _version() -> str:
    from importlib.metadata import version  # noqa: PLC0415 - only needed for --version

    return f"tidegate {version('tidegate')}"
