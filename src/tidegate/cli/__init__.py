"""The command line: one module for each command, imported when the command is used.

A module has `add_options(parser)` and `run(args, output) -> exit code`, and EXAMPLES of its use; COMMANDS has the names
and the help lines. So `tidegate --help` imports nothing heavy, and a command whose extra is not installed does not
break the others.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from tidegate.cli.output import Output, OutputError
from tidegate.cli.parser import CommandParser
from tidegate.errors import Closed, ConfigError, RateLimitError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: Final = {
    "init": "write a commented configuration file to start from",
    "validate": "check configuration files; convert Envoy rate limit files",
    "explain": "show which limits apply to a request, and why",
    "doctor": "check a deployment, and print how to fix problems",
    "start": "run the service: decisions over the network, a dashboard",
    "egress": "run only the egress gateway, without the service",
    "demo": "run a short live demonstration in the terminal",
    "acquire": "take permits of a policy or a provider; may wait for them",
    "peek": "show what the service would decide, without taking permits",
    "commit": "settle a reservation with the actual cost",
    "cancel": "return unused permits",
    "top": "show the busiest policies and the keys nearest to a limit, live",
    "usage": "show how much of each limit a key or a provider has used",
    "policies": "list the policies of a running service",
    "budget": "show the use of task budgets and money limits; correct a budget",
    "swarm": "show the agents of a swarm and their capacities, live",
    "sources": "list the sources of a running service",
    "add": "add a source to a running service",
    "remove": "remove a source from a running service",
    "block": "deny all calls with a key for some time; list the blocks",
    "reset": "reset the usage of a key",
    "completion": "print a script that completes commands in your shell",
}
GROUPS: Final = {
    "configure": ("init", "validate", "explain", "doctor"),
    "run": ("start", "egress", "demo"),
    "take permits from a running service": ("acquire", "peek", "commit", "cancel"),
    "watch": ("top", "usage", "policies", "budget", "swarm", "sources"),
    "administer a running service": ("add", "remove", "block", "reset"),
    "set up your shell": ("completion",),
}
EXAMPLES: Final = (
    ("tidegate start --demo", "see everything at work in your browser"),
    ("tidegate init api", "write limits for your API to config.yaml"),
    ("tidegate explain config.yaml --request 'POST /login'", "which limits apply?"),
    ("tidegate start --policy 'api=100/1m'", "serve decisions on port 8080"),
    ("tidegate acquire api user:42", "take a permit; exit code 1 if denied"),
)
# What a command does before its first output, shown if that takes longer than a second.
PROGRESS: Final = {
    **dict.fromkeys(("peek", "commit", "cancel", "top", "usage", "policies", "block", "reset"), "calling the service"),
    "acquire": "waiting for permits",
    "add": "calling the service",
    "remove": "calling the service",
    "sources": "calling the service",
    "budget": "reading the budget",
    "doctor": "checking the deployment",
    "egress": "starting the gateway",
    "explain": "reading the file",
    "swarm": "waiting for the agents",
    "validate": "checking the files",
}
CREDENTIALS_HELP: Final = "; this command sends the token in --token-file FILE, or in TIDEGATE_TOKEN"
DESCRIPTION: Final = "One rate limiter for both sides of an API: the requests you receive and the\nrequests you send."
EXIT_OK: Final = 0
EXIT_DENIED: Final = 1  # a call was denied, or the doctor found a problem
EXIT_BAD_INPUT: Final = 2  # invalid input: arguments, a file, an environment variable
EXIT_UNAVAILABLE: Final = 3  # a store, a bus or the service cannot be reached, or the output cannot be written
EXIT_INTERRUPTED: Final = 130
EXIT_CODES: Final = {
    EXIT_OK: "success; the call was allowed",
    EXIT_DENIED: "the call was denied, or 'tidegate doctor' found a problem",
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
        with output.progress(PROGRESS.get(args.command, "")):
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
        return importlib.import_module(f"tidegate.cli.{name}")
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
    parser.command_groups = {title: {name: COMMANDS[name] for name in names} for title, names in GROUPS.items()}
    parser.examples = EXAMPLES
    parser.notes = [EXIT_CODES_HELP, JSON_HELP]
    parser.add_argument("--version", action="version", version=_version())
    parser.set_defaults(json=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog="tidegate")
    used = [name for name in arguments if name in COMMANDS]  # later ones may be names of files, such as `sources`
    used = used if skip_missing else used[:1]
    for name, line in COMMANDS.items():
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
