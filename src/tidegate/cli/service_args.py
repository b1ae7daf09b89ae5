"""Arguments that all commands for a running service share: its URL, the token, the policy and the key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate.cli.arguments import duration, number
from tidegate.cli.durations import METAVAR
from tidegate.errors import ConfigError
from tidegate.service.api.verbs import VERBS
from tidegate.service.client.client import Client
from tidegate.service.client.protocol import EXAMPLE_URL as DEFAULT_URL
from tidegate.service.client.protocol import check_service_url

if TYPE_CHECKING:
    import argparse

# By field of a request: see `service.api.verbs`.
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "cost": {
        "default": "1",
        "metavar": "COST",
        "help": "an integer, or units such as tokens=100 (default: 1; for a provider, the cost in its file)",
    },
    "timeout": {
        "type": duration,
        "default": 0.0,
        "metavar": METAVAR,
        "help": "maximum time to wait for permits (default: 0)",
    },
    "priority": {
        "type": number,
        "default": 0.0,
        "metavar": "NUMBER",
        "help": "calls with a higher priority are served first (default: 0)",
    },
    "provider": {
        "metavar": "NAME",
        "help": "a provider instead of POLICY and KEY: its name, its domain or a URL",
    },
}


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the service is, and with which token to call it."""
    group = parser.add_argument_group("the service")
    group.add_argument("--url", metavar="URL", help=f"the URL of the service (default: TIDEGATE_URL, or {DEFAULT_URL})")
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="a file that contains the token (default: the token in TIDEGATE_TOKEN)",
    )


def add_verb_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the policy and the key, or the provider, options for the parameters of a verb, and the service."""
    fields = VERBS[name].fields
    add_key_arguments(parser, required="provider" not in fields)
    for field in fields:
        if field in OPTIONS:
            parser.add_argument(f"--{field}", **OPTIONS[field])
    if "provider" in fields and "cost" in fields:
        parser.set_defaults(cost=None)  # a provider has its own
    add_service_options(parser)


def add_key_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the policy and the key."""
    policy, key = (None, "+") if required else ("?", "*")
    parser.add_argument("policy", nargs=policy, metavar="POLICY", help="the name of the policy")
    parser.add_argument("key", nargs=key, metavar="KEY", help="the key; several arguments are the parts of one key")


def add_key_options(parser: argparse.ArgumentParser) -> None:
    """Add the policy and the key, and the options of the service."""
    add_key_arguments(parser)
    add_service_options(parser)


def open_client(args: argparse.Namespace) -> Client:
    """Open a client for the service that the arguments or the environment name."""
    token = os.environ.get("TIDEGATE_TOKEN") or None
    if args.token_file is not None:
        try:
            token = args.token_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            message = f"cannot read {args.token_file}: {getattr(error, 'strerror', None) or error}"
            raise ConfigError(message, field="--token-file") from None
    return Client(read_url(args), token=token)


def read_url(args: argparse.Namespace) -> str:
    """Return the URL of the service; raises ConfigError if it is malformed."""
    url = args.url or os.environ.get("TIDEGATE_URL") or DEFAULT_URL
    return check_service_url(url, "--url" if args.url else "TIDEGATE_URL")


def read_key(args: argparse.Namespace) -> str | tuple[str, ...]:
    """Return the key: one string, or its parts."""
    return tuple(args.key) if len(args.key) > 1 else str(args.key[0])


def check_target(args: argparse.Namespace) -> None:
    """Check that the arguments give either a policy and a key, or a provider."""
    if args.provider is None and (args.policy is None or not args.key):
        raise ConfigError("expected POLICY and KEY, or --provider")
    if args.provider is not None and args.policy is not None:
        raise ConfigError("cannot be combined with POLICY and KEY", field="--provider")


def read_cost(text: str) -> Any:  # noqa: ANN401 - an integer, or an integer for each unit
    """Read a cost such as 3, or tokens=100,requests=1."""
    if text.isdecimal():
        return int(text)
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(unit.strip() and amount.strip().isdecimal() for unit, _, amount in pairs):
        raise ConfigError(f"expected an integer, or units such as tokens=100,requests=1, not {text!r}", field="--cost")
    return {unit.strip(): int(amount) for unit, _, amount in pairs}
