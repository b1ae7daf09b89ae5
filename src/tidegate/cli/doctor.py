"""`tidegate doctor`: whether a deployment is well, and what to do where it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.cli import DENIED, OK
from tidegate.cli.start import add_settings, settings_of
from tidegate.errors import ConfigError
from tidegate.service.doctor import Finding, examine

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say

HELP = "check a deployment, and say what to do"
SIGNS = {"well": ("✓", "green"), "note": ("!", "yellow"), "wrong": ("✗", "red")}


def options(parser: argparse.ArgumentParser) -> None:
    """Take what `start` takes."""
    add_settings(parser)
    parser.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="one that your application trusts, as in its trusted_proxies (may be repeated)",
    )


def run(args: argparse.Namespace, say: Say) -> int:
    """Examine, and tell; 1 if something is wrong."""
    try:
        findings = examine(settings_of(args), args.trusted_proxy)
    except ConfigError as error:
        findings = [Finding("wrong", f"the settings cannot be used: {error}", "correct that, and ask again")]
    for finding in findings:
        sign, colour = SIGNS[finding.level]
        say.line(f"{say.style(sign, colour)} {finding.what}")
        if finding.to_do:
            say.line(f"    {finding.to_do}", "dim")
    count = sum(finding.level == "wrong" for finding in findings)
    things = f"{count} thing{'' if count == 1 else 's'}"
    say.line(f"{things} to put right" if count else "nothing is wrong", "red" if count else "green")
    say.data({"well": not count, "findings": [finding._asdict() for finding in findings]})
    return DENIED if count else OK
