"""`tidegate explain`: show which limits of a file apply to a request, the strictest first, and why."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidegate._cli.file_kinds import KINDS, recognise
from tidegate._cli.output import without_logs
from tidegate._cli.tables import TableColumn, TextTable
from tidegate._policy.durations import format_duration
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from tidegate._cli.output import Output
    from tidegate._policy.explanation import ApplicableLimit, Explanation

EXAMPLES: Final = (
    ("tidegate explain config.yaml --request 'POST /login' --from 203.0.113.9", "a request that your API receives"),
    ("tidegate explain provider.yaml --request https://api.example.com/v1/items", "a request that you send"),
    ("tidegate explain service.yaml --policy api --key partner:acme", "a call to a service"),
    (
        "tidegate explain config.yaml --request /me --from ::1 --trusted-proxy ::1",
        "a request behind a proxy; add --header 'X-Forwarded-For: 203.0.113.9'",
    ),
)
METHOD = re.compile(r"[A-Za-z]+")
SENT_KINDS: Final = ("provider", "egress", "service")  # files that limit requests that are sent
MINUTE: Final = 60
RULE_COLUMNS: Final = (
    TableColumn("rule"),
    TableColumn("what it matches", shrinks=True),
    TableColumn("this request", shrinks=True),
)
LIMIT_COLUMNS: Final = (
    TableColumn("", right=True),
    TableColumn("limit", shrinks=True),
    TableColumn("of"),
    TableColumn("allows", shrinks=True),
    TableColumn("at once", right=True),
    TableColumn("then one every", right=True),
    TableColumn("mode", optional=True),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the file and the request."""
    parser.description = (
        "Show which limits in a file apply to a request, the strictest first, and why: which rules match it and which "
        "do not, the key under which it is counted, and the response to a denied request. The command sends nothing "
        "and reads no usage: it shows the result for a new client."
    )
    parser.add_argument("file", metavar="FILE", help="a YAML file for a middleware, provider, service or gateway")
    parser.add_argument("--kind", choices=KINDS, metavar="KIND", help="kind of the file (default: detected)")
    request = parser.add_argument_group("the request")
    request.add_argument(
        "--request",
        metavar="REQUEST",
        help="a method and a path that you receive, such as 'POST /login', or a URL that you send (method: GET, or "
        "POST with --body)",
    )
    request.add_argument("--from", dest="peer", metavar="ADDRESS", help="the address that the request comes from")
    request.add_argument(
        "--header", action="append", default=[], metavar="'NAME: VALUE'", help="a header (may be repeated)"
    )
    request.add_argument(
        "--body", metavar="FILE", help="a file with the body of the request, for limits that count tokens"
    )
    request.add_argument("--plan", metavar="NAME", help="the plan of the client, if the file has limits for plans")
    request.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a proxy that the application trusts, as in its trusted_proxies (may be repeated)",
    )
    call = parser.add_argument_group("a call to a service")
    call.add_argument("--policy", metavar="NAME", help="the policy")
    call.add_argument("--key", action="append", metavar="KEY", help="the key; repeat it for the parts of one key")
    call.add_argument("--caller", metavar="NAME", help="the caller, for an egress gateway file")


def run(args: argparse.Namespace, output: Output) -> int:
    """Write the explanation."""
    kind = args.kind or recognise(args.file)
    KINDS[kind].check(args.file)
    with without_logs():
        explanation = explain(args, kind)
    write(explanation, output)
    output.write_json(explanation.describe())
    return 0


def explain(args: argparse.Namespace, kind: str) -> Explanation:
    """Explain the request, or the call."""
    if kind == "service" and args.policy is not None:
        return explain_call(args)
    if kind not in ("inbound", *SENT_KINDS):
        raise ConfigError(f"{KINDS[kind].title} limits no requests; 'tidegate validate' describes it", file=args.file)
    if args.request is None:
        option = "--policy NAME --key KEY" if kind == "service" else "--request 'POST /login'"
        raise ConfigError(f"expected a request or call, such as: tidegate explain {args.file} {option}")
    method, target = read_request(args.request, "GET" if args.body is None else "POST")
    if kind == "inbound":
        return explain_path(args, method, target)
    if "://" not in target:
        advice = " (or --policy NAME --key KEY)" if kind == "service" else ""
        message = f"expected a URL such as 'GET https://api.example.com/v1'{advice}, not {args.request!r}"
        raise ConfigError(f"{message}: {KINDS[kind].title} limits requests that are sent", field="--request")
    return explain_url(args, kind, method, target)


def read_request(text: str, default: str) -> tuple[str, str]:
    """Read a method (or use the default one) and a path or URL."""
    method, _, target = text.strip().rpartition(" ")
    method = method.strip() or default
    if not METHOD.fullmatch(method) or not (target.startswith("/") or "://" in target):
        message = (
            f"expected a method and a path or a URL, such as 'POST /login' or 'GET https://host/path', not {text!r}"
        )
        raise ConfigError(message, field="--request")
    return method.upper(), target


def read_headers(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Read the headers."""
    found = []
    for text in args.header:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise ConfigError(
                f"expected a header such as 'X-Forwarded-For: 203.0.113.9', not {text!r}", field="--header"
            )
        found.append((name.strip(), value.strip()))
    return found


def explain_path(args: argparse.Namespace, method: str, target: str) -> Explanation:
    """Explain a request that the application receives."""
    from tidegate.inbound.explain import explain_request  # noqa: PLC0415 - not needed for --help

    if "://" in target:
        message = (
            f"expected a path such as 'POST /login', not {args.request!r}: this file limits requests that you receive"
        )
        raise ConfigError(message, field="--request")
    headers, proxies = read_headers(args), args.trusted_proxy
    return explain_request(
        args.file, method, target, address=args.peer, headers=headers, trusted_proxies=proxies, plan=args.plan
    )


def explain_url(args: argparse.Namespace, kind: str, method: str, url: str) -> Explanation:
    """Explain a request that is sent to a provider."""
    headers, body = read_headers(args), read_body(args.body)
    if kind == "egress":
        from tidegate.egress._settings import load_egress  # noqa: PLC0415 - as above
        from tidegate.egress.explain import explain_request as explain_passed  # noqa: PLC0415 - not needed for --help

        return explain_passed(load_egress(args.file), method, url, headers=headers, body=body, caller=args.caller)
    from tidegate.outbound._providers.registry import Providers  # noqa: PLC0415 - as above
    from tidegate.outbound.explain import explain_request  # noqa: PLC0415 - as above

    files, folders = ((args.file,), ()) if kind == "provider" else find_provider_files(args.file)
    providers = Providers.load(files, folders, permissions="ignore")
    return explain_request(providers, method, url, headers=headers, body=body)


def find_provider_files(file: str) -> tuple[Sequence[Path | str], Sequence[Path | str]]:
    """Return the provider files of a service file, and their folders."""
    from tidegate.service._config.settings import load_settings  # noqa: PLC0415 - not needed for --help

    settings = load_settings(file, environment=os.environ)
    return settings.providers, settings.provider_dirs


def read_body(path: str | None) -> bytes | None:
    """Read the body of the request."""
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", field="--body") from None


def explain_call(args: argparse.Namespace) -> Explanation:
    """Explain a call of a service."""
    from tidegate.service._config.settings import load_settings  # noqa: PLC0415 - not needed for --help
    from tidegate.service.explain import explain_call as explain_call_of  # noqa: PLC0415 - as above

    if not args.key:
        raise ConfigError("expected the key of the call, such as --key user:42", field="--key")
    key = args.key[0] if len(args.key) == 1 else tuple(args.key)
    return explain_call_of(load_settings(args.file, environment=os.environ), args.policy, key)


def write(found: Explanation, output: Output) -> None:
    """Write an explanation as text."""
    output.write_line(found.request, "bold")
    if found.verdict:
        output.write_line(found.verdict)
    if found.key is not None:
        output.write_line(f"key: {output.clean(found.key)}{f' ({found.key_reason})' if found.key_reason else ''}")
    if found.rules:
        output.write_line()
        rows = [(each.rule, each.pattern, "matches" if each.matches else f"no: {each.reason}") for each in found.rules]
        styles = ["green" if each.matches else "dim" for each in found.rules]
        output.write_table(TextTable(RULE_COLUMNS, list(rows), styles))
    if found.limits:
        output.write_line()
        output.write_line("limits, the strictest first:", "bold")
        output.write_table(TextTable(LIMIT_COLUMNS, [limit_row(i, each) for i, each in enumerate(found.limits, 1)]))
    if found.denial is not None:
        output.write_line()
        output.write_line(found.denial.when, "bold")
        for line in found.denial.says:
            output.write_line(f"  {line}")
    for note in found.notes:
        output.write_line()
        output.write_line(note)


def limit_row(number: int, limit: ApplicableLimit) -> tuple[str, ...]:
    """Return the cells of a limit."""
    pace = "" if limit.one_every is None else format_pace(limit.one_every)
    if limit.unit == "concurrent-requests":
        pace = "a free slot"
    return str(number), limit.name, limit.owner, limit.text, f"{limit.at_once:,}", pace, limit.mode


def format_pace(seconds: float) -> str:
    """Write the time between two requests, below a minute in three digits: 1.8s is not 2s."""
    return f"{seconds:.3g}s" if 1 <= seconds < MINUTE else format_duration(seconds)
