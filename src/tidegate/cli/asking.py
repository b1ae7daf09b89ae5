"""What the commands that ask a running service share: where it is, the token, whom it is about."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError
from tidegate.service.client import Client

if TYPE_CHECKING:
    import argparse

DEFAULT = "http://127.0.0.1:8080"


def add_service(parser: argparse.ArgumentParser) -> None:
    """Take where the service is."""
    parser.add_argument("--url", metavar="URL", help=f"where the service is (TIDEGATE_URL, or {DEFAULT})")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="a file that holds the token (or TIDEGATE_TOKEN)"
    )


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Take whom it is about."""
    parser.add_argument("policy", metavar="POLICY")
    parser.add_argument("key", nargs="+", metavar="KEY", help="the key; several words are its parts")


def open_client(args: argparse.Namespace) -> Client:
    """Make a client for the service that is meant."""
    token = os.environ.get("TIDEGATE_TOKEN") or None
    if args.token_file is not None:
        try:
            token = args.token_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            message = f"cannot read {args.token_file}: {getattr(error, 'strerror', None) or error}"
            raise ConfigError(message, field="--token-file") from None
    return Client(args.url or os.environ.get("TIDEGATE_URL") or DEFAULT, token=token)


def key_of(args: argparse.Namespace) -> str | tuple[str, ...]:
    """Give the key that was written."""
    return tuple(args.key) if len(args.key) > 1 else str(args.key[0])


def cost_of(text: str) -> Any:  # noqa: ANN401 - a number, or a number for each unit
    """Read a cost: 3, or tokens=100,requests=1."""
    if text.isdecimal():
        return int(text)
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(unit.strip() and amount.strip().isdecimal() for unit, _, amount in pairs):
        raise ConfigError(f"expected a number, or units such as tokens=100,requests=1, not {text}", field="--cost")
    return {unit.strip(): int(amount) for unit, _, amount in pairs}
