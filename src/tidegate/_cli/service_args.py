"""Arguments that all commands for a running service share: its URL, the token, the policy and the key."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate._cli.arguments import add_data_option, data_folder, duration, number
from tidegate._cli.durations import METAVAR
from tidegate.errors import ConfigError
from tidegate.outbound._control_file import CONTROL_FILE, has_own_control_file, no_service_error, read_control_file
from tidegate.service._api.verbs import VERBS
from tidegate.service.client._client import Client
from tidegate.service.client._protocol import EXAMPLE_URL as DEFAULT_URL
from tidegate.service.client._protocol import ServiceUnreachable, check_service_url

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

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
    group.add_argument(
        "--url",
        metavar="URL",
        help=f"the URL of the service (default: TIDEGATE_URL, or that of the data folder, or {DEFAULT_URL})",
    )
    add_data_option(group)
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


@contextmanager
def open_client(args: argparse.Namespace) -> Iterator[Client]:
    """Open a client for the service that the arguments, the environment or the data folder name."""
    url, token = read_url(args), read_token(args)
    try:
        with Client(url or find_url(args), token=token) as client:
            yield client
    except ServiceUnreachable as error:
        if url is not None:
            raise
        raise no_service_error(data_folder(args), error.reason) from None


def read_token(args: argparse.Namespace) -> str | None:
    """Return the token in the file or in the environment, if there is one."""
    if args.token_file is None:
        return os.environ.get("TIDEGATE_TOKEN") or None
    try:
        return str(args.token_file.read_text(encoding="utf-8").strip())
    except (OSError, ValueError) as error:
        message = f"cannot read {args.token_file}: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(message, field="--token-file") from None


def read_url(args: argparse.Namespace) -> str | None:
    """Return the URL in the options or the environment, if there is one; raises ConfigError if it is malformed."""
    if args.url:
        return check_service_url(args.url, "--url")
    if args.data or not os.environ.get("TIDEGATE_URL"):
        return None
    return check_service_url(os.environ["TIDEGATE_URL"], "TIDEGATE_URL")


def find_url(args: argparse.Namespace) -> str:
    """Return the URL of the service that uses the data folder.

    A service that fetches nothing has no data folder: unless one is named, the default URL is the next best.
    """
    folder = data_folder(args)
    named = args.data or os.environ.get("TIDEGATE_DATA")
    if not named and not has_own_control_file(folder):
        return DEFAULT_URL
    url = read_control_file(folder).get("url")
    if not isinstance(url, str):
        raise no_service_error(folder, "its control.json has no URL")
    return check_service_url(url, str(folder / CONTROL_FILE))


def read_key(args: argparse.Namespace) -> str | tuple[str, ...]:
    """Return the key: one string, or its parts."""
    return tuple(args.key) if len(args.key) > 1 else str(args.key[0])


def check_target(args: argparse.Namespace) -> None:
    """Check that the arguments give either a policy and a key, or a provider."""
    if args.provider is None and (args.policy is None or not args.key):
        raise ConfigError("expected POLICY and KEY, or --provider")
    if args.provider is not None and args.policy is not None:
        raise ConfigError("cannot be combined with POLICY and KEY", field="--provider")
