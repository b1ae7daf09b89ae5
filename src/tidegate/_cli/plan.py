"""`tidegate plan`: replay logs against limits before you enforce them."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from tidegate._cli import EXIT_DENIED, EXIT_OK
from tidegate._cli.arguments import duration, integer, positive_integer
from tidegate._cli.file_kinds import recognise
from tidegate._cli.plan_tables import write_diff, write_replay, write_simulation, write_suggestion
from tidegate._runtime.files import replace_private
from tidegate.core import Limit
from tidegate.core._algorithms import ALGORITHMS
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.plan import (
    ReplayOptions,
    SimulateOptions,
    SuggestOptions,
    compare_algorithms,
    diff,
    replay,
    simulate,
    suggest,
)
from tidegate.plan._conditions import DIFF_FIGURES, REPLAY_FIGURES, Condition
from tidegate.plan._html import to_html, to_svg
from tidegate.plan._logs.formats import FORMATS, LogOptions
from tidegate.plan._logs.records import KNOWN_NAMES
from tidegate.plan._markdown import to_markdown
from tidegate.plan._report import ClientNames
from tidegate.plan._rules.load import REPLAYED_KINDS, RulesSpec, is_limit, read_spec
from tidegate.plan._sections import SECTIONS
from tidegate.plan._traffic import FIELDS
from tidegate.service import load_settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping

    from tidegate._cli.output import Output
    from tidegate.plan._sections import Section

    Result = tuple[dict[str, Any], Callable[..., None]]  # the report, and what writes it

EXAMPLES: Final = (
    ("tidegate plan replay access.log --policy config.yaml", "whom would these limits have denied?"),
    ("tidegate plan replay a.log b.log.gz --policy 'api=100/1m'", "several logs, and one limit for each address"),
    (
        "tidegate plan diff old.yaml new.yaml --log access.log --fail-if 'newly_denied_clients > 0.1%'",
        "compare rules; exit code 1 if they deny too many more clients",
    ),
    ("tidegate plan suggest access.log > config.yaml", "limits for the endpoints of a log, with their reasons"),
    ('tidegate plan replay access.log --policy config.yaml --log-format "$FORMAT"', "a log_format of nginx"),
    (
        "tidegate plan simulate 100/1m --traffic 'bursts size=200 every=30s' --retries 3",
        "what would each algorithm do with this traffic?",
    ),
)
ACTIONS: Final = {
    "replay": "decide about every request of logs, and report what was denied",
    "diff": "compare two sets of rules, decision by decision",
    "suggest": "suggest limits that would have denied few clients and requests, as YAML",
    "simulate": "decide about generated traffic by several rules, side by side",
}
OPTIONS: Final = {
    "policy": ("replay", "suggest"),
    "retries": ("replay", "simulate"),
    "traffic": ("simulate",),
    "hidden": ("simulate",),
    "wait": ("simulate", "suggest"),
    "log": ("diff", "suggest"),
    "fail_if": ("replay", "diff"),
    "markdown": ("replay", "diff", "simulate"),
    "leave_out": ("suggest",),
    "period": ("suggest",),
}  # of some actions only
SUGGESTED_ALGORITHMS: Final = tuple(
    name for name, each in ALGORITHMS.items() if not each.by_calendar and not each.holds_slots
)
DEFAULT_SHARE: Final = 0.001
MAX_PROCESSES: Final = 2  # by default: each of them reads the whole log


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
        "files",
        nargs="*",
        metavar="FILE",
        help="replay, suggest: logs, plain or compressed with gzip (replay: - is standard input); diff: the old "
        "and the new rules; simulate: limits such as 100/1m, or the file of a service",
    )
    add_log_options(parser)
    rules = parser.add_argument_group("the rules")
    rules.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="FILE",
        help="the file of a middleware, a service or a budget, files of providers, or a limit such as 'api=100/1m' for "
        "each address or key (may be repeated)",
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
    add_suggest_options(parser)
    add_simulate_options(parser)
    report = parser.add_argument_group("the report")
    report.add_argument("--markdown", action="store_true", help="write Markdown, for a pull request")
    report.add_argument("--html", metavar="FILE", help="also write a page with charts, which loads nothing else")
    report.add_argument("--svg", metavar="FILE", help="also write the charts")
    report.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help="exit with code 1 if it holds, such as 'denied_clients>0.1%%' or 'newly_denied_requests>0' (may be "
        "repeated)",
    )
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
        "--log",
        action="append",
        default=[],
        metavar="FILE",
        help="diff, suggest: a log (may be repeated; merged by time)",
    )
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
        help="processes for a large log (default: the processors, up to 2)",
    )


def add_suggest_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `suggest`."""
    group = parser.add_argument_group("suggest")
    group.add_argument(
        "--period", action="append", default=[], metavar="PERIOD", help="a period (repeatable; default: 1m, 1h and 1d)"
    )
    group.add_argument(
        "--algorithm", choices=SUGGESTED_ALGORITHMS, default="sliding_log", metavar="ALGORITHM",
        help=f"the algorithm that will enforce: {', '.join(SUGGESTED_ALGORITHMS)} (default: sliding_log)",
    )  # fmt: skip
    for name, what in (("clients", "need more than a limit"), ("requests", "be denied")):
        group.add_argument(
            f"--max-{name}", type=read_share, default=DEFAULT_SHARE, metavar="SHARE",
            help=f"how many {name} may {what}, in each category (default: 0.1%%)",
        )  # fmt: skip
    group.add_argument(
        "--leave-out", action="append", default=[], metavar="CLIENT", help="a client that is not measured (repeatable)"
    )


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `simulate`."""
    group = parser.add_argument_group("simulate")
    kinds = "; ".join(f"{kind} {' '.join(f'{field}=…' for field in fields)}" for kind, fields in FIELDS.items())
    group.add_argument(
        "--traffic", action="append", default=[], metavar="TRAFFIC",
        help=f"calls to generate (repeatable): {kinds}; each also with clients=N and busiest=SHARE of the first client",
    )  # fmt: skip
    group.add_argument("--duration", type=duration, default=600.0, metavar="TIME", help="how long (default: 10m)")
    group.add_argument("--seed", type=integer, default=1, metavar="N", help="of the generated calls (default: 1)")
    group.add_argument(
        "--obedient", type=read_share, default=1.0, metavar="SHARE",
        help="clients that wait for Retry-After before they retry; the others retry within a second (default: 100%%)",
    )  # fmt: skip
    group.add_argument(
        "--wait",
        type=duration,
        metavar="TIME",
        help="simulate: callers wait in a queue for so long, instead of being denied; suggest: how long a call to a "
        "provider may wait (default: not at all)",
    )
    group.add_argument(
        "--hidden", metavar="LIMIT", help="a limit of the provider on all admitted calls, such as '50/1s sliding_log'"
    )


def read_share(text: str) -> float:
    """Read a share such as 0.1% or 0.001."""
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise ArgumentTypeError(f"expected a share such as 0.1% or 0.001, not {text!r}")
    return found


def run(args: argparse.Namespace, output: Output) -> int:
    """Replay or compare, and write the report."""
    refuse_unused_options(args)
    figures = REPLAY_FIGURES if args.action == "replay" else DIFF_FIGURES
    conditions = [Condition.parse(text, figures) for text in args.fail_if]
    report, write = ACTIONS_BY_NAME[args.action](args, read_options(args, output))
    report["failed"] = [condition.text for condition in conditions if condition.holds(report, figures)]
    sections = SECTIONS[args.action](report, args.top)
    for path, text in pages(args, sections):
        write_page(path, text)
    if args.markdown:
        output.write_lines(to_markdown(sections).split("\n"))
    else:
        write(report, output, args.top)
    output.write_json(report)
    for text in report["failed"]:
        output.write_error(f"--fail-if: {text}")
    return EXIT_DENIED if report["failed"] else EXIT_OK


def pages(args: argparse.Namespace, sections: list[Section]) -> Iterator[tuple[str, str]]:
    """Yield the files to write, with their text."""
    if args.html:
        yield args.html, to_html(f"tidegate plan {args.action}", sections)
    if args.svg:
        yield args.svg, to_svg(sections)


def write_page(path: str, text: str) -> None:
    """Write a file; raises ConfigError."""
    try:
        replace_private(path, text.encode("utf-8", "backslashreplace").decode())
    except OSError as error:
        raise ConfigError(f"cannot be written: {error}", file=path) from None


def run_replay(args: argparse.Namespace, options: ReplayOptions) -> Result:
    """Replay logs."""
    if not args.files:
        raise ConfigError(f"expected a log, such as: {EXAMPLES[0][0]}", field="FILE")
    return replay(args.files, read_rules(args.policy, args), options), write_replay


def run_diff(args: argparse.Namespace, options: ReplayOptions) -> Result:
    """Compare two sets of rules."""
    if len(args.files) != 2 or not args.log:  # noqa: PLR2004 - old and new
        raise ConfigError(f"expected the old and the new rules, and a log, such as: {EXAMPLES[2][0]}", field="FILE")
    old, new = (read_rules([file], args) for file in args.files)
    return diff(args.log, old, new, options), write_diff


def run_suggest(args: argparse.Namespace, options: ReplayOptions) -> Result:
    """Suggest limits."""
    paths = [*args.files, *args.log]
    if not paths:
        raise ConfigError("expected a log, such as: tidegate plan suggest --log access.log", field="--log")
    rules = read_rules(args.policy, args) if args.policy else None
    if rules is not None and rules.kind not in ("inbound", "provider"):
        message = "expected the file of a middleware, whose categories get limits, or files of providers"
        raise ConfigError(message, field="--policy")
    if args.wait and (rules is None or rules.kind != "provider"):
        raise ConfigError("is for the files of providers: a middleware does not wait", field="--wait")
    periods = args.period or list(SuggestOptions().periods)
    wanted = SuggestOptions(
        args.algorithm, periods, args.max_clients, args.max_requests, args.leave_out, round((args.wait or 0) * SECOND)
    )
    return suggest(paths, wanted, rules, options), write_suggestion


def run_simulate(args: argparse.Namespace, options: ReplayOptions) -> Result:
    """Simulate rules under generated traffic."""
    if not args.traffic:
        raise ConfigError(f"expected traffic, such as: {EXAMPLES[-1][0]}", field="--traffic")
    if args.wait and args.retries:
        raise ConfigError("cannot be combined with --retries: a caller waits, or comes back", field="--wait")
    hidden = None if args.hidden is None else read_limit_option(args.hidden, "--hidden")
    wanted = SimulateOptions(
        duration=round(args.duration * SECOND),
        seed=args.seed,
        retries=args.retries,
        obedient=args.obedient,
        wait=round((args.wait or 0) * SECOND),
        hidden=hidden,
        progress=options.progress,
    )
    rules = {name: limits for text in args.files for name, limits in read_simulated(text).items()}
    return simulate(rules, args.traffic, wanted), write_simulation


def read_simulated(text: str) -> dict[str, list[Limit]]:
    """Return the rules of an argument: the policies of a service file, limits, or one limit with each algorithm."""
    if Path(text).exists():
        policies = load_settings(text, environment=os.environ).policies
        return {name: list(entry.policy.limits) for name, entry in policies.entries.items()}
    limits = [read_limit_option(each.strip(), "FILE") for each in text.split(",")]
    return {", ".join(map(str, limits)): limits} if len(limits) > 1 else compare_algorithms(text)


def read_limit_option(text: str, field: str) -> Limit:
    """Return a limit; raises ConfigError."""
    try:
        return Limit.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{text!r}: {error}", field=field) from None


ACTIONS_BY_NAME: Final = {"replay": run_replay, "diff": run_diff, "suggest": run_suggest, "simulate": run_simulate}


def refuse_unused_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that the action does not use."""
    for name, actions in OPTIONS.items():
        if getattr(args, name) and args.action not in actions:
            allowed = " and ".join(f"'tidegate plan {action}'" for action in actions)
            raise ConfigError(f"is an option of {allowed}", field=f"--{name.replace('_', '-')}")


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
        names=ClientNames(hashed=args.hash_clients or bool(secret), secret=secret),
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
