"""`tidegate plan`: replay logs against limits before you enforce them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from tidegate.cli.arguments import duration, integer, positive_integer
from tidegate.cli.file_kinds import recognise
from tidegate.cli.plan_tables import write_replay
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.plan import ReplayOptions, replay
from tidegate.plan.logs.formats import FORMATS, LogOptions
from tidegate.plan.logs.records import KNOWN_NAMES
from tidegate.plan.report import Names
from tidegate.plan.rules.load import REPLAYED_KINDS, RulesSpec, is_limit, read_spec

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from tidegate.cli.output import Output

EXAMPLES: Final = (
    ("tidegate plan replay access.log --policy config.yaml", "whom would these limits have denied?"),
    ("tidegate plan replay a.log b.log.gz --policy 'api=100/1m'", "several logs, and one limit for each address"),
    ('tidegate plan replay access.log --policy config.yaml --log-format "$FORMAT"', "a log_format of nginx"),
)
ACTIONS: Final = {"replay": "decide about every request of logs, and report what was denied"}
MAX_PROCESSES: Final = 2  # by default: more keep the process that decides no busier


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the action, the logs, the rules, and the form of the report."""
    parser.description = (
        "See whom limits would deny before you enforce them. replay decides about every request of logs with the code "
        "that enforces the limits, in the time of the logs, and reports which clients would have been denied, when, by "
        "which limit, and how close the others came. Nothing is sent, and nothing is stored."
    )
    actions = "; ".join(f"{name}: {text}" for name, text in ACTIONS.items())
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=actions)
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="logs, plain or compressed with gzip; - is standard input"
    )
    add_log_options(parser)
    rules = parser.add_argument_group("the rules")
    rules.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="FILE",
        help="the file of a middleware or a service, files of providers, or a limit such as 'api=100/1m' for each "
        "address or key (may be repeated)",
    )
    rules.add_argument("--kind", choices=REPLAYED_KINDS, metavar="KIND", help="kind of the files (default: detected)")
    rules.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a proxy whose X-Forwarded-For in the log is trusted, as in trusted_proxies (may be repeated)",
    )
    rules.add_argument(
        "--retries",
        type=integer,
        default=0,
        metavar="N",
        help="let each denied client come back after its Retry-After, up to N times for each request (default: 0)",
    )
    report = parser.add_argument_group("the report")
    report.add_argument("--top", type=positive_integer, default=10, metavar="N", help="rows of a table (default: 10)")
    report.add_argument(
        "--hash-clients",
        action="store_true",
        help="replace the names of clients by hashes, with a new key for each run",
    )
    report.add_argument(
        "--hash-secret-file", metavar="FILE", help="a file with the key, so that hashes are the same in every run"
    )


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how to read logs."""
    logs = parser.add_argument_group("the logs")
    logs.add_argument(
        "--format",
        choices=FORMATS,
        default="",
        metavar="FORMAT",
        help="combined (nginx, Apache), alb (AWS), json (Caddy, Envoy, Traefik, JSON lines), csv (default: detected)",
    )
    logs.add_argument(
        "--log-format", default="", metavar="FORMAT", help="the log_format of nginx, or the LogFormat of Apache"
    )
    logs.add_argument(
        "--columns",
        action="append",
        default=[],
        metavar="FIELD=COLUMN",
        help="the column, or the path of names in JSON, of a field (may be repeated): "
        f"{', '.join(KNOWN_NAMES)}; duration_unit=ms is the unit of durations (s, ms, us, ns)",
    )
    logs.add_argument(
        "--timezone", default="UTC", metavar="ZONE", help="zone of times without an offset, and of the report"
    )
    logs.add_argument(
        "--uncertainty",
        type=duration,
        metavar="TIME",
        help="how far a time of the log may be from the arrival (default: its resolution); the report has the range",
    )
    logs.add_argument(
        "--processes",
        type=positive_integer,
        metavar="N",
        help="processes that parse (default: the processors, up to 2)",
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Replay, and write the report."""
    if not args.files:
        raise ConfigError("expected a log, such as: tidegate plan replay access.log --policy config.yaml", field="FILE")
    rules = read_rules(args.policy, args)
    report = replay(args.files, rules, read_options(args, output))
    write_replay(report, output, args.top)
    output.write_json(report)
    return 0


def read_rules(given: list[str], args: argparse.Namespace) -> RulesSpec:
    """Return the rules that the options name."""
    files = [each for each in given if not is_limit(each)]
    kinds = {args.kind} if args.kind else {recognise(file) for file in files}
    if len(kinds) > 1:
        raise ConfigError(f"files of several kinds cannot be combined: {', '.join(sorted(kinds))}", field="--policy")
    return read_spec(given, kinds.pop() if kinds else "limits", args.trusted_proxy)


def read_options(args: argparse.Namespace, output: Output) -> ReplayOptions:
    """Return the options of a replay."""
    zone = read_zone(args.timezone)
    processes = args.processes or min(MAX_PROCESSES, os.cpu_count() or 1)
    secret = read_secret(args.hash_secret_file)
    return ReplayOptions(
        LogOptions(args.format, args.log_format, read_columns(args.columns), zone),
        processes=processes,
        progress=output.show_progress,
        names=Names(hashed=args.hash_clients or bool(secret), secret=secret),
        zone=zone,
        retries=args.retries,
        uncertainty=None if args.uncertainty is None else round(args.uncertainty * SECOND),
    )


def read_columns(given: list[str]) -> Mapping[str, str]:
    """Return the columns of the fields that are named."""
    found: dict[str, str] = {}
    for text in given:
        field, equals, column = text.partition("=")
        if not equals or not column:
            raise ConfigError(f"expected a field and its column, such as path=uri, not {text!r}", field="--columns")
        found[field.strip()] = column.strip()
    return found


def read_zone(name: str) -> Any:  # noqa: ANN401 - a time zone
    """Return a time zone."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigError(
            f"expected a time zone such as UTC or Europe/Berlin, not {name!r}", field="--timezone"
        ) from None


def read_secret(path: str | None) -> str:
    """Return the key of the hashes."""
    if path is None:
        return ""
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - one line
            secret = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", file=path, field="--hash-secret-file") from None
    if not secret:
        raise ConfigError("is empty: write a random key to it", file=path, field="--hash-secret-file")
    return secret
