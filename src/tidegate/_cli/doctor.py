"""`tidegate doctor`: check a deployment, and print how to fix problems."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._cli import EXIT_DENIED, EXIT_OK
from tidegate._cli.output import counted, without_logs
from tidegate._cli.start import add_settings_options, read_settings
from tidegate.errors import ConfigError
from tidegate.service._doctor import Finding, examine

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output

LEVEL_SIGNS: Final = {"ok": ("✓", "green"), "note": ("!", "yellow"), "problem": ("✗", "red")}

EXAMPLES: Final = (
    ("tidegate doctor service.yaml", "check the file of a service, its store and the clocks"),
    ("tidegate doctor config.yaml --store redis://cache", "check the limits of an application, and its store"),
    (
        "tidegate doctor --store redis://cache --trusted-proxy 10.0.0.0/8",
        "check a store and the proxies of an application",
    ),
    ("tidegate doctor service.yaml --fix", "after an upgrade, drop functions of older versions in PostgreSQL"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `start`, the proxies that the application trusts, and `--fix`."""
    parser.description = (
        "Check a deployment, and print how to fix problems. FILE is the file of a service, or another configuration "
        "file. Without one, --store, --bus and --trusted-proxy are checked as an application uses them."
    )
    add_settings_options(parser)
    parser.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a proxy that your application trusts, as in its trusted_proxies (may be repeated)",
    )

    parser.add_argument(
        "--fix",
        action="store_true",
        help="also remove from the store what only older versions of tidegate use, and no process uses now",
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Check the deployment, and write the findings; returns 1 if there is a problem."""
    try:
        with without_logs():
            findings = [*check_other_file(args), *examine(read_settings(args), args.trusted_proxy, fix=args.fix)]
    except ConfigError as error:
        findings = [Finding("problem", f"the settings are invalid: {error}", "correct them, and run the command again")]
    for finding in findings:
        sign, colour = LEVEL_SIGNS[finding.level]
        output.write_line(f"{output.style(sign, colour)} {finding.what}")
        if finding.to_do:
            output.write_line(f"    {finding.to_do}", "dim")
    count = sum(finding.level == "problem" for finding in findings)
    output.write_line(
        f"{counted(count, 'problem')} to fix" if count else "no problems found", "red" if count else "green"
    )
    output.write_json({"ok": not count, "findings": [finding._asdict() for finding in findings]})
    return EXIT_DENIED if count else EXIT_OK


def check_other_file(args: argparse.Namespace) -> list[Finding]:
    """Check a file that is not the file of a service; then the rest is checked as its application uses it."""
    from tidegate._cli.file_kinds import KINDS, recognise  # noqa: PLC0415 - imports the readers of all kinds

    if args.config is None or (kind := recognise(args.config)) == "service":
        return []
    file, args.config = args.config, None
    KINDS[kind].check(file)
    args.set_store = args.set_store or "memory://"
    return [Finding("ok", f"{file} is {KINDS[kind].title} without mistakes")]
