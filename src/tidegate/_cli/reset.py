"""`tidegate reset`: reset the usage of a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._cli.service_args import add_verb_arguments, open_client, read_key

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output

EXAMPLES: Final = (("tidegate reset api user:42", "set the usage of this key to 0"),)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the key and the service."""
    parser.description = "Reset the usage of a key. Needs the admin token, if the service has tokens."
    add_verb_arguments(parser, "reset")


def run(args: argparse.Namespace, output: Output) -> int:
    """Reset the key."""
    with open_client(args) as client:
        client.reset(args.policy, read_key(args))
    output.write_line(f"{args.policy}: the usage of {' '.join(args.key)} is reset")
    output.write_json({"ok": True})
    return 0
